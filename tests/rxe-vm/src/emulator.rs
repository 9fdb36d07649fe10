//! Finds or fetches a QEMU that is fast enough.
//!
//! Before 8.2, QEMU emulates carry-less multiplication bit by bit; since then it uses the host's instruction. The
//! guest's kernel computes the checksum of every RoCE packet with it. The machine's own QEMU is therefore used only
//! if it is new enough. Otherwise a Debian package is unpacked below `target/`, together with the C library and the
//! loader of its suite, because those of the machine can be older.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::packages::{self, Store};
use crate::process::{self, Outcome};
use crate::{kernel, tools};

const PROGRAM: &str = "qemu-system-x86_64";
const PACKAGES: [&str; 2] = ["qemu-system-x86", "seabios"];
/// Debian suite whose QEMU is new enough.
const SUITE: &str = "trixie";
/// First version with fast carry-less multiplication.
const FAST_SINCE: (u32, u32) = (8, 2);
/// Path of the loader in an unpacked tree.
const LOADER: &str = "usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2";
/// Path of the firmware, which QEMU finds by itself only when it is installed.
const DATA: [&str; 2] = ["usr/share/qemu", "usr/share/seabios"];
/// File that is written last, after a successful trial.
const COMPLETE: &str = "version";

/// A QEMU that has been started successfully.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Emulator {
    /// Root of the unpacked packages, or `None` for the machine's own QEMU.
    tree: Option<PathBuf>,
    /// Version, such as `10.0.2`.
    pub(crate) version: String,
}

impl Emulator {
    /// Returns the machine's own QEMU, the one kept below `target/`, or a newly fetched one.
    pub(crate) fn obtain(folder: &Path) -> Outcome<Self> {
        let own = Self::tried(None).ok();
        let emulator = match preferred(own.clone(), Self::kept(folder)) {
            Some(emulator) => emulator,
            None => Self::fetch(folder, own)?,
        };
        if !emulator.is_fast() {
            println!(
                "note: QEMU {} emulates a processor slower than newer ones do, so tests and benches \
                 take longer; removing target/rdma-vm/emulator looks for a newer one",
                emulator.version
            );
        }
        Ok(emulator)
    }

    /// Returns the command line without the options of a guest.
    pub(crate) fn command(&self) -> Command {
        command(self.tree.as_deref())
    }

    /// Fetches a new QEMU from Debian, or falls back to an older one of the machine or its sources.
    fn fetch(folder: &Path, own: Option<Self>) -> Outcome<Self> {
        let mut refused = String::new();
        for source in packages::of_debian() {
            println!("emulator: taking it from {SUITE}, {}", source.address);
            match Self::take(folder, Some(source.line(SUITE))) {
                Ok(emulator) if emulator.is_fast() => return emulator.keep(folder),
                Ok(Self { version, .. }) => refused += &format!("\n{SUITE}: QEMU {version} is old"),
                Err(error) => refused += &format!("\n{SUITE}: {}", error.to_string().trim_end()),
            }
        }
        println!("note: no newer QEMU could be fetched{refused}");
        if let Some(own) = own {
            let _ = fs::remove_dir_all(folder);
            fs::create_dir_all(folder)?;
            return own.keep(folder);
        }
        println!("emulator: taking it from the machine's own sources");
        Self::take(folder, None)?.keep(folder)
    }

    /// Unpacks QEMU from the given source line, or from the machine's own sources.
    fn take(folder: &Path, line: Option<String>) -> Outcome<Self> {
        let _ = fs::remove_dir_all(folder);
        let (apt, tree) = (folder.join("apt"), folder.join("tree"));
        let store = match line {
            Some(line) => Store::bare(&apt, &[line], SUITE)?,
            None => Store::open(&apt, None)?,
        };
        store.unpack_with_needs(&PACKAGES, &tree)?;
        fs::remove_dir_all(&apt)?;
        Self::tried(Some(tree))
    }

    fn keep(self, folder: &Path) -> Outcome<Self> {
        fs::write(folder.join(COMPLETE), &self.version)?;
        Ok(self)
    }

    /// Without a tree, only the machine's own QEMU is available.
    fn kept(folder: &Path) -> Option<Self> {
        if !folder.join(COMPLETE).exists() {
            return None;
        }
        Self::tried(Some(folder.join("tree")).filter(|tree| tree.exists())).ok()
    }

