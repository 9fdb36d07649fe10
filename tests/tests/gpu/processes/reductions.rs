//! Adds blocks of all ranks: host starts, starts on a stream without a wait between them, and graphs.

use std::ops::Range;

use peerlane_collectives::collective::Collective;
use peerlane_collectives::cost::Links;
use peerlane_collectives::group::{MemoryRange, Operation};
use peerlane_hal::{ErrorKind, LinkKind, Rank};
use peerlane_tests::Outcome;

use super::Case;
use super::captured::fused_is_missing;
use crate::support::data::{block, check, same, unexpected};
use crate::support::test_rank::{CaptureMode, TestRank};
use crate::vendor::memory::{DeviceMemory, Pinned};
use crate::vendor::stream::CallerStream;
use crate::vendor::{FUSED, REDUCES};

/// Starts of each length, of which the longest takes most of the time.
const LENGTHS: [(usize, usize); 4] = [(1, 6), (777, 6), (16_384, 6), (200_001, 2)];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Goal {
    ReduceScatter,
    AllReduce,
    AllReduceInPlace,
    Reduce,
}

#[derive(Clone, Copy, Debug)]
enum By {
    Host,
    Stream,
    Graph,
}

pub(crate) fn cases() -> Vec<Case> {
    if !REDUCES {
        return vec![Case::new("engines that do not add", refused)];
    }
    let goals = [Goal::ReduceScatter, Goal::AllReduce, Goal::AllReduceInPlace, Goal::Reduce];
    let shapes = LENGTHS.into_iter().flat_map(|length| goals.map(|goal| (length, goal)));
    let variants = shapes.flat_map(|shape| [By::Host, By::Stream, By::Graph].map(|by| (shape, by)));
    let cases = variants.map(|(((len, starts), goal), by)| {
        let name = format!("{goal:?} of {len} numbers by {by:?}");
        Case::new(name, move |test_rank| run(test_rank, goal, (len, starts), by))
    });
    let resized = goals.into_iter().flat_map(|goal| {
        [By::Host, By::Stream, By::Graph].map(|by| {
            let name = format!("{goal:?} of other lengths in each start by {by:?}");
            Case::new(name, move |test_rank| resized(test_rank, goal, by))
        })
    });
    let alone = [
        Case::new("an immediate all-reduce in place in a window", in_place_in_window),
        Case::new("no compute units", strict),
    ];
    cases.chain(resized).chain(alone).collect()
}

fn refused(test_rank: &mut TestRank) -> Outcome {
    let error = test_rank.group.all_reduce::<u32>(100).prepare().map(drop).unwrap_err();
    let text = error.to_string();
    let names_reason = text.contains("engines of this fabric do not add");
    check(error.kind() == ErrorKind::Unavailable && names_reason, || text)
}

/// Whoever forbids the use of compute units gets no reduction.
fn strict(test_rank: &mut TestRank) -> Outcome {
    let error = test_rank.group.all_reduce::<u32>(100).strict(true).prepare().map(drop);
    let text = error.unwrap_err().to_string();
    check(text.contains("compute units add"), || text)
}

