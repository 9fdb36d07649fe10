//! Contract 10: polling and parking.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use peerlane_hal::{CopyEngine, Ticket};

use crate::data::{aligned, pattern, seed};
use crate::driver::{Driver, OpOf, put, signal, wait, word};
use crate::failure::{Failure, Outcome, ensure};
use crate::harness::{Harness, LocalOf, RemoteOf};
use crate::world::{on_each, on_ranks};

/// A rank polls to completion while its peer does nothing, then the peer receives while the rank
/// does nothing.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_polled_engine_moves_when_it_is_polled<H: Harness>(harness: &H) -> Outcome {
    on_ranks(harness, 2, |me| {
        let bytes = aligned(&me.caps, 100_000);
        let (source, landing) = (me.bytes(bytes)?, me.bytes(2 * bytes)?);
        let flags = me.flags(2)?;
        let (mut driver, mut opener) = (me.engine()?, me.engine()?);
        let peer = 1 - me.me;
        for (round, active) in (1..=4).zip([0, 1, 0, 1]) {
            let sent = pattern(seed(active, round), bytes);
            if me.me == active {
                me.write(&source.local, 0, &sent);
                let gate = driver.caps().queued_wait.then(|| wait(&flags.local, 0, round));
                let mut ops: Vec<OpOf<'_, H>> = gate.into_iter().collect();
                ops.extend([
                    put((&landing.remote[peer], 0), (&source.local, 0), bytes),
                    put((&landing.remote[active], bytes), (&source.local, 0), bytes),
                    signal(&flags.remote[peer], 1, round),
                ]);
                let (_, rest) = driver.submit_held(&ops)?;
                opener.run(&[signal(&flags.remote[active], 0, round)])?;
                driver.run(rest)?;
                me.ensure_bytes("a put to oneself", &landing.local, bytes, &sent)?;
            }
            me.meet()?;
            if me.me != active {
                driver.reach(&flags.local, 1, round)?;
                me.ensure_bytes("bytes of an idle peer", &landing.local, 0, &sent)?;
            }
            me.meet()?;
        }
        Ok(())
    })
}

/// Ranks signal each other and park with a long limit between two looks, at the flag itself and at
/// the completion of a queued wait; on two threads each, whose engines are parked at once.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn park_returns_when_a_flag_of_this_rank_is_signalled<H: Harness>(harness: &H) -> Outcome {
    on_each(harness, [1, 2, 3], |me| {
        let flags = me.flags(4)?;
        let pairs = [(me.engine()?, me.engine()?), (me.engine()?, me.engine()?)];
        let next = &flags.remote[me.after(1)];
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..)
                .zip(pairs)
                .map(|(pair, (mut driver, mut sender))| {
                    let (flags, seed) = (&flags.local, seed(me.me, pair));
                    let run = move || ping(&mut driver, &mut sender, flags, next, 2 * pair, seed);
                    scope.spawn(run)
                })
                .collect();
            let joined = threads.into_iter().map(|thread| {
                thread.join().map_err(|_| Failure::new("a parking thread panicked"))?
            });
            // All are joined before the first failure is returned.
            joined.collect::<Vec<Outcome>>().into_iter().collect::<Outcome>()
        })?;
        me.meet()
    })
}

/// Signals the next rank's words `first` and `first + 1`, and parks until one's own are signalled.
fn ping<'r, H: Harness>(
    driver: &mut Driver<'r, '_, H>,
    sender: &mut Driver<'r, '_, H>,
    flags: &'r LocalOf<H>,
    next: &'r RemoteOf<H>,
    first: u64,
    seed: u64,
) -> Outcome {
    const ROUNDS: u64 = 150;
    let mut random = fastrand::Rng::with_seed(seed);
    for round in 1..=ROUNDS {
        // Now and then so late that the reader sleeps, else so that it is about to.
        match random.u32(..20) {
            0 => std::thread::sleep(Duration::from_millis(1)),
            1..10 => (0..random.u32(..20_000)).for_each(|_| std::hint::spin_loop()),
            _ => {}
        }
        if word(flags, first).is_some() {
            sender.run(&[signal(next, first, round)])?;
            park_until(driver, |_| flag_is(flags, first, round))?;
        }
        if driver.caps().queued_wait {
            let ticket = driver.submit(&[wait(flags, first + 1, round)])?;
            sender.run(&[signal(next, first + 1, round)])?;
            park_until(driver, |driver| Ok(driver.completed()? >= ticket))?;
        }
    }
    Ok(())
}

fn flag_is<R: peerlane_hal::Region>(flags: &R, at: u64, value: u64) -> Outcome<bool> {
    Ok(word(flags, at).is_some_and(|flag| flag.load(Ordering::Acquire) >= value))
}

