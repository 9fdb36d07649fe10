//! Captures starts in graphs, and replays these between eager starts.

use peerlane_collectives::collective::Collective;
use peerlane_collectives::cost::Transfer;
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{MemoryRange, Operation};
use peerlane_collectives::plan::Algorithm;
use peerlane_hal::ErrorKind;
use peerlane_tests::Outcome;

use super::Case;
use super::streams::{Book, start_once};
use crate::support::data::{POISON, block, check, gathered, same, unexpected};
use crate::support::test_rank::{CaptureMode, Form, TestRank};
use crate::vendor::memory::{DeviceMemory, Pinned};
use crate::vendor::stream::{CallerStream, Graph};
use crate::vendor::{FUSED, devices};

pub(super) const BLOCK_BYTES: usize = 5001;
/// Nothing that could disturb a capture is done by any thread meanwhile.
const GLOBAL: CaptureMode = CaptureMode::Global;
const THREAD: CaptureMode = CaptureMode::ThreadLocal;

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = vec![
        Case::new("not capturable", refused_before_recording),
        Case::new("an algorithm for no graph", refused_when_prepared),
        Case::new("not prepared to be captured", not_prepared_to_be_captured),
    ];
    for (starts, replays, form, mode) in [
        (1, 1, Form::OneOutput, GLOBAL),
        (1, 5, Form::InPlace, THREAD),
        (2, 2, Form::OneOutput, THREAD),
        (2, 5, Form::InPlace, GLOBAL),
        (10, 2, Form::OneOutput, GLOBAL),
        (10, 5, Form::OneOutput, THREAD),
    ] {
        let name = format!("a graph of {starts}, {replays} replays, {form:?}, {mode:?}");
        cases.push(Case::new(name, move |test_rank| {
            let builder = test_rank.group.all_gather::<u8>(BLOCK_BYTES);
            // SAFETY: `replayed` finishes the stream and drops the graph, and the host borrows nothing.
            let builder = unsafe { builder.capturable() };
            let mut gather = form.of(builder).prepare().map_err(unexpected)?;
            replayed(test_rank, &mut gather, starts, replays, mode)
        }));
    }
    cases.extend(fused());
    for (in_place, mode) in [(true, GLOBAL), (true, THREAD), (false, GLOBAL), (false, THREAD)] {
        let form = if in_place { "in place" } else { "from a second window" };
        cases.push(Case::new(format_args!("not prepared, {form}, {mode:?}"), move |test_rank| {
            not_prepared(test_rank, in_place, mode)
        }));
    }
    cases.push(Case::new("two graphs by turns", two_graphs));
    cases
}

/// Launches in graphs, between launches that run at once: of data that is polled, and of data with
/// flags, whose outputs the starts of a graph use in turn.
fn fused() -> Vec<Case> {
    let Some(engine) = FUSED else { return Vec::new() };
    let cases = Transfer::ALL.into_iter().flat_map(|transfer| {
        [(1, 3, 1), (3, 4, 2), (4, 3, 2)].map(|(starts, replays, outputs)| {
            let name =
                format!("{} launches, a graph of {starts}, {replays} replays", transfer.name());
            Case::new(name, move |test_rank| {
                if fused_is_missing(test_rank, engine) {
                    return Ok(());
                }
                let builder = test_rank.group.all_gather::<u8>(BLOCK_BYTES).transfer(transfer);
                // SAFETY: `replayed` finishes the stream and drops the graph, and the host borrows nothing.
                let builder = unsafe { builder.capturable() };
                let mut gather = builder.prepare().map_err(unexpected)?;
                let found = gather.report().outputs;
                let expected = if transfer == Transfer::Direct { 2 } else { 1 };
                check(found == expected, || format!("{found} outputs, expected {expected}"))?;
                replayed(test_rank, &mut gather, starts * outputs, replays, THREAD)
            })
        })
    });
    cases.collect()
}

