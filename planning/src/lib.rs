//! Computes the steps of each rank in a collective, proves that they are correct, and predicts
//! their time.
//!
//! A [`Collective`](collective::Collective) states a goal. A [schedule] turns it into one
//! [plan](plan::Plan) for each rank, and the [verifier](verify) proves the plans. Nothing here
//! opens a device, a file or a socket, or starts a thread. The crate `peerlane-collectives` runs
//! the plans.
//!
//! | module | holds |
//! | --- | --- |
//! | [`collective`] | the goals: all-gather, broadcast, all-to-all |
//! | [`topology`] | ranks on nodes |
//! | [`schedule`] | the algorithms: direct, pull, ring, hierarchical |
//! | [`plan`] | plans as data, as text and as JSON |
//! | [`layout`] | the bytes of blocks and the words of flags |
//! | [`verify`] | the proof that plans reach their goal |
//! | [`cost`] | predicted times |
//! | [`simulate`] | plans that run over modelled links, for users who choose hardware or write schedules |
//! | [`trace`] | timed steps |

#![forbid(unsafe_code)]

pub mod collective;
pub mod cost;
mod fit;
pub mod layout;
#[doc(hidden)]
pub mod links;
pub mod plan;
pub mod schedule;
pub mod simulate;
pub mod topology;
pub mod trace;
#[doc(hidden)]
pub mod units;
pub mod verify;

pub use fit::calibrate;
#[doc(inline)]
pub use peerlane_hal::collective_error as error;
