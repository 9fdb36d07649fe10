//! Contract 2: wait.

use std::sync::atomic::Ordering;

use peerlane_hal::Role;

use crate::data::{aligned, pattern, seed};
use crate::driver::{OpOf, put, signal, wait, wait_reset, word};
use crate::failure::{Failure, Outcome, ensure};
use crate::harness::Harness;
use crate::world::{Participant, QUIET, on_each, on_ranks};

/// Nothing behind the wait moves, neither to peers nor here, until the value is reached; a larger
/// one passes too; another engine goes on meanwhile.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_wait_holds_everything_behind_it_until_the_flag_is_reached<H: Harness>(
    harness: &H,
) -> Outcome {
    const GATE: u64 = 0;
    const ARRIVED: u64 = 1;
    const PASSED: u64 = 2;
    const OVERTAKEN: u64 = 3;
    on_each(harness, 1..=3, |me| {
        let bytes = aligned(&me.caps, 1000);
        // Three slots: from the previous rank, from here, and past the wait.
        let (source, landing) = (me.bytes(bytes)?, me.bytes(3 * bytes)?);
        let flags = me.flags(4)?;
        me.write(&source.local, 0, &pattern(seed(me.me, 0), bytes));
        me.meet()?;
        let (mut held, mut free) = (me.engine()?, me.engine()?);
        let (here, next, previous) = (me.me, me.after(1), me.after(me.ranks - 1));
        let from = (&source.local, 0);
        let ops = [
            wait(&flags.local, GATE, 5),
            put((&landing.remote[next], 0), from, bytes),
            signal(&flags.remote[next], ARRIVED, 1),
            put((&landing.remote[here], bytes), from, bytes),
            signal(&flags.remote[here], PASSED, 1),
        ];
        let (ticket, rest) = held.submit_held(&ops)?;
        let quiet = |done| {
            ensure!(done < ticket, "the ticket behind the wait is complete");
            me.ensure_poison("bytes put behind the wait", &landing.local, 0..2 * bytes)?;
            let seen = |at| word(&flags.local, at).map_or(0, |flag| flag.load(Ordering::Acquire));
            ensure!(seen(ARRIVED) == 0 && seen(PASSED) == 0, "a signal behind the wait came");
            Ok(())
        };
        held.stays(QUIET, quiet)?;
        free.run(&[
            put((&landing.remote[next], 2 * bytes), from, bytes),
            signal(&flags.remote[next], OVERTAKEN, 1),
            signal(&flags.remote[next], GATE, 4),
        ])?;
        free.reach(&flags.local, OVERTAKEN, 1)?;
        let received = pattern(seed(previous, 0), bytes);
        me.ensure_bytes("bytes of the other engine", &landing.local, 2 * bytes, &received)?;
        held.stays(QUIET, quiet).map_err(|failure| failure.within("at a value below"))?;
        me.meet()?;

        free.run(&[signal(&flags.remote[next], GATE, 7)])?;
        held.run(rest)?;
        me.ensure_bytes(
            "bytes put to oneself",
            &landing.local,
            bytes,
            &pattern(seed(here, 0), bytes),
        )?;
        free.reach(&flags.local, ARRIVED, 1)?;
        me.ensure_bytes("bytes of the previous rank", &landing.local, 0, &received)?;
        me.meet()
    })
}

/// What another rank, another engine, the host and another fabric wrote before the flag is what the
/// put behind the wait sends.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_wait_acquires_what_any_writer_published<H: Harness>(harness: &H) -> Outcome {
    on_ranks(harness, 2, from_a_rank).map_err(|f| f.within("from another rank's engine"))?;
    on_ranks(harness, 1, from_an_engine).map_err(|f| f.within("from another engine"))?;
    on_ranks(harness, 1, from_the_host).map_err(|f| f.within("from the host"))?;
    on_ranks(harness, 1, from_a_fabric).map_err(|f| f.within("from another fabric"))
}

const ROUNDS: u64 = 20;

/// Rank 0 sends, rank 1 sends back what it received, all queued before anything moves.
fn from_a_rank<H: Harness>(me: &mut Participant<'_, H>) -> Outcome {
    let bytes = aligned(&me.caps, 5000);
    let (source, landing) = (me.bytes(ROUNDS * bytes)?, me.bytes(ROUNDS * bytes)?);
    let flags = me.flags(1)?;
    me.write(&source.local, 0, &pattern(seed(me.me, 0), ROUNDS * bytes));
    me.meet()?;
    let mut driver = me.engine()?;
    let peer = 1 - me.me;
    let mut ops: Vec<OpOf<'_, H>> = Vec::new();
    for round in 0..ROUNDS {
        let from = if me.me == 0 { &source.local } else { &landing.local };
        let sent = [
            put((&landing.remote[peer], round * bytes), (from, round * bytes), bytes),
            signal(&flags.remote[peer], 0, round + 1),
        ];
        let received = wait(&flags.local, 0, round + 1);
        match me.me {
            0 => ops.extend([sent[0], sent[1], received]),
            _ => ops.extend([received, sent[0], sent[1]]),
        }
    }
    driver.run(&ops)?;
    driver.reach(&flags.local, 0, ROUNDS)?;
    let wanted = pattern(seed(0, 0), ROUNDS * bytes);
    me.ensure_bytes("bytes sent there and back", &landing.local, 0, &wanted)?;
    me.meet()
}

