//! Drives one lane through the starts of a prepared plan.

use std::any::Any;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Waker;
use std::time::{Duration, Instant};

use peerlane_hal::{ErrorKind, Ticket};

use crate::error::Error;
use crate::plan::LaneId;
use crate::run::port::{Bound, Port};
use crate::run::program::Program;
use crate::run::tracer::Tracer;
use crate::run::turns::Start;
use crate::trace::TracedStep;
use crate::window::FlagSpot;

/// Number of open starts that are tracked without allocating.
const OPEN_STARTS: usize = 64;

/// A lane: its program, its port, and its progress.
pub(crate) struct Lane {
    program: Program,
    port: Box<dyn Port>,
    takes_stream: bool,
    tracer: Option<Tracer>,
    /// The next step of the current replay, if there can be replays.
    armed: Option<usize>,
    /// The start that is being submitted, and its next step.
    epoch: u64,
    next: usize,
    /// Starts that are completely submitted, each with its last ticket.
    open: VecDeque<(u64, Ticket)>,
    last: Ticket,
    done: u64,
}

impl Lane {
    /// Creates a lane. With `takes_stream`, it begins and ends with the caller's stream if there is one; every other lane begins
    /// and ends with flags.
    pub(crate) fn new(
        id: LaneId,
        mut program: Program,
        port: Box<dyn Port>,
        takes_stream: bool,
    ) -> Self {
        let tracer = program.origins.take().map(|origins| Tracer::new(id, origins));
        let open = VecDeque::with_capacity(OPEN_STARTS);
        let (epoch, next, last, done, armed) = (1, 0, Ticket::NONE, 0, None);
        Self { program, port, takes_stream, tracer, armed, epoch, next, open, last, done }
    }

    /// Returns the timed steps of start `epoch`, which was made at `origin`.
    pub(crate) fn traced(&self, epoch: u64, origin: Instant) -> Vec<TracedStep> {
        let tracer = self.tracer.as_ref();
        tracer.map_or_else(Vec::new, |tracer| tracer.steps(epoch, origin, &self.program.steps))
    }

    /// Returns whether some steps were not recorded.
    pub(crate) fn is_trace_cut(&self) -> bool {
        self.tracer.as_ref().is_some_and(Tracer::is_cut)
    }

    pub(crate) fn queues_waits(&self) -> bool {
        self.port.caps().queued_wait
    }

    pub(crate) fn is_polled(&self) -> bool {
        self.port.caps().polled
    }

    /// Returns whether engines of another fabric signal this lane; they do not wake its engine's park.
    pub(crate) fn hears_other_fabrics(&self) -> bool {
        let mut steps = self.program.steps.iter();
        steps.any(|step| matches!(step, Bound::Wait { flag } if flag.crossing))
    }

    /// Returns whether the lane makes progress only when it is driven.
    pub(crate) fn is_driven(&self) -> bool {
        self.is_polled() || !self.queues_waits()
    }

    /// Returns whether the executor can wait for its flags, which replays need if the lane takes no stream.
    pub(crate) fn can_be_armed(&self) -> bool {
        let readable = |step: &Bound| match *step {
            Bound::Wait { flag } => self.port.flag(flag, Start::Captured).is_some(),
            _ => true,
        };
        self.program.steps.iter().all(readable)
    }

    /// Makes the lane take part in every replay from now on.
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

    /// Returns whether all starts up to `started` have been submitted.
    pub(crate) fn is_submitted(&self, started: u64) -> bool {
        self.epoch > started
    }

    /// Returns the last start that this lane has completed.
    pub(crate) fn done(&self) -> u64 {
        self.done
    }

    pub(crate) fn waker(&self) -> Waker {
        self.port.waker()
    }

    pub(crate) fn park(&mut self, limit: Duration) -> Result<(), Error> {
        self.port.park(limit)
    }

    /// Submits the entry of the next start, if that is at most `started`.
    ///
    /// # Safety
    /// As [`Port::submit`], for every step of the program.
    pub(crate) unsafe fn enter(&mut self, started: u64) -> Result<(), Error> {
        while self.epoch <= started && self.next < self.program.entry {
            // SAFETY: the caller's.
            if !unsafe { self.submit_slice(self.program.entry) }? {
                break;
            }
        }
        Ok(())
    }

    /// Submits the next slice of the start, up to step `end`, and returns whether there was room.
    ///
    /// # Safety
    /// As [`Port::submit`].
    unsafe fn submit_slice(&mut self, end: usize) -> Result<bool, Error> {
        let rest = &self.program.steps[self.next..end];
        let slice = &rest[..self.slice(rest)];
        let submitted_at = self.tracer.is_some().then(Instant::now);
        // SAFETY: the caller's.
        match unsafe { self.port.submit(slice, Start::Eager(self.epoch)) } {
            Ok(ticket) => self.last = ticket,
            Err(error) if error.kind() == ErrorKind::QueueFull => return Ok(false),
            Err(error) => return Err(error),
        }
        let index = self.next;
        self.next += slice.len();
        if let (Some(tracer), Some(at)) = (&mut self.tracer, submitted_at) {
            tracer.submitted(self.epoch, index, self.last, at);
            self.look()?;
        }
        Ok(true)
    }

