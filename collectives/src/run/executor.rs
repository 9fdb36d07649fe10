//! Executes the copies and flag operations of a prepared operation, and tracks their completion.
//!
//! Usually the thread that waits for an operation drives its executor. A thread that waits for another operation drives this
//! one too, because peers may be waiting for it. The watchdog examines starts on a stream when they are due.

use std::any::Any;
use std::time::{Duration, Instant, SystemTime};

use peerlane_hal::{Deadline, ErrorKind};

use crate::error::Error;
use crate::layout::Layout;
use crate::plan::Plan;
use crate::run::lane::Lane;
use crate::trace::TracedStart;

pub(crate) const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

const TRACED_STARTS_MAX: usize = 1 << 12;

pub(crate) struct Executor {
    lanes: Vec<Lane>,
    options: ExecutorOptions,
    park_misses_events: bool,
    started: u64,
    start_times: Vec<(Instant, SystemTime)>,
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ExecutorOptions {
    pub(crate) capturable: bool,
    pub(crate) strict: bool,
    pub(crate) traced: bool,
}

#[derive(Debug)]
pub(crate) enum StartFailure {
    /// The operation was refused before anything was submitted to an engine, so the group continues.
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
    /// # Safety
    /// The programs of the lanes must stay inside their regions, which their ports keep alive. The plans of all ranks must be
    /// verified, so that ranks that run them do not race. If the operation is capturable, its memory must live as long as the
    /// graphs that record it.
    pub(crate) unsafe fn new(lanes: Vec<Lane>, options: ExecutorOptions) -> Self {
        let park_misses_events = lanes.len() > 1 || lanes.iter().any(Lane::has_cross_tier_waits);
        Self { lanes, options, park_misses_events, started: 0, start_times: Vec::new() }
    }

    pub(crate) fn lanes(&self) -> &[Lane] {
        &self.lanes
    }

    pub(crate) fn started(&self) -> u64 {
        self.started
    }

    pub(crate) fn done(&self) -> u64 {
        self.lanes.iter().map(Lane::done).min().unwrap_or(self.started)
    }

    pub(crate) fn is_submitted(&self) -> bool {
        let mut lanes = self.lanes.iter().filter(|lane| lane.takes_stream() || !lane.is_driven());
        lanes.all(|lane| lane.is_submitted(self.started))
    }

    /// Returns whether the steps of all starts are submitted, also on lanes that a thread drives.
    pub(crate) fn has_submitted_all(&self) -> bool {
        self.lanes.iter().all(|lane| lane.is_submitted(self.started))
    }

    /// Returns whether a thread replays the steps of a captured start on one of the lanes.
    pub(crate) fn is_armed(&self) -> bool {
        self.lanes.iter().any(Lane::is_armed)
    }

    /// Counts starts up to `epoch` as made, because another executor has made them. All own starts must be submitted.
    pub(crate) fn skip_to(&mut self, epoch: u64) {
        self.started = epoch;
        self.lanes.iter_mut().for_each(|lane| lane.skip_to(epoch));
    }

    /// Changes the copies of the next start. All earlier starts must be submitted, and no lane armed.
    pub(crate) fn resize(&mut self, plan: &Plan, layout: &Layout) {
        self.lanes.iter_mut().for_each(|lane| lane.resize(plan, layout));
    }

    pub(crate) fn is_strict(&self) -> bool {
        self.options.strict
    }

    pub(crate) fn is_driven(&self) -> bool {
        self.lanes.iter().any(Lane::is_driven)
    }

    pub(crate) fn is_armed_by_capture(&self) -> bool {
        !self.lanes.iter().all(Lane::takes_stream)
    }

    pub(crate) fn is_polled(&self) -> bool {
        self.lanes.iter().any(Lane::is_polled)
    }

    pub(crate) fn start(&mut self) -> u64 {
        self.started += 1;
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
        let is_cut = self.started > self.start_times.len() as u64;
        let is_cut = is_cut || self.lanes.iter().any(Lane::is_trace_cut);
        Some(((1..).zip(&self.start_times).map(start).collect(), is_cut))
    }

