//! Measures messages of a channel beside the same ops on a bare engine, in one run: a put with a signal that goes back and
//! forth, and many copies in one call beside one copy.
//!
//! `cargo run --release -p peerlane-collectives --example messages`; both ranks are threads of this process.

use std::time::{Duration, Instant};

use peerlane_collectives::bootstrap::{Bootstrap, in_process};
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{Channel, CopyRange, Group};
use peerlane_hal::{
    At, CopyEngine, Deadline, DynEngine, DynFabric, DynImport, DynRegion, EngineRequirements,
    Fabric, Flag, Op, PeerMemory, Rank, Region, RemoteKey, Role,
};
use peerlane_host as host;

const ROUNDS: usize = 15;
const SOON: Duration = Duration::from_secs(20);
const COPIES: usize = 1000;
const COPY_BYTES: usize = 4096;

/// An engine with memory of both ranks, without a group.
struct Bare {
    engine: DynEngine,
    data: DynRegion,
    flags: DynRegion,
    peer_data: DynImport,
    peer_flags: DynImport,
    count: u64,
    _fabric: DynFabric,
}

impl Bare {
    fn open(bootstrap: &impl Bootstrap, bytes: u64) -> Result<Self, Error> {
        let (me, deadline) = (bootstrap.rank(), Deadline::after(SOON));
        let peer = Rank(1 - me.0);
        let mut fabric = DynFabric::new(host::Fabric::open(me, 2)?);
        let addresses = bootstrap.exchange("addresses", &fabric.address(), deadline)?;
        for (rank, address) in Rank::all(2).zip(&addresses) {
            fabric.connect(rank, address, deadline)?;
        }
        let data = fabric.memory().allocate(bytes, Role::Data)?;
        let flags = fabric.memory().allocate(64, Role::Flags)?;
        let key = |region| fabric.memory().export(region).map(|key| key.encode());
        let data_keys = bootstrap.exchange("data", &key(&data)?, deadline)?;
        let flag_keys = bootstrap.exchange("flags", &key(&flags)?, deadline)?;
        let import = |keys: &[Vec<u8>]| {
            let key = RemoteKey::decode(&keys[peer.index()]).expect("a key of this program");
            fabric.memory().import(peer, &key, deadline)
        };
        let (peer_data, peer_flags) = (import(&data_keys)?, import(&flag_keys)?);
        let requirements = EngineRequirements { streams: false, ..Default::default() };
        let engine = fabric.engine(requirements)?;
        Ok(Self { engine, data, flags, peer_data, peer_flags, count: 0, _fabric: fabric })
    }

    fn send(&mut self, bytes: u64) -> Result<(), Error> {
        let put = Op::Put {
            dst: At { region: &self.peer_data, offset: self.data.bytes() / 2 },
            src: At { region: &self.data, offset: 0 },
            bytes,
        };
        let flag = Flag { region: &self.peer_flags, word: 0 };
        let signal = Op::Signal { flag, value: self.count };
        // SAFETY: the regions outlive the measurement, and both ranks take turns.
        unsafe { self.engine.submit(&[put, signal]) }?;
        Ok(())
    }

    fn wait(&mut self) -> Result<(), Error> {
        let flag = Flag { region: &self.flags, word: 0 };
        // SAFETY: as in `send`; no other engine waits for this flag.
        let ticket =
            unsafe { self.engine.submit(&[Op::Wait { flag, value: self.count, reset: false }]) }?;
        let deadline = Deadline::after(SOON);
        while self.engine.completed()? < ticket {
            assert!(!deadline.has_passed(), "the other rank has not signalled within {SOON:?}");
            self.engine.park(deadline.remaining())?;
        }
        Ok(())
    }

    fn turn(&mut self, first: bool, bytes: u64) -> Result<(), Error> {
        self.count += 1;
        if first {
            self.send(bytes)?;
            self.wait()
        } else {
            self.wait()?;
            self.send(bytes)
        }
    }

    /// The engine moves long copies only while it is polled.
    fn finish(&mut self) -> Result<(), Error> {
        // SAFETY: no op accesses memory.
        let ticket = unsafe { self.engine.submit(&[]) }?;
        while self.engine.completed()? < ticket {
            self.engine.park(SOON)?;
        }
        Ok(())
    }
}

fn turn(channel: &mut Channel<u8>, first: bool, bytes: usize, half: usize) -> Result<(), Error> {
    let peer = Rank(u32::from(first));
    if first {
        channel.put_signal(peer, 0..bytes, half, 0)?;
        channel.wait(peer, 0, SOON).map(drop)
    } else {
        channel.wait(peer, 0, SOON)?;
        channel.put_signal(peer, 0..bytes, half, 0).map(drop)
    }
}

fn main() {
    let half = COPIES * COPY_BYTES * 2;
    let rows = in_process::run(2, |bootstrap| {
        let mut bare = Bare::open(&bootstrap, 2 * half as u64)?;
        let first = bootstrap.rank() == Rank(0);
        let fabric = host::Fabric::open(bootstrap.rank(), 2)?;
        let mut group = Group::open(bootstrap, fabric)?;
        let window = group.window::<u8>(2 * half)?;
        let mut channel = group.channel(&window, 1)?;
        channel.write(0, &vec![1; half])?;
        let mut rows = Vec::new();
        for (bytes, turns) in [(8, 5000), (1 << 20, 50)] {
            let mut times = [Vec::new(), Vec::new()];
            for _ in 0..ROUNDS {
                group.barrier()?;
                times[0].push(timed(turns, || bare.turn(first, bytes as u64))?);
                bare.finish()?;
                group.barrier()?;
                times[1].push(timed(turns, || turn(&mut channel, first, bytes, half))?);
            }
            rows.push((
                format!("put and signal, {bytes} bytes, bare and channel"),
                times.map(median),
            ));
        }
        let (all, peer) = (COPIES * COPY_BYTES, Rank(u32::from(first)));
        // The order is reversed on one side, so no two copies can be joined.
        let copy = |i: usize| CopyRange {
            from: (COPIES - 1 - i) * COPY_BYTES,
            to: half + i * COPY_BYTES,
            len: COPY_BYTES,
        };
        let copies: Vec<_> = (0..COPIES).map(copy).collect();
        let mut times = [Vec::new(), Vec::new()];
        for _ in 0..ROUNDS {
            group.barrier()?;
            if first {
                times[0].push(timed(10, || {
                    channel.put(peer, 0..all, half)?;
                    channel.flush(SOON)
                })?);
                times[1].push(timed(10, || {
                    channel.puts(peer, &copies)?;
                    channel.flush(SOON)
                })?);
            }
            group.barrier()?;
        }
        if first {
            let text = format!("{COPIES} copies of {COPY_BYTES} bytes, as one copy and as a batch");
            rows.push((text, times.map(median)));
        }
        group.barrier()?;
        drop((channel, window));
        group.close()?;
        Ok(rows)
    });
    for (text, [one, other]) in &rows.expect("both ranks succeed")[0] {
        println!("{text}: {one:?}, {other:?} ({:.3})", other.as_secs_f64() / one.as_secs_f64());
    }
}

fn timed(turns: u32, mut turn: impl FnMut() -> Result<(), Error>) -> Result<Duration, Error> {
    let begun = Instant::now();
    (0..turns).try_for_each(|_| turn())?;
    Ok(begun.elapsed() / turns)
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}
