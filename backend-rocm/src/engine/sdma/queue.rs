//! Orders the ops of all peers and submits their copies to SDMA engines.
//!
//! The queue is independent of the runtime. It submits as much as the engines may hold, when ops are pushed
//! and at each [`progress`](CopyQueue::progress), and reads the completion signals of copies in flight.

use std::time::Duration;

use peerlane_hal::{Deadline, Ticket};
use peerlane_toolkit::{Fault, TicketCounter};

use super::pending::{Command, FLAG_BYTES, FlagAddress, InFlight, PeerQueue, Signals};
use super::pieces::{self, EngineLoads};
use super::runtime::{CopyCommand, Direction, SdmaRuntime, Span, Submission};
use super::select::{PeerEngines, Selection};
use super::set::SdmaId;

/// A lack of runtime resources becomes an error after this time without a copy in flight.
const RESOURCES_TIMEOUT: Duration = Duration::from_secs(10);

const CLOSE_INTERVAL: Duration = Duration::from_micros(50);

#[derive(Clone, Copy, Debug)]
pub(crate) struct PeerCommand {
    pub(crate) peer: usize,
    pub(crate) command: Command,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attempt {
    Progressed,
    Blocked,
    NoResources,
}

#[derive(Debug)]
pub(crate) struct CopyQueue<R: SdmaRuntime> {
    pub(super) runtime: R,
    rank: usize,
    engines: Vec<Option<PeerEngines>>,
    peers: Vec<PeerQueue>,
    signals: Signals,
    loads: EngineLoads,
    tickets: TicketCounter,
    order: u64,
    first_peer: usize,
    piece_bytes_max: u64,
    dependencies: Vec<usize>,
    resources_deadline: Option<Deadline>,
    /// The completion signals of failed copies; copies that depend on these signals never start.
    failed: Vec<usize>,
    released: bool,
}

impl<R: SdmaRuntime> CopyQueue<R> {
    pub(crate) fn new(
        runtime: R,
        rank: usize,
        engines: Vec<Option<PeerEngines>>,
        queue_ops: usize,
        piece_bytes_max: u64,
    ) -> Self {
        let signals = Signals::new(runtime.signals());
        Self {
            rank,
            peers: engines.iter().map(|_| PeerQueue::default()).collect(),
            engines,
            loads: EngineLoads::default(),
            tickets: TicketCounter::with_capacity(queue_ops),
            order: 0,
            first_peer: rank,
            piece_bytes_max: piece_bytes_max.min(pieces::PIECE_BYTES_MAX),
            dependencies: Vec::with_capacity(runtime.signals()),
            resources_deadline: None,
            failed: Vec::new(),
            released: false,
            signals,
            runtime,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.peers.iter().map(PeerQueue::len).sum()
    }

    pub(crate) fn tickets(&self) -> &TicketCounter {
        &self.tickets
    }

    pub(crate) fn engines(&self) -> impl Iterator<Item = (usize, &PeerEngines)> {
        self.engines
            .iter()
            .enumerate()
            .filter_map(|(peer, engines)| Some((peer, engines.as_ref()?)))
    }

    pub(crate) fn push(&mut self, commands: &[PeerCommand]) -> Ticket {
        let ticket = Ticket(self.tickets.last().0 + 1);
        for command in commands {
            self.order += 1;
            self.peers[command.peer].push(ticket, self.order, command.command);
        }
        // A slice has far fewer ops than a `u32` can count.
        let issued = self.tickets.issue(commands.len() as u32);
        debug_assert_eq!(issued, ticket);
        ticket
    }

    /// Collects completed copies and submits more pieces, and returns whether there was progress.
    ///
    /// # Safety
    /// Every command that was pushed must be valid until its ticket completes.
    pub(crate) unsafe fn progress(&mut self) -> Result<bool, R::Error> {
        let mut progressed = self.collect_completed()?;
        // A flag that the host stores may unblock other ops, so repeat until no op is retired.
        loop {
            // SAFETY: the caller upholds the contract of this function.
            let submitted = unsafe { self.submit_ready() }?;
            let retired = self.retire();
            progressed |= submitted || retired;
            if !retired {
                return Ok(progressed);
            }
        }
    }

    pub(crate) fn has_completions(&self) -> bool {
        let mut signals = self.peers.iter().flat_map(|peer| &peer.in_flight);
        signals.any(|signal| self.runtime.value(*signal) < 1)
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.peers.iter().map(|peer| peer.in_flight.len()).sum()
    }

    fn collect_completed(&mut self) -> Result<bool, R::Error> {
        let (mut progressed, mut failure) = (false, Ok(()));
        for peer in 0..self.peers.len() {
            let mut index = 0;
            while let Some(&signal) = self.peers[peer].in_flight.get(index) {
                let value = self.runtime.value(signal);
                if value > 0 {
                    index += 1;
                    continue;
                }
                self.peers[peer].in_flight.remove(index);
                let finished = self.finish_copy(signal);
                progressed = true;
                if value < 0 {
                    self.failed.push(signal);
                    failure = failure.and(Err(self.runtime.copy_error(&finished.copy, value)));
                }
            }
        }
        failure?;
        Ok(self.retire() || progressed)
    }

    fn finish_copy(&mut self, signal: usize) -> InFlight {
        let finished = self.signals.finish(signal);
        self.loads.remove(finished.load, finished.copy.span.bytes);
        let engine = finished.copy.engine.map_or(0, SdmaId::index);
        self.peers[finished.copy.peer].piece_completed(finished.op, engine);
        finished
    }

    fn retire(&mut self) -> bool {
        let mut retired = 0;
        // The rank itself comes last, because its flags wait for all peers.
        let others = (0..self.peers.len()).filter(|peer| *peer != self.rank);
        for peer in others.chain([self.rank]) {
            let limit = self.signal_limit(peer);
            let (tickets, released) = (&mut self.tickets, self.released);
            let Some(queue) = self.peers.get_mut(peer) else { continue };
            retired += queue.retire(limit, |ticket| {
                if !released {
                    tickets.finish_op(ticket);
                }
            });
        }
        if self.released && self.in_flight() == 0 {
            self.tickets.finish_all();
        }
        retired > 0
    }

    /// A rank's signals to itself must wait for the ops of other peers; signals to peers need not.
    fn signal_limit(&self, peer: usize) -> u64 {
        if peer != self.rank {
            return u64::MAX;
        }
        let others = self.peers.iter().enumerate().filter(|(other, _)| *other != peer);
        others.filter_map(|(_, queue)| queue.first_order()).min().unwrap_or(u64::MAX)
    }

    /// Submits as many queued copies of all peers as the SDMA engines may hold.
    ///
    /// # Safety
    /// The requirements are those of [`progress`](Self::progress).
    unsafe fn submit_ready(&mut self) -> Result<bool, R::Error> {
        let (mut progressed, ranks) = (false, self.peers.len());
        // Each call starts with another peer, because there may be too few signals for all.
        self.first_peer = self.first_peer.wrapping_add(1);
        let first = self.first_peer;
        for peer in (0..ranks).map(|step| first.wrapping_add(step) % ranks) {
            loop {
                // SAFETY: the caller upholds the contract of this function.
                match unsafe { self.submit_next(peer) }? {
                    Attempt::Progressed => progressed = true,
                    Attempt::Blocked => break,
                    Attempt::NoResources => {
                        return self.check_resources().map(|()| progressed);
                    }
                }
            }
        }
        self.resources_deadline = None;
        Ok(progressed)
    }

    /// Submits the next piece of a copy to or from a peer to an SDMA engine.
    ///
    /// # Safety
    /// The requirements are those of [`progress`](Self::progress).
    unsafe fn submit_next(&mut self, peer: usize) -> Result<Attempt, R::Error> {
        let limit = self.signal_limit(peer);
        let queue = &mut self.peers[peer];
        let Some((number, op)) = queue.next() else { return Ok(Attempt::Blocked) };
        let Some(signal) = self.signals.next_free() else { return Ok(Attempt::Blocked) };
        let engines = self.engines[peer].as_ref().expect("ops are checked against the peers");
        let (order, command, submitted) = (op.order, op.command, op.submitted);
        let direction = match command {
            Command::Copy { direction, .. } => direction,
            Command::Signal { .. } => Direction::Put,
        };
        let set = if direction == Direction::Put { engines.put.set } else { engines.get.set };
        if let Command::Copy { span, .. } = command
            && op.piece_bytes == 0
        {
            op.piece_bytes = pieces::piece_bytes(span.bytes, set.len(), self.piece_bytes_max);
        }
        let (held, piece_bytes, remaining) = (op.held, op.piece_bytes, op.remaining());
        let span = match command {
            Command::Copy { span, .. } => span.piece(submitted, piece_bytes.min(remaining)),
            Command::Signal { flag: FlagAddress::Device(dst), .. } => {
                // Earlier flags of the host must be stored first. A signal to the rank itself waits for all
                // peers.
                if queue.has_host_signals() || order >= limit {
                    return Ok(Attempt::Blocked);
                }
                Span { dst, src: 0, bytes: FLAG_BYTES }
            }
            Command::Signal { flag: FlagAddress::Host(_), .. } => {
                unreachable!("flags of the host have no bytes to submit")
            }
        };
        let pieces = remaining.div_ceil(piece_bytes.max(1));
        let Some((load, engine)) = self.loads.pick(set, &held, pieces) else {
            return Ok(Attempt::Blocked);
        };
        self.dependencies.clear();
        for earlier in &self.peers[peer].in_flight {
            let in_flight = self.signals.copy(*earlier);
            let depends = match command {
                Command::Signal { .. } => true,
                Command::Copy { .. } => {
                    in_flight.op != number && in_flight.copy.span.conflicts_with(span)
                }
            };
            if depends {
                self.dependencies.push(*earlier);
            }
        }
        if !self.dependencies.is_empty() && !self.runtime.waits_for_signals() {
            return Ok(Attempt::Blocked);
        }
        let mut copy = CopyCommand { peer, direction, engine, span };
        if let Command::Signal { value, .. } = command {
            copy.span.src = self.runtime.store_word(signal, value);
        }
        self.runtime.arm(signal);
        // SAFETY: the spans are pieces of commands that were pushed, for which the caller vouches; the word of
        // a signal belongs to the runtime.
        match unsafe { self.runtime.copy(&copy, &self.dependencies, signal) } {
            Submission::Accepted => {}
            Submission::NoResources => return Ok(Attempt::NoResources),
            Submission::Rejected(error) => {
                let Some(engine) = engine else { return Err(error) };
                self.remove_engine(peer, direction, engine);
                return Ok(Attempt::Progressed);
            }
        }
        self.loads.add(load, span.bytes);
        self.signals.start(signal, InFlight { copy, op: number, load }, &self.dependencies);
        let engine = engine.map_or(0, SdmaId::index);
        self.peers[peer].piece_submitted(number, engine, span.bytes, signal);
        Ok(Attempt::Progressed)
    }

    /// Removes an SDMA engine that the runtime rejects for copies in one direction. If no engine remains, the runtime
    /// selects one for each copy.
    fn remove_engine(&mut self, peer: usize, direction: Direction, engine: SdmaId) {
        let engines = self.engines[peer].as_mut().expect("a copy was submitted to the peer");
        let selection =
            if direction == Direction::Put { &mut engines.put } else { &mut engines.get };
        selection.set.remove(engine);
        if selection.set.is_empty() {
            *selection = Selection::RUNTIME;
        }
    }

    fn check_resources(&mut self) -> Result<(), R::Error> {
        if self.in_flight() > 0 {
            self.resources_deadline = None;
            return Ok(());
        }
        let deadline =
            *self.resources_deadline.get_or_insert_with(|| Deadline::after(RESOURCES_TIMEOUT));
        if !deadline.has_passed() {
            return Ok(());
        }
        let what =
            "the HSA runtime had no resources for a copy, although no other copy was in flight"
                .to_owned();
        Err(Fault::Timeout { what, timeout: deadline.timeout() }.into())
    }

    pub(crate) fn release(&mut self) {
        self.released = true;
        // Flags after a failed copy announce bytes that are not there. Every peer was told of the abort
        // before the release, so they do no harm, and copies that never start would occupy an engine.
        for signal in self.failed.drain(..) {
            self.runtime.clear(signal);
        }
        self.peers.iter_mut().for_each(PeerQueue::drop_unsubmitted);
        self.retire();
    }

    /// Waits until no copy is in flight, also after an error. Resources of copies that miss the deadline are leaked.
    pub(crate) fn close(&mut self, deadline: Deadline) {
        self.release();
        while self.in_flight() > 0 {
            // The engine is being dropped, so an error cannot be reported.
            if self.collect_completed().is_err() {
                self.release();
            }
            if deadline.has_passed() {
                return self.runtime.leak();
            }
            self.runtime.pause(CLOSE_INTERVAL);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ptr::NonNull;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::super::runtime::tests::{Failure, TestRuntime};
    use super::super::select::SelectedBy;
    use super::super::set::SdmaSet;
    use super::*;

    const RANK: usize = 0;

    fn queue(runtime: &TestRuntime, masks: &[u32], piece_bytes_max: u64) -> CopyQueue<TestRuntime> {
        let engines = |mask: &u32| {
            let selection = Selection { set: SdmaSet::from_mask(*mask), by: SelectedBy::Number };
            Some(PeerEngines { put: selection, get: selection })
        };
        let engines = masks.iter().map(engines).collect();
        CopyQueue::new(runtime.clone(), RANK, engines, 1024, piece_bytes_max)
    }

    fn put(peer: usize, dst: &mut [u8], src: &[u8]) -> PeerCommand {
        assert_eq!(dst.len(), src.len());
        let (dst, bytes) = (dst.as_mut_ptr() as u64, src.len() as u64);
        let span = Span { dst, src: src.as_ptr() as u64, bytes };
        PeerCommand { peer, command: Command::Copy { direction: Direction::Put, span } }
    }

    fn signal(peer: usize, flag: &AtomicU64, value: u64, on_host: bool) -> PeerCommand {
        let address = NonNull::from(flag);
        let flag = if on_host {
            FlagAddress::Host(address)
        } else {
            FlagAddress::Device(address.as_ptr() as u64)
        };
        PeerCommand { peer, command: Command::Signal { flag, value } }
    }

    fn progress(queue: &mut CopyQueue<TestRuntime>) -> Result<bool, Failure> {
        // SAFETY: buffers of the tests outlive their queues.
        unsafe { queue.progress() }
    }

    fn finish(queue: &mut CopyQueue<TestRuntime>, runtime: &TestRuntime, mut check: impl FnMut()) {
        let last = queue.tickets().last();
        for _ in 0..100_000 {
            progress(queue).unwrap();
            check();
            if queue.tickets().completed() == last {
                assert_eq!((queue.len(), queue.in_flight()), (0, 0));
                return;
            }
            runtime.state().run_one();
            check();
        }
        panic!("the queue does not complete: {queue:?}");
    }

    fn source(bytes: usize, seed: usize) -> Vec<u8> {
        (0..bytes).map(|index| (index * 31 + seed * 97 + 1) as u8 | 1).collect()
    }

    #[test]
    fn a_flag_is_visible_after_every_put_before_it() {
        for seed in 1..=60 {
            let runtime = TestRuntime::new(seed);
            runtime.state().room = (seed as usize % 7) + 1;
            runtime.state().ignores_dependencies = seed % 3 == 0;
            // Peers share engines, and for one the runtime selects.
            let mut queue = queue(&runtime, &[0b1, 0b1110, 0b0110, 0], 4096);
            let (chunks, chunk_bytes) = (7, 3000 + 4096 * (seed as usize % 4));
            let from = source(chunks * chunk_bytes, seed as usize);
            let mut to: Vec<_> = (0..4).map(|_| vec![0_u8; chunks * chunk_bytes]).collect();
            let flags: Vec<_> = (0..4).map(|_| AtomicU64::new(0)).collect();
            let views: Vec<_> = to.iter_mut().map(|to| (to.as_mut_ptr(), to.len())).collect();
            for index in 0..chunks {
                let mut slice = Vec::new();
                for peer in [1, 2, 0, 3] {
                    let at = index * chunk_bytes..(index + 1) * chunk_bytes;
                    // SAFETY: the range is in a buffer that outlives the queue.
                    let to = unsafe {
                        std::slice::from_raw_parts_mut(
                            views[peer].0.wrapping_add(at.start),
                            chunk_bytes,
                        )
                    };
                    slice.push(put(peer, to, &from[at]));
                    // One peer has both kinds of flags.
                    let on_host = (peer + index + seed as usize).is_multiple_of(2);
                    slice.push(signal(peer, &flags[peer], index as u64 + 1, on_host));
                }
                queue.push(&slice);
                if index % 3 == 0 {
                    progress(&mut queue).unwrap();
                }
            }
            let mut seen = [0; 4];
            finish(&mut queue, &runtime, || {
                for peer in 0..4 {
                    let value = flags[peer].load(Ordering::Acquire);
                    assert!(value >= seen[peer], "the flag of rank {peer} decreased");
                    seen[peer] = value;
                    let length = value as usize * chunk_bytes;
                    // SAFETY: nothing writes at this time, because the engines run in this thread.
                    let to = unsafe { std::slice::from_raw_parts(views[peer].0, length) };
                    assert!(
                        to == &from[..length],
                        "seed {seed}: rank {peer} saw flag {value} too early"
                    );
                }
            });
            assert_eq!(seen, [chunks as u64; 4]);
            assert!(runtime.state().log.iter().all(|copy| copy.span.bytes <= 4096));
        }
    }

    #[test]
    fn puts_to_the_same_bytes_keep_their_order() {
        for seed in 1..=40 {
            let runtime = TestRuntime::new(seed);
            runtime.state().ignores_dependencies = seed % 3 == 0;
            let mut queue = queue(&runtime, &[0b1, 0b1110], 64);
            let (one, two) = (source(300, 1), source(300, 2));
            let mut to = vec![0_u8; 400];
            let mut commands = Vec::new();
            for round in 0..6 {
                let at = round * 17;
                let from = if round % 2 == 0 { &one } else { &two };
                commands.push(put(1, &mut to[at..at + 300], from));
            }
            queue.push(&commands);
            finish(&mut queue, &runtime, || {});
            let mut expected = vec![0_u8; 400];
            for round in 0..6 {
                let from = if round % 2 == 0 { &one } else { &two };
                expected[round * 17..round * 17 + 300].copy_from_slice(from);
            }
            assert!(to == expected, "seed {seed}");
        }
    }

    #[test]
    fn a_signal_to_the_rank_itself_waits_for_all_peers() {
        for (seed, on_host) in (1..=20).flat_map(|seed| [(seed, true), (seed, false)]) {
            let runtime = TestRuntime::new(seed);
            let mut queue = queue(&runtime, &[0b1, 0b10, 0b100], 512);
            let from = source(5000, 3);
            let (mut own, mut one, mut two) = (vec![0; 5000], vec![0; 5000], vec![0; 5000]);
            let flag = AtomicU64::new(0);
            let own_put = put(RANK, &mut own, &from);
            queue.push(&[put(1, &mut one, &from), own_put, put(2, &mut two, &from)]);
            queue.push(&[signal(RANK, &flag, 9, on_host)]);
            let later = AtomicU64::new(0);
            queue.push(&[signal(1, &later, 1, false)]);
            let addresses = [own.as_ptr(), one.as_ptr(), two.as_ptr()];
            finish(&mut queue, &runtime, || {
                if flag.load(Ordering::Acquire) == 9 {
                    // SAFETY: the buffers live, and the engines run in this thread.
                    let bytes = |at: &*const u8| unsafe { std::slice::from_raw_parts(*at, 5000) };
                    assert!(addresses.iter().all(|at| bytes(at) == from), "seed {seed}");
                }
            });
            assert_eq!((flag.into_inner(), later.into_inner()), (9, 1));
        }
    }

    #[test]
    fn a_rejected_engine_is_not_used_again() {
        let runtime = TestRuntime::new(5);
        runtime.state().refuses = |copy| copy.engine.is_some_and(|engine| engine.index() != 2);
        let mut queue = queue(&runtime, &[0b1, 0b1100], 4096);
        let from = source(20_000, 1);
        let (mut to, mut own) = (vec![0; 20_000], vec![0; 20_000]);
        queue.push(&[put(1, &mut to, &from), put(RANK, &mut own, &from)]);
        finish(&mut queue, &runtime, || {});
        assert!(to == from && own == from);
        let texts: Vec<_> = queue.engines().map(|(_, engines)| engines.put.to_string()).collect();
        assert_eq!(texts, ["SDMA of the runtime's choice", "SDMA 2 (by number)"]);
        // A copy that is rejected for every engine is an error.
        runtime.state().refuses = |_| true;
        queue.push(&[put(RANK, &mut own, &from)]);
        assert_eq!(progress(&mut queue), Err(Failure("refused on None".to_owned())));
    }

    #[test]
    fn nothing_is_signalled_after_a_failed_copy() {
        let runtime = TestRuntime::new(7);
        runtime.state().fails = |copy| copy.span.bytes == 777;
        let mut queue = queue(&runtime, &[0b1, 0b110], 4096);
        let from = source(777, 1);
        let mut to = vec![0; 777];
        let (device, host) = (AtomicU64::new(0), AtomicU64::new(0));
        let signals = [signal(1, &device, 1, false), signal(1, &host, 1, true)];
        queue.push(&[put(1, &mut to, &from), signals[0], signals[1]]);
        progress(&mut queue).unwrap();
        while runtime.state().run_one() {}
        let error = progress(&mut queue).unwrap_err();
        assert_eq!(error.to_string(), "copy to rank 1 ended with -7");
        while runtime.state().run_one() {}
        assert_eq!((device.load(Ordering::Acquire), host.load(Ordering::Acquire)), (0, 0));
        // After the abort the engine becomes free.
        queue.close(Deadline::after(Duration::from_secs(5)));
        assert_eq!((queue.in_flight(), host.into_inner()), (0, 0));
    }

    #[test]
    fn a_release_drops_what_was_not_submitted() {
        let runtime = TestRuntime::new(9);
        let mut queue = queue(&runtime, &[0b1, 0b10], 64);
        let from = source(6400, 1);
        let mut to = vec![0; 6400];
        let flag = AtomicU64::new(0);
        let last = queue.push(&[put(1, &mut to, &from), signal(1, &flag, 1, true)]);
        progress(&mut queue).unwrap();
        queue.release();
        assert!(queue.tickets().completed() < last, "pieces are in flight");
        finish(&mut queue, &runtime, || {});
        assert_eq!(flag.into_inner(), 0);
        assert!(to.contains(&0), "the rest was dropped");
    }

    #[test]
    fn a_copy_is_retried_if_the_runtime_lacks_resources() {
        let runtime = TestRuntime::new(3);
        runtime.state().room = 0;
        let mut queue = queue(&runtime, &[0b1], 64);
        let from = source(640, 1);
        let mut to = vec![0; 640];
        queue.push(&[put(RANK, &mut to, &from)]);
        assert_eq!(progress(&mut queue), Ok(false));
        finish(&mut queue, &runtime, || {});
        assert!(to == from);
    }
}
