//! Polls the work that a future waits for in the thread that polls the future.
//!
//! Most starts and messages are complete within some microseconds, and waking a thread takes longer
//! than that. So a future first polls by itself and lets its executor poll it again. The progress
//! thread watches it only when nothing has moved for a while.

use std::task::Waker;
use std::thread;
use std::time::{Duration, Instant};

use crate::error::Error;

/// One poll of a future looks for this long before other tasks of the executor get their turn.
const LOOK: Duration = Duration::from_micros(5);

/// A future that has seen no progress for this long leaves the work to the progress thread. A
/// blocking wait polls as long without sleeping.
const IDLE_MAX: Duration = Duration::from_micros(100);

/// What one look at the work of a future has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    Complete,
    Progressed,
    Idle,
}

/// What a future does after it has polled by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    Return,
    /// Its waker was called, so it returns that it is pending and is polled again.
    PolledAgain,
    /// Nothing has moved for long, so the progress thread watches it.
    Watched,
}

/// Decides how long a future polls by itself.
#[derive(Debug, Default)]
pub(super) struct EagerPolls {
    idle_since: Option<Instant>,
}

impl EagerPolls {
    /// Looks several times, and says what the future does next.
    pub(super) fn poll(
        &mut self,
        waker: &Waker,
        mut look: impl FnMut() -> Result<Look, Error>,
    ) -> Result<Next, Error> {
        let begun = Instant::now();
        loop {
            match look()? {
                Look::Complete => return Ok(Next::Return),
                Look::Progressed => self.idle_since = None,
                Look::Idle => {}
            }

            let now = Instant::now();
            let idle = now - *self.idle_since.get_or_insert(now);
            if idle >= IDLE_MAX {
                return Ok(Next::Watched);
            }
            if now - begun >= LOOK {
                break;
            }
            std::hint::spin_loop();
        }

        // The rank that this one waits for may need the processor.
        thread::yield_now();
        waker.wake_by_ref();
        Ok(Next::PolledAgain)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_future_polls_by_itself_until_nothing_has_moved_for_a_while() {
        let mut polls = EagerPolls::default();
        let poll = |polls: &mut EagerPolls, look| polls.poll(Waker::noop(), || Ok(look)).unwrap();

        assert_eq!(poll(&mut polls, Look::Complete), Next::Return);
        let begun = Instant::now();
        assert_eq!(poll(&mut polls, Look::Progressed), Next::PolledAgain);

        let mut next = Next::PolledAgain;
        while next == Next::PolledAgain {
            next = poll(&mut polls, Look::Idle);
        }
        assert_eq!(next, Next::Watched);
        assert!(begun.elapsed() >= IDLE_MAX);

        // Progress begins the time anew.
        assert_ne!(poll(&mut polls, Look::Progressed), Next::Watched);
    }
}
