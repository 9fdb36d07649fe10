//! Submits commands to one engine, counts what is complete, and orders the engine against streams
//! of the caller.
//!
//! A queue knows tickets, and not what the engine was given for them: the numbers that
//! [`Queue::mark`] sets can follow one command, a slice or a whole program.

use std::any::Any;
use std::collections::VecDeque;
use std::ops::DerefMut;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Waker;
use std::time::Duration;

use peerlane_hal::{
    BackendId, BoundRegions, Caps, CaptureState, Command, Commands, CopyEngine, DynEngine,
    DynError, ErrorKind, FusedCommands, FusedEngine, Launch, Mark, ProgressReader, RegionFlag,
    RegionOffset, StartValues, StreamOrdered, Ticket,
};

use crate::error::Error;
use crate::run::buffers::{FLAGS, FlagState, INBOX, OperationBuffers, Start};

/// The number of marks that a queue holds without an allocation.
const OPEN_MARKS: usize = 64;

pub(crate) struct Queue {
    engine: DynEngine,
    backend: BackendId,
    /// The ticket of the last submission.
    last: Ticket,
    /// The marks that were not complete at the last poll, oldest first.
    open: VecDeque<OpenMark>,
    /// The number of the last mark.
    marked: u64,
    /// The last ticket that was complete at the last poll.
    completed: Ticket,
    /// The regions of eager starts and, if there are such starts, of captured ones.
    regions: BoundRegions,
    captured: Option<BoundRegions>,
    /// What starts add to offsets, for each of the outputs that they use in turn.
    offsets: Vec<Box<[u64]>>,
    // The contents of the vectors are not used after a call, only their allocations.
    tags: Vec<u64>,
    addresses: Vec<*const u8>,
    /// Dropped last, because it keeps memory registered that the regions use.
    memory: Arc<OperationBuffers>,
}

/// A number that is reached when a ticket is complete.
struct OpenMark {
    ticket: Ticket,
    /// The number of the mark before.
    before: u64,
}

// SAFETY: the addresses are only used within a call.
unsafe impl Send for Queue {}

impl Queue {
    /// Creates a queue of commands over this memory, whose regions it binds to the engine.
    pub(crate) fn new(
        engine: DynEngine,
        backend: BackendId,
        memory: Arc<OperationBuffers>,
    ) -> Result<Self, Error> {
        let bind = |captured| {
            let bound = engine.bind(&memory.regions(captured));
            bound.map_err(|error| Error::of_fabric("bind the regions of the engine", error))
        };
        let regions = bind(false)?;
        let captured = memory.flags.captured.is_some().then(|| bind(true)).transpose()?;

        Ok(Self {
            engine,
            backend,
            last: Ticket::NONE,
            open: VecDeque::with_capacity(OPEN_MARKS),
            marked: 0,
            completed: Ticket::NONE,
            regions,
            captured,
            offsets: memory.offsets(),
            tags: Vec::new(),
            addresses: Vec::new(),
            memory,
        })
    }

    pub(crate) fn caps(&self) -> &Caps {
        self.engine.caps()
    }

    /// Returns the last ticket that was complete at the last poll.
    pub(crate) fn completed(&self) -> Ticket {
        self.completed
    }

    /// Returns the ticket of the last submission.
    pub(crate) fn last(&self) -> Ticket {
        self.last
    }

    /// Submits a slice of commands of a start, and returns whether the engine had room for it.
    ///
    /// # Safety
    /// As [`CopyEngine::submit`].
    pub(crate) unsafe fn submit(
        &mut self,
        commands: Commands<'_>,
        start: Start,
    ) -> Result<bool, Error> {
        let regions = match start {
            Start::Eager(_) => &self.regions,
            Start::Captured(_) => self.captured.as_ref().expect("a captured start has flags"),
        };
        let values = self.memory.start_values(start, &self.offsets, &mut self.tags);

        // SAFETY: the contract of this function is that of `CopyEngine::submit`; `memory` keeps the
        // regions.
        match unsafe { self.engine.submit_commands(regions, commands, &values) } {
            Ok(ticket) => self.last = ticket,
            Err(error) if peerlane_hal::Error::kind(&error) == ErrorKind::QueueFull => {
                return Ok(false);
            }
            Err(error) => return Err(Error::of_fabric("submit ops", error)),
        }
        Ok(true)
    }