    /// The entry of lane 0 is submitted before the other lanes, and these before the rest of lane 0. On CUDA, a queue
    /// that waits for work that the same process submits later may never continue.
    ///
    /// Returns whether a lane made progress, or can make more at once.
    pub(crate) fn drive(&mut self) -> Result<bool, Error> {
        let mut progressed = false;
        if let [home, others @ ..] = &mut self.lanes[..] {
            // SAFETY: the caller of `new` guarantees that the steps stay inside live regions and do not race.
            unsafe { home.submit_entry(self.started) }?;
            for lane in others {
                // SAFETY: the caller of `new` guarantees that the steps stay inside live regions and do not race.
                progressed |= unsafe { lane.drive(self.started) }?;
            }
            // SAFETY: the caller of `new` guarantees that the steps stay inside live regions and do not race.
            progressed |= unsafe { home.drive(self.started) }?;
        }
        Ok(progressed)
    }

    pub(crate) fn park_misses_events(&self) -> bool {
        self.park_misses_events
    }

    pub(crate) fn park(&mut self, limit: Duration) -> Result<(), Error> {
        match self.lanes.iter_mut().find(|lane| lane.done() < self.started) {
            Some(lane) => lane.park(limit),
            None => Ok(()),
        }
    }

    pub(crate) fn is_capturing(&mut self, stream: &dyn Any) -> Result<bool, StartFailure> {
        let refuse =
            |text: &str| Err(StartFailure::Refused(Error::new(ErrorKind::InvalidArgument, text)));
        let mut captures = false;
        for lane in self.lanes.iter_mut().filter(|lane| lane.takes_stream()) {
            captures |= lane.is_capturing(stream).map_err(StartFailure::before_submit)?;
        }
        if !self.lanes.iter().filter(|lane| lane.takes_stream()).all(Lane::queues_waits) {
            return refuse(
                "the engines cannot queue waits, which a start on a stream needs; use `start`",
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
        Ok(captures)
    }

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

    pub(crate) fn capture(&mut self) -> Result<(), StartFailure> {
        let [home, others @ ..] = &mut self.lanes[..] else { return Ok(()) };
        // SAFETY: the caller of `new` guarantees that the steps stay inside regions that live as
        // long as the graph, and do not race.
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

    pub(crate) fn replay_wait(&mut self) -> Result<Option<Duration>, Error> {
        let mut longest = None;
        for lane in &mut self.lanes {
            longest = longest.max(lane.replay_wait()?);
        }
        Ok(longest)
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

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};
    use std::task::Waker;

    use peerlane_hal::{Caps, Rank, Ticket};

    use super::*;
    use crate::plan::LaneId;
    use crate::run::buffers::{FlagAddress, FlagState, Start};
    use crate::run::lane::Adder;
    use crate::run::port::{BoundStep, Port};
    use crate::run::program::Program;

    struct Stream {
        captures: bool,
    }

    #[derive(Default)]
    struct PortLog {
        lines: Vec<String>,
        busy: String,
        fails: Option<(String, ErrorKind)>,
    }

    struct FakePort {
        name: char,
        caps: Caps,
        log: Arc<Mutex<PortLog>>,
        tickets: u64,
        room: u64,
    }

    impl FakePort {
        fn record(&self, call: &str) -> Result<(), Error> {
            let mut log = self.log.lock().unwrap();
            let line = format!("{}: {call}", self.name);
            log.lines.push(line.clone());
            match &log.fails {
                Some((fails, kind)) if *fails == line => Err(Error::new(*kind, line)),
                _ => Ok(()),
            }
        }
    }

    fn stream(stream: &dyn Any) -> &Stream {
        stream.downcast_ref().unwrap()
    }

    impl Port for FakePort {
        fn caps(&self) -> &Caps {
            &self.caps
        }

        unsafe fn submit(&mut self, steps: &[BoundStep], start: Start) -> Result<Ticket, Error> {
            if self.room == 0 {
                return Err(Error::new(ErrorKind::QueueFull, "no room"));
            }
            self.record(&format!("submit {} of {start:?}", steps.len()))?;
            if start != Start::Captured {
                self.tickets += 1;
                self.room -= 1;
            }
            Ok(Ticket(self.tickets))
        }

        fn try_consume(&self, _flag: FlagAddress, _start: Start) -> Option<FlagState> {
            None
        }

        unsafe fn reduce(&mut self, _: &[BoundStep], _: Start) {
            unreachable!("these programs do not add")
        }

        fn completed(&mut self) -> Result<Ticket, Error> {
            Ok(Ticket(self.tickets))
        }

        fn park(&mut self, _limit: Duration) -> Result<(), Error> {
            self.room += 1;
            Ok(())
        }

        fn is_busy(&self) -> bool {
            self.log.lock().unwrap().busy.contains(self.name)
        }

        fn waker(&self) -> Waker {
            Waker::noop().clone()
        }

        fn release(&mut self) -> Result<(), Error> {
            self.record("release")
        }

        fn is_capturing(&mut self, from: &dyn Any) -> Result<bool, Error> {
            Ok(stream(from).captures)
        }

        fn fork(&mut self, _from: &dyn Any) -> Result<(), Error> {
            self.record("fork")
        }

        fn join(&mut self, _into: &dyn Any) -> Result<(), Error> {
            self.record("join")
        }

        fn replay_wait(&mut self) -> Result<Option<Duration>, Error> {
            Ok(None)
        }
    }

    const CAPS: Caps =
        Caps { queued_wait: true, flags_batched: true, slice_ops_max: 2, ..Caps::new("fake") };

    fn executor(caps: Caps, capturable: bool) -> (Executor, Arc<Mutex<PortLog>>) {
        executor_with(caps, capturable, u64::MAX, 0)
    }

    fn executor_with(
        caps: Caps,
        capturable: bool,
        room: u64,
        entry: usize,
    ) -> (Executor, Arc<Mutex<PortLog>>) {
        let log: Arc<Mutex<PortLog>> = Arc::default();
        let lanes = ['a', 'b'].map(|name| {
            let flag = FlagAddress { crosses_tiers: false, word: 0, peer: Rank(0), lag: 0 };
            let steps = vec![BoundStep::Signal { peer: Rank(0), flag }; 3].into_boxed_slice();
            let entry_steps = if name == 'a' { entry } else { 0 };
            let program = Program { steps, origins: None, entry_steps, waits: Box::default() };
            let log = Arc::clone(&log);
            Lane::new(
                LaneId::HOME,
                (program, Adder::None),
                Box::new(FakePort { name, caps, log, tickets: 0, room }),
                true,
                false,
            )
        });
        // SAFETY: no port touches memory.
        let executor = unsafe {
            Executor::new(
                lanes.into(),
                ExecutorOptions { capturable, ..ExecutorOptions::default() },
            )
        };
        (executor, log)
    }

    fn take_lines(log: &Mutex<PortLog>) -> Vec<String> {
        std::mem::take(&mut log.lock().unwrap().lines)
    }

    fn start_on(executor: &mut Executor, stream: &Stream) -> Result<(), StartFailure> {
        if executor.is_capturing(stream)? {
            return executor.forked(stream, Executor::capture);
        }
        executor.forked(stream, |executor| {
            executor.start();
            executor.drive().map(|_| ()).map_err(StartFailure::Broken)
        })
    }

    const EAGER: Stream = Stream { captures: false };
    const CAPTURING: Stream = Stream { captures: true };

    #[test]
    fn lanes_are_forked_then_driven_then_joined() {
        let (mut executor, log) = executor(CAPS, false);
        start_on(&mut executor, &EAGER).unwrap();
        assert!(executor.is_submitted());
        let expected = [
            "a: fork",
            "b: fork",
            "b: submit 2 of Eager(1)",
            "b: submit 1 of Eager(1)",
            "a: submit 2 of Eager(1)",
            "a: submit 1 of Eager(1)",
            "a: join",
            "b: join",
        ];
        assert_eq!(take_lines(&log), expected);
    }

    #[test]
    fn the_entry_of_lane_0_comes_first_and_its_rest_last() {
        let (mut executor, log) = executor_with(CAPS, false, u64::MAX, 1);
        executor.start();
        executor.drive().unwrap();
        let expected = [
            "a: submit 1 of Eager(1)",
            "b: submit 2 of Eager(1)",
            "b: submit 1 of Eager(1)",
            "a: submit 2 of Eager(1)",
        ];
        assert_eq!(take_lines(&log), expected);
    }

    #[test]
    fn an_error_still_joins_the_forked_lanes() {
        let cases = [
            ("b: fork", "Refused", vec!["a: fork", "b: fork", "a: join"]),
            (
                "a: submit 1 of Eager(1)",
                "Broken",
                vec![
                    "a: fork",
                    "b: fork",
                    "b: submit 2 of Eager(1)",
                    "b: submit 1 of Eager(1)",
                    "a: submit 2 of Eager(1)",
                    "a: submit 1 of Eager(1)",
                    "a: join",
                    "b: join",
                ],
            ),
        ];
        for (fails, failure, expected) in cases {
            let (mut executor, log) = executor(CAPS, false);
            log.lock().unwrap().fails = Some((fails.to_owned(), ErrorKind::InvalidArgument));
            let found = start_on(&mut executor, &EAGER).unwrap_err();
            assert!(format!("{found:?}").starts_with(failure), "{fails}: {found:?}");
            assert_eq!(take_lines(&log), expected, "{fails}");
        }
        let (mut executor, log) = executor(CAPS, false);
        log.lock().unwrap().fails = Some(("a: join".to_owned(), ErrorKind::DeviceLost));
        assert!(matches!(start_on(&mut executor, &EAGER), Err(StartFailure::Broken(_))));
        assert_eq!(take_lines(&log).last().map(String::as_str), Some("b: join"));
    }

    #[test]
    fn a_captured_start_has_no_epoch_and_no_ticket() {
        let (mut executor, log) = executor(CAPS, true);
        start_on(&mut executor, &EAGER).unwrap();
        take_lines(&log);
        start_on(&mut executor, &CAPTURING).unwrap();
        let expected = [
            "a: fork",
            "b: fork",
            "b: submit 2 of Captured",
            "b: submit 1 of Captured",
            "a: submit 2 of Captured",
            "a: submit 1 of Captured",
            "a: join",
            "b: join",
        ];
        assert_eq!(take_lines(&log), expected);
        executor.drive().unwrap();
        assert_eq!((executor.started(), executor.done(), executor.is_submitted()), (1, 1, true));
    }

    #[test]
    fn an_operation_without_flags_for_captures_is_refused_before_anything_is_recorded() {
        let (mut executor, log) = executor(CAPS, false);
        let Err(StartFailure::Refused(error)) = start_on(&mut executor, &CAPTURING) else {
            panic!("the start was recorded");
        };
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        insta::assert_snapshot!(error, @
            "the stream captures a graph, but the operation is not capturable; prepare it with \
             `capturable()`");
        assert_eq!(take_lines(&log), [""; 0]);
    }

    #[test]
    fn engines_that_cannot_queue_waits_take_no_stream() {
        let (mut executor, log) = executor(Caps { queued_wait: false, ..CAPS }, true);
        let Err(StartFailure::Refused(error)) = start_on(&mut executor, &EAGER) else {
            panic!("the start was made");
        };
        insta::assert_snapshot!(error, @
            "the engines cannot queue waits, which a start on a stream needs; use `start`");
        assert_eq!((take_lines(&log), executor.started()), (vec![], 0));
    }

    #[test]
    fn a_full_queue_accepts_the_rest_after_a_park() {
        let (mut executor, log) = executor_with(CAPS, false, 1, 0);
        start_on(&mut executor, &EAGER).unwrap();
        assert!(!executor.is_submitted());
        assert_eq!(take_lines(&log).len(), 6, "two forks, one slice of each lane, two joins");
        for _ in 0..2 {
            executor.park(Duration::ZERO).unwrap();
            executor.drive().unwrap();
        }
        assert!(executor.is_submitted());
        assert_eq!(take_lines(&log), ["a: submit 1 of Eager(1)", "b: submit 1 of Eager(1)"]);
    }

    #[test]
    fn a_busy_engine_counts_as_progress() {
        let (mut executor, log) = executor(CAPS, false);
        executor.start();
        assert!(executor.drive().unwrap(), "steps were submitted");
        assert!(!executor.drive().unwrap());
        log.lock().unwrap().busy = "b".to_owned();
        assert!(executor.drive().unwrap(), "lane b is busy");
    }
}
