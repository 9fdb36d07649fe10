//! Waiting for starts with futures, descriptors and limits, and who moves the bytes meanwhile.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use peerlane_collectives::bootstrap::{Bootstrap, in_process};
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{Group, GroupOptions, Operation};
use peerlane_hal::{ErrorKind, Rank};
use peerlane_host as host;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::support::group::in_group;

/// The number of elements of a block that a rank does not put before its peer is ready.
const LEN: usize = 300_000;
const SOON: Duration = Duration::from_secs(20);

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Polls the future only when its waker was called, and fails if that takes too long.
pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let (mut context, begun) = (Context::from_waker(&waker), Instant::now());
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return output;
        }
        thread::park_timeout(SOON);
        assert!(begun.elapsed() < SOON, "the waker was not called");
    }
}

/// Waits for two futures at once.
async fn join<A: Future + Unpin, B: Future + Unpin>(
    mut one: A,
    mut other: B,
) -> (A::Output, B::Output) {
    let (mut first, mut second) = (None, None);
    std::future::poll_fn(move |context| {
        if first.is_none()
            && let Poll::Ready(output) = Pin::new(&mut one).poll(context)
        {
            first = Some(output);
        }
        if second.is_none()
            && let Poll::Ready(output) = Pin::new(&mut other).poll(context)
        {
            second = Some(output);
        }
        if first.is_none() || second.is_none() {
            return Poll::Pending;
        }
        Poll::Ready((first.take().unwrap(), second.take().unwrap()))
    })
    .await
}

fn fill(gather: &mut Operation<u32>, value: u32) -> Result<(), Error> {
    gather.input_mut()?.fill(value);
    Ok(())
}

fn check(gather: &mut Operation<u32>, ranks: u32, round: u32) -> Result<(), Error> {
    let output = gather.output()?;
    let len = output.len() / ranks as usize;
    let firsts: Vec<_> = output.chunks(len).map(|block| (block[0], block[len - 1])).collect();
    let expected: Vec<_> = (0..ranks).map(|rank| (rank + round, rank + round)).collect();
    assert_eq!(firsts, expected, "round {round}");
    Ok(())
}

#[test]
fn futures_are_woken_and_return_the_operation() {
    for ranks in 1..=5 {
        for len in [1, LEN] {
            in_group(ranks, |group| {
                let rank = group.rank().0;
                let mut gather = group.all_gather::<u32>(len).prepare()?;
                for round in 0..20 {
                    if (round + rank) % 4 == 0 {
                        thread::sleep(Duration::from_millis(2));
                    }
                    fill(&mut gather, rank + round)?;
                    block_on(gather.start()?)?;
                    check(&mut gather, ranks as u32, round)?;
                    fill(&mut gather, rank + round + 1)?;
                    gather = block_on(gather.into_started()?)?;
                    check(&mut gather, ranks as u32, round + 1)?;
                    // An owned start is also waited for without a future, and the operation runs as before.
                    gather = gather.into_started()?.wait()?;
                    gather.run()?;
                }
                Ok(())
            });
        }
    }
}

#[test]
fn a_descriptor_is_readable_when_the_start_is_complete() {
    let looks = AtomicU32::new(0);
    in_group(3, |group| {
        let rank = group.rank().0;
        let mut gather = group.all_gather::<u32>(LEN).prepare()?;
        for round in 0..20 {
            fill(&mut gather, rank + round)?;
            let mut started = gather.start()?;
            if (round + rank) % 3 == 0 {
                thread::sleep(Duration::from_millis(3));
            }
            loop {
                let descriptor = started.descriptor()?;
                let mut ready = [PollFd::new(&descriptor, PollFlags::IN)];
                let limit = Timespec::try_from(SOON).unwrap();
                assert_eq!(poll(&mut ready, Some(&limit)).unwrap(), 1, "not readable");
                if started.poll()? {
                    break;
                }
            }
            drop(started);
            check(&mut gather, 3, round)?;
        }
        // A start that nobody observes leaves it as it is, and the next one makes it unreadable.
        gather.start()?.wait()?;
        if rank == 0 {
            // A rank that fails never looks.
            let begun = Instant::now();
            while looks.load(Ordering::Relaxed) < 2 {
                assert!(begun.elapsed() < SOON, "the others did not look at their descriptors");
                thread::sleep(Duration::from_millis(1));
            }
            return gather.start()?.wait();
        }

        let mut started = gather.start()?;
        let descriptor = started.descriptor()?;
        let mut looked = [PollFd::new(&descriptor, PollFlags::IN)];
        let readable = poll(&mut looked, Some(&Timespec::default())).unwrap();
        looks.fetch_add(1, Ordering::Relaxed);
        assert_eq!(readable, 0, "the descriptor is readable before rank 0 has started");
        started.wait()
    });
}

