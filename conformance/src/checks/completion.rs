//! Checks contract 4: completion.

use peerlane_hal::{Error, ErrorKind, Ticket};

use crate::data::{aligned, lengths, pattern, seed};
use crate::engine::{OpOf, put, signal, wait};
use crate::failure::{Outcome, ensure};
use crate::harness::Harness;
use crate::ranks::{QUIET, on_each, on_ranks};

/// Overwrites the source as soon as the ticket completes, and only then signals the peers.
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
        let (mut engine, mut opener) = (me.engine()?, me.engine()?);
        for round in 1..=ROUNDS {
            me.write(&source.local, 0, &pattern(seed(me.me, round), bytes));
            me.barrier()?;
            let own = me.me as u64;
            let gate = engine.caps().queued_wait.then(|| wait(&flags.local, GATE, round));
            let mut ops: Vec<OpOf<'_, H>> = gate.into_iter().collect();
            ops.extend(
                (0..me.ranks).map(|peer| {
                    put((&landing.remote[peer], own * bytes), (&source.local, 0), bytes)
                }),
            );
            let (mut ticket, rest) = engine.submit_held(&ops)?;
            engine.watch(QUIET / 5, |_| Ok(()))?;
            // An engine may already report completion here; then the gate stays closed.
            if !rest.is_empty() || engine.completed()? < ticket {
                opener.run(&[signal(&flags.remote[me.me], GATE, round)])?;
                ticket = engine.submit_all(rest)?;
            }
            engine.finish(ticket)?;
            me.poison(&source.local, 0..bytes);
            opener.run(&[signal(&flags.remote[me.me], GATE, round)])?;
            let signals: Vec<OpOf<'_, H>> = (0..me.ranks)
                .map(|peer| signal(&flags.remote[peer], ARRIVED + own, round))
                .collect();
            engine.run(&signals)?;
            for peer in 0..me.ranks {
                engine.wait_for_flag(&flags.local, ARRIVED + peer as u64, round)?;
                let expected = pattern(seed(peer, round), bytes);
                let what =
                    format!("bytes of rank {peer}, whose source was overwritten after completion");
                me.ensure_bytes(&what, &landing.local, peer as u64 * bytes, &expected)?;
            }
            me.barrier()?;
        }
        Ok(())
    })
}

/// Puts spans of many lengths to the own rank and reads them as soon as the ticket completes.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_completed_put_to_oneself_is_visible_here<H: Harness>(harness: &H) -> Outcome {
    on_each(harness, [1, 3], |me| {
        let lengths = lengths(&me.caps);
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let (source, landing) = (me.bytes(longest)?, me.bytes(longest)?);
        let flags = me.flags(1)?;
        let (mut engine, mut opener) = (me.engine()?, me.engine()?);
        for (round, bytes) in (1..).zip(lengths) {
            let sent = pattern(seed(me.me, round), bytes);
            me.write(&source.local, 0, &sent);
            let gate = engine.caps().queued_wait.then(|| wait(&flags.local, 0, round));
            let mut ops: Vec<OpOf<'_, H>> = gate.into_iter().collect();
            ops.push(put((&landing.remote[me.me], 0), (&source.local, 0), bytes));
            let (mut ticket, rest) = engine.submit_held(&ops)?;
            if !rest.is_empty() || engine.completed()? < ticket {
                opener.run(&[signal(&flags.remote[me.me], 0, round)])?;
                ticket = engine.submit_all(rest)?;
            }
            engine.finish(ticket)?;
            me.ensure_bytes(
                "destination of a completed put to the own rank",
                &landing.local,
                0,
                &sent,
            )?;
            me.poison(&landing.local, 0..bytes);
        }
        me.barrier()
    })
}

