//! Starts a second process: the same test program, which runs a role instead of tests.

#![allow(dead_code, reason = "each test program uses a part")]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};

use libtest_mimic::{Arguments, Trial};

/// Names the role.
const ROLE: &str = "PEERLANE_TEST_ROLE";

/// Runs the role that the environment names, if any, or else the tests.
pub(crate) fn main(roles: &[(&str, fn())], tests: &[(&str, fn())]) -> ExitCode {
    if let Ok(role) = std::env::var(ROLE) {
        let found = roles.iter().find(|(name, _)| *name == role);
        found.unwrap_or_else(|| panic!("there is no role {role}")).1();
        return ExitCode::SUCCESS;
    }
    let trial = |&(name, test): &(&str, fn())| {
        Trial::test(name, move || {
            test();
            Ok(())
        })
    };
    let trials = tests.iter().map(trial).collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// The other process, which can be told lines and answers with lines.
pub(crate) struct Other {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Other {
    /// Starts it with these variables.
    pub(crate) fn start(role: &str, variables: &[(&str, &str)]) -> Self {
        let program = std::env::current_exe().expect("a test program has a path");
        let mut child = Command::new(program)
            .env(ROLE, role)
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the test program starts again");
        let stdin = child.stdin.take().expect("standard input is piped");
        let stdout = BufReader::new(child.stdout.take().expect("standard output is piped"));
        Self { child, stdin, stdout }
    }

    pub(crate) fn tell(&mut self, line: &str) {
        writeln!(self.stdin, "{line}").expect("the other process listens");
    }

    /// The next line that it tells.
    pub(crate) fn hear(&mut self) -> String {
        let mut line = String::new();
        let read = self.stdout.read_line(&mut line).expect("the other process tells lines");
        assert!(read > 0, "the other process ended before it told anything");
        line.trim().to_owned()
    }

    /// Waits for its end, which must be a success.
    pub(crate) fn end(mut self) {
        drop(self.stdin);
        let status = self.child.wait().expect("the other process ends");
        assert!(status.success(), "the other process: {status}");
    }

    pub(crate) fn kill(mut self) {
        self.child.kill().expect("the other process is killed");
        self.child.wait().expect("the other process ends");
    }
}

/// In the other process: tells a line.
pub(crate) fn tell(line: &str) {
    println!("{line}");
}

/// In the other process: the next line that it is told.
pub(crate) fn hear() -> String {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).expect("the parent tells lines");
    line.trim().to_owned()
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) fn unhex<const N: usize>(text: &str) -> [u8; N] {
    std::array::from_fn(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).expect("hex"))
}
