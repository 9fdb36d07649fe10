//! A plan bound to regions, ready to start any number of times.

use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use peerlane_hal::Deadline;

use crate::error::Error;
use crate::group::shared::Shared;
use crate::group::watch::Watch;
use crate::run::backoff::Backoff;
use crate::run::course::{Course, Stop};
use crate::run::lane::Lane;

use crate::run::turns::Start;
use crate::trace::TracedStart;

/// The longest nap of a caller that polls several engines, or waits for flags of another fabric. A peer that
/// is late by seconds may cost some milliseconds more.
const NAP_MAX: Duration = Duration::from_millis(10);
/// How long a caller at most sleeps that waits for room in a full queue.
const ROOM_PARK_MAX: Duration = Duration::from_millis(1);

/// The handle of one prepared plan.
pub(crate) struct Prepared {
    course: Arc<Mutex<Course>>,
    shared: Arc<Shared>,
    watch: Arc<Watch>,
    several: bool,
}

/// What a look at the lanes has found.
struct Further {
    /// The last start that is complete.
    done: u64,
    /// Whether a lane made progress, or can make more at once.
    progressed: bool,
}

impl Prepared {
    pub(crate) fn new(course: Course, shared: Arc<Shared>, watch: Arc<Watch>) -> Self {
        let wakers = course.lanes().iter().map(Lane::waker).collect();
        let several = course.is_several();
        let course = Arc::new(Mutex::new(course));
        shared.enter(&watch, &course, wakers);
        Self { course, shared, watch, several }
    }

    fn course(&self) -> MutexGuard<'_, Course> {
        // A panic inside is a bug of an engine; what is left is released on drop.
        self.course.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The last start.
    pub(crate) fn started(&self) -> u64 {
        self.course().started()
    }

    /// What has been traced so far.
    pub(crate) fn traced(&self) -> Option<(Vec<TracedStart>, bool)> {
        self.course().traced()
    }

    /// Waits for whatever is open; at no cost where nothing is.
    pub(crate) fn settle(&mut self, timeout: Duration) -> Result<(), Error> {
        let (started, done) = {
            let course = self.course();
            (course.started(), course.done())
        };
        if done < started {
            // On a stream there may be many; each has its own deadline.
            let one = (!self.watch.is_on_stream()).then(|| Deadline::after(timeout));
            return self.wait(started, one);
        }
        if self.shared.check().is_err() { self.fail() } else { Ok(()) }
    }

    /// Starts once more, behind the starts before; returns its epoch.
    pub(crate) fn start(&mut self, deadline: Deadline) -> Result<u64, Error> {
        self.shared.check()?;
        let epoch = self.begin(&mut self.course(), deadline);
        self.drive()?;
        Ok(epoch)
    }

    /// Puts one start more onto the caller's stream, or into the graph that is captured there.
    pub(crate) fn start_on(&mut self, stream: &dyn Any, timeout: Duration) -> Result<Start, Error> {
        self.shared.check()?;
        if !self.course().is_submitted() {
            // A start of the host that met a full queue would be put onto the stream as well.
            self.settle(timeout)?;
        }
        let put = self.put_on(&mut self.course(), stream, timeout);
        match put {
            Ok(start) => return Ok(start),
            Err(Stop::Refused(error)) => return Err(error),
            Err(Stop::Broken(error)) => self.shared.raise(self.watch.broken(&error)),
            Err(Stop::Overdue) => self.shared.raise(self.watch.overdue(timeout)),
            Err(Stop::Aborted) => {}
        }
        self.fail()
    }

    fn put_on(
        &self,
        course: &mut Course,
        stream: &dyn Any,
        timeout: Duration,
    ) -> Result<Start, Stop> {
        let captures = course.is_capturing(stream)?;
        let needs_thread = if captures { course.is_armed_by_capture() } else { course.is_driven() };
        if needs_thread {
            // Before anything is on the stream that nobody would drive.
            self.shared.drive_beside(&self.watch).map_err(Stop::Refused)?;
        }
        if captures {
            self.watch.mark_captured();
            course.forked(stream, Course::capture)?;
            self.shared.wake_progress();
            return Ok(Start::Captured);
        }
        self.watch.mark_on_stream();
        course.forked(stream, |course| {
            let epoch = self.begin(course, Deadline::after(timeout));
            self.enqueue(course)?;
            Ok(Start::Eager(epoch))
        })
    }

