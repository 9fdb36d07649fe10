//! Connects the ranks of a group out of band, to exchange remote keys and to detect lost ranks.
//!
//! A runtime with its own store or MPI implements [`Bootstrap`]. Peerlane provides [`in_process`]
//! for threads and [`tcp`] for processes under the usual launchers.

// The files of this module:
//
// | file | holds |
// | --- | --- |
// | `address` | the forms in which users write the address of the hub |
// | `environment` | what the launcher says: rank, number of ranks, address of the hub |
// | `in_process` | the bootstrap for threads of one process |
// | `tcp/` | the bootstrap for processes |
// | `client` | one rank's side of both |
// | `hub` | the state of a group, which decides what all ranks receive |
// | `subgroups` | the messages of groups that were split from another one |
// | `secret` | the secret of a job, and proofs of it |
// | `abort` | the reason why a group has ended |
// | `message` | what ranks and the hub send each other |
// | `monitor` | a value whose changes threads wait for |
// | `process` | what a rank sees of the processes of other ranks |
// | `forks` | sockets that forked children do not keep open |

use std::fs;
use std::sync::{Arc, OnceLock};

use peerlane_hal::{Deadline, Rank};

use crate::error::Error;

#[doc(inline)]
pub use peerlane_hal::collective_error as error;

pub use self::abort::{AbortRecord, Cause};
pub use self::process::ProcessState;
pub use self::secret::Secret;

pub mod environment;
pub mod in_process;
pub mod tcp;

#[doc(hidden)]
pub mod abort;
#[doc(hidden)]
pub mod client;
pub(crate) mod forks;
#[doc(hidden)]
pub mod hub;
#[doc(hidden)]
pub mod message;
pub(crate) mod monitor;
pub(crate) mod process;

mod address;
mod meter;
mod secret;
mod subgroups;

/// Re-exports the locks that `monitor` uses, so that a test can replace them with those of loom.
///
/// The test is `tests/tests/orderings.rs`.
mod sync {
    pub(crate) use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
}

/// The label that a rank passes to [`Bootstrap::exchange`] to refuse the collective call of the
/// other ranks.
///
/// It matches every label, because the rank may not know which call the others make.
pub const REFUSAL: &str = "a refused call";

/// Reports an event of a group, such as an abort or a lost rank, to the listener of each rank.
///
/// Listeners receive only the first abort or loss of a group: the bootstrap decides which came
/// first, so that all ranks report the same cause.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// Reports that a rank, perhaps this one, has [aborted](Bootstrap::abort) the group.
    Abort {
        /// The rank that aborted the group.
        from: Rank,
        /// The encoded [`AbortRecord`] that the rank passed to `abort`.
        record: Vec<u8>,
    },
    /// Reports that the connection of a rank closed although the rank had not left the group.
    Lost {
        /// The rank that was lost.
        rank: Rank,
        /// A text that says how the loss was detected.
        how: String,
    },
    /// Reports that every live rank has received the abort or the loss, so engines may release
    /// their waits.
    Acknowledged,
    /// Passes on a [message](Bootstrap::broadcast) that a rank, perhaps this one, has sent.
    Message {
        /// The rank that sent the message.
        from: Rank,
        /// The bytes of the message that the rank sent.
        message: Vec<u8>,
    },
    /// Reports that a rank has [left](Bootstrap::leave) the group.
    Left {
        /// The rank that left the group.
        rank: Rank,
    },
}

/// Handles the events that the bootstrap reports to one rank, such as aborts, lost ranks and
/// messages.
///
/// The groups of the crate `peerlane-collectives` listen to their bootstrap.
pub trait Listener: Send + Sync {
    /// Handles an event of the group.
    ///
    /// It must return soon, and of the bootstrap it may only call [`abort`](Bootstrap::abort) and
    /// [`broadcast`](Bootstrap::broadcast).
    fn notice(&self, notice: Notice);

    /// Ends the group after an exchange of this rank has timed out, and returns the error for the
    /// caller.
    ///
    /// The bootstrap calls it on the thread of the exchange. `missing` are the ranks that did not
    /// take part.
    fn exchange_timed_out(&self, missing: &[Rank], error: Error) -> Error;
}

