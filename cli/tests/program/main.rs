//! Tests of the built program.

mod allgather;
mod bench;
mod common;
mod cost;
mod cuda;
mod failure;
mod launcher;
mod methods;
mod perf;
mod plan;
mod rocm;
mod shapes;
mod simulate;
mod usage;