/// Looks and parks, once for every look.
fn park_until<'r, 'w, H: Harness>(
    driver: &mut Driver<'r, 'w, H>,
    mut reached: impl FnMut(&mut Driver<'r, 'w, H>) -> Outcome<bool>,
) -> Outcome {
    let limit = driver.harness.timeout();
    let patience = driver.patience("a flag that ends a park");
    loop {
        driver.completed()?;
        if reached(driver)? {
            return Ok(());
        }
        patience.check(|| "no end".to_owned())?;
        let took = park(driver, limit)?;
        ensure!(
            took < limit * 3 / 4,
            "park slept {took:?} of {limit:?} while a flag was signalled"
        );
    }
}

fn park<H: Harness>(driver: &mut Driver<'_, '_, H>, limit: Duration) -> Outcome<Duration> {
    let start = Instant::now();
    driver.engine.park(limit).map_err(|e| Failure::from(e).within("park"))?;
    Ok(start.elapsed())
}

/// Copies to oneself, large enough that an engine may interrupt them, alone and behind a blocked wait.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn an_idle_or_blocked_engine_is_not_busy<H: Harness>(harness: &H) -> Outcome {
    on_ranks(harness, 1, |me| {
        let bytes = aligned(&me.caps, 4 << 20);
        let (source, landing, flags) = (me.bytes(bytes)?, me.bytes(bytes)?, me.flags(1)?);
        let (mut driver, mut opener) = (me.engine()?, me.engine()?);
        let copy = || put((&landing.remote[0], 0), (&source.local, 0), bytes);
        becomes_not_busy(&mut driver, "a new engine")?;
        let copied = (0..8).try_fold(Ticket::NONE, |_, _| driver.submit(&[copy()]))?;
        driver.finish(copied)?;
        becomes_not_busy(&mut driver, "an engine that has completed everything")?;
        if !driver.caps().queued_wait {
            return Ok(());
        }
        let held = driver.submit_all(&[copy(), wait(&flags.local, 0, 1), copy()])?;
        becomes_not_busy(&mut driver, "an engine at a blocked wait")?;
        opener.run(&[signal(&flags.remote[0], 0, 1)])?;
        driver.finish(held)
    })
}

/// Polls until the engine is not busy; what it still has to copy ends some time.
fn becomes_not_busy<H: Harness>(driver: &mut Driver<'_, '_, H>, what: &str) -> Outcome {
    let patience = driver.patience(what);
    loop {
        driver.completed()?;
        if !driver.engine.is_busy() {
            return Ok(());
        }
        patience.check(|| "the engine says that it is busy".to_owned())?;
    }
}

/// Parks are repeated until the limit is surely over, since each may return early; the waker, used
/// before or meanwhile, ends the sleep.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn park_returns_when_the_waker_is_used<H: Harness>(harness: &H) -> Outcome {
    const ROUNDS: u64 = 30;
    on_ranks(harness, 1, |me| {
        let flags = me.flags(1)?;
        let (mut idle, mut blocked) = (me.engine()?, me.engine()?);
        if blocked.caps().queued_wait {
            blocked.submit(&[wait(&flags.local, 0, 1)])?;
        }
        let limit = me.harness.timeout();
        for driver in [&mut idle, &mut blocked] {
            for round in 0..ROUNDS {
                woken(driver, limit, Duration::from_micros(round * round * 3))?;
            }
        }
        let orphan = idle.engine.waker();
        drop((idle, blocked));
        orphan.wake();
        Ok(())
    })
}

/// One sleeper, woken after `delay`.
fn woken<H: Harness>(driver: &mut Driver<'_, '_, H>, limit: Duration, delay: Duration) -> Outcome {
    let waker = driver.engine.waker();
    let used = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(delay);
            used.store(true, Ordering::SeqCst);
            waker.wake();
        });
        let patience = driver.patience("the waker to be used");
        while !used.load(Ordering::SeqCst) {
            driver.completed()?;
            patience.check(|| "no use".to_owned())?;
            let took = park(driver, limit)?;
            ensure!(took < limit * 3 / 4, "park slept {took:?} of {limit:?} past its waker");
        }
        Ok(())
    })
}

/// Idle and behind a blocked wait, for limits of zero and of some milliseconds.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn park_returns_at_its_limit<H: Harness>(harness: &H) -> Outcome {
    on_ranks(harness, 1, |me| {
        let flags = me.flags(1)?;
        let (mut idle, mut blocked) = (me.engine()?, me.engine()?);
        if blocked.caps().queued_wait {
            blocked.submit(&[wait(&flags.local, 0, 1)])?;
        }
        let slack = me.harness.timeout() / 2;
        for driver in [&mut idle, &mut blocked] {
            for limit in [0, 1, 0, 5, 20, 0, 3].map(Duration::from_millis) {
                // The first may return early, the second sleeps.
                for _ in 0..3 {
                    driver.completed()?;
                    let took = park(driver, limit)?;
                    ensure!(took < limit + slack, "park took {took:?}, its limit was {limit:?}");
                }
            }
        }
        flag_stays_zero::<H>(&flags.local)
    })
}

fn flag_stays_zero<H: Harness>(flags: &LocalOf<H>) -> Outcome {
    let seen = word(flags, 0).map_or(0, |flag| flag.load(Ordering::Acquire));
    ensure!(seen == 0, "a flag that nobody signalled is {seen}");
    Ok(())
}
