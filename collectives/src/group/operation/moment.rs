//! Decides for how many polls a thread does nothing but poll the start that it has just made.

/// The number of polls, which take about half a microsecond.
const POLLS: u32 = 16;
/// So many more misses than hits show that the next starts will miss too.
const MISSES_MANY: u32 = 4;
/// A larger number of misses is forgotten, so that hits soon count again.
const MISSES_MAX: u32 = 8;
/// After many misses, one of so many starts tries again.
const STARTS_PER_TRIAL: u32 = 64;

/// The polls of the next start, by whether the last ones completed in theirs.
///
/// Small starts of ranks with a core each complete. Large ones do not, and those of ranks that
/// share a core do not either: the polls would only keep the other rank from running.
#[derive(Debug, Default)]
pub(super) struct Moment {
    misses: u32,
    starts: u32,
}

impl Moment {
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
        let mut moment = Moment::default();
        let mut polled = |starts: u32, note: Option<u32>| {
            let polls = (0..starts).map(|_| {
                let polls = moment.polls();
                moment.note_end(note);
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
