//! Makes the help of every command fit one screen.
//!
//! `--help` prints a line for each frequent option, and `--help-all` prints everything that manual pages contain.

use clap::{Arg, ArgAction, Command};

/// The largest number of options of which `--help` prints all.
const OPTIONS_MAX: usize = 19;
/// The options that `--help` prints if a command has more.
const FREQUENT: [&str; 21] = [
    "collective",
    "root",
    "backend",
    "ranks",
    "devices",
    "algorithm",
    "algorithms",
    "explain",
    "nodes",
    "ranks_per_node",
    "block_bytes",
    "min_bytes",
    "max_bytes",
    "iterations",
    "in_place",
    "dtype",
    "graph",
    "vs",
    "overlap",
    "svg",
    "json",
];
/// What ends the first clause of the help of an option.
const CLAUSE_ENDS: [&str; 14] = [
    " (",
    ";",
    ": ",
    ", either",
    ", one of",
    ", such as",
    ", given",
    ", which",
    ", where",
    " [",
    ", of",
    ", so that",
    ", as ",
    ", in turn",
];

/// Gives every command a short help and the option `--help-all`.
pub(crate) fn on_one_screen(program: Command) -> Command {
    program.mut_subcommands(|command| {
        // The commands of a command, which have options of their own.
        let command = on_one_screen(command);
        let has_many = command.get_arguments().count() > OPTIONS_MAX;
        let help = Arg::new("help").short('h').long("help").action(ArgAction::HelpShort);
        let all = Arg::new("help_all").long("help-all").action(ArgAction::HelpLong);
        command
            .mut_args(|option| {
                let hidden = has_many && !FREQUENT.contains(&option.get_id().as_str());
                with_brief_help(option).hide_short_help(hidden)
            })
            .disable_help_flag(true)
            .arg(help.help("Print this help"))
            .arg(all.help("Print all options with their defaults"))
    })
}

fn with_brief_help(option: Arg) -> Arg {
    let Some(help) = option.get_help().map(ToString::to_string) else { return option };
    let long = option.get_long_help().map_or_else(|| help.clone(), ToString::to_string);
    let end = CLAUSE_ENDS.iter().filter_map(|end| help.find(end)).min().unwrap_or(help.len());
    option.help(help[..end].to_owned()).long_help(long)
}
