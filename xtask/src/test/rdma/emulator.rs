//! The program that runs the guest: QEMU.
//!
//! Versions are not alike where it emulates the processor: a carry-less multiplication, by which the
//! guest's kernel sums up every RoCE packet, is done bit by bit before 8.2 and by the machine's own
//! instruction since. So the machine's QEMU is taken only if it is as new. Else Debian's is, with the C
//! library and the loader of its suite, as those of the machine may be older; it is kept below `target/`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{kernel, tools};
use crate::packages::{self, Store};
use crate::process::{self, Outcome};

const PROGRAM: &str = "qemu-system-x86_64";
const PACKAGES: [&str; 2] = ["qemu-system-x86", "seabios"];
/// A suite of Debian with one that is new enough.
const SUITE: &str = "trixie";
/// From here on the guest's processor multiplies as fast as the machine's.
const FAST_SINCE: (u32, u32) = (8, 2);
/// In an unpacked tree: what starts a program of its suite.
const LOADER: &str = "usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2";
/// Where the firmware is, which the program finds by itself only where it is installed.
const DATA: [&str; 2] = ["usr/share/qemu", "usr/share/seabios"];
/// Written when all is there and was tried.
const COMPLETE: &str = "version";

/// A QEMU that starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Emulator {
    /// The packages that it is of; none if it is the machine's own.
    tree: Option<PathBuf>,
    /// Such as `10.0.2`.
    pub(super) version: String,
}

impl Emulator {
    /// The machine's own, the kept one, or a new one.
    pub(super) fn obtain(folder: &Path) -> Outcome<Self> {
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

    /// Its call, without what it runs.
    pub(super) fn command(&self) -> Command {
        command(self.tree.as_deref())
    }

    /// A new one of Debian; without that an old one, the machine's own before its sources'.
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

    /// Unpacks it of a line of the suite, or of the machine's own sources.
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

    /// Without a tree it was decided that there is none but the machine's own.
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

/// The machine's own if it is fast, else whatever is kept.
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
    // What is installed already is not in the tree.
    let folders = [tree, Path::new("/")].map(|root| DATA.map(|data| root.join(data)));
    for folder in folders.as_flattened().iter().filter(|folder| folder.exists()) {
        command.arg("-L").arg(folder);
    }
    command
}

/// `QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2)`, and lines that do not matter.
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
