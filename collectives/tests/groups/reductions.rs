//! Runs reductions of every type and operator against a reference that adds in the same order, bit by bit.

use std::fmt::Debug;
use std::ops::Range;
use std::sync::Barrier;

use insta::assert_snapshot;
use peerlane_collectives::bootstrap::{Bootstrap, in_process};
use peerlane_collectives::collective::Collective;
use peerlane_collectives::element::Element;
use peerlane_collectives::element::Operator;
use peerlane_collectives::error::Error;
use peerlane_collectives::group::Group;
use peerlane_collectives::plan::Algorithm;
use peerlane_hal::{ErrorKind, Rank};
use peerlane_host as host;

use crate::support::group;
use crate::support::ranks::{Host, in_group};

/// A number type, with the arithmetic of one addition.
trait Number: Element + PartialEq + Debug {
    fn of(value: i32) -> Self;
    fn add(self, other: Self) -> Self;
    fn larger(self, other: Self) -> Self;
    fn smaller(self, other: Self) -> Self;
    /// Returns the average of a sum, or nothing for integers.
    fn divided(self, ranks: usize) -> Option<Self>;
}

macro_rules! integers {
    ($($type:ident)*) => {$(
        impl Number for $type {
            fn of(value: i32) -> Self {
                value as $type
            }

            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }

            fn larger(self, other: Self) -> Self {
                self.max(other)
            }

            fn smaller(self, other: Self) -> Self {
                self.min(other)
            }

            fn divided(self, _: usize) -> Option<Self> {
                None
            }
        }
    )*};
}

integers! { u8 i8 u16 i16 u32 i32 u64 i64 }

macro_rules! floats {
    ($($type:ident)*) => {$(
        impl Number for $type {
            fn of(value: i32) -> Self {
                value as $type / 3.0
            }

            fn add(self, other: Self) -> Self {
                self + other
            }

            fn larger(self, other: Self) -> Self {
                self.max(other)
            }

            fn smaller(self, other: Self) -> Self {
                self.min(other)
            }

            fn divided(self, ranks: usize) -> Option<Self> {
                Some(self * (1.0 / ranks as $type))
            }
        }
    )*};
}

floats! { f32 f64 }

/// Returns an element of the input of a rank in a start.
fn element<T: Number>(rank: Rank, start: u32, at: usize) -> T {
    let mixed = (rank.0 + 1).wrapping_mul(7919) ^ (start + 1).wrapping_mul(104_729) ^ at as u32;
    T::of((mixed.wrapping_mul(2_654_435_761) >> 8) as i32 - (1 << 23))
}

/// Returns the rank that reduces an element of an all-reduce in parts, which begin at cache lines.
fn owner<T>(ranks: usize, len: usize, at: usize) -> Rank {
    let lines = (len * size_of::<T>()).div_ceil(64);
    let line = at * size_of::<T>() / 64;
    Rank::at((0..ranks).find(|rank| line < lines * (rank + 1) / ranks).unwrap())
}

/// Returns what the reduction of one element must be, if the contribution of `first` is added first.
fn reduced<T: Number>(
    operator: Operator,
    (contributors, first): (Range<usize>, Option<Rank>),
    start: u32,
    at: usize,
) -> T {
    let count = contributors.len();
    let others = contributors.map(Rank::at).filter(|rank| Some(*rank) != first);
    let values = first.into_iter().chain(others).map(|rank| element::<T>(rank, start, at));
    let result = match operator {
        // No element is a NaN.
        Operator::Max | Operator::Maximum => values.reduce(T::larger),
        Operator::Min | Operator::Minimum => values.reduce(T::smaller),
        Operator::Sum | Operator::Average => values.reduce(T::add),
        #[cfg(not(peerlane_workspace))]
        _ => None,
    };
    let result = result.unwrap();
    let is_average = operator == Operator::Average;
    if is_average { result.divided(count).unwrap() } else { result }
}

