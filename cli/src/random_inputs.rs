//! Tests the commands with random options and files, in the process of the test.
//!
//! The commands and their options are those of the program's own parser, so a new option is tested
//! without a change here. Commands that start ranks are parsed and checked, but not run. Each input
//! ends with a result or with an error, and never with a panic. `PEERLANE_RANDOM_INPUTS` sets the
//! number of random inputs, which is small by default.

use std::ffi::OsString;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::{env, fs};

use clap::{Arg, ArgAction};
use fastrand::Rng;
use peerlane::topology::Topology;
use peerlane_planning::cost::Links;
use peerlane_planning::schedule::{self, Shape};

use super::{Arguments, Command, parse, printable_error, program, run};

/// The environment variable with the number of random inputs of each test.
const VARIABLE: &str = "PEERLANE_RANDOM_INPUTS";

/// The values at which numbers of options and files are wrong or overflow.
const NUMBERS: [&str; 24] = [
    "0",
    "1",
    "2",
    "3",
    "-1",
    "255",
    "65535",
    "65537",
    "2147483647",
    "2147483648",
    "4294967295",
    "4294967296",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "1e-309",
    "1e309",
    "-0.0",
    "0.1",
    "NaN",
    "inf",
    "é",
    "",
];

/// Other values, of which some are right for some options.
const TEXTS: [&str; 30] = [
    "16777215G",
    "17179869183G",
    "17179869184G",
    "16777216T",
    "9007199254740993.0",
    "0.0000001K",
    "1.5",
    "1K",
    "1M,2M",
    "1:2:3",
    "0:0",
    "2x2",
    "3+1",
    "0,1,0",
    "1048577x1",
    "4294967296x4294967296",
    "18446744073709551615+1",
    "0,4294967295",
    "1GB/s",
    "1B/s",
    "1e15B/s",
    "1e-309GB/s",
    "10s",
    "1e309s",
    "1:10s",
    "18446744073709551615:1us",
    "a\u{1b}[31m\u{7}\u{9b}\u{202e}\n\r\t\0b",
    "out.svg",
    "-",
    "--",
];

/// A folder for the files of the test, which is removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = env::temp_dir().join(format!("peerlane-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn file(&self, name: &str, content: impl AsRef<[u8]>) -> String {
        let path = self.0.join(name);
        fs::write(&path, content).unwrap();
        path.to_str().unwrap().to_owned()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).ok();
    }
}

/// Returns the text of the error of a command line, or `None` for a success.
///
/// # Panics
/// If the command panics, or its error is not printable. The message has the words of the command
/// line.
fn outcome(words: &[String], rng_state: u64) -> Option<String> {
    let all: Vec<OsString> =
        [&"peerlane".to_owned()].into_iter().chain(words).map(Into::into).collect();
    let ended = catch_unwind(AssertUnwindSafe(|| match parse(built_program(), all.clone()) {
        Err(error) => Some(printable_error(error, built_program(), &all).to_string()),
        Ok(Arguments { command }) => execute(command).err().map(|failure| failure.to_string()),
    }));
    let shown: Vec<String> = words.iter().map(|word| word.chars().take(300).collect()).collect();
    let Ok(text) = ended else { panic!("panic of {shown:?}, seed {rng_state}") };
    if let Some(text) = &text {
        assert!(!text.trim().is_empty(), "no text for {shown:?}, seed {rng_state}");
    }
    text
}

/// Runs a command, or for one that starts ranks, what it does before.
fn execute(command: Command) -> crate::error::Result<()> {
    // What would start ranks is only checked.
    match command {
        Command::Plan(_) | Command::PlanBuffers(_) | Command::Simulate(_) | Command::Explain(_) => {
            run(command)
        }
        Command::Calibrate(ref options) if options.from.is_some() => run(command),
        Command::Allgather(options) => check_allgather(&options),
        Command::Bench(options) => check_allgather(&options.of_collective()?),
        Command::Perf(options) => {
            options.settings();
            options.plan();
            options.check()
        }
        Command::Man { command: Some(name) } => {
            crate::manual::page(program(), Some(&name)).map(drop)
        }
        _ => Ok(()),
    }
}

