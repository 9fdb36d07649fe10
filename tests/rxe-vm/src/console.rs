//! Parses the guest's console and decides how a boot ended.
//!
//! The emulator's exit status is not used, because it reports success after a kernel panic too. Only lines that
//! the guest's script prints on purpose count, and a boot without the last of them has failed.

use std::time::Duration;

/// Prefix of the lines that the guest's script prints.
pub(crate) const MARK: &str = "##peerlane";

/// Time limit until the guest's nodes are up.
pub(crate) const BOOT_LIMIT: Duration = Duration::from_secs(120);
/// Time that a job may be silent beyond its limit, at which the guest ends it.
const GRACE: Duration = Duration::from_secs(30);

/// Width of the name in a row of the summary.
const NAME_WIDTH: usize = 44;

/// How the emulator process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It exited.
    Exited,
    /// It was killed because its script printed nothing for too long.
    Silent,
}

/// Result of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Status {
    /// The job exited with this status.
    Exit(u32),
    /// The job was killed at its time limit.
    Late,
}

/// A finished job.
#[derive(Clone, Debug, PartialEq)]
pub struct Ended {
    /// Name of the job.
    pub name: String,
    /// How it ended.
    pub status: Status,
    pub(crate) seconds: f64,
    /// Lines that the job printed.
    pub printed: Vec<String>,
}

/// State parsed from the console's lines.
#[derive(Debug, Default)]
pub struct Console {
    /// Sums of the Rust tests' results.
    pub totals: Totals,
    /// Jobs that have ended.
    pub ended: Vec<Ended>,
    /// Lines of the running job.
    printed: Vec<String>,
    ready: bool,
    done: bool,
    running: Option<(String, Duration)>,
    set_up_failed: Option<String>,
    panic: Option<String>,
    /// The kernel stopped at a breakpoint that it did not set.
    stray_breakpoint: bool,
}

impl Console {
    /// Parses one line. Returns whether the guest's script printed it.
    pub(crate) fn line(&mut self, line: &str) -> bool {
        if self.panic.is_none() && line.contains("Kernel panic - not syncing") {
            self.panic = Some(line.trim().to_owned());
        }
        self.stray_breakpoint |= line.contains("Oops: int3");
        self.totals.add(line);
        // A kernel message can precede the mark on the same line.
        let Some((_, said)) = line.split_once(MARK) else {
            if self.running.is_some() {
                self.printed.push(line.to_owned());
            }
            return false;
        };
        let words: Vec<&str> = said.split_whitespace().collect();
        match words[..] {
            ["ready"] => self.ready = true,
            ["done"] => self.done = true,
            ["failed", ..] => self.set_up_failed = Some(words[1..].join(" ")),
            ["start", limit, ..] => {
                let limit = Duration::from_secs(limit.parse().unwrap_or_default());
                self.running = Some((words[2..].join(" "), limit));
            }
            ["end", status, begun, end, ..] => {
                self.running = None;
                let seconds = |word: &str| word.parse::<f64>().unwrap_or_default();
                let status = status.parse().map_or(Status::Late, Status::Exit);
                let seconds = seconds(end) - seconds(begun);
                let printed = std::mem::take(&mut self.printed);
                self.ended.push(Ended { name: words[4..].join(" "), status, seconds, printed });
            }
            _ => return false,
        }
        true
    }

    /// Returns how long to wait for the next line of the script.
    pub(crate) fn patience(&self) -> Duration {
        match &self.running {
            Some((_, limit)) => *limit + GRACE,
            None if self.ready => GRACE,
            None => BOOT_LIMIT,
        }
    }

    /// Returns whether the emulator caused a kernel panic before any test failed.
    ///
    /// On several processors the emulator sometimes executes an instruction that the kernel has just replaced,
    /// either during start-up or at the temporary breakpoint of the replacement.
    pub fn blames_emulator(&self) -> bool {
        let is_so = !self.ready || self.stray_breakpoint;
        self.panic.is_some()
            && is_so
            && self.totals.failed == 0
            && self.ended.iter().all(Ended::is_well)
    }

