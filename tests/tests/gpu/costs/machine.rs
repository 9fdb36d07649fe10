//! Reads the counters of the simulated machine: copies that ran at once, and what exists after
//! groups are closed.

use std::fs;
use std::time::Duration;

use peerlane_simulated_driver::Driver;
use peerlane_tests::Outcome;

use crate::support::data::{check, unexpected};
use crate::support::test_rank::{CaptureMode, Form, TIMEOUT, TestRank, gather_once, open_group};
use crate::vendor::on_streams;

/// Groups, one after the other.
pub(crate) const GROUPS: usize = 50;
/// Those before have brought whatever is kept for later ones.
const WARM_UP: usize = 3;
const BLOCK_BYTES: usize = 70_000;
const STARTS: usize = 4;
/// Nothing moves any more if so many looks see the same.
const LOOKS: u32 = 25;
const LOOKS_MAX: u32 = 500;
const BETWEEN_LOOKS: Duration = Duration::from_millis(20);

/// Never more copies than the device has engines, and nothing on the default stream.
pub(crate) fn copies(test_rank: &mut TestRank) -> Outcome {
    let driver = peerlane_simulated_driver::install();
    let engines = i64::from(
        test_rank
            .group
            .fabric()
            .downcast_ref::<crate::vendor::Fabric>()
            .unwrap()
            .device()
            .copy_engines,
    );
    driver.reset_counters();
    for form in Form::ALL {
        for block_bytes in [1, BLOCK_BYTES, 3 << 20] {
            let builder = test_rank.group.all_gather::<u8>(block_bytes);
            let mut gather = form.of(on_streams(builder)).prepare().map_err(unexpected)?;
            let stream = test_rank.stream.for_starts();
            for _ in 0..STARTS {
                drop(gather.start_on(&stream).map_err(unexpected)?);
            }
            test_rank.stream.finish()?;
            gather.run().map_err(unexpected)?;
        }
    }
    // SAFETY: the stream is finished before the operation is dropped, and the host borrows nothing.
    let builder = unsafe { test_rank.group.all_gather::<u8>(BLOCK_BYTES).capturable() };
    let mut gather = builder.prepare().map_err(unexpected)?;
    let stream = test_rank.stream.for_starts();
    let mode = CaptureMode::Global;
    let graph = test_rank.stream.record(mode, || {
        (0..STARTS).try_for_each(|_| gather.start_on(&stream).map(drop).map_err(unexpected))
    })?;
    for _ in 0..STARTS {
        graph.replay()?;
    }
    test_rank.stream.finish()?;
    let most = driver.counter("most_copies_at_once", Some(test_rank.gpu.ordinal));
    check(most <= engines, || format!("{most} copies at once, the device has {engines} engines"))?;
    let ran = driver.counter("copies", Some(test_rank.gpu.ordinal));
    check(ran > 0, || "no copy was counted".to_owned())?;
    let uses = driver.counter("default_stream_uses", None);
    check(uses == 0, || format!("the default stream was used {uses} times"))
}

/// Groups that come and go leave as much as the first ones did.
pub(crate) fn leftovers(test_rank: &mut TestRank) -> Outcome {
    let driver = peerlane_simulated_driver::install();
    let forms = Form::ALL;
    let one = |index: usize| one_group(test_rank, index, forms[index % forms.len()], false);
    (0..WARM_UP).try_for_each(one)?;
    let wanted = Inventory::at_rest(&driver);
    (WARM_UP..GROUPS).try_for_each(one)?;
    let seen = Inventory::at_rest(&driver);
    check(seen == wanted, || format!("after {GROUPS} groups {seen:?}, expected {wanted:?}"))
}

/// The same with graphs, which may outlive their groups: only the words that they write to stay.
pub(crate) fn captured_leftovers(test_rank: &mut TestRank) -> Outcome {
    let driver = peerlane_simulated_driver::install();
    let one = |index: usize| one_group(test_rank, index, Form::OneOutput, true);
    (0..WARM_UP).try_for_each(one)?;
    let before = Inventory::at_rest(&driver);
    (WARM_UP..GROUPS).try_for_each(one)?;
    let seen = Inventory::at_rest(&driver);
    let kept = (GROUPS - WARM_UP) as i64;
    let wanted = Inventory {
        allocations: before.allocations + kept,
        descriptors: before.descriptors + kept,
        ..before
    };
    check(seen == wanted, || format!("after {GROUPS} groups {seen:?}, expected {wanted:?}"))
}

fn one_group(test_rank: &TestRank, index: usize, form: Form, captured: bool) -> Outcome {
    let (me, ranks) = (test_rank.me, test_rank.ranks);
    let mut group = open_group(&test_rank.gpu, &test_rank.hubs[index], me, ranks, TIMEOUT)?;
    let builder = form.of(group.all_gather::<u8>(1000));
    // SAFETY: the stream is finished before the operation is dropped, and the host borrows nothing.
    let builder = if captured { unsafe { builder.capturable() } } else { builder };
    let mut gather = builder.prepare().map_err(unexpected)?;
    gather_once(&test_rank.gpu, &test_rank.stream, &mut gather, (me, ranks), index as u64)?;
    let stream = test_rank.stream.for_starts();
    drop(gather.start_on(&stream).map_err(unexpected)?);
    if captured {
        let mode = CaptureMode::Global;
        let record = || gather.start_on(&stream).map(drop).map_err(unexpected);
        let graph = test_rank.stream.record(mode, record)?;
        graph.replay()?;
    }
    test_rank.stream.finish()?;
    drop(gather);
    group.close().map_err(unexpected)
}

/// What exists in this process.
#[derive(Debug, PartialEq, Eq)]
struct Inventory {
    of_the_driver: Vec<(&'static str, i64)>,
    allocations: i64,
    /// The simulated driver has one for each allocation.
    descriptors: i64,
}

impl Inventory {
    /// Threads of a group that is over may still be closing what they had.
    fn at_rest(driver: &Driver) -> Self {
        let mut last = Self::take(driver);
        let mut quiet = 0;
        for _ in 0..LOOKS_MAX {
            std::thread::sleep(BETWEEN_LOOKS);
            let now = Self::take(driver);
            quiet = if now == last { quiet + 1 } else { 0 };
            last = now;
            if quiet == LOOKS {
                break;
            }
        }
        last
    }

    fn take(driver: &Driver) -> Self {
        let names = [
            "live_bytes",
            "open_imports",
            "live_reservations",
            "live_mappings",
            "live_streams",
            "live_events",
            "live_graphs",
            "live_contexts",
        ];
        let of_the_driver = names.map(|name| (name, driver.counter(name, None))).into();
        let allocations = driver.counter("live_allocations", None);
        let descriptors = fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
        let descriptors = i64::try_from(descriptors).unwrap_or(i64::MAX);
        Self { of_the_driver, allocations, descriptors }
    }
}
