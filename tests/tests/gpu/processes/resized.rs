//! Starts operations with lengths and places of their own: at once, on a stream, and in graphs.

use peerlane_collectives::group::{Operation, Part};
use peerlane_collectives::plan::Algorithm;
use peerlane_tests::Outcome;

use super::Case;
use crate::support::data::{block, gathered, same, unexpected};
use crate::support::test_rank::{CaptureMode, TestRank};
use crate::vendor::memory::{DeviceMemory, Pinned};
use crate::vendor::stream::CallerStream;

const BYTES_MAX: usize = 70_000;
const STARTS: usize = 24;
const REPLAYS: usize = 3;

pub(crate) fn cases() -> Vec<Case> {
    let algorithms = [Algorithm::Direct, Algorithm::Pull, Algorithm::Ring];
    let at_once = algorithms.map(|algorithm| {
        Case::new(format_args!("at once, {algorithm}"), move |test_rank| {
            let mut gather = prepare(test_rank, algorithm, false)?;
            for part in parts(test_rank) {
                gather.resize(part.as_part()).map_err(unexpected)?;
                test_rank.gather_once(&mut gather)?;
            }
            Ok(())
        })
    });
    let on_stream = algorithms.map(|algorithm| {
        Case::new(format_args!("on a stream, {algorithm}"), move |test_rank| {
            let mut gather = prepare(test_rank, algorithm, false)?;
            let parts = parts(test_rank);
            let pages = Pages::new(test_rank, &parts)?;
            let stream = test_rank.gpu.stream()?;
            let round = test_rank.next_round();
            pages.fill(test_rank, &stream, &parts, round)?;
            pages.start(&stream, &mut gather, &parts)?;
            pages.check(test_rank, &stream, &parts, round)
        })
    });
    let captured = [Algorithm::Direct, Algorithm::Ring].map(|algorithm| {
        Case::new(format_args!("in a graph, {algorithm}"), move |test_rank| {
            captured(test_rank, algorithm)
        })
    });
    at_once.into_iter().chain(on_stream).chain(captured).collect()
}

fn prepare(
    test_rank: &mut TestRank,
    algorithm: Algorithm,
    capturable: bool,
) -> Outcome<Operation<u8>> {
    let gather = test_rank.group.all_gather::<u8>(BYTES_MAX).algorithm(algorithm).chunks(3);
    let gather = gather.resizable().check_starts(true);
    // SAFETY: `captured` finishes the stream before it drops the operation, and the host borrows nothing.
    let gather = if capturable { unsafe { gather.capturable() } } else { gather };
    gather.prepare().map_err(unexpected)
}

/// The length of a start, and where its input and output begin.
struct PartOfStart {
    bytes: usize,
    input: usize,
    output: usize,
}

impl PartOfStart {
    fn as_part(&self) -> Part<'static> {
        Part::len(self.bytes).input(self.input).output(self.output)
    }
}

/// Random parts, the same on all ranks.
fn parts(test_rank: &TestRank) -> Vec<PartOfStart> {
    let random = &mut fastrand::Rng::with_seed(test_rank.ranks as u64);
    let mut part = || {
        let most = *random.choice(&[1, 64, 5000, BYTES_MAX]).unwrap_or(&1);
        let bytes = random.usize(1..=most);
        let spare = BYTES_MAX - bytes;
        let (input, output) = (random.usize(..=spare), random.usize(..=spare * test_rank.ranks));
        PartOfStart { bytes, input, output }
    };
    (0..STARTS).map(|_| part()).collect()
}

/// Data for each start, and what it gathered, in memory of the device that a graph can name.
struct Pages {
    fresh: DeviceMemory,
    seen: DeviceMemory,
    send: Pinned,
    receive: Pinned,
}

impl Pages {
    fn new(test_rank: &TestRank, parts: &[PartOfStart]) -> Outcome<Self> {
        let bytes: usize = parts.iter().map(|part| part.bytes).sum();
        let (gpu, all) = (&test_rank.gpu, bytes * test_rank.ranks);
        Ok(Self {
            fresh: gpu.memory(bytes)?,
            seen: gpu.memory(all)?,
            send: gpu.pinned(bytes)?,
            receive: gpu.pinned(all)?,
        })
    }

    fn fill(
        &self,
        test_rank: &TestRank,
        stream: &CallerStream,
        parts: &[PartOfStart],
        round: u64,
    ) -> Outcome {
        let mut begin = 0;
        for (start, part) in (0..).zip(parts) {
            self.send.write(begin, &block(test_rank.me, 1000 * round + start, part.bytes));
            begin += part.bytes;
        }
        stream.copy_in(self.fresh.address, &self.send, 0, begin)
    }

    /// Enqueues all starts, each behind the copy of its data, and before a copy of what it gathered.
    fn start(
        &self,
        stream: &CallerStream,
        gather: &mut Operation<u8>,
        parts: &[PartOfStart],
    ) -> Outcome {
        let (mut fresh, mut seen) = (self.fresh.address, self.seen.address);
        for part in parts {
            gather.resize(part.as_part()).map_err(unexpected)?;
            let input = gather.input_memory().map_err(unexpected)?;
            stream.copy(input.base.as_ptr() as u64, fresh, part.bytes)?;
            let lease = gather.start_on(&stream.for_starts()).map_err(unexpected)?;
            let output = lease.output();
            stream.copy(seen, output.base.as_ptr() as u64, output.bytes as usize)?;
            fresh += part.bytes as u64;
            seen += output.bytes;
        }
        Ok(())
    }

    fn check(
        &self,
        test_rank: &TestRank,
        stream: &CallerStream,
        parts: &[PartOfStart],
        round: u64,
    ) -> Outcome {
        let ranks = test_rank.ranks;
        let total: usize = parts.iter().map(|part| part.bytes * ranks).sum();
        stream.copy_out(&self.receive, 0, self.seen.address, total)?;
        stream.finish()?;
        let mut begin = 0;
        for (start, part) in (0..).zip(parts) {
            let bytes = part.bytes * ranks;
            let what = format!("start {start} of {} bytes", part.bytes);
            let wanted = gathered(ranks, 1000 * round + start, part.bytes);
            same(what, &self.receive.read(begin, bytes), &wanted)?;
            begin += bytes;
        }
        Ok(())
    }
}

/// A graph keeps the lengths and places that it was recorded with, whatever starts come between its replays.
fn captured(test_rank: &mut TestRank, algorithm: Algorithm) -> Outcome {
    let mut gather = prepare(test_rank, algorithm, true)?;
    let parts = parts(test_rank);
    let pages = Pages::new(test_rank, &parts)?;
    let stream = test_rank.gpu.stream()?;
    let graph =
        stream.record(CaptureMode::ThreadLocal, || pages.start(&stream, &mut gather, &parts))?;
    for replay in 0..REPLAYS {
        let round = test_rank.next_round();
        pages.fill(test_rank, &stream, &parts, round)?;
        graph.replay()?;
        pages.check(test_rank, &stream, &parts, round)?;
        let part = &parts[replay % parts.len()];
        gather.resize(part.as_part()).map_err(unexpected)?;
        test_rank.gather_once(&mut gather)?;
    }
    Ok(())
}
