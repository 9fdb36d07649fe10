//! Executes the verified plan of a collective operation on copy engines and NICs.
//!
//! | file | holds |
//! | --- | --- |
//! | `executor/` | the state of all lanes of a prepared plan |
//! | `lane.rs` | the state of one lane, and its timed steps |
//! | `program.rs` | the commands of a plan; the writers of flags |
//! | `parts.rs` | where chunks arrive in the commands, and where they must have departed |
//! | `queue.rs` | an engine with the memory that commands name, of operations and of channels |
//! | `buffers.rs` | the regions of an operation, and the offsets that a start uses |
//! | `backoff.rs` | how long a waiting thread sleeps |
//!
//! Each file uses only files below it in this table. The executor depends on no vendor and no
//! algorithm. Its only dynamic dispatch is the engine of a [`queue`], which takes slices of
//! commands. Waits are queued if the engine can queue them; otherwise the executor polls the flag
//! and submits the commands after it. The thread that calls `start`, `poll` or `wait` of an
//! operation polls its engines.

pub(crate) mod backoff;
pub(crate) mod buffers;
pub(crate) mod executor;
pub(crate) mod fused;
pub(crate) mod lane;
pub(crate) mod parts;
pub(crate) mod program;
pub(crate) mod queue;
