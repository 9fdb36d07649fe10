//! Tests the memory of operations: blocks of the heap of the group, which operations use one after another.

use peerlane_collectives::error::Error;
use peerlane_collectives::group::Operation;
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

/// Few descriptors are enough for any number of operations. The limit holds for a process of its own.
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
