//! How a rank sleeps until a flag may have changed: on the completion channels.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Waker;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::error::Error;
use crate::fabric::{Alarm, Arrivals};
use crate::sys::Cq;

/// A sleep while peers may write flags that nothing announces.
const SILENT_SLEEP_MAX: Duration = Duration::from_micros(200);

/// The parking place of one engine: look for a while, announce, look again, sleep.
#[derive(Debug)]
pub(super) struct Parker {
    alarm: Arc<Alarm>,
    spin: Duration,
    /// Since when the engine has had nothing to do.
    idle_since: Option<Instant>,
    announced: bool,
}

impl Parker {
    pub(super) fn new(arrivals: &Arrivals, spin: Duration) -> Result<Self, Error> {
        let alarm = Alarm::new()?;
        arrivals.add(&alarm);
        Ok(Self { alarm, spin, idle_since: None, announced: false })
    }

    pub(super) fn waker(&self) -> Waker {
        Waker::from(Arc::clone(&self.alarm))
    }

    /// One step: the caller looks at its flags between two of them, which is what makes the
    /// announcement safe.
    pub(super) fn park(
        &mut self,
        arrivals: &Arrivals,
        cq: &Cq,
        limit: Duration,
    ) -> Result<(), Error> {
        if self.alarm.was_used() {
            self.busy(arrivals);
            return Ok(());
        }
        if self.announced {
            let slept = self.sleep(arrivals, cq, limit);
            self.withdraw(arrivals);
            return slept;
        }
        let now = Instant::now();
        let idle_since = *self.idle_since.get_or_insert(now);
        if now.duration_since(idle_since) < self.spin.min(limit) {
            // The peer may be a thread or process that this core is to run.
            std::thread::yield_now();
            return Ok(());
        }
        self.announced = true;
        arrivals.asleep.fetch_add(1, Ordering::SeqCst);
        self.alarm.announce(true);
        arrivals.cq.arm()?;
        cq.arm()
    }

    fn sleep(&self, arrivals: &Arrivals, cq: &Cq, limit: Duration) -> Result<(), Error> {
        let silent = arrivals.silent.load(Ordering::SeqCst);
        let limit = if silent { limit.min(SILENT_SLEEP_MAX) } else { limit };
        let limit = (limit < Duration::MAX).then(|| Timespec {
            tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: limit.subsec_nanos().into(),
        });
        let fds = [arrivals.cq.fd(), cq.fd(), self.alarm.fd()];
        let mut fds = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        match poll(&mut fds, limit.as_ref()) {
            // Woken, interrupted or out of time: the caller looks in any case.
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(Error::system("sleep on completion channels")(errno)),
        }
        let [arrived, completed, rung] = fds.map(|fd| !fd.revents().is_empty());
        if arrived {
            arrivals.drain_events();
        }
        if completed {
            cq.drain_events();
        }
        if rung {
            self.alarm.quiet();
        }
        Ok(())
    }

    fn withdraw(&mut self, arrivals: &Arrivals) {
        if std::mem::take(&mut self.announced) {
            self.alarm.announce(false);
            arrivals.asleep.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Something moved: the next park looks for a while again.
    pub(super) fn busy(&mut self, arrivals: &Arrivals) {
        self.idle_since = None;
        self.withdraw(arrivals);
    }
}
