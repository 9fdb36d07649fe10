//! Measures the copy size from which streaming stores are faster than stores through the cache.
//!
//! Two ranks, one thread each, put into each other's memory at the same time, through the cache and with
//! streaming stores, size by size in turn. Prints the table of docs/perf/host-copy.md, from which the default
//! of the backend is taken.

use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

use peerlane_hal::{At, CopyEngine, Deadline, Fabric as _, Op, PeerMemory, Rank, RemoteKey, Role};
use peerlane_host as host;
use peerlane_host::{Fabric, Options};

const RANKS: usize = 2;
const BYTES: [u64; 10] = [
    256 << 10,
    512 << 10,
    1 << 20,
    2 << 20,
    4 << 20,
    8 << 20,
    16 << 20,
    32 << 20,
    64 << 20,
    256 << 20,
];
const CONNECT_TIMEOUT: Duration = Duration::from_secs(60);

struct Comm {
    barrier: Barrier,
    slots: Mutex<Vec<Vec<u8>>>,
}

impl Comm {
    fn exchange(&self, me: Rank, mine: Vec<u8>) -> Vec<Vec<u8>> {
        self.slots.lock().expect("no rank panics")[me.index()] = mine;
        self.barrier.wait();
        let all = self.slots.lock().expect("no rank panics").clone();
        self.barrier.wait();
        all
    }
}

/// Returns the median time of a put while both ranks put at the same time.
fn measure(comm: &Comm, me: Rank, bytes: u64, streams: bool) -> Result<Duration, host::Error> {
    let deadline = Deadline::after(CONNECT_TIMEOUT);
    let streaming_bytes_min = Some(if streams { 1 } else { u64::MAX });
    let options = Options { streaming_bytes_min, ..Options::default() };
    let mut fabric = Fabric::open_with(me, RANKS, options)?;
    for (peer, address) in Rank::all(RANKS).zip(comm.exchange(me, fabric.address())) {
        fabric.connect(peer, &address, deadline)?;
    }
    let memory = fabric.memory();
    let (input, output) =
        (memory.allocate(bytes, Role::Data)?, memory.allocate(bytes, Role::Data)?);
    let keys = comm.exchange(me, memory.export(&output)?.encode());
    let peer = Rank(1 - me.0);
    let remote = memory.import(peer, &host::Key::decode(&keys[peer.index()])?, deadline)?;
    let mut engine = fabric.engine(Default::default())?;
    let iterations = (2_u64 << 30).div_ceil(bytes).clamp(9, 999);
    let mut times = Vec::new();
    for _ in 0..iterations {
        comm.barrier.wait();
        let start = Instant::now();
        let (dst, src) = (At { region: &remote, offset: 0 }, At { region: &input, offset: 0 });
        // SAFETY: the regions live until the barrier behind the loop, and only this rank writes to
        // the peer's output.
        let ticket = unsafe { engine.submit(&[Op::Put { dst, src, bytes }]) }?;
        while engine.completed()? < ticket {}
        times.push(start.elapsed());
    }
    comm.barrier.wait();
    times.sort_unstable();
    Ok(times[times.len() / 2])
}

fn main() {
    let comm = Comm { barrier: Barrier::new(RANKS), slots: Mutex::new(vec![vec![]; RANKS]) };
    println!("| bytes of a put | through the cache µs | streaming µs | ratio |");
    println!("| --- | --- | --- | --- |");
    for bytes in BYTES {
        let both = |me: Rank| {
            let time = |streams| measure(&comm, me, bytes, streams).expect("memory to copy");
            [time(false), time(true)].map(|time| time.as_secs_f64() * 1e6)
        };
        let [cached, streamed] = std::thread::scope(|scope| {
            scope.spawn(|| both(Rank(1)));
            both(Rank(0))
        });
        println!("| {bytes} | {cached:.1} | {streamed:.1} | {:.2} |", cached / streamed);
    }
}
