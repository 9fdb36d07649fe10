//! Starts every collective as one launch: at once, on a stream and in graphs, with equal and with
//! different blocks.

use peerlane_collectives::collective::Collective;
use peerlane_collectives::cost::Transfer;
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{BlockLens, Destination, GroupOptions, Operation};
use peerlane_collectives::plan::Algorithm;
use peerlane_hal::{ErrorKind, Rank};
use peerlane_tests::Outcome;

use super::Case;
use super::captured::fused_is_missing;
use super::reductions::{Book, Part, Shape};
use crate::support::data::{check, unexpected};
use crate::support::test_rank::{TIMEOUT, TestRank, open_group_with};
use crate::vendor::FUSED;
use crate::vendor::stream::CallerStream;

/// The number of elements of a block: of part of a word of tagged data, of few words, of several
/// blocks of threads, and more than tagged data has at most.
const LENGTHS: [usize; 4] = [1, 61, 3001, 40_002];
const STARTS: usize = 4;
/// The numbers of rounds of broadcasts, with those of elements. The first ones leave some ranks
/// without a part.
const ROUNDS: [(u32, usize); 4] = [(1, 7), (1, 3001), (2, 40_002), (3, 30_000)];
/// The lengths of starts of one operation, from the one for which it is prepared on.
const RESIZED: [usize; 6] = [20_001, 1, 0, 777, 20_000, 16];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Goal {
    AllGather,
    Broadcast,
    AllToAll,
    Gather,
    Scatter,
    ReduceScatter,
    AllReduce,
    Reduce,
    Scan,
    Exscan,
}

const GOALS: [Goal; 10] = [
    Goal::AllGather,
    Goal::Broadcast,
    Goal::AllToAll,
    Goal::Gather,
    Goal::Scatter,
    Goal::ReduceScatter,
    Goal::AllReduce,
    Goal::Reduce,
    Goal::Scan,
    Goal::Exscan,
];

impl Goal {
    /// Returns whether ranks can have blocks of different lengths.
    fn has_blocks(self) -> bool {
        !matches!(
            self,
            Self::Broadcast | Self::AllReduce | Self::Reduce | Self::Scan | Self::Exscan
        )
    }

    /// Returns whether the collective can run in place.
    fn runs_in_place(self) -> bool {
        matches!(self, Self::AllGather | Self::Broadcast | Self::AllReduce)
    }
}

/// How an operation is prepared.
#[derive(Clone, Copy, Debug)]
struct Variant {
    goal: Goal,
    transfer: Transfer,
    len: usize,
    /// Whether the blocks of ranks differ.
    differs: bool,
    in_place: bool,
    captured: bool,
    /// The number of rounds in which the root of a broadcast sends parts, if it does.
    rounds: Option<u32>,
}

pub(crate) fn cases(ranks: usize) -> Vec<Case> {
    if FUSED.is_none() || ranks == 1 {
        return Vec::new();
    }

    let mut cases = Vec::new();
    for (index, goal) in GOALS.into_iter().enumerate() {
        for (number, len) in LENGTHS.into_iter().enumerate() {
            for transfer in Transfer::ALL {
                // Every third of the other combinations, another one for each length.
                let turn = index + number;
                let differs = goal.has_blocks() && turn.is_multiple_of(2);
                let in_place = goal.runs_in_place() && turn % 3 == 1;
                for captured in [false, true] {
                    let rounds = None;
                    let variant =
                        Variant { goal, transfer, len, differs, in_place, captured, rounds };
                    let name = format!("{variant:?}");
                    cases.push(Case::new(name, move |test_rank| run(test_rank, variant)));
                }
            }
        }
    }
    for goal in GOALS {
        for captured in [false, true] {
            let name = format!("{goal:?} of other lengths, captured: {captured}");
            let (differs, transfer) = (false, Transfer::Direct);
            let in_place = goal == Goal::AllReduce && captured;
            let (len, rounds) = (RESIZED[0], None);
            let variant = Variant { goal, transfer, len, differs, in_place, captured, rounds };
            cases.push(Case::new(name, move |test_rank| resized(test_rank, variant)));
        }
    }
    for goal in [Goal::AllGather, Goal::Broadcast, Goal::AllReduce] {
        let name = format!("{goal:?} of several tensors");
        cases.push(Case::new(name, move |test_rank| several_tensors(test_rank, goal)));
    }
    if ranks > 2 {
        for (number, (rounds, len)) in ROUNDS.into_iter().enumerate() {
            for captured in [false, true] {
                let variant = Variant {
                    goal: Goal::Broadcast,
                    transfer: Transfer::Direct,
                    len,
                    differs: false,
                    in_place: number % 2 == 1,
                    captured,
                    rounds: Some(rounds),
                };
                let name = format!("{variant:?}");
                cases.push(Case::new(name, move |test_rank| run(test_rank, variant)));
            }
        }
    }
    cases.push(Case::new("a list of destinations", to_a_list));
    cases.push(Case::new("random starts", random_starts));
    cases.push(Case::new("64 operations in flight", many_in_flight));
    cases.push(Case::new("two groups in different orders", two_groups));
    cases.push(Case::new("other lengths on another rank", disagreeing));
    cases.retain(|case| !case.name.contains("40002") || !case.name.contains("Tagged"));
    cases
}

