//! Checks contract 7: limits.

use peerlane_hal::{Error, ErrorKind, Region, Rows, Ticket};

use crate::data::{POISON, aligned, lengths, pattern, seed, with_guards};
use crate::engine::{OpOf, TestEngine, get, put, rows_to, signal, wait};
use crate::failure::{Failure, Outcome, ensure, ensure_bytes};
use crate::harness::Harness;
use crate::ranks::{on_each, on_ranks};

/// Bounds the longest slice that is tried.
const SLICE_OPS_TRIED: usize = 1 << 20;

/// Puts spans to a peer and to the own rank: empty, one byte, odd lengths, and lengths around the
/// largest piece.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_put_of_any_length_arrives_whole<H: Harness>(harness: &H) -> Outcome {
    on_each(harness, [1, 2], |me| {
        let lengths = lengths(&me.caps);
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let guard = aligned(&me.caps, 64);
        let (source, landing) = (me.bytes(longest)?, me.bytes(longest + 2 * guard)?);
        let flags = me.flags(2)?;
        let mut engine = me.engine()?;
        let (to, from) = (me.rank_after(1), me.rank_after(me.ranks - 1));
        for (round, bytes) in (1..).zip(lengths) {
            me.write(&source.local, 0, &pattern(seed(me.me, round), bytes));
            engine.run(&[
                put((&landing.remote[to], guard), (&source.local, 0), bytes),
                signal(&flags.remote[to], 0, round),
            ])?;
            engine.wait_for_flag(&flags.local, 0, round)?;
            let expected =
                with_guards(&pattern(seed(from, round), bytes), guard, longest + 2 * guard);
            me.ensure_bytes(&format!("a put of {bytes} bytes"), &landing.local, 0, &expected)?;
            me.poison(&landing.local, guard..guard + bytes);
            me.barrier()?;
        }
        // An empty span at the end of a region is valid.
        let (end, source_end) = (longest + 2 * guard, longest);
        engine.run(&[put((&landing.remote[to], end), (&source.local, source_end), 0)])?;
        me.barrier()
    })
}

/// Puts spans at all small offsets of source and destination. Every byte around the destination is
/// checked.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_put_at_any_aligned_offset_writes_only_its_own_bytes<H: Harness>(harness: &H) -> Outcome {
    on_ranks(harness, 1, |me| {
        let caps = me.caps;
        let align = caps.put_align_bytes;
        let region = aligned(&caps, 600) + 32 * align;
        let (source, landing) = (me.bytes(region)?, me.bytes(region)?);
        let sent = pattern(seed(0, 0), region);
        me.write(&source.local, 0, &sent);
        let mut engine = me.engine()?;
        let lengths = [1, 2, 7, 8, 31, 64, 65, 257].map(|bytes| aligned(&caps, bytes));
        let offsets = [0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31].map(|steps| steps * align);
        for bytes in lengths {
            for (to, from) in offsets.iter().flat_map(|to| offsets.map(|from| (*to, from))) {
                engine.run(&[put((&landing.remote[0], to), (&source.local, from), bytes)])?;
                let seen = me.read(&landing.local, 0, region);
                let span = |from: u64| from as usize..(from + bytes) as usize;
                let mut expected = vec![POISON; seen.len()];
                expected[span(to)].copy_from_slice(&sent[span(from)]);
                let what = format!("{bytes} bytes from offset {from} to offset {to}");
                ensure_bytes(what, &seen, &expected)?;
                me.poison(&landing.local, to..to + bytes);
            }
        }
        Ok(())
    })
}

/// Submits a slice of exactly the limit, which must be taken, and one with one more op, which must
/// be refused without an effect.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_slice_of_exactly_the_limit_is_taken<H: Harness>(harness: &H) -> Outcome {
    on_ranks(harness, 1, |me| {
        let caps = me.caps;
        let limit = caps.slice_ops_max;
        ensure!(limit >= 1, "slice_ops_max is 0, expected at least 1");
        let tried = limit.min(SLICE_OPS_TRIED);
        let block = aligned(&caps, 1);
        let bytes = (tried as u64 + 1) * block;
        let (source, landing) = (me.bytes(bytes)?, me.bytes(bytes)?);
        me.write(&source.local, 0, &pattern(seed(0, 0), bytes));
        let mut engine = me.engine()?;
        let ops: Vec<OpOf<'_, H>> = (0..=tried as u64)
            .map(|slot| {
                put((&landing.remote[0], slot * block), (&source.local, slot * block), block)
            })
            .collect();
        if limit <= SLICE_OPS_TRIED {
            let what = format!("{} ops, one more than the limit", ops.len());
            ensure_refused(&mut engine, &ops, &what)?;
            engine.run(&[])?;
            me.ensure_poison("destination of a refused slice", &landing.local, 0..bytes)?;
        }
        let ticket = engine.submit_now(&ops[..tried])?;
        engine.finish(ticket)?;
        let expected =
            &pattern(seed(0, 0), bytes)[..usize::try_from(bytes - block).expect("it fits")];
        me.ensure_bytes("a slice with as many ops as the limit", &landing.local, 0, expected)
    })
}

