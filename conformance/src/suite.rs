//! Runs the checks as tests with names, filters and an exit code.

use std::collections::BTreeMap;
use std::process::{Command, ExitCode, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use libtest_mimic::{Arguments, Failed, Trial};
use rustix::process::{Pid, Signal, kill_process};

use crate::checks::{Abilities, Check, all, is_absent};
use crate::failure::{Failure, Outcome};
use crate::harness::Harness;
use crate::harness::erased::Erased;

/// Collects checks over any number of harnesses, and runs them as a test program.
#[derive(Debug, Default)]
pub struct Suite {
    trials: Vec<Trial>,
    /// The names of the skipped checks, by harness and reason.
    skipped: BTreeMap<(String, String), Vec<String>>,
    /// The harnesses that this machine cannot run, each with the reason.
    absent: Vec<(String, String)>,
    one_by_one: bool,
    /// Environment variables of the process of each check, if each has one.
    process_each: Option<Vec<(&'static str, String)>>,
    /// The only check that this process runs.
    alone: Option<String>,
}

/// Name of the check that this process runs for [`Suite::process_each`].
const ALONE: &str = "PEERLANE_TEST_ALONE";
/// Checks that [`Suite::process_each`] leaves out, each with the reason.
const NOT_SHARED: [(&str, &str); 1] = [(
    "release_lets_every_queued_wait_pass_within_a_bound",
    "ranks are threads here and share a context, where a call of one can wait for blocked streams of another",
)];
/// Limits how long the process of a check takes to start and to open its devices.
const START_TIMEOUT: Duration = Duration::from_secs(30);

impl Suite {
    /// Creates an empty suite.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds all checks on a harness.
    ///
    /// Checks that the harness cannot run are listed as ignored. If the backend is absent, all are
    /// ignored, or all fail if the harness requires the backend.
    #[must_use]
    pub fn with(self, harness: impl Harness) -> Self {
        self.with_erased(&Erased::new(harness))
    }

    fn with_erased(mut self, harness: &Erased) -> Self {
        // Opening a device takes a while, so a process for one check opens no other harness.
        let of_harness = |check: &str| check.starts_with(&format!("{}::", harness.name()));
        if self.alone.as_deref().is_some_and(|check| !of_harness(check)) {
            return self;
        }
        // The check that breaks an engine would break those of other checks.
        self.one_by_one |= harness.faults_are_device_wide();
        let not_applicable = harness.not_applicable();
        let abilities = Abilities::probe(harness);
        if let Err(error) = &abilities
            && is_absent(error)
            && !harness.required()
        {
            self.absent.push((harness.name().to_owned(), error.to_string()));
        }
        for check in all() {
            let (skip, fail) = match &abilities {
                _ if not_applicable.is_some() => (not_applicable.clone(), None),
                Ok(abilities) => {
                    let missing = abilities.missing(check.needs);
                    (missing.or_else(|| self.left_out(check.name)).map(str::to_owned), None)
                }
                Err(e) if is_absent(e) && !harness.required() => (Some(e.to_string()), None),
                Err(error) => (None, Some(format!("cannot open {}: {error}", harness.name()))),
            };
            match skip {
                Some(reason) => self.skip(harness.name(), reason, &check),
                None => self.add(fail, harness.clone(), check),
            }
        }
        self
    }

    /// Adds all checks on a harness whose layers are the same on every device. They are left out where each check has a process,
    /// because that takes long.
    #[must_use]
    pub fn with_layers(self, harness: impl Harness) -> Self {
        if self.process_each.is_some() {
            eprintln!("not covered: the checks on {}: ranks share a GPU", harness.name());
            return self;
        }
        self.with(harness)
    }

    /// Returns the reason why a check does not run where each check has a process.
    fn left_out(&self, check: &str) -> Option<&'static str> {
        self.process_each.as_ref()?;
        NOT_SHARED.iter().find(|(name, _)| *name == check).map(|(_, reason)| *reason)
    }

    fn skip(&mut self, harness: &str, reason: String, check: &Check) {
        let text = format!("skipped: {reason}");
        let trial = Trial::test(format!("{harness}::{check:?}"), || Err(Failed::from(text)));
        self.trials.push(trial.with_ignored_flag(true));
        let key = (harness.to_owned(), reason);
        self.skipped.entry(key).or_default().push(format!("{check:?}"));
    }

    fn add(&mut self, fail: Option<String>, harness: Erased, check: Check) {
        let name = format!("{}::{check:?}", harness.name());
        let apart = self.process_each.clone().map(|variables| (name.clone(), variables));
        let run = move || match (fail, apart) {
            (Some(reason), _) => Err(Failed::from(reason)),
            (None, Some((name, variables))) => {
                run_apart(&name, &variables, limit(&harness) + START_TIMEOUT)
            }
            (None, None) => run_bounded(&harness, &check).map_err(Failed::from),
        };
        self.trials.push(Trial::test(name, run));
    }

    /// Runs each check that is added later in a process of its own with these environment variables, one after the
    /// other: for devices on which the waits of one check can block the streams of another check of the same process.
    #[must_use]
    pub fn process_each(self, variables: Vec<(&'static str, String)>) -> Self {
        let alone = std::env::var(ALONE).ok();
        let process_each = alone.is_none().then_some(variables);
        Self { process_each, one_by_one: true, alone, ..self }
    }

    /// Runs one check at a time, for vendors whose calls wait for other users of a device.
    #[must_use]
    pub fn one_by_one(self) -> Self {
        Self { one_by_one: true, ..self }
    }

    /// Returns the names of the checks that will not run, by harness and reason.
    pub fn skipped(&self) -> &BTreeMap<(String, String), Vec<String>> {
        &self.skipped
    }

    /// Lists the trials of the suite: the name of each, and whether it is ignored.
    pub fn trials(&self) -> impl Iterator<Item = (&str, bool)> {
        self.trials.iter().map(|trial| (trial.name(), trial.has_ignored_flag()))
    }

    /// Runs the checks that the command line selects, and prints the skipped ones with their
    /// reasons.
    pub fn run(self) -> ExitCode {
        let mut arguments = Arguments::from_args();
        if self.one_by_one {
            arguments.test_threads.get_or_insert(1);
        }
        let conclusion = libtest_mimic::run(&arguments, self.trials);
        // On standard error, because other programs parse standard output.
        let every = all().len();
        // `cargo xtask test` collects lines that begin so.
        for (harness, reason) in &self.absent {
            eprintln!("not covered: {harness}: {reason}");
        }
        for ((harness, reason), checks) in &self.skipped {
            let is_every = checks.len() == every;
            let checks = if is_every { "all checks".to_owned() } else { checks.join(", ") };
            eprintln!("skipped on {harness}, because {reason}: {checks}");
        }
        conclusion.exit_code()
    }
}

/// Timeouts of the harness after which a check is abandoned. A check may wait several times, each
/// time for at most the harness's timeout.
const TIMEOUTS_A_CHECK: u32 = 9;

/// Runs one check on its own thread, and abandons the thread if the check does not return: a
/// backend under test may block without a limit.
///
/// # Errors
/// The sentence that does not hold, with the failure of the check or that it did not return, and what to look at next.
pub fn run_bounded(harness: &Erased, check: &Check) -> Outcome {
    let (done, outcome) = mpsc::channel();
    let (subject, run) = (harness.clone(), check.run);
    std::thread::spawn(move || {
        // The send fails when the check was abandoned.
        let _ = done.send(run(&subject));
    });
    let limit = limit(harness);
    let outcome = outcome.recv_timeout(limit).unwrap_or_else(|_| {
        Err(Failure::new(format!(
            "the check did not return within {limit:?}: a call to the backend blocks"
        )))
    });
    outcome.map_err(|failure| check.broken(failure))
}

fn limit(harness: &Erased) -> Duration {
    harness.limit_of("the check") * TIMEOUTS_A_CHECK
}

/// Runs this program again, with one check, and kills it after `limit`.
fn run_apart(name: &str, variables: &[(&str, String)], limit: Duration) -> Result<(), Failed> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["--exact", name]).env(ALONE, name).stdin(Stdio::null());
    command.envs(variables.iter().map(|(name, value)| (name, value)));
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let pid = Pid::from_child(&child);
    let (done, ended) = mpsc::channel();
    std::thread::spawn(move || done.send(child.wait_with_output()));
    let Ok(output) = ended.recv_timeout(limit) else {
        // It has not been waited for, so the number is still its own.
        kill_process(pid, Signal::KILL)?;
        return Err(format!("the process of the check did not end within {limit:?}").into());
    };
    let output = output?;
    let [stdout, stderr] = [&output.stdout, &output.stderr].map(|it| String::from_utf8_lossy(it));
    if output.status.success() && stdout.contains(" 1 passed;") {
        return Ok(());
    }
    Err(format!("{}\n{stdout}{stderr}", output.status).into())
}
