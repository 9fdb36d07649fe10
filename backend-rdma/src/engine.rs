//! The queue of copies, signals and waits.
//!
//! What goes here: one completion queue and the queue pairs of all peers, polled from connect to
//! close, also when nothing is submitted. Polling a word that the card wrote is not relied on;
//! arrival is an immediate, then the platform's flush, then a store to the flag.

/// One in-order queue over RDMA; there is no value of it yet.
#[derive(Debug)]
pub enum Engine {}
