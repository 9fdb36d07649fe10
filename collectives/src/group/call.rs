//! Describes collective calls to other ranks, and says when a call counts as long.

use std::fmt;
use std::time::{Duration, Instant};

use peerlane_hal::Rank;
use serde::{Deserialize, Serialize};

/// A call counts as long after this time. Each further message takes twice as long as the one
/// before.
pub(super) const PATIENCE: Duration = Duration::from_millis(250);

/// The next rank tells its call this much later, so that usually one of the ranks that wait for the
/// same one is enough.
const STAGGER: Duration = Duration::from_millis(2);

/// A collective call that a rank has begun and not ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Call {
    pub(super) name: String,
    pub(super) number: CallNumber,
}

/// The number of a call among the calls of its kind, which is equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum CallNumber {
    /// A start of the operation that was prepared with this number.
    Start { operation: u64, epoch: u64 },
    /// An exchange of messages, counted from 0.
    Exchange(u64),
}

impl Call {
    pub(super) fn start(name: &str, operation: u64, epoch: u64) -> Self {
        Self { name: name.to_owned(), number: CallNumber::Start { operation, epoch } }
    }

    /// Returns the number of the start if it is one of the operation of another start.
    pub(super) fn epoch_of(&self, other: &Self) -> Option<u64> {
        let (CallNumber::Start { operation, epoch }, CallNumber::Start { operation: of, .. }) =
            (self.number, other.number)
        else {
            return None;
        };
        (operation == of && self.name == other.name).then_some(epoch)
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.number {
            CallNumber::Start { epoch, .. } => write!(f, "start {epoch} of {}", self.name),
            CallNumber::Exchange(_) => write!(f, "the call \"{}\"", self.name),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Message {
    /// The sender has been in this call for long.
    Waits(Call),
    /// The sender is in `own`, and has not begun the call `theirs` that a rank has told.
    Crosses { rank: u32, theirs: Call, own: Call },
}

/// When a thread that waits tells its call.
#[derive(Debug)]
pub(super) struct Patience {
    pause: Duration,
    has_looked: bool,
    /// The time of the next message, once the wait has had its second look.
    next: Option<Instant>,
}

impl Patience {
    pub(super) fn new(rank: Rank) -> Self {
        let stagger = STAGGER.saturating_mul(rank.0);
        Self { pause: PATIENCE + stagger, has_looked: false, next: None }
    }

    /// Returns whether the call is to be told now, and the time until the next look. The first look
    /// reads no clock, because most waits are short.
    pub(super) fn look(&mut self) -> (bool, Duration) {
        if !std::mem::replace(&mut self.has_looked, true) {
            return (false, self.pause);
        }
        let now = Instant::now();
        let next = self.next.get_or_insert(now + self.pause);
        if *next > now {
            return (false, *next - now);
        }
        self.pause *= 2;
        *next = now + self.pause;
        (true, self.pause)
    }
}
