//! Prints the completions of a shell and the manual pages, which clap makes of the options.

use std::io::{self, Write};

use clap::Command;
use clap_complete::Shell;
use clap_mangen::Man;

use crate::error::{Failure, Result};

/// Prints the completions of the program for a shell.
pub(crate) fn completions(mut program: Command, shell: Shell) -> Result<()> {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut program, "peerlane", &mut text);
    write(&text)
}

/// Prints the manual page of the program or of one of its commands.
pub(crate) fn print(program: Command, command: Option<&str>) -> Result<()> {
    write(&page(program, command)?)
}

/// Returns the manual page of the program or of one of its commands.
pub(crate) fn page(mut program: Command, command: Option<&str>) -> Result<Vec<u8>> {
    program.build();
    let page = match command {
        None => program,
        Some(name) => named(&program, name).cloned().ok_or_else(|| {
            let known = program.get_subcommands().map(Command::get_name).collect::<Vec<_>>();
            let text = format!("unknown command {name:?}, expected one of {}", known.join(", "));
            Failure::usage(text)
        })?,
    };
    let mut text = Vec::new();
    Man::new(page).render(&mut text).map_err(|error| Failure::failed(error.to_string()))?;
    Ok(text)
}

/// Returns the command of a name such as `bench`, or `bench-all-gather-matmul` for a command of it.
fn named<'a>(program: &'a Command, name: &str) -> Option<&'a Command> {
    let inside = |command: &'a Command| {
        let rest = name.strip_prefix(command.get_name())?.strip_prefix('-')?;
        command.find_subcommand(rest)
    };
    program.find_subcommand(name).or_else(|| program.get_subcommands().find_map(inside))
}

fn write(text: &[u8]) -> Result<()> {
    let written = io::stdout().write_all(text).and_then(|()| io::stdout().flush());
    written.map_err(|error| Failure::failed(format!("cannot write to stdout: {error}")))
}
