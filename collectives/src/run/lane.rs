//! Executes one sequence of commands of a prepared operation on one engine.

use std::time::Instant;

use peerlane_hal::{Command, Commands, ErrorKind, Mark, RegionOffset, Ticket};

use crate::error::Error;
use crate::layout::Layout;
use crate::plan::{Cell, LaneId, Plan, Step};
use crate::run::buffers::{FlagState, Start};
use crate::run::fused::crosses_tiers;
use crate::run::parts::{Gate, Parts, REACHED};
use crate::run::program::Program;
use crate::run::queue::Queue;
use crate::trace::TracedStep;

/// Says what adds the contributions of a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Adder {
    /// The lane does not add.
    None,
    Thread,
    Engine,
}

/// Which programs an engine has compiled for fused starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FusedPrograms {
    /// One for all starts, which use one output.
    One,
    /// One for each of two outputs, which eager starts use in turn.
    ByOutput,
    /// One for eager starts and the first start of a graph, and then one for each of two outputs,
    /// which the starts of a graph use in turn.
    ByIndex,
}

impl FusedPrograms {
    /// Returns the number of the program of a start.
    pub(crate) fn of_start(self, start: Start) -> usize {
        let turn = |count: u64| (count & 1) as usize;
        match (self, start) {
            (Self::ByOutput, Start::Eager(epoch)) => turn(epoch),
            (Self::ByIndex, Start::Captured(index)) if index > 0 => 1 + turn(index),
            _ => 0,
        }
    }
}

/// What the engine of a lane has compiled for fused starts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FusedLane {
    pub(crate) programs: FusedPrograms,
    /// The blocks of a launch and the word of the counter, if starts can have lengths of their own.
    /// There is one program then.
    pub(crate) resizable: Option<(u32, u64)>,
}

pub(crate) struct Lane {
    /// The queue, whose marks are the numbers of starts.
    pub(crate) queue: Queue,
    program: Program,
    /// The program of captured starts behind the first one of a graph, if it is another one.
    following: Option<Program>,
    adder: Adder,
    /// Says what the engine has compiled, if a start is one launch.
    fused: Option<FusedLane>,
    /// Whether that is not what the next start is to do, because a resize has failed.
    is_stale: bool,
    tracer: Option<Tracer>,
    /// The command of the captured start that comes next, if a thread replays captured starts.
    armed: Option<usize>,
    /// What has departed and arrived in the newest start, if it has handles.
    gate: Gate,
    /// The index of the last captured start in its graph, and the command that comes next.
    recorded: Option<(u64, usize)>,
    /// The start and the command that come next.
    epoch: u64,
    next: usize,
}

impl Lane {
    pub(crate) fn new(
        id: LaneId,
        (program, following, adder): (Program, Option<Program>, Adder),
        queue: Queue,
        traced: bool,
    ) -> Self {
        let origins = program.origins.as_ref().filter(|_| traced);
        let tracer = origins.map(|origins| Tracer::new(id, origins.clone()));

        Self {
            queue,
            program,
            following,
            adder,
            fused: None,
            is_stale: false,
            tracer,
            armed: None,
            gate: Gate::default(),
            recorded: None,
            epoch: 1,
            next: 0,
        }
    }

    /// Has each start of the lane be one launch of a program that its engine has compiled.
    #[must_use]
    pub(crate) fn fused(self, fused: FusedLane) -> Self {
        Self { fused: Some(fused), ..self }
    }

    pub(crate) fn traced(&self, epoch: u64, origin: Instant) -> Vec<TracedStep> {
        let tracer = self.tracer.as_ref();
        tracer.map_or_else(Vec::new, |tracer| tracer.steps(epoch, origin, &self.program.commands))
    }

    pub(crate) fn is_trace_cut(&self) -> bool {
        self.tracer.as_ref().is_some_and(|tracer| tracer.is_cut)
    }

