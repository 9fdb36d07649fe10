//! Measures collectives, prints and simulates plans, and diagnoses a machine, as the program
//! `peerlane`.
//!
//! | module | holds |
//! | --- | --- |
//! | `allgather`, `bench`, `perf`, `plan`, `plan_buffers`, `simulate`, `explain`, `calibrate`, `doctor` | the commands |
//! | `options`, `goal`, `units`, `nics` | options that commands share |
//! | `ranks` | processes of ranks, their messages and test data |
//! | `report`, `trace` | tables, JSON lines, plots and trace files |
//! | `calibration`, `text_file` | files that commands read |
//! | `nccl`, `cublas`, `library` | libraries of vendors that are loaded at run time |
//! | `help`, `manual` | the help of the commands; completions of shells and manual pages |
//! | `memory`, `error` | available memory; errors and exit codes |
//!
//! Exit codes: 0 success, 1 failure, 2 wrong command line.

use std::io::{self, Write};
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

mod allgather;
mod bench;
mod calibrate;
mod calibration;
mod cublas;
mod doctor;
mod error;
mod explain;
mod goal;
mod help;
mod library;
mod manual;
mod memory;
mod nccl;
mod nics;
mod options;
mod perf;
mod plan;
mod plan_buffers;
mod ranks;
mod report;
mod simulate;
mod text_file;
mod trace;
mod units;

/// Measure collectives on copy engines, inspect their plans, and diagnose machines
#[derive(Debug, Parser)]
#[command(name = "peerlane", version, arg_required_else_help = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Allgather(Box<allgather::Options>),
    Bench(bench::Options),
    Perf(Box<perf::Options>),
    Plan(plan::Options),
    PlanBuffers(plan_buffers::Options),
    Simulate(Box<simulate::Options>),
    Explain(explain::Options),
    Calibrate(calibrate::Options),
    Doctor(doctor::Options),
    /// Print the completions for a shell, which are loaded with `source`
    Completions {
        shell: clap_complete::Shell,
    },
    /// Print the manual page of the program, or of one command, in the format of `man`
    Man {
        command: Option<String>,
    },
}

fn main() -> ExitCode {
    let program = help::on_one_screen(Arguments::command());
    let matches = program.clone().get_matches();
    let arguments = Arguments::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    let result = match arguments.command {
        Command::Allgather(options) => allgather::run(&options),
        Command::Bench(options) => bench::run(options),
        Command::Perf(options) => perf::run(&options),
        Command::Plan(options) => plan::run(&options),
        Command::PlanBuffers(options) => plan_buffers::run(&options),
        Command::Simulate(options) => simulate::run(&options),
        Command::Explain(options) => explain::run(&options),
        Command::Calibrate(options) => calibrate::run(&options),
        Command::Doctor(options) => doctor::run(&options),
        Command::Completions { shell } => manual::completions(program, shell),
        Command::Man { command } => manual::print(program, command.as_deref()),
    };
    let Err(failure) = result else { return ExitCode::SUCCESS };
    if !failure.is_quiet() {
        // If stderr is closed, the failure cannot be reported anywhere.
        writeln!(io::stderr(), "{failure}").ok();
    }
    failure.exit_code()
}
