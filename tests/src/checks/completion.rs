//! Contract 4: completion.

use peerlane_hal::{Error, ErrorKind, Ticket};

use crate::data::{aligned, lengths, pattern, seed};
use crate::driver::{OpOf, put, signal, wait};
use crate::failure::{Outcome, ensure};
use crate::harness::Harness;
use crate::world::{QUIET, on_each, on_ranks};

/// The source is overwritten as soon as the ticket completes, and the peers are told only then.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_completed_ticket_frees_its_sources<H: Harness>(harness: &H) -> Outcome {
    const ROUNDS: u64 = 6;
    const GATE: u64 = 0;
    const ARRIVED: u64 = 1;
    on_each(harness, 1..=4, |me| {
        let bytes = aligned(&me.caps, 200_000);
        let (source, landing) = (me.bytes(bytes)?, me.bytes(bytes * me.ranks as u64)?);
        let flags = me.flags(ARRIVED + me.ranks as u64)?;
        let (mut driver, mut opener) = (me.engine()?, me.engine()?);
        for round in 1..=ROUNDS {
            me.write(&source.local, 0, &pattern(seed(me.me, round), bytes));
            me.meet()?;
            let own = me.me as u64;
            let gate = driver.caps().queued_wait.then(|| wait(&flags.local, GATE, round));
            let mut ops: Vec<OpOf<'_, H>> = gate.into_iter().collect();
            ops.extend(
                (0..me.ranks).map(|peer| {
                    put((&landing.remote[peer], own * bytes), (&source.local, 0), bytes)
                }),
            );
            let (mut ticket, rest) = driver.submit_held(&ops)?;
            driver.stays(QUIET / 5, |_| Ok(()))?;
            // An engine that says "complete" now is taken at its word.
            if !rest.is_empty() || driver.completed()? < ticket {
                opener.run(&[signal(&flags.remote[me.me], GATE, round)])?;
                ticket = driver.submit_all(rest)?;
            }
            driver.finish(ticket)?;
            me.poison(&source.local, 0..bytes);
            opener.run(&[signal(&flags.remote[me.me], GATE, round)])?;
            let told: Vec<OpOf<'_, H>> = (0..me.ranks)
                .map(|peer| signal(&flags.remote[peer], ARRIVED + own, round))
                .collect();
            driver.run(&told)?;
            for peer in 0..me.ranks {
                driver.reach(&flags.local, ARRIVED + peer as u64, round)?;
                let wanted = pattern(seed(peer, round), bytes);
                let what = format!("bytes of rank {peer}, whose source was then overwritten");
                me.ensure_bytes(&what, &landing.local, peer as u64 * bytes, &wanted)?;
            }
            me.meet()?;
        }
        Ok(())
    })
}

/// Puts to oneself of many lengths, looked at as soon as the ticket completes.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_completed_put_to_oneself_is_visible_here<H: Harness>(harness: &H) -> Outcome {
    on_each(harness, [1, 3], |me| {
        let lengths = lengths(&me.caps);
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let (source, landing) = (me.bytes(longest)?, me.bytes(longest)?);
        let flags = me.flags(1)?;
        let (mut driver, mut opener) = (me.engine()?, me.engine()?);
        for (round, bytes) in (1..).zip(lengths) {
            let sent = pattern(seed(me.me, round), bytes);
            me.write(&source.local, 0, &sent);
            let gate = driver.caps().queued_wait.then(|| wait(&flags.local, 0, round));
            let mut ops: Vec<OpOf<'_, H>> = gate.into_iter().collect();
            ops.push(put((&landing.remote[me.me], 0), (&source.local, 0), bytes));
            let (mut ticket, rest) = driver.submit_held(&ops)?;
            if !rest.is_empty() || driver.completed()? < ticket {
                opener.run(&[signal(&flags.remote[me.me], 0, round)])?;
                ticket = driver.submit_all(rest)?;
            }
            driver.finish(ticket)?;
            me.ensure_bytes("a completed put to oneself", &landing.local, 0, &sent)?;
            me.poison(&landing.local, 0..bytes);
        }
        me.meet()
    })
}

