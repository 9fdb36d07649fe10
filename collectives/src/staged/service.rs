//! The thread of a staged fabric: it moves what peers send and ask for while nobody polls an engine.
//!
//! A network card writes into memory by itself; here somebody has to copy to the device, and from it
//! where a peer reads. Whoever polls does, and as long as somebody does, the thread only looks whether
//! that is still so. It sleeps where nothing comes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Waker;
use std::thread::JoinHandle;
use std::time::Duration;

use peerlane_hal::{CopyEngine as _, ErrorKind, Fabric};

use super::Inner;
use super::error::Error;
use super::stage::{ATTENDED, BUSY_PARK_MAX, SERVICE};

/// A sleep where nothing is under way; the network ends it when something comes.
const IDLE_PARK_MAX: Duration = Duration::from_secs(60);

/// The thread; it ends when this is dropped.
pub(super) struct Service {
    stop: Arc<AtomicBool>,
    waker: Waker,
    thread: Option<JoinHandle<()>>,
}

impl Service {
    /// `parker` is an engine of the network to which nothing is submitted.
    pub(super) fn start<D: Fabric, N: Fabric>(
        inner: &Arc<Inner<D, N>>,
        parker: N::Engine,
    ) -> Result<Self, Error> {
        let (stop, waker) = (Arc::new(AtomicBool::new(false)), parker.waker());
        let (served, stopped) = (Arc::clone(inner), Arc::clone(&stop));
        let thread = std::thread::Builder::new()
            .name(format!("peerlane-stage-{}", inner.rank))
            .spawn(move || serve(&served, parker, &stopped))
            .map_err(|error| Error::new(ErrorKind::Other, format!("start a thread: {error}")))?;
        Ok(Self { stop, waker, thread: Some(thread) })
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        self.waker.wake_by_ref();
        if let Some(thread) = self.thread.take() {
            // A panic there has been printed; there is nobody to hand it to.
            let _ = thread.join();
        }
    }
}

fn serve<D: Fabric, N: Fabric>(inner: &Inner<D, N>, mut parker: N::Engine, stop: &AtomicBool) {
    while !stop.load(Ordering::SeqCst) {
        // Before the look, so that what comes behind it ends the park.
        if parker.completed().is_err() {
            return;
        }
        let limit = {
            let mut stage = inner.stage();
            if stage.is_attended() {
                ATTENDED
            } else if stage.drive(SERVICE).is_err() {
                // Whoever polls hears of it.
                return;
            } else if stage.is_busy() {
                BUSY_PARK_MAX
            } else {
                IDLE_PARK_MAX
            }
        };
        if parker.park(limit).is_err() {
            return;
        }
    }
}
