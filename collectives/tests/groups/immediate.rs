//! Tests collectives on any memory without a preparation by the caller.

use std::fmt::Debug;
use std::ptr::NonNull;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use peerlane_collectives::bootstrap::{Bootstrap, in_process};
use peerlane_collectives::collective::Collective;
use peerlane_collectives::element::{DType, Element, Operator};
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{Group, GroupOptions, Input, Output, Window};
use peerlane_hal::{ErrorKind, Rank};
use peerlane_host as host;

use crate::support::group::in_group;

const CALLS: usize = 130;
const LEN_MAX: usize = 700;

/// An element type whose values the model computes.
trait Number: Element + Debug + PartialEq {
    fn from_small(value: u32) -> Self;
    fn sum(values: impl Iterator<Item = Self>) -> Self;
    fn largest(values: impl Iterator<Item = Self>) -> Self;
}

macro_rules! number {
    ($($type:ty),*) => { $(
        impl Number for $type {
            fn from_small(value: u32) -> Self {
                (value % 100) as $type
            }

            fn sum(values: impl Iterator<Item = Self>) -> Self {
                values.reduce(|a, b| wrapping_add!($type, a, b)).unwrap()
            }

            fn largest(values: impl Iterator<Item = Self>) -> Self {
                values.reduce(|a, b| if a > b { a } else { b }).unwrap()
            }
        }
    )* };
}

macro_rules! wrapping_add {
    (f32, $a:expr, $b:expr) => {
        $a + $b
    };
    (f64, $a:expr, $b:expr) => {
        $a + $b
    };
    ($type:ty, $a:expr, $b:expr) => {
        ($a as i64 + $b as i64) as $type
    };
}

number!(u8, i32, f32, f64);

/// The memory of both sides of a call, alike on all ranks.
#[derive(Clone, Copy, Debug)]
struct Kinds {
    input_in_window: bool,
    output_in_window: bool,
    in_place: bool,
}

/// A call whose results the model knows.
#[derive(Debug)]
struct Case {
    collective: Collective,
    operator: Operator,
    counts: Option<Vec<usize>>,
    /// The length of each rank's block.
    lens: Vec<usize>,
    kinds: Kinds,
    begins: [usize; 2],
    seed: u32,
}

impl Case {
    fn random(rng: &mut fastrand::Rng, ranks: usize) -> Self {
        let root = Rank(rng.u32(..ranks as u32));
        let all = [
            Collective::AllGather,
            Collective::Broadcast { root },
            Collective::AllToAll,
            Collective::Gather { root },
            Collective::Scatter { root },
            Collective::ReduceScatter,
            Collective::AllReduce,
            Collective::Reduce { root },
            Collective::Scan,
            Collective::Exscan,
        ];
        let collective = *rng.choice(&all).unwrap();

        let differ = [
            Collective::AllGather,
            Collective::Gather { root },
            Collective::Scatter { root },
            Collective::ReduceScatter,
        ];
        let is_uneven = differ.contains(&collective) && rng.bool();
        let lens: Vec<usize> = match is_uneven {
            true => (0..ranks).map(|_| rng.usize(..LEN_MAX)).collect(),
            false => vec![rng.usize(..LEN_MAX); ranks],
        };

        let in_place = [
            Collective::AllGather,
            Collective::Broadcast { root },
            Collective::AllToAll,
            Collective::AllReduce,
            Collective::Reduce { root },
            Collective::Scan,
            Collective::Exscan,
        ];
        let in_place = in_place.contains(&collective) && rng.bool();
        // With lengths that differ, an input in a window would be at a place of its own on each rank.
        let can_be_apart = in_place || !is_uneven || collective != Collective::AllGather;
        let input_in_window = rng.bool() && can_be_apart;
        // The array of a broadcast is one.
        let is_broadcast = matches!(collective, Collective::Broadcast { .. });
        let output_in_window = if is_broadcast || in_place { input_in_window } else { rng.bool() };
        Self {
            collective,
            operator: *rng.choice(&[Operator::Sum, Operator::Max]).unwrap(),
            counts: is_uneven.then(|| lens.clone()),
            lens,
            kinds: Kinds { input_in_window, output_in_window, in_place },
            begins: [rng.usize(..50), ranks * LEN_MAX + 50 + rng.usize(..50)],
            seed: rng.u32(..1000),
        }
    }

