//! Executes the copies and flag operations of a prepared operation, and tracks their completion.
//!
//! Usually the thread that waits for an operation drives its executor. A thread that waits for
//! another operation drives this one too, because peers may be waiting for it. The watchdog
//! examines starts on a stream when they are due.

use std::any::Any;
use std::collections::BTreeSet;
use std::ops::DerefMut;
use std::time::{Duration, Instant, SystemTime};

use peerlane_hal::{CaptureState, Deadline, ErrorKind, Mark};

use crate::error::Error;
use crate::layout::Layout;
use crate::plan::{Cell, Plan};
use crate::run::lane::Lane;
use crate::run::queue::{self, HasQueue, Queue};
use crate::trace::TracedStart;

pub(crate) const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

const TRACED_STARTS_MAX: usize = 1 << 12;

pub(crate) struct Executor {
    lanes: Vec<Lane>,
    options: ExecutorOptions,
    park_misses_events: bool,
    started: u64,
    /// The number of the capture that the last recorded start is in, and the number of its starts.
    recorded: Option<(u64, u64)>,
    start_times: Vec<(Instant, SystemTime)>,
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ExecutorOptions {
    pub(crate) capturable: bool,
    pub(crate) strict: bool,
    pub(crate) traced: bool,
    /// Whether starts can have handles.
    pub(crate) has_handles: bool,
}

#[derive(Debug)]
pub(crate) enum StartFailure {
    /// The operation was refused before anything was submitted to an engine, so the group
    /// continues.
    Refused(Error),
    /// An engine failed, so the group of ranks must end.
    Broken(Error),
    Overdue,
    Aborted,
}

impl StartFailure {
    fn before_submit(error: Error) -> Self {
        let refusals = [ErrorKind::Mismatch, ErrorKind::InvalidArgument, ErrorKind::Unavailable];
        if refusals.contains(&error.kind()) { Self::Refused(error) } else { Self::Broken(error) }
    }
}

impl Executor {
    /// Creates an executor for this rank's part of a verified plan.
    ///
    /// The first lane is lane 0, which alone runs on the caller's stream; every other lane begins
    /// and ends with flags.
    ///
    /// # Safety
    /// The programs of the lanes must stay inside their regions, which their queues keep alive. The
    /// plans of all ranks must be verified, so that ranks that run them do not race. If the
    /// operation is capturable, its memory must live as long as the graphs that record it.
    pub(crate) unsafe fn new(lanes: Vec<Lane>, options: ExecutorOptions) -> Self {
        let park_misses_events = lanes.len() > 1 || lanes.iter().any(Lane::has_cross_tier_waits);
        let (started, recorded, start_times) = (0, None, Vec::new());
        Self { lanes, options, park_misses_events, started, recorded, start_times }
    }

    pub(crate) fn lanes(&self) -> &[Lane] {
        &self.lanes
    }

    pub(crate) fn started(&self) -> u64 {
        self.started
    }

    pub(crate) fn done(&self) -> u64 {
        self.lanes.iter().map(|lane| lane.queue.done()).min().unwrap_or(self.started)
    }

    /// Returns whether the commands of all starts are submitted on lane 0 and on the lanes that no
    /// thread drives.
    pub(crate) fn is_submitted(&self) -> bool {
        let is_awaited = |(index, lane): &(usize, &Lane)| *index == 0 || !lane.is_driven();
        let mut lanes = self.lanes.iter().enumerate().filter(is_awaited);
        lanes.all(|(_, lane)| lane.is_submitted(self.started))
    }

    /// Returns whether the commands of all starts are submitted, including those on lanes that a
    /// thread drives.
    pub(crate) fn has_submitted_all(&self) -> bool {
        self.lanes.iter().all(|lane| lane.is_submitted(self.started))
    }

    /// Returns whether a thread replays the commands of a captured start on one of the lanes.
    pub(crate) fn is_armed(&self) -> bool {
        self.lanes.iter().any(Lane::is_armed)
    }

    /// Counts starts up to `epoch` as made, because another executor has made them. All own starts
    /// must be submitted.
    pub(crate) fn skip_to(&mut self, epoch: u64) {
        self.started = epoch;
        self.lanes.iter_mut().for_each(|lane| lane.skip_to(epoch));
    }

    /// Changes the copies of the next start. All earlier starts must be submitted, and no lane
    /// armed.
    pub(crate) fn resize(&mut self, plan: &Plan, layout: &Layout) -> Result<(), Error> {
        self.lanes.iter_mut().try_for_each(|lane| lane.resize(plan, layout))
    }