    fn tried(tree: Option<PathBuf>) -> Outcome<Self> {
        let printed = process::output(command(tree.as_deref()).arg("--version"))?;
        let version = version(&printed)
            .ok_or_else(|| format!("{PROGRAM} names no version of itself:\n{printed}"))?;
        Ok(Self { tree, version: version.to_owned() })
    }

    fn is_fast(&self) -> bool {
        kernel::version(&self.version).is_some_and(|version| version >= FAST_SINCE)
    }
}

/// Returns the machine's own QEMU if it is fast, else the kept one.
fn preferred(own: Option<Emulator>, kept: Option<Emulator>) -> Option<Emulator> {
    own.filter(Emulator::is_fast).or(kept)
}

fn command(tree: Option<&Path>) -> Command {
    let Some(tree) = tree else { return Command::new(PROGRAM) };
    let (program, loader) = (tree.join("usr/bin").join(PROGRAM), tree.join(LOADER));
    let libraries = tools::library_path(tree);
    let mut command;
    if loader.exists() {
        command = Command::new(loader);
        command.arg("--library-path").arg(libraries).arg(program);
    } else {
        command = Command::new(program);
        command.env("LD_LIBRARY_PATH", libraries);
    }
    // Packages that are already installed are not in the tree.
    let folders = [tree, Path::new("/")].map(|root| DATA.map(|data| root.join(data)));
    for folder in folders.as_flattened().iter().filter(|folder| folder.exists()) {
        command.arg("-L").arg(folder);
    }
    command
}

/// Parses `QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2)` and ignores other lines.
fn version(printed: &str) -> Option<&str> {
    printed.strip_prefix("QEMU emulator version ")?.split_whitespace().next()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn emulator(version: &str, tree: Option<&str>) -> Option<Emulator> {
        Some(Emulator { tree: tree.map(PathBuf::from), version: version.to_owned() })
    }

    #[test]
    fn the_version_is_read_off_the_first_line() {
        let printed = "QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2)\nCopyright (c) …\n";
        assert_eq!(version(printed), Some("10.0.2"));
        assert_eq!(version("QEMU emulator version 9.2.0\n"), Some("9.2.0"));
        assert_eq!(version("qemu: error while loading shared libraries"), None);
        assert_eq!(version("QEMU emulator version "), None);
    }

    #[test]
    fn versions_from_8_2_on_are_fast() {
        let is_fast = |version| emulator(version, None).unwrap().is_fast();
        assert!(["8.2.0", "8.2.91", "9.0.0", "10.0.2"].into_iter().all(is_fast));
        assert!(!["7.2.22", "8.1.5", "8", "unknown"].into_iter().any(is_fast));
    }

    #[test]
    fn the_machines_own_comes_first_only_if_it_is_fast() {
        let kept = emulator("10.0.2", Some("/kept/tree"));
        let own = emulator("9.2.0", None);
        assert_eq!(preferred(own.clone(), kept.clone()), own);
        assert_eq!(preferred(emulator("7.2.22", None), kept.clone()), kept);
        assert_eq!(preferred(None, kept.clone()), kept);
        assert_eq!(preferred(emulator("7.2.22", None), None), None);
    }

    #[test]
    fn nothing_is_kept_without_the_mark() {
        let folder = std::env::temp_dir().join(format!("peerlane-emulator-{}", std::process::id()));
        let programs = folder.join("tree/usr/bin");
        fs::create_dir_all(&programs).unwrap();
        let script = "#!/bin/sh\necho QEMU emulator version 10.0.2 of a test\n";
        fs::write(programs.join(PROGRAM), script).unwrap();
        process::run(Command::new("chmod").arg("+x").arg(programs.join(PROGRAM))).unwrap();
        assert_eq!(Emulator::kept(&folder), None);
        let tried = Emulator::tried(Some(folder.join("tree"))).unwrap().keep(&folder).unwrap();
        assert_eq!(Emulator::kept(&folder), Some(tried));
        fs::remove_file(programs.join(PROGRAM)).unwrap();
        assert_eq!(Emulator::kept(&folder), None);
        fs::remove_dir_all(folder).unwrap();
    }
}