    /// Checks that all `wanted` jobs ended successfully.
    ///
    /// # Errors
    /// The first problem: a panic, a failed set-up, a hang, a missing mark or failed jobs.
    pub fn verdict(&self, end: End, wanted: usize) -> Result<(), String> {
        if let Some(panic) = &self.panic {
            return Err(format!("the guest's kernel panicked{}: {panic}", self.during()));
        }
        if let Some(step) = &self.set_up_failed {
            return Err(format!("the guest could not set up its nodes; this failed: {step}"));
        }
        if end == End::Silent {
            let patience = self.patience().as_secs();
            return Err(format!("the guest hangs{}: nothing for {patience} s", self.during()));
        }
        if !self.done {
            return Err(format!(
                "the guest ended{} without saying that it was done",
                self.during()
            ));
        }
        let failures: Vec<String> = self.ended.iter().filter_map(Ended::failure).collect();
        if !failures.is_empty() {
            return Err(failures.join("\n       "));
        }
        if self.ended.len() != wanted {
            return Err(format!("{} of {wanted} jobs ended", self.ended.len()));
        }
        Ok(())
    }

    fn during(&self) -> String {
        match &self.running {
            Some((name, _)) => format!(" during {name}"),
            None if self.ready => " between two jobs".to_owned(),
            None => " while it started".to_owned(),
        }
    }
}

impl Ended {
    /// Returns whether the job succeeded.
    pub fn is_well(&self) -> bool {
        self.status == Status::Exit(0)
    }

    fn failure(&self) -> Option<String> {
        match self.status {
            Status::Exit(0) => None,
            Status::Exit(status) => Some(format!("{} failed: exit status {status}", self.name)),
            Status::Late => {
                Some(format!("{} was ended at its limit, after {:.0} s", self.name, self.seconds))
            }
        }
    }
}

impl std::fmt::Display for Ended {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name: String = self.name.chars().take(NAME_WIDTH).collect();
        write!(f, "{name:<NAME_WIDTH$}{:>7.1} s  ", self.seconds)?;
        match self.status {
            Status::Exit(0) => f.write_str("ok"),
            Status::Exit(status) => write!(f, "FAILED: exit status {status}"),
            Status::Late => f.write_str("FAILED: ended at its limit"),
        }
    }
}

/// Sums the results of several test programs.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Tests that passed.
    pub passed: u64,
    /// Tests that failed.
    pub failed: u64,
    /// Tests that were ignored.
    pub ignored: u64,
    /// Names of the tests that failed.
    pub failures: Vec<String>,
}

impl Totals {
    /// Adds the counts of a line such as `test result: ok. 4 passed; 0 failed; 1 ignored; …`, or the name in a line such as
    /// `test name ... FAILED`, and ignores any other line.
    pub fn add(&mut self, line: &str) {
        let Some(counts) = line.strip_prefix("test result: ") else {
            let name = line.strip_prefix("test ").and_then(|line| line.strip_suffix(" ... FAILED"));
            self.failures.extend(name.map(|name| name.trim_end().to_owned()));
            return;
        };
        let words: Vec<&str> =
            counts.split([' ', ';', '.']).filter(|word| !word.is_empty()).collect();
        for pair in words.windows(2) {
            let Ok(count) = pair[0].parse::<u64>() else { continue };
            match pair[1] {
                "passed" => self.passed += count,
                "failed" => self.failed += count,
                "ignored" => self.ignored += count,
                _ => {}
            }
        }
    }
}

