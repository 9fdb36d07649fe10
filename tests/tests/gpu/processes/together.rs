//! Runs several groups, operations and streams in one process.

use std::future::Future;
use std::pin::pin;
use std::ptr::NonNull;
use std::sync::Arc;
use std::task::{Context, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Instant;

use peerlane_hal::Rank;
use peerlane_tests::Outcome;

use super::Case;
use super::captured::replayed;
use super::streams::{Book, start_once};
use crate::support::data::{check, unexpected};
use crate::support::test_rank::{CaptureMode, Form, TIMEOUT, TestRank, open_group};

const BLOCK_BYTES: usize = 5001;
const STARTS: usize = 10;

pub(crate) fn cases() -> Vec<Case> {
    vec![
        Case::new("two streams by turns", two_streams),
        Case::new("two operations on two streams", two_operations),
        Case::new("two groups", two_groups),
        Case::new("groups that are split from one", split_groups),
        Case::new("futures", futures),
        Case::new("dropped with starts open", dropped_early),
    ]
}

/// One operation, put onto one stream and onto another; an event orders the caller's own work.
fn two_streams(test_rank: &mut TestRank) -> Outcome {
    for form in Form::ALL {
        let builder = test_rank.group.all_gather::<u8>(BLOCK_BYTES);
        let mut gather = form.of(builder).prepare().map_err(unexpected)?;
        let streams = [test_rank.gpu.stream()?, test_rank.gpu.stream()?];
        let mut book = Book::new(test_rank, BLOCK_BYTES, STARTS)?;
        for index in 0..STARTS {
            // Twice on each, so that both a change and none are seen.
            let (now, before) = (&streams[index / 2 % 2], &streams[1 - index / 2 % 2]);
            now.follow(before)?;
            start_once(test_rank, now, &mut gather, &mut book)?;
        }
        streams.iter().try_for_each(|stream| stream.finish())?;
        book.check()?;
    }
    Ok(())
}

/// Two operations of one group that know nothing of each other.
fn two_operations(test_rank: &mut TestRank) -> Outcome {
    let mut first = test_rank.group.all_gather::<u8>(BLOCK_BYTES).prepare().map_err(unexpected)?;
    let builder = test_rank.group.all_gather::<u8>(BLOCK_BYTES).in_place();
    let mut second = builder.prepare().map_err(unexpected)?;
    let streams = [test_rank.gpu.stream()?, test_rank.gpu.stream()?];
    let mut books =
        [Book::new(test_rank, BLOCK_BYTES, STARTS)?, Book::new(test_rank, BLOCK_BYTES, STARTS)?];
    for _ in 0..STARTS {
        start_once(test_rank, &streams[0], &mut first, &mut books[0])?;
        start_once(test_rank, &streams[1], &mut second, &mut books[1])?;
    }
    streams.iter().try_for_each(|stream| stream.finish())?;
    books.iter().try_for_each(Book::check)
}

/// The even and the odd ranks, backwards: eager starts and graphs of a subgroup, while the first group has a start open.
fn split_groups(test_rank: &mut TestRank) -> Outcome {
    let color = Rank::at(test_rank.me).0 % 2;
    let split = test_rank.group.split(Some(color), -i64::from(test_rank.group.rank().0));
    let mut half = split.map_err(unexpected)?.expect("every rank has a color");
    let (me, ranks) = (test_rank.me, test_rank.ranks);
    let mut all = test_rank.group.all_gather::<u8>(BLOCK_BYTES).prepare().map_err(unexpected)?;
    let stream = test_rank.gpu.stream()?;
    let mut book = Book::new(test_rank, BLOCK_BYTES, 1)?;
    start_once(test_rank, &stream, &mut all, &mut book)?;
    std::mem::swap(&mut test_rank.group, &mut half);
    (test_rank.me, test_rank.ranks) = (test_rank.group.rank().index(), test_rank.group.ranks());
    // SAFETY: `replayed` finishes the stream and drops the graph, and the host borrows nothing.
    let builder = unsafe { test_rank.group.all_gather::<u8>(BLOCK_BYTES).capturable() };
    let mut gather = builder.prepare().map_err(unexpected)?;
    let mut of_half = Book::new(test_rank, BLOCK_BYTES, STARTS)?;
    for _ in 0..STARTS {
        start_once(test_rank, &stream, &mut gather, &mut of_half)?;
    }
    stream.finish()?;
    of_half.check()?;
    replayed(test_rank, &mut gather, 2, 3, CaptureMode::ThreadLocal)?;
    test_rank.gather_once(&mut gather)?;
    drop(gather);
    std::mem::swap(&mut test_rank.group, &mut half);
    (test_rank.me, test_rank.ranks) = (me, ranks);
    book.check()?;
    test_rank.gather_once(&mut all)?;
    half.close().map_err(unexpected)
}

/// A start of the host that is awaited, by a thread that sleeps until it is woken.
fn futures(test_rank: &mut TestRank) -> Outcome {
    let mut gather = test_rank.group.all_gather::<u8>(BLOCK_BYTES).prepare().map_err(unexpected)?;
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    for _ in 0..STARTS {
        let mut started = pin!(gather.start().map_err(unexpected)?);
        let begun = Instant::now();
        while started
            .as_mut()
            .poll(&mut Context::from_waker(&waker))
            .map_err(unexpected)?
            .is_pending()
        {
            thread::park_timeout(TIMEOUT);
            check(begun.elapsed() < TIMEOUT, || "the waker was not called".to_owned())?;
        }
    }
    test_rank.gather_once(&mut gather)
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Two groups of the same ranks; by turns on one stream, and each on a stream of its own.
fn two_groups(test_rank: &mut TestRank) -> Outcome {
    let mut other = open_group(
        &test_rank.gpu,
        &test_rank.hubs.remove(0),
        test_rank.me,
        test_rank.ranks,
        TIMEOUT,
    )?;
    let mut first = test_rank.group.all_gather::<u8>(BLOCK_BYTES).prepare().map_err(unexpected)?;
    let mut second = other.all_gather::<u8>(BLOCK_BYTES).prepare().map_err(unexpected)?;
    for shared in [true, false] {
        let streams = [test_rank.gpu.stream()?, test_rank.gpu.stream()?];
        let mut books = [
            Book::new(test_rank, BLOCK_BYTES, STARTS)?,
            Book::new(test_rank, BLOCK_BYTES, STARTS)?,
        ];
        for _ in 0..STARTS {
            start_once(test_rank, &streams[0], &mut first, &mut books[0])?;
            let stream = if shared { &streams[0] } else { &streams[1] };
            start_once(test_rank, stream, &mut second, &mut books[1])?;
        }
        streams.iter().try_for_each(|stream| stream.finish())?;
        books.iter().try_for_each(Book::check)?;
        // The next streams start from here.
        for gather in [&mut first, &mut second] {
            test_rank.gather_once(gather)?;
        }
    }
    drop(second);
    other.close().map_err(unexpected)
}

/// The handle goes while its starts are under way; they end well all the same.
fn dropped_early(test_rank: &mut TestRank) -> Outcome {
    let total = BLOCK_BYTES * test_rank.ranks;
    let memory = test_rank.gpu.memory(total)?;
    let base = NonNull::new(memory.address as *mut u8).expect("not at 0");
    // SAFETY: the memory lives until the barrier below, behind which no peer uses it.
    let output = unsafe { test_rank.group.register_at::<u8>(base, total) }.map_err(unexpected)?;
    let builder = test_rank.group.all_gather::<u8>(BLOCK_BYTES).output(output).in_place();
    let mut gather = builder.prepare().map_err(unexpected)?;
    let (stream, mut book) = (test_rank.gpu.stream()?, Book::new(test_rank, BLOCK_BYTES, STARTS)?);
    for _ in 0..STARTS {
        start_once(test_rank, &stream, &mut gather, &mut book)?;
    }
    drop(gather);
    stream.finish()?;
    book.check()?;
    test_rank.group.barrier().map_err(unexpected)?;
    let mut gather = test_rank.group.all_gather::<u8>(BLOCK_BYTES).prepare().map_err(unexpected)?;
    test_rank.gather_once(&mut gather)
}
