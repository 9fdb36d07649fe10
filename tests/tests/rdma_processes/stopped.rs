//! Runs two bare fabrics, one of them in a process that is stopped: its NIC still answers, but no
//! receives are posted any more.

use std::time::{Duration, Instant};

use peerlane_collectives::bootstrap::Bootstrap;
use peerlane_hal::{
    CopyEngine, Deadline, Error as _, ErrorKind, Fabric as _, Flag, Op, PeerMemory, Rank,
    Region as _, RemoteKey as _, Role, Ticket,
};
use peerlane_rdma::{Engine, Error, Fabric, Key, Options};
use peerlane_tests::processes::Parent;
use peerlane_tests::{Failure, Outcome};

use crate::scenario::{TIMEOUT, unexpected};

/// Signals that come before the process is stopped.
const SIGNALS_BEFORE: u64 = 20;
/// After so long without a completion the peer counts as lost.
const STALL_TIMEOUT: Duration = Duration::from_secs(2);
/// The longest that who drives several engines rests between two looks.
const LOOK_AGAIN: Duration = Duration::from_millis(1);
/// What a busy machine may add.
const GRACE: Duration = Duration::from_secs(10);

/// What the rank that signals does until a signal is complete.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Waits {
    /// It parks.
    Asleep,
    /// It looks again and again, as who drives other engines beside this one does.
    Awake,
}

/// Few places for messages, and little patience.
pub(crate) fn options(options: Options) -> Options {
    Options { receives: 8, stall_timeout: STALL_TIMEOUT, ..options }
}

/// Rank 0 signals to rank 1 until that is stopped.
pub(crate) fn run_rank(
    parent: &Parent,
    bootstrap: &impl Bootstrap,
    mut fabric: Fabric,
    waits: Waits,
) -> Outcome {
    let deadline = Deadline::after(TIMEOUT);
    let share = |label, mine: &[u8]| bootstrap.exchange(label, mine, deadline).map_err(unexpected);
    for (peer, address) in Rank::all(2).zip(share("addresses", &fabric.address())?) {
        fabric.connect(peer, &address, deadline)?;
    }
    let flags = fabric.memory().allocate(64, Role::Flags)?;
    let keys = share("keys", &fabric.memory().export(&flags)?.encode())?;
    let mut engine = fabric.engine(Default::default())?;
    if bootstrap.rank() == Rank(1) {
        let mut said = false;
        while !deadline.has_passed() {
            engine.completed()?;
            if !said && flags.flag_value(0) >= Some(SIGNALS_BEFORE) {
                parent.print_line("under way");
                said = true;
            }
            engine.park(Duration::from_millis(10))?;
        }
        return Err(Failure::new("nobody stopped this process"));
    }
    let key = Key::decode(&keys[1]).map_err(|error| Failure::new(error.to_string()))?;
    let remote = fabric.memory().import(Rank(1), &key, deadline)?;
    let mut signalled = Instant::now();
    let mut signal = |value| -> Result<(), Error> {
        let flag = Flag { region: &remote, word: 0 };
        // SAFETY: the region outlives the engine's work on it, and this engine alone writes the flag.
        let ticket = unsafe { engine.submit(&[Op::Signal { flag, value }]) }?;
        finish(&mut engine, ticket, waits, deadline)?;
        signalled = Instant::now();
        Ok(())
    };
    let lost = (1..).map(&mut signal).find_map(Result::err);
    let (error, took) = (lost.expect("signals go on until one fails"), signalled.elapsed());
    let text = error.to_string();
    let named = text.contains("rank 1") && text.contains("rxe1");
    let in_time = took >= STALL_TIMEOUT && took < STALL_TIMEOUT + GRACE;
    if error.kind() != ErrorKind::PeerLost || !named || !in_time {
        return Err(Failure::new(format!("after {took:?}: {text} ({})", error.kind())));
    }
    parent.print_line(format_args!("passed {text}"));
    parent.print_line("done");
    Ok(())
}

fn finish(
    engine: &mut Engine,
    ticket: Ticket,
    waits: Waits,
    deadline: Deadline,
) -> Result<(), Error> {
    while engine.completed()? < ticket {
        assert!(!deadline.has_passed(), "a signal neither completes nor fails");
        match waits {
            Waits::Asleep => engine.park(deadline.remaining())?,
            Waits::Awake => std::thread::sleep(LOOK_AGAIN),
        }
    }
    Ok(())
}