fn check_allgather(options: &crate::allgather::Options) -> crate::error::Result<()> {
    options.check()?;
    crate::allgather::check_spawn(options).map(drop)
}

/// Returns the program of the parser, which is built once.
fn built_program() -> clap::Command {
    static PROGRAM: LazyLock<clap::Command> = LazyLock::new(|| {
        let mut program = program();
        // The members of groups are known after this call.
        program.build();
        program
    });
    PROGRAM.clone()
}

/// Returns all commands of the program.
fn commands() -> Vec<clap::Command> {
    let program = built_program();
    program.get_subcommands().filter(|command| command.get_name() != "help").cloned().collect()
}

/// Returns the arguments without which a command is refused.
fn required(command: &clap::Command, file: &str) -> Vec<String> {
    let mut words = vec![command.get_name().to_owned()];
    for group in command.get_groups().filter(|group| group.is_required_set()) {
        let flag = group
            .get_args()
            .find_map(|id| command.get_arguments().find(|arg| arg.get_id() == id)?.get_long());
        words.extend(flag.map(|flag| format!("--{flag}")));
    }
    for arg in command.get_arguments().filter(|arg| arg.is_required_set()) {
        let possible = arg.get_possible_values();
        let value = possible.first().map_or(file, |value| value.get_name());
        words.push(with_value(arg, value));
    }
    words
}

/// Returns the words that give an option or a positional argument a value.
fn with_value(arg: &Arg, value: &str) -> String {
    match (arg.get_long(), takes_value(arg)) {
        (Some(name), true) => format!("--{name}={value}"),
        (Some(name), false) => format!("--{name}"),
        (None, _) => value.to_owned(),
    }
}

fn takes_value(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::Set | ArgAction::Append)
}

/// Returns the options of a command that a random line can contain.
fn options(command: &clap::Command) -> Vec<&Arg> {
    let is_help = |arg: &Arg| arg.get_id() == "help" || arg.get_id() == "help_all";
    // A file in the working folder would be written.
    let writes = |arg: &Arg| {
        let writers = ["svg", "plot", "trace", "out"];
        writers.contains(&arg.get_id().as_str())
            || arg.get_id() == "check" && command.get_name() == "calibrate"
    };
    command.get_arguments().filter(|arg| !is_help(arg) && !writes(arg)).collect()
}

/// Returns the number of random inputs.
fn rounds(default: u64) -> u64 {
    env::var(VARIABLE).map_or(default, |rounds| rounds.parse().unwrap())
}

fn is_long_run() -> bool {
    env::var_os(VARIABLE).is_some()
}

