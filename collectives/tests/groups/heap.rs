//! Tests the memory of operations: blocks of the heap of the group, which operations use one after
//! another or share.

use peerlane_collectives::error::Error;
use peerlane_collectives::group::{Group, GroupStats, MemoryKind, Operation, Window};
use peerlane_hal::{ErrorKind, Rank};
use rustix::process::{Resource, Rlimit, setrlimit};

use crate::support::group::in_group;
use crate::support::own_process::run_in_own_process;

/// Runs the operation once, with data that `seed` and the rank determine, and checks the output.
fn check(operation: &mut Operation<i32>, me: Rank, seed: i32) -> Result<(), Error> {
    let value = |rank: Rank, index: usize| seed + 1000 * rank.0 as i32 + index as i32;
    for (index, element) in operation.input_mut()?.iter_mut().enumerate() {
        *element = value(me, index);
    }
    operation.run()?;
    let ranks = operation.report().ranks;
    let output = operation.output()?;
    let len = output.len() / ranks;
    for rank in Rank::all(ranks) {
        for (index, element) in output[rank.index() * len..][..len].iter().enumerate() {
            assert_eq!(*element, value(rank, index), "rank {rank}, element {index}");
        }
    }
    Ok(())
}

/// Few descriptors are enough for any number of operations. The limit holds for a process of its
/// own.
#[test]
fn thousands_of_operations_live_with_256_descriptors() {
    let test = "heap::thousands_of_operations_live_with_256_descriptors";
    run_in_own_process(test, run_many_live_operations);
}

fn run_many_live_operations() {
    let limit = Rlimit { current: Some(256), maximum: Some(256) };
    setrlimit(Resource::Nofile, limit).unwrap();

    in_group(4, |group| {
        let me = group.rank();
        let mut live = Vec::new();
        for _ in 0..10 {
            let many = (0..100).map(|_| group.all_gather::<i32>(16).describe()).collect();
            live.extend(group.prepare_all(many)?);
        }
        for (seed, operation) in (1..).zip(live.iter_mut().step_by(10)) {
            check(operation, me, seed)?;
        }
        Ok(())
    });
}

#[test]
fn blocks_are_used_again() {
    in_group(3, |group| {
        let me = group.rank();
        let mut places = std::collections::BTreeSet::new();
        for seed in 0..100 {
            let mut gather = group.all_gather::<i32>(5000).outputs(1).prepare()?;
            places.insert(gather.output_memory().base);
            check(&mut gather, me, seed)?;
        }
        assert!(places.len() <= 3, "100 operations had {} places", places.len());
        Ok(())
    });
}

#[test]
fn random_operations_come_and_go_in_any_order() {
    for seed in 0..21 {
        let ranks = 2 + seed as usize % 7;
        in_group(ranks, |group| {
            let me = group.rank();
            let common = &mut fastrand::Rng::with_seed(seed);
            let own = &mut fastrand::Rng::with_seed(seed ^ u64::from(me.0) << 32);
            let mut live: Vec<Operation<i32>> = Vec::new();
            let mut dropped: Vec<Operation<i32>> = Vec::new();
            for step in 0..24 {
                match common.u32(..4) {
                    0 | 1 => {
                        let len = [0, 1, 7, 300, 20_000][common.usize(..5)];
                        let outputs = common.u32(1..3);
                        live.push(group.all_gather(len).outputs(outputs).prepare()?);
                    }
                    2 if !live.is_empty() => {
                        let index = common.usize(..live.len());
                        for _ in 0..common.u32(1..4) {
                            check(&mut live[index], me, step + common.i32(..1 << 20))?;
                        }
                    }
                    _ if !live.is_empty() => {
                        dropped.push(live.swap_remove(common.usize(..live.len())));
                        // Each rank drops in an order and at a time of its own.
                        own.shuffle(&mut dropped);
                        dropped.truncate(own.usize(..=dropped.len()));
                    }
                    _ => {}
                }
            }
            drop(dropped);
            for operation in &mut live {
                check(operation, me, 5)?;
            }
            Ok(())
        });
    }
}

