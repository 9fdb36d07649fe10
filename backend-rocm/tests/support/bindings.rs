//! Tests of the bindings to a library of ROCm, for `hip-sys` and `hsa-sys`.

use std::path::Path;
use std::process::ExitCode;

use c_layout::{Claim, Header};
use libtest_mimic::{Failed, Trial};
use rocm_library::Symbol;

use crate::releases::{self, Release};

/// Bindings to a library, and how the library differs between releases.
pub(crate) struct Bindings {
    /// Name of the library in the names of the tests.
    pub(crate) library: &'static str,
    pub(crate) symbols: &'static [Symbol],
    /// Calls [`print_table`].
    pub(crate) print_table: fn(),
    /// Returns the start of the file name for a release.
    pub(crate) file: fn(&Release) -> String,
    /// Returns whether a release contains functions that were added in another.
    pub(crate) has: fn(&Release, &str) -> bool,
    /// Prints the results of the first calls, in a process with the libraries of a release and no device.
    pub(crate) print_no_device: fn(),
    /// Checks these results.
    pub(crate) no_device: fn(&Release) -> Result<(), Failed>,
    /// Returns the header of a release, and the declarations in the bindings to compare with it.
    pub(crate) declarations: fn(&Release) -> (Header<'static>, Vec<Claim>),
}

const NO_DEVICE: &str = "the first calls report that there is no device";

type Test = fn(&Bindings, &Release) -> Result<(), Failed>;

impl Bindings {
    /// Runs the test program.
    pub(crate) fn run(self) -> ExitCode {
        let bindings: &'static Self = Box::leak(Box::new(self));
        let tasks = [("table", bindings.print_table), ("no_device", bindings.print_no_device)];
        releases::run(&tasks, |release| {
            let tests: [(&str, Test); 3] = [
                ("the library has every function that it should have", Self::check_table),
                (NO_DEVICE, Self::check_no_device),
                ("the declarations equal those of its header", Self::check_declarations),
            ];
            let trial = |(name, test): (&str, Test)| {
                let name = format!("{} {}: {name}", bindings.library, release.name);
                // What a machine without a GPU reports cannot be seen where there is one.
                let is_ignored = name.ends_with(NO_DEVICE) && Path::new("/dev/kfd").exists();
                let release = release.clone();
                Trial::test(name, move || test(bindings, &release)).with_ignored_flag(is_ignored)
            };
            tests.into_iter().map(trial).collect()
        })
    }

    fn check_table(&self, release: &Release) -> Result<(), Failed> {
        let printed = release.run_task("table", &[])?;
        let mut lines = printed.lines();
        let file = lines.next().unwrap_or_default();
        let expected = (self.file)(release);
        assert!(file.contains(&expected), "the file is {file}, expected {expected}");
        let expected = self.symbols.iter().map(|symbol| {
            let has = symbol.since.is_none_or(|since| (self.has)(release, since));
            format!("{} {has}", symbol.name)
        });
        assert_eq!(lines.collect::<Vec<_>>(), expected.collect::<Vec<_>>());
        Ok(())
    }

    fn check_no_device(&self, release: &Release) -> Result<(), Failed> {
        (self.no_device)(release)
    }

    fn check_declarations(&self, release: &Release) -> Result<(), Failed> {
        let (header, claims) = (self.declarations)(release);
        Ok(c_layout::check(&header, &claims, Path::new(env!("CARGO_TARGET_TMPDIR")))?)
    }
}

/// Prints the file of the library, and for every function whether the library has it.
pub(crate) fn print_table(file: &Path, symbols: &[Symbol], has: impl Fn(&str) -> bool) {
    println!("{}", file.display());
    for symbol in symbols {
        println!("{} {}", symbol.name, has(symbol.name));
    }
}