/// Returns whether ranks cannot use such engines: one alone has no peers, and launches of ranks that share a device wait for each
/// other.
pub(super) fn fused_is_missing(test_rank: &TestRank, engine: &str) -> bool {
    let kinds = test_rank.group.engines();
    test_rank.ranks == 1
        || test_rank.ranks > devices()
        || kinds.iter().all(|kind| kind.name() != engine)
}

/// Refuses a start in a capture with a text, between work that the graph must contain.
fn refused_in_a_capture(
    test_rank: &mut TestRank,
    stream: &CallerStream,
    (wanted, text): (ErrorKind, &str),
    start: impl FnOnce(&mut TestRank) -> Option<Error>,
) -> Outcome {
    let scratch = test_rank.gpu.memory(100)?;
    let graph = stream.record(GLOBAL, || {
        stream.fill(scratch.address, 1, 50)?;
        let error = start(test_rank);
        let kind = error.as_ref().map(Error::kind);
        check(kind == Some(wanted), || format!("{error:?}"))?;
        let said = error.map(|error| error.to_string()).unwrap_or_default();
        check(said.contains(text), || said)?;
        stream.fill(scratch.address + 50, 2, 50)
    })?;
    graph.replay()?;
    let seen = test_rank.gpu.pinned(100)?;
    stream.copy_out(&seen, 0, scratch.address, 100)?;
    stream.finish()?;
    same("the graph", &seen.read(0, 100), &[[1; 50], [2; 50]].concat())
}

/// An operation that was not prepared for it is refused, and nothing is broken by that.
fn refused_before_recording(test_rank: &mut TestRank) -> Outcome {
    let mut gather = test_rank.group.all_gather::<u8>(BLOCK_BYTES).prepare().map_err(unexpected)?;
    let stream = test_rank.gpu.stream()?;
    let wanted = (ErrorKind::InvalidArgument, "prepare it with `capturable()`");
    refused_in_a_capture(test_rank, &stream, wanted, |_| {
        gather.start_on(&stream.for_starts()).map(drop).err()
    })?;
    let mut book = Book::new(test_rank, BLOCK_BYTES, 1)?;
    start_once(test_rank, &stream, &mut gather, &mut book)?;
    stream.finish()?;
    book.check()
}

/// A second lane on streams is refused by all ranks, before anything is recorded.
fn refused_when_prepared(test_rank: &mut TestRank) -> Outcome {
    let builder = test_rank.group.all_gather::<u8>(BLOCK_BYTES).algorithm(Algorithm::DoubleRing);
    // SAFETY: no graph records the operation.
    match unsafe { builder.capturable() }.prepare() {
        // Two ranks need no second lane.
        Ok(mut gather) => test_rank.gather_once(&mut gather),
        Err(error) => {
            check(error.kind() == ErrorKind::InvalidArgument, || format!("{error:?}"))?;
            let text = error.to_string();
            let expected = "double-ring cannot be captured: a graph contains only one lane of each rank, \
                            and rank 0 has another one that a thread cannot drive; use direct or ring, or \
                            remove `capturable()`";
            check(test_rank.ranks > 2 && text == expected, || text)
        }
    }
}

/// A graph of starts, with the places on the device that it reads and writes.
struct Recording {
    graph: Graph,
    starts: usize,
    /// The blocks of one replay, which the graph copies to the input one by one.
    fresh: DeviceMemory,
    /// What its starts gathered.
    seen: DeviceMemory,
}

impl Recording {
    fn new(
        test_rank: &mut TestRank,
        stream: &CallerStream,
        gather: &mut Operation<u8>,
        starts: usize,
        mode: CaptureMode,
    ) -> Outcome<Self> {
        let input = address(&gather.input_memory().map_err(unexpected)?);
        Self::of(test_rank, (stream, mode), starts, input, |_| {
            let lease = gather.start_on(&stream.for_starts()).map_err(unexpected)?;
            check(lease.epoch().is_none(), || format!("{lease:?} runs at once"))?;
            Ok(address(&lease.output()))
        })
    }