    /// Submits steps of the starts up to `started`, and collects completed ones. Returns whether there were any, or the engine
    /// can make more progress at once.
    ///
    /// # Safety
    /// As [`Port::submit`], for every step of the program.
    pub(crate) unsafe fn drive(&mut self, started: u64) -> Result<bool, Error> {
        let before = (self.epoch, self.next, self.done, self.last);
        // SAFETY: the caller's.
        unsafe { self.submit(started) }?;
        // SAFETY: the caller's.
        unsafe { self.replay() }?;
        self.look()?;
        let after = (self.epoch, self.next, self.done, self.last);
        Ok(before != after || self.port.is_busy())
    }

    /// Takes part in replays as far as their flags allow, one after another.
    ///
    /// # Safety
    /// As [`Port::submit`].
    unsafe fn replay(&mut self) -> Result<(), Error> {
        let Some(mut next) = self.armed else { return Ok(()) };
        while let Some(step) = self.program.steps.get(next) {
            let taken = if let Bound::Wait { flag } = *step {
                if !reached(&*self.port, flag, Start::Captured)? {
                    break;
                }
                1
            } else {
                let rest = &self.program.steps[next..];
                let most = rest.len().min(self.port.caps().slice_ops_max);
                let slice = &rest[..until_wait(&rest[..most])];
                // SAFETY: the caller's.
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

    /// Submits the entry of a start into the graph that is being captured. A captured start has neither epoch nor ticket.
    ///
    /// # Safety
    /// As [`Port::submit`], for every step of the program, as long as the graph exists.
    pub(crate) unsafe fn capture_entry(&mut self) -> Result<(), Error> {
        let entry = &self.program.steps[..self.program.entry];
        // SAFETY: the caller's.
        unsafe { capture(&mut *self.port, entry) }
    }

    /// Submits the steps after the entry.
    ///
    /// # Safety
    /// As [`capture_entry`](Self::capture_entry).
    pub(crate) unsafe fn capture_rest(&mut self) -> Result<(), Error> {
        let rest = &self.program.steps[self.program.entry..];
        // SAFETY: the caller's.
        unsafe { capture(&mut *self.port, rest) }
    }

    fn look(&mut self) -> Result<(), Error> {
        let completed = self.port.completed()?;
        if let Some(tracer) = &mut self.tracer {
            tracer.completed(completed);
        }
        while let Some(&(epoch, ticket)) = self.open.front()
            && ticket <= completed
        {
            self.open.pop_front();
            self.done = epoch;
        }
        Ok(())
    }

    /// # Safety
    /// As [`Port::submit`].
    unsafe fn submit(&mut self, started: u64) -> Result<(), Error> {
        while self.epoch <= started {
            if self.next == self.program.steps.len() {
                if self.next == 0 {
                    // A lane without steps still gets a ticket a start.
                    // SAFETY: no op.
                    self.last = unsafe { self.port.submit(&[], Start::Eager(self.epoch)) }?;
                }
                self.open.push_back((self.epoch, self.last));
                (self.epoch, self.next) = (self.epoch + 1, 0);
                continue;
            }
            let rest = &self.program.steps[self.next..];
            if let (false, Bound::Wait { flag }) = (self.queues_waits(), rest[0]) {
                if !reached(&*self.port, flag, Start::Eager(self.epoch))? {
                    self.tracer.as_mut().map(Tracer::looks);
                    return Ok(());
                }
                if let Some(tracer) = &mut self.tracer {
                    tracer.reached(self.epoch, self.next);
                }
                self.next += 1;
                continue;
            }
            // SAFETY: the caller's.
            if !unsafe { self.submit_slice(self.program.steps.len()) }? {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Returns the number of steps of `rest` in the next slice: up to the limit, and up to the next wait if waits cannot be
    /// queued. If steps are timed, each is a slice of its own.
    fn slice(&self, rest: &[Bound]) -> usize {
        let caps = self.port.caps();
        let slice_ops_max = if self.tracer.is_some() { 1 } else { caps.slice_ops_max };
        let most = rest.len().min(slice_ops_max);
        if caps.queued_wait {
            return most;
        }
        until_wait(&rest[..most])
    }

    /// Releases blocked waits, drops unsubmitted steps, and returns whether the engine is drained.
    pub(crate) fn release(&mut self) -> Result<bool, Error> {
        self.armed = None;
        self.port.release()?;
        Ok(self.port.completed()? >= self.last)
    }
}

/// # Safety
/// As [`Port::submit`], as long as the graph lives.
unsafe fn capture(port: &mut dyn Port, steps: &[Bound]) -> Result<(), Error> {
    for slice in steps.chunks(port.caps().slice_ops_max) {
        // SAFETY: the caller's.
        unsafe { port.submit(slice, Start::Captured) }?;
    }
    Ok(())
}

/// Returns the number of steps before the next wait.
fn until_wait(steps: &[Bound]) -> usize {
    let wait = steps.iter().position(|step| matches!(step, Bound::Wait { .. }));
    wait.unwrap_or(steps.len())
}

/// Returns whether a flag has the value of this start.
fn holds(flag: &AtomicU64, start: Start) -> bool {
    // Acquire: what the writer published is readable by what is submitted next.
    flag.load(Ordering::Acquire) >= start.value()
}

/// Returns whether a flag has been signalled; resets the flag of a captured start.
fn reached(port: &dyn Port, flag: FlagSpot, start: Start) -> Result<bool, Error> {
    let flag = port.flag(flag, start).ok_or_else(|| {
        let text = "an engine without queued waits needs flags that the host can read";
        Error::new(ErrorKind::Mismatch, text)
    })?;
    let reached = holds(flag, start);
    if reached && start == Start::Captured {
        // Release: whoever sees the zero may signal again.
        flag.store(0, Ordering::Release);
    }
    Ok(reached)
}
