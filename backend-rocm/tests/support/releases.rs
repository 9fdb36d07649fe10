//! The real libraries of several releases of ROCm, as `cargo xtask test rocm` fetches them.
//!
//! A release brings its own C library, so this program starts itself by that release's loader for every
//! test, and does there what the test is about.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use libtest_mimic::{Arguments, Failed, Trial};

/// Says to the other process what it is for.
const TASK: &str = "PEERLANE_TEST_ROCM_TASK";
/// Where a release has its loader and its libraries.
const LOADER: &str = "usr/lib64/ld-linux-x86-64.so.2";
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";

/// A release.
#[derive(Clone, Debug)]
pub(crate) struct Release {
    /// Such as `7.2`.
    pub(crate) name: String,
    folder: PathBuf,
}

/// What the other process does; what it prints is its result.
pub(crate) type Task = (&'static str, fn());

impl Release {
    /// Major and minor version.
    pub(crate) fn number(&self) -> (u32, u32) {
        number(&self.name)
    }

    /// Whether it has what came with that release.
    #[allow(dead_code, reason = "not every program asks")]
    pub(crate) fn has(&self, since: &str) -> bool {
        self.number() >= number(since)
    }

    /// Where its headers are.
    #[allow(dead_code, reason = "not every program compiles")]
    pub(crate) fn headers(&self) -> PathBuf {
        self.folder.join("usr/include")
    }

    /// What the task prints in a process with this release's libraries.
    pub(crate) fn does(&self, task: &str, variables: &[(&str, &str)]) -> Result<String, Failed> {
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
        let said = String::from_utf8_lossy(&output.stderr);
        Err(format!("{task} with ROCm {}: {}\n{printed}{said}", self.name, output.status).into())
    }
}

/// The test program: tests of every release, or one task in the other process.
pub(crate) fn run(tasks: &[Task], trials: impl Fn(&Release) -> Vec<Trial>) -> ExitCode {
    if let Ok(task) = std::env::var(TASK) {
        let found = tasks.iter().find(|(name, _)| *name == task);
        found.expect("the task is one of this program").1();
        return ExitCode::SUCCESS;
    }
    let mut all: Vec<Trial> = found().iter().flat_map(trials).collect();
    if all.is_empty() {
        let name = "no release of ROCm is fetched: cargo xtask test rocm";
        all.push(Trial::test(name, || Ok(())).with_ignored_flag(true));
    }
    libtest_mimic::run(&Arguments::from_args(), all).exit_code()
}

/// What was fetched, the newest first.
fn found() -> Vec<Release> {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("it is inside another");
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
