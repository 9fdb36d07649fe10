//! Handing memory to other processes: which registrations of this process live, and how another
//! process asks for the descriptors behind one.
//!
//! - [`enter`] gives a registration its [`Generation`]; dropping what it returns takes it out. A key
//!   names a generation, so that a key of freed memory finds nothing, even when new memory has the
//!   old address.
//! - [`find`] is how a rank of the same process opens it, [`ask`] how one of another process does.
//! - [`Server`] is the thread that answers; a fabric holds one from open to close.
//!
//! Each process listens at an abstract socket that is named by its random token, so there is no file
//! that a killed process could leave behind. Only processes of the same user are answered. One
//! question and one answer a connection:
//!
//! | question | `PLRQ`, version, backend, generation, the rank that owns it, its role |
//! | --- | --- |
//! | answer | status (0: here it is, 1: freed), count of descriptors |
//! | then, until that many came | status (0, or 2 and a text: the owner cannot), up to 250 descriptors by `SCM_RIGHTS` |

mod process;
mod question;
mod registry;
mod server;

use rustix::fd::OwnedFd;
pub use rustix::io::Errno;

use peerlane_hal::Rank;
use peerlane_hal::Role;
use peerlane_hal::{BackendId, Generation, KeyError};

pub use process::ProcessToken;
pub use question::ask;
pub use registry::{Entry, enter, find};
pub use server::Server;

/// Descriptors in one message; the kernel takes 253.
const MESSAGE_FDS_MAX: usize = 250;
/// Descriptors of one registration, inclusive: more segments than any allocator makes of one buffer.
pub const DESCRIPTORS_MAX: u32 = 1 << 16;

const HERE: u8 = 0;
const FREED: u8 = 1;
const FAILED: u8 = 2;

/// What a key names. The generation alone would do; the rest is checked too, so that a key that was
/// tampered with opens nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// Whose registration.
    pub backend: BackendId,
    /// Which one.
    pub generation: Generation,
    /// The rank that owns it.
    pub owner: Rank,
    /// What it was registered as.
    pub role: Role,
}

/// Memory that can be handed over.
pub trait Handover: std::any::Any + Send + Sync {
    /// How many descriptors another process needs, at most [`DESCRIPTORS_MAX`]; 0 where it only has
    /// to know that the memory lives; `None` where it cannot leave this process.
    fn descriptors(&self) -> Option<u32>;

    /// The descriptor number `index`, below [`descriptors`](Self::descriptors).
    ///
    /// Called by the thread of the [`Server`].
    ///
    /// # Errors
    /// Why there is none, for the text that the asker gets.
    fn descriptor(&self, index: u32) -> Result<OwnedFd, String>;
}

/// Why memory was not handed over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// There is no such registration any more.
    Freed,
    /// The process is gone, or does not speak as it should.
    Gone {
        /// How it was noticed.
        how: String,
    },
    /// It did not answer in time.
    Late {
        /// The timeout.
        timeout: std::time::Duration,
    },
    /// It has the memory and cannot hand it over.
    Failed {
        /// In its own words.
        why: String,
    },
    /// This system refused something.
    System {
        /// What was asked of it.
        what: String,
        /// Its answer.
        errno: Errno,
    },
}

impl Refusal {
    fn system(what: impl Into<String>) -> impl FnOnce(Errno) -> Self {
        move |errno| Self::System { what: what.into(), errno }
    }

    fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        move |error| {
            let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
            Self::System { what: what.into(), errno }
        }
    }
}

/// A role as keys carry it.
pub const fn role_number(role: Role) -> u32 {
    match role {
        Role::Data => 0,
        Role::Flags => 1,
    }
}

/// The role of such a number.
///
/// # Errors
/// If there is none.
pub fn role_of(number: u32) -> Result<Role, KeyError> {
    match number {
        0 => Ok(Role::Data),
        1 => Ok(Role::Flags),
        seen => Err(KeyError::Field { field: "role", seen: seen.into(), wanted: "0 or 1" }),
    }
}

#[cfg(test)]
mod tests;
