//! Connects the two ranks of a measurement with engines, flags and buffers.

use std::mem::ManuallyDrop;

use peerlane::bootstrap::Bootstrap;
use peerlane::hal::{At, DynFabric, DynImport, DynRegion, Flag, Op, Region, Role, Space, Ticket};
use peerlane::{Deadline, Rank};

use super::options::{Options, PerfTest};
use super::report::PerfRow;
use crate::error::{Failure, Result};
use crate::ranks::bare_fabric::{BareEngine, BareFabric};
use crate::ranks::comm::Comm;
use crate::ranks::data::{TestData, overwrite};

/// The alignment of buffers in bytes, a page as in perftest.
const ALIGN_BYTES: u64 = 4096;
const WORD_BYTES: u64 = size_of::<u64>() as u64;

/// One of the two ranks of a measurement with its connection to the other rank.
pub(super) struct Pair<'a> {
    pub(super) options: &'a Options,
    pub(super) engines: Vec<BareEngine>,
    comm: Comm,
    seed: u64,
    /// The flags that the peer signals, one for each of its engines.
    flags: DynRegion,
    peer_flags: DynImport,
    signalled: u64,
    last: Ticket,
    sizes: u64,
    fabric: BareFabric,
}

/// The buffers of one message size, one to send from and one to receive into for each engine.
pub(super) struct Buffers {
    pub(super) bytes: u64,
    slot_bytes: u64,
    engines: usize,
    data: TestData,
    peer: DynImport,
    /// The region of this rank, leaked after a failure because copies may still be in flight.
    mine: ManuallyDrop<DynRegion>,
}

impl<'a> Pair<'a> {
    pub(super) fn open(
        options: &'a Options,
        comm: Comm,
        fabric: DynFabric,
        seed: u64,
    ) -> Result<Self> {
        let mut fabric = BareFabric::open(fabric, &comm)?;
        let engines = (0..options.engines).map(|_| fabric.engine()).collect::<Result<Vec<_>>>()?;
        let flags = fabric.allocate(u64::from(options.engines) * WORD_BYTES, Role::Flags)?;
        let peer_flags = other(fabric.import(&flags)?, comm.rank())?;
        let (signalled, last, sizes) = (0, Ticket::NONE, 0);
        Ok(Self { options, engines, comm, seed, flags, peer_flags, signalled, last, sizes, fabric })
    }

    /// Returns whether this rank measures, while the other rank answers.
    pub(super) fn is_measuring(&self) -> bool {
        self.comm.rank().0 == 0
    }

    /// Allocates the buffers of a size, fills them with test data, and overwrites the receive
    /// buffers with a known byte. Collective.
    pub(super) fn buffers(&mut self, bytes: u64) -> Result<Buffers> {
        let engines = self.engines.len();
        let slot_bytes = bytes.max(1).checked_next_multiple_of(ALIGN_BYTES);
        let buffer_bytes = slot_bytes.and_then(|bytes| bytes.checked_mul(2 * engines as u64));
        let (Some(slot_bytes), Some(buffer_bytes)) = (slot_bytes, buffer_bytes) else {
            return Err(Failure::usage(format!(
                "--bytes {bytes} with {engines} engines needs more memory than can be addressed"
            )));
        };
        let mine = self.fabric.allocate(buffer_bytes, Role::Data)?;
        if mine.space() != Space::Host {
            return Err(Failure::failed(
                "the backend allocated device memory, expected host memory, which perf measures",
            ));
        }
        let data = TestData { seed: self.seed, size: self.sizes, round: 0 };
        self.sizes += 1;
        let rank = self.comm.rank().index();
        for engine in 0..engines as u64 {
            let at = engine * slot_bytes;
            data.fill(rank * engines + engine as usize, host_bytes(&mine, at, bytes));
            overwrite(host_bytes(&mine, (engines as u64 + engine) * slot_bytes, bytes));
        }
        let peer = other(self.fabric.import(&mine)?, self.comm.rank())?;
        let mine = ManuallyDrop::new(mine);
        Ok(Buffers { bytes, slot_bytes, engines, data, peer, mine })
    }

    /// Reserves `count` consecutive flag values, equal on both ranks, and returns the first.
    pub(super) fn values(&mut self, count: u64) -> u64 {
        let first = self.signalled + 1;
        self.signalled += count;
        first
    }

    /// Signals the peer that an engine has finished, and waits for the signal's completion.
    pub(super) fn signal_done(&mut self, engine: usize, value: u64) -> Result<()> {
        let flag = Flag { region: &self.peer_flags, word: engine as u64 };
        let engine = &mut self.engines[engine];
        // SAFETY: the flags are dropped after the engines, and only this engine writes this flag.
        let ticket = unsafe { engine.submit(&[Op::Signal { flag, value }]) }?;
        engine.finish(ticket)
    }

