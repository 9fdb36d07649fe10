//! Checks contract 10: polling and parking.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use peerlane_hal::{CopyEngine, Ticket};

use crate::data::{aligned, pattern, seed};
use crate::engine::{OpOf, TestEngine, put, signal, wait, word};
use crate::failure::{Failure, Outcome, ensure};
use crate::harness::{Harness, LocalOf, RemoteOf};
use crate::ranks::{on_each, on_ranks};

/// Polls one rank to completion while its peer makes no call. Then the peer receives while the
/// first rank makes no call.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_polled_engine_moves_when_it_is_polled<H: Harness>(harness: &H) -> Outcome {
    on_ranks(harness, 2, |me| {
        let bytes = aligned(&me.caps, 100_000);
        let (source, landing) = (me.bytes(bytes)?, me.bytes(2 * bytes)?);
        let flags = me.flags(2)?;
        let (mut engine, mut opener) = (me.engine()?, me.engine()?);
        let peer = 1 - me.me;
        for (round, active) in (1..=4).zip([0, 1, 0, 1]) {
            let sent = pattern(seed(active, round), bytes);
            if me.me == active {
                me.write(&source.local, 0, &sent);
                let gate = engine.caps().queued_wait.then(|| wait(&flags.local, 0, round));
                let mut ops: Vec<OpOf<'_, H>> = gate.into_iter().collect();
                ops.extend([
                    put((&landing.remote[peer], 0), (&source.local, 0), bytes),
                    put((&landing.remote[active], bytes), (&source.local, 0), bytes),
                    signal(&flags.remote[peer], 1, round),
                ]);
                let (_, rest) = engine.submit_held(&ops)?;
                opener.run(&[signal(&flags.remote[active], 0, round)])?;
                engine.run(rest)?;
                me.ensure_bytes("a put to the own rank", &landing.local, bytes, &sent)?;
            }
            me.barrier()?;
            if me.me != active {
                engine.wait_for_flag(&flags.local, 1, round)?;
                me.ensure_bytes("bytes of a peer that makes no calls", &landing.local, 0, &sent)?;
            }
            me.barrier()?;
        }
        Ok(())
    })
}

/// Signals between ranks that park with a long limit, for a flag and for the completion of a queued
/// wait. Each rank runs two threads, whose engines park at the same time.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn park_returns_when_a_flag_of_this_rank_is_signalled<H: Harness>(harness: &H) -> Outcome {
    on_each(harness, [1, 2, 3], |me| {
        let flags = me.flags(4)?;
        let pairs = [(me.engine()?, me.engine()?), (me.engine()?, me.engine()?)];
        let next = &flags.remote[me.rank_after(1)];
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..)
                .zip(pairs)
                .map(|(pair, (mut engine, mut sender))| {
                    let (flags, seed) = (&flags.local, seed(me.me, pair));
                    let run = move || ping(&mut engine, &mut sender, flags, next, 2 * pair, seed);
                    scope.spawn(run)
                })
                .collect();
            let joined = threads.into_iter().map(|thread| {
                thread.join().map_err(|_| Failure::new("a thread that parks panicked"))?
            });
            // Joins all threads before the first failure is returned.
            joined.collect::<Vec<Outcome>>().into_iter().collect::<Outcome>()
        })?;
        me.barrier()
    })
}

/// Signals words `first` and `first + 1` of the next rank, and parks until the own ones are
/// signalled.
fn ping<'r, H: Harness>(
    engine: &mut TestEngine<'r, '_, H>,
    sender: &mut TestEngine<'r, '_, H>,
    flags: &'r LocalOf<H>,
    next: &'r RemoteOf<H>,
    first: u64,
    seed: u64,
) -> Outcome {
    const ROUNDS: u64 = 150;
    let mut random = fastrand::Rng::with_seed(seed);
    for round in 1..=ROUNDS {
        // Delays some signals until the reader sleeps, others until it is about to sleep.
        match random.u32(..20) {
            0 => std::thread::sleep(Duration::from_millis(1)),
            1..10 => (0..random.u32(..20_000)).for_each(|_| std::hint::spin_loop()),
            _ => {}
        }
        if word(flags, first).is_some() {
            sender.run(&[signal(next, first, round)])?;
            park_until(engine, |_| flag_is(flags, first, round))?;
        }
        if engine.caps().queued_wait {
            let ticket = engine.submit(&[wait(flags, first + 1, round)])?;
            sender.run(&[signal(next, first + 1, round)])?;
            park_until(engine, |engine| Ok(engine.completed()? >= ticket))?;
        }
    }
    Ok(())
}

fn flag_is<R: peerlane_hal::Region>(flags: &R, at: u64, value: u64) -> Outcome<bool> {
    Ok(word(flags, at).is_some_and(|flag| flag.load(Ordering::Acquire) >= value))
}

