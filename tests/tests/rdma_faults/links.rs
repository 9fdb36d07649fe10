//! Takes links down while a fabric is open.

use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use peerlane_hal::{ErrorKind, Fabric as _, PeerMemory, Region, Role};
use peerlane_rdma::Error;
use peerlane_tests::{Failure, Outcome};

use crate::pair::{PATIENCE, announce, ensure, impatient, late, pair, put, region, run, wanted};

/// The namespace of the first device, where the tests may change one.
pub(crate) fn first_node() -> Option<String> {
    let spaces = std::env::var("PEERLANE_TEST_RDMA_NAMESPACES").unwrap_or_default();
    spaces.split(',').next().filter(|space| !space.is_empty()).map(str::to_owned)
}

pub(crate) fn set_link(node: &str, state: &str) -> Outcome {
    call("ip", &["-n", node, "link", "set", "eth0", state])
}

pub(crate) fn tc(arguments: &[&str]) -> Outcome {
    call("tc", arguments)
}

fn call(program: &str, arguments: &[&str]) -> Outcome {
    let done = Command::new(program).args(arguments).status();
    ensure(
        done.is_ok_and(|status| status.success()),
        format!("{program} {} failed", arguments.join(" ")),
    )
}

/// The other end of a node's cable, on the bridge: without it packets are lost, while the node has its
/// address and its routes.
fn set_cable(node: u32, state: &str) -> Outcome {
    call("ip", &["link", "set", &format!("port{node}"), state])
}

/// The cable of the target is away for a moment, in the middle of puts: packets are sent again. Without
/// the cable of the origin, soft RoCE now and then gives up at once, since packets fail to leave.
pub(crate) fn flaps() -> Outcome {
    const BYTES: u64 = 1 << 20;
    const AWAY: Duration = Duration::from_millis(100);
    let fabrics = pair(|options| {
        (options.queue_pairs, options.stripe_bytes) = (2, 4096);
    })?;
    let (there, remote) = region(&fabrics, BYTES, Role::Data)?;
    let source = fabrics[0].memory().allocate(BYTES, Role::Data)?;
    // SAFETY: the region has as many bytes, and nothing is under way.
    unsafe { source.base().write_bytes(7, BYTES as usize) };
    let mut engine = fabrics[0].engine(Default::default())?;
    run(&mut engine, &[put(&remote, &source, 1)])?;
    let is_back = AtomicBool::new(false);
    let (puts, begun) = (AtomicU32::new(0), Instant::now());
    let longest = std::thread::scope(|scope| {
        let puts_all = scope.spawn(|| {
            let mut longest = Duration::ZERO;
            while !is_back.load(Ordering::Acquire) {
                let begun = Instant::now();
                run(&mut engine, &[put(&remote, &source, BYTES)])?;
                puts.fetch_add(1, Ordering::Release);
                longest = longest.max(begun.elapsed());
            }
            Ok::<_, Error>(longest)
        });
        while puts.load(Ordering::Acquire) == 0
            && begun.elapsed() < PATIENCE
            && !puts_all.is_finished()
        {
            std::thread::sleep(Duration::from_millis(1));
        }
        let down = set_cable(1, "down");
        std::thread::sleep(AWAY);
        let up = set_cable(1, "up");
        is_back.store(true, Ordering::Release);
        let longest = puts_all.join();
        down.and(up).map(|()| longest)
    })?;
    let longest = longest.map_err(|_| Failure::new("the thread that puts panicked"))??;
    ensure(longest >= AWAY, format!("no put met the missing cable: the longest took {longest:?}"))?;
    announce(&fabrics, &mut engine)?;
    // SAFETY: the signal behind the puts has come.
    let seen = unsafe { std::slice::from_raw_parts(there.base().as_ptr(), BYTES as usize) };
    ensure(seen.iter().all(|byte| *byte == 7), "bytes are lost")
}

/// The kernel tells of a lost cable once a second at most.
fn port_falls() -> Outcome {
    let state = "/sys/class/infiniband/rxe0/ports/1/state";
    let deadline = late();
    let read = || {
        std::fs::read_to_string(state).map_err(|error| Failure::new(format!("{state}: {error}")))
    };
    while read()?.contains("ACTIVE") {
        ensure(!deadline.has_passed(), format!("{state} stays ACTIVE"))?;
        std::thread::sleep(Duration::from_millis(10));
    }
    // The event follows the state.
    std::thread::sleep(Duration::from_millis(200));
    Ok(())
}

/// The peer cannot be reached any more, and the text says why.
pub(crate) fn stays_down() -> Outcome {
    let fabrics = pair(impatient)?;
    let (_there, remote) = region(&fabrics, 4096, Role::Data)?;
    let source = fabrics[0].memory().allocate(4096, Role::Data)?;
    let mut engine = fabrics[0].engine(Default::default())?;
    run(&mut engine, &[put(&remote, &source, 4096)])?;
    set_cable(0, "down")?;
    let is_down = port_falls();
    let answer = run(&mut engine, &[put(&remote, &source, 4096)]).map(drop);
    set_cable(0, "up")?;
    is_down?;
    let text = wanted(ErrorKind::PeerLost, answer)?;
    ensure(text.contains("rank 1") && text.ends_with("; port 1 of rxe0 is down"), text)
}