/// Starts of calls whose input and output are the same part of a window, of many lengths. Where a launch makes starts, it makes
/// all of these: operations of several lengths have room on the device.
fn in_place_in_window(test_rank: &mut TestRank) -> Outcome {
    const BEGIN: usize = 33;
    const LENGTHS: [usize; 11] =
        [1, 5000, 200_001, 5000, 1, 10_000, 20_000, 40_000, 80_000, 400_000, 1_000_000];
    let stream = test_rank.gpu.stream()?;
    let window = test_rank.group.window::<u32>(BEGIN + 1_000_000).map_err(unexpected)?;
    let parts = test_rank.group.window::<u32>(1_000_000).map_err(unexpected)?;

    let mut books = Vec::new();
    for len in LENGTHS {
        let range = BEGIN..BEGIN + len;
        let place = address(&window.memory(range.clone()).map_err(unexpected)?);
        let shape = Shape::new(test_rank, Goal::AllReduceInPlace, len);
        let mut book = Book::new(test_rank, shape, 2)?;
        for _ in 0..2 {
            book.fill(test_rank, &stream, place)?;
            let reduce = test_rank.group.immediate(Collective::AllReduce);
            let part = window.part(range.clone()).map_err(unexpected)?;
            reduce.run_in_place_on(&stream.for_starts(), part).map_err(unexpected)?;
            book.take(&stream, place)?;
        }
        books.push(book);

        let scatter = test_rank.group.immediate(Collective::ReduceScatter);
        let input = window.part(0..len / test_rank.ranks * test_rank.ranks).map_err(unexpected)?;
        let output = parts.part(0..len / test_rank.ranks).map_err(unexpected)?;
        scatter.run_on(&stream.for_starts(), input, output).map_err(unexpected)?;
    }

    stream.finish()?;
    books.iter().try_for_each(Book::check)?;
    let paths = test_rank.group.stats().paths;
    let mut reductions = paths.iter().filter(|path| path.collective.contains("reduce"));
    if let Some(engine) = FUSED.filter(|engine| !fused_is_missing(test_rank, engine)) {
        check(reductions.all(|path| path.engine == engine), || format!("not fused: {paths:?}"))?;
    }
    test_rank.group.release(parts).map_err(|failed| unexpected(failed.error))?;
    test_rank.group.release(window).map_err(|failed| unexpected(failed.error))
}

fn prepare(
    test_rank: &mut TestRank,
    goal: Goal,
    len: usize,
    (by, is_resizable): (By, bool),
) -> Outcome<Operation<u32>> {
    let (group, last) = (&mut test_rank.group, Rank::at(test_rank.ranks - 1));
    let builder = match goal {
        Goal::ReduceScatter => group.reduce_scatter::<u32>(len),
        Goal::AllReduce => group.all_reduce(len),
        Goal::AllReduceInPlace => group.all_reduce(len).in_place(),
        Goal::Reduce => group.reduce(last, len),
    };
    // With these links, an all-reduce has plans in both forms at the lengths of the test.
    let slow = Links::of_kinds(LinkKind::SharedMemory, LinkKind::Rdma);
    let builder = match is_resizable {
        true => {
            let builder = builder.resizable().check_starts(true).links(slow);
            // Fused starts have one plan for all lengths.
            if FUSED.is_some() { builder.engine("streams") } else { builder }
        }
        false => builder,
    };
    let builder = match by {
        // SAFETY: the stream is finished before the operation is dropped, and the host borrows nothing.
        By::Graph => unsafe { builder.capturable() },
        _ => builder,
    };
    builder.prepare().map_err(unexpected)
}

/// Each start has a length of its own, also none, and the longest and the shortest ones have other plans.
fn resized(test_rank: &mut TestRank, goal: Goal, by: By) -> Outcome {
    const LENGTHS: [usize; 9] = [60_001, 1, 0, 777, 16, 60_000, 17, 0, 5000];
    let mut operation = prepare(test_rank, goal, 60_001, (by, true))?;
    let report = operation.report();
    let mut shorter = report.shorter.iter();
    let has_both = goal != Goal::AllReduce
        || test_rank.ranks == 1
        || shorter.any(|plan| plan.form != report.choice.form);
    check(has_both, || format!("one form for all lengths: {report}"))?;
    let stream = test_rank.gpu.stream()?;
    let mut books = Vec::new();
    for len in LENGTHS {
        let shape = Shape::new(test_rank, goal, len);
        operation.resize(len).map_err(unexpected)?;
        match by {
            By::Host => {
                let mut book = Book::new(test_rank, shape, 0)?;
                book.run(test_rank, &stream, &mut operation)?;
                books.push(book);
            }
            By::Stream => {
                let mut book = Book::new(test_rank, shape, 0)?;
                book.start(test_rank, &stream, &mut operation)?;
                books.push(book);
            }
            By::Graph => {
                let mut book = Book::new(test_rank, shape, 4)?;
                book.replay(test_rank, &stream, &mut operation, 2)?;
                books.push(book);
            }
        }
    }
    stream.finish()?;
    books.iter().try_for_each(Book::check)
}

