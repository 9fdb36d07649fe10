//! Tests faults of GPUs under the CUDA backend; each fault has its own processes.

#[path = "../gpu_faults/mod.rs"]
mod faults;
#[path = "../gpu_support/mod.rs"]
mod support;
#[path = "../cuda_support/mod.rs"]
mod vendor;

mod driver;
mod opening;

use std::process::ExitCode;

fn main() -> ExitCode {
    faults::main()
}
