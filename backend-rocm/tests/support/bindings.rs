//! What bindings to a library of ROCm have to hold, whichever library it is.

use std::path::Path;
use std::process::ExitCode;

use c_layout::{Claim, Header};
use libtest_mimic::{Failed, Trial};
use rocm_library::Symbol;

use crate::releases::{self, Release};

/// Bindings, and what the releases of their library have.
pub(crate) struct Bindings {
    /// The library in the names of the tests, before the release.
    pub(crate) library: &'static str,
    pub(crate) symbols: &'static [Symbol],
    /// Calls [`print_table`].
    pub(crate) print_table: fn(),
    /// How the name of a release's file begins.
    pub(crate) file: fn(&Release) -> String,
    /// Whether a release has what came with another one.
    pub(crate) has: fn(&Release, &str) -> bool,
    /// In a process with the release's libraries and no device: what the first calls say.
    pub(crate) print_no_device: fn(),
    /// Whether they said what they should.
    pub(crate) no_device: fn(&Release) -> Result<(), Failed>,
    /// The header, and what the bindings claim of it.
    pub(crate) declarations: fn(&Release) -> (Header<'static>, Vec<Claim>),
}

type Test = fn(&Bindings, &Release) -> Result<(), Failed>;

impl Bindings {
    /// The test program.
    pub(crate) fn run(self) -> ExitCode {
        let bindings: &'static Self = Box::leak(Box::new(self));
        let tasks = [("table", bindings.print_table), ("no_device", bindings.print_no_device)];
        releases::run(&tasks, |release| {
            let tests: [(&str, Test); 3] = [
                ("every function that it should have is there", Self::the_table_is_whole),
                ("without a device it says so", Self::no_device),
                ("the declarations are those of its header", Self::the_declarations_hold),
            ];
            let trial = |(name, test): (&str, Test)| {
                let name = format!("{} {}: {name}", bindings.library, release.name);
                let release = release.clone();
                Trial::test(name, move || test(bindings, &release))
            };
            tests.into_iter().map(trial).collect()
        })
    }

    fn the_table_is_whole(&self, release: &Release) -> Result<(), Failed> {
        let printed = release.does("table", &[])?;
        let mut lines = printed.lines();
        let file = lines.next().unwrap_or_default();
        let wanted = (self.file)(release);
        assert!(file.contains(&wanted), "{file} is not of {wanted}");
        let wanted = self.symbols.iter().map(|symbol| {
            let has = symbol.since.is_none_or(|since| (self.has)(release, since));
            format!("{} {has}", symbol.name)
        });
        assert_eq!(lines.collect::<Vec<_>>(), wanted.collect::<Vec<_>>());
        Ok(())
    }

    fn no_device(&self, release: &Release) -> Result<(), Failed> {
        if Path::new("/dev/kfd").exists() {
            return Ok(());
        }
        (self.no_device)(release)
    }

    fn the_declarations_hold(&self, release: &Release) -> Result<(), Failed> {
        let (header, claims) = (self.declarations)(release);
        Ok(c_layout::check(&header, &claims, Path::new(env!("CARGO_TARGET_TMPDIR")))?)
    }
}

/// In a process with the release's libraries: the file, every function, and whether it is there.
pub(crate) fn print_table(file: &Path, symbols: &[Symbol], has: impl Fn(&str) -> bool) {
    println!("{}", file.display());
    for symbol in symbols {
        println!("{} {}", symbol.name, has(symbol.name));
    }
}
