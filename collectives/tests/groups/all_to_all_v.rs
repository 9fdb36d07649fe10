//! Checks all-to-alls whose starts have counts of their own.

use std::time::{Duration, Instant};

use peerlane_collectives::bootstrap::{Bootstrap, in_process};
use peerlane_collectives::element::{DType, Element};
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{AllToAllV, Group, SendCounts};
use peerlane_collectives::plan::Algorithm;
use peerlane_collectives::topology::Topology;
use peerlane_hal::{ErrorKind, Rank};
use peerlane_host as host;
use peerlane_layers::{ThrottleLayer, Wrapped};

use crate::support::group::in_group;
use crate::tiers::{WAITS, in_tiers};

/// How long a rank waits for the end of a group before the test fails.
const LIMIT: Duration = Duration::from_secs(60);

/// The counts of one start on all ranks, by sender and receiver, and where the blocks of each rank
/// begin in its input.
struct Counts {
    send: Vec<Vec<usize>>,
    displacements: Vec<Vec<usize>>,
}

impl Counts {
    /// Draws counts with at most these sums, of which many are 0.
    fn random(
        rng: &mut fastrand::Rng,
        ranks: usize,
        (send_max, receive_max): (usize, usize),
    ) -> Self {
        let mut room = vec![receive_max; ranks];
        let mut send = Vec::new();
        let mut displacements = Vec::new();
        for _ in 0..ranks {
            let mut left = send_max;
            let mut counts = vec![0; ranks];
            let mut order: Vec<usize> = (0..ranks).collect();
            rng.shuffle(&mut order);
            for &receiver in &order {
                let most = left.min(room[receiver]);
                // Some starts use all of the room.
                let count = match rng.u8(..5) {
                    0 => 0,
                    1 => most,
                    _ => rng.usize(..=most) / ranks.min(3),
                };
                counts[receiver] = count;
                left -= count;
                room[receiver] -= count;
            }

            // The blocks are in another order than the ranks, with gaps where there is room.
            rng.shuffle(&mut order);
            let mut begins = vec![usize::MAX; ranks];
            let mut end = 0;
            for &receiver in order.iter().filter(|receiver| counts[**receiver] > 0) {
                let gap = rng.usize(..=left);
                left -= gap;
                begins[receiver] = end + gap;
                end = begins[receiver] + counts[receiver];
            }
            send.push(counts);
            displacements.push(begins);
        }
        Self { send, displacements }
    }
}

fn value(start: usize, from: usize, to: usize, index: usize) -> u64 {
    (start as u64) << 48 | (from as u64) << 40 | (to as u64) << 32 | index as u64
}

/// Runs starts with random counts, and compares what comes with what was sent.
fn random_starts<T: Element + PartialEq>(
    group: &mut Group,
    seed: u64,
    algorithm: Algorithm,
    convert: fn(u64) -> T,
) -> Result<(), Error> {
    let (me, ranks) = (group.rank().index(), group.ranks());
    let rng = &mut fastrand::Rng::with_seed(seed);
    let most = (rng.usize(..200), rng.usize(..200));
    let builder = group.all_to_all_v::<T>(most.0, most.1).algorithm(algorithm);
    let mut exchange = builder.outputs(rng.u32(1..=2)).prepare()?;
    assert_eq!(exchange.output()?, [] as [T; 0]);

    for start in 0..20 {
        let Counts { send, displacements } = Counts::random(rng, ranks, most);
        let is_placed = rng.bool();
        let expects = rng.bool();
        let received: Vec<usize> = (0..ranks).map(|from| send[from][me]).collect();

        let input = exchange.input_mut()?;
        assert_eq!(input.len(), most.0);
        let mut packed = 0;
        for to in 0..ranks {
            let begin = if is_placed { displacements[me][to] } else { packed };
            packed += send[me][to];
            for index in 0..send[me][to] {
                input[begin + index] = convert(value(start, me, to, index));
            }
        }

        let counts = SendCounts::new(&send[me]);
        let counts = if is_placed { counts.displacements(&displacements[me]) } else { counts };
        let counts = if expects { counts.receive_counts(&received) } else { counts };
        if start % 5 == 0 {
            // A start that nobody waits for is complete before the next one uses its memory.
            drop(exchange.start(counts)?);
            if rng.bool() {
                continue;
            }
        } else if start % 3 == 0 {
            exchange.start(counts)?.wait()?;
            assert_eq!(exchange.received_counts(), received);
        } else {
            assert_eq!(exchange.run(counts)?, received);
        }

        let mut all = Vec::new();
        for (from, &count) in received.iter().enumerate() {
            let block: Vec<T> =
                (0..count).map(|index| convert(value(start, from, me, index))).collect();
            assert_eq!(exchange.received_displacements()[from], all.len());
            assert_eq!(exchange.output_of(Rank::at(from))?, block, "seed {seed}, start {start}");
            all.extend(block);
        }
        assert_eq!(exchange.output()?, all);
    }
    Ok(())
}

