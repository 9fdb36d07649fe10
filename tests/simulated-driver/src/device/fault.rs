//! Defines the faults of a running command, which break the session permanently.

/// Why a session accepts no more work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// A command accessed memory that does not exist, or that its device may not access.
    IllegalAddress,
    /// A test injected this code, by the API's numbers.
    Asked(i32),
    /// The session ended while it was in use.
    Gone,
}
