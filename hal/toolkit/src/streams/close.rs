//! The end of an engine, which never blocks for long.
//!
//! Queued waits that nobody satisfies are released first. What is then still not complete cannot be
//! taken down: it is left to the driver, which frees it with the process.

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::{Duration, Instant};

use peerlane_hal::{Error as _, ErrorKind};

use super::abilities::StreamDevice;
use super::{Engine, Hardware};

/// How long the drop of an engine may take.
const DRAIN: Duration = Duration::from_secs(5);
/// A nap between two rounds.
const NAP: Duration = Duration::from_micros(50);

impl<D: StreamDevice> Drop for Engine<D> {
    fn drop(&mut self) {
        let lost = self.poison.check().is_err_and(|error| error.kind() == ErrorKind::DeviceLost);
        if lost || !self.drain() {
            return;
        }
        let context = Arc::clone(&self.context);
        let Ok(_relaxed) = context.enter_relaxed() else { return };
        // SAFETY: the engine is going, and nothing looks at its hardware any more.
        unsafe { ManuallyDrop::take(&mut self.hardware) }.close(&context);
    }
}

impl<D: StreamDevice> Engine<D> {
    /// Releases until nothing is left to do; whether that was reached in time.
    fn drain(&mut self) -> bool {
        let start = Instant::now();
        let mut rounds = 0;
        loop {
            if self.settle().is_err() {
                return false;
            }
            match self.is_drained(rounds) {
                Some(true) => return true,
                Some(false) => {}
                None => return false,
            }
            if start.elapsed() >= DRAIN {
                return false;
            }
            if self.release_round().is_err() {
                return false;
            }
            rounds += 1;
            std::thread::sleep(NAP);
        }
    }

    /// `None` if the device does not answer any more.
    fn is_drained(&self, rounds: u32) -> Option<bool> {
        let Hardware { captures, release, page, sides, main, .. } = &*self.hardware;
        let looked = self
            .context
            .enter_relaxed()
            .and_then(|_relaxed| captures.look(&self.context, release.stream(), page));
        looked.ok()?;
        if !release.is_written(page) || captures.awaited(page).next().is_some() {
            return Some(false);
        }
        if self.poison.check().is_ok() {
            return Some(self.pending.is_empty());
        }
        // A slice that failed half-way has no ticket: look at the streams. Of one that went
        // onto a caller's stream nothing more can be known.
        let _relaxed = self.context.enter_relaxed().ok()?;
        let mut streams = sides.iter().map(|side| side.stream()).chain([main]);
        let idle = streams.try_fold(true, |all, it| Some(all & it.is_idle(&self.context).ok()?))?;
        Some(idle && rounds > 0)
    }
}

impl<D: StreamDevice> Hardware<D> {
    /// Everything is complete; the context is current.
    fn close(self, context: &Arc<D>) {
        let Self { captures, words, bounces, page, .. } = self;
        page.leave(&**context);
        // Graphs outlive the engine and still write to its words.
        if !captures.is_used() {
            bounces.into_iter().flatten().for_each(|bounce| bounce.free(context));
            captures.leave(&**context);
            if let Some(words) = words {
                words.leave(&**context);
            }
        }
    }
}
