//! Executes the copies and flag operations of a prepared operation, and tracks their completion.
//!
//! Usually the thread that waits for an operation drives its executor. A thread that waits for
//! another operation drives this one too, because peers may be waiting for it. The watchdog
//! examines starts on a stream when they are due.

use std::any::Any;
use std::ops::DerefMut;
use std::time::{Duration, Instant, SystemTime};

use peerlane_hal::{CaptureState, Deadline, ErrorKind};

use crate::error::Error;
use crate::layout::Layout;
use crate::plan::Plan;
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
mod tests {
    use std::sync::{Arc, Mutex};
    use std::task::Waker;

    use peerlane_hal::{
        BackendId, Caps, Command, CopyEngine, Deadline, DynEngine, DynFabric, DynRegion,
        EngineRequirements, Fabric, Op, PeerMemory, Rank, Reducer, RegionFlag, Role, StreamOrdered,
        Ticket,
    };
    use peerlane_host as host;
    use peerlane_layers::{Layer, Wrapped};

    use super::*;
    use crate::plan::LaneId;
    use crate::run::buffers::{
        DoubleBuffering, FLAGS, FlagRegions, OperationBuffers, OutputCounts, RankRegions,
    };
    use crate::run::lane::Adder;
    use crate::run::program::Program;

    type EngineError = peerlane_layers::Error<host::Error>;

    #[derive(Clone, Copy)]
    struct Stream {
        capture: CaptureState,
    }

    /// What the scripted engines of a test do, and what they were asked for.
    #[derive(Default)]
    struct Script {
        lines: Vec<String>,
        busy: String,
        fails: Option<(String, ErrorKind)>,
    }

    /// Makes engines that run nothing. Every slice is complete at once.
    #[derive(Clone)]
    struct Scripts {
        caps: Caps,
        room: u64,
        script: Arc<Mutex<Script>>,
    }

    struct Scripted {
        name: char,
        caps: Caps,
        script: Arc<Mutex<Script>>,
        captures: bool,
        tickets: u64,
        room: u64,
    }

    // SAFETY: the engines access no memory.
    unsafe impl Layer<host::Fabric> for Scripts {
        type Engine = Scripted;

        fn engine(
            &self,
            _fabric: &host::Fabric,
            number: u64,
            _requirements: EngineRequirements,
        ) -> Result<Scripted, EngineError> {
            let (caps, room, script) = (self.caps, self.room, Arc::clone(&self.script));
            let name = ['a', 'b'][number as usize];
            Ok(Scripted { name, caps, script, captures: false, tickets: 0, room })
        }
    }

    impl Scripted {
        fn record(&self, call: &str) -> Result<(), EngineError> {
            let mut script = self.script.lock().unwrap();
            let line = format!("{}: {call}", self.name);
            script.lines.push(line.clone());

            match &script.fails {
                Some((fails, kind)) if *fails == line => Err(error(*kind, &line)),
                _ => Ok(()),
            }
        }
    }

    fn error(kind: ErrorKind, text: &str) -> EngineError {
        EngineError::Layer { kind, peer: None, text: text.to_owned() }
    }

    fn captures(stream: &dyn Any) -> bool {
        stream.downcast_ref::<Stream>().unwrap().capture.is_capturing()
    }

    // SAFETY: the engine accesses no memory.
    unsafe impl CopyEngine for Scripted {
        type Error = EngineError;
        type Local = host::Local;
        type Remote = host::Remote;

        fn caps(&self) -> &Caps {
            &self.caps
        }

        fn prepare_reduce(&mut self) -> Result<Option<Reducer>, EngineError> {
            Ok(None)
        }

        unsafe fn submit(
            &mut self,
            ops: &[Op<'_, host::Local, host::Remote>],
        ) -> Result<Ticket, EngineError> {
            if self.room == 0 {
                return Err(error(ErrorKind::QueueFull, "no room"));
            }

            let value = |op: &Op<'_, host::Local, host::Remote>| match *op {
                Op::Signal { value, .. } | Op::Wait { value, .. } => value,
                _ => unreachable!("the programs copy nothing"),
            };
            let of = match (self.captures, ops.first().map(value)) {
                (true, Some(1)) => "Captured".to_owned(),
                (false, Some(epoch)) => format!("Eager({epoch})"),
                other => panic!("{other:?}"),
            };

            self.record(&format!("submit {} of {of}", ops.len()))?;

            // A captured start has no ticket.
            if !self.captures {
                self.tickets += 1;
                self.room -= 1;
            }
            Ok(Ticket(self.tickets))
        }