/// Polls and parks in turn until `reached` holds.
fn park_until<'r, 'w, H: Harness>(
    engine: &mut TestEngine<'r, 'w, H>,
    mut reached: impl FnMut(&mut TestEngine<'r, 'w, H>) -> Outcome<bool>,
) -> Outcome {
    let limit = engine.harness.timeout();
    let time_limit = engine.time_limit("a flag that ends a park");
    loop {
        engine.completed()?;
        if reached(engine)? {
            return Ok(());
        }
        time_limit.check(|| "the condition is not yet true".to_owned())?;
        let took = park(engine, limit)?;
        ensure!(
            took < limit * 3 / 4,
            "park slept {took:?} of at most {limit:?} although a flag was signalled, expected an \
             earlier return"
        );
    }
}

fn park<H: Harness>(engine: &mut TestEngine<'_, '_, H>, limit: Duration) -> Outcome<Duration> {
    let start = Instant::now();
    engine.inner.park(limit).map_err(|e| Failure::from(e).within("park"))?;
    Ok(start.elapsed())
}

/// Checks an engine that is new, that has completed large copies, and that is at a blocked wait.
/// None may report that it is busy.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn an_idle_or_blocked_engine_is_not_busy<H: Harness>(harness: &H) -> Outcome {
    on_ranks(harness, 1, |me| {
        let bytes = aligned(&me.caps, 4 << 20);
        let (source, landing, flags) = (me.bytes(bytes)?, me.bytes(bytes)?, me.flags(1)?);
        let (mut engine, mut opener) = (me.engine()?, me.engine()?);
        let copy = || put((&landing.remote[0], 0), (&source.local, 0), bytes);
        wait_until_not_busy(&mut engine, "a new engine")?;
        let copied = (0..8).try_fold(Ticket::NONE, |_, _| engine.submit(&[copy()]))?;
        engine.finish(copied)?;
        wait_until_not_busy(&mut engine, "an engine that has completed everything")?;
        if !engine.caps().queued_wait {
            return Ok(());
        }
        let held = engine.submit_all(&[copy(), wait(&flags.local, 0, 1), copy()])?;
        wait_until_not_busy(&mut engine, "an engine at a blocked wait")?;
        opener.run(&[signal(&flags.remote[0], 0, 1)])?;
        engine.finish(held)
    })
}

/// Polls until the engine is not busy; it may still have to copy at first.
fn wait_until_not_busy<H: Harness>(engine: &mut TestEngine<'_, '_, H>, what: &str) -> Outcome {
    let time_limit = engine.time_limit(format!("{what} to be not busy"));
    loop {
        engine.completed()?;
        if !engine.inner.is_busy() {
            return Ok(());
        }
        time_limit.check(|| "is_busy returned true".to_owned())?;
    }
}

/// Wakes a parked engine before and during the park. Parks are repeated until the waker was used,
/// because each may return early.
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
        for engine in [&mut idle, &mut blocked] {
            for round in 0..ROUNDS {
                woken(engine, limit, Duration::from_micros(round * round * 3))?;
            }
        }
        let orphan = idle.inner.waker();
        drop((idle, blocked));
        orphan.wake();
        Ok(())
    })
}

/// Parks one engine, which another thread wakes after `delay`.
fn woken<H: Harness>(
    engine: &mut TestEngine<'_, '_, H>,
    limit: Duration,
    delay: Duration,
) -> Outcome {
    let waker = engine.inner.waker();
    let used = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(delay);
            used.store(true, Ordering::SeqCst);
            waker.wake();
        });
        let time_limit = engine.time_limit("the waker to be used");
        while !used.load(Ordering::SeqCst) {
            engine.completed()?;
            time_limit.check(|| "the waker was not yet used".to_owned())?;
            let took = park(engine, limit)?;
            ensure!(
                took < limit * 3 / 4,
                "park slept {took:?} of at most {limit:?} although its waker was used, expected an \
                 earlier return"
            );
        }
        Ok(())
    })
}

/// Parks an idle engine and one behind a blocked wait, with limits of zero and of some
/// milliseconds.
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
        for engine in [&mut idle, &mut blocked] {
            for limit in [0, 1, 0, 5, 20, 0, 3].map(Duration::from_millis) {
                // The first park may return early; a later one sleeps.
                for _ in 0..3 {
                    engine.completed()?;
                    let took = park(engine, limit)?;
                    ensure!(
                        took < limit + slack,
                        "park took {took:?}, expected at most its limit of {limit:?}"
                    );
                }
            }
        }
        flag_stays_zero::<H>(&flags.local)
    })
}

fn flag_stays_zero<H: Harness>(flags: &LocalOf<H>) -> Outcome {
    let seen = word(flags, 0).map_or(0, |flag| flag.load(Ordering::Acquire));
    ensure!(seen == 0, "a flag that was not signalled has the value {seen}, expected 0");
    Ok(())
}