    /// Puts the message of the first engine and then signals the peer.
    pub(super) fn send(&mut self, buffers: &Buffers, value: u64) -> Result<()> {
        let flag = Flag { region: &self.peer_flags, word: 0 };
        let ops = [buffers.message(PerfTest::Signal, 0), Op::Signal { flag, value }];
        let first = usize::from(buffers.bytes == 0);
        // SAFETY: the buffers outlive the last completion, or are leaked, and their content does not
        // change. The flags are dropped after the engines, and only this engine writes this flag.
        self.last = unsafe { self.engines[0].submit(&ops[first..]) }?;
        Ok(())
    }

    pub(super) fn wait_sent(&mut self) -> Result<()> {
        self.engines[0].finish(self.last)
    }

    pub(super) fn deadline(&self) -> Deadline {
        self.comm.deadline()
    }

    /// Waits until an engine of the peer has signalled this value.
    pub(super) fn wait(&mut self, engine: usize, value: u64) -> Result<()> {
        // Any engine can receive; engine 0 is the only one that waits here.
        self.engines[0].wait(Flag { region: &self.flags, word: engine as u64 }, value)
    }

    /// Compares the received data, and frees the buffers once both ranks are done. Collective.
    pub(super) fn finish(&self, buffers: Buffers, work: PerfTest) -> Result<()> {
        let found = buffers.check(work, self.comm.rank());
        if let Some((rank, text)) = self.comm.first_fault(found.err())? {
            let work = work.name();
            let text = format!("{work}: wrong data at rank {rank}: {text}");
            return Err(Failure::failed(text)
                .with_advice("this is a bug in Peerlane or a hardware fault: please report it"));
        }
        buffers.free();
        Ok(())
    }

    pub(super) fn row(&self, work: PerfTest, bytes: u64) -> PerfRow {
        PerfRow::new(work, self.fabric.backend(), bytes, self.options)
    }

    pub(super) fn close(self) -> Result<()> {
        let Self { comm, engines, peer_flags, .. } = self;
        drop((engines, peer_flags));
        comm.share("end", &())?;
        Ok(comm.leave(comm.deadline())?)
    }
}

impl Buffers {
    /// Returns the put or get that moves the message of an engine.
    pub(super) fn message(&self, work: PerfTest, engine: usize) -> Op<'_, DynRegion, DynImport> {
        let source = engine as u64 * self.slot_bytes;
        let target = (self.engines + engine) as u64 * self.slot_bytes;
        let (bytes, mine, peer) = (self.bytes, &*self.mine, &self.peer);
        match work {
            PerfTest::Put | PerfTest::Signal => Op::Put {
                dst: At { region: peer, offset: target },
                src: At { region: mine, offset: source },
                bytes,
            },
            PerfTest::Get => Op::Get {
                dst: At { region: mine, offset: target },
                src: At { region: peer, offset: source },
                bytes,
            },
        }
    }

    fn check(&self, work: PerfTest, rank: Rank) -> std::result::Result<(), String> {
        let (receives, engines) = match work {
            PerfTest::Put => (rank.0 == 1, self.engines),
            PerfTest::Get => (rank.0 == 0, self.engines),
            PerfTest::Signal => (true, 1),
        };
        let sender = 1 - rank.index();
        for engine in 0..if receives { engines } else { 0 } {
            let at = (self.engines + engine) as u64 * self.slot_bytes;
            let seen = host_bytes(&self.mine, at, self.bytes);
            let block = sender * self.engines + engine;
            self.data.check(block, seen).map_err(|wrong| wrong.to_string())?;
        }
        Ok(())
    }

    fn free(self) {
        let Self { peer, mine, .. } = self;
        drop(peer);
        drop(ManuallyDrop::into_inner(mine));
    }
}

/// Returns the bytes of a region that no op uses at this time.
#[expect(clippy::mut_from_ref, reason = "the bytes are the region's, not the handle's")]
fn host_bytes(region: &DynRegion, at: u64, bytes: u64) -> &mut [u8] {
    assert!(at + bytes <= region.bytes(), "buffers were made for all engines");
    let start = region.base().as_ptr().wrapping_add(at as usize);
    // SAFETY: the range lies in the region by the assertion, and `Pair::buffers` has checked that the
    // host can access it. The bytes are written before the peer imports the region and read after the
    // last signal.
    unsafe { std::slice::from_raw_parts_mut(start, bytes as usize) }
}

/// Selects the peer's value from the values of both ranks.
fn other<T>(mut both: Vec<T>, me: Rank) -> Result<T> {
    let at = 1_usize.checked_sub(me.index()).filter(|at| *at < both.len());
    let at = at.ok_or_else(|| {
        Failure::failed(format!("rank {me} cannot take part in perf, expected rank 0 or 1"))
    })?;
    Ok(both.swap_remove(at))
}
