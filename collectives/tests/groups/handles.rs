//! Starts on the host whose blocks arrive and depart one after the other.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use insta::assert_snapshot;
use peerlane_collectives::bootstrap::{Bootstrap, in_process};
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{BlockChunk, Group, OperationBuilder};
use peerlane_collectives::plan::Algorithm;
use peerlane_hal::{ErrorKind, Rank};
use peerlane_host as host;

use crate::support::group::in_group;
use crate::waiting::block_on;

const LEN: usize = 70;

fn value(from: Rank, to: Rank, round: u32) -> u32 {
    1000 * round + 10 * from.0 + to.0
}

/// Checks starts of an all-gather whose blocks are read one by one, in three ways.
fn gather(
    group: &mut Group,
    describe: impl Fn(OperationBuilder<'_, u32>) -> OperationBuilder<'_, u32>,
) -> Result<(), Error> {
    let (me, ranks) = (group.rank(), group.ranks());
    let mut gather = describe(group.all_gather(LEN)).arrivals().prepare()?;
    let order: Vec<BlockChunk> = gather.arrivals().to_vec();
    let chunks = gather.report().chunks as usize;
    assert_eq!(order.len(), ranks * chunks);

    for round in 0..12 {
        gather.input_mut()?.fill(value(me, me, round));
        let mut started = gather.start()?;
        for &chunk in order.iter().filter(|chunk| chunk.block != me) {
            match round % 4 {
                0 => assert!(started.wait_for_block(chunk, Duration::from_secs(20))?),
                1 => while !started.has_arrived(chunk)? {},
                2 => block_on(started.arrival(chunk)?)?,
                _ => {}
            }
            let expected = value(chunk.block, chunk.block, round);
            if chunks == 1 || round % 4 == 3 {
                assert_eq!(started.block(chunk.block)?, [expected; LEN]);
            }
        }
        // A start need not be waited for as a whole.
        if round % 3 == 0 {
            started.wait()?;
        }

        let expected: Vec<u32> =
            Rank::all(ranks).flat_map(|rank| [value(rank, rank, round); LEN]).collect();
        assert_eq!(gather.output()?, expected);
    }

    // Starts without handles are as before.
    gather.input_mut()?.fill(7);
    gather.run()?;
    assert_eq!(gather.output()?, vec![7; ranks * LEN]);
    Ok(())
}

#[test]
fn every_block_of_an_all_gather_arrives_by_itself() {
    for ranks in 1..=9 {
        in_group(ranks, |group| gather(group, |builder| builder));
    }
    let several = [Algorithm::Direct, Algorithm::Pull, Algorithm::Ring, Algorithm::DoubleRing];
    for algorithm in several.into_iter().chain([Algorithm::GetRing]) {
        in_group(4, |group| gather(group, |builder| builder.algorithm(algorithm).chunks(3)));
    }
    in_group(8, |group| gather(group, |one| one.algorithm(Algorithm::RecursiveDoubling)));
    in_group(3, |group| gather(group, |builder| builder.in_place()));
    in_group(3, |group| gather(group, |builder| builder.outputs(1)));
}

#[test]
fn blocks_of_other_collectives_arrive_and_depart_by_themselves() {
    for ranks in 1..=5 {
        in_group(ranks, |group| {
            let me = group.rank();
            let mut exchange = group.all_to_all::<u32>(LEN).arrivals().departures().prepare()?;
            let (order, departures) =
                (exchange.arrivals().to_vec(), exchange.departures().to_vec());
            assert_eq!((order.len(), departures.len()), (ranks, ranks));
            for round in 0..6 {
                let mut started = exchange.start()?;
                for (number, chunk) in departures.iter().enumerate() {
                    started.fill(chunk.block, |to| to.fill(value(me, chunk.block, round)))?;
                    // In the middle of the departures, some rounds read what has come.
                    if round % 2 == 1 && number > 0 && order[number - 1].block != me {
                        let from = order[number - 1].block;
                        assert_eq!(started.block(from)?, [value(from, me, round); LEN]);
                    }
                }
                for chunk in &order {
                    assert_eq!(started.block(chunk.block)?, [value(chunk.block, me, round); LEN]);
                }
                started.wait()?;
            }
            Ok::<_, Error>(())
        });
        in_group(ranks, |group| {
            let me = group.rank();
            let mut sum = group.reduce_scatter::<u32>(LEN).departures().prepare()?;
            let departures = sum.departures().to_vec();
            assert_eq!(departures.len(), ranks);
            assert_eq!(departures.last().unwrap().block, me);
            for round in 0..6 {
                let mut started = sum.start()?;
                for chunk in departures.iter().rev() {
                    started.fill(chunk.block, |to| to.fill(value(me, chunk.block, round)))?;
                }
                started.wait()?;
                let expected: u32 = Rank::all(ranks).map(|from| value(from, me, round)).sum();
                assert_eq!(sum.output()?, [expected; LEN]);
            }
            // A start without handles reads its input at once.
            sum.input_mut()?.fill(2);
            sum.run()?;
            assert_eq!(sum.output()?, [2 * ranks as u32; LEN]);
            Ok::<_, Error>(())
        });
        in_group(ranks, |group| {
            let (me, root) = (group.rank(), Rank(0));
            let mut cast = group.broadcast::<u32>(root, LEN).arrivals().departures().prepare()?;
            let mut gather = group.gather::<u32>(root, LEN).arrivals().departures().prepare()?;
            let mut scatter = group.scatter::<u32>(root, LEN).arrivals().departures().prepare()?;
            for round in 0..4 {
                let mut started = cast.start()?;
                if me == root {
                    started.fill(me, |to| to.fill(round))?;
                } else {
                    assert_eq!(started.block(root)?, [round; LEN]);
                }
                started.wait()?;

                let mut started = gather.start()?;
                started.fill(me, |to| to.fill(value(me, root, round)))?;
                for rank in Rank::all(if me == root { ranks } else { 0 }) {
                    assert_eq!(started.block(rank)?, [value(rank, root, round); LEN]);
                }
                started.wait()?;

                let mut started = scatter.start()?;
                for rank in Rank::all(if me == root { ranks } else { 0 }) {
                    started.fill(rank, |to| to.fill(value(root, rank, round)))?;
                }
                assert_eq!(started.block(root)?, [value(root, me, round); LEN]);
                started.wait()?;
            }
            Ok::<_, Error>(())
        });
    }
}

/// A rank that does not start holds up its own block, and not the one of another rank.
#[test]
fn a_block_arrives_although_another_one_does_not() {
    let has_looked = AtomicBool::new(false);
    in_group(3, |group| {
        // With one output, the put to rank 1 would wait for it.
        let mut gather = group.all_gather::<u32>(LEN).outputs(2).arrivals().prepare()?;
        let looked = || has_looked.load(Ordering::Acquire);
        match group.rank() {
            Rank(0) => {
                let mut started = gather.start()?;
                // Rank 2 puts to rank 0 first.
                let nearest = started.wait_for_block(Rank(2), Duration::from_secs(20));
                let other = started.wait_for_block(Rank(1), Duration::from_millis(20));
                has_looked.store(true, Ordering::Release);
                assert_eq!((nearest?, other?), (true, false));
                started.wait()
            }
            Rank(1) => {
                while !looked() {
                    std::thread::yield_now();
                }
                gather.run()
            }
            _ => {
                // Its polls move its puts.
                let mut started = gather.start()?;
                loop {
                    let has_arrived = started.has_arrived(Rank(1))?;
                    // Rank 1 starts only after this.
                    if looked() {
                        break started.wait();
                    }
                    assert!(!has_arrived);
                }
            }
        }
    });
}

#[test]
fn what_cannot_be_is_refused() {
    let said = in_group(2, |group| {
        let mut said = Vec::new();
        let mut error = |error: Error| {
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            said.push(error.to_string());
        };
        error(group.reduce_scatter::<u32>(1).arrivals().prepare().unwrap_err());
        error(group.all_reduce::<u32>(1).departures().prepare().unwrap_err());
        error(group.all_gather::<u32>(1).arrivals().resizable().prepare().unwrap_err());
        let pull = group.all_to_all::<u32>(1).algorithm(Algorithm::Pull);
        error(pull.departures().prepare().unwrap_err());

        let mut plain = group.all_gather::<u32>(1).prepare()?;
        let mut started = plain.start()?;
        error(started.has_arrived(Rank(0)).unwrap_err());
        error(started.depart(Rank(0)).unwrap_err());
        started.wait()?;

        let mut exchange = group.all_to_all::<u32>(1).arrivals().departures().prepare()?;
        let mut started = exchange.start()?;
        error(started.has_arrived(Rank(2)).unwrap_err());
        error(started.depart(BlockChunk { block: Rank(1), chunk: 3 }).unwrap_err());
        started.depart(Rank(1))?;
        error(started.depart(Rank(1)).unwrap_err());
        error(started.fill(Rank(1), |_| ()).unwrap_err());
        started.depart(Rank(0))?;
        started.wait()?;
        Ok::<_, Error>(said)
    });
    assert_snapshot!(said[0].join("\n"), @r"
    arrivals are set, expected none: a reduce-scatter has one result, which is complete with the start
    departures are set, expected none: an all-reduce is planned in different forms; use a reduce-scatter and an all-gather
    arrivals or departures are set, expected none for an operation that is resizable
    algorithm is pull, whose ranks read the inputs of their peers, expected one whose ranks put, for an operation with departures
    the operation does not tell arrivals; prepare it with `arrivals()`
    the operation does not wait for departures; prepare it with `departures()`
    no block 2 arrives on this rank; expected a chunk of block 0 or 1
    no chunk 3 of block 1 departs on this rank; expected a chunk of block 0 or 1
    block 1 has departed already in this start
    block 1 has departed already in this start
    ");
}

/// A rank that lets no block depart is named with the block, on all ranks.
#[test]
fn a_block_that_never_departs_ends_the_group() {
    let errors = in_process::run(3, |bootstrap| {
        let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
        let mut group = Group::open(bootstrap, fabric)?;
        let timeout = Duration::from_millis(1500);
        let exchange = group.all_to_all::<u32>(1).departures().timeout(timeout);
        let mut exchange = exchange.prepare()?;
        let mut started = exchange.start()?;
        if group.rank() != Rank(1) {
            Rank::all(3).try_for_each(|rank| started.depart(rank))?;
        }
        Ok::<_, Error>(started.wait().unwrap_err())
    });
    for error in errors.unwrap() {
        assert_eq!((error.kind(), error.peer()), (ErrorKind::Timeout, Some(Rank(1))), "{error}");
        assert!(error.to_string().contains("has not let chunk 0 of block 2 depart"), "{error}");
    }
}

#[test]
fn ranks_that_ask_for_different_handles_find_out() {
    let errors = in_group(2, |group| {
        let is_first = group.rank() == Rank(0);
        let builder = group.all_gather::<u32>(1).arrivals();
        let builder = if is_first { builder } else { builder.departures() };
        let prepared = builder.prepare();
        Ok::<_, Error>(prepared.unwrap_err().kind())
    });
    assert_eq!(errors, [ErrorKind::Mismatch; 2]);
}