/// Runs a reduction three times, and compares every element.
fn run<T: Number>(
    group: &mut Host,
    collective: Collective,
    operator: Operator,
    (len, chunks, outputs, in_place): (usize, u32, u32, bool),
) -> Result<(), Error> {
    let (me, ranks) = (group.rank(), group.ranks());
    let builder = group.operation::<T>(collective, len).operator(operator);
    let in_place = in_place && collective.runs_in_place();
    let builder = builder.chunks(chunks).outputs(if in_place { 1 } else { outputs });
    let mut operation = if in_place { builder.in_place() } else { builder }.prepare()?;
    for start in 0..3 {
        for (at, value) in operation.input_mut()?.iter_mut().enumerate() {
            *value = element(me, start, at);
        }
        operation.run()?;
        let begin = if collective == Collective::ReduceScatter { me.index() * len } else { 0 };
        let contributors = match collective {
            Collective::Scan => 0..me.index() + 1,
            Collective::Exscan => 0..me.index(),
            Collective::ReduceScatter | Collective::AllReduce | Collective::Reduce { .. } => {
                0..ranks
            }
            Collective::AllGather
            | Collective::Broadcast { .. }
            | Collective::AllToAll
            | Collective::Gather { .. }
            | Collective::Scatter { .. } => panic!("{collective} is no reduction"),
            #[cfg(not(peerlane_workspace))]
            _ => panic!("{collective} is unknown"),
        };
        let expected = match collective.is_receiver(me) {
            true => (begin..begin + len)
                .map(|at| {
                    let first = in_place.then(|| owner::<T>(ranks, len, at));
                    reduced::<T>(operator, (contributors.clone(), first), start, at)
                })
                .collect(),
            false => Vec::new(),
        };
        let found = operation.output()?;
        let what = format!("{collective}, {operator}, {len} elements on {ranks} ranks, rank {me}");
        assert_eq!(found.len(), expected.len(), "{what}");
        let differs = found.iter().zip(&expected).position(|(found, expected)| found != expected);
        assert_eq!(differs, None, "{what}");
    }
    Ok(())
}

/// Runs random reductions on groups of one and of two fabrics.
fn run_random(ranks: usize, cases: u64) {
    in_group(ranks, &[Algorithm::Direct], |group, _| {
        // All ranks draw the same numbers.
        let random = &mut fastrand::Rng::with_seed(ranks as u64);
        for _ in 0..cases {
            let reductions = Collective::ALL.iter().filter(|goal| goal.is_reduction());
            let goals: Vec<Collective> = reductions.copied().collect();
            let root = Rank::at(random.usize(..ranks));
            let collective = goals[random.usize(..goals.len())].with_root(root);
            let around = [0, 1, 3, 63, 64, 65, 500, 1000];
            let len = around[random.usize(..around.len())] + random.usize(..3);
            let shape = (len, random.u32(1..4), random.u32(1..3), random.bool());
            let operators = Operator::ALL.into_iter().filter(|it| *it != Operator::Average);
            let operator = random.choice(operators.collect::<Vec<_>>()).unwrap();
            match random.u32(..10) {
                0 => run::<u8>(group, collective, operator, shape)?,
                1 => run::<i8>(group, collective, operator, shape)?,
                2 => run::<u16>(group, collective, operator, shape)?,
                3 => run::<i16>(group, collective, operator, shape)?,
                4 => run::<u32>(group, collective, operator, shape)?,
                5 => run::<i32>(group, collective, operator, shape)?,
                6 => run::<u64>(group, collective, operator, shape)?,
                7 => run::<i64>(group, collective, operator, shape)?,
                8 => {
                    run::<f32>(group, collective, operator, shape)?;
                    run::<f32>(group, collective, Operator::Average, shape)?;
                }
                _ => {
                    run::<f64>(group, collective, operator, shape)?;
                    run::<f64>(group, collective, Operator::Average, shape)?;
                }
            }
        }
        Ok(())
    });
}

#[test]
fn results_are_equal_to_the_reference_bit_by_bit() {
    for ranks in 1..=9 {
        run_random(ranks, 8);
    }
}

/// Proves and runs 10,000 random reductions: `cargo test --release -p peerlane-collectives --test groups ten_thousand --
/// --ignored`.
#[test]
#[ignore = "takes minutes"]
fn ten_thousand_random_reductions() {
    for ranks in 1..=64 {
        run_random(ranks, if ranks <= 16 { 500 } else { 42 });
    }
}

#[test]
fn many_ranks_reduce() {
    for (ranks, cases) in [(16, 2), (33, 1)] {
        run_random(ranks, cases);
    }
}

