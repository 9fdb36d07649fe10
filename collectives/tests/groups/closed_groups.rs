//! What closed groups leave behind: nothing.

use std::fs;

use peerlane_collectives::bootstrap::Bootstrap;
use peerlane_collectives::bootstrap::in_process;
use peerlane_collectives::group::Group;
use peerlane_host as host;

use crate::support::own_process::run_in_own_process;

const ROUNDS: usize = 600;
/// The rounds after which nothing grows any more.
const WARM_UP: usize = 200;

fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Returns the memory of this process that is its own, in KiB.
fn memory() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let field = |name| status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    let kib = |name| field(name).trim().trim_end_matches(" kB").parse::<u64>().unwrap();
    kib("RssAnon:") + kib("RssShmem:")
}

#[test]
fn groups_that_are_closed_before_their_operations_are_dropped_leave_nothing() {
    let test =
        "closed_groups::groups_that_are_closed_before_their_operations_are_dropped_leave_nothing";
    run_in_own_process(test, count_what_closed_groups_leave);
}

/// All descriptors and all memory of this process count.
fn count_what_closed_groups_leave() {
    let usage = in_process::run(2, |bootstrap| {
        let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
        let mut world = Group::open(bootstrap, fabric)?;
        let mut usage = Vec::new();
        let mut last = None;
        for round in 0..=ROUNDS {
            let mut part = world.split(Some(0), 0)?.expect("every rank has a color");
            let mut gather = part.all_gather::<f32>(100).prepare()?;
            gather.run()?;
            part.close()?;
            // The operation outlives its group by a round.
            last = Some(gather);

            if round == WARM_UP || round == ROUNDS {
                world.barrier()?;
                // Rank 0 alone, because the look at the descriptors needs one.
                if world.rank().0 == 0 {
                    usage.push((descriptors(), memory()));
                }
                world.barrier()?;
            }
        }
        drop(last);
        world.close()?;
        Ok(usage)
    });

    let usage = &usage.unwrap()[0];
    let [(descriptors, memory), (descriptors_end, memory_end)] = usage[..] else {
        panic!("{usage:?}")
    };
    assert_eq!(descriptors_end, descriptors);
    // A group that leaks keeps 100 KiB or more.
    assert!(
        memory_end < memory + 1024,
        "{memory} KiB after {WARM_UP} rounds, {memory_end} KiB after {ROUNDS}"
    );
}