#[test]
fn a_limit_does_not_end_the_group() {
    let late = Barrier::new(2);
    in_group(2, |group| {
        let rank = group.rank().0;
        let mut gather = group.all_gather::<u32>(LEN).prepare()?;
        fill(&mut gather, rank)?;
        if rank == 0 {
            let mut started = gather.start()?;
            let (begun, limit) = (Instant::now(), Duration::from_millis(30));
            assert!(!started.wait_for(limit)?);
            assert!(begun.elapsed() >= limit);
            assert!(!started.wait_for(Duration::ZERO)?);
            late.wait();
            assert!(started.wait_for(SOON)?);
            assert!(started.wait_for(Duration::ZERO)?);
        } else {
            late.wait();
            gather.run()?;
        }
        check(&mut gather, 2, 0)
    });
}

#[test]
fn a_future_that_is_dropped_in_flight_loses_nothing() {
    in_group(2, |group| {
        let rank = group.rank().0;
        let mut gather = group.all_gather::<u32>(LEN).prepare()?;
        for round in 0..10 {
            fill(&mut gather, rank + round)?;
            {
                let mut started = pin!(gather.start()?);
                let _ = started.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            }
            // The input is free when the start that was dropped is complete.
            fill(&mut gather, rank + round + 1)?;
            gather.run()?;
            check(&mut gather, 2, round + 1)?;
        }
        drop(gather.into_started()?);
        Ok(())
    });
}

/// Calls a function once when it is woken, and notes on which thread.
struct Call {
    call: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    thread: Mutex<Option<String>>,
}

impl Call {
    fn new(call: impl FnOnce() + Send + 'static) -> Arc<Self> {
        Arc::new(Self { call: Mutex::new(Some(Box::new(call))), thread: Mutex::default() })
    }