#[test]
fn a_failed_preparation_leaves_the_heap_usable() {
    in_group(2, |group| {
        let me = group.rank();
        let mut first = group.all_gather::<i32>(10).prepare()?;
        for len in [usize::MAX / 64, 1 << 60] {
            let error = group.all_gather::<i32>(len).prepare().unwrap_err();
            assert!(matches!(error.kind(), ErrorKind::OutOfMemory | ErrorKind::InvalidArgument));
        }
        let error = group.all_gather::<i32>(10 + me.index()).prepare().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch);
        // What failed preparations have taken of the heap, later operations use again.
        let mut places = std::collections::BTreeSet::new();
        for _ in 0..50 {
            let error = group.all_gather::<i32>(5000 + me.index()).prepare().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Mismatch);
            places.insert(group.all_gather::<i32>(5000).prepare()?.output_memory().base);
        }
        assert!(places.len() <= 3, "50 operations had {} places", places.len());

        let mut second = group.all_gather::<i32>(10).prepare()?;
        check(&mut first, me, 1)?;
        check(&mut second, me, 2)
    });
}

#[test]
fn one_operation_that_fails_fails_all_that_are_prepared_with_it() {
    in_group(2, |group| {
        let me = group.rank();
        let good = group.all_gather::<i32>(3).describe();
        let bad = group.all_gather::<i32>(3 + me.index()).describe();
        let error = group.prepare_all(vec![good, bad]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "2 operations 1: ranks disagree: all-gather 1.2, block_bytes is 16 on rank 1, 12 on \
             rank 0"
        );
        let one: Vec<_> = (0..=me.index()).map(|_| group.all_gather::<i32>(3).describe()).collect();
        let error = group.prepare_all(one).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch);
        check(&mut group.all_gather(3).prepare()?, me, 1)
    });
}

/// The lengths of 64 all-reduces, from 256 elements to `most`.
fn batch_lens(most: usize) -> Vec<usize> {
    let len = |index: i32| (256.0 * (most as f64 / 256.0).powf(f64::from(index) / 63.0)) as usize;
    (0..64).map(len).collect()
}

fn inbox_bytes(group: &Group) -> u64 {
    let inboxes = group.stats().memory.into_iter();
    inboxes.filter(|one| one.kind == MemoryKind::Inboxes).map(|one| one.bytes).sum()
}

/// Runs all-reduces over the same elements of a window, each with other values.
fn check_sums(
    (me, ranks): (Rank, usize),
    window: &Window<i32>,
    operations: &mut [(usize, Operation<i32>)],
) -> Result<(), Error> {
    for (turn, (len, operation)) in operations.iter_mut().enumerate() {
        let value = |rank: Rank| (turn * 100 + rank.index()) as i32;
        window.slice_mut(0..*len)?.fill(value(me));
        operation.run()?;
        let sum = Rank::all(ranks).map(value).sum::<i32>();
        assert!(window.slice(0..*len)?.iter().all(|element| *element == sum), "turn {turn}");
    }
    Ok(())
}