#[test]
fn every_rank_gets_what_was_sent_and_learns_how_much() {
    for ranks in 1..=9 {
        in_group(ranks, |group| {
            for (seed, algorithm) in [(0, Algorithm::Direct), (1, Algorithm::Pull)] {
                let seed = 100 * seed + ranks as u64;
                random_starts::<u64>(group, seed, algorithm, |value| value)?;
                random_starts::<u8>(group, seed + 10, algorithm, |value| (value % 251) as u8)?;
                random_starts::<i16>(group, seed + 20, algorithm, |value| (value % 32749) as i16)?;
                random_starts::<f64>(group, seed + 30, algorithm, |value| value as f64)?;
            }
            Ok(())
        });
    }
}

#[test]
fn nodes_and_engines_that_queue_no_waits_make_no_difference() {
    for nodes in [&[0; 3][..], &[0, 0, 1, 1], &[0, 1, 1, 2, 1]] {
        let topology = Topology::of_nodes(nodes).unwrap();
        for (seed, waits) in (50..).zip(WAITS) {
            in_tiers(&topology, waits, |group| {
                random_starts::<u32>(group, seed, Algorithm::Direct, |value| value as u32)
            });
        }
    }
}

#[test]
fn memory_for_nothing_is_enough_for_starts_without_data() {
    in_group(3, |group| {
        let mut nothing = group.all_to_all_v::<u32>(0, 0).prepare()?;
        assert_eq!(nothing.run(&[0; 3])?, [0; 3]);
        assert_eq!(nothing.output()?, [0; 0]);

        let mut receives_nothing = group.all_to_all_v::<u32>(5, 0).prepare()?;
        assert_eq!(receives_nothing.run(&[0; 3])?, [0; 3]);
        let error = receives_nothing.run(&[0, 1, 0]).unwrap_err();
        assert!(error.to_string().contains("rank 1 receives 3 elements, expected at most 0"));
        Ok(())
    });
}

#[test]
fn the_type_can_be_chosen_at_run_time_and_buffers_can_be_the_callers() {
    in_group(2, |group| {
        let me = group.rank().index();
        let mut untyped = group.untyped_all_to_all_v(DType::U16, 3, 4).prepare()?;
        untyped.input_bytes_mut()?.copy_from_slice(&[1, 1, 2, 2, 3, 3]);
        untyped.run(&[1, 2])?;
        let expected: &[u8] = if me == 0 { &[1, 1, 1, 1] } else { &[2, 2, 3, 3, 2, 2, 3, 3] };
        assert_eq!(untyped.output_bytes()?, expected);
        assert_eq!(untyped.dtype(), DType::U16);

        let (input, output) = (group.allocate::<u32>(2)?, group.allocate::<u32>(4)?);
        let builder = group.all_to_all_v(2, 4).input(input).output(output).label("dispatch");
        let mut exchange = builder.prepare()?;
        exchange.input_mut()?.fill(me as u32);
        assert_eq!(exchange.run(&[1, 1])?, [1, 1]);
        assert_eq!(exchange.output()?, [0, 1]);
        assert_eq!(exchange.output_memory().bytes, 8);
        assert_eq!(exchange.output_memory_of(Rank(1))?.bytes, 4);
        assert_eq!(exchange.input_memory()?.bytes, 8);
        Ok(())
    });
}

/// The lists that a rank gives to a start.
struct Given {
    send: Vec<usize>,
    displacements: Option<Vec<usize>>,
    receive: Option<Vec<usize>>,
}

