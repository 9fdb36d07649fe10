//! Checks contract 1: order.

use std::sync::atomic::Ordering;

use peerlane_hal::{Fabric, Region};

use super::rounds::Rounds;
use crate::data::{POISON, aligned, lengths, pattern, seed};
use crate::engine::{OpOf, TestEngine, put, signal, word};
use crate::failure::{Failure, Outcome, ensure, ensure_bytes};
use crate::harness::{Harness, LocalOf};
use crate::ranks::{Participant, on_each, on_ranks, read};

/// Puts blocks over one another and signals two flags in turn. The last block must stay, and the
/// second flag must never be ahead of the first.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn ops_to_one_peer_take_effect_in_submission_order<H: Harness>(harness: &H) -> Outcome {
    const BLOCKS: u64 = 16;
    const ROUNDS: u64 = 200;
    on_each(harness, 1..=4, |me| {
        let caps = me.caps;
        let block = aligned(&caps, 72);
        let (source, landing) = (me.bytes(BLOCKS * block)?, me.bytes(block)?);
        let flags = me.flags(2)?;
        me.write(&source.local, 0, &pattern(seed(me.me, 0), BLOCKS * block));
        me.barrier()?;

        let mut engine = me.engine()?;
        let (to, from) = (me.rank_after(1), me.rank_after(me.ranks - 1));
        let ops: Vec<OpOf<'_, H>> = (1..=ROUNDS)
            .flat_map(|round| {
                let block_at = (&source.local, round % BLOCKS * block);
                [
                    put((&landing.remote[to], 0), block_at, block),
                    signal(&flags.remote[to], 0, round),
                    signal(&flags.remote[to], 1, round),
                ]
            })
            .collect();
        let mut rest = &ops[..];
        let mut random = fastrand::Rng::with_seed(seed(me.me, 1));
        let mut last = engine.submit(&[])?;
        while !rest.is_empty() {
            let taken = random.usize(1..=17).min(caps.slice_ops_max).min(rest.len());
            last = engine.submit(&rest[..taken])?;
            rest = &rest[taken..];
            ensure_in_turn::<H>(&flags.local)?;
        }
        let time_limit = me.time_limit("the last signal");
        while ensure_in_turn::<H>(&flags.local)?.is_some_and(|second| second < ROUNDS) {
            engine.completed()?;
            time_limit.check(|| "an earlier signal".to_owned())?;
        }
        engine.wait_for_flag(&flags.local, 1, ROUNDS)?;
        let sent = pattern(seed(from, 0), BLOCKS * block);
        let start = usize::try_from(ROUNDS % BLOCKS * block).expect("a few blocks");
        let expected = &sent[start..][..usize::try_from(block).expect("a block")];
        me.ensure_bytes("the block put last", &landing.local, 0, expected)?;
        engine.finish(last)?;
        me.barrier()?;
        rows_arrive_in_order(me)
    })
}

