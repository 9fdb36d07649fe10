//! Drives the lanes of one prepared plan.
//!
//! Usually the caller that waits for the operation drives it. A caller that waits for another operation drives this one too,
//! because peers may be waiting for it. The watchdog examines starts on a stream when they are due.

use std::any::Any;
use std::time::{Duration, Instant, SystemTime};

use peerlane_hal::{Deadline, ErrorKind};

use crate::error::Error;
use crate::run::lane::Lane;
use crate::trace::TracedStart;

#[cfg(test)]
mod tests;

/// The longest time that an engine may take to drain after a release.
pub(crate) const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// The largest number of starts that are traced.
const TRACED_STARTS_MAX: usize = 1 << 12;

/// The lanes of this rank in one plan, and the number of the last start.
pub(crate) struct Executor {
    lanes: Vec<Lane>,
    options: ExecutorOptions,
    /// Whether a park on one lane can miss events of another lane or of another fabric.
    several: bool,
    started: u64,
    /// The times at which the traced starts were made.
    made: Vec<(Instant, SystemTime)>,
}

/// Options of the operation that the executor needs.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ExecutorOptions {
    /// Whether there are flags for captured starts.
    pub(crate) capturable: bool,
    /// Whether starts on a stream that a thread would have to drive are refused.
    pub(crate) strict: bool,
    /// Whether steps are timed.
    pub(crate) traced: bool,
}

/// Why a start was not enqueued on a stream.
#[derive(Debug)]
pub(crate) enum StartFailure {
    /// It was refused before anything was submitted; the group continues.
    Refused(Error),
    /// An engine failed.
    Broken(Error),
    /// The queue had no room until the deadline.
    Overdue,
    /// The group has ended.
    Aborted,
}

impl StartFailure {
    /// Converts the error of a call that precedes all submissions.
    fn before_submit(error: Error) -> Self {
        let refusals = [ErrorKind::Mismatch, ErrorKind::InvalidArgument, ErrorKind::Unavailable];
        if refusals.contains(&error.kind()) { Self::Refused(error) } else { Self::Broken(error) }
    }
}

impl Executor {
    /// Creates an executor.
    ///
    /// # Safety
    /// The programs of the lanes must stay inside their regions, which their ports keep alive. The plan must be verified, so
    /// that ranks that run it do not race.
    pub(crate) unsafe fn new(lanes: Vec<Lane>, options: ExecutorOptions) -> Self {
        let several = lanes.len() > 1 || lanes.iter().any(Lane::hears_other_fabrics);
        Self { lanes, options, several, started: 0, made: Vec::new() }
    }

    pub(crate) fn lanes(&self) -> &[Lane] {
        &self.lanes
    }

    pub(crate) fn started(&self) -> u64 {
        self.started
    }

    /// Returns the last start that all lanes have completed.
    pub(crate) fn done(&self) -> u64 {
        self.lanes.iter().map(Lane::done).min().unwrap_or(self.started)
    }

    /// Returns whether all started steps have been submitted, except those that a thread has to submit during a start on a
    /// stream.
    pub(crate) fn is_submitted(&self) -> bool {
        let mut lanes = self.lanes.iter().filter(|lane| lane.takes_stream() || !lane.is_driven());
        lanes.all(|lane| lane.is_submitted(self.started))
    }

    /// Returns whether a start on a stream needs a thread that drives it.
    pub(crate) fn is_driven(&self) -> bool {
        self.lanes.iter().any(Lane::is_driven)
    }

    /// Returns whether every replay needs a thread that drives a part of it.
    pub(crate) fn is_armed_by_capture(&self) -> bool {
        !self.lanes.iter().all(Lane::takes_stream)
    }

    /// Returns whether an engine makes progress only when it is polled.
    pub(crate) fn is_polled(&self) -> bool {
        self.lanes.iter().any(Lane::is_polled)
    }

    /// Begins one more start, which [`drive`](Self::drive) submits.
    pub(crate) fn start(&mut self) -> u64 {
        self.started += 1;
        if self.options.traced && self.made.len() < TRACED_STARTS_MAX {
            self.made.push((Instant::now(), SystemTime::now()));
        }
        self.started
    }

    /// Returns the traced starts, and whether some are missing.
    pub(crate) fn traced(&self) -> Option<(Vec<TracedStart>, bool)> {
        if !self.options.traced {
            return None;
        }
        let start = |(epoch, &(origin, made)): (u64, &(Instant, SystemTime))| {
            let since = made.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
            let unix_ns = u64::try_from(since.as_nanos()).unwrap_or(u64::MAX);
            let steps = self.lanes.iter().flat_map(|lane| lane.traced(epoch, origin)).collect();
            TracedStart { epoch, unix_ns, steps }
        };
        let is_cut = self.started > self.made.len() as u64;
        let is_cut = is_cut || self.lanes.iter().any(Lane::is_trace_cut);
        Some(((1..).zip(&self.made).map(start).collect(), is_cut))
    }

