//! Ranks with SDMA engines, driven by the one thread of a test.

use std::process::Command;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use peerlane_hal::{
    At, CopyEngine as _, Deadline, Fabric as _, Flag, Op, PeerMemory as _, Rank, Region as _, Role,
    Ticket,
};
use peerlane_rocm::{Engine, EngineKind, Error, Fabric, Local, Options, Remote};
use peerlane_simulated_driver::{Driver, Rocm, connected};

pub(crate) type RankOp<'a> = Op<'a, Local, Remote>;

/// Environment variable with the release of ROCm that the process emulates.
pub(crate) const RELEASE: &str = "PEERLANE_TEST_RELEASE";

/// Timeout of every operation, long enough for a loaded machine.
const TIMEOUT: Duration = Duration::from_secs(60);

pub(crate) fn soon() -> Deadline {
    Deadline::after(TIMEOUT)
}

/// The simulated machine. One test at a time uses it, because settings and log belong to the process.
pub(crate) struct Machine {
    pub(crate) driver: Driver,
    changed: Vec<(&'static str, &'static str)>,
    _lock: MutexGuard<'static, ()>,
}

impl Machine {
    pub(crate) fn new() -> Self {
        static LOCK: Mutex<()> = Mutex::new(());
        let lock = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
        let release = std::env::var(RELEASE).unwrap_or_else(|_| "7.2".to_owned());
        let driver = Rocm::release(&release).install();
        driver.clear();
        driver.clear_log();
        Self { driver, changed: Vec::new(), _lock: lock }
    }

    /// Changes a setting until the end of the test.
    pub(crate) fn set(&mut self, setting: &'static str, value: &str, default: &'static str) {
        self.driver.set(setting, value);
        self.changed.push((setting, default));
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.driver.clear();
        for (setting, default) in &self.changed {
            self.driver.set(setting, default);
        }
    }
}

/// Runs one test in a process of its own, with this release of ROCm.
pub(crate) fn in_another_process(test: &str, release: &str) {
    let mut other = Command::new(std::env::current_exe().unwrap());
    let other = other.args(["--exact", test, "--include-ignored"]).env(RELEASE, release).output();
    let other = other.unwrap();
    let text = String::from_utf8_lossy(&other.stdout);
    assert!(other.status.success() && text.contains("1 passed"), "{release}: {text}");
}

/// A rank with its engine, its regions and the imported regions of its peers.
pub(crate) struct SdmaRank {
    pub(crate) rank: usize,
    // Fields are dropped in this order; the engine comes first.
    pub(crate) engine: Engine,
    pub(crate) source: Local,
    pub(crate) output: Local,
    pub(crate) flags: Local,
    pub(crate) outputs: Vec<Remote>,
    pub(crate) peers_flags: Vec<Remote>,
    shard: u64,
    _fabric: Fabric,
}

/// Opens the fabric of a rank on the device with its number.
pub(crate) fn open(rank: Rank, ranks: usize, engine: EngineKind) -> Result<Fabric, Error> {
    let options = Options { device: rank.0, engine, ..Options::default() };
    Fabric::open_with(rank, ranks, options)
}

/// Opens one rank for each kind, each on the device with its number.
pub(crate) fn open_ranks_of(kinds: &[EngineKind], shard: u64) -> Vec<SdmaRank> {
    let count = kinds.len();
    let fabrics = connected(count, soon, |rank| open(rank, count, kinds[rank.index()])).unwrap();
    let regions = |bytes, role| -> Vec<Local> {
        fabrics.iter().map(|fabric| fabric.memory().allocate(bytes, role).unwrap()).collect()
    };
    let sources = regions(shard, Role::Data);
    let outputs = regions(shard * count as u64, Role::Data);
    let flags = regions(8 * count as u64, Role::Flags);
    let import = |fabric: &Fabric, regions: &[Local]| -> Vec<Remote> {
        let peers = Rank::all(count).zip(fabrics.iter().zip(regions));
        let peers = peers.map(|(peer, (owner, region))| {
            let key = owner.memory().export(region).unwrap();
            fabric.memory().import(peer, &key, soon()).unwrap()
        });
        peers.collect()
    };
    let imported: Vec<_> =
        fabrics.iter().map(|fabric| (import(fabric, &outputs), import(fabric, &flags))).collect();
    let ranks = fabrics.into_iter().zip(sources).zip(outputs).zip(flags).zip(imported).enumerate();
    let ranks =
        ranks.map(|(rank, ((((fabric, source), output), flags), (outputs, peers_flags)))| {
            let engine = fabric.engine(Default::default()).unwrap();
            SdmaRank {
                rank,
                engine,
                source,
                output,
                flags,
                outputs,
                peers_flags,
                shard,
                _fabric: fabric,
            }
        });
    ranks.collect()
}

