//! The checks and chores of the workspace: `cargo xtask --help` lists them.
//!
//! Whatever continuous integration runs is a subcommand here, so that it runs the same on a laptop.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod bench;
mod bindgen;
mod ci;
mod deps;
mod rocm;
mod test;
mod tidy;
mod workspace;

#[derive(Debug, Parser)]
#[command(
    name = "cargo xtask",
    bin_name = "cargo xtask",
    about = "The checks and chores of the Peerlane workspace"
)]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Everything that must be green before a change is merged.
    Ci,
    /// The tests of one backend, or of all that this machine can run.
    Test {
        /// Which backend; without it, whatever this machine can run.
        backend: Option<test::Backend>,
        /// Run on the vendor's devices, and fail where there are none; otherwise a simulated driver
        /// takes their place.
        #[arg(long, requires = "backend")]
        require_device: bool,
        #[command(flatten)]
        options: test::Options,
    },
    /// The raw bindings to HIP and to the HSA runtime, generated from Debian's newest headers.
    Bindgen {
        /// Only say whether they are as they would be generated.
        #[arg(long)]
        check: bool,
    },
    /// The rules of the tree that no compiler checks.
    Tidy,
    /// Licences, bans, advisories, and the oldest Rust that all dependencies accept.
    Deps,
    /// Measurements against peers, written to docs/perf.
    #[command(subcommand)]
    Bench(bench::Bench),
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().task {
        Task::Ci => ci::run(),
        Task::Test { backend, require_device, options } => {
            test::run(backend, require_device, &options)
        }
        Task::Bindgen { check } => bindgen::run(check),
        Task::Tidy => tidy::run(),
        Task::Deps => deps::run(),
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