    /// Returns whether the lane waits for flags that engines of another fabric signal.
    ///
    /// Such a signal does not wake a parked engine.
    pub(crate) fn has_cross_tier_waits(&self) -> bool {
        let is_wait = |command: &&Command| matches!(command, Command::Wait { .. });
        self.program.commands.iter().filter(is_wait).any(crosses_tiers)
    }

    /// Returns whether a thread has to drive the lane.
    pub(crate) fn is_driven(&self) -> bool {
        let caps = self.queue.caps();
        caps.polled || !caps.queued_wait || self.adder == Adder::Thread
    }

    /// Returns whether a thread makes additions of the lane.
    pub(crate) fn adds_by_thread(&self) -> bool {
        self.adder == Adder::Thread && self.program.adds()
    }

    /// Has [`drive`](Self::drive) submit the commands of captured starts, too.
    pub(crate) fn arm(&mut self) {
        self.armed.get_or_insert(0);
    }

    pub(crate) fn is_armed(&self) -> bool {
        self.armed.is_some()
    }

    pub(crate) fn is_submitted(&self, started: u64) -> bool {
        self.epoch > started
    }

    /// Begins a start with handles, or without. All earlier starts must be submitted if it has
    /// some.
    pub(crate) fn begin(&mut self, has_handles: bool) {
        self.recorded = None;
        self.gate.begin(&self.program.parts, has_handles);
    }

    /// Returns whether the next command reads a chunk that has not departed.
    pub(crate) fn awaits_caller(&self) -> bool {
        let next = self.recorded.map_or(self.next, |(_, next)| next);
        self.gate.end_after(self.parts(), next, usize::MAX).is_none()
    }

    /// Notes that a chunk of the input may be read.
    pub(crate) fn depart(&mut self, cell: Cell) {
        let index = self.recorded.map_or(0, |(index, _)| index);
        let program = captured_program(&self.program, self.following.as_ref(), index);
        self.gate.depart(&program.parts, cell);
    }

    /// Returns whether the newest start reads a chunk of the input that has not departed.
    pub(crate) fn misses(&self, cell: Cell) -> bool {
        self.gate.misses(self.parts(), cell)
    }

    /// Returns the first chunk of the input that the newest start still needs.
    pub(crate) fn first_missing(&self) -> Option<Cell> {
        self.gate.first_missing(self.parts()).map(|(_, cell)| cell)
    }

    /// Returns the chunks of the output that arrive in this lane, in order.
    pub(crate) fn arriving(&self) -> impl Iterator<Item = Cell> {
        self.parts().arriving()
    }

    /// Returns whether a chunk of the output arrives in this lane.
    pub(crate) fn brings(&self, cell: Cell) -> bool {
        self.parts().brings(cell)
    }

    /// Returns the chunks of the input that this lane reads, in order.
    pub(crate) fn departing(&self) -> impl Iterator<Item = Cell> {
        self.parts().departing()
    }

    /// Returns the place where a chunk of the newest start arrives, or `None` if the lane has not
    /// come so far.
    pub(crate) fn arrival(&self, cell: Cell) -> Option<Mark> {
        self.gate.arrival(self.parts(), cell)
    }

    /// Returns whether a captured start has commands left to submit.
    pub(crate) fn is_recorded(&self) -> bool {
        let Some((index, next)) = self.recorded else { return true };
        let program = captured_program(&self.program, self.following.as_ref(), index);
        next == program.commands.len()
    }

    /// Returns the parts of the newest start.
    fn parts(&self) -> &Parts {
        let index = self.recorded.map_or(0, |(index, _)| index);
        &captured_program(&self.program, self.following.as_ref(), index).parts
    }

    /// Counts starts up to `epoch` as made. None of this lane may have commands left to submit.
    pub(crate) fn skip_to(&mut self, epoch: u64) {
        self.epoch = epoch + 1;
        self.queue.skip_to(epoch);
    }

