//! A plan bound to regions, ready to start any number of times.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use peerlane_hal::Deadline;

use crate::error::Error;
use crate::group::shared::Shared;
use crate::group::watch::Watch;
use crate::run::course::Course;
use crate::run::lane::Lane;

/// How long a caller sleeps on one lane before it looks at the others, where it drives several.
const SEVERAL_PARK_MAX: Duration = Duration::from_micros(100);

/// The handle of one prepared plan.
pub(crate) struct Prepared {
    course: Arc<Mutex<Course>>,
    shared: Arc<Shared>,
    watch: Arc<Watch>,
}

impl Prepared {
    pub(crate) fn new(course: Course, shared: Arc<Shared>, watch: Arc<Watch>) -> Self {
        let wakers = course.lanes().iter().map(Lane::waker).collect();
        let course = Arc::new(Mutex::new(course));
        shared.enter(&watch, &course, wakers);
        Self { course, shared, watch }
    }

    fn course(&self) -> MutexGuard<'_, Course> {
        // A panic inside is a bug of an engine; what is left is released on drop.
        self.course.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The last start.
    pub(crate) fn started(&self) -> u64 {
        self.course().started()
    }

    /// Waits for whatever is open; at no cost where nothing is.
    pub(crate) fn settle(&mut self, timeout: Duration) -> Result<(), Error> {
        let (started, done) = {
            let course = self.course();
            (course.started(), course.done())
        };
        if done < started {
            return self.wait(started, Deadline::after(timeout));
        }
        if self.shared.check().is_err() { self.fail() } else { Ok(()) }
    }

    /// Starts once more, behind the starts before; returns its epoch.
    pub(crate) fn start(&mut self, deadline: Deadline) -> Result<u64, Error> {
        self.shared.check()?;
        let epoch = self.course().start();
        self.shared.open(&self.watch, epoch, deadline);
        self.drive()?;
        Ok(epoch)
    }

    /// Whether start `epoch` is complete; drives what is driven by its caller.
    pub(crate) fn poll(&mut self, epoch: u64) -> Result<bool, Error> {
        let done = self.drive()? >= epoch;
        // The completion was seen first: only if nobody has aborted by now is it a result.
        if self.shared.check().is_err() {
            return self.fail();
        }
        if done {
            self.shared.close_start(&self.watch, epoch);
        }
        Ok(done)
    }

    /// Waits until start `epoch` is complete, and drives what else is open meanwhile.
    pub(crate) fn wait(&mut self, epoch: u64, deadline: Deadline) -> Result<(), Error> {
        while !self.poll(epoch)? {
            if deadline.has_passed() {
                self.shared.raise(self.watch.overdue(deadline.timeout()));
                return self.fail();
            }
            if self.shared.somebody_left() && self.is_deserted(epoch)? {
                return self.fail();
            }
            let others = self.shared.drive_others(&self.watch);
            self.park(others)?;
        }
        Ok(())
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

    /// Drives the own lanes; the last start that is complete.
    fn drive(&mut self) -> Result<u64, Error> {
        let driven = {
            let mut course = self.course();
            course.drive().map(|()| course.done())
        };
        driven.or_else(|error| {
            self.shared.raise(self.watch.broken(&error));
            self.fail()
        })
    }

    /// Without a timer: the watchdog keeps the deadline and wakes whoever sleeps.
    fn park(&mut self, others: bool) -> Result<(), Error> {
        let mut course = self.course();
        let several = others || course.lanes().len() > 1;
        course.park(if several { SEVERAL_PARK_MAX } else { Duration::MAX })
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
        self.course().release();
        self.shared.remove(&self.watch);
    }
}
