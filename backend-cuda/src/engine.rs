//! The queue of copies, signals and waits.
//!
//! What goes here: one stream of a priority of its own; long copies are cut, because a copy engine
//! serves its queue in order and knows no priority. Own-shard copies of more than a few MiB would
//! run on the multiprocessors, so they are cut as well.

/// One in-order queue over CUDA; there is no value of it yet.
#[derive(Debug)]
pub enum Engine {}
