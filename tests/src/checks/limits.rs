//! Contract 7: limits.

use peerlane_hal::{Error, ErrorKind, Region, Ticket};

use crate::data::{POISON, aligned, lengths, pattern, seed, surrounded};
use crate::driver::{Driver, OpOf, put, signal, wait};
use crate::failure::{Failure, Outcome, ensure, ensure_bytes};
use crate::harness::Harness;
use crate::world::{on_each, on_ranks};

/// A larger limit is not tried with one op more.
const SLICE_OPS_REACHED: usize = 1 << 20;

/// To a peer and to oneself: nothing, a byte, odd lengths, and one less and one more than a piece.
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
        let mut driver = me.engine()?;
        let (to, from) = (me.after(1), me.after(me.ranks - 1));
        for (round, bytes) in (1..).zip(lengths) {
            me.write(&source.local, 0, &pattern(seed(me.me, round), bytes));
            driver.run(&[
                put((&landing.remote[to], guard), (&source.local, 0), bytes),
                signal(&flags.remote[to], 0, round),
            ])?;
            driver.reach(&flags.local, 0, round)?;
            let wanted = surrounded(&pattern(seed(from, round), bytes), guard, longest + 2 * guard);
            me.ensure_bytes(&format!("a put of {bytes} bytes"), &landing.local, 0, &wanted)?;
            me.poison(&landing.local, guard..guard + bytes);
            me.meet()?;
        }
        // Behind the last byte there is still room for no bytes.
        let (end, source_end) = (longest + 2 * guard, longest);
        driver.run(&[put((&landing.remote[to], end), (&source.local, source_end), 0)])
    })
}

/// All small offsets of source and destination; everything around the bytes is looked at.
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
        let mut driver = me.engine()?;
        let lengths = [1, 2, 7, 8, 31, 64, 65, 257].map(|bytes| aligned(&caps, bytes));
        let offsets = [0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31].map(|steps| steps * align);
        for bytes in lengths {
            for (to, from) in offsets.iter().flat_map(|to| offsets.map(|from| (*to, from))) {
                driver.run(&[put((&landing.remote[0], to), (&source.local, from), bytes)])?;
                let seen = me.read(&landing.local, 0, region);
                let span = |from: u64| from as usize..(from + bytes) as usize;
                let mut wanted = vec![POISON; seen.len()];
                wanted[span(to)].copy_from_slice(&sent[span(from)]);
                let what = format!("{bytes} bytes from offset {from} to offset {to}");
                ensure_bytes(what, &seen, &wanted)?;
                me.poison(&landing.local, to..to + bytes);
            }
        }
        Ok(())
    })
}

/// The limit is exact: so many ops are one slice, one more is an error that takes nothing and harms
/// nothing.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_slice_of_exactly_the_limit_is_taken<H: Harness>(harness: &H) -> Outcome {
    on_ranks(harness, 1, |me| {
        let caps = me.caps;
        let limit = caps.slice_ops_max;
        ensure!(limit >= 1, "slice_ops_max is 0, wanted at least 1");
        let reached = limit.min(SLICE_OPS_REACHED);
        let block = aligned(&caps, 1);
        let bytes = (reached as u64 + 1) * block;
        let (source, landing) = (me.bytes(bytes)?, me.bytes(bytes)?);
        me.write(&source.local, 0, &pattern(seed(0, 0), bytes));
        let mut driver = me.engine()?;
        let ops: Vec<OpOf<'_, H>> = (0..=reached as u64)
            .map(|slot| {
                put((&landing.remote[0], slot * block), (&source.local, slot * block), block)
            })
            .collect();
        if limit <= SLICE_OPS_REACHED {
            let what = format!("{} ops, one more than the limit", ops.len());
            refused(&mut driver, &ops, &what)?;
            driver.run(&[])?;
            me.ensure_poison("bytes of a refused slice", &landing.local, 0..bytes)?;
        }
        let ticket = driver.submit_now(&ops[..reached])?;
        driver.finish(ticket)?;
        let wanted =
            &pattern(seed(0, 0), bytes)[..usize::try_from(bytes - block).expect("it fits")];
        me.ensure_bytes("a slice of exactly the limit", &landing.local, 0, wanted)
    })
}

/// Destination, source and flags that leave their regions, also by an overflow, behind an op that
/// is in order; the engine goes on afterwards.
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
        let mut driver = me.engine()?;
        let (to, from) = (|at| (&landing.remote[0], at), |at| (&source.local, at));
        let far = u64::MAX / align * align;
        let mut wrong: Vec<(&str, OpOf<'_, H>)> = vec![
            ("a destination that ends behind the region", put(to(align), from(0), bytes)),
            ("a source that ends behind the region", put(to(0), from(align), bytes)),
            ("a destination behind the region", put(to(bytes + align), from(0), 0)),
            ("a source behind the region", put(to(0), from(bytes + align), 0)),
            ("a destination whose end overflows", put(to(far), from(0), align)),
            ("a source whose end overflows", put(to(0), from(far), align)),
            ("more bytes than there can be", put(to(0), from(0), far)),
            ("a flag behind the region", signal(&flags.remote[0], words, 1)),
            ("a flag whose offset overflows", signal(&flags.remote[0], u64::MAX / 8 + 1, 1)),
            ("the last flag there can be", signal(&flags.remote[0], u64::MAX, 1)),
        ];
        if caps.queued_wait {
            wrong.extend([
                ("an awaited flag behind the region", wait(&flags.local, words, 0)),
                ("an awaited flag whose offset overflows", wait(&flags.local, u64::MAX / 8 + 1, 0)),
            ]);
        }
        if align > 1 {
            wrong.extend([
                ("a misaligned destination", put(to(1), from(0), align)),
                ("a misaligned source", put(to(0), from(1), align)),
                ("a misaligned length", put(to(0), from(0), 1)),
            ]);
        }
        let right = put(to(0), from(0), bytes);
        for (what, op) in wrong {
            refused(&mut driver, &[op], what)?;
            if caps.slice_ops_max > 1 {
                refused(&mut driver, &[right, op], what)?;
            }
        }
        driver.stays(crate::world::QUIET / 5, |done| {
            ensure!(done == Ticket::NONE, "ticket {} of refused slices", done.0);
            Ok(())
        })?;
        me.ensure_poison("bytes of refused slices", &landing.local, 0..bytes)?;
        me.write(&source.local, 0, &pattern(seed(0, 0), bytes));
        driver.run(&[right])?;
        me.ensure_bytes("a put after refusals", &landing.local, 0, &pattern(seed(0, 0), bytes))?;
        driver.run(&[signal(&flags.remote[0], words - 1, 1)])?;
        driver.reach(&flags.local, words - 1, 1)
    })
}

fn refused<'r, H: Harness>(
    driver: &mut Driver<'r, '_, H>,
    ops: &[OpOf<'r, H>],
    what: &str,
) -> Outcome {
    match driver.try_submit(ops) {
        Ok(ticket) => Err(Failure::new(format!("{what}: taken as ticket {}", ticket.0))),
        Err(error) if error.kind() == ErrorKind::InvalidArgument => Ok(()),
        Err(error) => {
            let failure = Failure::from(error).within(format!("{what}: wanted InvalidArgument"));
            Err(failure)
        }
    }
}
