//! What every engine of `streams` is tested by, on the simulated driver of its vendor.
//!
//! A backend's test program includes this folder and provides a module `backend` beside it: the
//! backend's types, `driver`, `ranks`, `soon`, `pattern`, and `Compute`, a stream on which a rank
//! computes.

mod capture;
pub(crate) mod costs;
mod forks;
mod gets;
mod order;
mod release;
pub(crate) mod world;