#[test]
fn parts_of_a_sum_have_lengths_of_their_own() {
    for ranks in 1..=9 {
        in_group(ranks, &[Algorithm::Direct], |group, _| {
            let me = group.rank().index();
            let lens: Vec<usize> = (0..ranks).map(|rank| [1, 70, 0][rank % 3]).collect();
            let (before, total) = (lens[..me].iter().sum::<usize>(), lens.iter().sum::<usize>());
            for outputs in 1..=2 {
                let builder = group.reduce_scatter::<i32>(&lens).chunks(2).outputs(outputs);
                let mut operation = builder.prepare()?;
                for start in 0..3 {
                    assert_eq!(operation.input_mut()?.len(), total);
                    for (at, value) in operation.input_mut()?.iter_mut().enumerate() {
                        *value = element(Rank::at(me), start, at);
                    }
                    operation.run()?;
                    let expected: Vec<i32> = (before..before + lens[me])
                        .map(|at| reduced(Operator::Sum, (0..ranks, None), start, at))
                        .collect();
                    assert_eq!(operation.output()?[..], expected, "{ranks} ranks, rank {me}");
                }
            }
            Ok(())
        });
    }
}

#[test]
fn every_collective_has_a_constructor() {
    group::in_group(2, |group| {
        for &collective in Collective::ALL {
            let builder = match collective {
                Collective::AllGather => group.all_gather::<u32>(3),
                Collective::Broadcast { root } => group.broadcast(root, 3),
                Collective::AllToAll => group.all_to_all(3),
                Collective::Gather { root } => group.gather(root, 3),
                Collective::Scatter { root } => group.scatter(root, 3),
                Collective::ReduceScatter => group.reduce_scatter(3),
                Collective::AllReduce => group.all_reduce(3),
                Collective::Reduce { root } => group.reduce(root, 3),
                Collective::Scan => group.scan(3),
                Collective::Exscan => group.exscan(3),
                #[cfg(not(peerlane_workspace))]
                _ => continue,
            };
            let mut operation = builder.prepare()?;
            operation.run()?;
            // A short all-reduce is planned as a reduce-scatter.
            let planned = operation.report().collective;
            let is_whole = collective == Collective::AllReduce;
            assert!(planned == collective || is_whole, "{planned}, expected {collective}");
        }
        Ok(())
    });
}

#[test]
fn scans_that_do_not_exist_are_refused() {
    let texts = group::in_group(2, |group| {
        let uneven = group.operation::<i32>(Collective::Scan, [1, 2]).prepare().unwrap_err();
        let in_place = group.exscan::<i32>(1).in_place().prepare().unwrap_err();
        assert_eq!([uneven.kind(), in_place.kind()], [ErrorKind::InvalidArgument; 2]);
        Ok([uneven.to_string(), in_place.to_string()])
    });
    assert_eq!(texts[0], texts[1]);
    let [uneven, in_place] = &texts[0];
    assert_snapshot!(uneven, @"blocks have different lengths, expected equal lengths for a scan");
    assert_snapshot!(in_place, @"in_place is true, expected false: an exscan cannot run in place");
}

#[test]
fn half_precision_is_accumulated_in_single_precision() {
    in_group(5, &[Algorithm::Direct], |group, _| {
        let me = group.rank();
        let mut operation = group.all_reduce::<half::f16>(100).prepare()?;
        let value = |rank: Rank| half::f16::from_f32(if rank == Rank(0) { 2048.0 } else { 0.5 });
        operation.input_mut()?.fill(value(me));
        operation.run()?;
        // Each addition in half precision would lose 0.5.
        assert!(operation.output()?.iter().all(|sum| sum.to_f32() == 2050.0));
        Ok(())
    });
}

