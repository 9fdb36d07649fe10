//! Checks contract 2: wait.

use std::sync::atomic::Ordering;

use peerlane_hal::Role;

use super::QUEUES_A_BLOCKED_ENGINE;
use crate::data::{aligned, pattern, seed};
use crate::engine::{OpOf, put, signal, wait, wait_reset, word};
use crate::failure::{Failure, Outcome, ensure};
use crate::harness::Harness;
use crate::ranks::{Participant, QUIET, on_each, on_ranks};

/// Queues ops behind a wait. None may take effect, here or at a peer, until the flag reaches the
/// value; a larger value passes too. Another engine must go on meanwhile.
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
        // Three slots: put by the previous rank, by this rank, and by the engine that does not wait.
        let (source, landing) = (me.bytes(bytes)?, me.bytes(3 * bytes)?);
        let flags = me.flags(4)?;
        me.write(&source.local, 0, &pattern(seed(me.me, 0), bytes));
        me.barrier()?;
        let (mut held, mut free) = (me.engine()?, me.engine()?);
        let (here, next, previous) = (me.me, me.rank_after(1), me.rank_after(me.ranks - 1));
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
            ensure!(done < ticket, "the ops after the wait are complete before the flag is set");
            me.ensure_poison("bytes of a put after the wait", &landing.local, 0..2 * bytes)?;
            let seen = |at| word(&flags.local, at).map_or(0, |flag| flag.load(Ordering::Acquire));
            ensure!(
                seen(ARRIVED) == 0 && seen(PASSED) == 0,
                "a signal after the wait arrived before the flag was set"
            );
            Ok(())
        };
        held.watch(QUIET, quiet)?;
        free.run(&[
            put((&landing.remote[next], 2 * bytes), from, bytes),
            signal(&flags.remote[next], GATE, 4),
            signal(&flags.remote[next], OVERTAKEN, 1),
        ])?;
        free.wait_for_flag(&flags.local, OVERTAKEN, 1)?;
        let received = pattern(seed(previous, 0), bytes);
        me.ensure_bytes("bytes that the other engine put", &landing.local, 2 * bytes, &received)?;
        held.watch(QUIET, quiet)
            .map_err(|failure| failure.within("with the flag below the expected value"))?;
        me.barrier()?;

        free.run(&[signal(&flags.remote[next], GATE, 7)])?;
        held.run(rest)?;
        me.ensure_bytes(
            "bytes put to the own rank",
            &landing.local,
            bytes,
            &pattern(seed(here, 0), bytes),
        )?;
        free.wait_for_flag(&flags.local, ARRIVED, 1)?;
        me.ensure_bytes("bytes that the previous rank put", &landing.local, 0, &received)?;
        me.barrier()
    })
}

/// Writes bytes and a flag by another rank, another engine, the host and another fabric. The put
/// behind the wait must send those bytes.
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

/// Sends from rank 0 to rank 1 and back, all queued before any op can run.
fn from_a_rank<H: Harness>(me: &mut Participant<'_, H>) -> Outcome {
    let bytes = aligned(&me.caps, 5000);
    let (source, landing) = (me.bytes(ROUNDS * bytes)?, me.bytes(ROUNDS * bytes)?);
    let flags = me.flags(1)?;
    me.write(&source.local, 0, &pattern(seed(me.me, 0), ROUNDS * bytes));
    me.barrier()?;
    let mut engine = me.engine()?;
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
    engine.run(&ops)?;
    engine.wait_for_flag(&flags.local, 0, ROUNDS)?;
    let expected = pattern(seed(0, 0), ROUNDS * bytes);
    me.ensure_bytes("bytes that were put to a peer and back", &landing.local, 0, &expected)?;
    me.barrier()
}

/// Runs two engines of one rank: the second fills a relay that the first sends from.
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
        me.ensure_bytes("bytes that a relay forwarded", &landing.local, 0, &sent)?;
    }
    Ok(())
}

/// Lets a host thread write the bytes and store the flag. Does nothing where the host cannot.
fn from_the_host<H: Harness>(me: &mut Participant<'_, H>) -> Outcome {
    let bytes = aligned(&me.caps, 5000);
    let (relay, landing) = (me.bytes(bytes)?, me.bytes(bytes)?);
    let flags = me.flags(1)?;
    let mut engine = me.engine()?;
    let Some(flag) = word(&flags.local, 0) else { return Ok(()) };
    for round in 1..=ROUNDS {
        let sent = pattern(seed(0, round), bytes);
        let ops =
            [wait(&flags.local, 0, round), put((&landing.remote[0], 0), (&relay.local, 0), bytes)];
        let (_, rest) = engine.submit_held(&ops)?;
        std::thread::scope(|scope| {
            let (harness, sent, relay) = (me.harness, &sent, &relay.local);
            scope.spawn(move || {
                harness.write(relay, 0, sent);
                flag.store(round, Ordering::Release);
            });
            engine.run(rest)
        })?;
        me.ensure_bytes("bytes that the host wrote to the source", &landing.local, 0, &sent)?;
    }
    Ok(())
}

