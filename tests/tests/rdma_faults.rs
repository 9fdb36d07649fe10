//! What goes wrong over RDMA, on the layer of the four traits: ranks are fabrics of this process.
//! Without a device only what needs none is run.

use std::net::{IpAddr, Ipv4Addr};
use std::process::{Command, ExitCode};
use std::time::Duration;

use libtest_mimic::{Arguments, Failed, Trial};
use peerlane_conformance::{Failure, Outcome, RdmaHarness};
use peerlane_hal::{
    At, CopyEngine, Deadline, Error as _, ErrorKind, Fabric as _, Flag, Op, PeerMemory, Rank,
    Region, RemoteKey, Role, Ticket,
};
use peerlane_rdma::{DeviceChoice, Engine, Error, Fabric, Key, Local, Options, Remote};

const PATIENCE: Duration = Duration::from_secs(30);

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // A test takes a link down.
    arguments.test_threads.get_or_insert(1);
    let absent = Fabric::open_with(Rank(0), 1, options(0)).err();
    let reason = absent.filter(|error| error.kind() == ErrorKind::Unavailable);
    if let Some(reason) = &reason {
        eprintln!("skipped: {reason}");
    }
    let trial = |name: &str, needs_device: bool, test: fn() -> Outcome| {
        Trial::test(format!("rdma_faults::{name}"), move || test().map_err(Failed::from))
            .with_ignored_flag(needs_device && reason.is_some())
    };
    let trials = vec![
        trial("a_device_that_is_not_there_is_named", false, no_device),
        trial("a_wrong_port_or_address_is_named", true, wrong_place),
        trial("a_port_that_is_down_is_named", true, port_down),
        trial("a_key_with_a_changed_field_is_refused", true, changed_keys),
        trial("memory_freed_after_the_import_is_safe", true, freed),
        trial("a_peer_that_closed_is_lost", true, closed),
        trial("more_messages_than_places_all_arrive", true, overrun),
        trial("engines_come_and_go_without_leaks", true, rounds),
    ];
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn options(rank: u32) -> Options {
    Options {
        device: RdmaHarness::device(Rank(rank)),
        service_ip: Some(IpAddr::V4(Ipv4Addr::LOCALHOST)),
        // A peer that is gone is found out soon.
        timeout_exponent: 12,
        retries: 3,
        ..Options::default()
    }
}

fn late() -> Deadline {
    Deadline::after(PATIENCE)
}

fn wanted(kind: ErrorKind, answer: Result<(), Error>) -> Outcome<String> {
    match answer {
        Err(error) if error.kind() == kind => Ok(error.to_string()),
        Err(error) => {
            let seen = error.kind();
            Err(Failure::new(format!("wanted {kind}, seen {seen}: {error}")))
        }
        Ok(()) => Err(Failure::new(format!("wanted {kind}, seen no error"))),
    }
}

fn ensure(holds: bool, what: impl Into<String>) -> Outcome {
    if holds { Ok(()) } else { Err(Failure::new(what)) }
}

/// Two ranks that are connected.
fn pair(change: impl Fn(&mut Options)) -> Outcome<[Fabric; 2]> {
    let open = |rank| {
        let mut options = options(rank);
        change(&mut options);
        Fabric::open_with(Rank(rank), 2, options)
    };
    let mut fabrics = [open(0)?, open(1)?];
    let addresses = [fabrics[0].address(), fabrics[1].address()];
    for fabric in &mut fabrics {
        for (peer, address) in Rank::all(2).zip(&addresses) {
            fabric.connect(peer, address, late())?;
        }
    }
    Ok(fabrics)
}

/// A region of rank 1, as rank 0 sees it.
fn region(fabrics: &[Fabric; 2], bytes: u64, role: Role) -> Outcome<(Local, Remote)> {
    let local = fabrics[1].memory().allocate(bytes, role)?;
    let key = fabrics[1].memory().export(&local)?;
    let remote = fabrics[0].memory().import(Rank(1), &key, late())?;
    Ok((local, remote))
}

