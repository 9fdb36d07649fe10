//! The out-of-band exchange of a group: how ranks find each other, pass keys, and learn of a loss.
//!
//! A runtime that has its own store or MPI implements [`Bootstrap`]; Peerlane brings
//! [`in_process`] for threads and [`tcp`] for processes under the usual launchers.

use std::sync::Arc;

use peerlane_hal::{Deadline, Rank};

use crate::error::Error;

pub mod environment;
pub mod in_process;
pub mod tcp;

mod host;
mod member;
mod message;
mod point;
mod round;
mod watched;

/// What a bootstrap tells its group, on a thread of the bootstrap's own.
///
/// The first abort or loss of a group is the only one that listeners hear: the bootstrap decides
/// the race, so that all ranks report the same cause.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// A rank, perhaps this one, has [aborted](Bootstrap::abort) the group.
    Abort {
        /// Who.
        from: Rank,
        /// What it said.
        record: Vec<u8>,
    },
    /// The connection of a rank closed without a goodbye.
    Lost {
        /// Who.
        rank: Rank,
        /// How it was noticed.
        how: String,
    },
    /// Every live rank has been handed that abort or loss; from now on waits may be released.
    Told,
    /// A rank said [goodbye](Bootstrap::leave).
    Left {
        /// Who.
        rank: Rank,
    },
}

/// Takes notices; it must return soon and not call the bootstrap.
pub type Listener = Arc<dyn Fn(Notice) + Send + Sync>;

/// The out-of-band exchange of one group, opened as one of its ranks.
pub trait Bootstrap: Send + Sync {
    /// This rank.
    fn rank(&self) -> Rank;

    /// How many ranks the group has.
    fn ranks(&self) -> usize;

    /// Names the host of this rank; equal on two ranks if and only if they can share its memory.
    fn host(&self) -> &str;

    /// Gives `mine` to every rank and returns what each rank gave, in rank order. Collective: every
    /// rank calls it with the same `label`, in the same order.
    ///
    /// # Errors
    /// [`Timeout`](peerlane_hal::ErrorKind::Timeout) naming the missing rank,
    /// [`PeerLost`](peerlane_hal::ErrorKind::PeerLost) naming the lost one,
    /// [`Mismatch`](peerlane_hal::ErrorKind::Mismatch) if ranks are at different labels,
    /// [`Aborted`](peerlane_hal::ErrorKind::Aborted) after an abort.
    fn exchange(&self, label: &str, mine: &[u8], deadline: Deadline)
    -> Result<Vec<Vec<u8>>, Error>;

    /// Says that the group is over and why. Returns at once; [`Notice::Abort`], with this record or
    /// an earlier one, and then [`Notice::Told`] reach every live rank's listener, this one's too.
    ///
    /// # Errors
    /// If nobody can be told any more.
    fn abort(&self, record: &[u8]) -> Result<(), Error>;

    /// Sets who takes notices; those that came before are handed over at once.
    fn listen(&self, listener: Listener);

    /// Says goodbye: this rank takes part in nothing more, and its end is no loss to others.
    ///
    /// # Errors
    /// If nobody can be told any more.
    fn leave(&self, deadline: Deadline) -> Result<(), Error>;
}