impl Variant {
    /// Returns whether starts of so many ranks cannot be fused so: an all-reduce in place has no
    /// tagged form, and other blocks for each pair are too many ops.
    fn is_unfit(&self, ranks: usize) -> bool {
        self.transfer == Transfer::Tagged
            && match self.goal {
                Goal::AllReduce => self.in_place,
                Goal::AllToAll => self.differs && ranks > 6,
                _ => false,
            }
    }

    /// Returns the number of elements of the block of a rank.
    fn len(&self, rank: usize) -> usize {
        if self.differs { self.len + 3 * rank } else { self.len }
    }

    /// Returns the number of elements of the block of an all-to-all from a rank to another one.
    fn pair_len(&self, from: usize, to: usize) -> usize {
        if self.differs { self.len + 3 * from + to } else { self.len }
    }

    fn lens(&self, me: usize, ranks: usize) -> BlockLens {
        match self.differs {
            true if self.goal == Goal::AllToAll => {
                let of = |pair: &dyn Fn(usize) -> usize| (0..ranks).map(pair).collect::<Vec<_>>();
                let send = of(&|peer| self.pair_len(me, peer));
                BlockLens::send_receive(&send, &of(&|peer| self.pair_len(peer, me)))
            }
            true => (0..ranks).map(|rank| self.len(rank)).collect::<Vec<_>>().into(),
            false => self.len.into(),
        }
    }

    fn shape(&self, me: usize, ranks: usize) -> Shape {
        let (root, last) = (0, ranks - 1);
        let bytes = |rank: usize| 4 * self.len(rank);
        let before = |rank: usize| (0..rank).map(bytes).sum::<usize>();
        let from =
            |rank: usize, begin: usize, bytes: usize| Part { ranks: rank..rank + 1, begin, bytes };
        let sum = |ranks, begin, bytes| vec![Part { ranks, begin, bytes }];

        let (input_bytes, parts) = match self.goal {
            Goal::AllGather => {
                (bytes(me), (0..ranks).map(|rank| from(rank, 0, bytes(rank))).collect())
            }
            Goal::Broadcast => {
                let input = if me == root { bytes(root) } else { 0 };
                (input, vec![from(root, 0, bytes(root))])
            }
            Goal::AllToAll => {
                let pair = |from, to| 4 * self.pair_len(from, to);
                let before = |rank, to| (0..to).map(|to| pair(rank, to)).sum::<usize>();
                let part = |rank| from(rank, before(rank, me), pair(rank, me));
                (before(me, ranks), (0..ranks).map(part).collect())
            }
            Goal::Gather if me != last => (bytes(me), Vec::new()),
            Goal::Gather => {
                (bytes(me), (0..ranks).map(|rank| from(rank, 0, bytes(rank))).collect())
            }
            Goal::Scatter => {
                let input = if me == root { before(ranks) } else { 0 };
                (input, vec![from(root, before(me), bytes(me))])
            }
            Goal::ReduceScatter => (before(ranks), sum(0..ranks, before(me), bytes(me))),
            Goal::AllReduce => (bytes(me), sum(0..ranks, 0, bytes(me))),
            Goal::Reduce if me != last => (bytes(me), Vec::new()),
            Goal::Reduce => (bytes(me), sum(0..ranks, 0, bytes(me))),
            Goal::Scan => (bytes(me), sum(0..me + 1, 0, bytes(me))),
            Goal::Exscan if me == 0 => (bytes(me), Vec::new()),
            Goal::Exscan => (bytes(me), sum(0..me, 0, bytes(me))),
        };
        Shape { me, input_bytes, parts }
    }