/// Connects one rank to the other ranks of its group, to exchange small messages out of band.
///
/// # Safety
/// [`exchange`](Self::exchange) returns exactly the bytes that each rank passed to this call, and
/// no bytes of another call: the group trusts the keys of memory that it receives. `rank` and
/// `ranks` never change and are right.
pub unsafe trait Bootstrap: Send + Sync {
    /// Returns the rank of the caller in its group.
    fn rank(&self) -> Rank;

    /// Returns the number of ranks of the group.
    fn ranks(&self) -> usize;

    /// Returns the name of this rank's host, which is equal on two ranks if and only if they can
    /// share memory.
    fn host(&self) -> &str;

    /// Sends `mine` to every rank and returns what each rank sent, in rank order.
    ///
    /// This is a collective call: every rank makes it with the same `label`, in the same order. A
    /// rank that has failed before it knew which call the others make passes [`REFUSAL`], which
    /// equals every label.
    ///
    /// # Errors
    /// [`Timeout`](peerlane_hal::ErrorKind::Timeout) naming the missing rank, or the error of
    /// [`Listener::exchange_timed_out`] if there is a listener,
    /// [`PeerLost`](peerlane_hal::ErrorKind::PeerLost) naming the lost one,
    /// [`Mismatch`](peerlane_hal::ErrorKind::Mismatch) if ranks are at different labels,
    /// [`Aborted`](peerlane_hal::ErrorKind::Aborted) after an abort.
    fn exchange(&self, label: &str, mine: &[u8], deadline: Deadline)
    -> Result<Vec<Vec<u8>>, Error>;

    /// Returns the ranks whose contributions to the current exchange of this rank are still
    /// missing.
    ///
    /// There are none if this rank has no exchange.
    fn missing(&self) -> Vec<Rank>;

    /// Sends a message to the listener of every live rank, including this one, and returns at once.
    ///
    /// All listeners receive the messages, the abort and the losses of a group in the same order.
    ///
    /// # Errors
    /// If the other ranks can no longer be reached.
    fn broadcast(&self, message: &[u8]) -> Result<(), Error>;

    /// Returns the rank whose process relays the messages between ranks, such as the one that runs
    /// the hub.
    ///
    /// In a group of one process, the result is this rank. It is `None` if a process outside of the
    /// group relays messages.
    fn relay(&self) -> Option<Rank>;

    /// Returns whether the process of `rank` runs, is stopped or has ended, as far as this rank can
    /// see.
    ///
    /// A caller can so distinguish a rank that is stopped from a slow rank. The default is
    /// [`ProcessState::Unknown`].
    fn process(&self, rank: Rank) -> ProcessState {
        let _ = rank;
        ProcessState::Unknown
    }

    /// Returns the state of the process that relays the messages, as far as this rank can see.
    ///
    /// The default is the state of the process of the rank [`relay`](Self::relay).
    fn relay_process(&self) -> ProcessState {
        self.relay().map_or(ProcessState::Unknown, |relay| self.process(relay))
    }

    /// Returns whether other ranks of the group are threads of this process.
    ///
    /// Groups of such ranks are looked after by threads of their own, and not by those that all
    /// groups of the process share. The default is false.
    fn shares_process(&self) -> bool {
        false
    }

    /// Ends the group on all ranks, for the reason in `record`, and returns at once.
    ///
    /// The record is an encoded [`AbortRecord`]. The listener of every live rank, including this
    /// one, receives [`Notice::Abort`] with this record or an earlier one, and then
    /// [`Notice::Acknowledged`].
    ///
    /// # Errors
    /// If the other ranks can no longer be reached.
    fn abort(&self, record: &[u8]) -> Result<(), Error>;

    /// Sets the listener of this rank, and passes it the notices that arrived earlier.
    fn listen(&self, listener: Arc<dyn Listener>);

