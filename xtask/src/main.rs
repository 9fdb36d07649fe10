//! Checks, tests and measures the workspace; `cargo xtask --help` lists the commands.
//!
//! Continuous integration runs only these commands, so that every step runs the same on a laptop.
//!
//! | file | holds |
//! | --- | --- |
//! | `ci` | the gate: all steps, and a table of them |
//! | `test` | the tests of the backends, of RDMA in a virtual machine, of the Python package, and for AArch64 |
//! | `tidy` | the rules of the tree |
//! | `deps` | licences, advisories and the oldest Rust |
//! | `bench` | measurements, their goals and the pages under docs/perf |
//! | `book` | the book under docs/book |
//! | `bindgen` | bindings to HIP and the HSA runtime |
//! | `examples` | the packages under examples |
//! | `goals` | the page of all goals, from data |
//! | `header` | the C header |
//! | `kernels` | the PTX of the CUDA kernels |
//! | `miri` | unit tests under Miri |
//! | `new_backend` | a crate for a new backend |
//! | `package` | the packaged crates, built as by a user |
//! | `rocm` | releases of ROCm, fetched from Debian |
//! | `workspace` | the packages and the program of the workspace |

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod bench;
mod bindgen;
mod book;
mod ci;
mod deps;
mod examples;
mod goals;
mod header;
mod kernels;
mod miri;
mod new_backend;
mod package;
mod rocm;
mod test;
mod tidy;
mod workspace;

#[derive(Debug, Parser)]
#[command(
    name = "cargo xtask",
    bin_name = "cargo xtask",
    about = "Checks, tests and measures the Peerlane workspace"
)]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Runs everything that must pass before a merge.
    Ci(ci::Options),
    /// Runs the tests of one backend, or of all that this machine can run.
    Test(test::Options),
    /// Generates the raw bindings to HIP and to the HSA runtime from Debian's newest headers.
    Bindgen {
        /// Only check that they are up to date.
        #[arg(long)]
        check: bool,
    },
    /// Generates the C header.
    Header {
        /// Only check that it is up to date.
        #[arg(long)]
        check: bool,
    },
    /// Generates the PTX of the CUDA kernels with nvcc, or compiles them for AMD GPUs.
    Kernels {
        /// A directory with the PTX that `nvcc -ptx -O3 -arch=compute_75` has generated on another
        /// machine, one file for each source.
        #[arg(long, value_name = "DIRECTORY")]
        from: Option<std::path::PathBuf>,
        /// Compiles the kernels as HIP with clang instead, and prints what they need of a GPU.
        #[arg(long, conflicts_with = "from")]
        hip: bool,
    },
    /// Runs unit tests under Miri, which finds undefined behaviour; needs a nightly Rust.
    Miri,
    /// Checks the rules of the tree that no compiler checks.
    Tidy,
    /// Writes docs/perf/README.md: the goals, and what was measured.
    Goals,
    /// Checks licences, bans, advisories, and the oldest Rust that all dependencies accept.
    Deps,
    /// Builds the book under docs/book, and checks its links.
    Book,
    /// Builds and tests the packages under examples, which use Peerlane as other projects do.
    Examples,
    /// Packages the crates that are published, and builds them from the packages alone.
    Package,
    /// Generates a crate for a new backend, whose contract suite passes from the beginning.
    NewBackend(new_backend::Options),
    /// Builds the wheel of the Python package, optimised.
    Wheel,
    /// Measures Peerlane and other libraries, and writes docs/perf.
    #[command(subcommand)]
    Bench(bench::Bench),
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().task {
        Task::Ci(options) => ci::run(&options),
        Task::Test(options) => test::run(&options),
        Task::Bindgen { check } => bindgen::run(check),
        Task::Header { check } => header::run(check),
        Task::Kernels { hip: true, .. } => kernels::compile_hip(),
        Task::Kernels { from, .. } => kernels::run(from.as_deref()),
        Task::Miri => miri::run().map(deps::Verdict::print),
        Task::Tidy => tidy::run(),
        Task::Goals => goals::run(),
        Task::Deps => deps::run(),
        Task::Book => book::run(),
        Task::Examples => examples::run(),
        Task::Package => package::run(),
        Task::NewBackend(options) => new_backend::run(&options),
        Task::Wheel => test::python::build_wheel(),
        Task::Bench(bench) => bench::run(bench),
    };

    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\nerror: {error}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Arguments::command().debug_assert();
    }
}
