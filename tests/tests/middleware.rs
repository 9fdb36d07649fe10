//! Tests what the layers do in addition to keeping the contract, which the suite checks.

use std::time::Duration;

use peerlane_hal::{
    At, CopyEngine, Deadline, Error, ErrorKind, Fabric, Flag, Op, PeerMemory, Rank, Region as _,
    Role, Rows, Ticket,
};
use peerlane_host as host;
use peerlane_tests::middleware::{
    DelayLayer, DowngradeLayer, FailAtLayer, Layer, StreamLayer, ThrottleLayer, TraceLayer,
    TraceLog, Wrapped,
};

const BYTES: u64 = 64;
const SHORT: Duration = Duration::from_secs(5);

type HostOp<'a> = Op<'a, host::Local, host::Remote>;

/// Data and flags of one rank that is its own peer.
struct Regions {
    data: (host::Remote, host::Local),
    flags: (host::Remote, host::Local),
}

impl Regions {
    fn put(&self, to: u64, bytes: u64) -> HostOp<'_> {
        let dst = At { region: &self.data.0, offset: to };
        Op::Put { dst, src: At { region: &self.data.1, offset: 0 }, bytes }
    }

    fn signal(&self, word: u64, value: u64) -> HostOp<'_> {
        Op::Signal { flag: Flag { region: &self.flags.0, word }, value }
    }

    fn wait(&self, word: u64, value: u64, reset: bool) -> HostOp<'_> {
        Op::Wait { flag: Flag { region: &self.flags.1, word }, value, reset }
    }
}

/// The engine comes last, so that it is dropped first.
fn open<L: Layer<host::Fabric>>(layer: L) -> (Regions, L::Engine) {
    let mut fabric = Wrapped::new(host::Fabric::open(Rank(0), 1).unwrap(), layer);
    let deadline = Deadline::after(SHORT);
    let address = fabric.address();
    fabric.connect(Rank(0), &address, deadline).unwrap();
    let region = |role| {
        let local = fabric.memory().allocate(BYTES, role).unwrap();
        let key = fabric.memory().export(&local).unwrap();
        (fabric.memory().import(Rank(0), &key, deadline).unwrap(), local)
    };
    let regions = Regions { data: region(Role::Data), flags: region(Role::Flags) };
    let engine = fabric.engine(Default::default()).unwrap();
    (regions, engine)
}