    /// Leaves the group, so that the other ranks do not count this rank as lost.
    ///
    /// This rank takes part in nothing more. Afterwards it holds no connection and no port, as
    /// after [`disconnect`](Self::disconnect).
    ///
    /// # Errors
    /// If the other ranks can no longer be reached.
    fn leave(&self, deadline: Deadline) -> Result<(), Error>;

    /// Releases the connections and the port of this rank, which takes part in nothing more.
    ///
    /// If it has not left the group, the other ranks lose it.
    ///
    /// A group calls it when it is closed or dropped, because handles of the group keep the
    /// bootstrap alive. The default does nothing, which suits a bootstrap that is released when it
    /// is dropped.
    fn disconnect(&self) {}

    /// Connects the ranks that remain after a group has ended, and returns the bootstrap of the new
    /// group.
    ///
    /// The ranks keep their order and are numbered from 0. Every remaining rank calls it with the
    /// same `excluded` ranks, which do not take part. It waits for every other rank whose process
    /// still runs, but no longer than half of the time until the deadline.
    ///
    /// # Errors
    /// [`Aborted`](peerlane_hal::ErrorKind::Aborted) if the new group was formed without this rank;
    /// [`Timeout`](peerlane_hal::ErrorKind::Timeout) naming the rank that did not answer;
    /// [`Unavailable`](peerlane_hal::ErrorKind::Unavailable) if the bootstrap cannot connect ranks
    /// again.
    fn shrink(&self, excluded: &[Rank], deadline: Deadline) -> Result<Box<dyn Bootstrap>, Error>;

    /// Splits a smaller group of the ranks `members` from this group, and returns its bootstrap.
    ///
    /// The smaller group uses the connections of this group. Its ranks are numbered in the order of
    /// `members`.
    ///
    /// The members have agreed on the call: each calls it with equal arguments, soon. `number` is
    /// one that `members[0]` has passed to no other call. A rank that is lost is lost by both
    /// groups; aborts and messages of one group do not reach the other. The smaller group ends when
    /// this one is left.
    ///
    /// # Errors
    /// [`Unavailable`](peerlane_hal::ErrorKind::Unavailable) if the bootstrap does not support it,
    /// as by default.
    fn subgroup(&self, number: u32, members: &[Rank]) -> Result<Box<dyn Bootstrap>, Error> {
        let _ = (number, members);

        let text = "this bootstrap cannot split a group; implement `Bootstrap::subgroup`";
        Err(Error::new(peerlane_hal::ErrorKind::Unavailable, text))
    }
}

/// Returns a text that identifies this host by its boot id and its network namespace.
///
/// Only processes that share both can share memory. The boot id identifies the kernel; containers
/// of one host share it. The network namespace is needed as well, because descriptors of shared
/// memory travel over an abstract socket, which lives in one namespace. If the kernel does not show
/// both, the host name is used instead. Without a name no other process counts as local.
fn host_id() -> String {
    // Read once, so that a process that runs out of descriptors keeps its host.
    static ID: OnceLock<String> = OnceLock::new();
    if let Some(id) = ID.get() {
        return id.clone();
    }

    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id");
    let network = fs::read_link("/proc/self/ns/net");
    // The host name is not kept, because a later call may read both.
    match (boot, network) {
        (Ok(boot), Ok(network)) => {
            ID.get_or_init(|| format!("{}/{}", boot.trim(), network.display())).clone()
        }
        _ => host_name(),
    }
}

/// Returns the name of this host, or the id of this process if the host has no name.
///
/// The id makes sure that no other process counts as one of this host.
fn host_name() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname")
        .or_else(|_| fs::read_to_string("/etc/hostname"))
        .unwrap_or_default();
    match name.trim() {
        "" => format!("process {}", std::process::id()),
        name => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_id_is_stable_and_holds_boot_id_and_network_namespace() {
        assert_eq!(host_id(), host_id());
        let id = host_id();
        let (boot, network) = id.split_once('/').map(|(b, n)| (b.len(), n.to_owned())).unwrap();
        assert_eq!(boot, 36);
        assert!(network.starts_with("net:["), "{network}");
    }
}