    /// Changes the copies of the next start. No earlier start may have commands left to submit.
    pub(crate) fn resize(&mut self, plan: &Plan, layout: &Layout) -> Result<(), Error> {
        self.program.resize(plan, layout);
        let Some(FusedLane { resizable: Some((blocks, counter_word)), .. }) = self.fused else {
            return Ok(());
        };
        let commands = self.program.launched_commands();
        let replaced = self.queue.replace_compiled(commands, blocks, counter_word);
        self.is_stale = replaced.is_err();
        replaced
    }

    /// Checks that the engine has compiled what a start is to do.
    fn check_compiled(&self) -> Result<(), Error> {
        match self.is_stale {
            false => Ok(()),
            true => Err(Error::new(
                ErrorKind::InvalidArgument,
                "the lengths of the start were refused, expected a resize that returned no error",
            )),
        }
    }

    /// Submits the first commands of the next start, but only if the caller has begun that start.
    ///
    /// # Safety
    /// As [`Queue::submit`], for every command of the program.
    pub(crate) unsafe fn submit_entry(&mut self, started: u64) -> Result<(), Error> {
        while self.epoch <= started && self.next < self.program.entry_commands {
            // SAFETY: the caller guarantees the contract of `Queue::submit`.
            if !unsafe { self.submit_slice(self.program.entry_commands) }? {
                break;
            }
        }
        Ok(())
    }

    /// Submits a slice of commands to the engine, and returns whether the engine had room for it.
    ///
    /// # Safety
    /// As [`Queue::submit`].
    unsafe fn submit_slice(&mut self, end: usize) -> Result<bool, Error> {
        let first = self.next;
        let after = first + self.slice_len(&self.program.commands[first..end]);
        let submitted_at = self.tracer.is_some().then(Instant::now);

        let commands = &self.program.commands[first..after];
        let slice = Commands { commands, sources: &self.program.sources };

        // SAFETY: the caller guarantees the contract of `Queue::submit`.
        if !unsafe { self.queue.submit(slice, Start::Eager(self.epoch)) }? {
            return Ok(false);
        }
        self.next = after;
        let mark = Mark::Submitted(self.queue.last());
        self.gate.reach(&self.program.parts, after, mark);

        if let (Some(tracer), Some(at)) = (&mut self.tracer, submitted_at) {
            let ticket = self.queue.last();
            (first..after).for_each(|index| tracer.submitted(self.epoch, index, ticket, at));
            self.poll()?;
        }
        Ok(true)
    }

    /// Submits as many commands as possible without blocking, and records what the engine has
    /// completed.
    ///
    /// Returns whether the lane made progress, or its engine can make more at once.
    ///
    /// # Safety
    /// As [`Queue::submit`], for every command of the program.
    pub(crate) unsafe fn drive(&mut self, started: u64) -> Result<bool, Error> {
        let before = (self.epoch, self.next, self.queue.completed(), self.queue.last());

        // SAFETY: the caller guarantees the contract of `Queue::submit`.
        unsafe { self.submit(started) }?;
        // SAFETY: the caller guarantees the contract of `Queue::submit`.
        unsafe { self.replay() }?;
        self.poll()?;

        let after = (self.epoch, self.next, self.queue.completed(), self.queue.last());
        Ok(before != after || self.queue.is_busy())
    }

    /// Submits the commands of captured starts until a flag is not signalled yet.
    ///
    /// # Safety
    /// As [`Queue::submit`].
    unsafe fn replay(&mut self) -> Result<(), Error> {
        let Some(mut next) = self.armed else { return Ok(()) };

        while let Some(command) = self.program.commands.get(next) {
            if let Command::Wait { flag } = *command {
                if self.queue.try_consume(flag, FIRST_CAPTURED)? == FlagState::Waiting {
                    break;
                }
                next += 1;
            } else {
                let rest = &self.program.commands[next..];
                let most = rest.len().min(self.queue.caps().slice_ops_max);
                let commands = &rest[..before_wait(&rest[..most])];
                let slice = Commands { commands, sources: &self.program.sources };

                // SAFETY: the caller guarantees the contract of `Queue::submit`.
                if !unsafe { self.queue.submit(slice, FIRST_CAPTURED) }? {
                    break;
                }
                next += commands.len();
            }

            // The next replay of the graph begins with the first command again.
            if next == self.program.commands.len() {
                next = 0;
            }
        }

        self.armed = Some(next);
        Ok(())
    }

