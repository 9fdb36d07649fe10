//! Tests of the built program on GPUs, which simulated drivers replace on a machine without.

#[expect(dead_code, reason = "the program `program` uses the rest")]
#[path = "../common/mod.rs"]
mod common;
mod cuda;
mod rocm;