/// Opens ranks with SDMA engines.
pub(crate) fn open_ranks(count: usize, shard: u64) -> Vec<SdmaRank> {
    open_ranks_of(&vec![EngineKind::Sdma; count], shard)
}

/// Returns bytes that depend on their index and the seed.
pub(crate) fn pattern(seed: u64, bytes: u64) -> Vec<u8> {
    // No piece has this length, so a piece at a wrong offset is detected.
    let block: Vec<u8> =
        (0..4093).map(|index: u64| (index * 7 + (index >> 6) + seed * 31 + 1) as u8).collect();
    let mut all = block.repeat(bytes.div_ceil(4093) as usize);
    all.truncate(bytes as usize);
    all
}

impl SdmaRank {
    pub(crate) fn put(&self, peer: usize) -> RankOp<'_> {
        let dst = At { region: &self.outputs[peer], offset: self.rank as u64 * self.shard };
        Op::Put { dst, src: At { region: &self.source, offset: 0 }, bytes: self.shard }
    }

    pub(crate) fn signal(&self, peer: usize, value: u64) -> RankOp<'_> {
        let flag = Flag { region: &self.peers_flags[peer], word: self.rank as u64 };
        Op::Signal { flag, value }
    }

    /// Submits the ops that `make` returns.
    pub(crate) fn submit(
        &mut self,
        make: impl for<'a> FnOnce(&'a Self) -> Vec<RankOp<'a>>,
    ) -> Result<Ticket, Error> {
        // The ops borrow regions, which are other fields than the engine.
        let own: *const Self = self;
        // SAFETY: `make` reads only the regions, and the engine accesses no field of `self`.
        let ops = make(unsafe { &*own });
        // SAFETY: the regions outlive the engine, which is dropped first; tests access them only
        // after tickets and flags.
        unsafe { self.engine.submit(&ops) }
    }

    /// Writes the shard of an epoch.
    pub(crate) fn fill(&self, epoch: u64) {
        // SAFETY: nobody else accesses these bytes of the region now.
        unsafe { self.source.upload(0, &pattern(self.rank as u64 + 10 * epoch, self.shard)) }
            .unwrap();
    }

    /// Returns the value that a rank has signalled last.
    pub(crate) fn seen_from(&self, rank: usize) -> u64 {
        let flags = self.flags.flags().expect("flags lie on the host");
        flags[rank].load(Ordering::Acquire)
    }

    /// Returns whether all flags have reached the epoch.
    fn has_all(&self, epoch: u64) -> bool {
        let flags = self.flags.flags().expect("flags lie on the host");
        flags.iter().all(|flag| flag.load(Ordering::Acquire) >= epoch)
    }

    /// Checks that the output holds the shards of an epoch.
    pub(crate) fn ensure_gathered(&self, epoch: u64) {
        let mut seen = vec![0; self.output.bytes() as usize];
        // SAFETY: nobody else accesses these bytes of the region now.
        unsafe { self.output.download(0, &mut seen) }.unwrap();
        for rank in 0..self.outputs.len() {
            let shard = self.shard as usize;
            let expected = pattern(rank as u64 + 10 * epoch, self.shard);
            let is_equal = seen[rank * shard..(rank + 1) * shard] == expected;
            assert!(is_equal, "rank {}, epoch {epoch}: shard of rank {rank}", self.rank);
        }
    }
}

/// Drives all ranks until `done` holds for each, or returns the first error.
pub(crate) fn drive(
    ranks: &mut [SdmaRank],
    mut done: impl FnMut(&mut SdmaRank) -> Result<bool, Error>,
) -> Result<(), Error> {
    let start = Instant::now();
    loop {
        let mut all = true;
        for rank in &mut *ranks {
            all &= done(rank)?;
        }
        if all {
            return Ok(());
        }
        assert!(start.elapsed() < TIMEOUT, "the ranks do not complete: {:?}", ranks[0].engine);
        ranks[0].engine.park(Duration::from_millis(1))?;
    }
}

/// Runs one all-gather with a put and a signal to each rank.
pub(crate) fn gather(ranks: &mut [SdmaRank], epoch: u64) -> Result<(), Error> {
    let count = ranks.len();
    let mut tickets = Vec::new();
    for rank in &mut *ranks {
        rank.fill(epoch);
        tickets.push(rank.submit(|own| {
            let peers = || (0..count).map(|step| (own.rank + step) % count);
            peers()
                .map(|peer| own.put(peer))
                .chain(peers().map(|peer| own.signal(peer, epoch)))
                .collect()
        })?);
    }
    drive(ranks, |rank| {
        let done = rank.engine.completed()? >= tickets[rank.rank];
        Ok(done && rank.has_all(epoch))
    })?;
    ranks.iter().for_each(|rank| rank.ensure_gathered(epoch));
    Ok(())
}
