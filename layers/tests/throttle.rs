//! How long throttled engines take, over the host backend. That they keep the contract is for the
//! conformance suite.
//!
//! Lower bounds hold always. Upper ones hold for the best of a few tries, since other programs may want
//! the processors.

use std::fs;
use std::time::{Duration, Instant};

use peerlane_hal::{
    At, CopyEngine, Deadline, EngineRequirements, Error, ErrorKind, Fabric, Flag, Op, PeerMemory,
    Rank, Region, Role, Ticket,
};
use peerlane_host as host;
use peerlane_layers::{DowngradeLayer, Layer, Throttle, ThrottleLayer, Wrapped};

type Engine = Throttle<host::Fabric>;
type HostOp<'a> = Op<'a, host::Local, host::Remote>;

const MIB: u64 = 1 << 20;
/// A megabyte takes ten milliseconds.
const RATE: f64 = 100.0 * MIB as f64;
const DELAY: Duration = Duration::from_millis(8);
const LAYER: ThrottleLayer = ThrottleLayer { bytes_per_second: RATE, delay: DELAY };
const TRIES: usize = 20;
const LATE: Duration = Duration::from_secs(20);

/// Data and flags of one rank that is its own peer.
struct Regions {
    source: host::Local,
    landing: (host::Remote, host::Local),
    flags: (host::Remote, host::Local),
}

impl Regions {
    fn put(&self, bytes: u64) -> HostOp<'_> {
        let dst = At { region: &self.landing.0, offset: 0 };
        Op::Put { dst, src: At { region: &self.source, offset: 0 }, bytes }
    }

    fn get(&self, bytes: u64) -> HostOp<'_> {
        let src = At { region: &self.landing.0, offset: 0 };
        Op::Get { dst: At { region: &self.source, offset: 0 }, src, bytes }
    }

    fn signal(&self, word: u64, value: u64) -> HostOp<'_> {
        Op::Signal { flag: Flag { region: &self.flags.0, word }, value }
    }

    fn wait(&self, word: u64, value: u64) -> HostOp<'_> {
        Op::Wait { flag: Flag { region: &self.flags.1, word }, value, reset: false }
    }

    fn flag(&self, word: u64) -> u64 {
        self.flags.1.flag_value(word).expect("there is such a flag")
    }
}

fn fabric(layer: ThrottleLayer) -> Wrapped<host::Fabric, ThrottleLayer> {
    let mut fabric = Wrapped::new(host::Fabric::open(Rank(0), 1).unwrap(), layer);
    let address = fabric.address();
    fabric.connect(Rank(0), &address, Deadline::after(LATE)).unwrap();
    fabric
}

/// The engines come last, so that they are dropped first.
fn open<const N: usize>(layer: ThrottleLayer) -> (Regions, [Engine; N]) {
    let fabric = fabric(layer);
    let local = |bytes, role| fabric.memory().allocate(bytes, role).unwrap();
    let shared = |bytes, role| {
        let local = local(bytes, role);
        let key = fabric.memory().export(&local).unwrap();
        (fabric.memory().import(Rank(0), &key, Deadline::after(LATE)).unwrap(), local)
    };
    let regions = Regions {
        source: local(8 * MIB, Role::Data),
        landing: shared(8 * MIB, Role::Data),
        flags: shared(64, Role::Flags),
    };
    let engines = std::array::from_fn(|_| fabric.engine(Default::default()).unwrap());
    (regions, engines)
}

