//! Implements a copy engine over the SDMA engines of AMD GPUs, which the host polls and drives.
//!
//! | contract | HSA |
//! | --- | --- |
//! | put, get | `hsa_amd_memory_async_copy_on_engine`, in pieces of at most 128 MiB, large copies over all engines of the link; `hsa_amd_memory_async_copy` if the runtime does not let the caller select an engine |
//! | signal | a flag that this process maps is stored by the host once all ops before it are complete; any other by a copy of 8 bytes that depends on all ops before it |
//! | signal to the rank itself | the same, once all ops before it are complete at all peers |
//! | ticket, `completed` | the completion signals of the copies, which the host reads |
//! | `release` | drops what was not submitted to engines; a copy in flight does not depend on peers |
//!
//! Waits cannot be queued. An engine can only wait for a signal to become 0, while a wait needs a
//! flag to be *at least* a value, written by any peer, the rank's other fabrics, the host or a NIC.
//! [`Caps::queued_wait`] is therefore false, flags lie where the host can read them, and no stream
//! of the caller can be forked from. Signals that processes share (`hsa_amd_ipc_signal_create`) do
//! not help: they count down by one and hold no value.
//!
//! | file | contents |
//! | --- | --- |
//! | `mod.rs` | the engine: validation of ops, parking, errors |
//! | `select.rs` | selection of the SDMA engines of each link |
//! | `queue.rs` | order of ops and submission to engines |
//! | `pending.rs` | ops and copies that are not complete, completion signals |
//! | `pieces.rs` | division of copies into pieces |
//! | `runtime.rs` | interface of the runtime, and an implementation for tests |
//! | `hsa.rs` | implementation over the HSA runtime |

mod hsa;
mod pending;
mod pieces;
mod queue;
mod runtime;
mod select;
mod set;

use std::ptr::NonNull;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use peerlane_hal::{At, Caps, Deadline, Flag, Op, Rank, Ticket};
use peerlane_toolkit::Fault;
use peerlane_toolkit::device::DeviceContext as _;
use peerlane_toolkit::peers::ConnectedPeer;
use peerlane_toolkit::{EngineRegion, EngineState, PeerRegion, PeerSet, TimedParker};

use self::hsa::HsaSdma;
use self::pending::{Command, FlagAddress};
use self::queue::{CopyQueue, PeerCommand};
use self::runtime::{Direction, SdmaRuntime, Span};
use self::select::{LinkClass, PeerEngines, agent_of_peer, engines_for_peer};
use crate::device::{Agent, Context, agents, find_agent};
use crate::error::Error;
use crate::sys::Hsa;

pub(crate) use self::select::striped_rate;

const SLICE_OPS_MAX: usize = 256;
const QUEUE_OPS: usize = 1024;
/// The time that a parked rank spins before it sleeps.
///
/// No event wakes it when a flag changes, so it spins longer and sleeps shorter than a rank whose
/// device waits.
const SPIN: Duration = Duration::from_micros(100);
const SLEEP_MAX: Duration = Duration::from_micros(50);
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(crate) struct SdmaQueue<R: SdmaRuntime = HsaSdma> {
    queue: CopyQueue<R>,
    state: EngineState<R::Error>,
    peer_set: PeerSet,
    commands: Vec<PeerCommand>,
    parker: TimedParker,
}

/// The SDMA engines that make the copies to and from a peer, for reports.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SdmaEngines {
    /// The rank of the peer, or this rank itself.
    pub peer: Rank,
    /// The SDMA engines of puts and the rule that selected them, such as
    /// `SDMA 4+5 (of those idle)`.
    pub put: String,
    /// The SDMA engines of gets and the rule that selected them.
    pub get: String,
}

/// The capabilities of every queue.
pub(crate) const CAPS: Caps = Caps {
    gets: true,
    polled: true,
    slice_ops_max: SLICE_OPS_MAX,
    piece_bytes_max: pieces::PIECE_BYTES_MAX,
    ..Caps::new("sdma")
};

/// Returns whether the HSA runtime is installed, which selects SDMA engines.
pub(crate) fn has_sdma() -> bool {
    Hsa::load().is_ok()
}