/// Two engines of one rank: the second fills a relay that the first one sends from.
fn from_an_engine<H: Harness>(me: &mut Participant<'_, H>) -> Outcome {
    let bytes = aligned(&me.caps, 5000);
    let (source, relay, landing) = (me.bytes(bytes)?, me.bytes(bytes)?, me.bytes(bytes)?);
    let flags = me.flags(1)?;
    let (mut reader, mut writer) = (me.engine()?, me.engine()?);
    for round in 1..=ROUNDS {
        let sent = pattern(seed(0, round), bytes);
        me.write(&source.local, 0, &sent);
        let ops =
            [wait(&flags.local, 0, round), put((&landing.remote[0], 0), (&relay.local, 0), bytes)];
        let (_, rest) = reader.submit_held(&ops)?;
        writer.run(&[
            put((&relay.remote[0], 0), (&source.local, 0), bytes),
            signal(&flags.remote[0], 0, round),
        ])?;
        reader.run(rest)?;
        me.ensure_bytes("bytes through a relay", &landing.local, 0, &sent)?;
    }
    Ok(())
}

/// A thread of the host writes the bytes and stores the flag. Nothing to see where it cannot.
fn from_the_host<H: Harness>(me: &mut Participant<'_, H>) -> Outcome {
    let bytes = aligned(&me.caps, 5000);
    let (relay, landing) = (me.bytes(bytes)?, me.bytes(bytes)?);
    let flags = me.flags(1)?;
    let mut driver = me.engine()?;
    let Some(flag) = word(&flags.local, 0) else { return Ok(()) };
    for round in 1..=ROUNDS {
        let sent = pattern(seed(0, round), bytes);
        let ops =
            [wait(&flags.local, 0, round), put((&landing.remote[0], 0), (&relay.local, 0), bytes)];
        let (_, rest) = driver.submit_held(&ops)?;
        std::thread::scope(|scope| {
            let (harness, sent, relay) = (me.harness, &sent, &relay.local);
            scope.spawn(move || {
                harness.write(relay, 0, sent);
                flag.store(round, Ordering::Release);
            });
            driver.run(rest)
        })?;
        me.ensure_bytes("bytes that the host wrote", &landing.local, 0, &sent)?;
    }
    Ok(())
}

/// Own memory, registered with two fabrics of the rank. Nothing to see where a fabric takes none.
fn from_a_fabric<H: Harness>(me: &mut Participant<'_, H>) -> Outcome {
    let bytes = aligned(&me.caps, 5000);
    let span = 0..usize::try_from(bytes).expect("a few thousand bytes");
    let (Some(data), Some(words)) = (me.own_memory(bytes), me.own_memory(8)) else { return Ok(()) };
    let relay = me.register(&*data, span.clone(), Role::Data)?;
    let flags = me.register(&*words, 0..8, Role::Flags)?;
    let landing = me.bytes(bytes)?;
    let sent = pattern(seed(0, 1), bytes);
    let mut driver = me.engine()?;
    let ops = [wait(&flags, 0, 1), put((&landing.remote[0], 0), (&relay, 0), bytes)];
    let (_, rest) = driver.submit_held(&ops)?;
    on_ranks(me.harness, 1, |other| {
        let (relay, flags) = (
            other.register(&*data, span.clone(), Role::Data)?,
            other.register(&*words, 0..8, Role::Flags)?,
        );
        let (relay, flags) = (other.share(relay)?, other.share(flags)?);
        let source = other.bytes(bytes)?;
        other.write(&source.local, 0, &sent);
        other.engine()?.run(&[
            put((&relay.remote[0], 0), (&source.local, 0), bytes),
            signal(&flags.remote[0], 0, 1),
        ])
    })
    .map_err(|failure: Failure| failure.within("the other fabric"))?;
    driver.run(rest)?;
    me.ensure_bytes("bytes of the other fabric", &landing.local, 0, &sent)
}

/// Two ranks throw a flag of value 1 to and fro, everything queued ahead: a late reset wipes the
/// next signal, a forgotten one lets the next wait pass early. A reader that sees what stands behind
/// the wait finds the flag at zero.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn the_reset_of_a_wait_takes_effect_before_anything_behind_it<H: Harness>(
    harness: &H,
) -> Outcome {
    const THROWS: usize = 50;
    on_ranks(harness, 2, |me| {
        let flags = me.flags(1)?;
        let mut driver = me.engine()?;
        let throw = signal(&flags.remote[1 - me.me], 0, 1);
        let catch = wait_reset(&flags.local, 0, 1);
        let pair = if me.me == 0 { [throw, catch] } else { [catch, throw] };
        driver.run(&pair.repeat(THROWS))?;
        me.meet()?;
        let left = word(&flags.local, 0).map_or(0, |flag| flag.load(Ordering::Acquire));
        ensure!(left == 0, "the flag is {left} after the last reset, wanted 0");
        me.meet()
    })?;
    on_ranks(harness, 1, |me| {
        let flags = me.flags(2)?;
        let (mut driver, mut opener) = (me.engine()?, me.engine()?);
        for round in 1..=ROUNDS {
            let ops = [wait_reset(&flags.local, 0, 1), signal(&flags.remote[0], 1, round)];
            let (_, rest) = driver.submit_held(&ops)?;
            opener.run(&[signal(&flags.remote[0], 0, 1)])?;
            let ticket = driver.submit_all(rest)?;
            driver.reach(&flags.local, 1, round)?;
            let left = word(&flags.local, 0).map_or(0, |flag| flag.load(Ordering::Acquire));
            ensure!(left == 0, "the flag is {left} when what stands behind its reset is seen");
            driver.finish(ticket)?;
        }
        Ok(())
    })
}