    /// Submits the first commands of the operation into the graph that is being captured, as the
    /// start of this index in the graph.
    ///
    /// A captured start has neither epoch nor ticket.
    ///
    /// # Safety
    /// As [`Queue::submit`], for every command of the program, as long as the graph exists.
    pub(crate) unsafe fn capture_entry(&mut self, index: u64) -> Result<(), Error> {
        if let Some(FusedLane { programs, .. }) = self.fused {
            self.check_compiled()?;
            let program = programs.of_start(Start::Captured(index));
            let start = Start::Captured(index);
            // SAFETY: the caller guarantees the contract of `Queue::submit` for the whole program.
            let has_room = unsafe { self.queue.start_compiled(program, start) }?;
            return if has_room { Ok(()) } else { Err(no_room()) };
        }

        let program = captured_program(&self.program, self.following.as_ref(), index);
        let entry = &program.commands[..program.entry_commands];
        // SAFETY: the caller guarantees the contract of `Queue::submit`.
        unsafe { capture(&mut self.queue, entry, &program.sources, Start::Captured(index)) }
    }

    /// Submits the remaining commands of the operation into the graph that is being captured.
    ///
    /// # Safety
    /// As [`capture_entry`](Self::capture_entry).
    pub(crate) unsafe fn capture_rest(&mut self, index: u64) -> Result<(), Error> {
        // The launch of the entry does everything.
        if self.fused.is_some() {
            return Ok(());
        }

        let program = captured_program(&self.program, self.following.as_ref(), index);
        self.recorded = Some((index, program.entry_commands));
        // SAFETY: the caller guarantees the contract of `Queue::submit`.
        unsafe { self.capture_on() }
    }

    /// Submits the commands of the captured start up to one that reads what has not departed.
    ///
    /// # Safety
    /// As [`capture_entry`](Self::capture_entry).
    pub(crate) unsafe fn capture_on(&mut self) -> Result<(), Error> {
        let Some((index, mut next)) = self.recorded else { return Ok(()) };
        let program = captured_program(&self.program, self.following.as_ref(), index);
        let end = program.commands.len();

        while next < end
            && let Some(stop) = self.gate.end_after(&program.parts, next, end)
        {
            let commands = &program.commands[next..stop];
            // SAFETY: the caller guarantees the contract of `Queue::submit`.
            unsafe {
                capture(&mut self.queue, commands, &program.sources, Start::Captured(index))
            }?;
            next = stop;
            self.recorded = Some((index, next));

            // A mark is a call of the driver.
            if self.gate.reaches(&program.parts, next) {
                self.gate.reach(&program.parts, next, self.queue.mark_place()?);
            }
        }
        Ok(())
    }

    /// Records what the engine has completed.
    fn poll(&mut self) -> Result<(), Error> {
        let completed = self.queue.poll()?;
        if let Some(tracer) = &mut self.tracer {
            tracer.completed(completed);
        }
        Ok(())
    }

