//! Measures collectives, prints and simulates plans, and diagnoses a machine, as the program
//! `peerlane`.
//!
//! | module | holds |
//! | --- | --- |
//! | `allgather`, `bench`, `perf`, `plan`, `plan_buffers`, `simulate`, `explain`, `calibrate`, `doctor` | the commands |
//! | `options`, `goal`, `units`, `nics` | options that commands share |
//! | `ranks` | processes of ranks, their messages and test data |
//! | `report`, `trace` | tables, JSON lines, plots and trace files |
//! | `calibration`, `text_file` | files that commands read and write |
//! | `printable` | escapes of foreign text |
//! | `nccl`, `cublas`, `library` | libraries of vendors that are loaded at run time |
//! | `help`, `manual` | the help of the commands; completions of shells and manual pages |
//! | `memory`, `error` | available memory; errors and exit codes |
//!
//! Exit codes: 0 success, 1 failure, 2 wrong command line.

use std::env;
use std::ffi::OsString;
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
mod printable;
#[cfg(test)]
mod random_inputs;
mod ranks;
mod report;
mod simulate;
mod text_file;
mod trace;
mod units;

use report::print_error;

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
    let words: Vec<OsString> = env::args_os().collect();
    let program = program();
    let command = match parse(program.clone(), words.clone()) {
        Ok(Arguments { command }) => command,
        Err(error) => printable_error(error, program, &words).exit(),
    };
    let Err(failure) = run(command) else { return ExitCode::SUCCESS };
    if !failure.is_quiet() {
        print_error(&failure);
    }
    failure.exit_code()
}

/// Returns the program with the help of every command.
fn program() -> clap::Command {
    help::on_one_screen(Arguments::command())
}

fn parse(
    program: clap::Command,
    words: impl IntoIterator<Item = OsString>,
) -> Result<Arguments, clap::Error> {
    let matches = program.try_get_matches_from(words)?;
    Arguments::from_arg_matches(&matches)
}

/// Returns the error for the same words in a printable form, which the error quotes.
fn printable_error(error: clap::Error, program: clap::Command, words: &[OsString]) -> clap::Error {
    let printed: Vec<OsString> =
        words.iter().map(|word| printable::short(&word.to_string_lossy()).into()).collect();
    if printed == words {
        return error;
    }
    parse(program, printed).err().unwrap_or_else(|| {
        let text = printable::printable(&error.to_string()).into_owned();
        clap::Error::raw(error.kind(), text)
    })
}

fn run(command: Command) -> error::Result<()> {
    match command {
        Command::Allgather(options) => allgather::run(&options),
        Command::Bench(options) => bench::run(options),
        Command::Perf(options) => perf::run(&options),
        Command::Plan(options) => plan::run(&options),
        Command::PlanBuffers(options) => plan_buffers::run(&options),
        Command::Simulate(options) => simulate::run(&options),
        Command::Explain(options) => explain::run(&options),
        Command::Calibrate(options) => calibrate::run(&options),
        Command::Doctor(options) => doctor::run(&options),
        Command::Completions { shell } => manual::completions(program(), shell),
        Command::Man { command } => manual::print(program(), command.as_deref()),
    }
}