    fn value<N: Number>(&self, from: Rank, to: Rank, index: usize) -> N {
        N::from_small(self.seed + 31 * from.0 + 7 * to.0 + index as u32)
    }

    /// The input of a rank, whether or not the collective uses it.
    fn input<N: Number>(&self, rank: Rank) -> Vec<N> {
        let block = |to: Rank, len: usize| (0..len).map(move |index| self.value(rank, to, index));
        match self.collective.has_input_block_per_receiver() {
            true => {
                let ranks = Rank::all(self.lens.len());
                ranks.flat_map(|to| block(to, self.lens[to.index()])).collect()
            }
            false => block(Rank(0), self.lens[rank.index()]).collect(),
        }
    }

    /// The output of a rank, or `None` if it gets none.
    fn output<N: Number>(&self, rank: Rank) -> Option<Vec<N>> {
        let collective = self.collective;
        if !collective.is_receiver(rank) {
            return None;
        }

        let ranks = self.lens.len();
        let to = if collective.has_input_block_per_receiver() { rank } else { Rank(0) };
        if !collective.is_reduction() {
            let blocks = Rank::all(ranks).filter(|from| collective.is_provider(*from));
            let len = |from: Rank| {
                let of = if collective.has_input_block_per_receiver() { rank } else { from };
                self.lens[of.index()]
            };
            let block = |from: Rank| (0..len(from)).map(move |index| self.value(from, to, index));
            return Some(blocks.flat_map(block).collect());
        }

        let contributors = Rank::all(ranks).filter(|from| collective.contributes(*from, rank));
        let contributors: Vec<Rank> = contributors.collect();
        let element = |index| {
            let values = contributors.iter().map(|from| self.value(*from, to, index));
            match self.operator {
                Operator::Max => N::largest(values),
                _ => N::sum(values),
            }
        };
        Some((0..self.lens[rank.index()]).map(element).collect())
    }

    /// Makes the call on one rank, and compares the output with the model.
    fn check<N: Number>(&self, group: &mut Group, window: &Window<N>) -> Result<(), Error> {
        let rank = group.rank();
        let expected = self.output::<N>(rank);
        let untouched = N::from_small(77);
        let output_len = expected.as_ref().map_or(0, Vec::len);
        if self.kinds.in_place {
            return self.check_in_place(group, window);
        }

        let input = self.input::<N>(rank);
        let [input_begin, output_begin] = self.begins;
        // All ranks name the part in the window, also those without an input.
        let input_range = input_begin..input_begin + input.len();
        let output_range = output_begin..output_begin + output_len;
        window.slice_mut(0..window.len())?.fill(untouched);
        if self.kinds.input_in_window {
            window.slice_mut(input_range.clone())?.copy_from_slice(&input);
        }
        let mut output = vec![untouched; output_len];

        let is_broadcast = matches!(self.collective, Collective::Broadcast { .. });
        let is_root = is_broadcast && self.collective.is_provider(rank);
        let from: Input<'_> = match self.kinds.input_in_window {
            true if is_broadcast => ().into(),
            true => window.part(input_range)?.into(),
            false if self.collective.is_provider(rank) => (&input).into(),
            false => ().into(),
        };
        let to: Output<'_> = match self.kinds.output_in_window {
            true => {
                if is_root {
                    window.slice_mut(output_range.clone())?.copy_from_slice(&input);
                }
                window.part(output_range.clone())?.into()
            }
            false if expected.is_some() => (&mut output).into(),
            false => ().into(),
        };
        self.call(group).run(from, to)?;

        let Some(expected) = expected else { return Ok(()) };
        match self.kinds.output_in_window {
            true => assert_eq!(window.slice(output_range.clone())?[..], expected[..], "{self:?}"),
            false => assert_eq!(output, expected, "{self:?}"),
        }
        // Nothing is written behind the output.
        let after = output_range.end..window.len();
        assert!(window.slice(after)?.iter().all(|value| *value == untouched), "{self:?}");
        Ok(())
    }

    fn check_in_place<N: Number>(
        &self,
        group: &mut Group,
        window: &Window<N>,
    ) -> Result<(), Error> {
        let rank = group.rank();
        let input = self.input::<N>(rank);
        let expected = self.output::<N>(rank);
        let mut array = match self.collective {
            Collective::AllGather => {
                let mut array = vec![N::from_small(77); self.lens.iter().sum()];
                let begin: usize = self.lens[..rank.index()].iter().sum();
                array[begin..begin + input.len()].copy_from_slice(&input);
                array
            }
            _ => input,
        };
        let unchanged = array.clone();

        if self.kinds.output_in_window {
            let range = self.begins[1]..self.begins[1] + array.len();
            window.slice_mut(range.clone())?.copy_from_slice(&array);
            self.call(group).run_in_place(window.part(range.clone())?)?;
            array.copy_from_slice(&window.slice(range)?);
        } else {
            self.call(group).run_in_place(&mut array)?;
        }
        assert_eq!(array, expected.unwrap_or(unchanged), "{self:?}");
        Ok(())
    }

    fn call<'g>(&self, group: &'g mut Group) -> peerlane_collectives::group::Immediate<'g> {
        let call = group.immediate(self.collective).operator(self.operator);
        match &self.counts {
            Some(counts) => call.counts(counts),
            None => call,
        }
    }
}

