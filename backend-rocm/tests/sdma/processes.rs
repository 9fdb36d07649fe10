//! Tests two processes that gather by SDMA engines, and the loss of one.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use peerlane_hal::{
    At, CopyEngine as _, Error as _, Fabric as _, Flag, Op, PeerMemory as _, Rank, Region as _,
    RemoteKey as _, Role, Ticket,
};
use peerlane_rocm::{Engine, EngineKind, Fabric, Key, Local, Options, Remote};
use peerlane_simulated_driver::{Other, hear, tell};

use crate::ranks::{Machine, open, pattern, soon};

const SHARD: u64 = 70_001;
/// Flag that announces the peer's bytes.
const ARRIVED: u64 = 0;
/// Flag that announces that the peer has read the bytes of this rank.
const READ: u64 = 1;

/// One of two ranks in different processes.
struct PairRank {
    engine: Engine,
    source: Local,
    output: Local,
    flags: Local,
    peer_output: Remote,
    peer_flags: Remote,
    rank: Rank,
    peer: Rank,
    _fabric: Fabric,
}

impl PairRank {
    /// Opens a rank. `exchange` sends bytes to the other rank and returns those that it sent.
    fn open(rank: Rank, exchange: &mut dyn FnMut(&[u8]) -> Vec<u8>) -> Self {
        let peer = Rank(1 - rank.0);
        let mut fabric = open(rank, 2, EngineKind::Sdma).unwrap();
        let own = fabric.address();
        let other = exchange(&own);
        fabric.connect(rank, &own, soon()).unwrap();
        fabric.connect(peer, &other, soon()).unwrap();
        let memory = fabric.memory();
        let source = memory.allocate(SHARD, Role::Data).unwrap();
        let output = memory.allocate(SHARD, Role::Data).unwrap();
        let flags = memory.allocate(16, Role::Flags).unwrap();
        let mut import = |region: &Local| {
            let key = exchange(&memory.export(region).unwrap().encode());
            memory.import(peer, &Key::decode(&key).unwrap(), soon()).unwrap()
        };
        let (peer_output, peer_flags) = (import(&output), import(&flags));
        let engine = fabric.engine(Default::default()).unwrap();
        Self { engine, source, output, flags, peer_output, peer_flags, rank, peer, _fabric: fabric }
    }

    fn put(&mut self, epoch: u64) -> Ticket {
        let dst = At { region: &self.peer_output, offset: 0 };
        let put = Op::Put { dst, src: At { region: &self.source, offset: 0 }, bytes: SHARD };
        let flag = Flag { region: &self.peer_flags, word: ARRIVED };
        // SAFETY: the regions outlive the engine; the flags order the accesses of both ranks.
        unsafe { self.engine.submit(&[put, Op::Signal { flag, value: epoch }]) }.unwrap()
    }

    fn confirm_read(&mut self, epoch: u64) -> Ticket {
        let flag = Flag { region: &self.peer_flags, word: READ };
        // SAFETY: as above.
        unsafe { self.engine.submit(&[Op::Signal { flag, value: epoch }]) }.unwrap()
    }

    fn wait(&mut self, word: u64, value: u64, ticket: Ticket) {
        let start = Instant::now();
        while self.engine.completed().unwrap() < ticket
            || self.flags.flags().unwrap()[word as usize].load(Ordering::Acquire) < value
        {
            assert!(start.elapsed() < Duration::from_secs(60), "rank {}: {value}", self.rank);
            self.engine.park(Duration::from_millis(1)).unwrap();
        }
    }

    fn gather(&mut self, epochs: u64) {
        let bytes = |rank: Rank, epoch| pattern(u64::from(rank.0) + 2 * epoch, SHARD);
        for epoch in 1..=epochs {
            // SAFETY: nobody else accesses these bytes of the region now.
            unsafe { self.source.upload(0, &bytes(self.rank, epoch)) }.unwrap();
            let ticket = self.put(epoch);
            self.wait(ARRIVED, epoch, ticket);
            let mut seen = vec![0; SHARD as usize];
            // SAFETY: nobody else accesses these bytes of the region now.
            unsafe { self.output.download(0, &mut seen) }.unwrap();
            assert!(seen == bytes(self.peer, epoch), "rank {}, epoch {epoch}", self.rank);
            let ticket = self.confirm_read(epoch);
            self.wait(READ, epoch, ticket);
        }
    }
}

const EPOCHS: u64 = 40;

/// Runs in the other process, where the device of the peer is hidden.
#[test]
#[ignore = "started by the other tests of this file"]
fn rank_with_a_hidden_peer() {
    let _machine = Machine::new();
    let peer = hear().expect("an address");
    let options = Options { device: 0, engine: EngineKind::Sdma, ..Options::default() };
    let mut fabric = Fabric::open_with(Rank(1), 2, options).unwrap();
    fabric.connect(Rank(0), &peer, soon()).unwrap();
    let error = fabric.engine(Default::default()).map(drop).unwrap_err();
    tell(format!("{}: {error}", error.kind()).as_bytes());
}

#[test]
fn a_hidden_peer_is_named() {
    let _machine = Machine::new();
    let fabric = open(Rank(0), 2, EngineKind::Sdma).unwrap();
    let hidden = [("ROCR_VISIBLE_DEVICES", "1")];
    let mut other = Other::start("processes::rank_with_a_hidden_peer", &hidden);
    other.tell(&fabric.address());
    let text = other.hear_text();
    let (begin, end) = (
        "unavailable: the device of rank 0 (",
        ") of device 0 (Simulated Instinct); add that device to \
         ROCR_VISIBLE_DEVICES, or use EngineKind::Streams",
    );
    assert!(text.starts_with(begin) && text.ends_with(end), "{text}");
    assert!(text.contains(") is not visible to the HSA runtime (/"), "{text}");
    other.end();
}

/// Runs in the other process.
#[test]
#[ignore = "started by the other tests of this file"]
fn other_rank() {
    let _machine = Machine::new();
    let mut rank = PairRank::open(Rank(1), &mut |bytes| {
        tell(bytes);
        hear().expect("the answer")
    });
    rank.gather(EPOCHS);
    tell(b"gathered");
    // Wait until the other process ends this one or kills it.
    let _ = hear();
}

fn pair() -> (PairRank, Other) {
    let mut other = Other::start("processes::other_rank", &[]);
    let rank = PairRank::open(Rank(0), &mut |bytes| {
        let heard = other.hear();
        other.tell(bytes);
        heard
    });
    (rank, other)
}

#[test]
fn processes_gather() {
    let mut machine = Machine::new();
    machine.set("JITTER_US", "300", "0");
    let (mut rank, mut other) = pair();
    rank.gather(EPOCHS);
    assert_eq!(other.hear_text(), "gathered");
    other.end();
}

#[test]
fn an_engine_completes_after_its_peer_was_killed() {
    let _machine = Machine::new();
    let (mut rank, mut other) = pair();
    rank.gather(EPOCHS);
    assert_eq!(other.hear_text(), "gathered");
    let before = rank.put(EPOCHS + 1);
    other.kill();
    // Memory of the killed process stays mapped here until its imports are dropped.
    let last = (0..20).map(|more| rank.put(EPOCHS + 2 + more)).last().unwrap();
    assert!(last > before);
    let start = Instant::now();
    rank.engine.release().unwrap();
    while rank.engine.completed().unwrap() < last {
        assert!(start.elapsed() < Duration::from_secs(20), "the released engine does not complete");
        rank.engine.park(Duration::from_millis(1)).unwrap();
    }
    drop(rank);
    assert!(start.elapsed() < Duration::from_secs(20));
}
