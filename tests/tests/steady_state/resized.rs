//! Resizes operations before each start.

use libtest_mimic::Failed;
use peerlane_collectives::bootstrap::{Bootstrap, in_process};
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{Group, Operation, Part};
use peerlane_host as host;

use super::{BLOCK_LEN, STARTS, WARM_UP, count};

pub(super) fn allocates_nothing(ranks: usize) -> Result<(), Failed> {
    count(ranks, warm, |gathers| repeat(gathers, STARTS))
}

/// The longest start of the reductions, so that there are plans in both forms of an all-reduce.
const REDUCED_LEN: usize = 20 * BLOCK_LEN;

/// Operations with equal and with different blocks, and the same for reductions.
type Operations = [Operation<i64>; 4];

fn warm(bootstrap: in_process::InProcessBootstrap) -> Result<(Group, Operations), Error> {
    let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
    let mut group = Group::open(bootstrap, fabric)?;
    let lens = vec![BLOCK_LEN; group.ranks()];
    let equal = group.all_gather(BLOCK_LEN).resizable().prepare()?;
    let uneven = group.all_gather(&lens).resizable().prepare()?;
    let reduce = group.all_reduce(REDUCED_LEN).resizable().prepare()?;
    let has_both_forms =
        reduce.report().shorter.iter().any(|plan| plan.form != reduce.report().choice.form);
    assert!(has_both_forms || group.ranks() == 1, "{}", reduce.report());

    let mut operations =
        [equal, uneven, reduce, group.reduce_scatter(&lens).resizable().prepare()?];
    repeat(&mut operations, WARM_UP)?;
    Ok((group, operations))
}

fn repeat([equal, uneven, reduce, scatter]: &mut Operations, starts: u32) -> Result<(), Error> {
    let mut lens = [0; 8];
    let ranks = uneven.report().ranks;
    for start in 0..starts as usize {
        let len = start * 7 % BLOCK_LEN;
        let part = Part::len(len).output(start % (BLOCK_LEN - len));
        equal.resize(part)?.input_mut()?.fill(start as i64);
        equal.run()?;
        assert!(equal.output()?.iter().all(|seen| *seen == start as i64), "start {start}");
        for (rank, len) in lens[..ranks].iter_mut().enumerate() {
            *len = start * (rank + 1) % BLOCK_LEN;
        }
        uneven.resize(&lens[..ranks])?.run()?;
        scatter.resize(&lens[..ranks])?.run()?;

        let len = if start % 2 == 0 { start * 7 % 50 } else { start * 77 % REDUCED_LEN };
        reduce.resize(len)?.input_mut()?.fill(start as i64);
        reduce.run()?;
        let sum = (start * ranks) as i64;
        assert!(reduce.output()?.iter().all(|seen| *seen == sum), "start {start}");
    }
    Ok(())
}