/// Registers memory of the caller with two fabrics of the rank. Does nothing where a fabric cannot
/// register memory.
fn from_a_fabric<H: Harness>(me: &mut Participant<'_, H>) -> Outcome {
    let bytes = aligned(&me.caps, 5000);
    let span = 0..usize::try_from(bytes).expect("a few thousand bytes");
    let (Some(data), Some(words)) = (me.own_memory(bytes), me.own_memory(8)) else { return Ok(()) };
    let relay = me.register(&*data, span.clone(), Role::Data)?;
    let flags = me.register(&*words, 0..8, Role::Flags)?;
    let landing = me.bytes(bytes)?;
    let sent = pattern(seed(0, 1), bytes);
    let mut engine = me.engine()?;
    let ops = [wait(&flags, 0, 1), put((&landing.remote[0], 0), (&relay, 0), bytes)];
    let (_, rest) = engine.submit_held(&ops)?;
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
    .map_err(|failure: Failure| failure.within("on the other fabric"))?;
    engine.run(rest)?;
    me.ensure_bytes("bytes that the other fabric put", &landing.local, 0, &sent)
}

/// Signals a flag of value 1 to and fro between two ranks, everything queued ahead: a late reset
/// would erase the next signal, a missing one would let the next wait pass early. A reader that
/// sees an op behind the wait must find the flag at zero.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn the_reset_of_a_wait_takes_effect_before_anything_behind_it<H: Harness>(
    harness: &H,
) -> Outcome {
    const SIGNALS: usize = 50;
    on_ranks(harness, 2, |me| {
        let flags = me.flags(1)?;
        let mut engine = me.engine()?;
        let signal_peer = signal(&flags.remote[1 - me.me], 0, 1);
        let wait_here = wait_reset(&flags.local, 0, 1);
        let pair = if me.me == 0 { [signal_peer, wait_here] } else { [wait_here, signal_peer] };
        engine.run(&pair.repeat(SIGNALS))?;
        me.barrier()?;
        let left = word(&flags.local, 0).map_or(0, |flag| flag.load(Ordering::Acquire));
        ensure!(left == 0, "the flag has the value {left} after the last reset, expected 0");
        me.barrier()
    })?;
    on_ranks(harness, 1, |me| {
        let flags = me.flags(2)?;
        let (mut engine, mut opener) = (me.engine()?, me.engine()?);
        for round in 1..=ROUNDS {
            let ops = [wait_reset(&flags.local, 0, 1), signal(&flags.remote[0], 1, round)];
            let (_, rest) = engine.submit_held(&ops)?;
            opener.run(&[signal(&flags.remote[0], 0, 1)])?;
            let ticket = engine.submit_all(rest)?;
            engine.wait_for_flag(&flags.local, 1, round)?;
            let left = word(&flags.local, 0).map_or(0, |flag| flag.load(Ordering::Acquire));
            ensure!(
                left == 0,
                "the flag has the value {left} when an op after its reset has arrived, expected 0"
            );
            engine.finish(ticket)?;
        }
        Ok(())
    })
}

/// Queues a wait on each of several engines, for a flag of its own, and signals a peer with one more engine. The
/// signal must arrive while the others wait. Then all waits must pass.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_blocked_engine_does_not_hold_the_others<H: Harness>(harness: &H) -> Outcome {
    const BLOCKED: u64 = 8;
    on_each(harness, [1, 2], |me| {
        let blocked = match me.caps.shared_queues {
            Some(queues) => u64::from(queues.count / QUEUES_A_BLOCKED_ENGINE).min(BLOCKED),
            None => BLOCKED,
        };
        let flags = me.flags(blocked + 1)?;
        let next = me.rank_after(1);
        // Before any is blocked, because CUDA can wait for all streams while it creates what an engine needs.
        let mut free = me.engine()?;
        let mut held = (0..blocked).map(|_| me.engine()).collect::<Result<Vec<_>, _>>()?;
        let mut tickets = Vec::new();
        for (gate, engine) in (0..).zip(&mut held) {
            tickets.push(engine.submit_held(&[wait(&flags.local, gate, 1)])?.0);
        }
        me.barrier()?;
        free.run(&[signal(&flags.remote[next], blocked, 1)])?;
        free.wait_for_flag(&flags.local, blocked, 1)?;
        let opens: Vec<_> =
            (0..blocked).map(|gate| signal(&flags.remote[me.me], gate, 1)).collect();
        free.run(&opens)?;
        for (engine, ticket) in held.iter_mut().zip(tickets) {
            engine.finish(ticket)?;
        }
        me.barrier()
    })
}
