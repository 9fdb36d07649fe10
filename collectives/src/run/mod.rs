//! Running a verified plan on whatever engines there are.
//!
//! The executor knows no vendor and no algorithm. Its only dynamic dispatch is the [`port`]: a
//! lane's engine with the operation's windows, taking slices of bound steps. Waits are queued where
//! the engine can; where it cannot, the executor reads the flag itself and submits what follows.
//! The caller's thread drives polled engines inside `start`, `poll` and `wait`.

pub(crate) mod backoff;
pub(crate) mod course;
pub(crate) mod crossings;
pub(crate) mod lane;
pub(crate) mod port;
pub(crate) mod prepared;
pub(crate) mod program;
pub(crate) mod tracer;
pub(crate) mod turns;
pub(crate) mod writers;
