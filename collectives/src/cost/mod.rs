//! What a plan costs: time, bytes and memory, predicted from the rates of the links; and which
//! algorithm and how many parts are therefore chosen.

mod calibration;
mod choose;
mod fit;
mod ground;
mod links;
mod model;
mod node;
mod predict;
mod residual;
mod sample;
mod seen;
mod units;

pub use calibration::{Calibration, GOOD, Key};
pub use choose::{Candidate, Choice, Question, choose};
pub use fit::fit;
pub use links::{Link, Links, picoseconds, transfer_picoseconds};
pub use node::{Node, Reach};
pub use predict::{Cost, Term, Traffic, predict};
pub use residual::Residual;
pub use sample::Sample;