    fn prepare(&self, test_rank: &mut TestRank, resizable: bool) -> Outcome<Operation<u32>> {
        let (lens, len, last) =
            (self.lens(test_rank.me, test_rank.ranks), self.len, Rank::at(test_rank.ranks - 1));
        let group = &mut test_rank.group;
        let builder = match self.goal {
            Goal::AllGather => group.all_gather::<u32>(lens),
            Goal::Broadcast => group.broadcast(Rank(0), len),
            Goal::AllToAll => group.all_to_all(lens),
            Goal::Gather => group.gather(last, lens),
            Goal::Scatter => group.scatter(Rank(0), lens),
            Goal::ReduceScatter => group.reduce_scatter(lens),
            Goal::AllReduce => group.all_reduce(len),
            Goal::Reduce => group.reduce(last, len),
            Goal::Scan => group.scan(len),
            Goal::Exscan => group.exscan(len),
        };
        let builder = builder.transfer(self.transfer);
        let builder = match self.rounds {
            Some(rounds) => {
                let chunks = rounds * (test_rank.ranks as u32 - 1);
                builder.algorithm(Algorithm::ScatterAllGather).chunks(chunks)
            }
            None => builder,
        };
        let builder = if self.in_place { builder.in_place() } else { builder };
        let builder = if resizable { builder.resizable().check_starts(true) } else { builder };
        let builder = match self.captured {
            // SAFETY: the stream is finished before the operation is dropped, and the host borrows nothing.
            true => unsafe { builder.capturable() },
            false => builder,
        };
        builder.prepare().map_err(unexpected)
    }
}

/// Starts random operations, as many times as `PEERLANE_TEST_RANDOM_STARTS` says.
fn random_starts(test_rank: &mut TestRank) -> Outcome {
    let total: usize = std::env::var("PEERLANE_TEST_RANDOM_STARTS")
        .ok()
        .and_then(|it| it.parse().ok())
        .unwrap_or(40);
    if is_missing(test_rank) {
        return Ok(());
    }

    // Ranks draw the same numbers.
    let mut rng = fastrand::Rng::with_seed(17);
    let stream = test_rank.gpu.stream()?;
    let mut made = 0;
    while made < total {
        let goal = GOALS[rng.usize(..GOALS.len())];
        let transfer = Transfer::ALL[rng.usize(..2)];
        let len_max = if transfer == Transfer::Tagged { 3001 } else { 50_000 };
        let variant = Variant {
            goal,
            transfer,
            len: rng.usize(1..=len_max),
            differs: goal.has_blocks() && rng.bool(),
            in_place: goal.runs_in_place() && rng.bool(),
            captured: rng.u8(..4) == 0,
            rounds: None,
        };
        let starts = 2 * rng.usize(1..6);
        let by_stream: Vec<bool> = (0..starts).map(|_| rng.bool()).collect();
        if variant.is_unfit(test_rank.ranks) {
            continue;
        }

        let mut operation = variant.prepare(test_rank, false)?;
        let mut book = Book::new(test_rank, variant.shape(test_rank.me, test_rank.ranks), starts)?;
        if variant.captured {
            book.replay(test_rank, &stream, &mut operation, starts / 2)?;
        } else {
            for by_stream in by_stream {
                match by_stream {
                    true => book.start(test_rank, &stream, &mut operation)?,
                    false => book.run(test_rank, &stream, &mut operation)?,
                }
            }
        }
        stream.finish()?;
        book.check().map_err(|failure| failure.within(format!("{variant:?}")))?;
        made += starts;
    }
    Ok(())
}

fn run(test_rank: &mut TestRank, variant: Variant) -> Outcome {
    if is_missing(test_rank) || variant.is_unfit(test_rank.ranks) {
        return Ok(());
    }

    let mut operation = variant.prepare(test_rank, false)?;
    check(operation.report().launch.is_some(), || format!("not fused: {}", operation.report()))?;
    let shape = variant.shape(test_rank.me, test_rank.ranks);
    if !variant.captured {
        return start_by_turns(test_rank, &mut operation, shape);
    }

    let stream = test_rank.gpu.stream()?;
    let mut book = Book::new(test_rank, shape, STARTS)?;
    book.replay(test_rank, &stream, &mut operation, STARTS / 2)?;
    stream.finish()?;
    book.check()
}

/// Starts an operation by the host and on a stream, by turns, and checks every byte.
fn start_by_turns(
    test_rank: &mut TestRank,
    operation: &mut Operation<u32>,
    shape: Shape,
) -> Outcome {
    let stream = test_rank.gpu.stream()?;
    let mut book = Book::new(test_rank, shape, STARTS)?;
    for _ in 0..STARTS / 2 {
        book.run(test_rank, &stream, operation)?;
        book.start(test_rank, &stream, operation)?;
    }

    stream.finish()?;
    book.check()
}