    /// Compiles the commands of fused starts that use one output. Returns what a start launches,
    /// and a function that tells how far starts have come.
    ///
    /// `slots` tells that the inbox holds tagged data. The device counts the starts in the flags
    /// from `counter_word` on.
    pub(crate) fn compile(
        &mut self,
        commands: Commands<'_>,
        (blocks, slots): (u32, bool),
        (output, counter_word): (u32, u64),
    ) -> Result<(Launch, ProgressReader), Error> {
        let launch = self.with_fused(
            commands,
            (blocks, slots),
            (output, counter_word),
            |engine, regions, fused| engine.compile_commands(regions, fused),
        )?;
        let progress = self.fused_starts()?.progress();
        let progress = progress.map_err(|error| Error::of_fabric("compile a start", error))?;
        Ok((launch, progress))
    }

    /// Has later fused starts run other commands than those that were compiled first. They use one
    /// output, and no slots.
    pub(crate) fn replace_compiled(
        &mut self,
        commands: Commands<'_>,
        blocks: u32,
        counter_word: u64,
    ) -> Result<(), Error> {
        self.with_fused(commands, (blocks, false), (0, counter_word), |engine, regions, fused| {
            engine.replace_commands(0, regions, fused)
        })
    }

    /// Calls a function with the commands of fused starts, as [`compile`](Self::compile).
    fn with_fused<R>(
        &mut self,
        commands: Commands<'_>,
        (blocks, slots): (u32, bool),
        (output, counter_word): (u32, u64),
        call: impl FnOnce(&mut DynEngine, &BoundRegions, &FusedCommands<'_>) -> Result<R, DynError>,
    ) -> Result<R, Error> {
        let memory = &self.memory;
        let (mut even_tags, mut odd_tags) = (Vec::new(), Vec::new());
        // Each start has a digest of its own, which the engine gets then. The device counts the
        // starts, and the host says which output one uses.
        let offsets = memory.offsets_with_output(output);
        let starts = [
            memory.start_values(Start::Eager(2), &offsets, &mut even_tags),
            memory.start_values(Start::Eager(1), &offsets, &mut odd_tags),
        ];
        let starts = starts.map(|start| StartValues { tags: &[], ..start });

        let slots = slots.then(|| {
            let (_, bytes) = memory.inbox.memory();
            (RegionOffset { region: INBOX, offset: 0 }, bytes.end - bytes.start)
        });
        let (base, digest_bits) = (memory.epoch_base, memory.digest_bits());
        let counter = (FLAGS, counter_word);
        let fused = FusedCommands { commands, starts, slots, counter, blocks, base, digest_bits };
        let done = call(&mut self.engine, &self.regions, &fused);
        done.map_err(|error| Error::of_fabric("compile a start", error))
    }

    /// Submits the next fused start by a compiled program, and returns whether the engine had room
    /// for it.
    ///
    /// # Safety
    /// As [`FusedStarts::start`](peerlane_hal::FusedStarts::start).
    pub(crate) unsafe fn start_compiled(
        &mut self,
        program: usize,
        start: Start,
    ) -> Result<bool, Error> {
        let digest = self.memory.digest_of(start);
        // SAFETY: the caller upholds the same contract; `memory` keeps the regions.
        match unsafe { self.fused_starts()?.start(program, digest) } {
            Ok(ticket) => self.last = ticket,
            Err(error) if peerlane_hal::Error::kind(&error) == ErrorKind::QueueFull => {
                return Ok(false);
            }
            Err(error) => return Err(Error::of_fabric("launch a start", error)),
        }
        Ok(true)
    }

    fn fused_starts(&mut self) -> Result<&mut FusedEngine<DynEngine>, Error> {
        let kind = self.engine.caps().kind;
        self.engine.fused().ok_or_else(|| {
            let text = format!("{kind} engines make no fused starts");
            Error::new(ErrorKind::Unavailable, text)
        })
    }

    /// Returns how many bytes of the commands compute units would copy in a start.
    pub(crate) fn compute_bytes(&mut self, commands: Commands<'_>, start: Start) -> u64 {
        let is_captured = start.is_captured();
        let regions = if is_captured { self.captured.as_ref() } else { Some(&self.regions) };
        let Some(regions) = regions else { return 0 };

        let values = self.memory.start_values(start, &self.offsets, &mut self.tags);
        self.engine.compute_bytes_of(regions, commands, &values, is_captured)
    }

    /// Submits commands in slices, each of which raises the number of the last mark by its
    /// commands.
    ///
    /// Whenever the engine has no room, `wait` says for how long to park, or why to give up.
    ///
    /// # Safety
    /// As [`CopyEngine::submit`].
    pub(crate) unsafe fn send(
        &mut self,
        commands: &[Command],
        start: Start,
        mut wait: impl FnMut() -> Result<Duration, Error>,
    ) -> Result<(), Error> {
        for commands in commands.chunks(self.engine.caps().slice_ops_max) {
            let before = self.last;
            // SAFETY: the contract of this function is that of `CopyEngine::submit`.
            while !unsafe { self.submit(Commands { commands, sources: &[] }, start) }? {
                let limit = wait()?;
                self.poll()?;
                self.park(limit)?;
            }

            // A slice in a capture gets no ticket of its own.
            if self.last > before {
                self.mark(self.marked + commands.len() as u64)?;
            }
        }
        Ok(())
    }

    /// Has [`done`](Self::done) return `number` when all that was submitted so far is complete.
    pub(crate) fn mark(&mut self, number: u64) -> Result<(), Error> {
        // A caller that never asks what is complete does not make the list longer and longer.
        if self.open.len() == OPEN_MARKS {
            self.poll()?;
        }
        self.open.push_back(OpenMark { ticket: self.last, before: self.marked });
        self.marked = number;
        Ok(())
    }

    /// Counts everything up to `number` as marked before.
    pub(crate) fn skip_to(&mut self, number: u64) {
        self.marked = number;
    }

    /// Returns the number of the last mark.
    pub(crate) fn marked(&self) -> u64 {
        self.marked
    }

    /// Returns the number of the last mark that was complete at the last poll.
    pub(crate) fn done(&self) -> u64 {
        self.open.front().map_or(self.marked, |mark| mark.before)
    }

    /// Marks the place that the engine's work has reached, also in a capture.
    pub(crate) fn mark_place(&mut self) -> Result<Mark, Error> {
        match self.engine.streams() {
            Some(streams) => streams.mark().map_err(|e| Error::of_fabric("mark the queue", e)),
            None => Ok(Mark::Submitted(self.last)),
        }
    }

    /// Has later work on a stream follow the work before a mark. `instead` is what a caller can do
    /// without streams.
    pub(crate) fn order_after(
        &mut self,
        mark: Mark,
        stream: &dyn Any,
        instead: &str,
    ) -> Result<(), Error> {
        let action = "order the stream after the engine";
        self.with_streams(instead, action, |streams| streams.order_after(mark, stream))
    }

    /// Has later submissions follow the work on a stream, which stays with the caller.
    pub(crate) fn fork_beside(&mut self, stream: &dyn Any, instead: &str) -> Result<(), Error> {
        let action = "fork the engine beside the stream";
        self.with_streams(instead, action, |streams| streams.fork_beside(stream))
    }

    /// Has later work on a stream follow all work of the engine.
    pub(crate) fn join(&mut self, stream: &dyn Any, instead: &str) -> Result<(), Error> {
        let action = "join the engine to the stream";
        self.with_streams(instead, action, |streams| streams.join(stream))
    }

    /// Asks the engine what is complete.
    pub(crate) fn poll(&mut self) -> Result<Ticket, Error> {
        let completed = self.engine.completed();
        let completed =
            completed.map_err(|error| Error::of_fabric("query the completed tickets", error))?;
        while self.open.front().is_some_and(|mark| mark.ticket <= completed) {
            self.open.pop_front();
        }
        self.completed = completed;
        Ok(completed)
    }

    pub(crate) fn park(&mut self, limit: Duration) -> Result<(), Error> {
        self.engine.park(limit).map_err(|error| Error::of_fabric("park the engine", error))
    }

    pub(crate) fn is_busy(&self) -> bool {
        self.engine.is_busy()
    }

    pub(crate) fn waker(&self) -> Waker {
        self.engine.waker()
    }

    /// Lets all waits pass, and returns whether everything that was submitted is complete.
    pub(crate) fn release(&mut self) -> Result<bool, Error> {
        self.engine.release().map_err(|error| Error::of_fabric("release the engine", error))?;
        Ok(self.poll()? >= self.last)
    }

    /// Returns what a flag of this rank says, and resets it if it was signalled in a captured
    /// start.
    pub(crate) fn try_consume(&self, flag: RegionFlag, start: Start) -> Result<FlagState, Error> {
        let Some(word) = self.memory.flag(flag, start) else {
            let text = "the flags are in device memory, expected host memory for an engine that \
                        cannot queue waits";
            return Err(Error::new(ErrorKind::Mismatch, text));
        };

        // Acquire: the data that the signal published is visible to commands that are submitted
        // next.
        let value = word.load(Ordering::Acquire);
        let state = self.memory.flag_state(value, start.before(flag.lag), flag.peer);
        if state == FlagState::Signalled && start.is_captured() {
            // Release: a writer that sees the 0 may signal again.
            word.store(0, Ordering::Release);
        }
        Ok(state)
    }

    /// Runs a reduction on the calling thread. Everything before it is complete.
    ///
    /// # Safety
    /// Nobody else accesses the destination, or writes the sources. All of them are in host memory.
    pub(crate) unsafe fn reduce(&mut self, commands: Commands<'_>, start: Start) {
        let Commands {
            commands: [Command::Reduce { dst, first, count, bytes, reduction }],
            sources,
        } = commands
        else {
            return;
        };

        let offsets = self.memory.start_values(start, &self.offsets, &mut self.tags).offsets;
        let sources = &sources[*first as usize..][..*count as usize];
        self.addresses.clear();
        for source in sources {
            self.addresses.push(self.memory.address(*source, offsets).cast_const());
        }
        let dst = self.memory.address(*dst, offsets);

        // SAFETY: the caller guarantees it; places of one element type are aligned to it.
        unsafe { reduction.run(dst, &self.addresses, *bytes as usize) };
    }

    /// Returns how long a replay has waited for flags of the engine, if one waits.
    pub(crate) fn replay_wait(&mut self) -> Result<Option<Duration>, Error> {
        let Some(streams) = self.engine.streams() else { return Ok(None) };
        streams.replay_wait().map_err(|error| Error::of_fabric("query the running graphs", error))
    }

    /// Calls the engine as one that is ordered against streams. For errors, `action` says what the
    /// call does, and `instead` what a caller can do without streams.
    fn with_streams<R>(
        &mut self,
        instead: &str,
        action: &str,
        call: impl FnOnce(&mut dyn StreamOrdered<Error = DynError>) -> Result<R, DynError>,
    ) -> Result<R, Error> {
        with_streams(&mut self.engine, self.backend, instead, action, call)
    }
}

/// Calls an engine as one that is ordered against streams. For errors, `action` says what the call
/// does, and `instead` what a caller can do without streams.
pub(crate) fn with_streams<R>(
    engine: &mut DynEngine,
    backend: BackendId,
    instead: &str,
    action: &str,
    call: impl FnOnce(&mut dyn StreamOrdered<Error = DynError>) -> Result<R, DynError>,
) -> Result<R, Error> {
    let kind = engine.caps().kind;
    let Some(streams) = engine.streams() else {
        let text =
            format!("{kind} engines of the backend {backend} cannot run on a stream; {instead}");
        return Err(Error::new(ErrorKind::Mismatch, text));
    };
    call(streams).map_err(|error| Error::of_fabric(action, error))
}

/// A holder of a queue, whose work can be ordered between two pieces of work on a stream of the
/// caller.
pub(crate) trait HasQueue {
    /// What a caller can do without streams, for errors.
    const INSTEAD: &'static str;
    type Failure;

