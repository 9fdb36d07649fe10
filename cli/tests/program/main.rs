//! Runs the built program from end to end.

mod allgather;
mod common;
mod cost;
mod cuda;
mod failure;
mod launcher;
mod plan;
mod simulate;
mod usage;