    pub(crate) fn is_strict(&self) -> bool {
        self.options.strict
    }

    pub(crate) fn is_driven(&self) -> bool {
        self.lanes.iter().any(Lane::is_driven)
    }

    pub(crate) fn is_polled(&self) -> bool {
        self.lanes.iter().any(|lane| lane.queue.caps().polled)
    }

    /// Returns whether a thread must drive lanes for a start on a stream, which can be captured.
    pub(crate) fn needs_thread(&self, captures: bool) -> bool {
        if captures { self.lanes.len() > 1 } else { self.is_driven() }
    }

    /// Returns whether starts can have handles.
    pub(crate) fn has_handles(&self) -> bool {
        self.options.has_handles
    }

    /// Has the next start be one with handles, or without. All earlier starts must be submitted if
    /// it has some.
    pub(crate) fn set_handles(&mut self, has_handles: bool) {
        self.lanes.iter_mut().for_each(|lane| lane.begin(has_handles));
    }

    /// Returns whether lane 0 cannot go on before the caller lets a chunk of the input depart.
    pub(crate) fn awaits_caller(&self) -> bool {
        self.lanes.first().is_some_and(Lane::awaits_caller)
    }

    /// Returns whether only lane 0 reads the input.
    pub(crate) fn departs_in_one_lane(&self) -> bool {
        self.lanes.iter().skip(1).all(|lane| lane.departing().next().is_none())
    }

    /// Returns the chunks of the output in the order in which they arrive, those of lane 0 first.
    pub(crate) fn arriving(&self) -> Vec<Cell> {
        distinct(self.lanes.iter().flat_map(Lane::arriving))
    }

    /// Returns the chunks of the input in the order in which starts read them, those that lane 0
    /// reads first.
    pub(crate) fn departing(&self) -> Vec<Cell> {
        distinct(self.lanes.iter().flat_map(Lane::departing))
    }

    /// Returns whether the newest start reads a chunk of the input that has not departed.
    pub(crate) fn misses(&self, cell: Cell) -> bool {
        self.lanes.iter().any(|lane| lane.misses(cell))
    }

    /// Returns the first chunk of the input that the newest start still needs.
    pub(crate) fn first_missing(&self) -> Option<Cell> {
        self.lanes.iter().find_map(Lane::first_missing)
    }

    /// Lets the newest start read a chunk of the input, and submits what can be submitted then.
    pub(crate) fn depart(&mut self, cell: Cell) -> Result<(), Error> {
        self.lanes.iter_mut().for_each(|lane| lane.depart(cell));
        if self.lanes.first().is_some_and(|home| !home.is_recorded()) {
            // SAFETY: the caller of `new` guarantees that the commands stay inside regions that
            // live as long as the graph, and do not race.
            return unsafe { self.lanes[0].capture_on() };
        }
        self.submit()
    }

    /// Returns whether a chunk of the newest start has arrived, as far as the engines said at the
    /// last poll. Chunks that no lane announces have arrived when the start is complete.
    pub(crate) fn has_arrived(&self, cell: Cell) -> bool {
        let announced = self.lanes.iter().find(|lane| lane.brings(cell));
        match announced {
            Some(lane) => match lane.arrival(cell) {
                Some(Mark::Submitted(ticket)) => lane.queue.completed() >= ticket,
                Some(Mark::Captured { .. }) | None => false,
            },
            None => self.done() >= self.started,
        }
    }

    /// Has later work on a stream follow the arrival of a chunk of the newest start. Returns
    /// whether it does: lane 0 must have submitted what brings the chunk.
    pub(crate) fn order_after_arrival(
        &mut self,
        cell: Cell,
        stream: &dyn Any,
    ) -> Result<bool, Error> {
        let Some(home) = self.lanes.first_mut() else { return Ok(true) };
        let arrives_here = home.brings(cell);
        let misses_some = home.first_missing().is_some();
        let mark = match arrives_here {
            true => home.arrival(cell),
            // What other lanes bring is complete when lane 0 is.
            false if !misses_some => Some(home.queue.mark_place()?),
            false => None,
        };

        let Some(mark) = mark else { return Ok(false) };
        home.queue.order_after(mark, stream, Self::INSTEAD)?;
        Ok(true)
    }

    /// Has later commands of lane 0 follow the work on a stream of the caller.
    pub(crate) fn follow(&mut self, stream: &dyn Any) -> Result<(), Error> {
        self.lanes[0].queue.fork_beside(stream, Self::INSTEAD)
    }

