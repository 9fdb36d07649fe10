//! Several groups, several operations and several streams of one process.

use std::ptr::NonNull;

use peerlane_conformance::Outcome;

use super::Case;
use super::streams::{Book, start_once};
use crate::support::data::unexpected;
use crate::support::stage::{Form, Stage, TIMEOUT, open_group};

const SHARD_BYTES: usize = 5001;
const STARTS: usize = 10;

pub(crate) fn cases() -> Vec<Case> {
    vec![
        Case::new("two streams by turns", two_streams),
        Case::new("two operations on two streams", two_operations),
        Case::new("two groups", two_groups),
        Case::new("dropped with starts open", dropped_early),
    ]
}

/// One operation, put onto one stream and onto another; an event orders the caller's own work.
fn two_streams(stage: &mut Stage) -> Outcome {
    for form in Form::ALL {
        let builder = stage.group.all_gather::<u8>(SHARD_BYTES);
        let mut gather = form.of(builder).prepare().map_err(unexpected)?;
        let streams = [stage.gpu.stream()?, stage.gpu.stream()?];
        let mut book = Book::new(stage, SHARD_BYTES, STARTS)?;
        for index in 0..STARTS {
            // Twice on each, so that both a change and none are seen.
            let (now, before) = (&streams[index / 2 % 2], &streams[1 - index / 2 % 2]);
            now.follow(before)?;
            start_once(stage, now, &mut gather, &mut book)?;
        }
        streams.iter().try_for_each(|stream| stream.finish())?;
        book.check()?;
    }
    Ok(())
}

/// Two operations of one group that know nothing of each other.
fn two_operations(stage: &mut Stage) -> Outcome {
    let mut first = stage.group.all_gather::<u8>(SHARD_BYTES).prepare().map_err(unexpected)?;
    let builder = stage.group.all_gather::<u8>(SHARD_BYTES).in_place();
    let mut second = builder.prepare().map_err(unexpected)?;
    let streams = [stage.gpu.stream()?, stage.gpu.stream()?];
    let mut books =
        [Book::new(stage, SHARD_BYTES, STARTS)?, Book::new(stage, SHARD_BYTES, STARTS)?];
    for _ in 0..STARTS {
        start_once(stage, &streams[0], &mut first, &mut books[0])?;
        start_once(stage, &streams[1], &mut second, &mut books[1])?;
    }
    streams.iter().try_for_each(|stream| stream.finish())?;
    books.iter().try_for_each(Book::check)
}

/// Two groups of the same ranks; by turns on one stream, and each on a stream of its own.
fn two_groups(stage: &mut Stage) -> Outcome {
    let mut other = open_group(&stage.gpu, &stage.hubs.remove(0), stage.me, stage.ranks, TIMEOUT)?;
    let mut first = stage.group.all_gather::<u8>(SHARD_BYTES).prepare().map_err(unexpected)?;
    let mut second = other.all_gather::<u8>(SHARD_BYTES).prepare().map_err(unexpected)?;
    for shared in [true, false] {
        let streams = [stage.gpu.stream()?, stage.gpu.stream()?];
        let mut books =
            [Book::new(stage, SHARD_BYTES, STARTS)?, Book::new(stage, SHARD_BYTES, STARTS)?];
        for _ in 0..STARTS {
            start_once(stage, &streams[0], &mut first, &mut books[0])?;
            let stream = if shared { &streams[0] } else { &streams[1] };
            start_once(stage, stream, &mut second, &mut books[1])?;
        }
        streams.iter().try_for_each(|stream| stream.finish())?;
        books.iter().try_for_each(Book::check)?;
        // The next streams start from here.
        for gather in [&mut first, &mut second] {
            stage.gather_once(gather)?;
        }
    }
    drop(second);
    other.close().map_err(unexpected)
}

/// The handle goes while its starts are under way; they end well all the same.
fn dropped_early(stage: &mut Stage) -> Outcome {
    let total = SHARD_BYTES * stage.ranks;
    let memory = stage.gpu.memory(total)?;
    let base = NonNull::new(memory.address as *mut u8).expect("not at 0");
    // SAFETY: the memory lives until the barrier below, behind which no peer uses it.
    let output = unsafe { stage.group.register_at::<u8>(base, total) }.map_err(unexpected)?;
    let builder = stage.group.all_gather::<u8>(SHARD_BYTES).output(output).in_place();
    let mut gather = builder.prepare().map_err(unexpected)?;
    let (stream, mut book) = (stage.gpu.stream()?, Book::new(stage, SHARD_BYTES, STARTS)?);
    for _ in 0..STARTS {
        start_once(stage, &stream, &mut gather, &mut book)?;
    }
    drop(gather);
    stream.finish()?;
    book.check()?;
    stage.group.barrier().map_err(unexpected)?;
    let mut gather = stage.group.all_gather::<u8>(SHARD_BYTES).prepare().map_err(unexpected)?;
    stage.gather_once(&mut gather)
}
