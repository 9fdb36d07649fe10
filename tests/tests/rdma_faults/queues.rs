//! Tests peers that have ended, queues that are full, and copies over several queue pairs.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use peerlane_hal::{
    At, CopyEngine, ErrorKind, Fabric as _, Flag, Op, PeerMemory, Region, Role, Ticket,
};
use peerlane_rdma::{Engine, Error};
use peerlane_tests::{Failure, Outcome};

use crate::pair::{ensure, impatient, late, pair, put, region, run, wanted};

pub(crate) fn closed() -> Outcome {
    let fabrics = pair(impatient)?;
    let (local, remote) = region(&fabrics, 4096, Role::Data)?;
    let source = fabrics[0].memory().allocate(4096, Role::Data)?;
    let mut engine = fabrics[0].engine(Default::default())?;
    run(&mut engine, &[put(&remote, &source, 4096)])?;
    let mut fresh = fabrics[0].engine(Default::default())?;
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

/// Nobody polls the receiver while more signals come than it has places for: its fabric takes them.
pub(crate) fn overrun() -> Outcome {
    const SIGNALS: u64 = 300;
    let fabrics = pair(|options| options.receives = 8)?;
    let (flags, remote) = region(&fabrics, 64, Role::Flags)?;
    let mut engine = fabrics[0].engine(Default::default())?;
    let mut last = Ticket::NONE;
    for value in 1..=SIGNALS {
        let flag = Flag { region: &remote, word: value % 8 };
        // SAFETY: the region lives, and this engine is the only writer of its flags.
        last = unsafe { engine.submit(&[Op::Signal { flag, value }]) }?;
    }
    let deadline = late();
    while engine.completed()? < last {
        ensure(!deadline.has_passed(), "signals do not complete")?;
    }
    // The last ones may be under way, or in the queue of completions, which has room for them.
    let mut reader = fabrics[1].engine(Default::default())?;
    for value in SIGNALS - 7..=SIGNALS {
        while flags.flag_value(value % 8) != Some(value) {
            ensure(!deadline.has_passed(), format!("signal {value} is lost"))?;
            engine.completed()?;
            reader.completed()?;
        }
    }
    Ok(())
}

/// Two engines of one rank sleep. A message that changes no flag comes, one of them takes its event and goes
/// away; the other still hears of what comes next.
pub(crate) fn sleepers() -> Outcome {
    const ROUNDS: u64 = 30;
    /// Far above what a message takes, far below how long they would sleep.
    const SOON: Duration = Duration::from_secs(2);
    const SLEEP: Duration = Duration::from_secs(10);
    const ASLEEP_WITHIN: Duration = Duration::from_millis(20);
    let fabrics = pair(|_| {})?;
    let (flags, remote) = region(&fabrics, 64, Role::Flags)?;
    let (freed, nothing) = region(&fabrics, 64, Role::Flags)?;
    drop(freed);
    let mut writer = fabrics[0].engine(Default::default())?;
    let mut sleepers =
        [fabrics[1].engine(Default::default())?, fabrics[1].engine(Default::default())?];
    for round in 1..=ROUNDS {
        let gone = AtomicBool::new(false);
        let sleep = |engine: &mut Engine, is_over: &(dyn Fn() -> bool + Sync)| {
            while !is_over() {
                engine.completed()?;
                if !is_over() {
                    engine.park(SLEEP)?;
                }
            }
            Ok::<_, Error>(Instant::now())
        };
        let [leaves, stays] = &mut sleepers;
        let took = std::thread::scope(|scope| {
            scope.spawn(|| sleep(leaves, &|| gone.load(Ordering::SeqCst)));
            let stays = scope.spawn(|| sleep(stays, &|| flags.flag_value(1) == Some(round)));
            std::thread::sleep(ASLEEP_WITHIN);
            gone.store(true, Ordering::SeqCst);
            let flag = Flag { region: &nothing, word: 1 };
            run(&mut writer, &[Op::Signal { flag, value: round }])?;
            std::thread::sleep(ASLEEP_WITHIN);
            let signalled = Instant::now();
            let flag = Flag { region: &remote, word: 1 };
            run(&mut writer, &[Op::Signal { flag, value: round }])?;
            let heard = stays.join().map_err(|_| Failure::new("a sleeper panicked"))??;
            Ok::<_, Failure>(heard.duration_since(signalled))
        })?;
        ensure(took < SOON, format!("round {round}: the other sleeper heard after {took:?}"))?;
    }
    Ok(())
}

/// Puts and gets of all sizes and places, submitted at once, against the same copies one after the other.
pub(crate) fn order() -> Outcome {
    for queue_pairs in [1, 4] {
        let done = order_over(queue_pairs);
        done.map_err(|failure| failure.within(format!("{queue_pairs} queue pairs")))?;
    }
    Ok(())
}

fn order_over(queue_pairs: u32) -> Outcome {
    const BYTES: u64 = 100_000;
    const OPS: usize = 400;
    let fabrics = pair(|options| {
        (options.queue_pairs, options.stripe_bytes) = (queue_pairs, 4096);
    })?;
    let (there, remote) = region(&fabrics, BYTES, Role::Data)?;
    let (flags, remote_flags) = region(&fabrics, 64, Role::Flags)?;
    let here = fabrics[0].memory().allocate(BYTES, Role::Data)?;
    let mut engine = fabrics[0].engine(Default::default())?;
    let mut reader = fabrics[1].engine(Default::default())?;
    for seed in 1..=3 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut wanted = [vec![0; BYTES as usize], vec![0; BYTES as usize]];
        for (region, bytes) in [&here, &there].into_iter().zip(&mut wanted) {
            random.fill(bytes);
            // SAFETY: the region has as many bytes, and nothing is under way.
            unsafe { region.base().as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        }
        let [here_wanted, there_wanted] = &mut wanted;
        let mut last = Ticket::NONE;
        for _ in 0..OPS {
            let bytes = if random.bool() { random.u64(1..200) } else { random.u64(1..20_000) };
            let (at, to) = (random.u64(0..BYTES - bytes), random.u64(0..BYTES - bytes));
            let own = At { region: &here, offset: at };
            let other = At { region: &remote, offset: to };
            let here_part = at as usize..(at + bytes) as usize;
            let there_part = to as usize..(to + bytes) as usize;
            let op = if random.bool() {
                there_wanted[there_part].copy_from_slice(&here_wanted[here_part]);
                Op::Put { dst: other, src: own, bytes }
            } else {
                here_wanted[here_part].copy_from_slice(&there_wanted[there_part]);
                Op::Get { dst: own, src: other, bytes }
            };
            // SAFETY: the regions live; the engine itself keeps what overlaps in order.
            last = unsafe { engine.submit(&[op]) }?;
        }
        let flag = Flag { region: &remote_flags, word: 1 };
        // SAFETY: as above; this engine is the only writer of the flag.
        unsafe { engine.submit(&[Op::Signal { flag, value: seed }]) }?;
        let deadline = late();
        while flags.flag_value(1) != Some(seed) {
            ensure(!deadline.has_passed(), "the signal is lost")?;
            engine.completed()?;
            reader.completed()?;
        }
        let seen = |region: &peerlane_rdma::Local| {
            // SAFETY: the signal has come, and so has everything before it.
            unsafe { std::slice::from_raw_parts(region.base().as_ptr(), BYTES as usize) }.to_vec()
        };
        let right = seen(&there) == *there_wanted;
        ensure(right, format!("seed {seed}: the peer has wrong bytes"))?;
        while engine.completed()? < last {
            ensure(!deadline.has_passed(), "copies do not complete")?;
        }
        let right = seen(&here) == *here_wanted;
        ensure(right, format!("seed {seed}: this rank has wrong bytes"))?;
    }
    Ok(())
}