impl std::fmt::Display for Totals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { passed, failed, ignored, failures } = self;
        write!(f, "tests: {passed} passed, {failed} failed, {ignored} skipped")?;
        failures.iter().try_for_each(|name| write!(f, "\nFAILED: {name}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn console(lines: &[&str]) -> Console {
        let mut console = Console::default();
        for line in lines {
            console.line(line);
        }
        console
    }

    const GOOD: [&str; 6] = [
        "[    1.0] a word of the kernel",
        "##peerlane ready",
        "##peerlane start 30 the tests",
        "test result: ok. 4 passed; 0 failed; 1 ignored; 0 measured",
        "##peerlane end 0 1.50 4.00 the tests",
        "[    4.1] ##peerlane done",
    ];

    #[test]
    fn success_needs_every_mark() {
        let good = console(&GOOD);
        assert_eq!(good.verdict(End::Exited, 1), Ok(()));
        assert_eq!(good.totals, Totals { passed: 4, ignored: 1, ..Totals::default() });
        assert_eq!(good.ended[0].printed, [GOOD[3]]);
        assert_eq!(good.ended[0].to_string(), format!("{:<44}    2.5 s  ok", "the tests"));
        assert_eq!(good.verdict(End::Exited, 2).unwrap_err(), "1 of 2 jobs ended");

        let cut = console(&GOOD[..5]).verdict(End::Exited, 1).unwrap_err();
        assert_eq!(cut, "the guest ended between two jobs without saying that it was done");
        let nothing = console(&[]).verdict(End::Exited, 1).unwrap_err();
        assert_eq!(nothing, "the guest ended while it started without saying that it was done");
    }

    #[test]
    fn a_panic_a_hang_and_a_failure_are_told_apart() {
        let lines = [&GOOD[..3], &["[ 2.0] Kernel panic - not syncing: Fatal exception"]].concat();
        assert_eq!(
            console(&lines).verdict(End::Exited, 1).unwrap_err(),
            "the guest's kernel panicked during the tests: \
             [ 2.0] Kernel panic - not syncing: Fatal exception"
        );
        let hung = console(&GOOD[..3]);
        assert_eq!(hung.patience(), Duration::from_secs(60));
        assert_eq!(
            hung.verdict(End::Silent, 1).unwrap_err(),
            "the guest hangs during the tests: nothing for 60 s"
        );
        let failed = |end: &str| {
            let lines = [&GOOD[..3], &[end, "##peerlane done"]].concat();
            console(&lines).verdict(End::Exited, 1).unwrap_err()
        };
        assert_eq!(
            failed("##peerlane end 101 1.5 2.5 the tests"),
            "the tests failed: exit status 101"
        );
        assert_eq!(
            failed("##peerlane end late 1.5 31.5 the tests"),
            "the tests was ended at its limit, after 30 s"
        );
        let set_up = console(&["##peerlane failed insmod x.ko"]);
        assert_eq!(
            set_up.verdict(End::Exited, 1).unwrap_err(),
            "the guest could not set up its nodes; this failed: insmod x.ko"
        );
    }

    #[test]
    fn a_panic_is_the_emulators_only_by_its_mark_and_where_nothing_failed() {
        const PANIC: &str = "[ 2.0] Kernel panic - not syncing: Fatal exception";
        const BREAKPOINT: &str = "[ 2.0] Oops: int3: 0000 [#1] SMP NOPTI";
        let blamed = |lines: &[&[&str]]| console(&lines.concat()).blames_emulator();
        assert!(blamed(&[&[PANIC]]));
        assert!(blamed(&[&GOOD[..3], &[BREAKPOINT, PANIC]]));
        assert!(!blamed(&[&GOOD[..3], &[PANIC]]));
        assert!(!blamed(&[&GOOD[..3], &[BREAKPOINT]]));
        let failed = "test result: FAILED. 3 passed; 2 failed; 0 ignored";
        assert!(!blamed(&[&GOOD[..3], &[failed, BREAKPOINT, PANIC]]));
        let ended = "##peerlane end 101 1.5 2.5 the tests";
        assert!(!blamed(&[&GOOD[..3], &[ended, BREAKPOINT, PANIC]]));
    }

    #[test]
    fn a_start_is_waited_for_longer() {
        assert_eq!(console(&[]).patience(), BOOT_LIMIT);
        assert_eq!(console(&GOOD[..2]).patience(), GRACE);
        assert!(!console(&[]).line("##peerlane something else"));
    }
}
