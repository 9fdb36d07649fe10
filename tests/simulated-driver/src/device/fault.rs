//! What can go wrong while a command runs; it breaks the session for good.

/// Why a session takes no more work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// A command touched memory that is not there, or that its device may not touch.
    IllegalAddress,
    /// A test asked for this code, by the face's numbers.
    Asked(i32),
    /// The session ended under its users.
    Gone,
}
