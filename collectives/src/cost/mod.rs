//! Predicts the time, bytes and memory of operations from the rates of links, and chooses algorithm and number of chunks.
//!
//! [`predict`] estimates one algorithm, [`choose`] compares all of them, and a [`Calibration`] fits the rates to measurements.

mod calibration;
mod choose;
pub(crate) mod effective;
pub(crate) mod estimate;
mod fit;
mod links;
mod node;
mod predict;
mod residual;
mod sample;
mod sums;
pub(crate) mod units;

pub use calibration::{Calibration, GOOD, Key};
pub use choose::{Candidate, Choice, Question, choose};
pub use fit::fit;
pub use links::{Link, Links, picoseconds, transfer_picoseconds};
pub use node::{Node, Reach};
pub use predict::{Cost, Term, Traffic, predict};
pub use residual::Residual;
pub use sample::Sample;
pub(crate) use sums::ClusterSums;