    fn queue(&mut self) -> impl DerefMut<Target = Queue>;
    /// Returns the failure of a call before which nothing has changed.
    fn refused(&self, error: Error) -> Self::Failure;
    /// Returns the failure of a call after which the engine cannot go on.
    fn broken(&self, error: Error) -> Self::Failure;
}

/// Returns which capture a stream is in.
pub(crate) fn capture_state<H: HasQueue>(
    holder: &mut H,
    stream: &dyn Any,
) -> Result<CaptureState, Error> {
    let action = "query whether the stream captures";
    holder.queue().with_streams(H::INSTEAD, action, |streams| streams.capture_state(stream))
}

/// Runs `body` with the queue behind the work that a stream of the caller holds now, and the later
/// work of the stream behind the queue.
///
/// `admit` is told whether the stream captures, and can refuse that before anything changes. After
/// the fork, the join follows in any case, even if `body` fails.
pub(crate) fn on_stream<H: HasQueue, R>(
    holder: &mut H,
    stream: &dyn Any,
    admit: impl FnOnce(&mut H, CaptureState) -> Result<(), H::Failure>,
    body: impl FnOnce(&mut H, CaptureState) -> Result<R, H::Failure>,
) -> Result<R, H::Failure> {
    let capture = capture_state(holder, stream).map_err(|error| holder.refused(error))?;
    admit(holder, capture)?;

    let action = "fork the engine from the stream";
    let forked = holder.queue().with_streams(H::INSTEAD, action, |streams| streams.fork(stream));
    forked.map_err(|error| holder.refused(error))?;
    let done = body(holder, capture);

    let action = "join the engine to the stream";
    let joined = holder.queue().with_streams(H::INSTEAD, action, |streams| streams.join(stream));
    // The error of the body came first.
    let value = done?;
    joined.map_err(|error| holder.broken(error))?;
    Ok(value)
}

/// Returns whether strided copies are submitted as one op. `on_host` tells that one of the two
/// regions is in memory of the host.
///
/// An engine on streams enqueues each row of such a region as a command of its own, and many
/// commands block the caller.
pub(crate) fn copies_rows(caps: &Caps, on_host: bool) -> bool {
    caps.rows && (caps.polled || !on_host)
}
