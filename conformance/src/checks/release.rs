//! Checks contract 6: release.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use peerlane_hal::{CopyEngine, Error, ErrorKind, Fabric, Region, Ticket};

use super::failure::ensure_ends_with_its_copies;

use crate::data::{aligned, pattern, seed};
use crate::engine::{TestEngine, put, signal, wait, wait_reset};
use crate::failure::{Failure, Outcome, ensure};
use crate::harness::Harness;
use crate::ranks::{Participant, QUIET, Window, on_each};

/// Releases two engines whose waits can never be satisfied. Each must drain; a third engine, and
/// one created afterwards, must still work.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn release_lets_every_queued_wait_pass_within_a_bound<H: Harness>(harness: &H) -> Outcome {
    on_each(harness, 1..=3, |me| {
        let bytes = aligned(&me.caps, 3000);
        let (source, landing, again) = (me.bytes(bytes)?, me.bytes(bytes)?, me.bytes(bytes)?);
        let flags = me.flags(4)?;
        let (mut first, mut second, mut free) = (me.engine()?, me.engine()?, me.engine()?);
        let next = me.rank_after(1);
        let from = (&source.local, 0);
        let mut tickets = Vec::new();
        for (word, engine) in [(0, &mut first), (1, &mut second)] {
            let ops = [
                wait(&flags.local, word, u64::MAX),
                put((&landing.remote[next], 0), from, bytes),
                wait_reset(&flags.local, word, u64::MAX),
                signal(&flags.remote[next], word, 1),
                wait(&flags.local, word, u64::MAX),
            ];
            tickets.push(engine.submit_held(&ops)?.0);
        }
        drain(&mut first, tickets[0])?;
        let done = second.completed()?;
        ensure!(
            done < tickets[1],
            "ticket {} is complete on an engine that was not released, expected a ticket below {}",
            done.0,
            tickets[1].0
        );
        drain(&mut second, tickets[1])?;
        // The bytes of a released engine are undefined, but its ops have ended.
        me.barrier()?;
        ensure_works(me, &mut free, &source, &again, seed(me.me, 1))?;
        let mut fresh = me.engine()?;
        ensure_works(me, &mut fresh, &source, &again, seed(me.me, 2))
            .map_err(|f| f.within("on an engine created after the release"))?;
        me.barrier()
    })
}

fn drain<H: Harness>(engine: &mut TestEngine<'_, '_, H>, last: Ticket) -> Outcome {
    let time_limit = engine.time_limit("a released engine to drain");
    loop {
        engine.inner.release().map_err(|e| Failure::from(e).within("release"))?;
        let done = engine.completed()?;
        if done == last {
            return Ok(());
        }
        ensure!(
            done < last,
            "ticket {} is complete, but the last submitted ticket is {}",
            done.0,
            last.0
        );
        time_limit.check(|| format!("ticket {} of {}", done.0, last.0))?;
    }
}

/// Puts from `source` to the own rank and checks the bytes.
fn ensure_works<'r, H: Harness>(
    me: &Participant<'_, H>,
    engine: &mut TestEngine<'r, '_, H>,
    source: &'r Window<H>,
    landing: &'r Window<H>,
    seed: u64,
) -> Outcome {
    let bytes = landing.local.bytes();
    let sent = pattern(seed, bytes);
    me.write(&source.local, 0, &sent);
    engine.run(&[put((&landing.remote[me.me], 0), (&source.local, 0), bytes)])?;
    me.ensure_bytes("a put after the release", &landing.local, 0, &sent)
}

/// Submits to engines that were idle or busy when they were released. Each must fail with
/// `Aborted`, and the last ticket must be complete.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_released_engine_drains_and_takes_no_more<H: Harness>(harness: &H) -> Outcome {
    on_each(harness, [1, 2], |me| {
        let bytes = aligned(&me.caps, 500_000);
        let (source, landing) = (me.bytes(bytes)?, me.bytes(bytes)?);
        let flags = me.flags(2)?;
        let (here, next) = (me.me, me.rank_after(1));
        let (mut idle, mut busy) = (me.engine()?, me.engine()?);
        drain(&mut idle, Ticket::NONE)?;
        let copy = put((&landing.remote[next], 0), (&source.local, 0), bytes);
        // Without queued waits the release interrupts the copy.
        let mut last = busy.submit(&[copy])?;
        if busy.caps().queued_wait {
            busy.finish(last)?;
            let ops = [wait(&flags.local, 0, 1), copy, signal(&flags.remote[next], 1, 1)];
            last = busy.submit_held(&ops)?.0;
        }
        drain(&mut busy, last)?;
        for (name, engine, last) in [("idle", &mut idle, Ticket::NONE), ("busy", &mut busy, last)] {
            for ops in [&[][..], &[signal(&flags.remote[here], 0, 1)], &[copy]] {
                let answer = engine.try_submit(ops).map_err(|error| error.kind());
                let expected = Err(ErrorKind::Aborted);
                ensure!(
                    answer == expected,
                    "submit to a released engine that was {name} returned {answer:?} for {} ops, \
                     expected {expected:?}",
                    ops.len()
                );
            }
            let done = engine.completed()?;
            ensure!(
                done == last,
                "ticket {} is complete, but the last submitted ticket is {}",
                done.0,
                last.0
            );
            engine
                .inner
                .release()
                .map_err(|e| Failure::from(e).within("second call of release"))?;
        }
        me.barrier()
    })
}

/// Releases engines whose copies may be in flight, and waits until they are drained. Afterwards nothing may be written here, and
/// nothing may be read for a peer.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_drained_engine_touches_no_memory<H: Harness>(harness: &H) -> Outcome {
    on_each(harness, [1, 2], |me| {
        let engines = RefCell::new(Vec::new());
        ensure_ends_with_its_copies(
            me,
            |me, copies| {
                let mut engine = me.fabric.engine(Default::default())?;
                let mut last = Ticket::NONE;
                for copy in copies {
                    // SAFETY: the regions outlive the copies, which have ended when the engine is drained.
                    match unsafe { engine.submit(&[*copy]) } {
                        Err(error) if error.kind() == ErrorKind::QueueFull => break,
                        answer => last = answer?,
                    }
                }
                let time_limit = me.time_limit("a released engine to drain");
                engine.release()?;
                while engine.completed()? < last {
                    time_limit.check(String::new)?;
                    engine.park(Duration::from_millis(1))?;
                    engine.release()?;
                }
                engines.borrow_mut().push(engine);
                Ok(())
            },
            || {
                let begin = Instant::now();
                while begin.elapsed() < QUIET {
                    engines
                        .borrow_mut()
                        .iter_mut()
                        .try_for_each(|engine| engine.completed().map(drop))?;
                }
                Ok(())
            },
        )
    })
}