    /// Submits commands until a flag is not signalled yet or the engine's queue is full.
    ///
    /// # Safety
    /// As [`Queue::submit`].
    pub(crate) unsafe fn submit(&mut self, started: u64) -> Result<(), Error> {
        while self.epoch <= started {
            let start = Start::Eager(self.epoch);
            if let Some(FusedLane { programs, .. }) = self.fused
                && !self.program.launched.is_empty()
                && self.next == self.program.launched.start
            {
                self.check_compiled()?;
                let program = programs.of_start(start);
                // SAFETY: the caller guarantees the contract of `Queue::submit` for the program.
                if !unsafe { self.queue.start_compiled(program, start) }? {
                    return Ok(());
                }
                self.next = self.program.launched.end;
            }

            let Some(&command) = self.program.commands.get(self.next) else {
                if self.next == 0 {
                    // A lane without commands still gets a ticket for each start.
                    let none = Commands { commands: &[], sources: &[] };
                    // SAFETY: an empty slice accesses no memory.
                    if !unsafe { self.queue.submit(none, start) }? {
                        return Ok(());
                    }
                }

                self.queue.mark(self.epoch)?;
                self.epoch += 1;
                self.next = 0;
                continue;
            };

            // The caller has not given what this command reads.
            let end = self.program.commands.len();
            let Some(end) = self.gate.end_after(&self.program.parts, self.next, end) else {
                return Ok(());
            };

            match command {
                Command::Wait { flag } if !self.queue.caps().queued_wait => {
                    match self.queue.try_consume(flag, start)? {
                        FlagState::Signalled => self.pass(),
                        FlagState::Waiting => {
                            self.tracer.as_mut().map(Tracer::polls);
                            return Ok(());
                        }
                        FlagState::Differs => return Err(differing_start()),
                    }
                }
                Command::Reduce { .. } if self.adder == Adder::Thread => {
                    // What is added has arrived when the commands before are complete.
                    if self.queue.poll()? < self.queue.last() {
                        self.tracer.as_mut().map(Tracer::polls);
                        return Ok(());
                    }

                    let reduction =
                        Commands { commands: &[command], sources: &self.program.sources };
                    // SAFETY: the plan is proven, and the commands before are complete, among them
                    // the waits for what is added.
                    unsafe { self.queue.reduce(reduction, start) };
                    self.pass();
                }
                Command::Copy { .. }
                | Command::Reduce { .. }
                | Command::Signal { .. }
                | Command::Wait { .. } => {
                    // The launch of a fused start comes behind the commands before it.
                    let launch = self.program.launched.start;
                    let ahead = self.fused.is_some() && self.next < launch;
                    let end = if ahead { launch } else { end };
                    // SAFETY: the caller guarantees the contract of `Queue::submit`.
                    if !unsafe { self.submit_slice(end) }? {
                        return Ok(());
                    }
                }
            }
        }
        Ok(())
    }

    /// Passes a command that this thread has completed, without a submission.
    fn pass(&mut self) {
        if let Some(tracer) = &mut self.tracer {
            tracer.signalled(self.epoch, self.next);
        }
        self.next += 1;
        self.gate.reach(&self.program.parts, self.next, REACHED);
    }

    /// Returns how many of the commands that are left are submitted together.
    ///
    /// A slice ends before the next wait if the engine cannot queue waits, and before the next
    /// reduction if the thread adds. A lane whose steps are timed submits each command as a slice
    /// of its own.
    fn slice_len(&self, rest: &[Command]) -> usize {
        let caps = self.queue.caps();
        let slice_ops_max = if self.tracer.is_some() { 1 } else { caps.slice_ops_max };
        let mut slice = &rest[..rest.len().min(slice_ops_max)];

        let adds = |command: &Command| matches!(command, Command::Reduce { .. });
        if self.adder == Adder::Thread {
            slice = &slice[..slice.iter().position(adds).unwrap_or(slice.len())];
        }

        if caps.queued_wait { slice.len() } else { before_wait(slice) }
    }

    /// Lets all waits pass, and returns whether the engine is drained.
    pub(crate) fn release(&mut self) -> Result<bool, Error> {
        self.armed = None;
        self.queue.release()
    }
}

/// The start that a thread replays. The operation then has several lanes, and captured starts have
/// one output.
const FIRST_CAPTURED: Start = Start::Captured(0);

/// Returns the program of the start of this index in a graph.
fn captured_program<'p>(
    first: &'p Program,
    following: Option<&'p Program>,
    index: u64,
) -> &'p Program {
    following.filter(|_| index > 0).unwrap_or(first)
}

