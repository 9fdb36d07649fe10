//! What a peer needs to import a region.
//!
//! What goes here: the payload of the envelope: PCI address of the device, base and offset inside
//! the allocation, length, and the IPC handle, or a word that says that a dma-buf follows by
//! SCM_RIGHTS.

/// The remote key of a region; there is no value of it yet.
#[derive(Debug)]
pub enum Key {}