/// Puts rows with a constant stride in one slice: apart, adjacent, backwards, overlapping, and from one place. Bytes between
/// the rows must stay.
fn rows_arrive_in_order<H: Harness>(me: &mut Participant<'_, H>) -> Outcome {
    /// The number of rows, and the strides in the destination and in the source. The unit is the alignment of a put, and a row
    /// has 3 units.
    const PATTERNS: [(u64, i64, i64); 9] = [
        (2, 5, 3),
        (3, 3, 7),
        (9, 3, 3),
        (9, 8, 5),
        (7, 5, 0),
        (7, 2, 3),
        (7, 0, 3),
        (6, -5, 4),
        (6, 4, -3),
    ];
    const UNITS: u64 = 80;
    let unit = aligned(&me.caps, 13);
    let row_bytes = 3 * unit;
    let (source, landing) = (me.bytes(UNITS * unit)?, me.bytes(UNITS * unit)?);
    let flags = me.flags(1)?;
    me.write(&source.local, 0, &pattern(seed(me.me, 7), UNITS * unit));
    let (to, from) = (me.rank_after(1), me.rank_after(me.ranks - 1));
    let mut engine = me.engine()?;
    for (round, (rows, to_pitch, from_pitch)) in (1..).zip(PATTERNS) {
        me.write(&landing.local, 0, &vec![POISON; (UNITS * unit) as usize]);
        me.barrier()?;
        let offset = |row: u64, pitch: i64| {
            let first = if pitch < 0 { UNITS as i64 - 3 } else { 0 };
            (first + row as i64 * pitch) as u64 * unit
        };
        let mut ops: Vec<OpOf<'_, H>> = (0..rows)
            .map(|row| {
                let place = (&landing.remote[to], offset(row, to_pitch));
                put(place, (&source.local, offset(row, from_pitch)), row_bytes)
            })
            .collect();
        ops.push(signal(&flags.remote[to], 0, round));
        let last = engine.submit_all(&ops)?;
        engine.wait_for_flag(&flags.local, 0, round)?;
        let sent = pattern(seed(from, 7), UNITS * unit);
        let mut expected = vec![POISON; (UNITS * unit) as usize];
        for row in 0..rows {
            let (place, start) = (offset(row, to_pitch) as usize, offset(row, from_pitch) as usize);
            let length = row_bytes as usize;
            expected[place..][..length].copy_from_slice(&sent[start..][..length]);
        }
        let what = format!("{rows} rows with strides of {to_pitch} and {from_pitch} units");
        me.ensure_bytes(&what, &landing.local, 0, &expected)?;
        engine.finish(last)?;
    }
    me.barrier()
}

/// Checks that the second flag is not ahead of the first. Returns the second, or `None` where the
/// host does not see flags.
fn ensure_in_turn<H: Harness>(flags: &LocalOf<H>) -> Outcome<Option<u64>> {
    let (Some(first), Some(second)) = (word(flags, 0), word(flags, 1)) else { return Ok(None) };
    // Loads the second flag first, because both grow.
    let second = second.load(Ordering::Acquire);
    let first = first.load(Ordering::Acquire);
    ensure!(
        first >= second,
        "the second flag has the value {second} when the first has {first}, expected at most \
         {first}"
    );
    Ok(Some(second))
}

/// Sends from every rank to every rank: odd lengths and those around the largest piece, with new
/// data each round.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn bytes_put_before_a_signal_are_readable_when_the_flag_is_seen<H: Harness>(
    harness: &H,
) -> Outcome {
    /// More ranks send only shorter puts, because the time grows with the square of the ranks.
    const LONG_RANKS_MAX: usize = 3;
    const LONG_BYTES: u64 = 100_000;
    on_each(harness, 1..=5, |me| {
        let mut lengths = lengths(&me.caps);
        if me.ranks > LONG_RANKS_MAX {
            lengths.retain(|bytes| *bytes < LONG_BYTES);
        }
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let rounds = Rounds::open(me, longest)?;
        let mut engine = me.engine()?;
        for (round, bytes) in (1..).zip(lengths.iter().chain(&lengths)) {
            rounds.round(me, &mut engine, round, *bytes)?;
        }
        me.barrier()
    })
}

