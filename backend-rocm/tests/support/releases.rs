//! Runs tests with the real libraries of several releases of ROCm, which `cargo xtask test rocm` fetches.
//!
//! A release brings its own C library. Each test therefore starts this program again with the loader of the
//! release, and runs its task there.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use libtest_mimic::{Arguments, Failed, Trial};

/// Environment variable that tells the other process its task.
const TASK: &str = "PEERLANE_TEST_ROCM_TASK";
/// Path of the loader in the folder of a release.
const LOADER: &str = "usr/lib64/ld-linux-x86-64.so.2";
/// Path of the libraries in the folder of a release.
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";

/// A release of ROCm that was fetched.
#[derive(Clone, Debug)]
pub(crate) struct Release {
    /// Version, such as `7.2`.
    pub(crate) name: String,
    folder: PathBuf,
}

/// Name and function of a task. The output of the process is the result of the task.
pub(crate) type Task = (&'static str, fn());

impl Release {
    /// Returns the major and minor version.
    pub(crate) fn number(&self) -> (u32, u32) {
        number(&self.name)
    }

    /// Returns whether the release contains functions that were added in `since`.
    #[allow(dead_code, reason = "not every program uses it")]
    pub(crate) fn has(&self, since: &str) -> bool {
        self.number() >= number(since)
    }

    /// Returns the folder of the headers.
    #[allow(dead_code, reason = "not every program uses it")]
    pub(crate) fn headers(&self) -> PathBuf {
        self.folder.join("usr/include")
    }

    /// Runs a task in a process with the libraries of this release, and returns its output.
    pub(crate) fn run_task(
        &self,
        task: &str,
        variables: &[(&str, &str)],
    ) -> Result<String, Failed> {
        let output = Command::new(self.folder.join(LOADER))
            .arg("--library-path")
            .arg(self.folder.join(LIBRARIES))
            .arg(std::env::current_exe()?)
            .env(TASK, task)
            .env_remove("ROCM_PATH")
            .envs(variables.iter().copied())
            .output()?;
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        if output.status.success() {
            return Ok(printed);
        }
        let errors = String::from_utf8_lossy(&output.stderr);
        Err(format!("{task} with ROCm {}: {}\n{printed}{errors}", self.name, output.status).into())
    }
}

/// Runs the test program: the tests of every release, or one task in the other process.
pub(crate) fn run(tasks: &[Task], trials: impl Fn(&Release) -> Vec<Trial>) -> ExitCode {
    if let Ok(task) = std::env::var(TASK) {
        let found = tasks.iter().find(|(name, _)| *name == task);
        found.expect("the task exists").1();
        return ExitCode::SUCCESS;
    }
    let mut all: Vec<Trial> = fetched().iter().flat_map(trials).collect();
    if all.is_empty() {
        let name = "no release of ROCm is fetched: cargo xtask test rocm";
        all.push(Trial::test(name, || Ok(())).with_ignored_flag(true));
        eprintln!("not covered: bindings against libraries of ROCm: {name}");
    }
    libtest_mimic::run(&Arguments::from_args(), all).exit_code()
}

/// Lists the releases that were fetched, the newest first.
fn fetched() -> Vec<Release> {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("the folder has a parent");
    let folders = std::fs::read_dir(target.join("rocm")).into_iter().flatten().flatten();
    let mut found: Vec<Release> = folders
        .filter_map(|entry| {
            let folder = entry.path();
            let name = std::fs::read_to_string(folder.join("release")).ok()?;
            folder.join(LOADER).exists().then_some(Release { name, folder })
        })
        .collect();
    found.sort_by_key(|release| std::cmp::Reverse(release.number()));
    found.dedup_by(|one, other| one.name == other.name);
    found
}

fn number(release: &str) -> (u32, u32) {
    let (major, minor) = release.split_once('.').unwrap_or((release, "0"));
    (major.parse().unwrap_or(0), minor.parse().unwrap_or(0))
}
