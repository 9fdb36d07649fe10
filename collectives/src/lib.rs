//! Collective operations such as all-gather on copy engines and NICs, for every backend of [`peerlane_hal`].
//!
//! A [`Collective`](collective::Collective) states a goal. A [schedule] turns it into one
//! [plan](plan::Plan) for each rank, the [verifier](verify) proves the plans, and a [group](group::Group) runs them.
//!
//! | module | holds |
//! | --- | --- |
//! | [`group`] | the ranks that communicate, and their operations |
//! | [`bootstrap`] | the first exchange between ranks: threads, sockets, launchers |
//! | [`collective`] | the goals: all-gather, broadcast, all-to-all |
//! | [`schedule`] | the algorithms: direct, pull, ring, hierarchical |
//! | [`plan`] | plans as data, as text and as JSON |
//! | [`layout`] | the bytes of blocks and the words of flags |
//! | [`verify`] | the proof that plans reach their goal |
//! | [`cost`] | predicted times |
//! | [`buffer_plan`] | offsets for buffers that share memory, because they are not live at the same time |
//! | [`topology`], [`element`], [`error`], [`trace`] | ranks on nodes, element types, errors, timed steps |

pub mod bootstrap;
pub mod buffer_plan;
pub mod collective;
pub mod cost;
pub mod element;
pub mod error;
pub mod group;
pub mod layout;
pub(crate) mod links;
pub mod plan;
mod run;
pub mod schedule;
mod sleeper;
pub mod topology;
pub mod trace;
mod units;
pub mod verify;

/// Names the primitives of the modules that `tests/tests/orderings.rs` compiles once more, with those of loom.
mod sync {
    pub(crate) use std::sync::atomic::{AtomicBool, Ordering, fence};
    pub(crate) use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
}
