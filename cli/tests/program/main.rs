//! Tests of the built program.

mod allgather;
mod bench;
#[path = "../common/mod.rs"]
mod common;
mod cost;
mod failure;
mod inputs;
mod launcher;
mod limits;
mod methods;
mod perf;
mod plan;
mod plan_buffers;
mod shapes;
mod simulate;
mod usage;
