//! Checks contract 14: rows.

use peerlane_hal::{Error, ErrorKind, Rows};

use crate::data::{POISON, aligned, pattern, seed};
use crate::engine::{OpOf, put, rows_from, rows_to, signal};
use crate::failure::{Failure, Outcome};
use crate::harness::Harness;
use crate::ranks::{on_each, on_ranks};

/// Returns what a destination holds after rows of `sent` have been copied to it.
fn landed(mut at: Vec<u8>, to: u64, (sent, from): (&[u8], u64), bytes: u64, rows: Rows) -> Vec<u8> {
    let row = |begin: u64| begin as usize..(begin + bytes) as usize;
    for (dst, src) in rows.offsets().take_while(|_| bytes > 0) {
        at[row(to + dst)].copy_from_slice(&sent[row(from + src)]);
    }
    at
}

/// Puts rows of several lengths and pitches to a peer and to the own rank, and gets them if the engine can. Every byte of the
/// destination is checked.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn rows_arrive_at_their_pitch<H: Harness>(harness: &H) -> Outcome {
    const SHAPES: [(u64, u64, u64, u64); 10] = [
        (0, u64::MAX, 0, 0),
        (0, 3, 8, 8),
        (3, 0, 8, 8),
        (1, 1, 0, 0),
        (1, 5, 1, 3),
        (3, 4, 7, 3),
        (8, 16, 8, 64),
        (65, 9, 100, 65),
        (1000, 33, 1001, 1500),
        (4096, 3, 4096, 4096),
    ];
    on_each(harness, [1, 2], |me| {
        let caps = me.caps;
        let region = aligned(&caps, 80_000).max(40 * aligned(&caps, 1500));
        let (source, landing) = (me.bytes(region)?, me.bytes(region)?);
        let flags = me.flags(1)?;
        let mut engine = me.engine()?;
        let (to, from) = (me.rank_after(1), me.rank_after(me.ranks - 1));
        me.write(&source.local, 0, &pattern(seed(me.me, 0), region));
        let of_rank = |rank| pattern(seed(rank, 0), region);
        me.barrier()?;
        let begins = [(0, 0), (5, 0), (0, 5), (16, 32)];
        let rounds = SHAPES.iter().flat_map(|shape| begins.map(|begin| (shape, begin)));
        for (round, (&(bytes, count, dst_pitch, src_pitch), (dst, src))) in (1..).zip(rounds) {
            let [bytes, dst, src] = [bytes, dst, src].map(|number| aligned(&caps, number));
            let [dst_pitch, src_pitch] = [dst_pitch, src_pitch].map(|pitch| aligned(&caps, pitch));
            let rows = Rows { count, dst_pitch, src_pitch };
            let what =
                format!("{count} rows of {bytes} bytes, pitch {src_pitch}, to pitch {dst_pitch}");
            engine.run(&[
                rows_to((&landing.remote[to], dst), (&source.local, src), bytes, rows),
                signal(&flags.remote[to], 0, round),
            ])?;
            engine.wait_for_flag(&flags.local, 0, round)?;
            let empty = || vec![POISON; region as usize];
            let expected = landed(empty(), dst, (&of_rank(from), src), bytes, rows);
            me.ensure_bytes(&format!("a put of {what}"), &landing.local, 0, &expected)?;
            me.poison(&landing.local, 0..region);
            me.barrier()?;
            if caps.gets {
                let get = rows_from((&landing.local, dst), (&source.remote[to], src), bytes, rows);
                engine.run(&[get])?;
                let expected = landed(empty(), dst, (&of_rank(to), src), bytes, rows);
                me.ensure_bytes(&format!("a get of {what}"), &landing.local, 0, &expected)?;
                me.poison(&landing.local, 0..region);
                me.barrier()?;
            }
        }
        Ok(())
    })
}

/// Puts to the places of rows before and after the rows themselves, and signals.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_copy_of_rows_keeps_its_place_in_the_order<H: Harness>(harness: &H) -> Outcome {
    const COUNT: u64 = 50;
    on_each(harness, [1, 2, 3], |me| {
        let row = aligned(&me.caps, 500);
        let region = COUNT * row * 2;
        let (source, landing) = (me.bytes(region)?, me.bytes(region)?);
        let flags = me.flags(1)?;
        let mut engine = me.engine()?;
        let (to, from) = (me.rank_after(1), me.rank_after(me.ranks - 1));
        let rows = Rows { count: COUNT, dst_pitch: 2 * row, src_pitch: row };
        for round in 1..=8 {
            me.write(&source.local, 0, &pattern(seed(me.me, round), region));
            let there = |at| (&landing.remote[to], at);
            engine.run(&[
                put(there(0), (&source.local, 0), region),
                rows_to(there(row), (&source.local, row), row, rows),
                put(there(0), (&source.local, row), row * 3),
                signal(&flags.remote[to], 0, round),
            ])?;
            engine.wait_for_flag(&flags.local, 0, round)?;
            let sent = pattern(seed(from, round), region);
            let mut expected = landed(sent.clone(), row, (&sent, row), row, rows);
            expected[..3 * row as usize].copy_from_slice(&sent[row as usize..4 * row as usize]);
            me.ensure_bytes("rows between two puts", &landing.local, 0, &expected)?;
            me.barrier()?;
        }
        Ok(())
    })
}

/// Submits strided copies that exceed a region, one of them by an address that overflows, and copies whose rows overlap.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn rows_that_leave_their_region_or_overlap_are_refused<H: Harness>(harness: &H) -> Outcome {
    on_ranks(harness, 1, |me| {
        let row = aligned(&me.caps, 16);
        let bytes = 4 * row;
        let (source, landing) = (me.bytes(bytes)?, me.bytes(bytes)?);
        let mut engine = me.engine()?;
        let rows = |count, dst_pitch, src_pitch| Rows { count, dst_pitch, src_pitch };
        let far = u64::MAX / row * row;
        let of = |to, from, rows: Rows| -> OpOf<'_, H> {
            rows_to((&landing.remote[0], to), (&source.local, from), row, rows)
        };
        let invalid = [
            ("a destination whose last row is outside", of(0, 0, rows(3, 2 * row, row))),
            ("a source whose last row is outside", of(0, 0, rows(3, row, 2 * row))),
            ("a destination that begins one row late", of(row, 0, rows(4, row, row))),
            ("a number of rows whose end overflows", of(0, 0, rows(u64::MAX, row, row))),
            ("a pitch whose end overflows", of(0, 0, rows(3, far, row))),
            ("rows of the destination that overlap", of(0, 0, rows(2, 0, row))),
            ("rows of the source that overlap", of(0, 0, rows(2, row, 0))),
        ];
        for (what, op) in invalid {
            match engine.try_submit(&[op]) {
                Err(error) if error.kind() == ErrorKind::InvalidArgument => {}
                Err(error) => return Err(Failure::from(error).within(what)),
                Ok(ticket) => {
                    return Err(Failure::new(format!(
                        "{what}: submit returned ticket {}, expected InvalidArgument",
                        ticket.0
                    )));
                }
            }
        }
        engine.run(&[of(0, 0, rows(4, row, row))])
    })
}
