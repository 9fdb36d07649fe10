//! The queue of copies, signals and waits.
//!
//! What goes here: copies on the SDMA engine that serves the link to the peer, each waiting for the
//! signal of the one before. Copies above 128 MiB are cut: some runtimes stall on larger ones.
//! Stream writes and waits are submitted one by one, and capture is probed by replaying, because
//! older runtimes ran them at once.

/// One in-order queue over ROCm; there is no value of it yet.
#[derive(Debug)]
pub enum Engine {}
