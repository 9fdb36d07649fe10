//! Runs whole groups over the streams of the ROCm backend, one process for each rank.

#[path = "gpu_processes/mod.rs"]
mod processes;
#[path = "gpu_support/mod.rs"]
mod support;
#[path = "rocm_support/mod.rs"]
mod vendor;

use std::process::ExitCode;

fn main() -> ExitCode {
    processes::main()
}
