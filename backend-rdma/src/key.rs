//! What a peer needs to import a region.
//!
//! What goes here: the payload of the envelope: address, length, rkey, and for flags the first slot
//! of the table.

/// The remote key of a region; there is no value of it yet.
#[derive(Debug)]
pub enum Key {}