    fn begin(&self, course: &mut Course, deadline: Deadline) -> u64 {
        let epoch = course.start();
        self.shared.open(&self.watch, epoch, deadline);
        epoch
    }

    /// Submits whatever is started; waits for room where a queue is full.
    fn enqueue(&self, course: &mut Course) -> Result<(), Stop> {
        loop {
            course.drive().map_err(Stop::Broken)?;
            self.shared.close_done(&self.watch, course);
            if course.is_submitted() {
                return Ok(());
            }
            if self.shared.is_aborted() {
                return Err(Stop::Aborted);
            }
            if self.watch.is_overdue() {
                return Err(Stop::Overdue);
            }
            course.park(ROOM_PARK_MAX).map_err(Stop::Broken)?;
        }
    }

    /// Whether start `epoch` is complete; drives what is driven by its caller.
    pub(crate) fn poll(&mut self, epoch: u64) -> Result<bool, Error> {
        let done = self.drive()?.done;
        self.is_done(done, epoch)
    }

    fn is_done(&mut self, done: u64, epoch: u64) -> Result<bool, Error> {
        // The completion was seen first: only if nobody has aborted by now is it a result.
        if self.shared.check().is_err() {
            return self.fail();
        }
        Ok(done >= epoch)
    }

    /// Waits until start `epoch` is complete, and drives what else is open meanwhile. Without a
    /// deadline of its own, every start up to this one has until its own.
    pub(crate) fn wait(&mut self, epoch: u64, deadline: Option<Deadline>) -> Result<(), Error> {
        let mut backoff = Backoff::new(NAP_MAX);
        loop {
            let polled_at = Instant::now();
            let further = self.drive()?;
            if self.is_done(further.done, epoch)? {
                return Ok(());
            }
            let overdue = match deadline {
                Some(deadline) => deadline.has_passed().then(|| deadline.timeout()),
                None => self.watch.is_overdue().then(|| self.watch.timeout()),
            };
            if let Some(timeout) = overdue {
                self.shared.raise(self.watch.overdue(timeout));
                return self.fail();
            }
            if self.shared.somebody_left() && self.is_deserted(epoch)? {
                return self.fail();
            }
            let others = self.shared.drive_others(&self.watch);
            if !others && !self.several {
                // The watchdog keeps the deadline and wakes the parked thread.
                self.course().park(Duration::MAX)?;
            } else if further.progressed {
                backoff.reset();
            } else if let Some(nap) = backoff.nap(polled_at) {
                self.course().park(nap)?;
            } else {
                std::thread::yield_now();
            }
        }
    }

    /// Whether a rank that has left owes a flag; that ends the group.
    fn is_deserted(&mut self, epoch: u64) -> Result<bool, Error> {
        // What a rank sent arrived before its goodbye, so this look misses nothing.
        if self.poll(epoch)? {
            return Ok(false);
        }
        let record = self.watch.deserted(&self.shared);
        Ok(record.map(|record| self.shared.raise(record)).is_some())
    }

    /// Drives the own lanes.
    fn drive(&mut self) -> Result<Further, Error> {
        let driven = {
            let mut course = self.course();
            course.drive().map(|progressed| {
                let done = self.shared.close_done(&self.watch, &course);
                Further { done, progressed }
            })
        };
        driven.or_else(|error| {
            self.shared.raise(self.watch.broken(&error));
            self.fail()
        })
    }

    /// Ends this plan after an abort: waits until every live rank knows, then releases.
    fn fail<T>(&mut self) -> Result<T, Error> {
        let error = self.shared.wait_until_told();
        self.course().release();
        Err(error)
    }
}

impl Drop for Prepared {
    fn drop(&mut self) {
        // A start that nobody waited for still uses the window, and peers count on it.
        if !std::thread::panicking() && self.shared.check().is_ok() {
            // Whatever goes wrong is recorded with the group.
            let left = self.watch.deadline().remaining();
            let _ = self.settle(left);
        }
        if self.shared.record().is_some() {
            self.shared.quarantine(self.watch.kept());
        }
        let mut course = self.course();
        course.release();
        self.shared.remove(&self.watch);
    }
}
