//! Puts a rank to sleep on the completion channels until a flag may have changed.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Waker;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::look::Look;
use crate::error::Error;
use crate::fabric::{Alarm, Arrivals, CARDS_MAX};
use crate::sys::Cq;

/// Longest sleep while peers may write flags without a message.
const SILENT_SLEEP_MAX: Duration = Duration::from_micros(200);

/// The wake-up descriptor, and two completion channels per NIC.
const FDS_MAX: usize = 1 + 2 * CARDS_MAX;

/// Parks one engine: polls for a while, announces the sleep, polls once more, sleeps.
#[derive(Debug)]
pub(super) struct Parker {
    alarm: Arc<Alarm>,
    look: Look,
    /// Start of the current idle time.
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

    /// Returns whether the next park sleeps.
    pub(super) fn is_announced(&self) -> bool {
        self.announced
    }

    /// Does one step of parking. The caller checks its flags between two steps, so that a flag set before the
    /// announcement is not missed.
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
                // This took the event that another sleeper waits for; no further event comes until it is requested.
                arrivals.wake();
            }
            return Ok(());
        }
        let now = Instant::now();
        let idle_since = *self.idle_since.get_or_insert(now);
        if now.duration_since(idle_since) < self.look.limit().min(limit) {
            // The peer may be a thread or process that needs this core.
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

    /// Sleeps; returns whether it took the event of an arrival.
    fn sleep(&self, arrivals: &Arrivals, cqs: &[Arc<Cq>], limit: Duration) -> Result<bool, Error> {
        let silent = arrivals.silent.load(Ordering::SeqCst);
        let limit = if silent { limit.min(SILENT_SLEEP_MAX) } else { limit };
        let limit = (limit < Duration::MAX).then(|| Timespec {
            tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: limit.subsec_nanos().into(),
        });
        // The wake-up first, then the receive queue of each NIC, then the completion queue of each NIC.
        let alarm = self.alarm.fd();
        let arriving = arrivals.cards.iter().map(|card| card.cq.fd());
        let mut places = arriving.chain(cqs.iter().map(|cq| cq.fd()));
        let mut fds: [PollFd<'_>; FDS_MAX] = std::array::from_fn(|at| {
            let fd = if at == 0 { None } else { places.next() };
            PollFd::from_borrowed_fd(fd.unwrap_or(alarm), PollFlags::IN)
        });
        match poll(&mut fds[..1 + 2 * cqs.len()], limit.as_ref()) {
            // Woken, interrupted or timed out: the caller checks its flags in every case.
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

    /// Records progress: the next park polls before it sleeps.
    pub(super) fn busy(&mut self, arrivals: &Arrivals) {
        if let Some(since) = self.idle_since.take() {
            self.look.waited(since.elapsed());
        }
        self.withdraw(arrivals);
    }
}
