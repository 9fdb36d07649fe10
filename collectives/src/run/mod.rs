//! Executes verified plans on engines.
//!
//! | file | holds |
//! | --- | --- |
//! | `prepared.rs` | the handle of a prepared plan: start, poll, wait |
//! | `executor.rs`, `lane.rs` | the state of all lanes, and of one lane |
//! | `port.rs` | an engine with the regions of an operation, without types |
//! | `program.rs`, `crossings.rs`, `writers.rs` | plans bound to offsets and words |
//! | `turns.rs` | outputs and flags that starts use in turn |
//! | `backoff.rs` | how long a waiting thread sleeps |
//! | `tracer.rs` | timed steps |
//!
//! The executor depends on no vendor and no algorithm. Its only dynamic dispatch is the [`port`], which takes slices of bound
//! steps. Waits are queued if the engine can queue them; otherwise the executor polls the flag and submits the steps after
//! it. The caller's thread polls engines inside `start`, `poll` and `wait`.

pub(crate) mod backoff;
pub(crate) mod crossings;
pub(crate) mod executor;
pub(crate) mod lane;
pub(crate) mod port;
pub(crate) mod prepared;
pub(crate) mod program;
pub(crate) mod tracer;
pub(crate) mod turns;
pub(crate) mod writers;
