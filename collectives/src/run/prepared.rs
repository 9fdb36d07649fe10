//! A plan bound to regions, ready to start any number of times.

use std::sync::Arc;
use std::time::Duration;

use peerlane_hal::Deadline;

use crate::error::Error;
use crate::group::shared::Shared;
use crate::group::watch::Watch;
use crate::run::lane::Lane;

/// How long a rank with several lanes sleeps on one of them before it looks at all.
const SEVERAL_LANES_PARK_MAX: Duration = Duration::from_micros(100);
/// How long an engine may take to drain once it is released.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// The executor's state of one prepared plan.
pub(crate) struct Prepared {
    lanes: Vec<Lane>,
    shared: Arc<Shared>,
    watch: Arc<Watch>,
    started: u64,
}

impl Prepared {
    /// # Safety
    /// The lanes' programs stay inside their windows, which their ports keep alive; the plan is
    /// verified, so that ranks that run it do not race.
    pub(crate) unsafe fn new(lanes: Vec<Lane>, shared: Arc<Shared>, watch: Arc<Watch>) -> Self {
        shared.enter(&watch, lanes.iter().map(Lane::waker).collect());
        Self { lanes, shared, watch, started: 0 }
    }

    /// The last start.
    pub(crate) fn started(&self) -> u64 {
        self.started
    }

    /// Waits for whatever is open; at no cost where nothing is.
    pub(crate) fn settle(&mut self, timeout: Duration) -> Result<(), Error> {
        if self.done() < self.started {
            return self.wait(self.started, Deadline::after(timeout));
        }
        if self.shared.check().is_err() { self.fail() } else { Ok(()) }
    }

    /// Starts once more, behind the starts before; returns its epoch.
    pub(crate) fn start(&mut self, deadline: Deadline) -> Result<u64, Error> {
        self.shared.check()?;
        self.started += 1;
        self.watch.open(self.started, deadline);
        self.drive()?;
        Ok(self.started)
    }

    /// Whether start `epoch` is complete; drives what is driven by its caller.
    pub(crate) fn poll(&mut self, epoch: u64) -> Result<bool, Error> {
        self.drive()?;
        let done = self.done() >= epoch;
        // The completion was seen first: only if nobody has aborted by now is it a result.
        if self.shared.check().is_err() {
            return self.fail();
        }
        if done {
            self.watch.close(epoch);
        }
        Ok(done)
    }

    /// Waits until start `epoch` is complete.
    pub(crate) fn wait(&mut self, epoch: u64, deadline: Deadline) -> Result<(), Error> {
        while !self.poll(epoch)? {
            let left = deadline.remaining();
            if left.is_zero() {
                self.shared.raise(self.watch.overdue(deadline.timeout()));
                return self.fail();
            }
            if self.shared.somebody_left() && self.is_deserted(epoch)? {
                return self.fail();
            }
            self.park(left)?;
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

    fn done(&self) -> u64 {
        self.lanes.iter().map(Lane::done).min().unwrap_or(self.started)
    }

    fn drive(&mut self) -> Result<(), Error> {
        let view = self.watch.view();
        for lane in &mut self.lanes {
            // SAFETY: `new`'s contract.
            if let Err(error) = unsafe { lane.drive(self.started, view) } {
                self.shared.raise(self.watch.broken(&error));
                return self.fail();
            }
        }
        Ok(())
    }

    fn park(&mut self, left: Duration) -> Result<(), Error> {
        let several = self.lanes.len() > 1;
        let limit = if several { left.min(SEVERAL_LANES_PARK_MAX) } else { left };
        match self.lanes.iter_mut().find(|lane| lane.done() < self.started) {
            Some(lane) => lane.park(limit),
            None => Ok(()),
        }
    }

    /// Ends this plan after an abort: waits until every live rank knows, then releases.
    fn fail<T>(&mut self) -> Result<T, Error> {
        let error = self.shared.wait_until_told();
        self.release();
        Err(error)
    }

    fn release(&mut self) {
        let deadline = Deadline::after(DRAIN_TIMEOUT);
        for lane in &mut self.lanes {
            // An engine that is broken beyond release has its own error recorded.
            while matches!(lane.release(), Ok(false)) && !deadline.has_passed() {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

impl Drop for Prepared {
    fn drop(&mut self) {
        // A start that nobody waited for still uses the window, and peers count on it.
        let open = self.done() < self.started && self.shared.check().is_ok();
        if open && !std::thread::panicking() {
            // Whatever goes wrong is recorded with the group.
            let _ = self.wait(self.started, self.watch.deadline());
        }
        self.release();
        self.shared.remove(&self.watch);
    }
}
