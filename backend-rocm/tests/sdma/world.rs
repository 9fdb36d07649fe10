//! The ranks, driven by the test's one thread.

#[path = "../../../hal/toolkit/tests/streams/mesh.rs"]
mod mesh;

use std::process::Command;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use mesh::connected;
use peerlane_hal::{
    At, CopyEngine as _, Deadline, Fabric as _, Flag, Op, PeerMemory as _, Rank, Region as _, Role,
    Ticket,
};
use peerlane_rocm::{Engine, EngineKind, Error, Fabric, Local, Options, Remote};
use peerlane_simulated_driver::{Driver, Rocm};

pub(crate) type OpOf<'a> = Op<'a, Local, Remote>;

/// Which release of ROCm the process has.
pub(crate) const RELEASE: &str = "PEERLANE_TEST_RELEASE";

/// How long anything may take on a loaded machine.
const SOON: Duration = Duration::from_secs(60);

pub(crate) fn soon() -> Deadline {
    Deadline::after(SOON)
}

/// The machine, for one test at a time: settings and log are the process's.
pub(crate) struct Machine {
    pub(crate) driver: Driver,
    changed: Vec<(&'static str, &'static str)>,
    _alone: MutexGuard<'static, ()>,
}

impl Machine {
    pub(crate) fn new() -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let release = std::env::var(RELEASE).unwrap_or_else(|_| "7.2".to_owned());
        let driver = Rocm::release(&release).install();
        driver.clear();
        driver.clear_log();
        Self { driver, changed: Vec::new(), _alone: alone }
    }

    /// Changes a setting until the end of the test.
    pub(crate) fn set(&mut self, setting: &'static str, value: &str, usual: &'static str) {
        self.driver.set(setting, value);
        self.changed.push((setting, usual));
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.driver.clear();
        for (setting, usual) in &self.changed {
            self.driver.set(setting, usual);
        }
    }
}

/// Runs one test by itself, with this release of ROCm.
pub(crate) fn in_another_process(test: &str, release: &str) {
    let mut other = Command::new(std::env::current_exe().unwrap());
    let other = other.args(["--exact", test, "--include-ignored"]).env(RELEASE, release).output();
    let other = other.unwrap();
    let text = String::from_utf8_lossy(&other.stdout);
    assert!(other.status.success() && text.contains("1 passed"), "{release}: {text}");
}

/// One rank, and what it can reach.
pub(crate) struct Member {
    pub(crate) me: usize,
    // In the order in which they go.
    pub(crate) engine: Engine,
    pub(crate) source: Local,
    pub(crate) output: Local,
    pub(crate) flags: Local,
    pub(crate) outputs: Vec<Remote>,
    pub(crate) peers_flags: Vec<Remote>,
    shard: u64,
    _fabric: Fabric,
}

pub(crate) fn open(rank: Rank, ranks: usize, engine: EngineKind) -> Result<Fabric, Error> {
    let options = Options { device: rank.0, engine, ..Options::default() };
    Fabric::open_with(rank, ranks, options)
}