impl Given {
    /// Draws lists that are often wrong.
    fn random(rng: &mut fastrand::Rng, ranks: usize) -> Self {
        let number = |rng: &mut fastrand::Rng| match rng.u8(..40) {
            0 => usize::MAX - rng.usize(..3),
            1 => rng.usize(..30),
            _ => rng.usize(..8 / ranks.min(4)),
        };
        let mut list = |odds: u8| {
            let len = if rng.u8(..60) == 0 { rng.usize(..ranks + 2) } else { ranks };
            (rng.u8(..odds) == 0).then(|| (0..len).map(|_| number(rng)).collect())
        };
        let send = list(1).unwrap_or_default();
        Self { send, displacements: list(6), receive: list(20) }
    }

    /// Returns whether a rank may give these lists for an input of `send_max` elements.
    fn is_right(&self, ranks: usize, send_max: usize) -> bool {
        let lists = [Some(&self.send), self.displacements.as_ref(), self.receive.as_ref()];
        if lists.into_iter().flatten().any(|list| list.len() != ranks) {
            return false;
        }
        let sum = self.send.iter().map(|&count| count as u128).sum::<u128>();
        if sum > send_max as u128 {
            return false;
        }

        let Some(displacements) = &self.displacements else { return true };
        let mut used = vec![false; send_max];
        for (&begin, &count) in displacements.iter().zip(&self.send) {
            for element in 0..count {
                match begin.checked_add(element).and_then(|element| used.get_mut(element)) {
                    Some(used) if !*used => *used = true,
                    _ => return false,
                }
            }
        }
        true
    }
}

/// Returns the kind of the error that a rank returns, and the rank that it names.
fn expected_error(
    given: &[Given],
    me: usize,
    (send_max, receive_max): (usize, usize),
) -> Option<(ErrorKind, Option<Rank>)> {
    let ranks = given.len();
    if !given[me].is_right(ranks, send_max) {
        return Some((ErrorKind::InvalidArgument, None));
    }
    if let Some(wrong) = given.iter().position(|lists| !lists.is_right(ranks, send_max)) {
        return Some((ErrorKind::Aborted, Some(Rank::at(wrong))));
    }

    let came = |to: usize| given.iter().map(|lists| lists.send[to]).collect::<Vec<_>>();
    let differs = |to: &usize| given[*to].receive.as_ref().is_some_and(|list| *list != came(*to));
    if let Some(to) = (0..ranks).find(differs) {
        return Some((ErrorKind::Mismatch, Some(Rank::at(to))));
    }
    let full = (0..ranks).find(|to| came(*to).iter().sum::<usize>() > receive_max);
    full.map(|to| (ErrorKind::InvalidArgument, Some(Rank::at(to))))
}

/// Ranks give random lists, right and wrong ones. Every start moves the data of all ranks, or is an
/// error on all ranks.
#[test]
fn any_lists_are_refused_alike_or_move_what_they_say() {
    for ranks in 1..=5 {
        let refused: Vec<usize> = in_group(ranks, |group| {
            let me = group.rank().index();
            let most = (9, 9);
            let mut exchange = group.all_to_all_v::<u64>(most.0, most.1).prepare()?;
            let rng = &mut fastrand::Rng::with_seed(ranks as u64);
            let mut last = Vec::new();
            let mut refused = 0;

            for start in 0..300 {
                let given: Vec<_> = (0..ranks).map(|_| Given::random(rng, ranks)).collect();
                let input = |rank: usize| (0..most.0).map(move |at| value(start, rank, 0, at));
                for (element, value) in exchange.input_mut()?.iter_mut().zip(input(me)) {
                    *element = value;
                }

                let Given { send, displacements, receive } = &given[me];
                let mut counts = SendCounts::new(send);
                if let Some(displacements) = displacements {
                    counts = counts.displacements(displacements);
                }
                if let Some(receive) = receive {
                    counts = counts.receive_counts(receive);
                }
                let result = exchange.run(counts).map(drop);

                let expected = expected_error(&given, me, most);
                let found = result.err().map(|error| (error.kind(), error.peer()));
                assert_eq!(found, expected, "{ranks} ranks, start {start}");
                if expected.is_none() {
                    last.clear();
                    for (from, lists) in given.iter().enumerate() {
                        let packed = lists.send[..me].iter().sum();
                        let begin = lists.displacements.as_ref().map_or(packed, |list| list[me]);
                        last.extend(input(from).skip(begin).take(lists.send[me]));
                    }
                }
                refused += usize::from(expected.is_some());
                assert_eq!(exchange.output()?, last, "{ranks} ranks, start {start}");
            }
            Ok(refused)
        });
        assert!(refused.iter().all(|refused| (30..270).contains(refused)), "{refused:?}");
    }
}

