//! Opens two ranks as fabrics of this process, on two devices if there are two.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use peerlane_hal::{
    At, CopyEngine, Deadline, Error as _, ErrorKind, Fabric as _, Flag, Op, PeerMemory, Rank,
    Region, Role, Ticket,
};
use peerlane_rdma::{Engine, Error, Fabric, Local, Options, Remote};
use peerlane_tests::{Failure, Outcome, RdmaHarness};

pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) fn options(rank: u32) -> Options {
    Options {
        device: RdmaHarness::device(Rank(rank)),
        service_ip: Some(IpAddr::V4(Ipv4Addr::LOCALHOST)),
        // A packet that is late on a busy machine is not lost.
        timeout_exponent: 17,
        ..Options::default()
    }
}

/// A peer that is gone is found out soon.
pub(crate) fn impatient(options: &mut Options) {
    (options.timeout_exponent, options.retries) = (15, 3);
}

pub(crate) fn late() -> Deadline {
    Deadline::after(PATIENCE)
}

pub(crate) fn wanted(kind: ErrorKind, answer: Result<(), Error>) -> Outcome<String> {
    match answer {
        Err(error) if error.kind() == kind => Ok(error.to_string()),
        Err(error) => {
            let seen = error.kind();
            Err(Failure::new(format!("expected {kind}, found {seen}: {error}")))
        }
        Ok(()) => Err(Failure::new(format!("expected {kind}, found no error"))),
    }
}

pub(crate) fn ensure(holds: bool, what: impl Into<String>) -> Outcome {
    if holds { Ok(()) } else { Err(Failure::new(what)) }
}

/// Two ranks that are connected.
pub(crate) fn pair(change: impl Fn(&mut Options)) -> Outcome<[Fabric; 2]> {
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
pub(crate) fn region(fabrics: &[Fabric; 2], bytes: u64, role: Role) -> Outcome<(Local, Remote)> {
    let local = fabrics[1].memory().allocate(bytes, role)?;
    let key = fabrics[1].memory().export(&local)?;
    let remote = fabrics[0].memory().import(Rank(1), &key, late())?;
    Ok((local, remote))
}

/// Submits and drives until it is complete, or fails.
pub(crate) fn run(engine: &mut Engine, ops: &[Op<'_, Local, Remote>]) -> Result<Ticket, Error> {
    // SAFETY: the tests keep all regions until the engine is gone or has failed, and touch nothing
    // meanwhile.
    let ticket = unsafe { engine.submit(ops) }?;
    drive(engine, ticket)?;
    Ok(ticket)
}

/// Signals rank 1 and waits until it sees the flag: all that the engine has put there has then arrived, which a completed ticket
/// does not tell.
pub(crate) fn announce(fabrics: &[Fabric; 2], engine: &mut Engine) -> Outcome {
    let (flags, remote) = region(fabrics, 8, Role::Flags)?;
    let flag = Flag { region: &remote, word: 0 };
    run(engine, &[Op::Signal { flag, value: 1 }])?;
    let mut reader = fabrics[1].engine(Default::default())?;
    let deadline = late();
    while flags.flag_value(0) != Some(1) {
        ensure(!deadline.has_passed(), "the signal is lost")?;
        engine.completed()?;
        reader.completed()?;
    }
    Ok(())
}

/// Drives until a ticket is complete, or something fails.
pub(crate) fn drive(engine: &mut Engine, ticket: Ticket) -> Result<(), Error> {
    let deadline = late();
    while engine.completed()? < ticket {
        assert!(!deadline.has_passed(), "an op neither completes nor fails");
        engine.park(Duration::from_millis(5))?;
    }
    Ok(())
}

pub(crate) fn put<'r>(dst: &'r Remote, src: &'r Local, bytes: u64) -> Op<'r, Local, Remote> {
    let (dst, src) = (At { region: dst, offset: 0 }, At { region: src, offset: 0 });
    Op::Put { dst, src, bytes }
}
