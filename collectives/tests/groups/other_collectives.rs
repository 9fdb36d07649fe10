//! Runs all collectives but all-gathers with several lengths on every rank, over one fabric and over two.

use peerlane_collectives::bootstrap::{Bootstrap, in_process};
use peerlane_collectives::element::{Complex64, F8E8M0};
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{BlockLens, Group, Operation, OperationBuilder};
use peerlane_collectives::plan::Algorithm;
use peerlane_collectives::schedule::algorithms;
use peerlane_hal::{ErrorKind, Rank};

use crate::support::ranks::{Host, LENGTHS, check, fill, in_flat_group, in_group};

fn broadcast(group: &mut Host, algorithm: Algorithm, root: Rank, len: usize) -> Result<(), Error> {
    for (in_place, chunks) in [(false, 1), (true, 3)] {
        let builder = group.broadcast::<u8>(root, len).algorithm(algorithm).chunks(chunks);
        let builder = if in_place { builder.in_place() } else { builder };
        let mut operation = builder.prepare()?;
        assert_eq!(operation.report().collective.to_string(), format!("broadcast from {root}"));
        for start in 0..3 {
            let input = operation.input_mut()?;
            fill(input, root, 0, start);
            operation.run()?;
            assert_eq!(operation.output()?.len(), len);
            check(operation.output()?, root, 0, start);
        }
    }
    Ok(())
}

#[test]
fn every_rank_gets_the_data_of_the_root() {
    for ranks in 1..=9 {
        let algorithms = [Algorithm::Direct, Algorithm::Ring, Algorithm::GetRing];
        in_group(ranks, &algorithms, |group, algorithm| {
            let lengths = if ranks < 4 { &LENGTHS[..] } else { &[65, 1000] };
            for (root, &len) in lengths.iter().enumerate() {
                let root = Rank::at(root % ranks);
                broadcast(group, algorithm, root, len)?;
            }
            Ok(())
        });
    }
}

#[test]
fn every_rank_gets_its_block_from_every_rank() {
    for ranks in 1..=9 {
        in_group(ranks, &[Algorithm::Direct, Algorithm::Pull], |group, algorithm| {
            let me = group.rank();
            let lengths = if ranks < 4 { &LENGTHS[..] } else { &[65, 1000] };
            for &len in lengths {
                let builder = group.all_to_all::<u8>(len).algorithm(algorithm);
                let mut operation = builder.chunks(1 + len as u32 % 2).prepare()?;
                for start in 0..4 {
                    let input = operation.input_mut()?;
                    assert_eq!(input.len(), len * ranks);
                    for target in 0..ranks {
                        fill(&mut input[target * len..][..len], me, target, start);
                    }
                    operation.run()?;
                    let output = operation.output()?;
                    for source in 0..ranks {
                        let block = &output[source * len..][..len];
                        check(block, Rank::at(source), me.index(), start);
                    }
                }
            }
            Ok(())
        });
    }
}

/// Returns lengths that differ from rank to rank, of which some are 0.
fn uneven(ranks: usize, first: usize) -> Vec<usize> {
    (first..first + ranks).map(|number| LENGTHS[number % LENGTHS.len()]).collect()
}

type Describe = for<'g> fn(&'g mut Host, Rank, &[usize]) -> OperationBuilder<'g, u8>;

/// Prepares operations with a root, with equal and different blocks, and makes several starts with each.
fn with_roots(
    describe: Describe,
    start: impl Fn(&mut Operation<u8>, (Rank, Rank), &[usize], usize) -> Result<(), Error> + Sync,
) {
    for ranks in 1..=9 {
        in_group(ranks, &[Algorithm::Direct, Algorithm::Pull], |group, algorithm| {
            let me = group.rank();
            let lens = [vec![65; ranks], uneven(ranks, 0), uneven(ranks, 4)];
            for (case, lens) in lens.iter().enumerate() {
                let root = Rank::at((case + 1) % ranks);
                let builder = describe(group, root, lens).algorithm(algorithm);
                let mut operation = builder.chunks(1 + case as u32).prepare()?;
                (0..4).try_for_each(|number| start(&mut operation, (me, root), lens, number))?;
            }
            Ok(())
        });
    }
}

#[test]
fn the_root_of_a_gather_gets_the_block_of_every_rank() {
    with_roots(
        |group, root, lens| group.gather(root, lens),
        |operation, (me, root), lens, start| {
            assert_eq!(operation.input_mut()?.len(), lens[me.index()]);
            fill(operation.input_mut()?, me, 0, start);
            operation.run()?;
            let expected = if me == root { lens.iter().sum() } else { 0 };
            assert_eq!(operation.output()?.len(), expected);
            for source in Rank::all(lens.len()) {
                let len = if me == root { lens[source.index()] } else { 0 };
                let block = operation.output_of(source)?;
                assert_eq!(block.len(), len);
                check(block, source, 0, start);
            }
            Ok(())
        },
    );
}