/// As many ranks as kinds, each on the device with its number.
pub(crate) fn world_of(kinds: &[EngineKind], shard: u64) -> Vec<Member> {
    let count = kinds.len();
    let fabrics = connected(count, soon, |rank| open(rank, count, kinds[rank.index()])).unwrap();
    let regions = |bytes, role| -> Vec<Local> {
        fabrics.iter().map(|fabric| fabric.memory().allocate(bytes, role).unwrap()).collect()
    };
    let sources = regions(shard, Role::Data);
    let outputs = regions(shard * count as u64, Role::Data);
    let flags = regions(8 * count as u64, Role::Flags);
    let import = |me: &Fabric, regions: &[Local]| -> Vec<Remote> {
        let peers = Rank::all(count).zip(fabrics.iter().zip(regions));
        let peers = peers.map(|(peer, (owner, region))| {
            let key = owner.memory().export(region).unwrap();
            me.memory().import(peer, &key, soon()).unwrap()
        });
        peers.collect()
    };
    let reached: Vec<_> =
        fabrics.iter().map(|me| (import(me, &outputs), import(me, &flags))).collect();
    let members = fabrics.into_iter().zip(sources).zip(outputs).zip(flags).zip(reached).enumerate();
    let members =
        members.map(|(me, ((((mut fabric, source), output), flags), (outputs, peers_flags)))| {
            let engine = fabric.engine(Default::default()).unwrap();
            Member {
                me,
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
    members.collect()
}

pub(crate) fn world(count: usize, shard: u64) -> Vec<Member> {
    world_of(&vec![EngineKind::Sdma; count], shard)
}

/// Bytes that tell where they come from.
pub(crate) fn pattern(seed: u64, bytes: u64) -> Vec<u8> {
    // Of a length that no piece has, so that a piece at a wrong place shows.
    let block: Vec<u8> =
        (0..4093).map(|index: u64| (index * 7 + (index >> 6) + seed * 31 + 1) as u8).collect();
    let mut all = block.repeat(bytes.div_ceil(4093) as usize);
    all.truncate(bytes as usize);
    all
}

impl Member {
    pub(crate) fn put(&self, peer: usize) -> OpOf<'_> {
        let dst = At { region: &self.outputs[peer], offset: self.me as u64 * self.shard };
        Op::Put { dst, src: At { region: &self.source, offset: 0 }, bytes: self.shard }
    }

    pub(crate) fn signal(&self, peer: usize, value: u64) -> OpOf<'_> {
        let flag = Flag { region: &self.peers_flags[peer], word: self.me as u64 };
        Op::Signal { flag, value }
    }

    /// Submits ops that `make` names.
    pub(crate) fn submit(
        &mut self,
        make: impl for<'a> FnOnce(&'a Self) -> Vec<OpOf<'a>>,
    ) -> Result<Ticket, Error> {
        // The regions are other fields than the engine.
        let me: *const Self = self;
        // SAFETY: `make` looks at regions only, and the engine at nothing of `self`.
        let ops = make(unsafe { &*me });
        // SAFETY: the regions live as long as the engine, which is dropped first; tests touch them
        // behind tickets and flags only.
        unsafe { self.engine.submit(&ops) }
    }

    pub(crate) fn fill(&self, epoch: u64) {
        self.source.upload(0, &pattern(self.me as u64 + 10 * epoch, self.shard)).unwrap();
    }

    fn has_all(&self, epoch: u64) -> bool {
        let flags = self.flags.flags().expect("flags lie on the host");
        flags.iter().all(|flag| flag.load(Ordering::Acquire) >= epoch)
    }

    pub(crate) fn ensure_gathered(&self, epoch: u64) {
        let mut seen = vec![0; self.output.bytes() as usize];
        self.output.download(0, &mut seen).unwrap();
        for rank in 0..self.outputs.len() {
            let shard = self.shard as usize;
            let wanted = pattern(rank as u64 + 10 * epoch, self.shard);
            let came = seen[rank * shard..(rank + 1) * shard] == wanted;
            assert!(came, "rank {}, epoch {epoch}: shard of rank {rank}", self.me);
        }
    }
}

/// Drives all until they are done, or one fails.
pub(crate) fn drive(
    members: &mut [Member],
    mut done: impl FnMut(&mut Member) -> Result<bool, Error>,
) -> Result<(), Error> {
    let start = Instant::now();
    loop {
        let mut all = true;
        for member in &mut *members {
            all &= done(member)?;
        }
        if all {
            return Ok(());
        }
        assert!(start.elapsed() < SOON, "it does not end: {:?}", members[0].engine);
        members[0].engine.park(Duration::from_millis(1))?;
    }
}

/// One start of the direct plan, by hand.
pub(crate) fn gather(members: &mut [Member], epoch: u64) -> Result<(), Error> {
    let ranks = members.len();
    let mut tickets = Vec::new();
    for member in &mut *members {
        member.fill(epoch);
        tickets.push(member.submit(|me| {
            let peers = || (0..ranks).map(|step| (me.me + step) % ranks);
            peers()
                .map(|peer| me.put(peer))
                .chain(peers().map(|peer| me.signal(peer, epoch)))
                .collect()
        })?);
    }
    drive(members, |member| {
        let done = member.engine.completed()? >= tickets[member.me];
        Ok(done && member.has_all(epoch))
    })?;
    members.iter().for_each(|member| member.ensure_gathered(epoch));
    Ok(())
}