#[test]
fn reductions_run_in_windows_and_on_memory_that_is_copied() {
    for ranks in [1, 2, 5] {
        let expected = |at: usize| (0..ranks).map(|rank| (rank * 100 + at) as i64).sum::<i64>();
        group::in_group(ranks, |group| {
            let me = group.rank().index();
            let own = |at: usize| (me * 100 + at) as i64;
            let input: Vec<i64> = (0..70).map(own).collect();
            let window = group.window::<i64>(300)?;
            let builder = group.all_reduce(70).input_from(&window, 3);
            let mut between = builder.output_into(&window, 100).prepare()?;
            let mut in_place =
                group.all_reduce(70).output_into(&window, 200).in_place().prepare()?;
            let mut copied = group.all_reduce::<i64>(70).prepare()?;
            for _ in 0..3 {
                window.slice_mut(3..73)?.copy_from_slice(&input);
                window.slice_mut(200..270)?.copy_from_slice(&input);
                between.run()?;
                in_place.run()?;
                let mut output = vec![0; 70];
                copied.run_with(&input, &mut output)?;
                let expected: Vec<i64> = (0..70).map(expected).collect();
                assert_eq!(window.slice(100..170)?[..], expected, "{ranks} ranks");
                assert_eq!(window.slice(200..270)?[..], expected, "{ranks} ranks, in place");
                assert_eq!(output, expected, "{ranks} ranks, copied");
                // Before the next start, all ranks have read the window.
                group.barrier()?;
            }
            drop((between, in_place, copied));
            Ok(group.release(window)?)
        });
    }
}

#[test]
fn a_rank_that_is_lost_is_named_by_a_reduction() {
    for ranks in 2..=5 {
        let all_ran = Barrier::new(ranks);
        let ended = in_process::run(ranks, |bootstrap| {
            let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
            let mut group = Group::open(bootstrap, fabric)?;
            let mut operation = group.all_reduce::<f32>(100_000).prepare()?;
            operation.run()?;
            all_ran.wait();
            if group.rank().0 == 1 {
                return Ok(None);
            }
            let error = operation.run().and_then(|()| operation.run()).unwrap_err();
            Ok(Some((error.kind(), error.peer())))
        });
        let lost = Some((ErrorKind::PeerLost, Some(Rank(1))));
        let expected: Vec<_> = (0..ranks).map(|rank| lost.filter(|_| rank != 1)).collect();
        assert_eq!(ended.unwrap(), expected);
    }
}

/// Each node adds by itself, then the ranks of equal position in their nodes add, and each node gathers.
#[test]
fn subgroups_reduce_by_node() {
    const NODE: usize = 3;
    const LEN: usize = 3 * 700;
    group::in_group(3 * NODE, |group| {
        let me = group.rank().index();
        let (node, place) = ((me / NODE) as u32, (me % NODE) as u32);
        let mut local = group.split(Some(node), 0)?.expect("every rank has a node");
        let mut across = group.split(Some(place), 0)?.expect("every rank has a place");
        let mut scatter = local.reduce_scatter::<f32>(LEN / NODE).prepare()?;
        let mut add = across.all_reduce::<f32>(LEN / NODE).in_place().prepare()?;
        let mut gather = local.all_gather::<f32>(LEN / NODE).prepare()?;
        for start in 0..3 {
            let value = |rank: usize, at: usize| (rank * 10 + at % 7 + start) as f32;
            let input = scatter.input_mut()?;
            input.iter_mut().enumerate().for_each(|(at, one)| *one = value(me, at));
            scatter.run()?;
            add.input_mut()?.copy_from_slice(scatter.output()?);
            add.run()?;
            gather.input_mut()?.copy_from_slice(add.output()?);
            gather.run()?;
            let expected = |at| (0..3 * NODE).map(|rank| value(rank, at)).sum::<f32>();
            assert!(gather.output()?.iter().enumerate().all(|(at, sum)| *sum == expected(at)));
        }
        drop((scatter, add, gather));
        local.close()?;
        across.close()
    });
}

#[test]
fn ranks_with_different_operators_and_types_without_one_are_refused() {
    let texts = group::in_group(2, |group| {
        let operator = [Operator::Sum, Operator::Max][group.rank().index()];
        let differ = group.all_reduce::<f32>(8).operator(operator).prepare().unwrap_err();
        assert_eq!((differ.kind(), differ.peer()), (ErrorKind::Mismatch, Some(Rank(1))));
        let average = group.all_reduce::<i32>(8).operator(Operator::Average);
        let average = average.prepare().unwrap_err();
        let in_place = group.reduce_scatter::<i32>(8).in_place().prepare().unwrap_err();
        Ok([differ, average, in_place].map(|error| error.to_string()))
    });
    assert_eq!(texts[0], texts[1]);
    assert_snapshot!(texts[0].join("\n"), @"
    all-reduce 1: ranks disagree: operator is max on rank 1, sum on rank 0
    operator is average for dtype i32, expected sum, max or min for integers
    in_place is true, expected false: a reduce-scatter cannot run in place
    ");
}