#[test]
fn reductions_over_one_arena_share_inboxes_and_give_them_back() {
    const MOST: usize = 1 << 20;
    for ranks in [2, 3] {
        for together in [false, true] {
            in_group(ranks, move |group| {
                let me = group.rank();
                let window = group.window::<i32>(MOST)?;
                group.barrier()?;
                let before = group.stats();

                let lens = batch_lens(MOST);
                let describe = |group: &mut Group, len| {
                    let builder = group.all_reduce::<i32>(len).output_into(&window, 0);
                    builder.in_place().describe()
                };
                let all: Vec<_> = lens.iter().map(|&len| describe(group, len)).collect();
                let prepared = match together {
                    true => group.prepare_all(all)?,
                    false => {
                        let one = |one| group.prepare_all(vec![one]);
                        let each: Result<Vec<_>, Error> = all.into_iter().map(one).collect();
                        each?.into_iter().flatten().collect()
                    }
                };
                let mut operations: Vec<_> = lens.into_iter().zip(prepared).collect();

                // The largest inbox has a contribution of each rank to one part of the input.
                let largest = (MOST * size_of::<i32>()) as f64;
                let ratio = inbox_bytes(group) as f64 / largest;
                let most = if together { 1.2 } else { 2.2 };
                assert!(ratio <= most, "{ratio}, {:?}", group.stats());
                check_sums((me, ranks), &window, &mut operations)?;
                let memory = &operations[63].1.report().memory;
                assert!(memory.iter().any(|one| one.kind == MemoryKind::Inboxes), "{memory:?}");

                // Ranks drop the operations in different order.
                let shift = 7 * me.index();
                operations.rotate_left(shift);
                drop(operations);
                assert!(group.trim()? > 0);
                let flags = |stats: &GroupStats| {
                    let flags = stats.memory.iter().filter(|one| one.kind == MemoryKind::Flags);
                    flags.map(|one| one.bytes).sum::<u64>()
                };
                let after = group.stats();
                assert_eq!(
                    after.memory_bytes() - flags(&after),
                    before.memory_bytes() - flags(&before),
                    "{before:?}, {after:?}"
                );

                // What comes next allocates again.
                let sum = describe(group, 1000);
                let sum = group.prepare_all(vec![sum])?.into_iter().next().unwrap();
                check_sums((me, ranks), &window, &mut [(1000, sum)])
            });
        }
    }
}

#[test]
fn reductions_that_can_overlap_have_inboxes_of_their_own() {
    in_group(3, |group| {
        let (me, len) = (group.rank(), 5000);
        let window = group.window::<i32>(4 * len)?;
        let mut operations = Vec::new();
        for begin in [0, len, 2 * len, 3 * len] {
            let builder = group.all_reduce::<i32>(len).output_into(&window, begin).in_place();
            operations.push(builder.prepare()?);
        }

        for turn in 0..20 {
            let value = |rank: Rank, index: usize| (turn * 1000 + rank.index() * 10 + index) as i32;
            for index in 0..4 {
                window.slice_mut(index * len..(index + 1) * len)?.fill(value(me, index));
            }
            // All are open at the same time.
            let started: Result<Vec<_>, Error> =
                operations.iter_mut().map(Operation::start).collect();
            started?.into_iter().try_for_each(|start| start.wait())?;
            for index in 0..4 {
                let sum = Rank::all(3).map(|rank| value(rank, index)).sum::<i32>();
                let part = window.slice(index * len..(index + 1) * len)?;
                assert!(part.iter().all(|element| *element == sum), "turn {turn}, {index}");
            }
        }
        Ok(())
    });
}

#[test]
fn stats_count_memory_by_kind() {
    in_group(2, |group| {
        group.barrier()?;
        let bytes = |group: &Group, kind| {
            let memory = group.stats().memory.into_iter().filter(|one| one.kind == kind);
            memory.map(|one| one.bytes).sum::<u64>()
        };
        let data = |group: &Group| {
            let kinds = [MemoryKind::Windows, MemoryKind::Buffers, MemoryKind::Inboxes];
            kinds.map(|kind| bytes(group, kind))
        };
        assert_eq!(data(group), [0; 3]);

        let window = group.window::<u8>(5000)?;
        assert_eq!(data(group), [5000, 0, 0]);
        // Only the root has an output.
        let gather = group.gather::<u8>(Rank(1), 100_000).outputs(1).prepare()?;
        let own = if group.rank() == Rank(1) { 200_000 } else { 0 };
        assert_eq!(data(group), [5000, own, 0]);
        let listed = gather.report().memory.iter().filter(|one| one.kind == MemoryKind::Buffers);
        assert_eq!(listed.map(|one| one.bytes).sum::<u64>(), own);

        drop(gather);
        group.release(window)?;
        assert_eq!(data(group), [0; 3]);

        let heap = bytes(group, MemoryKind::Heap);
        let sum = group.all_reduce::<u8>(10_000_000).prepare()?;
        assert!(bytes(group, MemoryKind::Heap) >= heap + 20_000_000);
        assert!(bytes(group, MemoryKind::Inboxes) >= 10_000_000);
        drop(sum);
        group.trim()?;
        assert_eq!(group.trim()?, 0, "there is nothing left to give back");
        assert_eq!(data(group), [0; 3]);
        Ok(())
    });
}
