//! How long an engine looks before it sleeps: longer where that makes waits shorter.
//!
//! To sleep and to be woken takes tens of microseconds, hundreds where processors are emulated: system
//! calls to ask for events and to sleep, and an interrupt of a core. Who waits for a few times that should
//! look for longer. But where processors are few, who looks keeps them from those who would end the wait.
//! So longer looks are tried, go on while most waits are shorter than they were asleep, and are not tried
//! again soon where they were in vain.

use std::time::Duration;

/// A few times what a message takes on a fast network, and about what waking takes.
const SHORT: Duration = Duration::from_micros(100);
/// To a longer wait, waking adds a small part; and as much is lost by a look in vain.
const LONG: Duration = Duration::from_millis(1);
/// Sleeps before the next try of a longer look, after the first one in vain.
const REST: u32 = 16;
/// The same after many in vain.
const REST_MAX: u32 = 1024;
/// What a try may begin with, and have at most: one for each wait that was shorter than asleep.
const CREDIT: u32 = 2;
const CREDIT_MAX: u32 = 16;
/// What a wait costs that was longer, or was slept through all the same.
const CHARGE: u32 = 2;

/// What recent waits suggest, or what was asked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Look {
    given: Option<Duration>,
    /// From [`SHORT`] to [`LONG`].
    suggested: Duration,
    /// What waits took of late that were slept through.
    asleep: Option<Duration>,
    credit: u32,
    /// Sleeps before a longer look is tried.
    rest: u32,
    /// As many after the next one in vain.
    next_rest: u32,
}

impl Look {
    pub(super) fn new(given: Option<Duration>) -> Self {
        let (suggested, asleep, credit) = (SHORT, None, CREDIT);
        Self { given, suggested, asleep, credit, rest: 0, next_rest: REST }
    }

    /// How long to look.
    pub(super) fn limit(self) -> Duration {
        self.given.unwrap_or(self.suggested)
    }

    /// Whether others may want the processor: nobody has asked for looks.
    pub(super) fn yields(self) -> bool {
        self.given.is_none()
    }

    /// A wait is over, that was slept through in part where it took longer than the look.
    pub(super) fn waited(&mut self, wait: Duration) {
        let slept = wait > self.suggested;
        match (slept, self.suggested > SHORT) {
            (true, true) => self.charge(),
            (true, false) => self.slept(wait),
            (false, _) => self.looked(wait),
        }
    }

    fn slept(&mut self, wait: Duration) {
        if wait <= LONG {
            self.asleep = Some(self.asleep.map_or(wait, |asleep| (7 * asleep + wait) / 8));
        }
        if self.rest > 0 {
            self.rest -= 1;
        } else if wait <= LONG {
            (self.suggested, self.credit) = ((2 * wait).min(LONG), CREDIT);
        }
    }

    fn looked(&mut self, wait: Duration) {
        if wait > SHORT {
            // No two waits are alike.
            if self.asleep.is_some_and(|asleep| wait > asleep * 5 / 4) {
                return self.charge();
            }
            self.credit = (self.credit + 1).min(CREDIT_MAX);
            // Looks in vain cost more than one that helped has spared, so they are forgiven slowly.
            self.next_rest = (self.next_rest - 1).max(REST);
        }
        // Shorter waits let it shrink slowly.
        self.suggested = (self.suggested * 7 / 8).max((2 * wait).min(LONG)).max(SHORT);
    }

    /// A longer look was in vain.
    fn charge(&mut self) {
        if let Some(credit) = self.credit.checked_sub(CHARGE) {
            self.credit = credit;
            return;
        }
        (self.suggested, self.rest) = (SHORT, self.next_rest);
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
            limit > SHORT
        };
        (0..1000).filter(|_| is_long()).count()
    }

    #[test]
    fn short_waits_are_looked_at_to_their_end() {
        let mut look = Look::new(None);
        assert_eq!(look.limit(), SHORT);
        look.waited(us(140));
        assert_eq!(look.limit(), us(280), "what was slept through is looked at next time");
        look.waited(us(160));
        assert_eq!(look.limit(), us(320));
        look.waited(us(20));
        assert_eq!(look.limit(), us(280), "a shorter one counts little");
        for _ in 0..100 {
            look.waited(us(3));
        }
        assert_eq!(look.limit(), SHORT);
    }

    #[test]
    fn long_waits_are_slept_through() {
        let mut look = Look::new(None);
        for _ in 0..3 {
            look.waited(us(30_000));
            assert_eq!(look.limit(), SHORT);
        }
    }

    #[test]
    fn a_long_look_in_vain_is_not_tried_again_soon() {
        let mut look = Look::new(None);
        // Looking itself makes waits longer, as where one processor is for both sides.
        let tries = long_looks(&mut look, |limit| limit + us(200));
        assert!(tries < 20, "{tries} tries");
        while look.limit() == SHORT {
            look.waited(us(300));
        }
        look.waited(us(300));
        for _ in 0..3 {
            look.waited(us(5000));
        }
        assert_eq!(look.limit(), SHORT);
        assert!(look.rest > REST, "one that helped outweighs few");
    }

    #[test]
    fn looks_that_make_waits_longer_end() {
        // One processor is for both sides.
        let wait = |limit| if limit > SHORT { us(450) } else { us(300) };
        let looked = long_looks(&mut Look::new(None), wait);
        assert!(looked < 40, "{looked} waits were longer for it");
    }

    #[test]
    fn looks_that_make_waits_shorter_go_on() {
        let mut look = Look::new(None);
        for _ in 0..100 {
            // Waking takes longer than the message.
            look.waited(if look.limit() > SHORT { us(250) } else { us(620) });
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