/// The answer with an error as kind and text.
fn submit<E>(engine: &mut E, ops: &[HostOp<'_>]) -> Result<Ticket, (ErrorKind, String)>
where
    E: CopyEngine<Local = host::Local, Remote = host::Remote>,
{
    // SAFETY: `open` returns the regions in front of the engine, so they outlive it, and one thread
    // touches them.
    unsafe { engine.submit(ops) }.map_err(|error| (error.kind(), error.to_string()))
}

fn finish(engine: &mut impl CopyEngine, ticket: Ticket) {
    let deadline = Deadline::after(SHORT);
    while engine.completed().unwrap() < ticket {
        assert!(!deadline.has_passed(), "{ticket:?} does not complete");
        engine.park(Duration::from_millis(1)).unwrap();
    }
}

#[test]
fn a_trace_reads_line_by_line() {
    let log = TraceLog::new();
    let (regions, mut engine) = open(TraceLayer::new(log.clone()));
    let ops = [regions.put(32, 16), regions.signal(3, 7), regions.wait(3, 7, true)];
    let ticket = submit(&mut engine, &ops).unwrap();
    finish(&mut engine, ticket);
    submit(&mut engine, &[regions.put(60, 16)]).unwrap_err();
    engine.release().unwrap();
    insta::assert_snapshot!(log.to_string().trim_end(), @r"
    rank 0 engine 0 ticket 1: put 16 bytes from local 0 + 0 to remote 1 + 32
    rank 0 engine 0 ticket 1: signal remote 2 word 3 = 7
    rank 0 engine 0 ticket 1: wait local 3 word 3 >= 7, then reset
    rank 0 engine 0 ticket 1: complete
    rank 0 engine 0 ticket 0: refused: put destination out of range: 16 bytes from offset 60, but the region has 64 bytes
    rank 0 engine 0 ticket 1: released
    ");
}

#[test]
fn what_was_taken_away_is_refused() {
    let layer = DowngradeLayer {
        queued_wait: false,
        gets: false,
        rows: false,
        slice_ops_max: 2,
        put_align_bytes: 8,
    };
    let (regions, mut engine) = open(layer);
    let caps = engine.caps();
    assert_eq!((caps.queued_wait, caps.slice_ops_max, caps.put_align_bytes), (false, 2, 8));
    let mut refusal = |ops: &[HostOp<'_>]| {
        let (kind, text) = submit(&mut engine, ops).unwrap_err();
        assert_eq!(kind, ErrorKind::InvalidArgument);
        text
    };
    insta::assert_snapshot!(refusal(&[regions.wait(0, 0, false)]), @"a wait was submitted to an engine that cannot queue waits (queued_wait is false); poll the flag instead");
    insta::assert_snapshot!(refusal(&[regions.put(4, 8)]), @"misaligned put: an offset or the length is 4 bytes, expected a multiple of 8 bytes (put_align_bytes)");
    insta::assert_snapshot!(refusal(&[regions.put(0, 9)]), @"misaligned put: an offset or the length is 9 bytes, expected a multiple of 8 bytes (put_align_bytes)");
    insta::assert_snapshot!(refusal(&[regions.signal(0, 1); 3]), @"a slice has 3 ops, expected at most 2 (slice_ops_max of the engine); split it into several slices");
    assert_eq!(submit(&mut engine, &[regions.put(8, 8), regions.signal(0, 1)]), Ok(Ticket(1)));
}

#[test]
fn a_layer_refuses_a_slice_with_an_op_that_it_does_not_pass_on() {
    let throttle = ThrottleLayer { bytes_per_second: f64::INFINITY, delay: Duration::ZERO };
    refuses_rows(open(throttle));
    refuses_rows(open(StreamLayer::default()));
}

/// Submits a signal and rows, of which the layer knows only the first.
fn refuses_rows<E>((regions, mut engine): (Regions, E))
where
    E: CopyEngine<Local = host::Local, Remote = host::Remote>,
{
    let rows = Op::PutRows {
        dst: At { region: &regions.data.0, offset: 0 },
        src: At { region: &regions.data.1, offset: 0 },
        bytes: 8,
        rows: Rows { count: 2, dst_pitch: 8, src_pitch: 8 },
    };
    let (kind, text) = submit(&mut engine, &[regions.signal(0, 1), rows]).unwrap_err();
    assert_eq!(kind, ErrorKind::InvalidArgument);
    assert_eq!(text, "a put of rows was submitted to a layer that passes no put of rows on");

    // The signal before the rows did not run, and the next slice is the first one.
    let ticket = submit(&mut engine, &[regions.signal(1, 1)]).unwrap();
    finish(&mut engine, ticket);
    assert_eq!(ticket, Ticket(1));
    let flags = regions.flags.1.base().as_ptr().cast::<u64>();
    // SAFETY: the region has 64 bytes, and the engine is idle.
    let first = unsafe { flags.read() };
    assert_eq!(first, 0);
}

#[test]
fn the_chosen_op_fails_and_so_does_everything_after_it() {
    for ops in 0..6 {
        let (regions, mut engine) =
            open(FailAtLayer { ops, kind: ErrorKind::PeerLost, peer: None });
        let slice = [regions.put(8, 8), regions.signal(0, 1)];
        let taken = (0..9).take_while(|_| submit(&mut engine, &slice).is_ok()).count() as u64;
        assert_eq!(taken, ops / 2, "an engine that fails after {ops} ops");
        let (kind, text) = submit(&mut engine, &[]).unwrap_err();
        assert_eq!(kind, ErrorKind::PeerLost);
        assert_eq!(text, "the engine is poisoned by an earlier error: peer lost");
        assert_eq!(engine.completed().unwrap_err().kind(), ErrorKind::PeerLost);
    }
}

#[test]
fn a_delay_shows() {
    const LONGEST: Duration = Duration::from_millis(20);
    let (regions, mut engine) = open(DelayLayer::new(3, LONGEST));
    assert_eq!(engine.caps().slice_ops_max, host::Options::default().caps.slice_ops_max / 2);
    let mut pending = 0;
    for round in 1..=20 {
        let ticket = submit(&mut engine, &[regions.put(8, 8), regions.signal(0, round)]).unwrap();
        pending += u32::from(engine.completed().unwrap() < ticket);
        finish(&mut engine, ticket);
    }
    assert!((5..=20).contains(&pending), "{pending} of 20 slices were delayed, seed 3");
}

#[test]
fn a_delay_needs_queued_waits() {
    let single = DowngradeLayer { slice_ops_max: 1, ..DowngradeLayer::default() };
    let fabric = Wrapped::new(host::Fabric::open(Rank(0), 1).unwrap(), single);
    let error =
        Layer::engine(&DelayLayer::new(1, SHORT), &fabric, 0, Default::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
}
