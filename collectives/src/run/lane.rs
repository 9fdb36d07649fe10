//! Executes one sequence of copies and flag operations of a prepared operation on one engine.

use std::any::Any;
use std::collections::VecDeque;
use std::task::Waker;
use std::time::{Duration, Instant};

use peerlane_hal::{ErrorKind, SharedQueues, Ticket};

use crate::error::Error;
use crate::layout::Layout;
use crate::plan::{LaneId, Plan, Step};
use crate::run::buffers::{FlagAddress, FlagState, Start};
use crate::run::port::{BoundStep, Port, additions, slices, steps_of_ops};
use crate::run::program::Program;
use crate::trace::TracedStep;

const OPEN_STARTS_RESERVED: usize = 64;

/// What adds the contributions of a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Adder {
    /// The lane does not add.
    None,
    Thread,
    Engine,
}

pub(crate) struct Lane {
    program: Program,
    adder: Adder,
    port: Box<dyn Port>,
    takes_stream: bool,
    tracer: Option<Tracer>,
    armed: Option<usize>,
    epoch: u64,
    next: usize,
    open: VecDeque<(u64, Ticket)>,
    last: Ticket,
}

impl Lane {
    /// With `takes_stream`, the lane forks from the caller's stream and joins it. Every other lane begins and ends with
    /// flags.
    pub(crate) fn new(
        id: LaneId,
        (program, adder): (Program, Adder),
        port: Box<dyn Port>,
        takes_stream: bool,
        traced: bool,
    ) -> Self {
        let origins = program.origins.as_ref().filter(|_| traced);
        let tracer = origins.map(|origins| Tracer::new(id, origins.clone()));
        let open = VecDeque::with_capacity(OPEN_STARTS_RESERVED);
        let (epoch, next, last, armed) = (1, 0, Ticket::NONE, None);
        Self { program, adder, port, takes_stream, tracer, armed, epoch, next, open, last }
    }

    pub(crate) fn traced(&self, epoch: u64, origin: Instant) -> Vec<TracedStep> {
        let tracer = self.tracer.as_ref();
        tracer.map_or_else(Vec::new, |tracer| tracer.steps(epoch, origin, &self.program.steps))
    }

    pub(crate) fn is_trace_cut(&self) -> bool {
        self.tracer.as_ref().is_some_and(Tracer::is_cut)
    }

    pub(crate) fn queues_waits(&self) -> bool {
        self.port.caps().queued_wait
    }

    pub(crate) fn shared_queues(&self) -> Option<SharedQueues> {
        self.port.caps().shared_queues
    }

    pub(crate) fn is_polled(&self) -> bool {
        self.port.caps().polled
    }

    /// A signal from an engine of another fabric does not wake a parked engine.
    pub(crate) fn has_cross_tier_waits(&self) -> bool {
        let mut steps = self.program.steps.iter();
        steps.any(|step| matches!(step, BoundStep::Wait { flag } if flag.crosses_tiers))
    }

    pub(crate) fn is_driven(&self) -> bool {
        self.is_polled() || !self.queues_waits() || self.adder == Adder::Thread
    }

    pub(crate) fn arm(&mut self) {
        self.armed.get_or_insert(0);
    }

    pub(crate) fn takes_stream(&self) -> bool {
        self.takes_stream
    }

    pub(crate) fn is_capturing(&mut self, stream: &dyn Any) -> Result<bool, Error> {
        self.port.is_capturing(stream)
    }

    pub(crate) fn fork(&mut self, from: &dyn Any) -> Result<(), Error> {
        self.port.fork(from)
    }

    pub(crate) fn join(&mut self, into: &dyn Any) -> Result<(), Error> {
        self.port.join(into)
    }

    pub(crate) fn replay_wait(&mut self) -> Result<Option<Duration>, Error> {
        if self.takes_stream { self.port.replay_wait() } else { Ok(None) }
    }

    pub(crate) fn is_submitted(&self, started: u64) -> bool {
        self.epoch > started
    }

    pub(crate) fn done(&self) -> u64 {
        self.open.front().map_or(self.epoch, |open| open.0) - 1
    }

    /// Counts starts up to `epoch` as made. None of this lane may have steps left to submit.
    pub(crate) fn skip_to(&mut self, epoch: u64) {
        self.epoch = epoch + 1;
    }

    /// Changes the copies of the next start. No earlier start may have steps left to submit.
    pub(crate) fn resize(&mut self, plan: &Plan, layout: &Layout) {
        self.program.resize(plan, layout);
    }

    pub(crate) fn is_armed(&self) -> bool {
        self.armed.is_some()
    }

    pub(crate) fn waker(&self) -> Waker {
        self.port.waker()
    }

    pub(crate) fn park(&mut self, limit: Duration) -> Result<(), Error> {
        self.port.park(limit)
    }