    /// Records starts from one input, each of which returns where its output is.
    fn of(
        test_rank: &mut TestRank,
        (stream, mode): (&CallerStream, CaptureMode),
        starts: usize,
        input: u64,
        mut start: impl FnMut(&mut TestRank) -> Outcome<u64>,
    ) -> Outcome<Self> {
        let total = BLOCK_BYTES * test_rank.ranks;
        let fresh = test_rank.gpu.memory(starts * BLOCK_BYTES)?;
        let seen = test_rank.gpu.memory(starts * total)?;
        let graph = stream.record(mode, || {
            for index in 0..starts {
                let from = fresh.address + (index * BLOCK_BYTES) as u64;
                stream.copy(input, from, BLOCK_BYTES)?;
                let output = start(test_rank)?;
                stream.copy(seen.address + (index * total) as u64, output, total)?;
                stream.fill(output, POISON, total)?;
            }
            Ok(())
        })?;
        Ok(Self { graph, starts, fresh, seen })
    }
}

fn address(memory: &MemoryRange) -> u64 {
    memory.base.as_ptr() as u64
}

/// Records immediate calls, after which the same calls start at once and from a second graph.
fn not_prepared(test_rank: &mut TestRank, in_place: bool, mode: CaptureMode) -> Outcome {
    const BEGIN: usize = 33;
    let (stream, total) = (test_rank.gpu.stream()?, BLOCK_BYTES * test_rank.ranks);
    let window = test_rank.group.window::<u8>(BEGIN + total).map_err(unexpected)?;
    let blocks = test_rank.group.window::<u8>(BLOCK_BYTES + 1).map_err(unexpected)?;
    let output = address(&window.memory(BEGIN..BEGIN + total).map_err(unexpected)?);
    let input = match in_place {
        true => output + (test_rank.me * BLOCK_BYTES) as u64,
        false => address(&blocks.memory(1..1 + BLOCK_BYTES).map_err(unexpected)?),
    };
    let start = |test_rank: &mut TestRank| {
        let gather = test_rank.group.immediate(Collective::AllGather);
        // SAFETY: the stream is finished and the graphs are dropped before the windows are released, and the host borrows nothing.
        let gather = unsafe { gather.capturable() };
        let (stream, to) = (stream.for_starts(), window.part(BEGIN..BEGIN + total));
        let to = to.map_err(unexpected)?;
        let started = match in_place {
            true => gather.run_in_place_on(&stream, to),
            false => {
                let from = blocks.part(1..1 + BLOCK_BYTES).map_err(unexpected)?;
                gather.run_on(&stream, from, to)
            }
        };
        started.map_err(unexpected)?;
        Ok(output)
    };
    let first = Recording::of(test_rank, (&stream, mode), 2, input, start)?;
    let second = Recording::of(test_rank, (&stream, mode), 1, input, start)?;
    let (mut pages, mut book) = (Pages::new(test_rank, 8)?, Book::new(test_rank, BLOCK_BYTES, 2)?);
    for _ in 0..2 {
        pages.replay(test_rank, &stream, &first)?;
        book.fill(test_rank, &stream, input)?;
        start(test_rank)?;
        book.take(&stream, output)?;
        pages.replay(test_rank, &stream, &second)?;
        pages.replay(test_rank, &stream, &second)?;
    }
    stream.finish()?;
    pages.check()?;
    book.check()?;
    drop((first, second));
    test_rank.group.release(blocks).map_err(|failed| unexpected(failed.error))?;
    test_rank.group.release(window).map_err(|failed| unexpected(failed.error))
}

/// An immediate call is not recorded without the promise of `capturable`.
fn not_prepared_to_be_captured(test_rank: &mut TestRank) -> Outcome {
    let stream = test_rank.gpu.stream()?;
    let window = test_rank.group.window::<u8>(BLOCK_BYTES * test_rank.ranks).map_err(unexpected)?;
    let text = "the stream captures a graph, but the call is not capturable";
    refused_in_a_capture(test_rank, &stream, (ErrorKind::InvalidArgument, text), |test_rank| {
        let all = window.part(0..window.len()).ok()?;
        let gather = test_rank.group.immediate(Collective::AllGather);
        gather.run_in_place_on(&stream.for_starts(), all).err()
    })
}