/// Submits ops whose destination, source or flag leaves its region, also by an overflow, alone and
/// behind a valid op. The engine must go on afterwards.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_span_outside_its_region_is_refused<H: Harness>(harness: &H) -> Outcome {
    on_ranks(harness, 1, |me| {
        let caps = me.caps;
        let (align, bytes) = (caps.put_align_bytes, aligned(&caps, 256));
        let (source, landing) = (me.bytes(bytes)?, me.bytes(bytes)?);
        let flags = me.flags(4)?;
        let words = flags.local.bytes() / 8;
        let mut engine = me.engine()?;
        let (to, from) = (|at| (&landing.remote[0], at), |at| (&source.local, at));
        let far = u64::MAX / align * align;
        let mut invalid: Vec<(&str, OpOf<'_, H>)> = vec![
            ("a destination that ends after the region", put(to(align), from(0), bytes)),
            ("a source that ends after the region", put(to(0), from(align), bytes)),
            ("a destination after the region", put(to(bytes + align), from(0), 0)),
            ("a source after the region", put(to(0), from(bytes + align), 0)),
            ("a destination whose end overflows", put(to(far), from(0), align)),
            ("a source whose end overflows", put(to(0), from(far), align)),
            ("more bytes than an address space has", put(to(0), from(0), far)),
            ("a flag after the region", signal(&flags.remote[0], words, 1)),
            ("a flag whose offset overflows", signal(&flags.remote[0], u64::MAX / 8 + 1, 1)),
            ("the largest flag number", signal(&flags.remote[0], u64::MAX, 1)),
        ];
        if caps.queued_wait {
            invalid.extend([
                ("a wait for a flag after the region", wait(&flags.local, words, 0)),
                (
                    "a wait for a flag whose offset overflows",
                    wait(&flags.local, u64::MAX / 8 + 1, 0),
                ),
            ]);
        }
        if align > 1 {
            invalid.extend([
                ("a misaligned destination", put(to(1), from(0), align)),
                ("a misaligned source", put(to(0), from(1), align)),
                ("a misaligned length", put(to(0), from(0), 1)),
            ]);
        }
        let valid = put(to(0), from(0), bytes);
        for (what, op) in invalid {
            ensure_refused(&mut engine, &[op], what)?;
            if caps.slice_ops_max > 1 {
                ensure_refused(&mut engine, &[valid, op], what)?;
            }
        }
        engine.watch(crate::ranks::QUIET / 5, |done| {
            ensure!(
                done == Ticket::NONE,
                "ticket {} is complete, expected no complete ticket, because every slice was \
                 refused",
                done.0
            );
            Ok(())
        })?;
        me.ensure_poison("destination of refused slices", &landing.local, 0..bytes)?;
        me.write(&source.local, 0, &pattern(seed(0, 0), bytes));
        engine.run(&[valid])?;
        me.ensure_bytes(
            "a put after refused slices",
            &landing.local,
            0,
            &pattern(seed(0, 0), bytes),
        )?;
        engine.run(&[signal(&flags.remote[0], words - 1, 1)])?;
        engine.wait_for_flag(&flags.local, words - 1, 1)
    })
}

/// Submits ops that need a capability that the engine lacks, alone and behind a put.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn an_op_that_the_engine_lacks_is_refused<H: Harness>(harness: &H) -> Outcome {
    on_ranks(harness, 1, |me| {
        let bytes = aligned(&me.caps, 64);
        let (source, landing) = (me.bytes(bytes)?, me.bytes(bytes)?);
        let flags = me.flags(1)?;
        let mut engine = me.engine()?;
        let valid = put((&landing.remote[0], 0), (&source.local, 0), bytes);
        let get = get((&landing.local, 0), (&source.remote[0], 0), bytes);
        let rows = rows_to((&landing.remote[0], 0), (&source.local, 0), bytes, Rows::ONE);
        let ops = [
            (me.caps.queued_wait, "a wait, without queued_wait", wait(&flags.local, 0, 0)),
            (me.caps.gets, "a get, without gets", get),
            (me.caps.rows, "a put of rows, without rows", rows),
        ];
        for (_, what, op) in ops.into_iter().filter(|(has, ..)| !has) {
            ensure_refused(&mut engine, &[op], what)?;
            if me.caps.slice_ops_max > 1 {
                ensure_refused(&mut engine, &[valid, op], what)?;
            }
        }
        engine.run(&[])?;
        me.ensure_poison("destination of refused slices", &landing.local, 0..bytes)
    })
}

fn ensure_refused<'r, H: Harness>(
    engine: &mut TestEngine<'r, '_, H>,
    ops: &[OpOf<'r, H>],
    what: &str,
) -> Outcome {
    match engine.try_submit(ops) {
        Ok(ticket) => Err(Failure::new(format!(
            "{what}: submit returned ticket {}, expected InvalidArgument",
            ticket.0
        ))),
        Err(error) if error.kind() == ErrorKind::InvalidArgument => Ok(()),
        Err(error) => {
            let failure = Failure::from(error)
                .within(format!("{what}: expected an error of kind InvalidArgument"));
            Err(failure)
        }
    }
}