        fn completed(&mut self) -> Result<Ticket, EngineError> {
            Ok(Ticket(self.tickets))
        }

        fn park(&mut self, _limit: Duration) -> Result<(), EngineError> {
            self.room += 1;
            Ok(())
        }

        fn is_busy(&self) -> bool {
            self.script.lock().unwrap().busy.contains(self.name)
        }

        fn waker(&self) -> Waker {
            Waker::noop().clone()
        }

        fn release(&mut self) -> Result<(), EngineError> {
            self.record("release")
        }

        fn compute_bytes(&mut self, _: &[Op<'_, host::Local, host::Remote>], _: bool) -> u64 {
            0
        }

        fn streams(&mut self) -> Option<&mut dyn StreamOrdered<Error = EngineError>> {
            Some(self)
        }
    }

    // SAFETY: the engine accesses no memory.
    unsafe impl StreamOrdered for Scripted {
        type Error = EngineError;

        fn capture_state(&mut self, from: &dyn Any) -> Result<CaptureState, EngineError> {
            Ok(from.downcast_ref::<Stream>().unwrap().capture)
        }

        fn fork(&mut self, from: &dyn Any) -> Result<(), EngineError> {
            self.record("fork")?;
            self.captures = captures(from);
            Ok(())
        }

        fn join(&mut self, _into: &dyn Any) -> Result<(), EngineError> {
            self.captures = false;
            self.record("join")
        }

        fn replay_wait(&mut self) -> Result<Option<Duration>, EngineError> {
            Ok(None)
        }
    }

    const CAPS: Caps =
        Caps { queued_wait: true, flags_batched: true, slice_ops_max: 2, ..Caps::new("scripted") };

    fn executor(caps: Caps, capturable: bool) -> (Executor, Arc<Mutex<Script>>) {
        executor_with(caps, capturable, u64::MAX, 0)
    }

    /// Creates an executor of two lanes, a and b, each with three commands: signals to this rank,
    /// in b behind a wait.
    fn executor_with(
        caps: Caps,
        capturable: bool,
        room: u64,
        entry: usize,
    ) -> (Executor, Arc<Mutex<Script>>) {
        let script: Arc<Mutex<Script>> = Arc::default();

        let mut fabric = host::Fabric::open(Rank(0), 1).unwrap();
        let address = fabric.address();
        fabric.connect(Rank(0), &address, Deadline::after(Duration::from_secs(60))).unwrap();
        let scripts = Scripts { caps, room, script: Arc::clone(&script) };
        let fabric = DynFabric::new(Wrapped::new(fabric, scripts));

        let flags = || {
            let region: DynRegion = fabric.allocate(64, Role::Flags).unwrap();
            let key = fabric.export(&region).unwrap();

            let mut regions = RankRegions::new(region);
            let deadline = Deadline::after(Duration::from_secs(60));
            regions.import(Rank(0), fabric.import(Rank(0), &key, deadline).unwrap());
            regions
        };

        let captured = capturable.then(flags);
        let counts = OutputCounts { eager: 1, captured: u32::from(capturable) };
        let memory = Arc::new(OperationBuffers {
            inputs: Vec::new(),
            outputs: Vec::new(),
            inbox: RankRegions::default(),
            flags: FlagRegions { eager: flags(), captured },
            cross_tier_flags: None,
            buffering: DoubleBuffering::new(counts, 0, 0).unwrap(),
            epoch_base: 0,
            digest: None,
            _keep: Vec::new(),
        });

        let lanes = ['a', 'b'].map(|name| {
            let flag = RegionFlag { region: FLAGS, word: 0, peer: Rank(0), lag: 0 };
            let first = if name == 'a' { Command::Signal { flag } } else { Command::Wait { flag } };
            let [second, third] = [Command::Signal { flag }; 2];
            let commands = [first, second, third].into();

            let entry_commands = if name == 'a' { entry } else { 0 };
            let (sources, waits, origins) = (Box::default(), Box::default(), None);
            let contributors = [].into();
            let program = Program {
                commands,
                sources,
                contributors,
                origins,
                entry_commands,
                launched: 0..0,
                waits,
            };
            let following = capturable.then(|| Program {
                commands: [second].into(),
                sources: Box::default(),
                contributors: Box::default(),
                origins: None,
                entry_commands: 0,
                launched: 0..0,
                waits: Box::default(),
            });

            let engine: DynEngine = fabric.engine(EngineRequirements::default()).unwrap();
            let queue = Queue::new(engine, BackendId::HOST, Arc::clone(&memory)).unwrap();
            Lane::new(LaneId::HOME, (program, following, Adder::None), queue, false)
        });

        // SAFETY: no engine touches memory.
        let executor = unsafe {
            Executor::new(
                lanes.into(),
                ExecutorOptions { capturable, ..ExecutorOptions::default() },
            )
        };
        (executor, script)
    }