fn run(test_rank: &mut TestRank, goal: Goal, (len, starts): (usize, usize), by: By) -> Outcome {
    let mut operation = prepare(test_rank, goal, len, (by, false))?;
    let shape = Shape::new(test_rank, goal, len);
    let stream = test_rank.gpu.stream()?;
    let mut book = Book::new(test_rank, shape, starts)?;
    match by {
        By::Host => {
            for _ in 0..starts {
                book.run(test_rank, &stream, &mut operation)?;
            }
        }
        By::Stream => {
            for _ in 0..starts {
                book.start(test_rank, &stream, &mut operation)?;
            }
        }
        By::Graph => book.replay(test_rank, &stream, &mut operation, starts / 2)?,
    }
    stream.finish()?;
    book.check()
}

/// A part of an output.
#[derive(Clone, Debug)]
pub(super) struct Part {
    /// The ranks whose inputs are added.
    pub(super) ranks: Range<usize>,
    /// Where the part begins in each of these inputs.
    pub(super) begin: usize,
    pub(super) bytes: usize,
}

/// What goes in and what comes out of a start.
#[derive(Clone, Debug)]
pub(super) struct Shape {
    pub(super) me: usize,
    pub(super) input_bytes: usize,
    /// The output in the order of its parts.
    pub(super) parts: Vec<Part>,
}

impl Shape {
    fn new(test_rank: &TestRank, goal: Goal, len: usize) -> Self {
        let (me, ranks, bytes) = (test_rank.me, test_rank.ranks, 4 * len);
        let (input_bytes, begin, output_bytes) = match goal {
            Goal::ReduceScatter => (ranks * bytes, me * bytes, bytes),
            Goal::Reduce if me != ranks - 1 => (bytes, 0, 0),
            _ => (bytes, 0, bytes),
        };
        let parts = vec![Part { ranks: 0..ranks, begin, bytes: output_bytes }];
        Self { me, input_bytes, parts }
    }

    fn output_bytes(&self) -> usize {
        self.parts.iter().map(|part| part.bytes).sum()
    }

    fn expected(&self, round: u64) -> Vec<u8> {
        self.parts.iter().flat_map(|part| part.expected(round)).collect()
    }
}

impl Part {
    fn expected(&self, round: u64) -> Vec<u8> {
        let mut sums = vec![0_u32; self.bytes / 4];
        for rank in self.ranks.clone() {
            let block = block(rank, round, self.begin + self.bytes);
            let mut words = vec![0_u32; sums.len()];
            bytemuck::cast_slice_mut(&mut words).copy_from_slice(&block[self.begin..]);

            // A loop over slices takes a tenth of the time of iterators, without optimisation.
            let (sums, words) = (&mut sums[..], &words[..]);
            let mut index = 0;
            while index < sums.len() {
                sums[index] = sums[index].wrapping_add(words[index]);
                index += 1;
            }
        }
        bytemuck::cast_slice(&sums).to_vec()
    }
}

/// What goes in and comes out of several starts.
pub(super) struct Book {
    shape: Shape,
    sent: Pinned,
    seen: Pinned,
    rounds: Vec<u64>,
    taken: usize,
}

impl Book {
    pub(super) fn new(test_rank: &TestRank, shape: Shape, starts: usize) -> Outcome<Self> {
        // A graph has one start more, at once.
        let sent = test_rank.gpu.pinned((starts + 1) * shape.input_bytes.max(1))?;
        let seen = test_rank.gpu.pinned((starts + 1) * shape.output_bytes().max(1))?;
        Ok(Self { shape, sent, seen, rounds: Vec::new(), taken: 0 })
    }