#[test]
fn random_calls_give_what_the_model_gives() {
    for ranks in 1..=8 {
        in_group(ranks, |group| {
            let len = 2 * ranks * LEN_MAX + 200;
            let (bytes, ints) = (group.window::<u8>(len)?, group.window::<i32>(len)?);
            let (floats, doubles) = (group.window::<f32>(len)?, group.window::<f64>(len)?);

            let mut rng = fastrand::Rng::with_seed(ranks as u64);
            for _ in 0..CALLS {
                let case = Case::random(&mut rng, ranks);
                match rng.u32(..4) {
                    0 => case.check(group, &bytes)?,
                    1 => case.check(group, &ints)?,
                    2 => case.check(group, &floats)?,
                    _ => case.check(group, &doubles)?,
                }
            }
            assert_eq!(group.stats().immediate.calls, CALLS as u64);
            Ok(())
        });
    }
}

#[test]
fn calls_with_other_lengths_find_the_operation_again() {
    in_group(2, |group| {
        for len in [1, 1000, 7, 0, 999] {
            let mut output = vec![0_u32; 2 * len];
            group.immediate(Collective::AllGather).run(&vec![5_u32; len], &mut output)?;
            assert_eq!(output, vec![5; 2 * len]);
        }
        let counts = group.stats().immediate;
        assert_eq!((counts.calls, counts.hits, counts.operations, counts.copied), (5, 4, 1, 5));

        // Memory for copies grows, and the operation over the old one is forgotten.
        let mut output = vec![0_u32; 2 << 16];
        group.immediate(Collective::AllGather).run(&vec![6_u32; 1 << 16], &mut output)?;
        let counts = group.stats().immediate;
        assert_eq!((counts.hits, counts.operations), (4, 1));
        assert!(counts.copy_bytes >= 8 << 16);
        Ok(())
    });
}

#[test]
fn the_operations_that_were_used_last_are_kept() {
    in_group(2, |group| {
        let window = group.window::<u8>(1000)?;
        let call = |group: &mut Group, number: usize| {
            let counts = [number % 9 + 1, number / 9 + 1];
            let len = counts.iter().sum();
            let own = window.part(0..len)?;
            group.immediate(Collective::AllGather).counts(&counts).run_in_place(own)
        };
        for number in 0..80 {
            call(group, number)?;
        }
        assert_eq!(group.stats().immediate.operations, 64);

        call(group, 79)?;
        assert_eq!(group.stats().immediate.hits, 1);
        call(group, 0)?;
        assert_eq!(group.stats().immediate.hits, 1);
        Ok(())
    });
}

