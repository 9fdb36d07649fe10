//! What a peer needs to import a region.
//!
//! What goes here: the payload of the envelope: device, base and offset inside the allocation,
//! length, and how the handle travels: a file descriptor by SCM_RIGHTS, an IPC handle, or a fabric
//! handle in the key itself.

/// The remote key of a region; there is no value of it yet.
#[derive(Debug)]
pub enum Key {}