/// Changes the lengths between starts. Recorded starts keep the lengths that they were recorded with.
fn resized(test_rank: &mut TestRank, variant: Variant) -> Outcome {
    if is_missing(test_rank) {
        return Ok(());
    }

    let mut operation = variant.prepare(test_rank, true)?;
    check(operation.report().launch.is_some(), || format!("not fused: {}", operation.report()))?;
    let stream = test_rank.gpu.stream()?;
    let mut books = Vec::new();
    for len in RESIZED {
        operation.resize(len).map_err(unexpected)?;
        let shape = Variant { len, ..variant }.shape(test_rank.me, test_rank.ranks);
        let mut book = Book::new(test_rank, shape, STARTS)?;
        match variant.captured {
            true => book.replay(test_rank, &stream, &mut operation, STARTS / 2)?,
            false => {
                book.run(test_rank, &stream, &mut operation)?;
                book.start(test_rank, &stream, &mut operation)?;
            }
        }
        books.push(book);
    }
    stream.finish()?;
    books.iter().try_for_each(Book::check)
}

/// Starts an operation of three tensors, whose pieces follow each other in the input of a rank.
fn several_tensors(test_rank: &mut TestRank, goal: Goal) -> Outcome {
    const LENGTHS: [usize; 3] = [3001, 5, 777];
    if is_missing(test_rank) {
        return Ok(());
    }

    let ranks = test_rank.ranks;
    let group = &mut test_rank.group;
    let lens = BlockLens::tensors(LENGTHS);
    let builder = match goal {
        Goal::AllGather => group.all_gather::<u32>(lens),
        Goal::Broadcast => group.operation(
            Collective::Broadcast { root: Rank(0) },
            BlockLens::tensors(LENGTHS.map(|len| {
                (0..ranks).map(|rank| if rank == 0 { len } else { 0 }).collect::<Vec<_>>()
            })),
        ),
        _ => group.all_reduce(lens),
    };
    let builder = builder.transfer(Transfer::Direct);
    let mut operation = builder.prepare().map_err(unexpected)?;
    check(operation.report().launch.is_some(), || format!("not fused: {}", operation.report()))?;

    let all = 4 * LENGTHS.iter().sum::<usize>();
    let before = |tensor: usize| 4 * LENGTHS[..tensor].iter().sum::<usize>();
    let pieces = (0..LENGTHS.len()).flat_map(|tensor| {
        let piece = move |rank: usize| Part {
            ranks: rank..rank + 1,
            begin: before(tensor),
            bytes: 4 * LENGTHS[tensor],
        };
        (0..ranks).map(piece)
    });
    let (input_bytes, parts) = match goal {
        Goal::AllGather => (all, pieces.collect()),
        Goal::Broadcast => {
            let input = if test_rank.me == 0 { all } else { 0 };
            (input, vec![Part { ranks: 0..1, begin: 0, bytes: all }])
        }
        _ => (all, vec![Part { ranks: 0..ranks, begin: 0, bytes: all }]),
    };

    let shape = Shape { me: test_rank.me, input_bytes, parts };
    start_by_turns(test_rank, &mut operation, shape)
}

/// Gathers blocks to places whose order is another one on each rank.
fn to_a_list(test_rank: &mut TestRank) -> Outcome {
    const LEN: usize = 3001;
    if is_missing(test_rank) {
        return Ok(());
    }

    let (me, ranks) = (test_rank.me, test_rank.ranks);
    let place = |rank: usize| (rank + me) % ranks;
    let destination = |rank| Destination { buffer: 0, offset: LEN * place(rank) };
    let destinations: Vec<Destination> = (0..ranks).map(destination).collect();
    let builder = test_rank.group.all_gather::<u32>(LEN).destinations(&destinations);
    let mut operation = builder.transfer(Transfer::Direct).prepare().map_err(unexpected)?;
    check(operation.report().launch.is_some(), || format!("not fused: {}", operation.report()))?;

    let at = |place: usize| (place + ranks - me) % ranks;
    let part = |rank| Part { ranks: rank..rank + 1, begin: 0, bytes: 4 * LEN };
    let parts = (0..ranks).map(|place| part(at(place))).collect();
    let shape = Shape { me, input_bytes: 4 * LEN, parts };
    start_by_turns(test_rank, &mut operation, shape)
}

