//! Sends messages between the memories of devices: from the host, on a stream, and in graphs.

use peerlane_collectives::group::{Channel, CopyRange, StreamMessages, Window};
use peerlane_hal::Rank;
use peerlane_tests::Outcome;

use super::Case;
use crate::support::data::{POISON, block, same, unexpected};
use crate::support::test_rank::{CaptureMode, TIMEOUT, TestRank};
use crate::vendor::memory::Pinned;
use crate::vendor::stream::CallerStream;

const BYTES: usize = 50_000;
const ROUNDS: usize = 10;

pub(crate) fn cases() -> Vec<Case> {
    vec![
        Case::new("from the host", from_the_host),
        Case::new("many copies", many_copies),
        Case::new("on a stream", on_a_stream),
        Case::new("in a graph", in_a_graph),
    ]
}

/// A window with a place to send from and one to receive into, and its neighbours in a ring.
struct Ring {
    window: Window<u8>,
    channel: Channel<u8>,
    next: Rank,
    last: Rank,
}

impl Ring {
    fn open(test_rank: &mut TestRank) -> Outcome<Self> {
        let window = test_rank.group.window::<u8>(2 * BYTES).map_err(unexpected)?;
        let channel = test_rank.group.channel(&window, 2).map_err(unexpected)?;
        let (me, ranks) = (test_rank.me, test_rank.ranks);
        let [next, last] = [1, ranks - 1].map(|step| Rank(((me + step) % ranks) as u32));
        Ok(Self { window, channel, next, last })
    }

    fn address(&self, begin: usize) -> Outcome<u64> {
        let memory = self.window.memory(begin..begin + BYTES).map_err(unexpected)?;
        Ok(memory.base.as_ptr() as u64)
    }

    /// The stream fills the place to send from, and poisons the other.
    fn fill(&self, test_rank: &TestRank, stream: &CallerStream, round: u64) -> Outcome {
        let pinned = test_rank.gpu.pinned(BYTES)?;
        pinned.write(0, &block(test_rank.me, round, BYTES));
        stream.copy_in(self.address(0)?, &pinned, 0, BYTES)?;
        stream.fill(self.address(BYTES)?, POISON, BYTES)?;
        stream.finish()
    }

    fn received(&self, test_rank: &TestRank, stream: &CallerStream) -> Outcome<Vec<u8>> {
        let pinned = test_rank.gpu.pinned(BYTES)?;
        stream.copy_out(&pinned, 0, self.address(BYTES)?, BYTES)?;
        stream.finish()?;
        Ok(pinned.read(0, BYTES))
    }

    fn check(&self, test_rank: &TestRank, stream: &CallerStream, round: u64) -> Outcome {
        let seen = self.received(test_rank, stream)?;
        same(format!("round {round}"), &seen, &block(self.last.index(), round, BYTES))
    }
}

fn from_the_host(test_rank: &mut TestRank) -> Outcome {
    let mut ring = Ring::open(test_rank)?;
    let stream = test_rank.gpu.stream()?;
    for round in 0..ROUNDS {
        let number = test_rank.next_round();
        ring.fill(test_rank, &stream, number)?;
        test_rank.group.barrier().map_err(unexpected)?;
        let Ring { channel, next, last, .. } = &mut ring;
        if round % 2 == 0 {
            channel.put_signal(*next, 0..BYTES, BYTES, 0).map_err(unexpected)?;
            channel.wait(*last, 0, TIMEOUT).map_err(unexpected)?;
        } else {
            channel.get(*last, 0, BYTES..2 * BYTES).map_err(unexpected)?;
        }
        channel.flush(TIMEOUT).map_err(unexpected)?;
        ring.check(test_rank, &stream, number)?;
        test_rank.group.barrier().map_err(unexpected)?;
    }
    Ok(())
}

