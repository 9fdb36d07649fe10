//! Starts operations on the caller's stream, one after the other without a wait of the host.

use std::time::Duration;

use peerlane_collectives::group::Operation;
use peerlane_tests::Outcome;

use super::Case;
use crate::support::data::{block, gathered, same, unexpected};
use crate::support::test_rank::{Form, TestRank};
use crate::vendor::memory::{DeviceMemory, Pinned};
use crate::vendor::stream::CallerStream;

const SPOILT: u8 = 0xEE;
const SCRATCH_BYTES: usize = 4 << 20;

pub(crate) fn back_to_back(ranks: usize) -> Vec<Case> {
    let shapes = [(1, 40), (5001, 20), (65_537, 12), (600_000, 4)];
    let shapes = if ranks > 4 { &shapes[1..2] } else { &shapes[..] };
    let forms = shapes.iter().flat_map(|shape| Form::ALL.map(|form| (*shape, form)));
    let cases = forms.map(|((bytes, starts), form)| {
        let name = format!("{starts} starts of {bytes} bytes, {form:?}");
        Case::new(name, move |test_rank| run(test_rank, bytes, starts, form, &mut |_, _, _| Ok(())))
    });
    cases.collect()
}

/// What delays the slow rank.
#[derive(Clone, Copy, Debug)]
enum Slow {
    Host,
    Stream,
}

/// Each rank once as the slow one, on its host or on its stream.
pub(crate) fn delayed(ranks: usize) -> Vec<Case> {
    let slow = (0..ranks).flat_map(|rank| [(rank, Slow::Host), (rank, Slow::Stream)]);
    let cases = slow.enumerate().map(|(index, (rank, slow))| {
        let form = Form::ALL[index % Form::ALL.len()];
        Case::new(format_args!("rank {rank} by its {slow:?}, {form:?}"), move |test_rank| {
            let scratch = test_rank.gpu.memory(SCRATCH_BYTES)?;
            let mut delay = |test_rank: &mut TestRank, stream: &CallerStream, _: u64| {
                if test_rank.me != rank || test_rank.random.u8(..3) > 0 {
                    return Ok(());
                }
                delay(test_rank, slow, stream, &scratch)
            };
            run(test_rank, 5001, 12, form, &mut delay)
        })
    });
    cases.collect()
}

fn delay(
    test_rank: &mut TestRank,
    slow: Slow,
    stream: &CallerStream,
    scratch: &DeviceMemory,
) -> Outcome {
    match slow {
        Slow::Host => {
            std::thread::sleep(Duration::from_micros(test_rank.random.u64(..3000)));
            Ok(())
        }
        Slow::Stream => stream.busy(test_rank.gpu.driver, scratch),
    }
}

/// Called between the steps of a start.
type Between<'a> = &'a mut dyn FnMut(&mut TestRank, &CallerStream, u64) -> Outcome;

/// So many starts; what they gathered is looked at when all are on the stream.
fn run(
    test_rank: &mut TestRank,
    block_bytes: usize,
    starts: usize,
    form: Form,
    between: Between<'_>,
) -> Outcome {
    let builder = test_rank.group.all_gather::<u8>(block_bytes);
    let mut gather = form.of(builder).prepare().map_err(unexpected)?;
    let mut book = Book::new(test_rank, block_bytes, starts)?;
    let stream = test_rank.gpu.stream()?;
    for _ in 0..starts {
        let round = book.fill(
            test_rank,
            &stream,
            gather.input_memory().map_err(unexpected)?.base.as_ptr() as u64,
        )?;
        between(test_rank, &stream, round)?;
        let input = gather.input_memory().map_err(unexpected)?.base.as_ptr() as u64;
        let lease = gather.start_on(&stream.for_starts()).map_err(unexpected)?;
        let output = lease.output().base.as_ptr() as u64;
        drop(lease);
        between(test_rank, &stream, round)?;
        // The source may be overwritten, and the output read and spoilt, by what comes behind.
        if form != Form::InPlace {
            stream.fill(input, SPOILT, block_bytes)?;
        }
        book.take(&stream, output)?;
        between(test_rank, &stream, round)?;
        stream.fill(output, SPOILT, block_bytes * test_rank.ranks)?;
    }
    stream.finish()?;
    book.check()
}

/// Data for starts, and what they gathered: a place for each, so that nothing has to wait.
pub(crate) struct Book {
    block_bytes: usize,
    ranks: usize,
    rounds: Vec<u64>,
    send: Pinned,
    receive: Pinned,
}

impl Book {
    pub(crate) fn new(test_rank: &TestRank, block_bytes: usize, starts: usize) -> Outcome<Self> {
        let (ranks, bytes) = (test_rank.ranks, block_bytes * starts);
        let (send, receive) = (test_rank.gpu.pinned(bytes)?, test_rank.gpu.pinned(bytes * ranks)?);
        Ok(Self { block_bytes, ranks, rounds: Vec::with_capacity(starts), send, receive })
    }

    /// The stream copies fresh data to the address; the number of the round.
    pub(crate) fn fill(
        &mut self,
        test_rank: &mut TestRank,
        stream: &CallerStream,
        address: u64,
    ) -> Outcome<u64> {
        let (round, at) = (test_rank.next_round(), self.rounds.len() * self.block_bytes);
        self.rounds.push(round);
        self.send.write(at, &block(test_rank.me, round, self.block_bytes));
        stream.copy_in(address, &self.send, at, self.block_bytes)?;
        Ok(round)
    }

    /// The stream copies what was gathered last.
    pub(crate) fn take(&self, stream: &CallerStream, address: u64) -> Outcome {
        let total = self.block_bytes * self.ranks;
        stream.copy_out(&self.receive, (self.rounds.len() - 1) * total, address, total)
    }

    /// Looks at all rounds, once the streams are finished.
    pub(crate) fn check(&self) -> Outcome {
        let total = self.block_bytes * self.ranks;
        self.rounds.iter().enumerate().try_for_each(|(index, round)| {
            let wanted = gathered(self.ranks, *round, self.block_bytes);
            let seen = self.receive.read(index * total, total);
            same(format_args!("start {} (round {round})", index + 1), &seen, &wanted)
        })
    }
}

/// One start on the stream, with data of its own; checked with the book.
pub(crate) fn start_once(
    test_rank: &mut TestRank,
    stream: &CallerStream,
    gather: &mut Operation<u8>,
    book: &mut Book,
) -> Outcome {
    book.fill(test_rank, stream, gather.input_memory().map_err(unexpected)?.base.as_ptr() as u64)?;
    let lease = gather.start_on(&stream.for_starts()).map_err(unexpected)?;
    book.take(stream, lease.output().base.as_ptr() as u64)
}