impl SdmaQueue {
    pub(crate) fn open(
        context: &Context,
        rank: Rank,
        peers: &[ConnectedPeer],
    ) -> Result<Self, Error> {
        let hsa = Hsa::load()?;
        let all = agents(hsa)?;
        let own = find_agent(&all, &context.info)?;
        let ranks = peers.iter().map(|peer| peer.peer.index() + 1).max().unwrap_or(0);
        let mut found: Vec<Option<(Agent, LinkClass)>> = vec![None; ranks];
        for peer in peers {
            found[peer.peer.index()] = Some(agent_of_peer(hsa, context, &all, &own, peer)?);
        }
        let handles = found.iter().map(|peer| peer.as_ref().map(|(agent, _)| agent.handle));
        let label: &Arc<str> = context.label();
        let runtime = HsaSdma::open(hsa, label, &all, &own, handles.collect())?;
        let engines = (0..ranks).map(|index| engines_for_peer(hsa, &found, &own, index));
        Ok(Self::over(runtime, rank, engines.collect()))
    }
}

impl<R: SdmaRuntime> SdmaQueue<R> {
    fn over(runtime: R, rank: Rank, engines: Vec<Option<PeerEngines>>) -> Self {
        let peers = engines.iter().enumerate().filter(|(_, engines)| engines.is_some());
        let peer_set = PeerSet::new(rank, peers.map(|(index, _)| Rank::at(index)));
        Self {
            queue: CopyQueue::new(runtime, rank.index(), engines, QUEUE_OPS, CAPS.piece_bytes_max),
            state: EngineState::new(CAPS),
            peer_set,
            commands: Vec::with_capacity(SLICE_OPS_MAX),
            parker: TimedParker::new(SPIN, SLEEP_MAX),
        }
    }

    pub(crate) fn engines(&self) -> Vec<SdmaEngines> {
        let engines = self.queue.engines().map(|(peer, engines)| SdmaEngines {
            peer: Rank::at(peer),
            put: engines.put.to_string(),
            get: engines.get.to_string(),
        });
        engines.collect()
    }