/// Starts with counts that are right, and checks that they arrive.
fn works(exchange: &mut AllToAllV<u32>, me: usize, ranks: usize) -> Result<(), Error> {
    exchange.input_mut()?.fill(me as u32);
    assert_eq!(exchange.run(&vec![1; ranks])?, vec![1; ranks]);
    let expected: Vec<u32> = (0..ranks as u32).collect();
    assert_eq!(exchange.output()?, expected);
    Ok(())
}

/// A rank refuses its own counts, and all ranks return an error that names it. The output of the
/// last start is as before, and the next start works.
#[test]
fn counts_that_one_rank_refuses_are_an_error_on_all_ranks() {
    const MAX: usize = usize::MAX;
    type Lists = (&'static [usize], Option<&'static [usize]>, Option<&'static [usize]>);
    let wrong: [(Lists, &str); 8] = [
        ((&[5, 5, 1], None, None), "1 elements are sent to rank 2 and 10 to lower ranks"),
        ((&[MAX, 1, 0], None, None), "18446744073709551615 elements are sent to rank 0"),
        ((&[1, MAX, 0], None, None), "18446744073709551615 elements are sent to rank 1"),
        ((&[1, 1], None, None), "there are 2 send counts, expected 3, one for each rank"),
        ((&[2, 2, 2], Some(&[0, 1, 4]), None), "the blocks for ranks 0 and 1 overlap"),
        ((&[2, 2, 2], Some(&[0, 2, 9]), None), "is 2 elements from element 9 of the input"),
        ((&[2, 2, 2], Some(&[0, 2, MAX]), None), "is 2 elements from element 184467440"),
        ((&[1, 1, 1], Some(&[0, 1, 2]), Some(&[1; 4])), "there are 4 receive counts, expected 3"),
    ];
    for guilty in 0..3 {
        in_group(3, |group| {
            let me = group.rank().index();
            let mut exchange = group.all_to_all_v::<u32>(10, 20).prepare()?;
            works(&mut exchange, me, 3)?;
            for ((send, displacements, receive), reason) in &wrong {
                let mut counts = SendCounts::new(if me == guilty { send } else { &[1, 1, 1] });
                if let Some(displacements) = displacements.filter(|_| me == guilty) {
                    counts = counts.displacements(displacements);
                }
                if let Some(receive) = receive.filter(|_| me == guilty) {
                    counts = counts.receive_counts(receive);
                }
                exchange.input_mut()?.fill(77);
                let error = exchange.run(counts).unwrap_err();
                let text = error.to_string();
                assert!(text.contains(reason), "{text}");
                if me == guilty {
                    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
                } else {
                    let named = (error.kind(), error.peer());
                    assert_eq!(named, (ErrorKind::Aborted, Some(Rank::at(guilty))), "{text}");
                    assert!(text.contains(&format!("rank {guilty} failed")), "{text}");
                }
                assert_eq!(exchange.output()?, [0, 1, 2], "nothing has moved");
                assert_eq!(exchange.received_counts(), [1, 1, 1]);
            }
            works(&mut exchange, me, 3)
        });
    }
}

#[test]
fn an_output_without_room_and_counts_that_differ_are_named_alike_on_all_ranks() {
    let texts = in_group(3, |group| {
        let me = group.rank().index();
        let mut exchange = group.all_to_all_v::<u32>(10, 12).label("dispatch").prepare()?;
        let too_many = exchange.run(&[0, 5, 1]).unwrap_err();
        assert_eq!(too_many.kind(), ErrorKind::InvalidArgument);
        assert_eq!(too_many.peer(), Some(Rank(1)));
        works(&mut exchange, me, 3)?;

        let expected = if me == 2 { [1, 3, 1] } else { [1; 3] };
        let differs = exchange.run(SendCounts::new(&[1; 3]).receive_counts(&expected)).unwrap_err();
        assert_eq!((differs.kind(), differs.peer()), (ErrorKind::Mismatch, Some(Rank(2))));
        works(&mut exchange, me, 3)?;
        Ok(format!("{too_many}\n{differs}"))
    });
    assert!(texts.iter().all(|text| *text == texts[0]));
    insta::assert_snapshot!(texts[0], @r#"
    all-to-all-v 1 "dispatch", start 1: rank 1 receives 15 elements, expected at most 12, for which the operation was prepared
    all-to-all-v 1 "dispatch", start 3: ranks disagree: rank 1 sends 1 elements to rank 2, which expects 3
    "#);
}

#[test]
fn totals_that_differ_or_exceed_the_address_space_are_refused() {
    let texts = in_group(2, |group| {
        let most = if group.rank() == Rank(0) { 10 } else { 11 };
        let differ = group.all_to_all_v::<u32>(10, most).prepare().unwrap_err();
        let long = group.all_to_all_v::<u32>(usize::MAX / 2, 1).prepare().unwrap_err();
        group.all_to_all_v::<u32>(1, 1).prepare()?;
        Ok(format!("{differ}\n{long}"))
    });
    insta::assert_snapshot!(texts[0], @r"
    2 operations 1: ranks disagree: all-to-all 1.2, bytes of the output is 44 on rank 1, 40 on rank 0
    send_max is 9223372036854775807 elements of u32, which exceed the address space
    ");
}

/// The next start of the host needs no flags that say that an output is free, so a rank tells its
/// counts when its last start is complete, and not before.
#[test]
fn a_late_block_of_a_start_that_nobody_waits_for_does_not_reach_the_next_one() {
    const LATE_BYTES: usize = 50_000;
    let outputs = in_process::run(3, |bootstrap| {
        let me = bootstrap.rank();
        let fabric = host::Fabric::open(me, bootstrap.ranks())?;
        // A block of rank 2 takes 50 ms.
        let bytes_per_second = if me == Rank(2) { 1e6 } else { f64::INFINITY };
        let slow = ThrottleLayer { bytes_per_second, delay: Duration::ZERO };
        let mut group = Group::open(bootstrap, Wrapped::new(fabric, slow))?;
        let mut exchange = group.all_to_all_v::<u8>(LATE_BYTES + 1, LATE_BYTES + 1).prepare()?;
        exchange.input_mut()?.fill(me.0 as u8 + 1);

        let late = if me == Rank(2) { [1, LATE_BYTES, 0] } else { [0; 3] };
        drop(exchange.start(&late)?);
        exchange.run(if me == Rank(0) { &[0, 10, 0] } else { &[0; 3] })?;
        let output = exchange.output()?.to_vec();
        drop(exchange);
        group.close()?;
        Ok(output)
    });
    assert_eq!(outputs.unwrap(), [vec![], vec![1; 10], vec![]]);
}

/// A rank that does not come is blamed by all that wait for its counts.
///
/// Of the ranks that have not come when the timeout passes, the first is blamed, so it is rank 0 whenever the others come.
#[test]
fn a_rank_that_does_not_start_is_named() {
    let errors = in_process::run(3, |bootstrap| {
        let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
        let mut group = Group::open(bootstrap, fabric)?;
        let builder = group.all_to_all_v::<u32>(10, 10);
        let mut exchange = builder.timeout(Duration::from_millis(500)).prepare()?;
        if group.rank() == Rank(0) {
            let begun = Instant::now();
            while group.abort_record().is_none() {
                assert!(begun.elapsed() < LIMIT, "the group has not ended");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        Ok(exchange.run(&[1; 3]).map(drop))
    });
    for (rank, result) in errors.unwrap().into_iter().enumerate() {
        let error = result.expect_err("rank 0 came too late");
        assert!(rank == 0 || error.peer() == Some(Rank(0)), "{error}");
        assert!(error.to_string().contains("counts of an all-to-all-v"), "{error}");
    }
}