/// Checks that tickets count from 1 without a gap, and that the completed ticket never decreases
/// and never exceeds the last submitted one.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn completion_is_monotone<H: Harness>(harness: &H) -> Outcome {
    const SLICES: u64 = 60;
    on_each(harness, [1, 2, 5], |me| {
        let bytes = aligned(&me.caps, 40_000);
        let (source, landing) = (me.bytes(bytes)?, me.bytes(bytes * me.ranks as u64)?);
        let (flags, arrived) = (me.flags(1)?, me.flags(me.ranks as u64)?);
        let (mut engine, mut opener) = (me.engine()?, me.engine()?);
        let mut seen = engine.completed()?;
        ensure!(
            seen == Ticket::NONE,
            "ticket {} is complete before the first submission, expected no complete ticket",
            seen.0
        );
        let mut look = |done: Ticket, last: Ticket| {
            ensure!(
                done >= seen,
                "the last completed ticket went back from {} to {}",
                seen.0,
                done.0
            );
            ensure!(
                done <= last,
                "ticket {} is complete, but the last submitted ticket is {}",
                done.0,
                last.0
            );
            seen = done;
            Ok(())
        };
        let mut gate = 0;
        for slice in 1..=SLICES {
            if engine.caps().queued_wait && slice % 20 == 7 {
                // The wait is alone in the queue, so it is taken. If later ops do not fit, the gate opens.
                engine.finish(Ticket(slice - 1))?;
                engine.submit(&[wait(&flags.local, 0, slice)])?;
                gate = slice;
            } else {
                let slot = (&landing.remote[me.rank_after(slice as usize)], me.me as u64 * bytes);
                let op = [put(slot, (&source.local, 0), bytes)];
                let (_, rest) = engine.submit_held(&op)?;
                if !rest.is_empty() || slice == gate + 3 {
                    opener.run(&[signal(&flags.remote[me.me], 0, gate)])?;
                }
                if !rest.is_empty() {
                    engine.submit(rest)?;
                }
            }
            let last = Ticket(slice);
            look(engine.completed()?, last)?;
            look(engine.completed()?, last)?;
        }
        let last = engine.submit(&[])?;
        ensure!(
            last == Ticket(SLICES + 1),
            "slice {} got ticket {}, expected the number of the slice",
            SLICES + 1,
            last.0
        );
        let time_limit = me.time_limit("the last ticket to complete");
        loop {
            let done = engine.completed()?;
            look(done, last)?;
            if done == last {
                break;
            }
            time_limit.check(|| format!("ticket {}", done.0))?;
        }
        for _ in 0..10 {
            look(engine.completed()?, last)?;
        }
        engine.wait_for_peers(me, &arrived)?;
        me.barrier()
    })
}

/// Submits an empty slice alone, where it must complete, and behind a wait, where it must complete
/// only after the wait has passed.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn an_empty_slice_gets_a_ticket<H: Harness>(harness: &H) -> Outcome {
    on_ranks(harness, 1, |me| {
        let flags = me.flags(1)?;
        let (mut engine, mut opener) = (me.engine()?, me.engine()?);
        let first = engine.submit(&[])?;
        ensure!(first == Ticket(1), "the first ticket is {}, expected 1", first.0);
        engine.finish(first)?;
        let mut second = engine.submit(&[])?;
        ensure!(second == Ticket(2), "the ticket after 1 is {}, expected 2", second.0);
        if engine.caps().queued_wait {
            let held = engine.submit(&[wait(&flags.local, 0, 1)])?;
            second = match engine.try_submit(&[]) {
                // The queue holds one slice, so nothing can be queued behind the wait.
                Err(error) if error.kind() == ErrorKind::QueueFull => held,
                answer => answer?,
            };
            ensure!(
                second >= held,
                "an empty slice after ticket {1} got ticket {0}, expected a later ticket",
                second.0,
                held.0
            );
            engine.watch(QUIET, |done| {
                ensure!(
                    done < held,
                    "ticket {} is complete, but an op before it is a wait that is not satisfied",
                    done.0
                );
                Ok(())
            })?;
            opener.run(&[signal(&flags.remote[0], 0, 1)])?;
        }
        engine.finish(second)
    })
}
