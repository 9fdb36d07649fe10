//! Tests operations whose starts have lengths and places of their own.

use std::time::Duration;

use peerlane_collectives::bootstrap::{Bootstrap, in_process};
use peerlane_collectives::collective::Collective;
use peerlane_collectives::cost::Links;
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{BlockLens, Group, GroupOptions, Operation, Part};
use peerlane_collectives::plan::Algorithm;
use peerlane_hal::{ErrorKind, LinkKind, Rank};
use peerlane_host as host;

use crate::support::group::{in_group, placed};

const LEN_MAX: usize = 300;

/// The element that `from` provides for `to` in a start.
fn value(seed: u64, from: Rank, to: Rank, index: usize) -> i32 {
    (seed as i32).wrapping_mul(7919) + (100_000 * from.0 + 1000 * to.0) as i32 + index as i32
}

/// The rank for which a block of `collective` is meant: all of them get the same, or each its own.
fn receiver(collective: Collective, to: Rank) -> Rank {
    if collective.has_equal_outputs() { Rank(0) } else { to }
}

fn input(collective: Collective, seed: u64, me: Rank, lens: &[usize]) -> Vec<i32> {
    let block = |to: Rank, len: usize| (0..len).map(move |index| value(seed, me, to, index));
    if !collective.is_provider(me) {
        Vec::new()
    } else if collective.has_equal_outputs() {
        block(Rank(0), lens[me.index()]).collect()
    } else {
        Rank::all(lens.len()).flat_map(|to| block(to, lens[to.index()])).collect()
    }
}

fn output(collective: Collective, seed: u64, me: Rank, lens: &[usize]) -> Vec<i32> {
    let block = |from: Rank| {
        let len = lens[if collective.has_equal_outputs() { from } else { me }.index()];
        (0..len).map(move |index| value(seed, from, receiver(collective, me), index))
    };
    if !collective.is_receiver(me) {
        return Vec::new();
    }
    Rank::all(lens.len()).filter(|from| collective.is_provider(*from)).flat_map(block).collect()
}

/// Runs starts of random lengths and places, with the same random numbers on all ranks.
fn random_starts(group: &mut Group, seed: u64) -> Result<(), Error> {
    let rng = &mut fastrand::Rng::with_seed(seed);
    let (me, ranks) = (group.rank(), group.ranks());
    let root = Rank(rng.u32(..ranks as u32));
    let [direct, pull, ring] = [Algorithm::Direct, Algorithm::Pull, Algorithm::Ring];
    // The starts of recursive doubling have copies of several blocks.
    let get_ring = Algorithm::GetRing;
    let of_all_gather =
        [direct, pull, ring, Algorithm::DoubleRing, get_ring, Algorithm::RecursiveDoubling];
    let of_all_gather = &of_all_gather[..if ranks.is_power_of_two() { 6 } else { 5 }];
    let cases: [(Collective, &[Algorithm]); 5] = [
        (Collective::AllGather, of_all_gather),
        (Collective::Broadcast { root }, &[direct, pull, ring, get_ring]),
        (Collective::Gather { root }, &[direct, pull]),
        (Collective::Scatter { root }, &[direct, pull]),
        (Collective::AllToAll, &[direct, pull]),
    ];
    let (collective, algorithms) = *rng.choice(&cases).unwrap();
    let (algorithm, chunks) = (*rng.choice(algorithms).unwrap(), rng.u32(1..=4));
    let in_place =
        rng.bool() && matches!(collective, Collective::AllGather | Collective::Broadcast { .. });
    let uneven = rng.bool() && collective != Collective::AllToAll;
    let prepared: Vec<usize> = match uneven {
        true => (0..ranks).map(|_| rng.usize(..LEN_MAX)).collect(),
        false => vec![rng.usize(1..LEN_MAX); ranks],
    };
    let windows = rng.bool();
    let context = format!(
        "seed {seed}: {collective}, {algorithm}, {ranks} ranks, {chunks} chunks, in place {in_place}, lengths \
         {prepared:?}, windows {windows}"
    );
    let window_len = LEN_MAX * ranks + 50;
    let [source, target] = [group.window::<i32>(window_len)?, group.window::<i32>(window_len)?];
    let lens: BlockLens = if uneven { prepared.clone().into() } else { prepared[0].into() };
    let builder =
        group.operation::<i32>(collective, lens).algorithm(algorithm).chunks(chunks).resizable();
    let builder = placed(builder, windows.then_some([&source, &target]), in_place);
    let mut operation = builder.prepare()?;
    for start in 0..20 {
        let lens: Vec<usize> = match uneven {
            true => prepared.iter().map(|&most| rng.usize(..=most)).collect(),
            false => vec![rng.usize(..=prepared[0]); ranks],
        };
        // In buffers of its own, an all-gather of shorter blocks has room before them.
        let spare = if windows {
            [49; 2]
        } else if collective == Collective::AllGather && !uneven {
            let spare = prepared[0] - lens[0];
            [spare, ranks * spare]
        } else {
            [0; 2]
        };
        let [begin, end] = spare.map(|spare| rng.usize(..=spare));
        let part = if uneven { Part::lens(&lens) } else { Part::len(lens[0]) };
        let part = part.output(end);
        let part = if in_place { part } else { part.input(begin) };
        operation.resize(part)?;
        let data = seed + 1000 * start;
        let (wanted, given) =
            (output(collective, data, me, &lens), input(collective, data, me, &lens));
        // In place, the input is the block of this rank in the output.
        let is_gathered = collective == Collective::AllGather && in_place;
        let skip = if is_gathered { lens[..me.index()].iter().sum() } else { 0 };
        if windows {
            target.slice_mut(0..window_len)?.fill(i32::MAX);
            let (window, at) = if in_place { (&target, end + skip) } else { (&source, begin) };
            window.slice_mut(at..at + given.len())?.copy_from_slice(&given);
        } else {
            operation.input_mut()?.copy_from_slice(&given);
        }
        operation.run()?;
        if windows {
            let all = target.slice(0..window_len)?;
            assert_eq!(
                all[end..end + wanted.len()],
                wanted[..],
                "{context}, start {start}, {lens:?}"
            );
            let around = all[..end].iter().chain(&all[end + wanted.len()..]);
            assert!(around.copied().all(|other| other == i32::MAX), "{context}, start {start}");
        } else {
            assert_eq!(operation.output()?, wanted, "{context}, start {start}, {lens:?}");
        }
    }
    Ok(())
}

