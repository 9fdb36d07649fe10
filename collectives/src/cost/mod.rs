//! What a plan costs: time, bytes and memory, predicted from the rates of the links; and which
//! algorithm and how many parts are therefore chosen.

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