    /// Copies new numbers to `input`.
    fn fill(&mut self, test_rank: &mut TestRank, stream: &CallerStream, input: u64) -> Outcome {
        let (round, bytes) = (test_rank.next_round(), self.shape.input_bytes);
        let offset = self.rounds.len() * bytes;
        self.sent.write(offset, &block(self.shape.me, round, bytes));
        self.rounds.push(round);
        if bytes == 0 { Ok(()) } else { stream.copy_in(input, &self.sent, offset, bytes) }
    }

    /// Copies new numbers to the input of the operation.
    fn fill_input(
        &mut self,
        test_rank: &mut TestRank,
        stream: &CallerStream,
        operation: &Operation<u32>,
    ) -> Outcome {
        let input = address(&operation.input_memory().map_err(unexpected)?);
        self.fill(test_rank, stream, input)
    }

    /// Runs a start of the host.
    pub(super) fn run(
        &mut self,
        test_rank: &mut TestRank,
        stream: &CallerStream,
        operation: &mut Operation<u32>,
    ) -> Outcome {
        self.fill_input(test_rank, stream, operation)?;
        stream.finish()?;
        operation.run().map_err(unexpected)?;
        let output = operation.output_memory();
        self.take(stream, address(&output))
    }

    fn take(&mut self, stream: &CallerStream, output: u64) -> Outcome {
        let bytes = self.shape.output_bytes();
        self.taken += 1;
        match bytes {
            0 => Ok(()),
            _ => stream.copy_out(&self.seen, (self.taken - 1) * bytes, output, bytes),
        }
    }

    pub(super) fn start(
        &mut self,
        test_rank: &mut TestRank,
        stream: &CallerStream,
        operation: &mut Operation<u32>,
    ) -> Outcome {
        self.fill_input(test_rank, stream, operation)?;
        let lease = operation.start_on(&stream.for_starts()).map_err(unexpected)?;
        self.take(stream, address(&lease.output()))
    }

    /// Replays a graph of two starts, and starts once at once.
    pub(super) fn replay(
        &mut self,
        test_rank: &mut TestRank,
        stream: &CallerStream,
        operation: &mut Operation<u32>,
        replays: usize,
    ) -> Outcome {
        let (input_bytes, output_bytes) = (self.shape.input_bytes, self.shape.output_bytes());
        let memory = |bytes: usize| -> Outcome<[DeviceMemory; 2]> {
            Ok([test_rank.gpu.memory(bytes.max(1))?, test_rank.gpu.memory(bytes.max(1))?])
        };
        let (fresh, results) = (memory(input_bytes)?, memory(output_bytes)?);
        let input = address(&operation.input_memory().map_err(unexpected)?);
        let graph = stream.record(CaptureMode::ThreadLocal, || {
            for (fresh, result) in fresh.iter().zip(&results) {
                if input_bytes > 0 {
                    stream.copy(input, fresh.address, input_bytes)?;
                }
                let lease = operation.start_on(&stream.for_starts()).map_err(unexpected)?;
                if output_bytes > 0 {
                    stream.copy(result.address, address(&lease.output()), output_bytes)?;
                }
            }
            Ok(())
        })?;
        for _ in 0..replays {
            for fresh in &fresh {
                self.fill(test_rank, stream, fresh.address)?;
            }
            graph.replay()?;
            for result in &results {
                self.take(stream, result.address)?;
            }
        }
        self.start(test_rank, stream, operation)?;
        stream.finish()
    }

    pub(super) fn check(&self) -> Outcome {
        let bytes = self.shape.output_bytes();
        for (index, round) in self.rounds.iter().enumerate() {
            let seen = self.seen.read(index * bytes, bytes);
            same(format_args!("start {index}"), &seen, &self.shape.expected(*round))?;
        }
        Ok(())
    }
}

fn address(memory: &MemoryRange) -> u64 {
    memory.base.as_ptr() as u64
}