    fn take_lines(log: &Mutex<Script>) -> Vec<String> {
        std::mem::take(&mut log.lock().unwrap().lines)
    }

    fn start_on(executor: &mut Executor, stream: &Stream) -> Result<(), StartFailure> {
        executor.on_stream(
            stream,
            |_, _| Ok(()),
            |executor, capture| {
                if capture.is_capturing() {
                    return executor.capture(capture).map(drop);
                }
                executor.start();
                executor.submit().map_err(StartFailure::Broken)
            },
        )
    }

    const EAGER: Stream = Stream { capture: CaptureState::None };
    const CAPTURING: Stream = capturing(1);

    const fn capturing(number: u64) -> Stream {
        Stream { capture: CaptureState::Active(number) }
    }

    #[test]
    fn lane_0_is_forked_then_all_lanes_are_submitted_then_it_is_joined() {
        let (mut executor, log) = executor(CAPS, false);
        start_on(&mut executor, &EAGER).unwrap();
        assert!(executor.is_submitted());

        let expected = [
            "a: fork",
            "b: submit 2 of Eager(1)",
            "b: submit 1 of Eager(1)",
            "a: submit 2 of Eager(1)",
            "a: submit 1 of Eager(1)",
            "a: join",
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
            ("a: fork", "Refused", vec!["a: fork"]),
            (
                "a: submit 1 of Eager(1)",
                "Broken",
                vec![
                    "a: fork",
                    "b: submit 2 of Eager(1)",
                    "b: submit 1 of Eager(1)",
                    "a: submit 2 of Eager(1)",
                    "a: submit 1 of Eager(1)",
                    "a: join",
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
        assert_eq!(take_lines(&log).last().map(String::as_str), Some("a: join"));
    }

    #[test]
    fn a_captured_start_has_no_epoch_and_no_ticket() {
        let (mut executor, log) = executor(CAPS, true);
        start_on(&mut executor, &EAGER).unwrap();
        take_lines(&log);

        start_on(&mut executor, &CAPTURING).unwrap();
        let expected = ["a: fork", "a: submit 2 of Captured", "a: submit 1 of Captured", "a: join"];
        assert_eq!(take_lines(&log), expected);

        executor.drive().unwrap();
        assert_eq!((executor.started(), executor.done(), executor.is_submitted()), (1, 1, true));
    }

    #[test]
    fn only_the_first_start_of_a_capture_runs_the_whole_program() {
        let (mut executor, log) = executor(CAPS, true);
        let mut commands = |stream: Stream| {
            start_on(&mut executor, &stream).unwrap();
            let lines = take_lines(&log);
            lines.iter().filter(|line| line.contains("submit")).count()
        };

        let unknown = Stream { capture: CaptureState::Unknown };
        assert_eq!([capturing(1), capturing(1), capturing(1)].map(&mut commands), [2, 1, 1]);
        assert_eq!([capturing(2), EAGER, capturing(2)].map(&mut commands), [2, 4, 1]);
        assert_eq!([capturing(1), unknown, unknown].map(&mut commands), [2, 2, 2]);
        assert_eq!([capturing(1), capturing(1)].map(&mut commands), [2, 1]);
    }

    #[test]
    fn an_error_makes_the_next_recorded_start_the_first_one() {
        let (mut executor, log) = executor(CAPS, true);
        start_on(&mut executor, &CAPTURING).unwrap();
        log.lock().unwrap().fails =
            Some(("a: submit 1 of Captured".to_owned(), ErrorKind::InvalidArgument));
        assert!(start_on(&mut executor, &CAPTURING).is_err());

        log.lock().unwrap().fails = None;
        take_lines(&log);
        start_on(&mut executor, &CAPTURING).unwrap();
        assert!(take_lines(&log).contains(&"a: submit 2 of Captured".to_owned()));
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
        assert_eq!(take_lines(&log).len(), 4, "a fork, one slice of each lane, a join");

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
