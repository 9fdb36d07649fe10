//! The lanes of one prepared plan on their way, for whoever drives them.
//!
//! Mostly that is the caller who waits for the operation. A caller who waits for another one drives
//! this one too, since peers may be waiting for it.

use std::sync::Arc;
use std::time::Duration;

use peerlane_hal::Deadline;

use crate::error::Error;
use crate::group::watch::Watch;
use crate::run::lane::Lane;

/// How long an engine may take to drain once it is released.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// All lanes of this rank in one plan, and the last start.
pub(crate) struct Course {
    lanes: Vec<Lane>,
    watch: Arc<Watch>,
    started: u64,
}

impl Course {
    /// # Safety
    /// The lanes' programs stay inside their windows, which their ports keep alive; the plan is
    /// verified, so that ranks that run it do not race.
    pub(crate) unsafe fn new(lanes: Vec<Lane>, watch: Arc<Watch>) -> Self {
        Self { lanes, watch, started: 0 }
    }

    pub(crate) fn lanes(&self) -> &[Lane] {
        &self.lanes
    }

    pub(crate) fn started(&self) -> u64 {
        self.started
    }

    /// The last start that all lanes have completed.
    pub(crate) fn done(&self) -> u64 {
        self.lanes.iter().map(Lane::done).min().unwrap_or(self.started)
    }

    /// One start more; [`drive`](Self::drive) gets it under way.
    pub(crate) fn start(&mut self) -> u64 {
        self.started += 1;
        self.started
    }

    /// Submits and moves what can be; never waits.
    pub(crate) fn drive(&mut self) -> Result<(), Error> {
        for lane in &mut self.lanes {
            // SAFETY: `new`'s contract.
            unsafe { lane.drive(self.started, self.watch.view()) }?;
        }
        Ok(())
    }

    /// Gives the processor away on the first lane that is not done.
    pub(crate) fn park(&mut self, limit: Duration) -> Result<(), Error> {
        match self.lanes.iter_mut().find(|lane| lane.done() < self.started) {
            Some(lane) => lane.park(limit),
            None => Ok(()),
        }
    }

    /// Lets every wait pass after an abort, until the engines are drained.
    pub(crate) fn release(&mut self) {
        let deadline = Deadline::after(DRAIN_TIMEOUT);
        for lane in &mut self.lanes {
            // An engine that is broken beyond release has its own error recorded.
            while matches!(lane.release(), Ok(false)) && !deadline.has_passed() {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}
