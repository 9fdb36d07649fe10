//! Tests of every engine of `streams`, on the simulated driver of its vendor.
//!
//! A backend's test program includes this folder and provides a module `backend`: the types of the backend,
//! `driver`, `ranks`, `soon`, `pattern`, and `Compute`, a stream on which a rank computes.

mod capture;
pub(crate) mod costs;
mod forks;
mod gets;
mod order;
mod release;
pub(crate) mod world;
