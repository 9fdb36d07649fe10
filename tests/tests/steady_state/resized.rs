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

/// Operations with equal and with different blocks.
type Gathers = [Operation<i64>; 2];

fn warm(bootstrap: in_process::InProcessBootstrap) -> Result<(Group, Gathers), Error> {
    let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
    let mut group = Group::open(bootstrap, fabric)?;
    let lens = vec![BLOCK_LEN; group.ranks()];
    let equal = group.all_gather(BLOCK_LEN).resizable().prepare()?;
    let mut gathers = [equal, group.all_gather(lens).resizable().prepare()?];
    repeat(&mut gathers, WARM_UP)?;
    Ok((group, gathers))
}

fn repeat([equal, uneven]: &mut Gathers, starts: u32) -> Result<(), Error> {
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
    }
    Ok(())
}