/// Submits commands into the graph that is being captured.
///
/// # Safety
/// As [`Queue::submit`], as long as the graph exists.
unsafe fn capture(
    queue: &mut Queue,
    commands: &[Command],
    sources: &[RegionOffset],
    start: Start,
) -> Result<(), Error> {
    for commands in commands.chunks(queue.caps().slice_ops_max) {
        let slice = Commands { commands, sources };
        // SAFETY: the caller guarantees the contract of `Queue::submit`.
        if !unsafe { queue.submit(slice, start) }? {
            return Err(no_room());
        }
    }
    Ok(())
}

#[cold]
fn no_room() -> Error {
    Error::new(ErrorKind::QueueFull, "the engine has no room for a captured start")
}

/// Returns how many commands come before the first wait.
fn before_wait(commands: &[Command]) -> usize {
    let wait = commands.iter().position(|command| matches!(command, Command::Wait { .. }));
    wait.unwrap_or(commands.len())
}

/// Returns the error of a flag that a start with other lengths or places has signalled.
///
/// The tracker finds the rank that has signalled the flag.
#[cold]
pub(crate) fn differing_start() -> Error {
    Error::new(ErrorKind::Mismatch, "the lengths or places of a start differ between ranks")
}

/// Maximum number of steps in a trace. A step takes about 100 bytes of memory.
const TRACED_STEPS_MAX: usize = 1 << 18;

struct Tracer {
    lane: LaneId,
    origins: Box<[Step]>,
    records: Vec<StepRecord>,
    open: usize,
    polled_since: Option<Instant>,
    is_cut: bool,
}

struct StepRecord {
    epoch: u64,
    index: usize,
    /// `None` if the host polls the flag instead of the engine.
    ticket: Option<Ticket>,
    submitted: Instant,
    end: Option<Instant>,
}

impl Tracer {
    fn new(lane: LaneId, origins: Box<[Step]>) -> Self {
        let (records, open, polled_since, is_cut) = (Vec::new(), 0, None, false);
        Self { lane, origins, records, open, polled_since, is_cut }
    }

    fn submitted(&mut self, epoch: u64, index: usize, ticket: Ticket, at: Instant) {
        self.push(StepRecord { epoch, index, ticket: Some(ticket), submitted: at, end: None });
    }

    fn polls(&mut self) {
        self.polled_since.get_or_insert_with(Instant::now);
    }

    fn signalled(&mut self, epoch: u64, index: usize) {
        let now = Instant::now();
        let submitted = self.polled_since.take().unwrap_or(now);
        self.push(StepRecord { epoch, index, ticket: None, submitted, end: Some(now) });
    }

    fn completed(&mut self, ticket: Ticket) {
        let now = Instant::now();
        while let Some(record) = self.records.get_mut(self.open)
            && record.ticket.is_none_or(|own| own <= ticket)
        {
            record.end.get_or_insert(now);
            self.open += 1;
        }
    }

    fn push(&mut self, record: StepRecord) {
        if self.records.len() < TRACED_STEPS_MAX {
            self.records.push(record);
        } else {
            self.is_cut = true;
        }
    }

    /// Returns the steps of the start `epoch`, with times relative to `origin`.
    fn steps(&self, epoch: u64, origin: Instant, commands: &[Command]) -> Vec<TracedStep> {
        let nanos = |at: Instant| {
            u64::try_from(at.saturating_duration_since(origin).as_nanos()).unwrap_or(u64::MAX)
        };

        let first = self.records.partition_point(|record| record.epoch < epoch);
        let records = self.records[first..].iter().take_while(|record| record.epoch == epoch);

        // A lane executes its commands in order, so a step cannot begin before the one before it
        // has ended, which may be a step of the start before.
        let mut before = first.checked_sub(1).and_then(|before| self.records[before].end);
        let step = |record: &StepRecord| {
            let begin = before.map_or(record.submitted, |before| before.max(record.submitted));
            before = record.end;
            TracedStep {
                lane: self.lane,
                step: self.origins[record.index],
                bytes: commands[record.index].bytes(),
                submitted_ns: nanos(record.submitted),
                begin_ns: nanos(begin),
                end_ns: record.end.map(nanos),
            }
        };

        records.map(step).collect()
    }
}