fn many_copies(test_rank: &mut TestRank) -> Outcome {
    let mut ring = Ring::open(test_rank)?;
    let stream = test_rank.gpu.stream()?;
    let number = test_rank.next_round();
    ring.fill(test_rank, &stream, number)?;
    test_rank.group.barrier().map_err(unexpected)?;
    // Every second part of 50 bytes, in reverse order.
    let parts = (0..BYTES / 100).rev();
    let copies: Vec<_> =
        parts.map(|part| CopyRange { from: 100 * part, to: BYTES + 100 * part, len: 50 }).collect();
    let Ring { channel, next, last, .. } = &mut ring;
    channel.puts(*next, &copies).map_err(unexpected)?;
    channel.signal(*next, 0).map_err(unexpected)?;
    channel.wait(*last, 0, TIMEOUT).map_err(unexpected)?;
    channel.flush(TIMEOUT).map_err(unexpected)?;
    let mut wanted = block(last.index(), number, BYTES);
    for gap in wanted.chunks_mut(100) {
        gap[50..].fill(POISON);
    }
    let seen = ring.received(test_rank, &stream)?;
    test_rank.group.barrier().map_err(unexpected)?;
    same("every second part", &seen, &wanted)
}

fn on_a_stream(test_rank: &mut TestRank) -> Outcome {
    let mut ring = Ring::open(test_rank)?;
    let stream = test_rank.gpu.stream()?;
    let number = test_rank.next_round();
    ring.fill(test_rank, &stream, number)?;
    // Every rank has filled its places.
    test_rank.group.barrier().map_err(unexpected)?;
    for round in 0..ROUNDS {
        let (next, last) = (ring.next, ring.last);
        let messages = |messages: &mut StreamMessages<'_, u8>| {
            if round % 2 == 0 {
                messages.put_signal(next, 0..BYTES, BYTES, 0)?;
                messages.wait(last, 0)
            } else {
                messages.get(last, 0, BYTES..2 * BYTES)
            }
        };
        ring.channel.on_stream(&stream.for_starts(), messages).map_err(unexpected)?;
        // The stream goes on: what was received becomes poison, and the next rank may send again.
        let received = stream_copy(test_rank, &ring, &stream)?;
        let ready = |messages: &mut StreamMessages<'_, u8>| {
            messages.signal(last, 1)?;
            messages.wait(next, 1)
        };
        ring.channel.on_stream(&stream.for_starts(), ready).map_err(unexpected)?;
        stream.finish()?;
        same(
            format!("round {round}"),
            &received.read(0, BYTES),
            &block(last.index(), number, BYTES),
        )?;
    }
    test_rank.group.barrier().map_err(unexpected)
}

fn stream_copy(test_rank: &TestRank, ring: &Ring, stream: &CallerStream) -> Outcome<Pinned> {
    let pinned = test_rank.gpu.pinned(BYTES)?;
    stream.copy_out(&pinned, 0, ring.address(BYTES)?, BYTES)?;
    stream.fill(ring.address(BYTES)?, POISON, BYTES)?;
    Ok(pinned)
}

fn in_a_graph(test_rank: &mut TestRank) -> Outcome {
    let mut ring = Ring::open(test_rank)?;
    // SAFETY: the stream is finished before the channel is dropped.
    ring.channel = unsafe { ring.channel.capturable() };
    let stream = test_rank.gpu.stream()?;
    let (next, last) = (ring.next, ring.last);
    let graph = stream.record(CaptureMode::ThreadLocal, || {
        let sent = ring.channel.on_stream(&stream.for_starts(), |messages| {
            messages.put_signal(next, 0..BYTES, BYTES, 0)?;
            messages.wait(last, 0)
        });
        sent.map_err(unexpected)
    })?;
    for _ in 0..ROUNDS {
        let number = test_rank.next_round();
        ring.fill(test_rank, &stream, number)?;
        test_rank.group.barrier().map_err(unexpected)?;
        graph.replay()?;
        ring.check(test_rank, &stream, number)?;
        test_rank.group.barrier().map_err(unexpected)?;
        // Between replays, messages that are sent at once have signals of their own.
        ring.channel.signal(next, 0).map_err(unexpected)?;
        ring.channel.wait(last, 0, TIMEOUT).map_err(unexpected)?;
    }
    Ok(())
}