    /// Has later work on a stream follow all starts.
    pub(crate) fn join(&mut self, stream: &dyn Any) -> Result<(), Error> {
        self.lanes[0].queue.join(stream, Self::INSTEAD)
    }

    pub(crate) fn start(&mut self) -> u64 {
        self.started += 1;
        if self.options.has_handles {
            self.set_handles(false);
        }
        if self.options.traced && self.start_times.len() < TRACED_STARTS_MAX {
            self.start_times.push((Instant::now(), SystemTime::now()));
        }
        self.started
    }

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

        let misses_starts = self.started > self.start_times.len() as u64;
        let is_cut = misses_starts || self.lanes.iter().any(Lane::is_trace_cut);
        Some(((1..).zip(&self.start_times).map(start).collect(), is_cut))
    }

    /// Submits what it can on all lanes without blocking, and records what their engines have
    /// completed.
    ///
    /// The entry of lane 0 is submitted before the other lanes, and these before the rest of lane
    /// 0. On CUDA, a queue that waits for work that the same process submits later may never
    /// continue.
    ///
    /// Returns whether a lane made progress, or can make more at once.
    pub(crate) fn drive(&mut self) -> Result<bool, Error> {
        let mut progressed = false;

        if let [home, others @ ..] = &mut self.lanes[..] {
            // SAFETY: the caller of `new` guarantees that the commands stay inside live regions and
            // do not race.
            unsafe { home.submit_entry(self.started) }?;

            for lane in others {
                // SAFETY: the caller of `new` gives this guarantee for the commands of all lanes.
                progressed |= unsafe { lane.drive(self.started) }?;
            }

            // SAFETY: the caller of `new` gives this guarantee for the commands of all lanes.
            progressed |= unsafe { home.drive(self.started) }?;
        }
        Ok(progressed)
    }

    /// Submits the commands of all starts, in the order of [`drive`](Self::drive), without asking
    /// what is complete.
    pub(crate) fn submit(&mut self) -> Result<(), Error> {
        let [home, others @ ..] = &mut self.lanes[..] else { return Ok(()) };

        // SAFETY: the caller of `new` guarantees that the commands stay inside live regions and do
        // not race.
        unsafe { home.submit_entry(self.started) }?;

        for lane in others {
            // SAFETY: the caller of `new` gives this guarantee for the commands of all lanes.
            unsafe { lane.submit(self.started) }?;
        }

        // SAFETY: the caller of `new` gives this guarantee for the commands of all lanes.
        unsafe { home.submit(self.started) }
    }

    pub(crate) fn park_misses_events(&self) -> bool {
        self.park_misses_events
    }

    pub(crate) fn park(&mut self, limit: Duration) -> Result<(), Error> {
        match self.lanes.iter_mut().find(|lane| lane.queue.done() < self.started) {
            Some(lane) => lane.queue.park(limit),
            None => Ok(()),
        }
    }

    /// Runs `body` with lane 0 on the caller's stream, and tells it which capture the stream is in.
    ///
    /// `admit` is called before anything changes, and can refuse the start.
    pub(crate) fn on_stream<R>(
        &mut self,
        stream: &dyn Any,
        admit: impl FnOnce(&Self, bool) -> Result<(), StartFailure>,
        body: impl FnOnce(&mut Self, CaptureState) -> Result<R, StartFailure>,
    ) -> Result<R, StartFailure> {
        let admit = |executor: &mut Self, capture: CaptureState| {
            let captures = capture.is_capturing();
            executor.check_stream(captures).map_err(StartFailure::Refused)?;
            admit(executor, captures)
        };
        queue::on_stream(self, stream, admit, body)
    }

    /// Runs `body` with lane 0 behind the work that the caller's stream holds, and tells it which
    /// capture the stream is in. The stream stays with the caller.
    ///
    /// `admit` is called before anything changes, and can refuse the start.
    pub(crate) fn beside_stream<R>(
        &mut self,
        stream: &dyn Any,
        admit: impl FnOnce(&Self, bool) -> Result<(), StartFailure>,
        body: impl FnOnce(&mut Self, CaptureState) -> Result<R, StartFailure>,
    ) -> Result<R, StartFailure> {
        let capture = queue::capture_state(self, stream).map_err(StartFailure::Refused)?;
        self.check_stream(capture.is_capturing()).map_err(StartFailure::Refused)?;
        admit(self, capture.is_capturing())?;

        self.follow(stream).map_err(StartFailure::before_submit)?;
        body(self, capture)
    }