/// Runs ranks whose groups have a short timeout, and returns their errors.
fn errors_of(ranks: usize, body: impl Fn(&mut Group) -> Result<(), Error> + Sync) -> Vec<Error> {
    // No rank leaves before all have their error.
    let done = Barrier::new(ranks);
    let errors = in_process::run(ranks, |bootstrap| {
        let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
        let options = GroupOptions::default().timeout(Duration::from_secs(3));
        let mut group = options.open(bootstrap, fabric)?;
        let result = body(&mut group);
        done.wait();
        Ok(result.unwrap_err())
    });
    errors.unwrap()
}

#[test]
fn one_wrong_length_is_an_error_on_all_ranks() {
    for ranks in [2, 3, 5] {
        let errors = errors_of(ranks, |group| {
            // The first call prepares, so that the second one only starts.
            let mut output = vec![0_i32; 10 * ranks];
            group.immediate(Collective::AllGather).run(&[3; 10], &mut output)?;

            let len = if group.rank().0 == 1 { 8 } else { 9 };
            let mut output = vec![7_i32; len * ranks];
            let input = vec![3_i32; len];
            let result = group.immediate(Collective::AllGather).run(&input, &mut output);
            assert_eq!(output, vec![7; len * ranks], "bytes moved");
            result
        });
        for error in errors {
            assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
            assert!(error.to_string().contains("rank 1"), "{error}");
        }
    }
}

#[test]
fn another_kind_of_memory_on_one_rank_is_an_error_on_all() {
    let errors = errors_of(3, |group| {
        let window = group.window::<i32>(100)?;
        let mut output = [0; 30];
        let is_odd = group.rank().0 == 2;
        if is_odd {
            group.immediate(Collective::AllGather).run(&[1; 10], &mut output)
        } else {
            let part = window.part(0..30)?;
            group.immediate(Collective::AllGather).run(&[1; 10], part)
        }
    });
    for error in errors {
        assert!(error.to_string().contains("rank 2"), "{error}");
    }
}

