//! Chooses for how long a thread polls before it sleeps.
//!
//! A sleep costs tens of microseconds, and hundreds on emulated processors: system calls to request
//! events and to sleep, and an interrupt of a core. If waits take only a few times as long as that,
//! it is better to poll through them. But if processors are scarce, a polling thread delays the
//! threads that would end the wait. So longer spins are tried, kept while most waits are shorter
//! than they were with a sleep, and otherwise not tried again for some time.

use std::time::Duration;

/// The initial polling time before a sleep, a few times the latency of a message on a fast network,
/// and about the cost of a wake-up.
const SPIN_MIN: Duration = Duration::from_micros(100);
/// The longest polling time before a sleep, because for longer waits the wake-up adds little, and
/// an unsuccessful spin wastes as much.
const SPIN_MAX: Duration = Duration::from_millis(1);
const REST: u32 = 16;
const REST_MAX: u32 = 1024;
const CREDIT: u32 = 2;
const CREDIT_MAX: u32 = 16;
const CHARGE: u32 = 2;

/// Chooses the polling time before a sleep from recent waits, unless the caller has set it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SpinPolicy {
    fixed: Option<Duration>,
    adaptive: Duration,
    average_with_sleep: Option<Duration>,
    credit: u32,
    rest: u32,
    next_rest: u32,
}

impl SpinPolicy {
    pub(crate) fn new(fixed: Option<Duration>) -> Self {
        Self {
            fixed,
            adaptive: SPIN_MIN,
            average_with_sleep: None,
            credit: CREDIT,
            rest: 0,
            next_rest: REST,
        }
    }

    pub(crate) fn duration(self) -> Duration {
        self.fixed.unwrap_or(self.adaptive)
    }

    /// Returns whether polling yields the processor, which it does unless the caller has set the
    /// polling time.
    pub(crate) fn yields(self) -> bool {
        self.fixed.is_none()
    }

    pub(crate) fn record_wait(&mut self, wait: Duration) {
        let slept = wait > self.adaptive;
        match (slept, self.adaptive > SPIN_MIN) {
            (true, true) => self.charge(),
            (true, false) => self.record_sleep(wait),
            (false, _) => self.record_spin(wait),
        }
    }

    fn record_sleep(&mut self, wait: Duration) {
        if wait <= SPIN_MAX {
            let average = self.average_with_sleep.map_or(wait, |average| (7 * average + wait) / 8);
            self.average_with_sleep = Some(average);
        }
        if self.rest > 0 {
            self.rest -= 1;
        } else if wait <= SPIN_MAX {
            (self.adaptive, self.credit) = ((2 * wait).min(SPIN_MAX), CREDIT);
        }
    }

    fn record_spin(&mut self, wait: Duration) {
        if wait > SPIN_MIN {
            // Waits vary, so allow a quarter more.
            if self.average_with_sleep.is_some_and(|average| wait > average * 5 / 4) {
                return self.charge();
            }
            self.credit = (self.credit + 1).min(CREDIT_MAX);
            // An unsuccessful spin costs more than a successful one saves, so the penalty shrinks
            // slowly.
            self.next_rest = (self.next_rest - 1).max(REST);
        }
        // Short waits shrink the spin slowly.
        self.adaptive = (self.adaptive * 7 / 8).max((2 * wait).min(SPIN_MAX)).max(SPIN_MIN);
    }

    fn charge(&mut self) {
        if let Some(credit) = self.credit.checked_sub(CHARGE) {
            self.credit = credit;
            return;
        }
        (self.adaptive, self.rest) = (SPIN_MIN, self.next_rest);
        self.next_rest = (2 * self.next_rest).min(REST_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn us(micros: u64) -> Duration {
        Duration::from_micros(micros)
    }

    fn long_spins(spin: &mut SpinPolicy, wait: impl Fn(Duration) -> Duration) -> usize {
        let mut is_long = || {
            let duration = spin.duration();
            spin.record_wait(wait(duration));
            duration > SPIN_MIN
        };
        (0..1000).filter(|_| is_long()).count()
    }

    #[test]
    fn short_waits_are_polled_through() {
        let mut spin = SpinPolicy::new(None);
        assert_eq!(spin.duration(), SPIN_MIN);
        spin.record_wait(us(140));
        assert_eq!(spin.duration(), us(280), "the next wait like this needs no sleep");
        spin.record_wait(us(160));
        assert_eq!(spin.duration(), us(320));
        spin.record_wait(us(20));
        assert_eq!(spin.duration(), us(280), "a shorter wait counts little");
        for _ in 0..100 {
            spin.record_wait(us(3));
        }
        assert_eq!(spin.duration(), SPIN_MIN);
    }

    #[test]
    fn long_waits_are_slept_through() {
        let mut spin = SpinPolicy::new(None);
        for _ in 0..3 {
            spin.record_wait(us(30_000));
            assert_eq!(spin.duration(), SPIN_MIN);
        }
    }

    #[test]
    fn an_unsuccessful_long_spin_is_not_tried_again_soon() {
        let mut spin = SpinPolicy::new(None);
        // Polling itself makes waits longer, as if both sides share one processor.
        let tries = long_spins(&mut spin, |duration| duration + us(200));
        assert!(tries < 20, "{tries} tries");
        while spin.duration() == SPIN_MIN {
            spin.record_wait(us(300));
        }
        spin.record_wait(us(300));
        for _ in 0..3 {
            spin.record_wait(us(5000));
        }
        assert_eq!(spin.duration(), SPIN_MIN);
        assert!(spin.rest > REST, "one success outweighs few failures");
    }

    #[test]
    fn spins_that_make_waits_longer_end() {
        // Both sides share one processor.
        let wait = |duration| if duration > SPIN_MIN { us(450) } else { us(300) };
        let spins = long_spins(&mut SpinPolicy::new(None), wait);
        assert!(spins < 40, "{spins} waits became longer");
    }

    #[test]
    fn spins_that_make_waits_shorter_go_on() {
        let mut spin = SpinPolicy::new(None);
        for _ in 0..100 {
            // Waking takes longer than the message.
            spin.record_wait(if spin.duration() > SPIN_MIN { us(250) } else { us(620) });
        }
        assert!(spin.duration() >= us(500), "{spin:?}");
        // Some waits are longer.
        for round in 0..100 {
            spin.record_wait(if round % 5 == 0 { us(700) } else { us(250) });
        }
        assert!(spin.duration() >= us(500), "{spin:?}");
    }

    #[test]
    fn a_fixed_spin_does_not_change() {
        let mut spin = SpinPolicy::new(Some(us(7)));
        spin.record_wait(us(400));
        assert_eq!(spin.duration(), us(7));
    }
}
