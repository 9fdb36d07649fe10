//! Exhausts the limits of a process, and checks that its resources are freed.

use std::time::Instant;

use peerlane_hal::{ErrorKind, Fabric as _, PeerMemory, Role};
use peerlane_rdma::Error;
use peerlane_tests::{Failure, Outcome};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

use crate::pair::{ensure, pair, put, region, run, wanted};

/// How many rounds the test of leaks makes.
const ROUNDS_VARIABLE: &str = "PEERLANE_TEST_RDMA_ROUNDS";

/// Less memory may be locked than is to be registered.
pub(crate) fn memory() -> Outcome {
    const LOCKED_MAX: u64 = 256 << 10;
    let fabrics = pair(|options| options.receives = 8)?;
    let before = getrlimit(Resource::Memlock);
    let refused = |error: rustix::io::Errno| Failure::new(format!("change a limit: {error}"));
    setrlimit(Resource::Memlock, Rlimit { current: Some(LOCKED_MAX), ..before })
        .map_err(refused)?;
    let memory = fabrics[0].memory();
    // Who may lock without limit may not in this thread.
    let answer = std::thread::scope(|scope| {
        let allocate = || -> Result<Result<(), Error>, rustix::io::Errno> {
            let mut sets = capabilities(None)?;
            sets.effective.remove(CapabilitySet::IPC_LOCK);
            set_capabilities(None, sets)?;
            Ok(memory.allocate(4 * LOCKED_MAX, Role::Data).map(drop))
        };
        scope.spawn(allocate).join()
    });
    setrlimit(Resource::Memlock, before).map_err(refused)?;
    let answer = answer.map_err(|_| Failure::new("the thread panicked"))?;
    let text = wanted(ErrorKind::OutOfMemory, answer.map_err(refused)?)?;
    ensure(
        text.starts_with("cannot register 1048576 bytes with ") && text.contains("memlock"),
        text,
    )
}

/// Queue pairs are connected and disconnected; descriptors and memory stay where they were.
pub(crate) fn rounds() -> Outcome {
    const ROUNDS: usize = 300;
    let rounds = std::env::var(ROUNDS_VARIABLE).ok().and_then(|rounds| rounds.parse().ok());
    let rounds = rounds.unwrap_or(ROUNDS).max(4);
    let fabrics = pair(|options| options.requests_max = 8)?;
    let (_local, remote) = region(&fabrics, 4096, Role::Data)?;
    let source = fabrics[0].memory().allocate(4096, Role::Data)?;
    let mut before = (0, 0);
    let begun = Instant::now();
    for round in 0..rounds {
        let mut engine = fabrics[0].engine(Default::default())?;
        run(&mut engine, &[put(&remote, &source, 4096)])?;
        drop(engine);
        // By then whatever is kept for later is there.
        if round == rounds / 4 {
            before = (descriptors(), resident_kib());
        }
    }
    let after = (descriptors(), resident_kib());
    let rate = rounds as f64 / begun.elapsed().as_secs_f64();
    println!(
        "{rounds} rounds, {rate:.0} a second; {} then {} descriptors, {} then {} KiB",
        before.0, after.0, before.1, after.1
    );
    ensure(after.0 <= before.0, format!("{} descriptors became {}", before.0, after.0))?;
    // Not a byte a round, but for what the allocator rounds up.
    let room_kib = before.1 + 512;
    ensure(after.1 <= room_kib, format!("{} KiB became {} in {rounds} rounds", before.1, after.1))
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}

/// Memory of this process that is there.
fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.trim().trim_end_matches(" kB").parse().ok()).unwrap_or(0)
}