#[test]
fn starts_of_any_length_and_place_move_the_right_bytes() {
    for ranks in 1..=8 {
        in_group(ranks, |group| {
            (0..10).try_for_each(|round| random_starts(group, 8 * round + ranks as u64))
        });
    }
}

#[test]
fn blocks_of_pairs_stay_where_they_were_prepared() {
    for ranks in 1..=5 {
        in_group(ranks, |group| {
            let me = group.rank().index();
            let most = |from: usize, to: usize| 10 + 3 * from + to;
            let send: Vec<_> = (0..ranks).map(|to| most(me, to)).collect();
            let receive: Vec<_> = (0..ranks).map(|from| most(from, me)).collect();
            for algorithm in [Algorithm::Direct, Algorithm::Pull] {
                let lens = BlockLens::send_receive(&send, &receive);
                let exchange = group.all_to_all::<i32>(lens).algorithm(algorithm);
                let mut exchange = exchange.resizable().prepare()?;
                for step in 0..10 {
                    let len = |from: usize, to: usize| {
                        (7 * step + 5 * from + 3 * to) % (most(from, to) + 1)
                    };
                    let now = |of: &dyn Fn(usize) -> usize| (0..ranks).map(of).collect::<Vec<_>>();
                    let (sent, received) = (now(&|to| len(me, to)), now(&|from| len(from, me)));
                    let part = Part::send_receive(&sent, &received);
                    let input = exchange.resize(part)?.input_mut()?;
                    let mut begin = 0;
                    for to in 0..ranks {
                        input[begin..begin + sent[to]].fill((1000 * step + 10 * me + to) as i32);
                        begin += send[to];
                    }
                    exchange.run()?;
                    for from in 0..ranks {
                        let block = exchange.output_of(Rank::at(from))?;
                        assert_eq!(
                            block,
                            vec![(1000 * step + 10 * from + me) as i32; len(from, me)]
                        );
                    }
                }
            }
            Ok(())
        });
    }
}

/// What one rank sends another is not what the other expects. Both find it in the first start, and no other rank is named.
#[test]
fn lengths_of_pairs_that_differ_are_named() {
    /// Sent by rank 0 to rank 1, and expected there.
    const CASES: [(usize, usize); 5] = [(8, 2), (2, 8), (0, 1), (256, 128), (1, 0)];
    for (ranks, algorithm) in
        (2..=4).flat_map(|ranks| [Algorithm::Direct, Algorithm::Pull].map(|one| (ranks, one)))
    {
        for (sent, expected) in CASES {
            let errors = in_process::run(ranks, |bootstrap| {
                let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
                let mut group = Group::open(bootstrap, fabric)?;
                let lens = vec![300; ranks];
                let exchange = group.all_to_all::<i32>(BlockLens::send_receive(&lens, &lens));
                let mut exchange = exchange.algorithm(algorithm).resizable().prepare()?;

                let (mut send, mut receive) = (vec![5; ranks], vec![5; ranks]);
                exchange.resize(Part::send_receive(&send, &receive))?.run()?;
                match group.rank() {
                    Rank(0) => send[1] = sent,
                    Rank(1) => receive[0] = expected,
                    _ => {}
                }
                let part = Part::send_receive(&send, &receive);
                // Ranks that the lengths do not concern learn of the end in their next call.
                let run = exchange.resize(part)?.run().and_then(|()| group.barrier());
                let error = run.expect_err("the lengths differ");
                Ok((error.kind(), error.to_string()))
            });
            let errors = errors.unwrap();
            for (kind, text) in &errors {
                assert_eq!(*kind, ErrorKind::Mismatch, "{text}");
                assert!(text.contains("all-to-all 1, start 2: ranks disagree"), "{text}");
                let of_0 = format!("{sent} elements for rank 1 and 5 elements from rank 1");
                let of_1 = format!("5 elements for rank 0 and {expected} elements from rank 0");
                assert!(text.contains(&of_0) && text.contains(&of_1), "{text}");
            }
        }
    }
}