    /// Submits and completes what it can without blocking. Returns whether a lane made progress, or can make more at once.
    ///
    /// The entry of lane 0 is submitted before any other lane, and these before the rest of lane 0: on CUDA, a queue that waits
    /// for work that the same process submits later may never continue.
    pub(crate) fn drive(&mut self) -> Result<bool, Error> {
        let mut moved = false;
        if let [home, others @ ..] = &mut self.lanes[..] {
            // SAFETY: `new`'s contract.
            unsafe { home.enter(self.started) }?;
            for lane in others {
                // SAFETY: `new`'s contract.
                moved |= unsafe { lane.drive(self.started) }?;
            }
            // SAFETY: `new`'s contract.
            moved |= unsafe { home.drive(self.started) }?;
        }
        Ok(moved)
    }

    /// Whether a park on one lane can miss events of another lane or of another fabric.
    pub(crate) fn is_several(&self) -> bool {
        self.several
    }

    /// Parks on the first lane that is not done.
    pub(crate) fn park(&mut self, limit: Duration) -> Result<(), Error> {
        match self.lanes.iter_mut().find(|lane| lane.done() < self.started) {
            Some(lane) => lane.park(limit),
            None => Ok(()),
        }
    }

    /// Returns whether a start on `stream` is captured, or an error if the stream can take no start.
    pub(crate) fn is_capturing(&mut self, stream: &dyn Any) -> Result<bool, StartFailure> {
        let refuse =
            |text: &str| Err(StartFailure::Refused(Error::new(ErrorKind::InvalidArgument, text)));
        let mut captures = false;
        for lane in self.lanes.iter_mut().filter(|lane| lane.takes_stream()) {
            captures |= lane.is_capturing(stream).map_err(StartFailure::before_submit)?;
        }
        if !self.lanes.iter().filter(|lane| lane.takes_stream()).all(Lane::queues_waits) {
            return refuse("a start on a stream needs engines that queue waits; use `start`");
        }
        if self.options.strict && self.is_driven() {
            return refuse(
                "strict is set, and a thread would have to drive lanes beside the stream; use `start`",
            );
        }
        if captures && !self.options.capturable {
            return refuse(
                "the stream is being captured, and this all-gather has no flags for that; prepare \
                 it with `capturable()`",
            );
        }
        if captures && !self.lanes.iter().all(|lane| lane.takes_stream() || lane.can_be_armed()) {
            return refuse("the plan has lanes that cannot be captured");
        }
        Ok(captures)
    }

    /// Forks all lanes that take the stream, runs `body`, and joins them even after an error.
    pub(crate) fn forked<T>(
        &mut self,
        stream: &dyn Any,
        body: impl FnOnce(&mut Self) -> Result<T, StartFailure>,
    ) -> Result<T, StartFailure> {
        let mut forks = 0;
        let mut failure = None;
        for lane in self.lanes.iter_mut().filter(|lane| lane.takes_stream()) {
            match lane.fork(stream) {
                Ok(()) => forks += 1,
                Err(error) => {
                    failure = Some(StartFailure::before_submit(error));
                    break;
                }
            }
        }
        let mut answer = failure.map_or_else(|| body(self), Err);
        for lane in self.lanes.iter_mut().filter(|lane| lane.takes_stream()).take(forks) {
            if let Err(error) = lane.join(stream)
                && answer.is_ok()
            {
                answer = Err(StartFailure::Broken(error));
            }
        }
        answer
    }

    /// Records one start into the graph for which the lanes are forked, in the order of [`drive`](Self::drive).
    ///
    /// Lanes that are not forked are armed instead, and driven at every replay.
    pub(crate) fn capture(&mut self) -> Result<(), StartFailure> {
        let [home, others @ ..] = &mut self.lanes[..] else { return Ok(()) };
        // SAFETY: `new`'s contract; that all lives as long as the graph is said to whoever asked
        // for a capturable operation.
        unsafe { home.capture_entry() }.map_err(StartFailure::before_submit)?;
        for lane in others {
            if lane.takes_stream() {
                // SAFETY: as above.
                unsafe { lane.capture_rest() }.map_err(StartFailure::before_submit)?;
            } else {
                lane.arm();
            }
        }
        // SAFETY: as above.
        unsafe { home.capture_rest() }.map_err(StartFailure::before_submit)
    }

    /// Releases all waits after an abort, until the engines are drained.
    pub(crate) fn release(&mut self) {
        let deadline = Deadline::after(DRAIN_TIMEOUT);
        while !self.release_once() && !deadline.has_passed() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Releases all waits once, and returns whether the engines are drained.
    pub(crate) fn release_once(&mut self) -> bool {
        let mut drained = true;
        for lane in &mut self.lanes {
            // An engine that is broken beyond release has its own error recorded.
            drained &= !matches!(lane.release(), Ok(false));
        }
        drained
    }
}
