//! Starts a prepared operation any number of times, and waits for its completion.

use std::any::Any;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use peerlane_hal::{Deadline, ErrorKind, Rank};

use super::execution::Execution;
use super::first_polls::FirstPolls;
use crate::error::Error;
use crate::group::call::Patience;
use crate::group::eager::{EagerPolls, Look, Next};
use crate::group::heap::Allocation;
use crate::group::runtime::Runtime;
use crate::group::start_part::{PeerLens, StartPart};
use crate::group::tracker::StartTracker;
use crate::layout::Layout;
use crate::plan::{Cell, Plan};
use crate::run::backoff::Backoff;
use crate::run::buffers::Start;
use crate::run::executor::{Executor, StartFailure};
use crate::trace::TracedStart;

/// Maximum time that a waiting thread sleeps between two polls. If a peer is late by seconds, a
/// wait may take up to this much longer.
const NAP_MAX: Duration = Duration::from_millis(10);
const COMPLETION: &str = "the completion of a start";
const ROOM_PARK_MAX: Duration = Duration::from_millis(1);

pub(super) struct Prepared {
    execution: Arc<Execution>,
    runtime: Arc<Runtime>,
    park_misses_events: bool,
    /// Whether flags are compared that the host cannot read directly.
    checks_starts: bool,
    first_polls: FirstPolls,
    /// The blocks of the heap, which are dropped after the last start.
    allocation: SharedAllocation,
}

/// The polls of a future, which moves a start by itself as long as the start moves.
#[derive(Default)]
pub(super) struct FuturePolls {
    eager: EagerPolls,
    /// `None` until a poll has left the start open.
    start: Option<StartOfFuture>,
}

/// A start that only the polls of a future move.
///
/// It borrows nothing, so that a handle with it can be dropped after the borrow of its operation
/// has ended.
struct StartOfFuture {
    execution: Arc<Execution>,
    runtime: Arc<Runtime>,
    epoch: u64,
}

impl Drop for StartOfFuture {
    /// Has the progress thread go on with the start, because peers may wait for it.
    fn drop(&mut self) {
        let is_complete = self.execution.tracker.closed() >= self.epoch;
        if !is_complete && !self.runtime.driver.is_of_parent() {
            // Without room for the thread, the next call of this rank moves the start.
            let _ = observe(&self.execution, &self.runtime);
        }
    }
}

/// Has the progress thread drive a start and tell its caller when the start is complete.
fn observe(execution: &Execution, runtime: &Runtime) -> Result<(), Error> {
    let tracker = &execution.tracker;
    if !tracker.is_observed() {
        runtime.driver.start_progress()?;
        tracker.observe();
        runtime.driver.wake_progress();
    }
    Ok(())
}

/// The blocks of the heap, which several executors of one operation share.
pub(super) type SharedAllocation = Arc<Mutex<Option<Allocation>>>;

struct Progress {
    done: u64,
    progressed: bool,
}

impl Prepared {
    pub(super) fn new(
        executor: Executor,
        runtime: Arc<Runtime>,
        tracker: StartTracker,
        checks_starts: bool,
        allocation: SharedAllocation,
    ) -> Self {
        let park_misses_events = executor.park_misses_events();
        let mut lanes = executor.lanes().iter();
        let queues = lanes.find_map(|lane| lane.queue.caps().shared_queues);

        let (life, open) = (Arc::clone(&runtime.life), Arc::clone(runtime.driver.open_count()));
        let execution = Arc::new(Execution::new(Arc::new(tracker), executor, life, open));
        runtime.add_work(Arc::clone(&execution) as _, queues);
        let first_polls = FirstPolls::default();
        Self { execution, runtime, park_misses_events, checks_starts, first_polls, allocation }
    }