/// Tickets count from 1 without a gap; what is completed never goes back and never runs ahead of
/// what was submitted.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn completion_is_monotone<H: Harness>(harness: &H) -> Outcome {
    const SLICES: u64 = 60;
    on_each(harness, [1, 2, 5], |me| {
        let bytes = aligned(&me.caps, 40_000);
        let (source, landing) = (me.bytes(bytes)?, me.bytes(bytes * me.ranks as u64)?);
        let flags = me.flags(1)?;
        let (mut driver, mut opener) = (me.engine()?, me.engine()?);
        let mut seen = driver.completed()?;
        ensure!(seen == Ticket::NONE, "ticket {} is complete before the first", seen.0);
        let mut look = |done: Ticket, last: Ticket| {
            ensure!(done >= seen, "completion went back from ticket {} to {}", seen.0, done.0);
            ensure!(done <= last, "ticket {} is complete, the last one is {}", done.0, last.0);
            seen = done;
            Ok(())
        };
        let mut gate = 0;
        for slice in 1..=SLICES {
            if driver.caps().queued_wait && slice % 20 == 7 {
                // Alone in the queue, so that it is taken; what does not fit behind it opens it.
                driver.finish(Ticket(slice - 1))?;
                driver.submit(&[wait(&flags.local, 0, slice)])?;
                gate = slice;
            } else {
                let slot = (&landing.remote[me.after(slice as usize)], me.me as u64 * bytes);
                let op = [put(slot, (&source.local, 0), bytes)];
                let (_, rest) = driver.submit_held(&op)?;
                if !rest.is_empty() || slice == gate + 3 {
                    opener.run(&[signal(&flags.remote[me.me], 0, gate)])?;
                }
                if !rest.is_empty() {
                    driver.submit(rest)?;
                }
            }
            let last = Ticket(slice);
            look(driver.completed()?, last)?;
            look(driver.completed()?, last)?;
        }
        let last = driver.submit(&[])?;
        ensure!(last == Ticket(SLICES + 1), "slice {} got ticket {}", SLICES + 1, last.0);
        let patience = me.patience("the last ticket");
        loop {
            let done = driver.completed()?;
            look(done, last)?;
            if done == last {
                break;
            }
            patience.check(|| done.0.to_string())?;
        }
        for _ in 0..10 {
            look(driver.completed()?, last)?;
        }
        me.meet()
    })
}

/// Alone it completes; behind a wait it completes when the wait has passed, not before.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn an_empty_slice_gets_a_ticket<H: Harness>(harness: &H) -> Outcome {
    on_ranks(harness, 1, |me| {
        let flags = me.flags(1)?;
        let (mut driver, mut opener) = (me.engine()?, me.engine()?);
        let first = driver.submit(&[])?;
        ensure!(first == Ticket(1), "the first ticket is {}, wanted 1", first.0);
        driver.finish(first)?;
        let mut second = driver.submit(&[])?;
        ensure!(second == Ticket(2), "the ticket after 1 is {}, wanted 2", second.0);
        if driver.caps().queued_wait {
            let held = driver.submit(&[wait(&flags.local, 0, 1)])?;
            second = match driver.try_submit(&[]) {
                // A queue of one place: nothing can stand behind the wait.
                Err(error) if error.kind() == ErrorKind::QueueFull => held,
                answer => answer?,
            };
            ensure!(second >= held, "ticket {} comes after ticket {}", second.0, held.0);
            driver.stays(QUIET, |done| {
                ensure!(done < held, "ticket {} is complete behind a blocked wait", done.0);
                Ok(())
            })?;
            opener.run(&[signal(&flags.remote[0], 0, 1)])?;
        }
        driver.finish(second)
    })
}
