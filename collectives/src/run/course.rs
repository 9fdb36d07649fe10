//! The lanes of one prepared plan on their way, for whoever drives them.
//!
//! Mostly that is the caller who waits for the operation. A caller who waits for another one drives
//! this one too, since peers may be waiting for it. Starts on a stream are driven by nobody; the
//! watchdog looks at them when they are due.

use std::any::Any;
use std::time::{Duration, Instant, SystemTime};

use peerlane_hal::{Deadline, ErrorKind};

use crate::error::Error;
use crate::run::lane::Lane;
use crate::trace::TracedStart;

#[cfg(test)]
mod tests;

/// How long an engine may take to drain once it is released.
pub(crate) const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// The most starts that are traced.
const TRACED_STARTS_MAX: usize = 1 << 12;

/// All lanes of this rank in one plan, and the last start.
pub(crate) struct Course {
    lanes: Vec<Lane>,
    manner: Manner,
    /// Whether a sleep on one lane may miss what another lane, or another fabric, has to tell.
    several: bool,
    started: u64,
    /// When the traced starts were made.
    made: Vec<(Instant, SystemTime)>,
}

/// What was asked for when the operation was prepared.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Manner {
    /// The windows have flags for captured starts.
    pub(crate) capturable: bool,
    /// No thread may drive what is on a stream.
    pub(crate) strict: bool,
    /// Steps are written down.
    pub(crate) traced: bool,
}

/// Why a start on a stream did not get onto it.
#[derive(Debug)]
pub(crate) enum Stop {
    /// It was refused before anything happened; the group goes on.
    Refused(Error),
    /// An engine failed.
    Broken(Error),
    /// The queue had no room until the deadline.
    Overdue,
    /// The group is over.
    Aborted,
}

impl Stop {
    /// An engine's answer to a call that comes before anything is submitted.
    fn before_submit(error: Error) -> Self {
        let refusals = [ErrorKind::Mismatch, ErrorKind::InvalidArgument, ErrorKind::Unavailable];
        if refusals.contains(&error.kind()) { Self::Refused(error) } else { Self::Broken(error) }
    }
}

impl Course {
    /// # Safety
    /// The lanes' programs stay inside their windows, which their ports keep alive; the plan is
    /// verified, so that ranks that run it do not race.
    pub(crate) unsafe fn new(lanes: Vec<Lane>, manner: Manner) -> Self {
        let several = lanes.len() > 1 || lanes.iter().any(Lane::hears_other_fabrics);
        Self { lanes, manner, several, started: 0, made: Vec::new() }
    }

    pub(crate) fn lanes(&self) -> &[Lane] {
        &self.lanes
    }

    pub(crate) fn started(&self) -> u64 {
        self.started
    }

    /// The last start that all lanes have completed.
    pub(crate) fn done(&self) -> u64 {
        self.lanes.iter().map(Lane::done).min().unwrap_or(self.started)
    }

    /// Whether everything that was started has been handed to the engines, but for what somebody has
    /// to drive beside a stream.
    pub(crate) fn is_submitted(&self) -> bool {
        let mut lanes = self.lanes.iter().filter(|lane| lane.takes_stream() || !lane.is_driven());
        lanes.all(|lane| lane.is_submitted(self.started))
    }

    /// Whether a start on a stream comes further only while somebody drives it.
    pub(crate) fn is_driven(&self) -> bool {
        self.lanes.iter().any(Lane::is_driven)
    }

    /// Whether somebody has to drive a part of every replay.
    pub(crate) fn is_armed_by_capture(&self) -> bool {
        !self.lanes.iter().all(Lane::takes_stream)
    }

    /// Whether something moves only while somebody calls.
    pub(crate) fn is_polled(&self) -> bool {
        self.lanes.iter().any(Lane::is_polled)
    }

    /// One start more; [`drive`](Self::drive) gets it under way.
    pub(crate) fn start(&mut self) -> u64 {
        self.started += 1;
        if self.manner.traced && self.made.len() < TRACED_STARTS_MAX {
            self.made.push((Instant::now(), SystemTime::now()));
        }
        self.started
    }