/// Memory that is not registered is copied through that of the operation.
#[test]
fn any_memory_can_be_used() {
    let texts = in_group(3, |group| {
        let me = group.rank().0 as i32;
        let mut gather = gather(group, 10)?;
        for len in [10, 3, 0] {
            let (input, mut output) = (vec![me; len], vec![-1; 3 * len]);
            gather.resize(len)?.run_with(&input, &mut output)?;
            assert_eq!(output, [vec![0; len], vec![1; len], vec![2; len]].concat());
        }
        gather.resize(2)?;
        let mut texts = vec![said(gather.run_with(&[1; 3], &mut [0; 6]))];
        texts.push(said(gather.run_with(&[1; 2], &mut [0; 5])));
        let mut strict = group.all_gather::<i32>(1).strict(true).prepare()?;
        let error = strict.run_with(&[1], &mut [0; 3]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        texts.push(error.to_string());
        Ok(texts.join("\n"))
    });
    insta::assert_snapshot!(texts[0], @r"
    the input has 3 elements, expected 2
    the output has 5 elements, expected 6
    strict is set, but `run_with` copies input and output through the memory of the operation; fill `input_mut`, use a window over registered memory, or turn strict off
    ");
}

fn gather(group: &mut Group, len: usize) -> Result<Operation<i32>, Error> {
    group.all_gather::<i32>(len).resizable().prepare()
}

fn said<T>(result: Result<T, Error>) -> String {
    let error = result.err().expect("an error");
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    error.to_string()
}

#[test]
fn bad_lengths_and_places_are_refused_and_change_nothing() {
    let texts = in_group(2, |group| {
        let mut fixed = group.all_gather::<i32>(4).prepare()?;
        let mut texts = vec![said(fixed.resize(1))];
        let mut gather = gather(group, 100)?;
        texts.push(said(gather.resize(101)));
        texts.push(said(gather.resize(&[1, 2, 3][..])));
        texts.push(said(gather.resize(Part::len(50).output(101))));
        texts.push(said(gather.resize(Part::len(1).input(usize::MAX))));
        texts.push(said(gather.resize(Part::send_receive(&[1, 1], &[1, 1]))));
        gather.input_mut()?.fill(3);
        gather.run()?;
        assert_eq!(gather.output()?, [3; 200]);
        let window = group.window::<i32>(100)?;
        let over = group.all_gather::<i32>(10).input_from(&window, 0).output_into(&window, 50);
        let mut over = over.resizable().prepare()?;
        texts.push(said(over.resize(Part::len(10).input(45))));
        texts.push(said(over.resize(Part::len(10).output(81))));
        texts.push(said(over.resize(usize::MAX)));
        texts.push(said(group.all_gather::<i32>(1).trace(true).resizable().prepare()));
        Ok(texts.join("\n"))
    });
    assert_eq!(texts[0], texts[1]);
    insta::assert_snapshot!(texts[0], @r"
    the operation is not resizable; prepare it with `resizable()`
    the block of rank 0 is 101 elements, expected at most the 100 elements for which the operation was prepared
    lens has 3 lengths, expected 2, one for each rank
    the output is 100 elements from element 101, expected a range within 0..200, the elements of its buffer or window
    the input is 1 elements from element 18446744073709551615, expected a range within 0..100, the elements of its buffer or window
    the lengths do not have the form with which the operation was prepared; expected one length, or one for each rank, for an all-gather
    input and output overlap: the input is bytes 180 to 220 of window 1, the output is bytes 200 to 280 of the same window
    the output is 20 elements from element 81, expected a range within 0..100, the elements of its buffer or window
    the block of rank 0 is 576460752303423487 elements, expected at most the 10 elements for which the operation was prepared
    trace is set, expected it off for an operation that is resizable
    ");
}

/// Both ranks get an error that names both and their values.
#[test]
fn starts_that_differ_between_ranks_are_named() {
    type Change = fn(Part<'static>) -> Part<'static>;
    let changes: [(Change, &str); 3] = [
        (|_| Part::len(9), "blocks of 9 elements, the input at element 0, the output at element 0"),
        (
            |part| part.input(3),
            "blocks of 10 elements, the input at element 3, the output at element 0",
        ),
        (
            |part| part.output(5),
            "blocks of 10 elements, the input at element 0, the output at element 5",
        ),
    ];
    for (ranks, (change, shown)) in (2..=4).flat_map(|ranks| changes.map(|change| (ranks, change)))
    {
        let errors = in_process::run(ranks, |bootstrap| {
            let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
            let mut group = Group::open(bootstrap, fabric)?;
            let mut gather = gather(&mut group, 1000)?;
            gather.resize(10)?.run()?;
            let part = Part::len(10);
            let part = if group.rank() == Rank(1) { change(part) } else { part };
            Ok(gather.resize(part)?.run().expect_err("the lengths differ"))
        });
        for error in errors.unwrap() {
            let text = error.to_string();
            assert_eq!(error.kind(), ErrorKind::Mismatch, "{text}");
            assert!(text.contains("all-gather 1, start "), "{text}");
            assert!(text.contains(shown), "{text}");
            assert!(text.contains("rank 1") && text.contains("ranks disagree"), "{text}");
            let other =
                "with blocks of 10 elements, the input at element 0, the output at element 0";
            assert!(text.contains(other), "{text}");
        }
    }
}

/// Links so slow that the best plan changes at sizes of a test.
fn slow_links() -> Links {
    let mut links = Links::of_kinds(LinkKind::NvLink, LinkKind::Rdma);
    for link in [&mut links.own, &mut links.local] {
        link.bytes_per_second /= 1000.0;
        link.get_bytes_per_second = link.get_bytes_per_second.map(|rate| rate / 1000.0);
        link.engine_bytes_per_second /= 1000.0;
        link.send_bytes_per_second /= 1000.0;
        link.receive_bytes_per_second /= 1000.0;
    }
    links
}

fn broadcast(group: &mut Group, len: usize) -> Result<Operation<i32>, Error> {
    group.broadcast::<i32>(Rank(0), len).links(slow_links()).resizable().prepare()
}

/// The plan of each start is the best one for its size.
#[test]
fn starts_of_different_sizes_use_different_plans() {
    for ranks in 3..=5 {
        in_group(ranks, |group| {
            let rng = &mut fastrand::Rng::with_seed(ranks as u64);
            let len_max = 60_000;
            let mut broadcast = broadcast(group, len_max)?;
            let report = broadcast.report();
            // Long blocks leave the root once, and short ones go to each rank at once.
            let longest = report.algorithm;
            let leaves_once = [Algorithm::Ring, Algorithm::ScatterAllGather].contains(&longest);
            let other = report.shorter.iter().find(|plan| plan.algorithm != longest);
            assert!(leaves_once && other.is_some(), "{report}");
            for start in 0..200 {
                let len = if rng.bool() { rng.usize(..100) } else { rng.usize(..=len_max) };
                broadcast.resize(len)?;
                let value = |index: usize| 1000 * start + index as i32;
                for (index, element) in broadcast.input_mut()?.iter_mut().enumerate() {
                    *element = value(index);
                }
                // A start that nobody waits for is complete before the next one uses its memory.
                if rng.u8(..4) == 0 {
                    drop(broadcast.start()?);
                } else {
                    broadcast.run()?;
                    let output = broadcast.output()?;
                    assert_eq!(output.len(), len);
                    let is_right = |(index, element): (usize, &i32)| *element == value(index);
                    assert!(
                        output.iter().enumerate().all(is_right),
                        "start {start}, {len} elements"
                    );
                }
            }
            Ok(())
        });
    }
}

/// The ranks wait for flags of different plans, so they find that out when the deadline passes, at the latest.
#[test]
fn starts_with_different_plans_are_named() {
    let errors = in_process::run(3, |bootstrap| {
        let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
        let mut group =
            GroupOptions::default().timeout(Duration::from_secs(2)).open(bootstrap, fabric)?;
        let len_max = 60_000;
        let mut broadcast = broadcast(&mut group, len_max)?;
        broadcast.resize(10)?.run()?;
        let len = if group.rank() == Rank(1) { len_max } else { 10 };
        let mut run = || (0..20).try_for_each(|_| broadcast.resize(len)?.run());
        Ok(run().expect_err("the lengths differ"))
    });
    for error in errors.unwrap() {
        let text = error.to_string();
        assert_eq!(error.kind(), ErrorKind::Mismatch, "{text}");
        assert!(text.contains("blocks of 10 ") && text.contains("blocks of 60000 "), "{text}");
    }
}
