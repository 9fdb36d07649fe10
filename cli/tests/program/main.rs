//! Runs the built program from end to end.

mod allgather;
mod common;
mod cost;
mod cuda;
mod failure;
mod launcher;
mod methods;
mod plan;
mod shapes;
mod simulate;
mod usage;