    /// Waits until the function has returned or panicked, and returns the name of the thread.
    fn wait(&self) -> String {
        let begun = Instant::now();
        loop {
            if let Some(thread) = self.thread.lock().unwrap().take() {
                return thread;
            }
            assert!(begun.elapsed() < SOON, "the waker was not called, or has not returned");
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Wake for Call {
    fn wake(self: Arc<Self>) {
        let Some(call) = self.call.lock().unwrap().take() else { return };
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(call));
        let name = thread::current().name().unwrap_or_default().to_owned();
        // Only a panic that the test expects is noted as a call.
        let is_expected = |panic: &Box<dyn std::any::Any + Send>| panic.is::<&str>();
        if panicked.as_ref().err().is_none_or(is_expected) {
            *self.thread.lock().unwrap() = Some(name);
        }
        if let Err(panic) = panicked {
            std::panic::resume_unwind(panic);
        }
    }
}

/// Counts how often it was called.
struct Count(AtomicU32);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Polls a future as long as it asks for that itself, and then leaves `waker` with it.
fn leave_waker<F: Future + Unpin>(future: &mut F, waker: &Waker) {
    let count = Arc::new(Count(AtomicU32::new(0)));
    let counts = Waker::from(Arc::clone(&count));
    for polls in 1.. {
        assert!(Pin::new(&mut *future).poll(&mut Context::from_waker(&counts)).is_pending());
        if count.0.load(Ordering::Relaxed) < polls {
            break;
        }
    }
    assert!(Pin::new(future).poll(&mut Context::from_waker(waker)).is_pending());
}

/// The panic of a waker of a test.
const EXPECTED: &str = "a waker of a test";

#[test]
fn a_waker_that_panics_harms_no_later_start() {
    const ROUNDS: usize = 10;
    let has_polled = Barrier::new(2);
    in_group(2, |group| {
        let mut gather = group.all_gather::<u32>(LEN).prepare()?;
        if group.rank() == Rank(1) {
            for _ in 0..2 * ROUNDS {
                has_polled.wait();
                gather.run()?;
            }
            return Ok(());
        }

        // The progress thread goes on after the panics. Where the machine is busy, ranks that have
        // waited for long exchange messages, and another thread can be the one that calls a waker.
        for calls in [|| std::panic::panic_any(EXPECTED), || ()] as [fn(); 2] {
            let mut by_progress = 0;
            for _ in 0..ROUNDS {
                let call = Call::new(calls);
                let mut started = gather.start()?;
                let waker = Waker::from(Arc::clone(&call));
                leave_waker(&mut started, &waker);
                has_polled.wait();
                by_progress += u32::from(call.wait() == "peerlane-progress");
                started.wait()?;
            }
            assert!(by_progress > 0, "the progress thread has called no waker");
        }
        Ok(())
    });
}

#[test]
fn a_waker_can_drop_the_group() {
    let has_polled = Barrier::new(2);
    in_process::run(2, |bootstrap| {
        let rank = bootstrap.rank();
        let fabric = host::Fabric::open(rank, bootstrap.ranks())?;
        let mut group = Group::open(bootstrap, fabric)?;
        let mut gather = group.all_gather::<u32>(LEN).prepare()?;
        if rank == Rank(1) {
            has_polled.wait();
            // The peer drops its group when the start is complete there, which can end it here.
            let _ = gather.run();
            return Ok(());
        }

        let mut started = gather.into_started()?;
        let drops = Call::new(move || drop(group));
        let waker = Waker::from(Arc::clone(&drops));
        leave_waker(&mut started, &waker);
        has_polled.wait();
        drops.wait();
        drop(started);
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_waker_can_drop_the_group_that_has_ended() {
    let has_polled = Barrier::new(2);
    in_process::run(2, |bootstrap| {
        let rank = bootstrap.rank();
        let fabric = host::Fabric::open(rank, bootstrap.ranks())?;
        let group = Group::open(bootstrap, fabric)?;
        if rank == Rank(1) {
            has_polled.wait();
            drop(group);
            return Ok(());
        }

        let mut end = group.end()?;
        let drops = Call::new(move || drop(group));
        let waker = Waker::from(Arc::clone(&drops));
        assert!(Pin::new(&mut end).poll(&mut Context::from_waker(&waker)).is_pending());
        has_polled.wait();
        drops.wait();
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_future_can_be_polled_after_it_was_complete() {
    in_group(1, |group| {
        let mut gather = group.all_gather::<u32>(1).prepare()?;
        let context = &mut Context::from_waker(Waker::noop());
        let mut started = gather.start()?;
        while Pin::new(&mut started).poll(context)?.is_pending() {}
        assert!(Pin::new(&mut started).poll(context)?.is_ready());
        let mut owned = gather.into_started()?;
        let again = loop {
            if let Poll::Ready(gather) = Pin::new(&mut owned).poll(context)? {
                drop(gather);
                break Pin::new(&mut owned).poll(context);
            }
        };
        let Poll::Ready(Err(error)) = again else { panic!("not ready") };
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert_eq!(
            error.to_string(),
            "the start was polled again after it had returned its operation"
        );
        Ok(())
    });
}

#[test]
fn a_future_returns_the_loss_of_a_rank_and_its_lateness() {
    for is_late in [false, true] {
        let over = Barrier::new(2);
        let errors = in_process::run(2, |bootstrap| {
            let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
            let timeout = if is_late { Duration::from_millis(200) } else { SOON };
            let mut group = GroupOptions::default().timeout(SOON).open(bootstrap, fabric)?;
            let mut gather = group.all_gather::<u32>(LEN).timeout(timeout).prepare()?;
            let mut error = None;
            if group.rank().0 == 0 {
                let started = gather.start()?;
                over.wait();
                error = block_on(started).err();
            } else {
                over.wait();
            }
            if is_late {
                over.wait();
            }
            Ok(error.map(|error| (error.kind(), error.peer())))
        });
        let kind = if is_late { ErrorKind::Timeout } else { ErrorKind::PeerLost };
        assert_eq!(errors.unwrap()[0], Some((kind, Some(Rank(1)))));
    }
}

/// Each rank waits for another group first, and no thread of a rank calls anything else.
#[test]
fn futures_of_groups_complete_in_any_order() {
    in_group(4, |world| {
        let rank = world.rank().0;
        let mut rows = world.split(Some(rank / 2), 0)?.unwrap();
        let mut columns = world.split(Some(rank % 2), 0)?.unwrap();
        let mut row = rows.all_gather::<u32>(LEN).prepare()?;
        let mut column = columns.all_gather::<u32>(LEN).prepare()?;
        for round in 0..20 {
            let (row, column) = (row.start()?, column.start()?);
            if (rank + round) % 3 == 0 {
                let (row, column) = block_on(join(row, column));
                row.and(column)?;
            } else if (rank + round) % 3 == 1 {
                block_on(column)?;
                block_on(row)?;
            } else {
                block_on(row)?;
                block_on(column)?;
            }
        }
        drop((row, column));
        rows.close()?;
        columns.close()
    });
}

#[test]
fn a_progress_thread_moves_bytes_without_calls() {
    let complete = Barrier::new(2);
    in_process::run(2, |bootstrap| {
        let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
        let mut group = GroupOptions::default().progress_thread(true).open(bootstrap, fabric)?;
        let rank = group.rank().0;
        let mut half = group.split(Some(0), 0)?.unwrap();
        for group in [&mut group, &mut half] {
            let mut gather = group.all_gather::<u32>(LEN).prepare()?;
            fill(&mut gather, rank)?;
            let started = if rank == 0 {
                let started = gather.start()?;
                // Rank 0 makes no call until rank 1, which starts later, has everything.
                complete.wait();
                complete.wait();
                started
            } else {
                complete.wait();
                let mut started = gather.start()?;
                assert!(started.wait_for(SOON)?);
                complete.wait();
                started
            };
            started.wait()?;
            check(&mut gather, 2, 0)?;
        }
        half.close()?;
        group.close()
    })
    .unwrap();
}

/// A rank that prepares an operation waits in an exchange, and meanwhile moves what is open in its other group.
#[test]
fn a_preparation_in_one_group_moves_the_others() {
    let started = Barrier::new(2);
    in_group(2, |world| {
        let rank = world.rank().0;
        let mut other = world.split(Some(0), 0)?.unwrap();
        let mut gather = world.all_gather::<u32>(LEN).prepare()?;
        fill(&mut gather, rank)?;
        if rank == 0 {
            let running = gather.start()?;
            started.wait();
            drop(other.all_gather::<u32>(1).prepare()?);
            running.wait()?;
        } else {
            started.wait();
            let mut running = gather.start()?;
            assert!(running.wait_for(SOON)?);
            drop(other.all_gather::<u32>(1).prepare()?);
        }
        check(&mut gather, 2, 0)?;
        other.close()
    });
}

/// Two groups that have nothing in common but their ranks, each a thread.
#[test]
fn groups_of_one_thread_move_each_other() {
    let others: Vec<_> =
        in_process::group(2).unwrap().into_iter().map(|one| Mutex::new(Some(one))).collect();
    let together = Barrier::new(2);
    in_group(2, |group| {
        let rank = group.rank();
        let bootstrap = others[rank.index()].lock().unwrap().take().unwrap();
        let mut other = Group::open(bootstrap, host::Fabric::open(rank, 2)?)?;
        let mut one = group.all_gather::<u32>(LEN).prepare()?;
        let mut two = other.all_gather::<u32>(LEN).prepare()?;
        // Each rank starts first what the other one waits for.
        if rank.0 == 0 {
            let one = one.start()?;
            together.wait();
            together.wait();
            let two = two.start()?;
            two.wait()?;
            one.wait()?;
        } else {
            together.wait();
            let two = two.start()?;
            together.wait();
            one.start()?.wait()?;
            two.wait()?;
        }
        drop((one, two));
        other.close()
    });
}