/// Replays with data of their own, with nobody waiting between them, and starts that run at once.
pub(super) fn replayed(
    test_rank: &mut TestRank,
    gather: &mut Operation<u8>,
    starts: usize,
    replays: usize,
    mode: CaptureMode,
) -> Outcome {
    let stream = test_rank.gpu.stream()?;
    let recording = Recording::new(test_rank, &stream, gather, starts, mode)?;
    let mut pages = Pages::new(test_rank, starts * replays)?;
    let mut book = Book::new(test_rank, BLOCK_BYTES, replays)?;
    for index in 0..replays {
        pages.replay(test_rank, &stream, &recording)?;
        if index % 2 == 0 {
            start_once(test_rank, &stream, gather, &mut book)?;
        }
    }
    stream.finish()?;
    pages.check()?;
    book.check()
}

/// Two graphs of two operations on one stream, one instance of which is there already.
fn two_graphs(test_rank: &mut TestRank) -> Outcome {
    let stream = test_rank.gpu.stream()?;
    // SAFETY: the stream is finished before the operation is dropped, and the host borrows nothing.
    let builder = unsafe { test_rank.group.all_gather::<u8>(BLOCK_BYTES).capturable() };
    let mut first = builder.prepare();
    // SAFETY: the same holds for this operation.
    let builder = unsafe { test_rank.group.all_gather::<u8>(BLOCK_BYTES).capturable() };
    let mut second = builder.in_place().prepare();
    let gathers = [first.as_mut(), second.as_mut()];
    let mut recordings = Vec::new();
    for gather in gathers {
        let gather = gather.map_err(|error| unexpected(error.clone()))?;
        recordings.push(Recording::new(test_rank, &stream, gather, 2, THREAD)?);
    }
    let mut pages = Pages::new(test_rank, 12)?;
    for index in [0, 1, 1, 0, 0, 1] {
        pages.replay(test_rank, &stream, &recordings[index])?;
    }
    stream.finish()?;
    pages.check()
}

/// Data for replays, and what they gathered.
struct Pages {
    rounds: Vec<u64>,
    ranks: usize,
    send: Pinned,
    receive: Pinned,
}

impl Pages {
    fn new(test_rank: &TestRank, starts: usize) -> Outcome<Self> {
        let bytes = starts * BLOCK_BYTES;
        let (send, receive) =
            (test_rank.gpu.pinned(bytes)?, test_rank.gpu.pinned(bytes * test_rank.ranks)?);
        Ok(Self { rounds: Vec::new(), ranks: test_rank.ranks, send, receive })
    }

    fn replay(
        &mut self,
        test_rank: &mut TestRank,
        stream: &CallerStream,
        recording: &Recording,
    ) -> Outcome {
        let begin = self.rounds.len();
        for index in begin..begin + recording.starts {
            let round = test_rank.next_round();
            self.rounds.push(round);
            self.send.write(index * BLOCK_BYTES, &block(test_rank.me, round, BLOCK_BYTES));
        }
        let (fresh, seen) = (&recording.fresh, &recording.seen);
        stream.copy_in(fresh.address, &self.send, begin * BLOCK_BYTES, fresh.bytes)?;
        recording.graph.replay()?;
        let at = begin * BLOCK_BYTES * self.ranks;
        stream.copy_out(&self.receive, at, seen.address, seen.bytes)?;
        stream.fill(seen.address, POISON, seen.bytes)
    }

    fn check(&self) -> Outcome {
        let total = BLOCK_BYTES * self.ranks;
        self.rounds.iter().enumerate().try_for_each(|(index, round)| {
            let seen = self.receive.read(index * total, total);
            let wanted = gathered(self.ranks, *round, BLOCK_BYTES);
            same(format_args!("replayed start {}", index + 1), &seen, &wanted)
        })
    }
}
