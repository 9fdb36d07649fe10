//! Predicts the time, bytes and memory of operations from the rates of links, and chooses algorithm and number of chunks.
//!
//! [`predict`] estimates one algorithm, [`choose`] compares all of them, and a [`Calibration`] fits the rates to measurements.
//!
//! | file | holds |
//! | --- | --- |
//! | `predict` | the cost of one algorithm |
//! | `choose` | the comparison of all algorithms |
//! | `calibration` | measurements, and the links that belong to them |
//! | `fit` | the fit of links to measurements |

mod calibration;
mod choose;
mod fit;
mod predict;

pub use calibration::{Calibration, GOOD, Key, Sample};
pub use choose::{Candidate, Choice, Question, choose};
pub use fit::fit;
pub use predict::{Cost, predict};

pub use crate::links::{
    CacheFactor, Link, Links, Node, Residual, picoseconds, transfer_picoseconds,
};
pub use crate::schedule::estimate::{Term, Traffic};
