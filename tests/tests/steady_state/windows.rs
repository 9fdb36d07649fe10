//! Starts operations over ranges of a window, which are checked for overlap.

use libtest_mimic::Failed;
use peerlane_collectives::bootstrap::{Bootstrap, in_process};
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{Group, Operation};
use peerlane_host as host;

use super::{BLOCK_LEN, STARTS, WARM_UP, count};

pub(super) fn allocates_nothing(ranks: usize) -> Result<(), Failed> {
    count(ranks, warm, |gathers| repeat(gathers, STARTS))
}

/// Two operations over ranges that overlap.
type Gathers = [Operation<i64>; 2];

fn warm(bootstrap: in_process::InProcessBootstrap) -> Result<(Group, Gathers), Error> {
    let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
    let mut group = Group::open(bootstrap, fabric)?;
    let len = group.ranks() * BLOCK_LEN;
    let window = group.window::<i64>(len + 100)?;
    let mut prepare =
        |begin| group.all_gather(BLOCK_LEN).output_into(&window, begin).in_place().prepare();
    let mut gathers = [prepare(0)?, prepare(100)?];
    repeat(&mut gathers, WARM_UP)?;
    Ok((group, gathers))
}

fn repeat(gathers: &mut Gathers, starts: u32) -> Result<(), Error> {
    (0..starts).try_for_each(|start| gathers[start as usize % 2].run())
}