/// Submits and drives until it is complete, or fails.
fn run(engine: &mut Engine, ops: &[Op<'_, Local, Remote>]) -> Result<Ticket, Error> {
    // SAFETY: the tests keep all regions until the engine is gone or has failed, and touch nothing
    // meanwhile.
    let ticket = unsafe { engine.submit(ops) }?;
    let deadline = late();
    while engine.completed()? < ticket {
        assert!(!deadline.has_passed(), "an op neither completes nor fails");
        engine.park(Duration::from_millis(5))?;
    }
    Ok(ticket)
}

fn put<'r>(dst: &'r Remote, src: &'r Local, bytes: u64) -> Op<'r, Local, Remote> {
    let (dst, src) = (At { region: dst, offset: 0 }, At { region: src, offset: 0 });
    Op::Put { dst, src, bytes }
}

fn no_device() -> Outcome {
    let device = DeviceChoice::Name("peerlane-none".into());
    let opened = Fabric::open_with(Rank(0), 1, Options { device, ..Options::default() });
    let text = wanted(ErrorKind::Unavailable, opened.map(drop))?;
    ensure(!text.is_empty(), "no words")
}

fn wrong_place() -> Outcome {
    let open = |change: fn(&mut Options)| {
        let mut options = options(0);
        change(&mut options);
        wanted(ErrorKind::InvalidArgument, Fabric::open_with(Rank(0), 1, options).map(drop))
    };
    let text = open(|options| options.gid_index = Some(200))?;
    ensure(text.starts_with("gid_index is 200"), text)?;
    let text = open(|options| options.port = Some(9))?;
    ensure(text.starts_with("port is 9"), text)?;
    let text = open(|options| options.retries = 9)?;
    ensure(text.starts_with("retries is 9"), text)
}

/// Only where a namespace may be changed for the test.
fn port_down() -> Outcome {
    let spaces = std::env::var("PEERLANE_TEST_RDMA_NAMESPACES").unwrap_or_default();
    let Some(space) = spaces.split(',').next().filter(|space| !space.is_empty()) else {
        return Ok(());
    };
    let set = |state: &str| {
        let arguments = ["-n", space, "link", "set", "eth0", state];
        let done = Command::new("ip").args(arguments).status();
        ensure(done.is_ok_and(|status| status.success()), format!("set the link {state}"))
    };
    set("down")?;
    std::thread::sleep(Duration::from_millis(200));
    let opened = Fabric::open_with(Rank(0), 1, options(0)).map(drop);
    set("up")?;
    let text = wanted(ErrorKind::Unavailable, opened)?;
    ensure(text.contains("no active port") || text.contains("no address"), text)?;
    let deadline = late();
    while Fabric::open_with(Rank(0), 1, options(0)).is_err() {
        ensure(!deadline.has_passed(), "the port does not come back")?;
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// Every bit of a key, one by one: refused, or still the same region.
fn changed_keys() -> Outcome {
    let fabrics = pair(|_| {})?;
    let local = fabrics[1].memory().allocate(4096, Role::Data)?;
    let key = fabrics[1].memory().export(&local)?;
    let bytes = key.encode();
    for at in 0..bytes.len() {
        for bit in 0..8 {
            let mut changed = bytes.clone();
            changed[at] ^= 1 << bit;
            let Ok(changed) = Key::decode(&changed) else { continue };
            let answer = fabrics[0].memory().import(Rank(1), &changed, late());
            wanted(ErrorKind::InvalidKey, answer.map(drop))
                .map_err(|failure| failure.within(format!("byte {at}, bit {bit}")))?;
        }
    }
    fabrics[0].memory().import(Rank(1), &key, late())?;
    Ok(())
}

/// The owner breaks the rule: the card refuses, the origin hears of it, and the target is unharmed.
fn freed() -> Outcome {
    let mut fabrics = pair(|_| {})?;
    let (freed, remote) = region(&fabrics, 4096, Role::Data)?;
    let (other, alive) = region(&fabrics, 4096, Role::Data)?;
    let source = fabrics[0].memory().allocate(4096, Role::Data)?;
    let mut engine = fabrics[0].engine()?;
    drop(freed);
    let text =
        wanted(ErrorKind::InvalidKey, run(&mut engine, &[put(&remote, &source, 4096)]).map(drop))?;
    ensure(text.contains("rank 1") && text.contains("remote key"), text)?;
    // It stays so, and another engine works.
    wanted(ErrorKind::InvalidKey, engine.completed().map(drop))?;
    drop(engine);
    let mut engine = fabrics[0].engine()?;
    // SAFETY: the region lives, and nothing is under way.
    unsafe { source.base().write_bytes(7, 4096) };
    run(&mut engine, &[put(&alive, &source, 4096)])?;
    // SAFETY: the put is complete at the origin, and so in memory of this machine.
    let seen = unsafe { std::slice::from_raw_parts(other.base().as_ptr(), 4096) };
    ensure(seen.iter().all(|byte| *byte == 7), "the bytes of the other region are wrong")?;
    // A flag of a freed region is dropped on the other side.
    let (freed, remote) = region(&fabrics, 64, Role::Flags)?;
    drop(freed);
    let flag = Flag { region: &remote, word: 1 };
    run(&mut engine, &[Op::Signal { flag, value: 1 }])?;
    Ok(())
}

fn closed() -> Outcome {
    let mut fabrics = pair(|_| {})?;
    let (local, remote) = region(&fabrics, 4096, Role::Data)?;
    let source = fabrics[0].memory().allocate(4096, Role::Data)?;
    let mut engine = fabrics[0].engine()?;
    run(&mut engine, &[put(&remote, &source, 4096)])?;
    let mut fresh = fabrics[0].engine()?;
    drop(local);
    let [first, second] = fabrics;
    drop(second);
    let text =
        wanted(ErrorKind::PeerLost, run(&mut engine, &[put(&remote, &source, 4096)]).map(drop))?;
    ensure(text.contains("rank 1") && text.contains("rxe"), text)?;
    wanted(ErrorKind::PeerLost, run(&mut fresh, &[put(&remote, &source, 4096)]).map(drop))?;
    drop(first);
    Ok(())
}

/// The receiver looks away while more signals come than it has places for.
fn overrun() -> Outcome {
    const SIGNALS: u64 = 1000;
    let mut fabrics = pair(|options| options.receives = 8)?;
    let (flags, remote) = region(&fabrics, 64, Role::Flags)?;
    let (mut engine, mut reader) = (fabrics[0].engine()?, fabrics[1].engine()?);
    let mut last = Ticket::NONE;
    for value in 1..=SIGNALS {
        let flag = Flag { region: &remote, word: value % 8 };
        // SAFETY: the region lives, and this engine is the only writer of its flags.
        last = unsafe { engine.submit(&[Op::Signal { flag, value }]) }?;
    }
    std::thread::sleep(Duration::from_millis(100));
    ensure(engine.completed()? < last, "all of them fitted, so nothing was tried")?;
    let deadline = late();
    while (1..=8).any(|back| flags.flag_value((SIGNALS - 8 + back) % 8) != Some(SIGNALS - 8 + back))
    {
        ensure(!deadline.has_passed(), "signals are lost")?;
        engine.completed()?;
        reader.completed()?;
    }
    let deadline = late();
    while engine.completed()? < last {
        ensure(!deadline.has_passed(), "signals arrived and do not complete")?;
    }
    Ok(())
}

/// Descriptors and memory stay where they were.
fn rounds() -> Outcome {
    const ROUNDS: usize = 300;
    let mut fabrics = pair(|_| {})?;
    let (_local, remote) = region(&fabrics, 4096, Role::Data)?;
    let source = fabrics[0].memory().allocate(4096, Role::Data)?;
    let mut before = 0;
    for round in 0..ROUNDS {
        let mut engine = fabrics[0].engine()?;
        run(&mut engine, &[put(&remote, &source, 4096)])?;
        drop(engine);
        if round == ROUNDS / 2 {
            before = descriptors();
        }
    }
    let after = descriptors();
    ensure(after <= before, format!("{before} descriptors became {after}"))
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}
