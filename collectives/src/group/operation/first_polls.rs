//! Decides how often a thread polls a start that it has just made before it reads the clock.

/// The number of polls, which take about half a microsecond.
const POLLS: u32 = 16;
/// After this number of misses, the next starts are polled once.
const MISSES_MANY: u32 = 4;
/// More misses are not counted, so that two hits are enough to poll as often as before.
const MISSES_MAX: u32 = 8;
/// After many misses, one start of this number is polled as often as before.
const STARTS_PER_TRIAL: u32 = 64;

/// Chooses the number of first polls of a start by whether the last starts completed in theirs.
///
/// Small starts of ranks with a core each complete. Large ones do not, and those of ranks that
/// share a core do not either: the polls would only keep the other rank from running.
#[derive(Debug, Default)]
pub(super) struct FirstPolls {
    misses: u32,
    starts: u32,
}

impl FirstPolls {
    /// Returns the number of polls of the next start.
    pub(super) fn polls(&mut self) -> u32 {
        self.starts = self.starts.wrapping_add(1);
        let is_trial = self.starts.is_multiple_of(STARTS_PER_TRIAL);
        if self.misses < MISSES_MANY || is_trial { POLLS } else { 1 }
    }

    /// Notes after how many polls a start was complete; `None` if it was not.
    pub(super) fn note_end(&mut self, polls: Option<u32>) {
        match polls {
            // The last rank to come waits for nobody, which says nothing about the others.
            Some(1) => {}
            Some(_) => self.misses /= 2,
            None => self.misses = (self.misses + 1).min(MISSES_MAX),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn starts_that_take_long_are_polled_once_except_for_a_trial() {
        let mut first_polls = FirstPolls::default();
        let mut polled = |starts: u32, note: Option<u32>| {
            let polls = (0..starts).map(|_| {
                let polls = first_polls.polls();
                first_polls.note_end(note);
                polls
            });
            polls.filter(|polls| *polls == POLLS).count()
        };
        assert_eq!(polled(5, None), 4);
        assert_eq!(polled(10 * STARTS_PER_TRIAL, Some(1)), 10, "the last rank learns nothing");
        assert_eq!(polled(10 * STARTS_PER_TRIAL, None), 10);

        polled(2, Some(POLLS));
        assert_eq!(polled(STARTS_PER_TRIAL, Some(2)), STARTS_PER_TRIAL as usize);
    }
}