#[test]
fn arguments_that_do_not_fit_are_refused_before_anything_moves() {
    let texts = |ranks: usize, call: &(dyn Fn(&mut Group) -> Result<(), Error> + Sync)| {
        in_group(ranks, |group| Ok(call(group).unwrap_err().to_string()))
    };
    let refused =
        |call: &(dyn Fn(&mut Group) -> Result<(), Error> + Sync)| texts(1, call).remove(0);

    let text =
        refused(&|group| group.immediate(Collective::AllGather).run(&[1_u8; 3], &mut [0_u8; 4]));
    assert_eq!(text, "output has 4 elements, expected 3 for 1 ranks");
    let text =
        refused(&|group| group.immediate(Collective::AllReduce).run(&[1_u8; 3], &mut [0_i32; 3]));
    assert_eq!(text, "output has elements of i32, expected u8 as in the input");
    let text = refused(&|group| group.immediate(Collective::AllGather).run((), ()));
    assert_eq!(text, "the call has neither input nor output, expected one of them at least");
    let text = refused(&|group| {
        let call = group.immediate(Collective::AllToAll).counts(&[1]);
        call.run(&[1_u8], &mut [0_u8])
    });
    assert_eq!(text, "counts are given, expected none: blocks of an all-to-all have one size");
    let text = refused(&|group| {
        let call = group.immediate(Collective::AllGather).counts(&[1, 2]);
        call.run(&[1_u8], &mut [0_u8])
    });
    assert_eq!(text, "counts has 2 numbers, expected 1, one for each rank");
    let text = refused(&|group| {
        let address = NonNull::<u64>::dangling().cast();
        // SAFETY: an array without elements has no memory.
        let input = unsafe { Input::from_address(address, DType::U8, 0) }.in_units(2);
        // SAFETY: as above.
        let output = unsafe { Output::from_address(address, DType::U8, 0) }.in_units(4);
        group.immediate(Collective::AllReduce).run(input, output)
    });
    assert_eq!(text, "output has elements of 4 u8, expected 2 u8 as in the input");
    let text = refused(&|group| {
        let mut part = group.split(Some(0), 0)?.unwrap();
        let (own, other) = (group.window::<u8>(4)?, part.window::<u8>(4)?);
        // Both windows are the first ones of their groups, and an operation over the own one is kept.
        group.immediate(Collective::AllReduce).run_in_place(own.part(0..2)?)?;
        let result = group.immediate(Collective::AllReduce).run_in_place(other.part(0..2)?);
        part.close()?;
        result
    });
    assert_eq!(text, "the window belongs to another group; open it with this group");
    let text = refused(&|group| {
        let window = group.window::<u8>(9)?;
        let call = group.immediate(Collective::AllGather).counts(&[2]);
        call.run(window.part(0..2)?, window.part(4..6)?)
    });
    assert!(
        text.starts_with("input is in a window, from which this call of an all-gather"),
        "{text}"
    );
    let text = refused(&|group| {
        let window = group.window::<u8>(9)?;
        let call = group.immediate(Collective::AllToAll).splits(&[2], &[2]);
        call.run(&[1_u8; 2], window.part(4..6)?)
    });
    assert!(text.starts_with("an array is in a window, expected other memory"), "{text}");
    let text =
        refused(&|group| group.immediate(Collective::ReduceScatter).run_in_place(&mut [1_u8]));
    let expected =
        "the call is in place, expected an input and an output apart in a reduce-scatter";
    assert_eq!(text, expected);
    let text = refused(&|group| {
        let window = group.window::<u16>(10)?;
        let range = window.untyped_part(DType::I32, 2, 1);
        range.map(drop)
    });
    let expected =
        "the part begins at byte 2 of the window, expected a multiple of 4, the size of i32";
    assert_eq!(text, expected);

    // One rank refuses, and all return an error that has its text; then they go on.
    let said = in_group(3, |group| {
        let len = if group.rank().0 == 1 { 5 } else { 6 };
        let mut output = vec![0_u8; len];
        let error = group.immediate(Collective::AllGather).run(&[1_u8; 2], &mut output);
        let mut output = [0_u8; 6];
        group.immediate(Collective::AllGather).run(&[1_u8; 2], &mut output)?;
        assert_eq!(output, [1; 6]);
        Ok(error.unwrap_err().to_string())
    });
    let text = "output has 5 elements, expected 6 for 3 ranks";
    for (rank, said) in said.iter().enumerate() {
        assert!(said.contains(text) && (rank == 1 || said.contains("rank 1")), "{said}");
    }
}

#[test]
fn a_borrowed_slice_keeps_calls_away_from_its_window() {
    in_group(1, |group| {
        let window = group.window::<u8>(10)?;
        let slice = window.slice(0..5)?;
        let error = group.immediate(Collective::AllReduce).run_in_place(window.part(0..5)?);
        assert!(error.unwrap_err().to_string().contains("the host"));
        drop(slice);
        group.immediate(Collective::AllReduce).run_in_place(window.part(0..5)?)
    });
}

#[test]
fn a_window_is_released_with_the_operations_over_it() {
    in_group(2, |group| {
        let window = group.window::<u8>(10)?;
        group.immediate(Collective::AllReduce).run_in_place(window.part(0..5)?)?;
        let part = window.part(0..5)?;
        let kept = group.release(window).map_err(|refused| {
            assert!(refused.error.to_string().contains("is still used"), "{}", refused.error);
            refused.window
        });
        drop(part);
        group.release(kept.unwrap_err()).map_err(|refused| refused.error)?;
        assert_eq!(group.stats().immediate.operations, 0);
        Ok(())
    });
}