    /// Checks that a start that is not captured can go onto a stream, and returns whether the
    /// stream captures.
    pub(crate) fn check_before(&mut self, stream: &dyn Any) -> Result<bool, Error> {
        let capture = queue::capture_state(self, stream)?;
        self.check_stream(false)?;
        Ok(capture.is_capturing())
    }

    /// Checks that a start can go onto a stream.
    fn check_stream(&self, captures: bool) -> Result<(), Error> {
        let refuse = |text: &str| Err(Error::new(ErrorKind::InvalidArgument, text));

        if self.lanes.first().is_some_and(|home| !home.queue.caps().queued_wait) {
            return refuse(
                "the engines cannot queue waits, which a start on a stream needs; use `start`",
            );
        }

        // A stream would go on before a thread has added.
        if self.lanes.first().is_some_and(Lane::adds_by_thread) {
            return refuse(
                "the processor adds the contributions, because the engines cannot, and a stream cannot wait for that; \
                 use `start`",
            );
        }

        if self.options.strict && self.is_driven() {
            return refuse(
                "strict is set, but `start_on` needs a progress thread for the lanes whose engines \
                 cannot wait by themselves; use `start`, or turn strict off",
            );
        }

        if captures && !self.options.capturable {
            return refuse(
                "the stream captures a graph, but the operation is not capturable; prepare it with \
                 `capturable()`",
            );
        }

        Ok(())
    }

    /// Records a start of the operation into the graph that is being captured, and returns the
    /// index of the start in that graph.
    ///
    /// The first start of a graph may follow any other one, so it waits until all ranks have
    /// entered it. The next ones follow it in every replay.
    pub(crate) fn capture(&mut self, capture: CaptureState) -> Result<u64, StartFailure> {
        // After an error, or without a number, the next start counts as the first one.
        let (number, index) = match (capture, self.recorded.take()) {
            (CaptureState::Active(number), Some((last, starts))) if number == last => {
                (Some(number), starts)
            }
            (CaptureState::Active(number), _) => (Some(number), 0),
            (CaptureState::None | CaptureState::Unknown, _) => (None, 0),
        };

        self.record(index)?;
        self.recorded = number.map(|number| (number, index + 1));
        Ok(index)
    }

    fn record(&mut self, index: u64) -> Result<(), StartFailure> {
        let [home, others @ ..] = &mut self.lanes[..] else { return Ok(()) };

        // SAFETY: the caller of `new` guarantees that the commands stay inside regions that live as
        // long as the graph, and do not race.
        unsafe { home.capture_entry(index) }.map_err(StartFailure::before_submit)?;

        // A graph contains only lane 0; a thread replays the others beside it.
        others.iter_mut().for_each(Lane::arm);

        // SAFETY: the caller of `new` gives this guarantee for all commands of lane 0.
        unsafe { home.capture_rest(index) }.map_err(StartFailure::before_submit)
    }

    /// Returns how long a replay has waited for flags of this operation, if one waits.
    pub(crate) fn replay_wait(&mut self) -> Result<Option<Duration>, Error> {
        self.lanes.first_mut().map_or(Ok(None), |home| home.queue.replay_wait())
    }

    pub(crate) fn release(&mut self) {
        let deadline = Deadline::after(DRAIN_TIMEOUT);
        while !self.release_once() && !deadline.has_passed() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub(crate) fn release_once(&mut self) -> bool {
        let mut drained = true;
        for lane in &mut self.lanes {
            // The error of an engine that cannot be released is already recorded.
            drained &= !matches!(lane.release(), Ok(false));
        }
        drained
    }
}

/// Returns the cells without those that were there before.
fn distinct(cells: impl Iterator<Item = Cell>) -> Vec<Cell> {
    let mut known = BTreeSet::new();
    cells.filter(|&cell| known.insert(cell)).collect()
}

impl HasQueue for Executor {
    const INSTEAD: &'static str = "use `start`";
    type Failure = StartFailure;

    fn queue(&mut self) -> impl DerefMut<Target = Queue> {
        &mut self.lanes[0].queue
    }

    fn refused(&self, error: Error) -> StartFailure {
        StartFailure::before_submit(error)
    }

    fn broken(&self, error: Error) -> StartFailure {
        StartFailure::Broken(error)
    }
}

#[cfg(test)]
mod tests;