/// Returns a file of each kind that a command reads, with its name.
fn valid_files() -> [(&'static str, String); 6] {
    let topology: Topology = "2+1".parse().unwrap();
    let shape = Shape { chunks: 2, tiers: true, ..Shape::default() };
    let plans = schedule::plans(peerlane::Algorithm::Hierarchical, &topology, shape).unwrap();
    let text = plans.iter().map(ToString::to_string).collect();
    let links = serde_json::to_value(Links::default()).unwrap();
    let key = serde_json::json!({
        "version": "0.1.0", "backend": "host", "machine": "2 cores", "topology": "1x2", "fingerprint": 1,
    });
    let sample = serde_json::json!({
        "algorithm": "direct", "chunks": 1, "in_place": false, "outputs": 1, "flags": "prompt", "tiers": false,
        "block_bytes": 1024, "seconds": 1e-6,
    });
    let engine = serde_json::json!({"links": links, "samples": [sample], "errors": [0.1]});
    let calibration = serde_json::json!({"key": key, "engines": [engine]});
    let buffer = |name: &str, first_use: u64| serde_json::json!({"name": name, "bytes": 5000, "first_use": first_use, "last_use": 3});
    let buffers = serde_json::json!([buffer("layer 0", 0), buffer("layer 1", 1), buffer("é", 2)]);
    let point = |block_bytes: u64| {
        serde_json::json!({
            "algorithm": "direct", "outputs": 1, "chunks": 1, "block_bytes": block_bytes, "measured_us": 3.5,
            "predicted_us": 3.0, "fitted": true,
        })
    };

    let check = serde_json::json!({
        "machine": "m", "backend": "host", "topology": "1x2", "points": [point(64), point(1 << 20)], "choices": [],
        "good_share": 1.0, "worst_choice": 0.0,
    });

    [
        ("plan.txt", text),
        ("plan.json", serde_json::to_string_pretty(&plans[..2]).unwrap()),
        ("links.json", links.to_string()),
        ("calibration.json", calibration.to_string()),
        ("buffers.json", buffers.to_string()),
        ("check.json", check.to_string()),
    ]
}

/// Returns the beginnings of the command lines that read a file of this name.
fn readers(name: &str) -> &'static [&'static [&'static str]] {
    match name {
        "plan.txt" | "plan.json" => &[&["plan", "--check"]],
        "links.json" => &[&["simulate", "--calibration"]],
        "calibration.json" => &[&["simulate", "--calibration"], &["explain", "--calibration"]],
        "buffers.json" => &[&["plan-buffers"], &["plan-buffers", "--json"]],
        _ => &[&["calibrate", "--out=/dev/null", "--from"]],
    }
}

/// Changes a text in one to three places, as words, lines and bytes.
fn mutated(text: &str, rng: &mut Rng) -> Vec<u8> {
    let mut bytes = text.as_bytes().to_vec();
    for _ in 0..rng.usize(1..=3) {
        if bytes.is_empty() {
            break;
        }
        let at = rng.usize(..bytes.len());
        match rng.u32(..8) {
            0 => bytes.truncate(at),
            1 => drop(bytes.drain(at..(at + rng.usize(1..40)).min(bytes.len()))),
            2 => {
                let end = (at + rng.usize(1..200)).min(bytes.len());
                let copied = bytes[at..end].to_vec();
                let to = rng.usize(..=bytes.len());
                bytes.splice(to..to, copied);
            }
            3 => bytes[at] = rng.u8(..),
            4 | 5 => replace_number(&mut bytes, at, rng),
            6 => {
                let other = [TEXTS[rng.usize(..TEXTS.len())], "\u{fffe}", "{", "]", "\"", "null"];
                let inserted = other[rng.usize(..other.len())].bytes();
                bytes.splice(at..at, inserted);
            }
            _ => {
                let mut lines: Vec<_> =
                    bytes.split(|byte| *byte == b'\n').map(<[u8]>::to_vec).collect();
                let (one, other) = (rng.usize(..lines.len()), rng.usize(..lines.len()));
                lines.swap(one, other);
                bytes = lines.join(&b'\n');
            }
        }
    }

    bytes
}

/// Replaces the first number at or after `at`.
fn replace_number(bytes: &mut Vec<u8>, at: usize, rng: &mut Rng) {
    let Some(begin) = bytes[at..].iter().position(u8::is_ascii_digit) else { return };
    let begin = at + begin;
    let digits = bytes[begin..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    let number = NUMBERS[rng.usize(..NUMBERS.len())].bytes();
    bytes.splice(begin..begin + digits, number);
}

#[test]
fn options_take_wrong_values_without_a_panic() {
    let folder = Folder::new("options");
    let buffers = folder.file("buffers.json", &valid_files()[4].1);
    let long = "x".repeat(70_000);
    let list = "1,".repeat(30_000);
    let values: Vec<&str> =
        NUMBERS.into_iter().chain(TEXTS).chain([long.as_str(), list.as_str()]).collect();
    // Without the variable, an option gets some of the values, and another option the next ones.
    let values_of_option = if is_long_run() { values.len() } else { 4 };
    let mut values = values.iter().cycle();
    let mut successes = 0;
    for command in commands() {
        let command = &command;
        let required = required(command, &buffers);
        assert!(parse_words(&required), "{required:?} is no complete command line");
        for arg in options(command) {
            let values = values.by_ref().take(if takes_value(arg) { values_of_option } else { 1 });
            for value in values {
                let mut words = required.clone();
                words.push(with_value(arg, value));
                successes += u64::from(outcome(&words, 0).is_none());
            }
        }
    }
    assert!(successes > 50, "only {successes} command lines are right");
}

fn parse_words(words: &[String]) -> bool {
    let words = ["peerlane"].into_iter().chain(words.iter().map(String::as_str));
    parse(built_program(), words.map(OsString::from)).is_ok()
}

#[test]
fn random_lines_end_without_a_panic() {
    let folder = Folder::new("lines");
    let buffers = folder.file("buffers.json", &valid_files()[4].1);
    let commands = commands();

    for seed in 0..rounds(300) {
        let mut rng = Rng::with_seed(seed);
        let command = &commands[rng.usize(..commands.len())];
        let options = options(command);
        let mut words = required(command, &buffers);
        for _ in 0..rng.usize(1..=4) {
            if options.is_empty() {
                break;
            }
            let arg = options[rng.usize(..options.len())];
            let possible = arg.get_possible_values();
            let value = match rng.u32(..4) {
                0 => NUMBERS[rng.usize(..NUMBERS.len())].to_owned(),
                1 if !possible.is_empty() => {
                    possible[rng.usize(..possible.len())].get_name().to_owned()
                }
                2 => rng.u32(1..6).to_string(),
                _ => TEXTS[rng.usize(..TEXTS.len())].to_owned(),
            };
            words.push(with_value(arg, &value));
        }
        outcome(&words, seed);
    }
}

#[test]
fn changed_files_end_without_a_panic() {
    let folder = Folder::new("files");
    for (name, text) in valid_files() {
        let file = folder.file(name, &text);
        for words in readers(name) {
            let words: Vec<String> =
                words.iter().map(ToString::to_string).chain([file.clone()]).collect();
            let error = outcome(&words, 0);
            // The JSON file has only two of three plans.
            assert_eq!(error.is_some(), name == "plan.json", "{words:?}: {error:?}");
        }
    }
    for seed in 0..rounds(300) {
        let mut rng = Rng::with_seed(seed);
        let files = valid_files();
        // A calibration that is fitted takes much longer than the rest.
        let number = if rng.u32(..40) == 0 { 5 } else { rng.usize(..5) };
        let (name, text) = &files[number];
        let file = folder.file(name, mutated(text, &mut rng));
        for words in readers(name) {
            let words: Vec<String> =
                words.iter().map(ToString::to_string).chain([file.clone()]).collect();
            outcome(&words, seed);
        }
    }
}

#[test]
fn unusual_files_are_errors_with_their_name() {
    let folder = Folder::new("unusual");
    let sparse = folder.file("sparse", "");
    fs::File::options().write(true).open(&sparse).unwrap().set_len(4 << 30).unwrap();
    let deep = "[".repeat(1 << 20);
    let deep_plans = format!("{{\"plans\":{deep}");
    let files = [
        folder.file("empty", ""),
        folder.file("binary", (0..=255).collect::<Vec<u8>>()),
        folder.file("deep", deep),
        folder.file("deep-plans", deep_plans),
        folder.file("name\u{1b}[31m", "text"),
        folder.0.to_str().unwrap().to_owned(),
        folder.0.join("none").to_str().unwrap().to_owned(),
        sparse,
        "/dev/null".to_owned(),
        // A file that cannot be read even by the superuser.
        "/proc/self/mem".to_owned(),
    ];
    for file in files {
        for (reader, _) in valid_files() {
            for words in readers(reader) {
                let words: Vec<String> =
                    words.iter().map(ToString::to_string).chain([file.clone()]).collect();
                let text = outcome(&words, 0).unwrap_or_else(|| panic!("{words:?} succeeds"));
                assert!(text.contains(&crate::printable::file_name(Path::new(&file))), "{text}");
                assert!(text.chars().all(|c| c == '\n' || !c.is_control()), "{text:?}");
            }
        }
    }
}
