//! How long an engine looks before it sleeps: longer where that spares it sleeps.
//!
//! To sleep and to be woken takes tens of microseconds: system calls to ask for events and to sleep, and
//! an interrupt of a core. Who waits for a few times that should look for longer. But where processors
//! are few, who looks keeps them from those who would end the wait; so a long look that was in vain is not
//! tried again soon.

use std::time::Duration;

/// A few times what a message takes on a fast network, and about what waking takes.
const SHORT: Duration = Duration::from_micros(100);
/// To a longer wait, waking adds a small part; and as much is lost by a look in vain.
const LONG: Duration = Duration::from_micros(400);
/// Sleeps before the next try of a longer look, after the first one in vain.
const REST: u32 = 16;
/// The same after many in vain.
const REST_MAX: u32 = 1024;

/// What recent waits suggest, or what was asked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Look {
    given: Option<Duration>,
    /// From [`SHORT`] to [`LONG`].
    suggested: Duration,
    /// Sleeps before a longer look is tried.
    rest: u32,
    /// As many after the next one in vain.
    next_rest: u32,
}

impl Look {
    pub(super) fn new(given: Option<Duration>) -> Self {
        Self { given, suggested: SHORT, rest: 0, next_rest: REST }
    }

    /// How long to look.
    pub(super) fn limit(self) -> Duration {
        self.given.unwrap_or(self.suggested)
    }

    /// A wait is over, that was slept through in part where it took longer than the look.
    pub(super) fn waited(&mut self, wait: Duration) {
        let (twice, slept) = ((2 * wait).min(LONG), wait > self.suggested);
        if !slept {
            // A look in vain costs more than one that helped has spared, so it is forgiven slowly.
            if wait > SHORT && self.next_rest > REST {
                self.next_rest -= 1;
            }
            // Shorter waits let it shrink slowly.
            self.suggested = (self.suggested * 7 / 8).max(twice).max(SHORT);
        } else if self.suggested > SHORT {
            self.suggested = SHORT;
            self.rest = self.next_rest;
            self.next_rest = (2 * self.next_rest).min(REST_MAX);
        } else if self.rest > 0 {
            self.rest -= 1;
        } else if wait <= LONG {
            self.suggested = twice;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn us(micros: u64) -> Duration {
        Duration::from_micros(micros)
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
        let mut tries = 0;
        for _ in 0..1000 {
            let is_try = look.limit() > SHORT;
            tries += u32::from(is_try);
            look.waited(look.limit() + us(200));
        }
        assert!(tries < 10, "{tries} tries");
        while look.limit() == SHORT {
            look.waited(us(300));
        }
        look.waited(us(300));
        look.waited(us(5000));
        assert_eq!(look.limit(), SHORT);
        assert!(look.rest > REST, "one that helped outweighs few");
    }

    #[test]
    fn what_was_asked_for_stays() {
        let mut look = Look::new(Some(us(7)));
        look.waited(us(400));
        assert_eq!(look.limit(), us(7));
    }
}