    /// Submits the first steps of the next start, but only if the caller has begun that start.
    ///
    /// # Safety
    /// As [`Port::submit`], for every step of the program.
    pub(crate) unsafe fn submit_entry(&mut self, started: u64) -> Result<(), Error> {
        while self.epoch <= started && self.next < self.program.entry_steps {
            // SAFETY: the caller guarantees the contract of `Port::submit`.
            if !unsafe { self.submit_slice(self.program.entry_steps) }? {
                break;
            }
        }
        Ok(())
    }

    /// Submits steps to the engine, and returns whether the engine's queue had room for them.
    ///
    /// # Safety
    /// As [`Port::submit`].
    unsafe fn submit_slice(&mut self, end: usize) -> Result<bool, Error> {
        let rest = &self.program.steps[self.next..end];
        let slice = &rest[..self.slice_len(rest)];
        let submitted_at = self.tracer.is_some().then(Instant::now);
        // SAFETY: the caller guarantees the contract of `Port::submit`.
        match unsafe { self.port.submit(slice, Start::Eager(self.epoch)) } {
            Ok(ticket) => self.last = ticket,
            Err(error) if error.kind() == ErrorKind::QueueFull => return Ok(false),
            Err(error) => return Err(error),
        }
        let index = self.next;
        self.next += slice.len();
        if let (Some(tracer), Some(at)) = (&mut self.tracer, submitted_at) {
            (index..self.next).for_each(|at_step| {
                tracer.submitted(self.epoch, at_step, self.last, at);
            });
            self.update_done()?;
        }
        Ok(true)
    }

    /// Submits as many steps as possible without blocking, and records what the engine has completed.
    ///
    /// Returns whether the lane made progress, or its engine can make more at once.
    ///
    /// # Safety
    /// As [`Port::submit`], for every step of the program.
    pub(crate) unsafe fn drive(&mut self, started: u64) -> Result<bool, Error> {
        let before = (self.epoch, self.next, self.done(), self.last);
        // SAFETY: the caller guarantees the contract of `Port::submit`.
        unsafe { self.submit(started) }?;
        // SAFETY: the caller guarantees the contract of `Port::submit`.
        unsafe { self.replay() }?;
        self.update_done()?;
        let after = (self.epoch, self.next, self.done(), self.last);
        Ok(before != after || self.port.is_busy())
    }

    /// Submits the steps of graph replays until a flag is not signalled yet.
    ///
    /// # Safety
    /// As [`Port::submit`].
    unsafe fn replay(&mut self) -> Result<(), Error> {
        let Some(mut next) = self.armed else { return Ok(()) };
        while let Some(step) = self.program.steps.get(next) {
            let taken = if let BoundStep::Wait { flag } = *step {
                if try_consume(&*self.port, flag, Start::Captured)? == FlagState::Waiting {
                    break;
                }
                1
            } else {
                let rest = &self.program.steps[next..];
                let most = steps_of_ops(rest, self.port.caps().slice_ops_max);
                let slice = &rest[..steps_before_wait(&rest[..most])];
                // SAFETY: the caller guarantees the contract of `Port::submit`.
                match unsafe { self.port.submit(slice, Start::Captured) } {
                    Ok(ticket) => self.last = ticket,
                    Err(error) if error.kind() == ErrorKind::QueueFull => break,
                    Err(error) => return Err(error),
                }
                slice.len()
            };
            next += taken;
            if next == self.program.steps.len() {
                next = 0;
            }
        }
        self.armed = Some(next);
        Ok(())
    }

    /// Submits the first steps of the operation into the graph that is being captured.
    ///
    /// A captured start has neither epoch nor ticket.
    ///
    /// # Safety
    /// As [`Port::submit`], for every step of the program, as long as the graph exists.
    pub(crate) unsafe fn capture_entry(&mut self) -> Result<(), Error> {
        let entry = &self.program.steps[..self.program.entry_steps];
        // SAFETY: the caller guarantees the contract of `Port::submit`.
        unsafe { capture(&mut *self.port, entry) }
    }

    /// Submits the remaining steps of the operation into the graph that is being captured.
    ///
    /// # Safety
    /// As [`capture_entry`](Self::capture_entry).
    pub(crate) unsafe fn capture_rest(&mut self) -> Result<(), Error> {
        let rest = &self.program.steps[self.program.entry_steps..];
        // SAFETY: the caller guarantees the contract of `Port::submit`.
        unsafe { capture(&mut *self.port, rest) }
    }

    fn update_done(&mut self) -> Result<(), Error> {
        let completed = self.port.completed()?;
        if let Some(tracer) = &mut self.tracer {
            tracer.completed(completed);
        }
        while self.open.front().is_some_and(|(_, ticket)| *ticket <= completed) {
            self.open.pop_front();
        }
        Ok(())
    }

