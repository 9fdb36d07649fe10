//! Contract 6: release.

use peerlane_hal::{CopyEngine, Error, ErrorKind, Region, Ticket};

use crate::data::{aligned, pattern, seed};
use crate::driver::{Driver, put, signal, wait, wait_reset};
use crate::failure::{Failure, Outcome, ensure};
use crate::harness::Harness;
use crate::world::{Participant, Window, on_each};

/// Waits that nobody will ever satisfy, in several slices and on two engines; a third engine, and
/// one that is made afterwards, still work.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn release_lets_every_queued_wait_pass_within_a_bound<H: Harness>(harness: &H) -> Outcome {
    on_each(harness, 1..=3, |me| {
        let bytes = aligned(&me.caps, 3000);
        let (source, landing, again) = (me.bytes(bytes)?, me.bytes(bytes)?, me.bytes(bytes)?);
        let flags = me.flags(4)?;
        let (mut first, mut second, mut free) = (me.engine()?, me.engine()?, me.engine()?);
        let next = me.after(1);
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
        ensure!(done < tickets[1], "the release of one engine released another");
        drain(&mut second, tickets[1])?;
        // What a released engine has put is worthless, but it has ended.
        me.meet()?;
        works(me, &mut free, &source, &again, seed(me.me, 1))?;
        let mut fresh = me.engine()?;
        works(me, &mut fresh, &source, &again, seed(me.me, 2))
            .map_err(|f| f.within("an engine made afterwards"))?;
        me.meet()
    })
}

fn drain<H: Harness>(driver: &mut Driver<'_, '_, H>, last: Ticket) -> Outcome {
    let patience = driver.patience("a released engine to drain");
    loop {
        driver.engine.release().map_err(|e| Failure::from(e).within("release"))?;
        let done = driver.completed()?;
        if done == last {
            return Ok(());
        }
        ensure!(done < last, "ticket {} is complete, the last one is {}", done.0, last.0);
        patience.check(|| format!("ticket {} of {}", done.0, last.0))?;
    }
}

/// A put from `source` to oneself.
fn works<'r, H: Harness>(
    me: &Participant<'_, H>,
    driver: &mut Driver<'r, '_, H>,
    source: &'r Window<H>,
    landing: &'r Window<H>,
    seed: u64,
) -> Outcome {
    let bytes = landing.local.bytes();
    let sent = pattern(seed, bytes);
    me.write(&source.local, 0, &sent);
    driver.run(&[put((&landing.remote[me.me], 0), (&source.local, 0), bytes)])?;
    me.ensure_bytes("a put after the release", &landing.local, 0, &sent)
}

/// Whether it was busy, idle or released before: `Aborted`, and the last ticket is reached.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_released_engine_drains_and_takes_no_more<H: Harness>(harness: &H) -> Outcome {
    on_each(harness, [1, 2], |me| {
        let bytes = aligned(&me.caps, 500_000);
        let (source, landing) = (me.bytes(bytes)?, me.bytes(bytes)?);
        let flags = me.flags(2)?;
        let (here, next) = (me.me, me.after(1));
        let (mut idle, mut busy) = (me.engine()?, me.engine()?);
        drain(&mut idle, Ticket::NONE)?;
        let copy = put((&landing.remote[next], 0), (&source.local, 0), bytes);
        // Without queued waits the copy is what the release interrupts.
        let mut last = busy.submit(&[copy])?;
        if busy.caps().queued_wait {
            busy.finish(last)?;
            let ops = [wait(&flags.local, 0, 1), copy, signal(&flags.remote[next], 1, 1)];
            last = busy.submit_held(&ops)?.0;
        }
        drain(&mut busy, last)?;
        for (name, driver, last) in [("idle", &mut idle, Ticket::NONE), ("busy", &mut busy, last)] {
            for ops in [&[][..], &[signal(&flags.remote[here], 0, 1)], &[copy]] {
                let answer = driver.try_submit(ops).map_err(|error| error.kind());
                let wanted = Err(ErrorKind::Aborted);
                ensure!(
                    answer == wanted,
                    "a released engine that was {name} answers {answer:?} to {} ops, wanted {wanted:?}",
                    ops.len()
                );
            }
            let done = driver.completed()?;
            ensure!(done == last, "ticket {} is complete, the last one is {}", done.0, last.0);
            driver.engine.release().map_err(|e| Failure::from(e).within("another release"))?;
        }
        me.meet()
    })
}
