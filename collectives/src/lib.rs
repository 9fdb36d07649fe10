//! Collective operations such as all-gather on copy engines and NICs, for every backend of
//! [`peerlane_hal`].
//!
//! A [`Collective`](collective::Collective) states a goal. A [schedule] turns it into one
//! [plan](plan::Plan) for each rank, the [verifier](verify) proves the plans, and a
//! [group](group::Group) runs them.
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

pub mod buffer_plan;
pub mod element;
pub mod group;
mod run;
mod sleeper;

#[doc(inline)]
pub use peerlane_bootstrap as bootstrap;
#[doc(inline)]
pub use peerlane_hal::collective_error as error;
pub(crate) use peerlane_planning::units;
#[doc(inline)]
pub use peerlane_planning::{collective, cost, layout, plan, schedule, topology, trace, verify};

/// Names the primitives of the module that `tests/tests/orderings.rs` compiles once more, with
/// those of loom.
mod sync {
    pub(crate) use std::sync::atomic::{AtomicBool, Ordering, fence};
    pub(crate) use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
}
