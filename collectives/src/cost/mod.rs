//! Predicts the time, bytes and memory of operations from the rates of links, and chooses algorithm and number of chunks.
//!
//! [`predict`] estimates one algorithm, [`choose`] compares all of them, and a [`Calibration`] fits the rates to measurements.
//!
//! | file | holds |
//! | --- | --- |
//! | `links` | latencies and rates of links, and the resources that the ranks of a node share |
//! | `estimate` | the time of a start as a closed formula |
//! | `predict` | the cost of one algorithm |
//! | `choose` | the comparison of all algorithms |
//! | `calibration` | measurements, and the links that belong to them |
//! | `fit` | the fit of links to measurements |
//! | `units` | formats of times, sizes and rates |

mod calibration;
mod choose;
pub(crate) mod estimate;
mod fit;
mod links;
mod predict;
pub(crate) mod units;

pub use calibration::{Calibration, GOOD, Key, Residual, Sample};
pub use choose::{Candidate, Choice, Question, choose};
pub(crate) use estimate::ClusterSums;
pub use fit::fit;
pub use links::{CacheFactor, Link, Links, Node, picoseconds, transfer_picoseconds};
pub use predict::{Cost, Term, Traffic, predict};
