//! Starts on streams, on ports that only write down what they are told.

use std::any::Any;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::task::Waker;
use std::time::Duration;

use peerlane_hal::{Caps, ErrorKind, Rank, Ticket};

use super::{Executor, ExecutorOptions, StartFailure};
use crate::error::Error;
use crate::plan::LaneId;
use crate::run::lane::Lane;
use crate::run::port::{Bound, Port};
use crate::run::program::Program;
use crate::run::turns::Start;
use crate::window::FlagSpot;

/// The caller's stream.
struct Stream {
    captures: bool,
}

/// What all ports of a test share.
#[derive(Default)]
struct Told {
    log: Vec<String>,
    /// The names of the busy engines.
    busy: String,
    /// The call that fails, as the log has it.
    fails: Option<(String, ErrorKind)>,
}

struct FakePort {
    name: char,
    caps: Caps,
    told: Arc<Mutex<Told>>,
    tickets: u64,
    /// Slices that the queue takes before it is parked for once more.
    room: u64,
}

impl FakePort {
    fn tell(&self, what: &str) -> Result<(), Error> {
        let mut told = self.told.lock().unwrap();
        let line = format!("{}: {what}", self.name);
        told.log.push(line.clone());
        match &told.fails {
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

    unsafe fn submit(&mut self, steps: &[Bound], start: Start) -> Result<Ticket, Error> {
        if self.room == 0 {
            return Err(Error::new(ErrorKind::QueueFull, "no room"));
        }
        self.tell(&format!("submit {} of {start:?}", steps.len()))?;
        if start != Start::Captured {
            self.tickets += 1;
            self.room -= 1;
        }
        Ok(Ticket(self.tickets))
    }

    fn flag(&self, _flag: FlagSpot, _start: Start) -> Option<&AtomicU64> {
        None
    }

    fn completed(&mut self) -> Result<Ticket, Error> {
        Ok(Ticket(self.tickets))
    }

    fn park(&mut self, _limit: Duration) -> Result<(), Error> {
        self.room += 1;
        Ok(())
    }

    fn is_busy(&self) -> bool {
        self.told.lock().unwrap().busy.contains(self.name)
    }

    fn waker(&self) -> Waker {
        Waker::noop().clone()
    }

    fn release(&mut self) -> Result<(), Error> {
        self.tell("release")
    }

    fn is_capturing(&mut self, from: &dyn Any) -> Result<bool, Error> {
        Ok(stream(from).captures)
    }

    fn fork(&mut self, _from: &dyn Any) -> Result<(), Error> {
        self.tell("fork")
    }

    fn join(&mut self, _into: &dyn Any) -> Result<(), Error> {
        self.tell("join")
    }
}

const CAPS: Caps = Caps {
    kind: "told",
    queued_wait: true,
    polled: false,
    flags_batched: true,
    slice_ops_max: 2,
    piece_bytes_max: u64::MAX,
    put_align_bytes: 1,
};

/// A executor of two lanes with three steps each that both take the stream.
fn executor(caps: Caps, capturable: bool) -> (Executor, Arc<Mutex<Told>>) {
    course_with(caps, capturable, u64::MAX, 0)
}

/// Of lane a `entry` steps are the entry; each queue has `room`.
fn course_with(
    caps: Caps,
    capturable: bool,
    room: u64,
    entry: usize,
) -> (Executor, Arc<Mutex<Told>>) {
    let told: Arc<Mutex<Told>> = Arc::default();
    let lanes = ['a', 'b'].map(|name| {
        let flag = FlagSpot { crossing: false, word: 0 };
        let steps = vec![Bound::Signal { peer: Rank(0), flag }; 3].into_boxed_slice();
        let entry = if name == 'a' { entry } else { 0 };
        let program = Program { steps, origins: None, entry, waits: Box::default() };
        let told = Arc::clone(&told);
        Lane::new(
            LaneId::HOME,
            program,
            Box::new(FakePort { name, caps, told, tickets: 0, room }),
            true,
        )
    });
    // SAFETY: no port touches memory.
    let executor = unsafe {
        Executor::new(lanes.into(), ExecutorOptions { capturable, ..ExecutorOptions::default() })
    };
    (executor, told)
}

fn log(told: &Mutex<Told>) -> Vec<String> {
    std::mem::take(&mut told.lock().unwrap().log)
}

/// One start on a stream, as the handle of the operation makes it.
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
fn all_are_forked_then_submitted_to_then_joined() {
    let (mut executor, told) = executor(CAPS, false);
    start_on(&mut executor, &EAGER).unwrap();
    assert!(executor.is_submitted());
    let wanted = [
        "a: fork",
        "b: fork",
        "b: submit 2 of Eager(1)",
        "b: submit 1 of Eager(1)",
        "a: submit 2 of Eager(1)",
        "a: submit 1 of Eager(1)",
        "a: join",
        "b: join",
    ];
    assert_eq!(log(&told), wanted);
}

#[test]
fn the_entry_of_lane_0_comes_first_and_its_rest_last() {
    let (mut executor, told) = course_with(CAPS, false, u64::MAX, 1);
    executor.start();
    executor.drive().unwrap();
    let wanted = [
        "a: submit 1 of Eager(1)",
        "b: submit 2 of Eager(1)",
        "b: submit 1 of Eager(1)",
        "a: submit 2 of Eager(1)",
    ];
    assert_eq!(log(&told), wanted);
}

#[test]
fn an_error_in_between_still_joins_whatever_was_forked() {
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
    for (fails, stop, wanted) in cases {
        let (mut executor, told) = executor(CAPS, false);
        told.lock().unwrap().fails = Some((fails.to_owned(), ErrorKind::InvalidArgument));
        let seen = start_on(&mut executor, &EAGER).unwrap_err();
        assert!(format!("{seen:?}").starts_with(stop), "{fails}: {seen:?}");
        assert_eq!(log(&told), wanted, "{fails}");
    }
    let (mut executor, told) = executor(CAPS, false);
    told.lock().unwrap().fails = Some(("a: join".to_owned(), ErrorKind::DeviceLost));
    assert!(matches!(start_on(&mut executor, &EAGER), Err(StartFailure::Broken(_))));
    assert_eq!(log(&told).last().map(String::as_str), Some("b: join"));
}

#[test]
fn a_captured_start_has_no_epoch_and_no_ticket() {
    let (mut executor, told) = executor(CAPS, true);
    start_on(&mut executor, &EAGER).unwrap();
    log(&told);
    start_on(&mut executor, &CAPTURING).unwrap();
    let wanted = [
        "a: fork",
        "b: fork",
        "b: submit 2 of Captured",
        "b: submit 1 of Captured",
        "a: submit 2 of Captured",
        "a: submit 1 of Captured",
        "a: join",
        "b: join",
    ];
    assert_eq!(log(&told), wanted);
    executor.drive().unwrap();
    assert_eq!((executor.started(), executor.done(), executor.is_submitted()), (1, 1, true));
}

#[test]
fn what_cannot_be_captured_is_refused_before_anything_is_recorded() {
    let (mut executor, told) = executor(CAPS, false);
    let Err(StartFailure::Refused(error)) = start_on(&mut executor, &CAPTURING) else {
        panic!("it was recorded");
    };
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    insta::assert_snapshot!(error, @"the stream is being captured, and this all-gather has no flags for that; prepare it with `capturable()`");
    assert_eq!(log(&told), [""; 0]);
}

#[test]
fn engines_that_cannot_queue_waits_take_no_stream() {
    let (mut executor, told) = executor(Caps { queued_wait: false, ..CAPS }, true);
    let Err(StartFailure::Refused(error)) = start_on(&mut executor, &EAGER) else {
        panic!("it was started");
    };
    insta::assert_snapshot!(error, @"a start on a stream needs engines that queue waits; use `start`");
    assert_eq!((log(&told), executor.started()), (vec![], 0));
}

#[test]
fn a_full_queue_takes_the_rest_when_there_is_room() {
    let (mut executor, told) = course_with(CAPS, false, 1, 0);
    start_on(&mut executor, &EAGER).unwrap();
    assert!(!executor.is_submitted());
    assert_eq!(log(&told).len(), 6, "two forks, one slice of each lane, two joins");
    for _ in 0..2 {
        executor.park(Duration::ZERO).unwrap();
        executor.drive().unwrap();
    }
    assert!(executor.is_submitted());
    assert_eq!(log(&told), ["a: submit 1 of Eager(1)", "b: submit 1 of Eager(1)"]);
}

#[test]
fn a_busy_engine_counts_as_progress() {
    let (mut executor, told) = executor(CAPS, false);
    executor.start();
    assert!(executor.drive().unwrap(), "it was submitted");
    assert!(!executor.drive().unwrap());
    told.lock().unwrap().busy = "b".to_owned();
    assert!(executor.drive().unwrap(), "lane b copies");
}
