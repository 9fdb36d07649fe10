//! Runs child processes and turns their failures into readable errors.

use std::error::Error;
use std::io::ErrorKind;
use std::process::{Command, Stdio};

/// Result of a task; the error is printed as it is.
pub type Outcome<T = ()> = Result<T, Box<dyn Error>>;

/// Returns a `cargo` command, using the cargo that runs this program.
pub fn cargo<const N: usize>(arguments: [&str; N]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(arguments);
    command
}

/// Runs a command to its end, with its output passed through.
///
/// # Errors
/// If the command cannot be started or fails; the error names it.
pub fn run(command: &mut Command) -> Outcome {
    let status = command.status().map_err(|error| not_started(command, &error))?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("{} failed: {status}", line(command)).into())
    }
}

/// Runs a command to its end and returns its standard output.
///
/// # Errors
/// If the command cannot be started or fails; the error includes its standard error.
pub fn output(command: &mut Command) -> Outcome<String> {
    let output = command.output().map_err(|error| not_started(command, &error))?;
    if !output.status.success() {
        let printed = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{} failed: {}\n{printed}", line(command), output.status).into());
    }
    Ok(String::from_utf8(output.stdout)?)
}

/// Returns whether the command can be run and succeeds.
pub fn answers(command: &mut Command) -> bool {
    let quiet = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    quiet.status().is_ok_and(|status| status.success())
}

/// Returns the command as a person would type it.
pub fn line(command: &Command) -> String {
    let program = std::path::Path::new(command.get_program());
    let name = program.file_name().unwrap_or(command.get_program());
    let words = std::iter::once(name).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

fn not_started(command: &Command, error: &std::io::Error) -> String {
    match error.kind() {
        ErrorKind::NotFound => format!("{}: the program is not installed", line(command)),
        _ => format!("{}: cannot be started: {error}", line(command)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_names_the_command() {
        let error = run(Command::new("sh").args(["-c", "exit 3"])).unwrap_err();
        assert_eq!(error.to_string(), "sh -c exit 3 failed: exit status: 3");
        let error = output(&mut Command::new("no-such-program")).unwrap_err();
        assert_eq!(error.to_string(), "no-such-program: the program is not installed");
        let error = output(Command::new("sh").args(["-c", "echo why >&2; false"])).unwrap_err();
        assert!(error.to_string().ends_with("failed: exit status: 1\nwhy\n"), "{error}");
    }

    #[test]
    fn output_is_what_was_printed() {
        assert_eq!(output(Command::new("echo").arg("yes")).unwrap(), "yes\n");
        assert!(answers(&mut Command::new("true")));
        assert!(!answers(&mut Command::new("false")));
    }
}