#[test]
fn every_rank_gets_its_block_from_the_root_of_a_scatter() {
    with_roots(
        |group, root, lens| group.scatter(root, lens),
        |operation, (me, root), lens, start| {
            let sent = if me == root { lens } else { &[] };
            assert_eq!(operation.input_mut()?.len(), sent.iter().sum::<usize>());
            fill_blocks(operation.input_mut()?, root, sent, start);
            operation.run()?;
            assert_eq!(operation.output()?.len(), lens[me.index()]);
            check(operation.output_of(root)?, root, me.index(), start);
            Ok(())
        },
    );
}

/// Fills the blocks for all ranks, which have these lengths.
fn fill_blocks(mut input: &mut [u8], from: Rank, lens: &[usize], start: usize) {
    for (to, &len) in lens.iter().enumerate() {
        let (block, rest) = input.split_at_mut(len);
        fill(block, from, to, start);
        input = rest;
    }
    assert!(input.is_empty());
}

/// Returns the length that a rank sends to another one: of every third pair nothing.
fn pair_len(from: usize, to: usize) -> usize {
    if (from + 2 * to).is_multiple_of(3) { 0 } else { 31 * from + 7 * to + 1 }
}

#[test]
fn every_rank_gets_blocks_of_other_lengths_from_every_rank() {
    for ranks in 1..=9 {
        in_group(ranks, &[Algorithm::Direct, Algorithm::Pull], |group, algorithm| {
            let me = group.rank().index();
            let send: Vec<usize> = (0..ranks).map(|to| pair_len(me, to)).collect();
            let receive: Vec<usize> = (0..ranks).map(|from| pair_len(from, me)).collect();
            for outputs in [1, 2] {
                let lens = BlockLens::send_receive(&send, &receive);
                let builder = group.all_to_all::<u8>(lens).algorithm(algorithm).outputs(outputs);
                let mut operation = builder.chunks(outputs).prepare()?;
                for start in 0..4 {
                    fill_blocks(operation.input_mut()?, Rank::at(me), &send, start);
                    operation.run()?;
                    assert_eq!(operation.output()?.len(), receive.iter().sum::<usize>());
                    for (from, &len) in Rank::all(ranks).zip(&receive) {
                        let block = operation.output_of(from)?;
                        assert_eq!(block.len(), len);
                        check(block, from, me, start);
                    }
                }
            }
            Ok(())
        });
    }
}

#[test]
fn blocks_of_other_lengths_that_do_not_match_are_named_on_every_rank() {
    in_flat_group(3, |group| {
        let me = group.rank().index();
        let (send, mut receive) = (vec![4; 3], vec![4; 3]);
        if me == 2 {
            receive[1] = 5;
        }
        let lens = BlockLens::send_receive(&send, &receive);
        let error = group.all_to_all::<f32>(lens).prepare().unwrap_err();
        assert_eq!((error.kind(), error.peer()), (ErrorKind::Mismatch, None));
        insta::allow_duplicates! {
            insta::assert_snapshot!(error, @"all-to-all 1: ranks disagree: send[2] is 4 elements on rank 1, but receive[1] is 5 elements on rank 2");
        }
        let send = vec![4; if me == 1 { 2 } else { 3 }];
        let lens = BlockLens::send_receive(&send, &[4; 3]);
        let error = group.all_to_all::<f32>(lens).prepare().unwrap_err();
        if me == 1 {
            insta::assert_snapshot!(error, @"send has 2 lengths, expected 3, one for each rank");
        } else {
            insta::allow_duplicates! {
                insta::assert_snapshot!(error, @"all-to-all 1, lengths of blocks: rank 1 failed (invalid argument): send has 2 lengths, expected 3, one for each rank");
            }
        }
        let error = group.all_gather::<f32>(BlockLens::send_receive(&[4; 3], &[4; 3])).prepare();
        insta::allow_duplicates! {
            insta::assert_snapshot!(error.unwrap_err(), @"blocks have a length for each pair of ranks, expected one for each rank in an all-gather");
        }
        let error = group.all_to_all::<f32>([1, 2, 3]).prepare().unwrap_err();
        insta::allow_duplicates! {
            insta::assert_snapshot!(error, @"blocks have different lengths, expected equal lengths for an all-to-all, or a length for each pair of ranks");
        }
        Ok(())
    });
}

#[test]
fn the_algorithm_is_chosen_among_those_that_suit() {
    in_flat_group(5, |group| {
        let broadcast = group.broadcast::<u8>(Rank(2), 1 << 20).prepare()?;
        let report = broadcast.report();
        assert!(algorithms(report.collective).any(|algorithm| algorithm == report.algorithm));
        let all_to_all = group.all_to_all::<u8>(1 << 10).prepare()?;
        let report = all_to_all.report();
        assert!(algorithms(report.collective).any(|algorithm| algorithm == report.algorithm));
        Ok(())
    });
}

