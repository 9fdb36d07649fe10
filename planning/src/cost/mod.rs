//! Predicts the time, traffic and memory of collective operations, and chooses the fastest
//! algorithm.
//!
//! [`predict`] estimates one algorithm, and [`choose`] compares all of them. A [`Calibration`]
//! holds links that [`calibrate`](crate::calibrate) or the program `peerlane calibrate` has fitted
//! to measurements.

// The files of this module:
//
// | file | holds |
// | --- | --- |
// | `predict` | the cost of one algorithm |
// | `choose` | the comparison of all algorithms, kinds of engines and forms |
// | `form` | the forms of an all-reduce |
// | `launch` | fused starts |
// | `calibration` | measurements, and the links that belong to them |

mod calibration;
mod choose;
mod form;
mod launch;
mod predict;

pub use calibration::{Calibration, EngineCalibration, GOOD, Key, Sample};
pub use choose::{Candidate, Choice, Question, Variant, choose, choose_among};
pub use form::{Form, FormBlocks, forms};
pub use launch::Transfer;
pub use predict::{Cost, predict};

pub use crate::links::{
    CacheFactor, Link, Links, Node, Residual, picoseconds, transfer_picoseconds,
};
pub use crate::schedule::estimate::{Term, Traffic};