    /// Submits steps until a flag is not signalled yet or the engine's queue is full.
    ///
    /// # Safety
    /// As [`Port::submit`].
    unsafe fn submit(&mut self, started: u64) -> Result<(), Error> {
        while self.epoch <= started {
            if self.next == self.program.steps.len() {
                if self.next == 0 {
                    // A lane without steps still gets a ticket for each start.
                    // SAFETY: an empty slice accesses no memory.
                    self.last = unsafe { self.port.submit(&[], Start::Eager(self.epoch)) }?;
                }
                self.open.push_back((self.epoch, self.last));
                (self.epoch, self.next) = (self.epoch + 1, 0);
                continue;
            }
            let rest = &self.program.steps[self.next..];
            if let (false, BoundStep::Wait { flag }) = (self.queues_waits(), rest[0]) {
                match try_consume(&*self.port, flag, Start::Eager(self.epoch))? {
                    FlagState::Signalled => {}
                    FlagState::Waiting => {
                        self.tracer.as_mut().map(Tracer::polls);
                        return Ok(());
                    }
                    FlagState::Differs => return Err(differing_start()),
                }
                self.pass(1);
                continue;
            }
            if let (BoundStep::Reduce { .. }, Adder::Thread) = (rest[0], self.adder) {
                if self.port.completed()? < self.last {
                    self.tracer.as_mut().map(Tracer::polls);
                    return Ok(());
                }
                let count = 1 + additions(&rest[0], &rest[1..]).0.len();
                // SAFETY: the plan is proven, and the steps before are complete, among them the waits for what is added.
                unsafe { self.port.reduce(&rest[..count], Start::Eager(self.epoch)) };
                self.pass(count);
                continue;
            }
            // SAFETY: the caller guarantees the contract of `Port::submit`.
            if !unsafe { self.submit_slice(self.program.steps.len()) }? {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Passes steps that this thread has completed, without a submission.
    fn pass(&mut self, count: usize) {
        for _ in 0..count {
            if let Some(tracer) = &mut self.tracer {
                tracer.signalled(self.epoch, self.next);
            }
            self.next += 1;
        }
    }

    /// A slice of steps ends before the next wait if the engine cannot queue waits, and before the next addition if the thread
    /// adds. A lane whose steps are timed submits each op as a slice of its own.
    fn slice_len(&self, rest: &[BoundStep]) -> usize {
        let caps = self.port.caps();
        let slice_ops_max = if self.tracer.is_some() { 1 } else { caps.slice_ops_max };
        let most = rest.len().min(slice_ops_max);
        let adds = |step: &BoundStep| matches!(step, BoundStep::Reduce { .. });
        let most = match self.adder {
            Adder::None => most,
            Adder::Thread => rest[..most].iter().position(adds).unwrap_or(most),
            Adder::Engine => steps_of_ops(rest, slice_ops_max),
        };
        if caps.queued_wait {
            return most;
        }
        steps_before_wait(&rest[..most])
    }

    pub(crate) fn release(&mut self) -> Result<bool, Error> {
        self.armed = None;
        self.port.release()?;
        Ok(self.port.completed()? >= self.last)
    }
}

/// Submits steps into the graph that is being captured.
///
/// # Safety
/// As [`Port::submit`], as long as the graph exists.
unsafe fn capture(port: &mut dyn Port, steps: &[BoundStep]) -> Result<(), Error> {
    for slice in slices(steps, port.caps().slice_ops_max) {
        // SAFETY: the caller guarantees the contract of `Port::submit`.
        unsafe { port.submit(slice, Start::Captured) }?;
    }
    Ok(())
}

fn steps_before_wait(steps: &[BoundStep]) -> usize {
    let wait = steps.iter().position(|step| matches!(step, BoundStep::Wait { .. }));
    wait.unwrap_or(steps.len())
}

fn try_consume(port: &dyn Port, flag: FlagAddress, start: Start) -> Result<FlagState, Error> {
    port.try_consume(flag, start).ok_or_else(|| {
        let text =
            "the flags are in device memory, expected host memory for an engine that cannot queue \
             waits";
        Error::new(ErrorKind::Mismatch, text)
    })
}

/// Returns the error of a flag that a start with other lengths or places has signalled; the tracker finds its writer.
#[cold]
pub(crate) fn differing_start() -> Error {
    Error::new(ErrorKind::Mismatch, "the lengths or places of a start differ between ranks")
}

/// A step in a trace takes about 100 bytes of memory, so the number of steps is limited.
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

    fn is_cut(&self) -> bool {
        self.is_cut
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

    fn steps(&self, epoch: u64, origin: Instant, bound: &[BoundStep]) -> Vec<TracedStep> {
        let nanos = |at: Instant| {
            u64::try_from(at.saturating_duration_since(origin).as_nanos()).unwrap_or(u64::MAX)
        };
        let first = self.records.partition_point(|record| record.epoch < epoch);
        let mut before = first.checked_sub(1).and_then(|before| self.records[before].end);
        let records = self.records[first..].iter().take_while(|record| record.epoch == epoch);
        let step = |record: &StepRecord| {
            let begin = before.map_or(record.submitted, |before| before.max(record.submitted));
            before = record.end;
            TracedStep {
                lane: self.lane,
                step: self.origins[record.index],
                bytes: bound[record.index].bytes(),
                submitted_ns: nanos(record.submitted),
                begin_ns: nanos(begin),
                end_ns: record.end.map(nanos),
            }
        };
        records.map(step).collect()
    }
}