#[test]
fn a_start_is_completed_by_its_handle_or_by_the_next_call() {
    in_group(2, |group| {
        let (mut first, mut second) = ([0_u8; 4], [0_u8; 4]);
        let rank = group.rank().0 as u8;
        let (one, two) = ([rank, 1], [rank, 2]);

        let call = group.immediate(Collective::AllGather);
        // SAFETY: the arrays live until both calls are complete, and nobody uses them before.
        let start = unsafe { call.start((&one).into(), (&mut first).into()) }?;
        let call = group.immediate(Collective::AllGather);
        // SAFETY: as above.
        let mut next = unsafe { call.start((&two).into(), (&mut second).into()) }?;
        start.wait()?;
        while !next.wait_for(Duration::ZERO)? {
            std::thread::yield_now();
        }
        assert!(next.wait_part(Duration::ZERO)?);
        assert_eq!((first, second), ([0, 1, 1, 1], [0, 2, 1, 2]));

        // A handle that is dropped leaves the call to the next one.
        let call = group.immediate(Collective::AllGather);
        // SAFETY: as above.
        drop(unsafe { call.start((&two).into(), (&mut first).into()) }?);
        group.immediate(Collective::AllGather).run(&one, &mut second)?;
        assert_eq!((first, second), ([0, 2, 1, 2], [0, 1, 1, 1]));
        Ok(())
    });
}

/// The elements that each rank sends to each rank, by sender and receiver.
fn random_table(rng: &mut fastrand::Rng, ranks: usize, most: usize) -> Vec<Vec<usize>> {
    let row = |rng: &mut fastrand::Rng| (0..ranks).map(|_| rng.usize(..most)).collect();
    (0..ranks).map(|_| row(rng)).collect()
}

#[test]
fn splits_move_what_each_pair_of_ranks_says() {
    for ranks in 1..=5 {
        in_group(ranks, |group| {
            let rank = group.rank().index();
            let mut rng = fastrand::Rng::with_seed(ranks as u64);
            for call in 0..30 {
                // From the tenth call on, the memory for copies has to grow.
                let table = random_table(&mut rng, ranks, if call < 10 { 20 } else { 9000 });
                let value = |from: usize, to: usize, index: usize| {
                    (call + 100 * from + 10_000 * to + index) as u32
                };
                let block = |from: usize, to: usize| {
                    (0..table[from][to]).map(move |index| value(from, to, index))
                };

                let send = table[rank].clone();
                let receive: Vec<usize> = table.iter().map(|row| row[rank]).collect();
                let input: Vec<u32> = (0..ranks).flat_map(|to| block(rank, to)).collect();
                let expected: Vec<u32> = (0..ranks).flat_map(|from| block(from, rank)).collect();
                let mut output = vec![7; expected.len()];
                let exchange = group.immediate(Collective::AllToAll).splits(&send, &receive);
                exchange.run(&input, &mut output)?;
                assert_eq!(output, expected, "call {call} of {ranks} ranks");
            }
            assert!(group.stats().immediate.hits >= 20);
            Ok(())
        });
    }
}

#[test]
fn stats_count_the_calls_of_each_path() {
    in_group(2, |group| {
        let gather = |group: &mut Group, len: usize| {
            let input = vec![group.rank().0 as u8; len];
            group.immediate(Collective::AllGather).run(&input, &mut vec![0_u8; 2 * len])
        };
        for len in [3, 3, 5] {
            gather(group, len)?;
        }
        for _ in 0..2 {
            group.immediate(Collective::AllReduce).run_in_place(&mut [1_u32; 3])?;
        }

        let window = group.window::<u8>(30)?;
        let call = group.immediate(Collective::AllGather);
        call.run(window.part(20..21)?, window.part(0..2)?)?;
        let count = |group: &Group, name: &str| {
            let paths = group.stats().paths;
            paths.iter().filter(|path| path.collective == name).map(|path| path.calls).sum::<u64>()
        };
        assert_eq!((count(group, "all-gather"), count(group, "all-reduce")), (4, 2));
        let paths = group.stats().paths;
        assert_eq!((paths[0].collective, paths[0].engine.as_str()), ("all-gather", "processor"));
        assert!(paths.is_sorted_by_key(|path| std::cmp::Reverse(path.calls)));

        // Those of operations that are kept no more count too.
        group.release(window)?;
        for len in 1..200 {
            gather(group, len << 6)?;
        }
        assert_eq!(count(group, "all-gather"), 203);
        Ok(())
    });
}