/// Starts 64 operations on 4 streams, twice, before the host waits for any of them.
fn many_in_flight(test_rank: &mut TestRank) -> Outcome {
    if is_missing(test_rank) {
        return Ok(());
    }

    let variant = |index: usize| {
        let goal = [Goal::AllReduce, Goal::AllGather, Goal::Broadcast, Goal::AllToAll][index % 4];
        let (transfer, len) = (Transfer::Tagged, 1 + index);
        Variant {
            goal,
            transfer,
            len,
            differs: false,
            in_place: false,
            captured: false,
            rounds: None,
        }
    };
    let mut running = Vec::new();
    for index in 0..64 {
        let operation = variant(index).prepare(test_rank, false)?;
        let shape = variant(index).shape(test_rank.me, test_rank.ranks);
        running.push((operation, Book::new(test_rank, shape, 2)?));
    }

    let streams = [(); 4].map(|()| test_rank.gpu.stream());
    let streams = streams.into_iter().collect::<Outcome<Vec<_>>>()?;
    for _ in 0..2 {
        for (index, (operation, book)) in running.iter_mut().enumerate() {
            book.start(test_rank, &streams[index % 4], operation)?;
        }
    }
    streams.iter().try_for_each(CallerStream::finish)?;
    running.iter().try_for_each(|(_, book)| book.check())
}

/// Starts operations of two groups on two streams, on every other rank in the opposite order. The
/// blocks of all launches fit on the device, so no order of them stands still.
fn two_groups(test_rank: &mut TestRank) -> Outcome {
    const ROUNDS: usize = 12;
    if is_missing(test_rank) {
        return Ok(());
    }

    let (me, hub) = ((test_rank.me, test_rank.ranks), test_rank.hubs.remove(0));
    let options = GroupOptions::default().timeout(TIMEOUT);
    let other = open_group_with(&test_rank.gpu, &hub, me, options)?;
    let variants = [(Goal::AllReduce, Transfer::Tagged), (Goal::AllGather, Transfer::Direct)];
    let variants = variants.map(|(goal, transfer)| {
        let (len, differs, in_place, captured) = (3001, false, false, false);
        Variant { goal, transfer, len, differs, in_place, captured, rounds: None }
    });

    let mut running = Vec::new();
    let mut groups = vec![other];
    for variant in variants {
        // Each operation belongs to another group.
        let group = groups.pop().map(|group| std::mem::replace(&mut test_rank.group, group));
        let operation = variant.prepare(test_rank, false)?;
        groups.extend(group);
        let shape = variant.shape(test_rank.me, test_rank.ranks);
        running.push((operation, Book::new(test_rank, shape, ROUNDS)?, test_rank.gpu.stream()?));
    }

    let before = test_rank.round;
    for number in 0..ROUNDS {
        for step in 0..running.len() {
            let index = (step + test_rank.me) % running.len();
            let (operation, book, stream) = &mut running[index];
            // The order of the starts does not tell their data.
            test_rank.round = before + 2 * number as u64 + index as u64;
            book.start(test_rank, stream, operation)?;
        }
    }
    test_rank.round = before + 2 * ROUNDS as u64;
    for (_, book, stream) in &running {
        stream.finish()?;
        book.check()?;
    }
    drop(running);
    groups.into_iter().try_for_each(|group| group.close().map_err(unexpected))
}

/// Rank 0 makes a start with another length, which ends the group with an error that tells both.
fn disagreeing(test_rank: &mut TestRank) -> Outcome {
    if is_missing(test_rank) {
        return Ok(());
    }

    let (me, hub) = ((test_rank.me, test_rank.ranks), test_rank.hubs.remove(0));
    let options = GroupOptions::default().timeout(TIMEOUT);
    let mut group = open_group_with(&test_rank.gpu, &hub, me, options)?;
    let builder = group.all_gather::<u32>(1000).transfer(Transfer::Direct);
    let mut gather = builder.resizable().check_starts(true).prepare().map_err(unexpected)?;
    for len in [1000, 77] {
        gather.resize(len).map_err(unexpected)?;
        gather.run().map_err(unexpected)?;
    }

    gather.resize(if test_rank.me == 0 { 78 } else { 79 }).map_err(unexpected)?;
    let error = gather.run().map(drop).err();
    let kind = error.as_ref().map(Error::kind);
    let text = error.map(|error| error.to_string()).unwrap_or_default();
    let is_right = kind == Some(ErrorKind::Mismatch)
        && ["start 3", "blocks of 78 elements", "blocks of 79 elements"]
            .iter()
            .all(|part| text.contains(part));
    check(is_right, || format!("{kind:?}: {text}"))
}

fn is_missing(test_rank: &TestRank) -> bool {
    FUSED.is_none_or(|engine| fused_is_missing(test_rank, engine))
}
