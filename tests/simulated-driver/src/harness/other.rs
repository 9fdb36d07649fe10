//! Starts a second process for tests: the same test program, which runs one test.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// Names the test for which [`in_own_process`] has started a process.
const OWN_TEST: &str = "PEERLANE_TEST_IN_OWN_PROCESS";
/// Begins the lines that the other process tells.
const MARK: &str = "tell:";

/// The other process, which is told lines and answers with lines.
#[derive(Debug)]
pub struct Other {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Other {
    /// Starts the program again, for that test alone, with these variables of the environment.
    ///
    /// # Panics
    /// If it cannot be started.
    pub fn start(test: &str, variables: &[(&str, &str)]) -> Self {
        let program = std::env::current_exe().expect("a test program has a path");
        let mut child = Command::new(program)
            .args(["--ignored", "--exact", test, "--nocapture", "--test-threads=1"])
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the test program starts again");
        let stdin = child.stdin.take().expect("standard input is piped");
        let stdout = BufReader::new(child.stdout.take().expect("standard output is piped"));
        Self { child, stdin, stdout }
    }

    /// Tells it bytes.
    ///
    /// # Panics
    /// If it has ended.
    pub fn tell(&mut self, bytes: &[u8]) {
        writeln!(self.stdin, "{}", hex(bytes)).expect("the other process listens");
    }

    /// The next bytes that it tells.
    ///
    /// # Panics
    /// If it ends before.
    pub fn hear(&mut self) -> Vec<u8> {
        loop {
            let mut line = String::new();
            let read = self.stdout.read_line(&mut line).expect("the other process tells lines");
            assert!(read > 0, "the other process ended before it told anything");
            // The harness may have begun the line.
            if let Some((_, told)) = line.split_once(MARK) {
                return unhex(told.trim());
            }
        }
    }

    /// The same, a text.
    ///
    /// # Panics
    /// If it ends before, or tells something else.
    pub fn hear_text(&mut self) -> String {
        String::from_utf8(self.hear()).expect("a text")
    }

    /// Waits for its end, which must be a success.
    ///
    /// # Panics
    /// If it is none.
    pub fn end(mut self) {
        drop(self.stdin);
        let status = self.child.wait().expect("the other process ends");
        assert!(status.success(), "the other process: {status}");
    }

    /// Kills it.
    ///
    /// # Panics
    /// If it cannot be killed.
    pub fn kill(mut self) {
        self.child.kill().expect("the other process is killed");
        self.child.wait().expect("the other process ends");
    }
}

/// Runs a test in a process of its own: starts the program again for the test that calls this, and there runs the
/// closure.
///
/// A process loads one driver, tries each ability of a device once, and keeps a broken device.
///
/// # Panics
/// If the test fails there, or if the closure is not written in the test function itself.
pub fn in_own_process<T: FnOnce()>(test: T) {
    // A closure has the path of its function: `program::module::test::{{closure}}`.
    let path = std::any::type_name::<T>();
    let function = path.strip_suffix("::{{closure}}").expect("a closure of a test function");
    let (_, name) = function.split_once("::").expect("a path begins with the program");

    if std::env::var(OWN_TEST).is_ok_and(|own| own == name) {
        return test();
    }
    let program = std::env::current_exe().expect("a test program has a path");
    let output = Command::new(program)
        .args(["--exact", name, "--include-ignored", "--nocapture"])
        .env(OWN_TEST, name)
        .output()
        .expect("the test program starts again");

    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    // A name that is no test's lets the program end with success.
    let has_passed = output.status.success() && text.contains("test result: ok. 1 passed");
    assert!(has_passed, "in its own process: {}\n{text}{errors}", output.status);
}

/// In the other process: tells bytes.
pub fn tell(bytes: &[u8]) {
    println!("{MARK}{}", hex(bytes));
}

/// In the other process: the next bytes that it is told; `None` when the parent is done.
///
/// # Panics
/// If what it is told is no such line.
pub fn hear() -> Option<Vec<u8>> {
    let mut line = String::new();
    let read = std::io::stdin().read_line(&mut line).expect("the parent tells lines");
    (read > 0).then(|| unhex(line.trim()))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    let digits = |at| u8::from_str_radix(&text[at..at + 2], 16).expect("hex");
    (0..text.len()).step_by(2).map(digits).collect()
}