#[test]
fn ranks_that_differ_in_running_splits_beside_compute_name_it_and_go_on() {
    in_group(3, |group| {
        let rank = group.rank().0 as u8;
        let call = |group: &mut Group, beside_compute: bool| {
            let mut output = [9_u8; 3];
            let exchange = group.immediate(Collective::AllToAll).splits(&[1; 3], &[1; 3]);
            exchange.beside_compute(beside_compute).run(&[rank; 3], &mut output)?;
            assert_eq!(output, [0, 1, 2]);
            Ok::<_, Error>(())
        };

        // In the first call, in one after a call of each kind, and in turns that are equal.
        for turn in 0..4 {
            let error = call(group, rank == 1).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
            let text = "beside_compute is true on rank 1, false on rank 0";
            assert!(error.to_string().contains(text), "{error}");
            call(group, turn % 2 == 0)?;
            call(group, turn < 2)?;
        }
        Ok(())
    });
}

#[test]
fn splits_of_one_rank_that_are_wrong_are_an_error_on_all_and_nothing_moves() {
    in_group(3, |group| {
        let rank = group.rank().0;
        let call = |group: &mut Group, send: &[usize], receive: &[usize], len: usize| {
            let mut output = vec![9_i32; receive.iter().sum()];
            let exchange = group.immediate(Collective::AllToAll).splits(send, receive);
            let result = exchange.run(&vec![rank as i32; len], &mut output);
            if result.is_err() {
                assert!(output.iter().all(|value| *value == 9), "bytes moved");
            }
            result.map(|()| output)
        };

        // The first call prepares, and the refusal is told even then.
        let sends: &[usize] = if rank == 1 { &[1, 1] } else { &[1; 3] };
        let error = call(group, sends, &[1; 3], 3).unwrap_err();
        let text = "splits, send: [1, 1] for 3 elements, expected 3 numbers with that sum";
        assert!(error.to_string().contains(text), "{error}");
        assert!(rank == 1 || error.to_string().contains("rank 1"), "{error}");

        // Rank 2 expects another number than rank 0 sends.
        let receive: &[usize] = if rank == 2 { &[2, 1, 1] } else { &[1; 3] };
        let error = call(group, &[1; 3], receive, 3).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch);
        let text = "rank 0 sends 1 elements to rank 2, which expects 2";
        assert!(error.to_string().contains(text), "{error}");

        // Elements of another type on one rank.
        let exchange = group.immediate(Collective::AllToAll).splits(&[1; 3], &[1; 3]);
        let error = match rank {
            0 => exchange.run(&[1_u32; 3], &mut [0_u32; 3]).unwrap_err(),
            _ => exchange.run(&[1_f32; 3], &mut [0_f32; 3]).unwrap_err(),
        };
        assert!(error.to_string().contains("ranks disagree"), "{error}");

        let refused = Error::new(ErrorKind::InvalidArgument, "a reason of the caller");
        let error = match rank {
            2 => group.refuse_splits(refused),
            _ => call(group, &[1; 3], &[1; 3], 3).unwrap_err(),
        };
        assert!(error.to_string().contains("a reason of the caller"), "{error}");

        assert_eq!(call(group, &[1; 3], &[1; 3], 3)?, [0, 1, 2]);
        Ok(())
    });
}

#[test]
fn a_call_has_the_timeout_that_it_names() {
    let errors = errors_of(2, |group| {
        let mut output = [0_u8; 2];
        group.immediate(Collective::AllGather).run(&[1_u8], &mut output)?;
        if group.rank().0 == 1 {
            // It waits for the end of the group, and makes no call.
            let begun = Instant::now();
            while group.abort_record().is_none() {
                assert!(begun.elapsed() < Duration::from_secs(20), "the group has not ended");
                std::thread::sleep(Duration::from_millis(1));
            }
            return group.barrier();
        }
        let call = group.immediate(Collective::AllGather).timeout(Duration::from_millis(300));
        call.run(&[1_u8], &mut output)
    });
    for error in errors {
        assert!(error.to_string().contains("300ms"), "{error}");
    }
}
