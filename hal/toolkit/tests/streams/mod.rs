//! Tests of every engine of `streams`, on the simulated driver of its vendor.
//!
//! A backend's test program includes this folder and provides a module `backend`: the types of the backend,
//! `driver`, `oldest_driver`, `ranks`, `soon`, `pattern`, and `Compute`, a stream on which a rank computes.

mod capture;
pub(crate) mod costs;
pub(crate) mod failure;
mod forks;
mod gets;
mod order;
mod release;
mod word_by_word;
pub(crate) mod world;
