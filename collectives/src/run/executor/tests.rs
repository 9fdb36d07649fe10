use std::sync::{Arc, Mutex};
use std::task::Waker;

use peerlane_hal::{
    BackendId, Caps, Command, CopyEngine, Deadline, DynEngine, DynFabric, DynRegion,
    EngineRequirements, Fabric, Mark, Op, PeerMemory, Rank, Reducer, RegionFlag, Role,
    StreamOrdered, Ticket,
};
use peerlane_host as host;
use peerlane_layers::{Layer, Wrapped};

use super::*;
use crate::plan::LaneId;
use crate::run::buffers::{
    DoubleBuffering, FLAGS, FlagRegions, OperationBuffers, OutputCounts, RankRegions,
};
use crate::run::lane::Adder;
use crate::run::parts::Parts;
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

    fn fork_beside(&mut self, from: &dyn Any) -> Result<(), EngineError> {
        self.record("fork beside")?;
        self.captures = captures(from);
        Ok(())
    }

    fn mark(&mut self) -> Result<Mark, EngineError> {
        self.record("mark")?;
        Ok(Mark::Submitted(Ticket(self.tickets)))
    }

    fn order_after(&mut self, _mark: Mark, _into: &dyn Any) -> Result<(), EngineError> {
        self.record("order after")
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
            parts: Parts::default(),
            commands,
            sources,
            contributors,
            origins,
            entry_commands,
            launched: 0..0,
            waits,
        };
        let following = capturable.then(|| Program {
            parts: Parts::default(),
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
        Executor::new(lanes.into(), ExecutorOptions { capturable, ..ExecutorOptions::default() })
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