    /// What has been traced: the starts, and whether something is missing.
    pub(crate) fn traced(&self) -> Option<(Vec<TracedStart>, bool)> {
        if !self.manner.traced {
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

    /// Submits and completes what it can without blocking. Returns whether a lane made progress, or can make
    /// more at once.
    ///
    /// The entry of lane 0 is submitted before any other lane, and these before the rest of lane 0:
    /// a queue that waits for what the same process submits only later may wait for ever on CUDA.
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

    /// Whether a sleep on one lane may miss what another lane, or another fabric, has to tell.
    pub(crate) fn is_several(&self) -> bool {
        self.several
    }

    /// Gives the processor away on the first lane that is not done.
    pub(crate) fn park(&mut self, limit: Duration) -> Result<(), Error> {
        match self.lanes.iter_mut().find(|lane| lane.done() < self.started) {
            Some(lane) => lane.park(limit),
            None => Ok(()),
        }
    }

    /// Whether a start on `stream` is recorded instead of run; refuses what cannot be either.
    pub(crate) fn is_capturing(&mut self, stream: &dyn Any) -> Result<bool, Stop> {
        let refuse = |text: &str| Err(Stop::Refused(Error::new(ErrorKind::InvalidArgument, text)));
        let mut captures = false;
        for lane in self.lanes.iter_mut().filter(|lane| lane.takes_stream()) {
            captures |= lane.is_capturing(stream).map_err(Stop::before_submit)?;
        }
        if !self.lanes.iter().filter(|lane| lane.takes_stream()).all(Lane::queues_waits) {
            return refuse("a start on a stream needs engines that queue waits; use `start`");
        }
        if self.manner.strict && self.is_driven() {
            return refuse(
                "strict is set, and a thread would have to drive lanes beside the stream; use `start`",
            );
        }
        if captures && !self.manner.capturable {
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

    /// Forks all lanes that take the stream, does `body`, and joins them whatever came of it.
    pub(crate) fn forked<T>(
        &mut self,
        stream: &dyn Any,
        body: impl FnOnce(&mut Self) -> Result<T, Stop>,
    ) -> Result<T, Stop> {
        let mut forks = 0;
        let mut failure = None;
        for lane in self.lanes.iter_mut().filter(|lane| lane.takes_stream()) {
            match lane.fork(stream) {
                Ok(()) => forks += 1,
                Err(error) => {
                    failure = Some(Stop::before_submit(error));
                    break;
                }
            }
        }
        let mut answer = failure.map_or_else(|| body(self), Err);
        for lane in self.lanes.iter_mut().filter(|lane| lane.takes_stream()).take(forks) {
            if let Err(error) = lane.join(stream)
                && answer.is_ok()
            {
                answer = Err(Stop::Broken(error));
            }
        }
        answer
    }

    /// Records one start into the graph for which the lanes are forked, in the order of
    /// [`drive`](Self::drive). Lanes that are not forked are armed instead: driven at every replay.
    pub(crate) fn capture(&mut self) -> Result<(), Stop> {
        let [home, others @ ..] = &mut self.lanes[..] else { return Ok(()) };
        // SAFETY: `new`'s contract; that all lives as long as the graph is said to whoever asked
        // for a capturable operation.
        unsafe { home.capture_entry() }.map_err(Stop::before_submit)?;
        for lane in others {
            if lane.takes_stream() {
                // SAFETY: as above.
                unsafe { lane.capture_rest() }.map_err(Stop::before_submit)?;
            } else {
                lane.arm();
            }
        }
        // SAFETY: as above.
        unsafe { home.capture_rest() }.map_err(Stop::before_submit)
    }

    /// Lets every wait pass after an abort, until the engines are drained.
    pub(crate) fn release(&mut self) {
        let deadline = Deadline::after(DRAIN_TIMEOUT);
        while !self.release_once() && !deadline.has_passed() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The same once; whether the engines are drained.
    pub(crate) fn release_once(&mut self) -> bool {
        let mut drained = true;
        for lane in &mut self.lanes {
            // An engine that is broken beyond release has its own error recorded.
            drained &= !matches!(lane.release(), Ok(false));
        }
        drained
    }
}
