//! Runs whole groups over the CUDA backend, one process for each rank.

#[path = "gpu_processes/mod.rs"]
mod processes;
#[path = "gpu_support/mod.rs"]
mod support;
#[path = "cuda_support/mod.rs"]
mod vendor;

use std::process::ExitCode;

fn main() -> ExitCode {
    processes::main()
}
