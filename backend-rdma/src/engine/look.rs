//! Adapts how long an engine polls before it sleeps: longer where that makes waits shorter.
//!
//! A sleep costs tens of microseconds, and hundreds on emulated processors: system calls to request events
//! and to sleep, and an interrupt of a core. If waits take only a few times as long as that, it is better
//! to poll through them. But if processors are scarce, a polling thread delays the threads that would end
//! the wait. So longer spins are tried, kept while most waits are shorter than they were with a sleep, and
//! otherwise not tried again for some time.

use std::time::Duration;

/// Initial spin: a few times the latency of a message on a fast network, about the cost of a wake-up.
const SPIN_MIN: Duration = Duration::from_micros(100);
/// Longest spin: for longer waits the wake-up adds little, and an unsuccessful spin wastes as much.
const SPIN_MAX: Duration = Duration::from_millis(1);
/// Number of sleeps before the next trial of a longer spin, after the first unsuccessful one.
const REST: u32 = 16;
/// The same number after many unsuccessful trials.
const REST_MAX: u32 = 1024;
/// Initial and maximum credit of a trial; each wait that was shorter than with a sleep earns one.
const CREDIT: u32 = 2;
const CREDIT_MAX: u32 = 16;
/// Credit that a wait costs if it was longer, or needed a sleep all the same.
const CHARGE: u32 = 2;

/// Chooses the spin time from recent waits, unless the caller has set it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Look {
    given: Option<Duration>,
    /// From [`SPIN_MIN`] to [`SPIN_MAX`].
    suggested: Duration,
    /// Average duration of recent waits that needed a sleep.
    asleep: Option<Duration>,
    credit: u32,
    /// Sleeps left before a longer spin is tried.
    rest: u32,
    /// Value of `rest` after the next unsuccessful trial.
    next_rest: u32,
}

impl Look {
    pub(super) fn new(given: Option<Duration>) -> Self {
        let (suggested, asleep, credit) = (SPIN_MIN, None, CREDIT);
        Self { given, suggested, asleep, credit, rest: 0, next_rest: REST }
    }

    /// Returns how long to poll before a sleep.
    pub(super) fn limit(self) -> Duration {
        self.given.unwrap_or(self.suggested)
    }

    /// Returns whether to yield the processor while polling: the caller has not asked for a pure spin.
    pub(super) fn yields(self) -> bool {
        self.given.is_none()
    }

    /// Records the duration of a wait; it included a sleep if it was longer than the spin.
    pub(super) fn waited(&mut self, wait: Duration) {
        let slept = wait > self.suggested;
        match (slept, self.suggested > SPIN_MIN) {
            (true, true) => self.charge(),
            (true, false) => self.slept(wait),
            (false, _) => self.looked(wait),
        }
    }

    fn slept(&mut self, wait: Duration) {
        if wait <= SPIN_MAX {
            self.asleep = Some(self.asleep.map_or(wait, |asleep| (7 * asleep + wait) / 8));
        }
        if self.rest > 0 {
            self.rest -= 1;
        } else if wait <= SPIN_MAX {
            (self.suggested, self.credit) = ((2 * wait).min(SPIN_MAX), CREDIT);
        }
    }

    fn looked(&mut self, wait: Duration) {
        if wait > SPIN_MIN {
            // Waits vary, so allow a quarter more.
            if self.asleep.is_some_and(|asleep| wait > asleep * 5 / 4) {
                return self.charge();
            }
            self.credit = (self.credit + 1).min(CREDIT_MAX);
            // An unsuccessful spin costs more than a successful one saves, so the penalty shrinks slowly.
            self.next_rest = (self.next_rest - 1).max(REST);
        }
        // Short waits shrink the spin slowly.
        self.suggested = (self.suggested * 7 / 8).max((2 * wait).min(SPIN_MAX)).max(SPIN_MIN);
    }

    /// Charges an unsuccessful longer spin; ends the trial when the credit is used up.
    fn charge(&mut self) {
        if let Some(credit) = self.credit.checked_sub(CHARGE) {
            self.credit = credit;
            return;
        }
        (self.suggested, self.rest) = (SPIN_MIN, self.next_rest);
        self.next_rest = (2 * self.next_rest).min(REST_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn us(micros: u64) -> Duration {
        Duration::from_micros(micros)
    }

    /// Of 1000 waits, each as long as `wait` makes it of the look, those that were looked at for longer.
    fn long_looks(look: &mut Look, wait: impl Fn(Duration) -> Duration) -> usize {
        let mut is_long = || {
            let limit = look.limit();
            look.waited(wait(limit));
            limit > SPIN_MIN
        };
        (0..1000).filter(|_| is_long()).count()
    }

    #[test]
    fn short_waits_are_looked_at_to_their_end() {
        let mut look = Look::new(None);
        assert_eq!(look.limit(), SPIN_MIN);
        look.waited(us(140));
        assert_eq!(look.limit(), us(280), "what was slept through is looked at next time");
        look.waited(us(160));
        assert_eq!(look.limit(), us(320));
        look.waited(us(20));
        assert_eq!(look.limit(), us(280), "a shorter one counts little");
        for _ in 0..100 {
            look.waited(us(3));
        }
        assert_eq!(look.limit(), SPIN_MIN);
    }

    #[test]
    fn long_waits_are_slept_through() {
        let mut look = Look::new(None);
        for _ in 0..3 {
            look.waited(us(30_000));
            assert_eq!(look.limit(), SPIN_MIN);
        }
    }

    #[test]
    fn a_long_look_in_vain_is_not_tried_again_soon() {
        let mut look = Look::new(None);
        // Looking itself makes waits longer, as where one processor is for both sides.
        let tries = long_looks(&mut look, |limit| limit + us(200));
        assert!(tries < 20, "{tries} tries");
        while look.limit() == SPIN_MIN {
            look.waited(us(300));
        }
        look.waited(us(300));
        for _ in 0..3 {
            look.waited(us(5000));
        }
        assert_eq!(look.limit(), SPIN_MIN);
        assert!(look.rest > REST, "one that helped outweighs few");
    }

    #[test]
    fn looks_that_make_waits_longer_end() {
        // One processor is for both sides.
        let wait = |limit| if limit > SPIN_MIN { us(450) } else { us(300) };
        let looked = long_looks(&mut Look::new(None), wait);
        assert!(looked < 40, "{looked} waits were longer for it");
    }

    #[test]
    fn looks_that_make_waits_shorter_go_on() {
        let mut look = Look::new(None);
        for _ in 0..100 {
            // Waking takes longer than the message.
            look.waited(if look.limit() > SPIN_MIN { us(250) } else { us(620) });
        }
        assert!(look.limit() >= us(500), "{look:?}");
        // Some waits are longer.
        for round in 0..100 {
            look.waited(if round % 5 == 0 { us(700) } else { us(250) });
        }
        assert!(look.limit() >= us(500), "{look:?}");
    }

    #[test]
    fn what_was_asked_for_stays() {
        let mut look = Look::new(Some(us(7)));
        look.waited(us(400));
        assert_eq!(look.limit(), us(7));
    }
}