    fn executor(&self) -> MutexGuard<'_, Executor> {
        self.execution.executor()
    }

    pub(super) fn tracker(&self) -> &Arc<StartTracker> {
        &self.execution.tracker
    }

    pub(super) fn check(&self) -> Result<(), Error> {
        self.runtime.life.check()
    }

    /// Records that this rank has refused a start, for ranks that ask what it waits for.
    pub(super) fn note_refusal(&self, error: &Error) {
        self.runtime.work.order.refusal.note(error);
    }

    pub(super) fn started(&self) -> u64 {
        self.executor().started()
    }

    pub(super) fn is_strict(&self) -> bool {
        self.executor().is_strict()
    }

    pub(super) fn is_polled(&self) -> bool {
        self.executor().is_polled()
    }

    pub(super) fn traced(&self) -> Option<(Vec<TracedStart>, bool)> {
        self.executor().traced()
    }

    /// Waits until all starts are complete.
    pub(super) fn settle(&self, timeout: Duration) -> Result<(), Error> {
        // The executor has nothing to do, so its lock is not needed.
        if !self.tracker().is_unfinished() {
            return self.runtime.life.check().or_else(|_| self.fail());
        }

        let (started, done) = {
            let executor = self.executor();
            (executor.started(), executor.done())
        };
        if done < started {
            // There may be many open starts on a stream, each with its own deadline.
            let one = (!self.tracker().is_on_stream()).then(|| Deadline::after(timeout));
            return self.wait(started, one);
        }

        if self.runtime.life.check().is_err() {
            return self.fail();
        }
        self.tracker().note_finished(started);
        Ok(())
    }

    /// Waits until nothing of the earlier starts is left to submit, so that
    /// [`resize`](Self::resize) can follow. Returns the number of these starts, and whether they
    /// are complete.
    pub(super) fn prepare_resize(&mut self, timeout: Duration) -> Result<(u64, bool), Error> {
        // `settle` locks the executor again, so the lock ends here.
        let (is_armed, is_submitted, started, is_done) = {
            let executor = self.executor();
            let (started, done) = (executor.started(), executor.done());
            (executor.is_armed(), executor.has_submitted_all(), started, done >= started)
        };

        if is_armed {
            let text = "a thread replays a captured start of the operation, which cannot be resized then; prepare another \
                        operation for other lengths";
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }

        if is_submitted {
            self.runtime.life.check()?;
            return Ok((started, is_done));
        }

        self.settle(timeout)?;
        Ok((started, true))
    }

    /// Changes the copies of the start after `started` to those of a layout.
    ///
    /// # Errors
    /// That of the engine, if it cannot compile the start. The next start is then an error too.
    pub(super) fn resize(
        &mut self,
        plan: &Plan,
        layout: &Layout,
        started: u64,
    ) -> Result<(), Error> {
        let mut executor = self.executor();
        // Other executors of the operation may have made starts since the last one of this.
        if executor.started() < started {
            executor.skip_to(started);
            self.tracker().skip_to(started);
        }
        executor.resize(plan, layout)
    }

    /// Sets the lengths and places of the starts after `started`, as [`StartTracker::set_part`].
    pub(super) fn set_part(&self, part: &StartPart, pair: &dyn Fn(Rank) -> PeerLens, started: u64) {
        self.tracker().set_part(part, pair, started);
    }

    pub(super) fn start(&mut self, deadline: Deadline, has_handles: bool) -> Result<u64, Error> {
        self.runtime.life.check()?;
        self.tracker().mark_on_host();
        let epoch = self.begin_with(&mut self.executor(), deadline, has_handles);
        self.drive()?;
        Ok(epoch)
    }

    /// Makes a start and polls it a few times, in which a small start completes. Returns its
    /// number, and its deadline if it is not complete.
    ///
    /// Until then, it locks the executor once and does not read the clock. Locks and clock readings
    /// of every poll would take as long as a flag takes from one processor to another.
    pub(super) fn run(&mut self, timeout: Duration) -> Result<(u64, Option<Deadline>), Error> {
        self.runtime.life.check()?;
        self.tracker().mark_on_host();

        let mut executor = self.execution.executor();
        let epoch = self.execution.begin(&mut executor, None);
        self.runtime.note_start(false, timeout);

        // A poll of other engines is a call of a driver.
        let polls = if executor.is_polled() { self.first_polls.polls() } else { 1 };
        let (mut done, mut polled) = (Ok(0), 0);
        while polled < polls && done.as_ref().is_ok_and(|done| *done < epoch) {
            done = self.execution.advance(&mut executor).map(|(_, done)| done);
            polled += 1;
            std::hint::spin_loop();
        }
        drop(executor);

        let done = self.finish_drive(done)?;
        let is_complete = self.has_completed(done, epoch)?;
        self.first_polls.note_end(is_complete.then_some(polled));
        if is_complete {
            return Ok((epoch, None));
        }

        let deadline = Deadline::after(timeout);
        self.tracker().set_deadline(deadline);
        Ok((epoch, Some(deadline)))
    }

    pub(super) fn start_on(&mut self, stream: &dyn Any, timeout: Duration) -> Result<Start, Error> {
        self.runtime.life.check()?;
        if !self.executor().is_submitted() {
            // Without this wait, the rest of an eager start that met a full queue would be put onto
            // the stream.
            self.settle(timeout)?;
        }

        let enqueued = self.enqueue_on(&mut self.executor(), stream, timeout);
        self.finish_enqueue(enqueued, timeout)
    }

    /// Makes a start with handles behind the work that a stream holds, and leaves the stream to the
    /// caller.
    pub(super) fn start_beside(
        &mut self,
        stream: &dyn Any,
        timeout: Duration,
    ) -> Result<Start, Error> {
        self.runtime.life.check()?;
        if !self.executor().has_submitted_all() {
            // What departs would be read by the rest of an earlier start.
            self.settle(timeout)?;
        }

        let mut executor = self.executor();
        let admit = |executor: &Executor, captures| self.admit(executor, captures);
        let enqueued = executor.beside_stream(stream, admit, |executor, capture| {
            if capture.is_capturing() {
                executor.set_handles(true);
                return Ok(Start::Captured(executor.capture(capture)?));
            }
            let epoch = self.begin_with(executor, Deadline::after(timeout), true);
            self.enqueue(executor)?;
            Ok(Start::Eager(epoch))
        });
        drop(executor);

        if let Ok(Start::Captured(_)) = enqueued {
            self.runtime.driver.wake_progress();
        }
        self.finish_enqueue(enqueued, timeout)
    }

    /// Lets the newest start read chunks of the input, behind the work that a stream holds if there
    /// is one.
    pub(super) fn depart(
        &self,
        cells: &[Cell],
        stream: Option<&dyn Any>,
        timeout: Duration,
    ) -> Result<(), Error> {
        if self.runtime.life.check().is_err() {
            return self.fail();
        }

        let mut executor = self.executor();
        if let Some(stream) = stream {
            executor.follow(stream)?;
        }
        let mut departed = Ok(());
        for &cell in cells {
            departed = departed.and_then(|()| executor.depart(cell));
        }
        self.tracker().set_missing_part(executor.first_missing());
        let enqueued = match (departed, stream) {
            (Err(error), _) => Err(StartFailure::Broken(error)),
            (Ok(()), Some(_)) => self.enqueue(&mut executor),
            (Ok(()), None) => Ok(()),
        };
        drop(executor);

        self.finish_enqueue(enqueued, timeout)?;
        if stream.is_none() {
            self.drive()?;
        }
        Ok(())
    }

    /// Has later work on a stream follow the arrival of chunks of the newest start.
    pub(super) fn order_after_arrival(
        &self,
        cells: &[Cell],
        stream: &dyn Any,
    ) -> Result<(), Error> {
        if self.runtime.life.check().is_err() {
            return self.fail();
        }

        let mut executor = self.executor();
        for &cell in cells {
            if !executor.order_after_arrival(cell, stream)? {
                let text = format!(
                    "block {} does not arrive before other blocks of the input have departed; let them depart \
                     first",
                    cell.block
                );
                return Err(Error::new(ErrorKind::InvalidArgument, text));
            }
        }
        Ok(())
    }

    /// Has lane 0 follow the work on each of `readers`, and later work on `stream` follow lane 0.
    pub(super) fn join_beside(&self, readers: &[&dyn Any], stream: &dyn Any) -> Result<(), Error> {
        if self.runtime.life.check().is_err() {
            return self.fail();
        }

        let mut executor = self.executor();
        readers.iter().try_for_each(|reader| executor.follow(*reader))?;
        executor.join(stream)?;

        match executor.first_missing() {
            None => Ok(()),
            Some(cell) => {
                let text = format!(
                    "chunk {} of the block for rank {} has not departed, expected all blocks before the start is \
                     finished",
                    cell.chunk, cell.block
                );
                Err(Error::new(ErrorKind::InvalidArgument, text))
            }
        }
    }

    /// Returns the chunks in the orders in which starts bring them and read them.
    pub(super) fn chunk_orders(&self) -> (Vec<Cell>, Vec<Cell>) {
        let executor = self.executor();
        (executor.arriving(), executor.departing())
    }

    /// Returns whether only lane 0 reads the input.
    pub(super) fn departs_in_one_lane(&self) -> bool {
        self.executor().departs_in_one_lane()
    }

    /// Returns whether the newest start still needs all of these chunks of the input.
    pub(super) fn misses_all(&self, cells: &[Cell]) -> bool {
        let executor = self.executor();
        cells.iter().all(|&cell| executor.misses(cell))
    }

    /// Returns whether chunks of a start have arrived, or the start is complete if there are none.
    pub(super) fn has_arrived(&self, epoch: u64, cells: &[Cell]) -> Result<bool, Error> {
        let done = self.drive()?.done;
        let has_arrived = self.has_reached(done, epoch, cells)?;
        if !has_arrived {
            self.drive_others();
        }
        Ok(has_arrived)
    }

    /// Waits until chunks of a start have arrived, or the start is complete if there are none.
    /// Returns whether that was before `limit`.
    pub(super) fn wait_arrival(
        &self,
        (epoch, cells): (u64, &[Cell]),
        deadline: Option<Deadline>,
        limit: Option<Deadline>,
    ) -> Result<bool, Error> {
        let _blocked = self.tracker().block(epoch, limit.is_some());
        let mut patience = Patience::new(self.tracker().rank());
        self.wait_blocked((epoch, cells), (deadline, limit), &mut patience)
    }

    /// Returns what a start on a stream returns, after an error of it was handled.
    fn finish_enqueue<R>(
        &self,
        enqueued: Result<R, StartFailure>,
        timeout: Duration,
    ) -> Result<R, Error> {
        match enqueued {
            Ok(start) => return Ok(start),
            Err(StartFailure::Refused(error)) => return Err(error),
            Err(StartFailure::Broken(error)) => {
                self.runtime.life.raise(self.execution.broken(&error))
            }
            Err(StartFailure::Overdue) => self.execution.raise_late(timeout),
            Err(StartFailure::Aborted) => {}
        }
        self.fail()
    }

    /// Checks that a start that is not captured can go onto a stream, and returns whether the
    /// stream captures. Nothing is started.
    pub(super) fn check_stream(&self, stream: &dyn Any) -> Result<bool, Error> {
        self.executor().check_before(stream)
    }

    /// Returns what runs the group of the operation.
    pub(super) fn runtime(&self) -> &Arc<Runtime> {
        &self.runtime
    }

    fn enqueue_on(
        &self,
        executor: &mut Executor,
        stream: &dyn Any,
        timeout: Duration,
    ) -> Result<Start, StartFailure> {
        let admit = |executor: &Executor, captures| self.admit(executor, captures);
        let start = executor.on_stream(stream, admit, |executor, capture| {
            if capture.is_capturing() {
                executor.set_handles(false);
                return Ok(Start::Captured(executor.capture(capture)?));
            }
            let epoch = self.begin(executor, Deadline::after(timeout));
            self.enqueue(executor)?;
            Ok(Start::Eager(epoch))
        })?;

        if start.is_captured() {
            self.runtime.driver.wake_progress();
        }
        Ok(start)
    }

    /// Prepares the threads of the driver for a start on a stream, which can be captured.
    fn admit(&self, executor: &Executor, captures: bool) -> Result<(), StartFailure> {
        if executor.needs_thread(captures) {
            // The thread must run before the stream contains commands that depend on it.
            self.tracker().mark_driven_by_thread();
            self.runtime.driver.start_progress().map_err(StartFailure::Refused)?;
        }

        match captures {
            true => {
                self.tracker().mark_captured();
                self.runtime.driver.wake_watchdog();
            }
            false => self.tracker().mark_on_stream(),
        }
        Ok(())
    }

    /// Begins a start with handles, or without.
    fn begin_with(&self, executor: &mut Executor, deadline: Deadline, has_handles: bool) -> u64 {
        let epoch = self.begin(executor, deadline);
        if has_handles {
            executor.set_handles(true);
            self.tracker().set_missing_part(executor.first_missing());
        }
        epoch
    }

    fn begin(&self, executor: &mut Executor, deadline: Deadline) -> u64 {
        let epoch = self.execution.begin(executor, Some(deadline));
        self.runtime.note_start(self.tracker().is_on_stream(), deadline.timeout());
        epoch
    }

    fn enqueue(&self, executor: &mut Executor) -> Result<(), StartFailure> {
        // The engines are asked what is complete only if there is no room, because a start must not
        // wait for the answer.
        executor.submit().map_err(StartFailure::Broken)?;

        while !executor.is_submitted() && !executor.awaits_caller() {
            self.execution.advance(executor).map_err(StartFailure::Broken)?;

            if executor.is_submitted() || executor.awaits_caller() {
                break;
            }
            if self.runtime.life.is_aborted() {
                return Err(StartFailure::Aborted);
            }
            if self.tracker().is_overdue() {
                return Err(StartFailure::Overdue);
            }

            executor.park(ROOM_PARK_MAX).map_err(StartFailure::Broken)?;
        }
        Ok(())
    }

    pub(super) fn poll(&self, epoch: u64) -> Result<bool, Error> {
        self.has_arrived(epoch, &[])
    }

    /// Polls the start, and has the waker called when it may be complete.
    ///
    /// As long as the start moves, the polls of the future move it, so that a short start needs no
    /// other thread.
    pub(super) fn poll_future(
        &self,
        goal: (u64, &[Cell]),
        deadline: Deadline,
        polls: &mut FuturePolls,
        waker: &Waker,
    ) -> Poll<Result<(), Error>> {
        let (epoch, cells) = goal;
        if !cells.is_empty() {
            self.tracker().await_arrivals();
        }
        if !self.tracker().is_observed() {
            match polls.eager.poll(waker, || self.look(goal, deadline))? {
                Next::Return => return Poll::Ready(Ok(())),
                Next::PolledAgain => {
                    polls.start.get_or_insert_with(|| self.start_of_future(epoch));
                    return Poll::Pending;
                }
                Next::Watched => {}
            }
        }

        self.tracker().event().set_waker(waker);
        self.observe()?;

        // This comes after the waker is set, so that a completion in between is not missed.
        if self.has_arrived(epoch, cells)? {
            return Poll::Ready(Ok(()));
        }

        self.check_late(epoch, Some(deadline))?;
        Poll::Pending
    }

    fn start_of_future(&self, epoch: u64) -> StartOfFuture {
        let execution = Arc::clone(&self.execution);
        StartOfFuture { execution, runtime: Arc::clone(&self.runtime), epoch }
    }

    /// Looks at a start for a future that polls by itself, for chunks of it if there are some.
    fn look(&self, goal: (u64, &[Cell]), deadline: Deadline) -> Result<Look, Error> {
        let (epoch, cells) = goal;
        let progress = self.drive()?;
        if self.has_reached(progress.done, epoch, cells)? {
            return Ok(Look::Complete);
        }

        self.check_late(epoch, Some(deadline))?;
        self.drive_others();
        Ok(if progress.progressed { Look::Progressed } else { Look::Idle })
    }

    /// Returns a descriptor that is readable when the start may be complete or the group has ended.
    pub(super) fn descriptor(&mut self, epoch: u64) -> Result<BorrowedFd<'_>, Error> {
        self.tracker().event().descriptor(COMPLETION)?;
        self.observe()?;
        if self.runtime.life.is_aborted() || self.poll(epoch)? {
            self.tracker().tell();
        }
        self.tracker().event().descriptor(COMPLETION)
    }

    /// Ends the group if the start is overdue or waits for a rank that has left.
    fn check_late(&self, epoch: u64, deadline: Option<Deadline>) -> Result<(), Error> {
        let overdue = match deadline {
            Some(deadline) => deadline.has_passed().then(|| deadline.timeout()),
            None => self.tracker().is_overdue().then(|| self.tracker().timeout()),
        };

        if let Some(timeout) = overdue {
            self.execution.raise_late(timeout);
            return self.fail();
        }

        if self.runtime.life.has_any_left() && self.misses_left_rank(epoch)? {
            return self.fail();
        }
        Ok(())
    }

    fn has_completed(&self, done: u64, epoch: u64) -> Result<bool, Error> {
        // The completion was read before this check, and may be one that peers have only signalled
        // because the group has ended.
        if self.runtime.life.check().is_err() && !self.outlasts_end(epoch) {
            return self.fail();
        }
        if done < epoch {
            return Ok(false);
        }

        if self.differs(epoch) {
            return self.fail();
        }
        self.tracker().note_finished(epoch);
        Ok(true)
    }

    /// Returns whether a start is complete, or has brought all of `cells` if there are some.
    fn has_reached(&self, done: u64, epoch: u64, cells: &[Cell]) -> Result<bool, Error> {
        // The check of the group comes after this look, because all waits pass when it has ended.
        let has_arrived = !cells.is_empty() && {
            let executor = self.executor();
            cells.iter().all(|&cell| executor.has_arrived(cell))
        };
        Ok(self.has_completed(done, epoch)? || has_arrived)
    }

    /// Returns whether the start stays complete although the group has ended.
    fn outlasts_end(&self, epoch: u64) -> bool {
        let is_of_host = !self.tracker().is_on_stream() && !self.tracker().is_captured();
        is_of_host && self.tracker().outlasting() >= epoch
    }

    /// Ends the group if another rank has made the start `epoch` with other lengths or places.
    ///
    /// [`Execution::close_done`] has compared the flags that the host can load, so this is for
    /// those on a device.
    fn differs(&self, epoch: u64) -> bool {
        let record = self.checks_starts.then(|| self.tracker().mismatch(epoch, true)).flatten();
        record.map(|record| self.runtime.life.raise(record)).is_some()
    }

    /// Waits until the start is complete.
    ///
    /// Without `deadline`, every start up to this one keeps its own deadline.
    pub(super) fn wait(&self, epoch: u64, deadline: Option<Deadline>) -> Result<(), Error> {
        self.wait_until(epoch, deadline, None).map(drop)
    }

    /// Waits until the start is complete, and returns whether it was before `limit` passed.
    pub(super) fn wait_until(
        &self,
        epoch: u64,
        deadline: Option<Deadline>,
        limit: Option<Deadline>,
    ) -> Result<bool, Error> {
        self.wait_arrival((epoch, &[]), deadline, limit)
    }

    /// Waits for a part of the time in which the start may complete, as
    /// [`OwnedStart::wait_part`](super::OwnedStart::wait_part).
    pub(super) fn wait_part(
        &self,
        epoch: u64,
        deadline: Option<Deadline>,
        part: Deadline,
    ) -> Result<bool, Error> {
        let mut patience = self.tracker().take_patience(epoch);
        let _blocked = self.tracker().block(epoch, false);
        let is_complete = self.wait_blocked((epoch, &[]), (deadline, Some(part)), &mut patience)?;
        if !is_complete {
            self.tracker().keep_patience(epoch, patience);
        }
        Ok(is_complete)
    }

    /// Polls until the start is complete, or has brought the chunks that the caller waits for, and
    /// returns whether it was before `limit` passed.
    fn wait_blocked(
        &self,
        (epoch, cells): (u64, &[Cell]),
        (deadline, limit): (Option<Deadline>, Option<Deadline>),
        patience: &mut Patience,
    ) -> Result<bool, Error> {
        let mut backoff = Backoff::new(NAP_MAX);
        // Whether no park of one engine covers all events that this thread waits for.
        let mut polls_several = self.park_misses_events;
        let mut is_noted = false;

        loop {
            let polled_at = polls_several.then(Instant::now);
            let progress = self.drive()?;
            if self.has_reached(progress.done, epoch, cells)? {
                return Ok(true);
            }
            self.check_late(epoch, deadline)?;

            let left = limit.map_or(Duration::MAX, |limit| limit.remaining());
            if left.is_zero() {
                return Ok(false);
            }

            // A call that takes long is told to all ranks, so that ranks in different calls find
            // out. The watchdog wakes this thread for it.
            if patience.look().0 {
                self.runtime.work.tell_call();
            }
            if !std::mem::replace(&mut is_noted, true) {
                self.runtime.note_wait();
            }

            // Peers may wait for other operations of this rank first.
            polls_several = self.drive_others() || self.park_misses_events;
            match polled_at {
                // The watchdog keeps the deadline and wakes the parked thread.
                _ if !polls_several => self.executor().park(left)?,
                _ if progress.progressed => backoff.reset(),
                Some(polled_at) => match backoff.nap(polled_at) {
                    Some(nap) => self.executor().park(nap.min(left))?,
                    None => std::thread::yield_now(),
                },
                // The next poll is timed.
                None => {}
            }
        }
    }

    /// Ends the group if the start is not complete and waits for a rank that has left, and returns
    /// whether it is so.
    fn misses_left_rank(&self, epoch: u64) -> Result<bool, Error> {
        // The signals of a rank arrive before its goodbye, so this poll sees all of them.
        if self.poll(epoch)? {
            return Ok(false);
        }

        let record = self.tracker().left(|rank| self.runtime.life.has_left(rank));
        Ok(record.map(|record| self.runtime.life.raise(record)).is_some())
    }

    fn observe(&self) -> Result<(), Error> {
        observe(&self.execution, &self.runtime)
    }

    /// Moves on other work that is open, and returns whether some is left.
    fn drive_others(&self) -> bool {
        self.runtime.driver.drive_others(Some(&*self.execution))
    }

    fn drive(&self) -> Result<Progress, Error> {
        let advanced = self.execution.advance(&mut self.executor());
        let (progressed, done) = self.finish_drive(advanced)?;
        Ok(Progress { done, progressed })
    }

    /// Tells the caller of the operation what is complete, and ends the group if the engines have
    /// failed. The executor must not be locked.
    fn finish_drive<R>(&self, driven: Result<R, Error>) -> Result<R, Error> {
        self.tracker().tell_complete();
        driven.or_else(|error| {
            self.runtime.life.raise(self.execution.broken(&error));
            self.fail()
        })
    }

    fn fail<T>(&self) -> Result<T, Error> {
        let error = self.runtime.life.wait_acknowledged();
        self.executor().release();
        Err(error)
    }
}