#[test]
fn bad_input_is_refused_on_every_rank() {
    in_flat_group(3, |group| {
        let mut refused = |case: u32| {
            let error = match case {
                0 => group.broadcast::<u8>(Rank(3), 8).prepare().unwrap_err(),
                1 => group.all_to_all::<u8>(8).in_place().prepare().unwrap_err(),
                2 => group.all_to_all::<u8>(8).algorithm(Algorithm::Ring).prepare().unwrap_err(),
                3 => {
                    let root = Rank(u32::from(group.rank() == Rank(2)));
                    group.broadcast::<u8>(root, 8).prepare().unwrap_err()
                }
                _ => {
                    let len = if group.rank() == Rank(2) { 9 } else { 8 };
                    group.broadcast::<u8>(Rank(0), len).prepare().unwrap_err()
                }
            };
            (error.kind(), error.to_string())
        };
        let (invalid, mismatch) = (ErrorKind::InvalidArgument, ErrorKind::Mismatch);
        let texts: Vec<_> = (0..5).map(&mut refused).collect();
        let kinds: Vec<_> = texts.iter().map(|(kind, _)| *kind).collect();
        assert_eq!(kinds, [invalid, invalid, invalid, mismatch, mismatch], "{texts:?}");
        if group.rank() == Rank(0) {
            let texts: Vec<_> = texts.into_iter().map(|(_, text)| text).collect();
            insta::assert_snapshot!(texts.join("\n"), @r"
            root is 3, expected a rank below 3
            in_place is true, expected false: an all-to-all cannot run in place
            algorithm ring does not support all-to-all, expected direct or pull
            broadcast 1: ranks disagree: collective is broadcast from 1 on rank 2, broadcast from 0 on rank 0
            broadcast 1: ranks disagree: block_bytes is 9 on rank 2, 8 on rank 0
            ");
        }
        Ok(())
    });
}

#[test]
fn copies_that_the_engines_cannot_make_are_refused() {
    in_process::run(2, |bootstrap| {
        let mut options = peerlane_host::Options::default();
        options.caps.put_align_bytes = 64;
        let rank = bootstrap.rank();
        let fabric = peerlane_host::Fabric::open_with(rank, bootstrap.ranks(), options);
        let fabric = fabric.map_err(|error| Error::of_backend("open the fabric", error))?;
        let mut group = Group::open(bootstrap, fabric)?;
        let error = group.all_gather::<u32>(3).prepare().map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        let text = error.to_string();
        assert!(text.contains("from and to multiples of 64 (put_align_bytes)"), "{text}");
        let mut gather = group.all_gather::<u32>(48).prepare()?;
        gather.input_mut()?.fill(rank.0);
        gather.run()?;
        assert_eq!(gather.output()?, [vec![0; 48], vec![1; 48]].concat());
        drop(gather);
        group.close()
    })
    .unwrap();
}

#[test]
fn elements_that_only_move_arrive_in_windows_and_are_not_reduced() {
    for ranks in 1..=5 {
        in_group(ranks, &[Algorithm::Direct], |group, _| {
            let me = group.rank();
            let number = |rank: Rank| Complex64 { re: rank.0 as f32, im: -1.5 };
            let window = group.window::<Complex64>(3 * ranks + 1)?;
            let mut gather = group.all_gather::<Complex64>(3).output_into(&window, 1).prepare()?;
            gather.input_mut()?.fill(number(me));
            gather.run()?;
            let expected: Vec<_> = Rank::all(ranks).flat_map(|rank| [number(rank); 3]).collect();
            assert_eq!(*window.slice(1..1 + 3 * ranks)?, expected);

            let mut exponents = group.all_to_all::<F8E8M0>(1).prepare()?;
            exponents.input_mut()?.fill(F8E8M0(me.0 as u8));
            exponents.run()?;
            let expected: Vec<_> = Rank::all(ranks).map(|rank| F8E8M0(rank.0 as u8)).collect();
            assert_eq!(exponents.output()?, expected);

            let refused = [
                group.all_reduce::<Complex64>(3).prepare().map(drop).unwrap_err(),
                group.all_reduce::<F8E8M0>(3).prepare().map(drop).unwrap_err(),
            ];
            for (error, dtype) in refused.iter().zip(["complex64", "f8e8m0"]) {
                assert_eq!(error.kind(), ErrorKind::InvalidArgument);
                assert!(
                    error.to_string().contains(&format!("dtype is {dtype}, expected")),
                    "{error}"
                );
            }
            Ok(())
        });
    }
}