    fn resolve<L: EngineRegion, P: PeerRegion>(
        &mut self,
        ops: &[Op<'_, L, P>],
    ) -> Result<(), Fault> {
        self.commands.clear();
        for op in ops {
            let (peer, command) = match *op {
                Op::Put { dst, src, bytes } => {
                    let peer = self.peer_set.peer_of(dst.region)?;
                    (peer, copy(Direction::Put, address_at(dst), address_at(src), bytes))
                }
                Op::Get { dst, src, bytes } => {
                    let peer = self.peer_set.peer_of(src.region)?;
                    (peer, copy(Direction::Get, address_at(dst), address_at(src), bytes))
                }
                Op::Signal { flag: Flag { region, word }, value } => {
                    let host = region.host_flag_address(word).map(|address| address as *mut _);
                    let flag = match host.and_then(NonNull::new) {
                        Some(address) => FlagAddress::Host(address),
                        None => FlagAddress::Device(region.flag_address(word)),
                    };
                    (self.peer_set.peer_of(region)?, Some(Command::Signal { flag, value }))
                }
                Op::PutRows { .. } | Op::GetRows { .. } | Op::Wait { .. } | Op::Reduce { .. } => {
                    return Err(Fault::refused_op(op));
                }
                #[cfg(not(peerlane_workspace))]
                _ => return Err(Fault::refused_op(op)),
            };

            let command = command.map(|command| PeerCommand { peer: peer.index(), command });
            self.commands.extend(command);
        }
        Ok(())
    }

    fn progress(&mut self) -> Result<(), R::Error> {
        // SAFETY: the contract of `submit` keeps every pushed command valid until its ticket
        // completes.
        let progressed = unsafe { self.queue.progress() };
        if self.state.keep(progressed)? {
            self.parker.busy();
        }
        Ok(())
    }

    pub(crate) fn caps(&self) -> &Caps {
        self.state.caps()
    }

    /// Submits a slice of ops and returns its ticket.
    ///
    /// # Safety
    /// The requirements are those of [`CopyEngine::submit`](peerlane_hal::CopyEngine::submit).
    pub(crate) unsafe fn submit<L: EngineRegion, P: PeerRegion>(
        &mut self,
        ops: &[Op<'_, L, P>],
    ) -> Result<Ticket, R::Error> {
        self.state.check_slice(ops)?;
        self.queue.tickets().check_room(self.queue.len(), ops.len())?;
        self.resolve(ops)?;
        let ticket = self.queue.push(&self.commands);
        self.parker.busy();
        self.progress()?;
        Ok(ticket)
    }

    pub(crate) fn completed(&mut self) -> Result<Ticket, R::Error> {
        self.state.check()?;
        self.progress()?;
        Ok(self.queue.tickets().completed())
    }

    pub(crate) fn park(&mut self, limit: Duration) -> Result<(), R::Error> {
        self.state.check()?;
        let queue = &self.queue;
        self.parker.park(limit, || queue.has_completions());
        Ok(())
    }

    pub(crate) fn waker(&self) -> Waker {
        self.parker.waker()
    }

    pub(crate) fn release(&mut self) -> Result<(), R::Error> {
        self.state.release();
        // A poisoned engine is released too: copies that depend on a failed one occupy an SDMA
        // engine.
        self.queue.release();
        self.state.check()
    }
}

impl<R: SdmaRuntime> Drop for SdmaQueue<R> {
    fn drop(&mut self) {
        self.queue.close(Deadline::after(CLOSE_TIMEOUT));
    }
}

fn copy(direction: Direction, dst: u64, src: u64, bytes: u64) -> Option<Command> {
    (bytes > 0).then_some(Command::Copy { direction, span: Span { dst, src, bytes } })
}

fn address_at<P: EngineRegion>(at: At<'_, P>) -> u64 {
    at.region.address_at(at.offset)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Instant;

    use peerlane_hal::Role;
    use peerlane_toolkit::RegionBounds;
    use peerlane_toolkit::device::DevicePtr;

    use super::runtime::tests::{Failure, TestRuntime};
    use super::select::{SelectedBy, Selection};
    use super::set::SdmaSet;
    use super::*;

    /// A test buffer, to be declared before the engine, which waits for its copies when it is
    /// dropped.
    #[derive(Debug)]
    struct Bytes {
        words: Vec<AtomicU64>,
        role: Role,
        on_host: bool,
        peer: Rank,
    }

    impl Bytes {
        fn new(bytes: usize, role: Role, peer: u32) -> Self {
            let words = (0..bytes.div_ceil(8)).map(|_| AtomicU64::new(0)).collect();
            Self { words, role, on_host: role == Role::Flags, peer: Rank(peer) }
        }

        fn data(bytes: usize, peer: u32) -> Self {
            Self::new(bytes, Role::Data, peer)
        }

        fn word(&self, index: usize) -> u64 {
            self.words[index].load(Ordering::Acquire)
        }
    }

    // SAFETY: the length is that of the words, which are aligned to 8 bytes.
    unsafe impl RegionBounds for Bytes {
        fn bytes(&self) -> u64 {
            self.words.len() as u64 * 8
        }

        fn role(&self) -> Role {
            self.role
        }
    }

    // SAFETY: the address is that of the words, which this value owns.
    unsafe impl EngineRegion for Bytes {
        fn address(&self) -> DevicePtr {
            self.words.as_ptr() as DevicePtr
        }

        fn host_address(&self) -> Option<u64> {
            self.on_host.then(|| self.address())
        }
    }

    // SAFETY: the rank is constant.
    unsafe impl PeerRegion for Bytes {
        fn peer(&self) -> Rank {
            self.peer
        }
    }

    fn engine(runtime: &TestRuntime) -> SdmaQueue<TestRuntime> {
        let engines = [0b1, 0b10, 0b100].map(|mask| {
            let selection = Selection { set: SdmaSet::from_mask(mask), by: SelectedBy::Number };
            Some(PeerEngines { put: selection, get: selection })
        });
        SdmaQueue::over(runtime.clone(), Rank(0), engines.into())
    }

    fn put<'a>(dst: &'a Bytes, src: &'a Bytes, bytes: u64) -> Op<'a, Bytes, Bytes> {
        Op::Put { dst: At { region: dst, offset: 0 }, src: At { region: src, offset: 0 }, bytes }
    }

    fn signal(region: &Bytes, word: u64, value: u64) -> Op<'_, Bytes, Bytes> {
        Op::Signal { flag: Flag { region, word }, value }
    }

    fn submit(
        engine: &mut SdmaQueue<TestRuntime>,
        ops: &[Op<'_, Bytes, Bytes>],
    ) -> Result<Ticket, Failure> {
        // SAFETY: the buffers of the tests outlive what they submit.
        unsafe { engine.submit(ops) }
    }

    fn finish(engine: &mut SdmaQueue<TestRuntime>, runtime: &TestRuntime, last: Ticket) {
        for _ in 0..10_000 {
            if engine.completed().expect("no copy fails") == last {
                return;
            }
            runtime.state().run_one();
        }
        panic!("the engine does not complete: {engine:?}");
    }

    #[test]
    fn puts_gets_and_flags_reach_their_destination() {
        let runtime = TestRuntime::new(1);
        let (src, dst, back) = (Bytes::data(64, 0), Bytes::data(64, 1), Bytes::data(64, 0));
        let mut engine = engine(&runtime);
        src.words[7].store(77, Ordering::Relaxed);
        let (flags, far) = (
            Bytes::new(16, Role::Flags, 1),
            Bytes { on_host: false, ..Bytes::new(16, Role::Flags, 2) },
        );
        let get = Op::Get {
            dst: At { region: &back, offset: 0 },
            src: At { region: &dst, offset: 0 },
            bytes: 64,
        };
        let ops = [put(&dst, &src, 64), signal(&flags, 1, 5), get, signal(&far, 0, 6)];
        let last = submit(&mut engine, &ops).expect("in order");
        assert_eq!((flags.word(1), engine.completed()), (0, Ok(Ticket::NONE)));
        finish(&mut engine, &runtime, last);
        assert_eq!((dst.word(7), back.word(7)), (77, 77));
        assert_eq!((flags.word(1), far.word(0)), (5, 6));
        // A flag that the host stores is not a copy.
        assert_eq!(runtime.state().log.len(), 3);
    }

    #[test]
    fn an_empty_slice_and_a_copy_of_nothing_have_tickets() {
        let runtime = TestRuntime::new(2);
        let (src, dst) = (Bytes::data(8, 0), Bytes::data(8, 1));
        let mut engine = engine(&runtime);
        assert_eq!(submit(&mut engine, &[]), Ok(Ticket(1)));
        assert_eq!(engine.completed(), Ok(Ticket(1)));
        assert_eq!(submit(&mut engine, &[put(&dst, &src, 0)]), Ok(Ticket(2)));
        assert_eq!(submit(&mut engine, &[put(&dst, &src, 8)]), Ok(Ticket(3)));
        assert_eq!(submit(&mut engine, &[]), Ok(Ticket(4)));
        assert_eq!(engine.completed(), Ok(Ticket(2)), "the empty slice completes after the copy");
        finish(&mut engine, &runtime, Ticket(4));
    }

    #[test]
    fn no_op_of_an_invalid_slice_is_submitted() {
        let runtime = TestRuntime::new(3);
        let (src, dst, flags) =
            (Bytes::data(64, 0), Bytes::data(64, 1), Bytes::new(8, Role::Flags, 1));
        let unconnected = Bytes::data(64, 3);
        let mut engine = engine(&runtime);
        let wait = Op::Wait { flag: Flag { region: &flags, word: 0 }, value: 1, reset: false };
        let at = |region, offset| At { region, offset };
        let beyond = Op::Put { dst: at(&dst, 60), src: at(&src, 0), bytes: 5 };
        let invalid = [
            (
                beyond,
                "put destination out of range: 5 bytes from offset 60, but the region has 64 bytes",
            ),
            (
                signal(&flags, 1, 1),
                "signalled flag out of range: 8 bytes from offset 8, but the region has 8 bytes",
            ),
            (
                signal(&dst, 0, 1),
                "the signalled flag is in a region of role Data, expected role Flags; register its \
                 memory with Role::Flags",
            ),
            (
                wait,
                "a wait was submitted to an engine that cannot queue waits (queued_wait is false); \
                 poll the flag instead",
            ),
            (
                put(&unconnected, &src, 8),
                "an op names memory of rank 3, which was not connected when this engine of rank 0 \
                 was created; connect all peers first, then create the engine",
            ),
        ];
        for (op, text) in invalid {
            let error = submit(&mut engine, &[put(&dst, &src, 64), op]).expect_err(text);
            assert_eq!(error.to_string(), text);
        }
        let long = vec![signal(&flags, 0, 1); SLICE_OPS_MAX + 1];
        let error = submit(&mut engine, &long).expect_err("too long").to_string();
        assert_eq!(
            error,
            "a slice has 257 ops, expected at most 256 (slice_ops_max of the engine); split it \
             into several slices"
        );
        assert_eq!((runtime.state().log.len(), engine.queue.len()), (0, 0));
        // The engine still works.
        submit(&mut engine, &long[..SLICE_OPS_MAX]).expect("the slice has the largest length");
    }

    #[test]
    fn a_full_queue_is_a_temporary_error() {
        let runtime = TestRuntime::new(4);
        let (src, dst) = (Bytes::data(8, 0), Bytes::data(8, 1));
        let mut engine = engine(&runtime);
        let slice = vec![put(&dst, &src, 8); SLICE_OPS_MAX];
        let mut last = Ticket::NONE;
        for _ in 0..QUEUE_OPS / SLICE_OPS_MAX {
            last = submit(&mut engine, &slice).expect("there is room");
        }
        let error = submit(&mut engine, &slice[..1]).expect_err("the queue is full").to_string();
        assert_eq!(
            error,
            "the queue of the engine is full: it holds 1024 of at most 1024 commands, no room for \
             1 more; submit again after a ticket completes"
        );
        finish(&mut engine, &runtime, last);
        submit(&mut engine, &slice).expect("the queue is empty again");
    }

    #[test]
    fn the_first_error_stays_and_a_release_drains() {
        let runtime = TestRuntime::new(5);
        runtime.state().fails = |copy| copy.span.bytes == 24;
        let (src, dst) = (Bytes::data(64, 0), Bytes::data(64, 1));
        let mut engine = engine(&runtime);
        submit(&mut engine, &[put(&dst, &src, 24)]).expect("the copy fails later");
        while runtime.state().run_one() {}
        let first = engine.completed().expect_err("the copy failed");
        assert_eq!(first.to_string(), "copy to rank 1 ended with -7");
        assert_eq!(engine.completed(), Err(first.clone()));
        assert_eq!(submit(&mut engine, &[]), Err(first.clone()));
        assert_eq!(engine.release(), Err(first.clone()));
        assert_eq!(engine.park(Duration::from_secs(9)), Err(first));
    }

    #[test]
    fn a_released_engine_takes_no_ops() {
        let runtime = TestRuntime::new(6);
        let (src, dst, flags) =
            (Bytes::data(64, 0), Bytes::data(64, 1), Bytes::new(8, Role::Flags, 1));
        let mut engine = engine(&runtime);
        let last = submit(&mut engine, &[put(&dst, &src, 64), signal(&flags, 0, 1)]).expect("room");
        engine.release().expect("no copy failed");
        let error = submit(&mut engine, &[]).expect_err("released").to_string();
        assert_eq!(error, "the engine accepts no more ops, because it was released after an abort");
        finish(&mut engine, &runtime, last);
        assert_eq!(flags.word(0), 0, "the flag after it was dropped");
    }

    #[test]
    fn a_parked_rank_wakes_for_completions_and_its_waker() {
        let runtime = TestRuntime::new(7);
        let (src, dst) = (Bytes::data(8, 0), Bytes::data(8, 1));
        let mut engine = engine(&runtime);
        engine.waker().wake();
        let start = Instant::now();
        engine.park(Duration::MAX).expect("woken");
        engine.park(Duration::from_millis(1)).expect("in time");
        assert!(start.elapsed() < Duration::from_secs(5));
        let last = submit(&mut engine, &[put(&dst, &src, 8)]).expect("room");
        runtime.state().run_one();
        engine.park(Duration::MAX).expect("a copy has completed");
        assert_eq!(engine.completed(), Ok(last));
    }

    #[test]
    fn engines_and_caps_are_reported() {
        let engine = engine(&TestRuntime::new(8));
        let engines = |peer, number: &str| {
            let text = format!("SDMA {number} (by number)");
            SdmaEngines { peer: Rank(peer), put: text.clone(), get: text }
        };
        assert_eq!(engine.engines(), [engines(0, "0"), engines(1, "1"), engines(2, "2")]);
        let caps = *engine.caps();
        assert!(!caps.queued_wait && caps.polled && caps.put_align_bytes == 1);
        assert_eq!(caps.piece_bytes_max, 128 << 20);
    }
}
