//! How a rank sleeps until a flag may have changed: on the completion channels.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Waker;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::look::Look;
use crate::error::Error;
use crate::fabric::{Alarm, Arrivals, CARDS_MAX};
use crate::sys::Cq;

/// A sleep while peers may write flags that nothing announces.
const SILENT_SLEEP_MAX: Duration = Duration::from_micros(200);

/// The alarm, and two queues a card.
const FDS_MAX: usize = 1 + 2 * CARDS_MAX;

/// The parking place of one engine: look for a while, announce, look again, sleep.
#[derive(Debug)]
pub(super) struct Parker {
    alarm: Arc<Alarm>,
    look: Look,
    /// Since when the engine has had nothing to do.
    idle_since: Option<Instant>,
    announced: bool,
}

impl Parker {
    pub(super) fn new(arrivals: &Arrivals, spin: Option<Duration>) -> Result<Self, Error> {
        let alarm = Alarm::new()?;
        arrivals.add(&alarm);
        Ok(Self { alarm, look: Look::new(spin), idle_since: None, announced: false })
    }

    pub(super) fn waker(&self) -> Waker {
        Waker::from(self.alarm())
    }

    pub(super) fn alarm(&self) -> Arc<Alarm> {
        Arc::clone(&self.alarm)
    }

    /// Whether the next park sleeps.
    pub(super) fn is_announced(&self) -> bool {
        self.announced
    }

    /// One step: the caller looks at its flags between two of them, which is what makes the
    /// announcement safe.
    pub(super) fn park(
        &mut self,
        arrivals: &Arrivals,
        cqs: &[Arc<Cq>],
        limit: Duration,
    ) -> Result<(), Error> {
        if self.alarm.was_used() {
            self.busy(arrivals);
            return Ok(());
        }
        if self.announced {
            let slept = self.sleep(arrivals, cqs, limit);
            self.withdraw(arrivals);
            if slept? {
                // Another sleeper may have missed the event, and no other comes before somebody asks.
                arrivals.wake();
            }
            return Ok(());
        }
        let now = Instant::now();
        let idle_since = *self.idle_since.get_or_insert(now);
        if now.duration_since(idle_since) < self.look.limit().min(limit) {
            // The peer may be a thread or process that this core is to run.
            match self.look.yields() {
                true => std::thread::yield_now(),
                false => std::hint::spin_loop(),
            }
            return Ok(());
        }
        self.announced = true;
        arrivals.asleep.fetch_add(1, Ordering::SeqCst);
        self.alarm.announce(true);
        arrivals.arm()?;
        cqs.iter().try_for_each(|cq| cq.arm())
    }

    /// Whether it took the event of an arrival.
    fn sleep(&self, arrivals: &Arrivals, cqs: &[Arc<Cq>], limit: Duration) -> Result<bool, Error> {
        let silent = arrivals.silent.load(Ordering::SeqCst);
        let limit = if silent { limit.min(SILENT_SLEEP_MAX) } else { limit };
        let limit = (limit < Duration::MAX).then(|| Timespec {
            tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: limit.subsec_nanos().into(),
        });
        // The alarm, then what arrives on each card, then what completes there.
        let alarm = self.alarm.fd();
        let arriving = arrivals.cards.iter().map(|card| card.cq.fd());
        let mut places = arriving.chain(cqs.iter().map(|cq| cq.fd()));
        let mut fds: [PollFd<'_>; FDS_MAX] = std::array::from_fn(|at| {
            let fd = if at == 0 { None } else { places.next() };
            PollFd::from_borrowed_fd(fd.unwrap_or(alarm), PollFlags::IN)
        });
        match poll(&mut fds[..1 + 2 * cqs.len()], limit.as_ref()) {
            // Woken, interrupted or out of time: the caller looks in any case.
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(Error::system("sleep on completion channels")(errno)),
        }
        let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
        let (arriving, completing) = fds[1..].split_at(cqs.len());
        let arrived = arriving.iter().any(is_ready);
        if arrived {
            arrivals.drain_events();
        }
        for (cq, _) in cqs.iter().zip(completing).filter(|(_, fd)| is_ready(fd)) {
            cq.drain_events();
        }
        if is_ready(&fds[0]) {
            self.alarm.quiet();
        }
        Ok(arrived)
    }

    fn withdraw(&mut self, arrivals: &Arrivals) {
        if std::mem::take(&mut self.announced) {
            self.alarm.announce(false);
            arrivals.asleep.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Something moved: the next park looks for a while again.
    pub(super) fn busy(&mut self, arrivals: &Arrivals) {
        if let Some(since) = self.idle_since.take() {
            self.look.waited(since.elapsed());
        }
        self.withdraw(arrivals);
    }
}