fn submit(engine: &mut Engine, ops: &[HostOp<'_>]) -> Ticket {
    // SAFETY: `open` returns the regions in front of the engines, so they outlive them, and tests
    // touch them by one engine and one thread at a time.
    unsafe { engine.submit(ops) }.unwrap()
}

/// Drives all engines until each has completed its ticket; how long after `start` that was.
fn finish(engines: &mut [Engine], tickets: &[Ticket], start: Instant) -> Duration {
    loop {
        let mut done = true;
        for (engine, ticket) in engines.iter_mut().zip(tickets) {
            done &= engine.completed().unwrap() >= *ticket;
        }
        let elapsed = start.elapsed();
        if done {
            return elapsed;
        }
        assert!(elapsed < LATE, "{tickets:?} do not complete");
        // The others are looked at soon enough.
        engines[0].park(Duration::from_millis(1)).unwrap();
    }
}

/// Each try takes at least so long, and one of them hardly longer.
fn ensure_takes(least: Duration, mut attempt: impl FnMut() -> Duration) {
    let most = least.mul_f64(1.5);
    let mut seen = Vec::new();
    for _ in 0..TRIES {
        let took = attempt();
        assert!(took >= least, "{took:?}, expected at least {least:?}");
        if took <= most {
            return;
        }
        seen.push(took);
    }
    panic!("{seen:?}, expected one of at most {most:?}");
}

#[test]
fn bytes_take_their_time_and_the_delay_comes_once() {
    for count in [1, 4] {
        ensure_takes(Duration::from_millis(10 * count) + DELAY, || {
            let (regions, mut engines) = open::<1>(LAYER);
            let start = Instant::now();
            let ops: Vec<_> =
                (1..=count).flat_map(|it| [regions.put(MIB), regions.signal(0, it)]).collect();
            let last = submit(&mut engines[0], &ops);
            finish(&mut engines, &[last], start)
        });
    }
}

#[test]
fn each_signal_comes_behind_its_own_bytes() {
    let (regions, mut engines) = open::<1>(LAYER);
    let start = Instant::now();
    let ops: Vec<_> = (1..=4).flat_map(|it| [regions.put(MIB), regions.signal(0, it)]).collect();
    let last = submit(&mut engines[0], &ops);
    let mut seen = 0;
    while engines[0].completed().unwrap() < last {
        let arrived = regions.flag(0);
        if arrived > seen {
            let least = Duration::from_millis(10 * arrived) + DELAY;
            assert!(start.elapsed() >= least, "megabyte {arrived} after {:?}", start.elapsed());
            seen = arrived;
        }
        assert!(start.elapsed() < LATE);
        engines[0].park(LATE).unwrap();
    }
}

#[test]
fn a_get_asks_first_and_has_the_other_direction() {
    ensure_takes(Duration::from_millis(20) + 2 * DELAY, || {
        let (regions, mut engines) = open::<1>(LAYER);
        let start = Instant::now();
        let last = submit(&mut engines[0], &[regions.put(2 * MIB), regions.get(2 * MIB)]);
        finish(&mut engines, &[last], start)
    });
}

#[test]
fn engines_do_not_share_a_wire() {
    ensure_takes(Duration::from_millis(80) + DELAY, || {
        let (regions, mut engines) = open::<3>(LAYER);
        let start = Instant::now();
        let tickets = engines.each_mut().map(|engine| submit(engine, &[regions.put(8 * MIB)]));
        finish(&mut engines, &tickets, start)
    });
}

#[test]
fn behind_a_wait_the_clock_starts_when_it_has_passed() {
    ensure_takes(Duration::from_millis(10) + 2 * DELAY, || {
        let (regions, mut engines) = open::<2>(LAYER);
        let last = submit(&mut engines[0], &[regions.wait(0, 1), regions.put(MIB)]);
        let held = Instant::now();
        while held.elapsed() < Duration::from_millis(30) {
            assert_eq!(engines[0].completed().unwrap(), Ticket::NONE);
            engines[0].park(Duration::from_millis(5)).unwrap();
        }
        let start = Instant::now();
        let opened = submit(&mut engines[1], &[regions.signal(0, 1)]);
        finish(&mut engines, &[last, opened], start)
    });
}

/// How long this thread has run.
fn ran() -> Duration {
    let text = fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(text.split(' ').next().unwrap().parse().unwrap())
}

#[test]
fn who_parks_sleeps_until_the_next_op_is_due() {
    let slow = ThrottleLayer { bytes_per_second: 40.0 * MIB as f64, delay: DELAY };
    let (regions, mut engines) = open::<1>(slow);
    let (start, before) = (Instant::now(), ran());
    let last = submit(&mut engines[0], &[regions.put(8 * MIB)]);
    while engines[0].completed().unwrap() < last {
        engines[0].park(LATE).unwrap();
        assert!(start.elapsed() < LATE);
    }
    let (elapsed, ran) = (start.elapsed(), ran() - before);
    assert!(ran < elapsed / 3, "ran {ran:?} of {elapsed:?}");
}

#[test]
fn released_is_over_at_once() {
    let slow = ThrottleLayer { bytes_per_second: 1.0, delay: Duration::MAX };
    let (regions, mut engines) = open::<1>(slow);
    let last = submit(&mut engines[0], &[regions.put(MIB), regions.signal(0, 1)]);
    assert_eq!(engines[0].completed().unwrap(), Ticket::NONE);
    engines[0].release().unwrap();
    finish(&mut engines, &[last], Instant::now());
    assert_eq!(regions.flag(0), 0);
}

#[test]
fn a_link_is_as_fast_as_it_is_made() {
    let rate = |layer| fabric(layer).link(Rank(0)).unwrap().bytes_per_second;
    assert_eq!(rate(LAYER), Some(RATE));
    assert_eq!(rate(ThrottleLayer { bytes_per_second: f64::INFINITY, ..LAYER }), None);
}

#[test]
fn what_makes_no_throttle_is_refused() {
    for bytes_per_second in [0.0, -1.0, f64::NAN, f64::NEG_INFINITY] {
        let layer = ThrottleLayer { bytes_per_second, ..LAYER };
        let error = fabric(layer).engine(Default::default()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        let text = format!("bytes_per_second is {bytes_per_second}, expected a number above 0");
        assert_eq!(error.to_string(), text);
    }
    let single = DowngradeLayer { slice_ops_max: 1, ..DowngradeLayer::default() };
    let fabric = Wrapped::new(host::Fabric::open(Rank(0), 1).unwrap(), single);
    let error = Layer::engine(&LAYER, &fabric, 0, EngineRequirements::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
}
