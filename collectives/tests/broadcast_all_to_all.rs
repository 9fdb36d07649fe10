//! Runs broadcasts and all-to-alls of several lengths on every rank, over one fabric and over two.

use peerlane_collectives::error::Error;
use peerlane_collectives::plan::Algorithm;
use peerlane_collectives::schedule::algorithms;
use peerlane_hal::{ErrorKind, Rank};

use ranks::{Host, LENGTHS, check, fill, in_flat_group, in_group};

#[path = "support/ranks.rs"]
#[allow(dead_code, reason = "each test program uses a part")]
mod ranks;

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
        in_group(ranks, |group, chosen| {
            let lengths = if ranks < 4 { &LENGTHS[..] } else { &[65, 1000] };
            for (root, &len) in lengths.iter().enumerate() {
                let root = Rank::at(root % ranks);
                let algorithm = match chosen {
                    Algorithm::Direct | Algorithm::Ring => chosen,
                    _ => Algorithm::Ring,
                };
                broadcast(group, algorithm, root, len)?;
            }
            Ok(())
        });
    }
}

#[test]
fn every_rank_gets_its_block_from_every_rank() {
    for ranks in 1..=9 {
        in_group(ranks, |group, chosen| {
            let me = group.rank();
            let lengths = if ranks < 4 { &LENGTHS[..] } else { &[65, 1000] };
            for &len in lengths {
                let algorithm = if chosen == Algorithm::Pull { chosen } else { Algorithm::Direct };
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
            broadcast 4: ranks disagree: collective is broadcast from 1 on rank 2, broadcast from 0 on rank 0
            broadcast 5: ranks disagree: block_bytes is 9 on rank 2, 8 on rank 0
            ");
        }
        Ok(())
    });
}