/// Watches the flag on another thread, which overwrites the sources as soon as it sees the flag.
/// All peers must still receive what was put.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_signal_to_oneself_takes_effect_after_everything_before_it_is_complete<H: Harness>(
    harness: &H,
) -> Outcome {
    const ROUNDS: u64 = 6;
    const GATE: u64 = 0;
    const DONE: u64 = 1;
    const ARRIVED: u64 = 2;
    on_each(harness, 1..=4, |me| {
        let bytes = aligned(&me.caps, 300_000);
        let (source, landing) = (me.bytes(bytes)?, me.bytes(bytes * me.ranks as u64)?);
        let flags = me.flags(ARRIVED + me.ranks as u64)?;
        let (mut engine, mut opener) = (me.engine()?, me.engine()?);
        for round in 1..=ROUNDS {
            let sent = pattern(seed(me.me, round), bytes);
            me.write(&source.local, 0, &sent);
            me.barrier()?;
            let own_slot = me.me as u64 * bytes;
            let mut ops: Vec<OpOf<'_, H>> = Vec::new();
            if engine.caps().queued_wait {
                ops.extend(engine.wait_op(&flags.local, GATE, round)?);
            }
            ops.extend((1..=me.ranks).map(|step| {
                let slot = (&landing.remote[me.rank_after(step)], own_slot);
                put(slot, (&source.local, 0), bytes)
            }));
            ops.push(signal(&flags.remote[me.me], DONE, round));
            std::thread::scope(|scope| {
                let me = &*me;
                let (harness, time_limit) =
                    (me.harness, me.time_limit("the signal to the own rank"));
                let (flags_here, source, landing) = (&flags.local, &source.local, &landing.local);
                let watcher = scope.spawn(move || {
                    while flags_here.flag_value(DONE).is_none_or(|seen| seen < round) {
                        time_limit.check(|| "the flag is not yet set".to_owned())?;
                        std::thread::yield_now();
                    }
                    harness.write(source, 0, &vec![POISON; sent.len()]);
                    let here = read(harness, landing, own_slot, bytes);
                    ensure_bytes("a put to the own rank before the signal", &here, &sent)
                });
                let (_, rest) = engine.submit_held(&ops)?;
                opener.run(&[signal(&flags.remote[me.me], GATE, round)])?;
                let last = engine.submit_all(rest)?;
                engine.finish(last)?;
                watcher
                    .join()
                    .map_err(|_| Failure::new("the thread that watches the flag panicked"))?
            })?;
            let signals: Vec<OpOf<'_, H>> = (0..me.ranks)
                .map(|peer| signal(&flags.remote[peer], ARRIVED + me.me as u64, round))
                .collect();
            engine.run(&signals)?;
            for peer in 0..me.ranks {
                engine.wait_for_flag(&flags.local, ARRIVED + peer as u64, round)?;
                let expected = pattern(seed(peer, round), bytes);
                let what = format!(
                    "bytes of rank {peer}, whose source was overwritten after its signal to itself"
                );
                me.ensure_bytes(&what, &landing.local, peer as u64 * bytes, &expected)?;
            }
            me.barrier()?;
        }
        Ok(())
    })
}

/// Signals values whose halves belong together. A reader that never pauses must not see a mixture.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_signal_stores_all_64_bits_at_once<H: Harness>(harness: &H) -> Outcome {
    const SIGNALS: u32 = 2000;
    on_ranks(harness, 2, |me| {
        let flags = me.flags(1)?;
        let mut engine = me.engine()?;
        if me.me == 0 {
            write_halves(&mut engine, &flags.remote[1], SIGNALS)?
        } else {
            read_halves(me, &mut engine, &flags.local, SIGNALS)?
        }
        me.barrier()
    })
}

fn write_halves<'r, H: Harness>(
    engine: &mut TestEngine<'r, '_, H>,
    flags: &'r crate::harness::RemoteOf<H>,
    signals: u32,
) -> Outcome {
    for value in 1..=signals {
        engine.submit(&[signal(flags, 0, u64::from(!value) << 32 | u64::from(value))])?;
    }
    let last = engine.submit(&[])?;
    engine.finish(last)
}

fn read_halves<H: Harness>(
    me: &Participant<'_, H>,
    engine: &mut TestEngine<'_, '_, H>,
    flags: &LocalOf<H>,
    signals: u32,
) -> Outcome {
    let time_limit = me.time_limit(format!("signal {signals} of {}", me.fabric.backend()));
    let mut last = 0;
    while last < signals {
        if let Some(seen) = flags.flag_value(0) {
            let (high, low) = ((seen >> 32) as u32, seen as u32);
            ensure!(
                seen == 0 || high == !low,
                "the flag has the value {seen:#018x}, which mixes the halves of two values; \
                 expected an atomic 64-bit store"
            );
            ensure!(low >= last, "the flag went back from the value {last} to {low}");
            last = low;
        }
        engine.completed()?;
        time_limit.check(|| format!("value {last}"))?;
    }
    Ok(())
}
