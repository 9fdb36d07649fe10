//! Gathers blocks of many sizes in every form; the host waits for each start.

use peerlane_tests::Outcome;

use super::Case;
use crate::support::data::unexpected;
use crate::support::test_rank::{Form, TestRank};

/// Around the sizes at which pages end and copies take other ways.
const BLOCK_BYTES: [usize; 8] = [0, 1, 777, 4096, 65_535, 65_536, 65_537, (1 << 20) + 1];
/// The same where there are many ranks.
const FEW_BLOCK_BYTES: [usize; 2] = [1, 65_537];
const STARTS: usize = 3;
/// From here on one more start shows nothing new.
const LONG_BYTES: usize = 1 << 20;

pub(crate) fn cases(ranks: usize) -> Vec<Case> {
    let blocks = if ranks > 4 { &FEW_BLOCK_BYTES[..] } else { &BLOCK_BYTES[..] };
    let shapes = blocks.iter().flat_map(|bytes| Form::ALL.map(|form| (*bytes, form)));
    let cases = shapes.map(|(bytes, form)| {
        Case::new(format_args!("{bytes} bytes, {form:?}"), move |test_rank| {
            run(test_rank, bytes, form)
        })
    });
    cases.collect()
}

fn run(test_rank: &mut TestRank, block_bytes: usize, form: Form) -> Outcome {
    let builder = test_rank.group.all_gather::<u8>(block_bytes);
    let mut gather = form.of(builder).prepare().map_err(unexpected)?;
    let starts = if block_bytes >= LONG_BYTES { 2 } else { STARTS };
    (0..starts).try_for_each(|_| test_rank.gather_once(&mut gather))
}