impl Drop for Prepared {
    fn drop(&mut self) {
        if self.runtime.driver.is_of_parent() {
            return;
        }

        // A start that the caller did not wait for still uses the buffers, and peers rely on it.
        if !std::thread::panicking() && self.runtime.life.check().is_ok() {
            // The group records any error.
            let remaining = self.tracker().deadline().remaining();
            let _ = self.settle(remaining);
        }

        // After a group was closed well, its ranks write to each other's memory no more than while
        // it is open.
        let is_well = self.runtime.life.is_well();
        let started = self.started();
        // Every signal that peers have sent was waited for, unless a start is still open.
        let is_settled = is_well && self.tracker().closed() >= started;

        let mut allocation = self.allocation.lock().unwrap_or_else(PoisonError::into_inner);
        if !is_settled {
            allocation.take().into_iter().for_each(Allocation::leak);
        } else if let Some(allocation) = allocation.as_mut() {
            let signalled = self.tracker().signalled(started);
            allocation.set_epochs(self.tracker().buffers().local.values_of(signalled));
        }
        drop(allocation);

        let is_abandoned = is_well && self.tracker().closed() < started;
        if is_abandoned {
            // The thread panics, or the engine has failed. Peers go on with the start and write to
            // the memory.
            self.tracker().abandon();
        }
        if !is_well || is_abandoned {
            self.runtime.work.quarantine(self.tracker().buffers().clone());
        }

        let mut executor = self.executor();
        executor.release();

        // The watchdog goes on to release graphs that may still run.
        if is_well || !self.tracker().is_captured() {
            self.execution.forget();
            self.runtime.work.order.note_dropped(self.tracker().last_call());
            self.runtime.work.remove(&*self.execution);
        }
    }
}
