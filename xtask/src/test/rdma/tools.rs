//! The programs that run in the virtual machine, and that put it together.
//!
//! A program of the machine is taken as it is. What is missing comes from packages that are
//! unpacked below `target/`, and runs from there.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::packages::Store;
use crate::process::{self, Outcome};

/// Packages, and a program or file of each by which its presence is told.
pub(super) const NEEDED: [(&str, &str); 8] = [
    ("busybox-static", "busybox"),
    ("iproute2", "rdma"),
    ("libibverbs1", "libibverbs.so.1"),
    ("librdmacm1", "librdmacm.so.1"),
    ("ibverbs-providers", "libibverbs/librxe-rdmav34.so"),
    ("ibverbs-utils", "ibv_devinfo"),
    ("perftest", "ib_write_lat"),
    ("xz-utils", "xz"),
];
const PROGRAM_FOLDERS: [&str; 5] = ["usr/bin", "usr/sbin", "bin", "sbin", "usr/local/bin"];
const LIBRARY_FOLDERS: [&str; 6] = [
    "usr/lib/x86_64-linux-gnu",
    "lib/x86_64-linux-gnu",
    "usr/lib64",
    "lib64",
    "usr/lib/x86_64-linux-gnu/pmdk_debug",
    "usr/lib",
];

/// A program or library: where it lies here, and where it belongs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Found {
    pub(crate) file: PathBuf,
    /// Absolute, as if it were installed.
    pub(crate) place: PathBuf,
}

/// The machine, with a folder of unpacked packages before it.
pub(crate) struct Tools {
    unpacked: PathBuf,
    needed: &'static [(&'static str, &'static str)],
}

impl Tools {
    /// Takes what is missing of these packages, each told by a program or file of it.
    pub(crate) fn obtain(
        folder: &Path,
        needed: &'static [(&'static str, &'static str)],
    ) -> Outcome<Self> {
        let tools = Self { unpacked: folder.join("tree"), needed };
        if tools.missing().is_empty() {
            return Ok(tools);
        }
        let _ = fs::remove_dir_all(folder);
        let missing = tools.missing();
        println!("tools: unpacking {}", missing.join(", "));
        let store = folder.join("apt");
        Store::open(&store, None)?.unpack_with_needs(&missing, &tools.unpacked)?;
        fs::remove_dir_all(&store)?;
        match tools.missing()[..] {
            [] => Ok(tools),
            ref missing => Err(format!(
                "the packages {} do not hold what is needed of them",
                missing.join(", ")
            )
            .into()),
        }
    }

    /// A program by name, or a file by its place.
    pub(crate) fn program(&self, name: &str) -> Outcome<Found> {
        self.look(name, &PROGRAM_FOLDERS).ok_or_else(|| format!("{name} is missing").into())
    }

    /// A library by its name.
    pub(super) fn library(&self, name: &str) -> Outcome<Found> {
        self.look(name, &LIBRARY_FOLDERS).ok_or_else(|| format!("{name} is missing").into())
    }

    /// A file of the unpacked packages or of the machine.
    pub(crate) fn file(&self, path: &str) -> Outcome<Found> {
        self.look(path, &[""]).ok_or_else(|| format!("{path} is missing").into())
    }

    /// All files below a folder of the packages or of the machine, but for static libraries.
    pub(crate) fn below(&self, folder: &str) -> Outcome<Vec<Found>> {
        let roots = [self.unpacked.join(folder), Path::new("/").join(folder)];
        let root = roots.into_iter().find(|root| root.is_dir());
        let mut open = vec![root.ok_or_else(|| format!("the folder {folder} is missing"))?];
        let mut found = Vec::new();
        while let Some(folder) = open.pop() {
            for entry in fs::read_dir(folder)? {
                let file = entry?.path();
                if file.is_dir() {
                    open.push(file);
                } else if file.is_file() && file.extension().is_none_or(|kind| kind != "a") {
                    found.push(self.placed(file));
                }
            }
        }
        Ok(found)
    }

    /// The libraries that these programs load at their start, and the loader.
    pub(crate) fn closure(&self, programs: &[PathBuf]) -> Outcome<BTreeSet<Found>> {
        let mut found = BTreeSet::new();
        for program in programs {
            let mut command = Command::new("ldd");
            command.arg(program).env("LD_LIBRARY_PATH", library_path(&self.unpacked));
            // A static program has none, for which ldd fails.
            let Ok(printed) = process::output(&mut command) else { continue };
            for library in libraries(&printed)
                .map_err(|missing| format!("{} needs {missing}", program.display()))?
            {
                found.insert(self.placed(library));
            }
        }
        Ok(found)
    }

    fn placed(&self, file: PathBuf) -> Found {
        let place = file.strip_prefix(&self.unpacked).map(|inner| Path::new("/").join(inner));
        Found { place: place.unwrap_or_else(|_| file.clone()), file }
    }

    fn missing(&self) -> Vec<&'static str> {
        let there = |name: &str| {
            let folders = [&[""], &PROGRAM_FOLDERS[..], &LIBRARY_FOLDERS[..]].concat();
            self.look(name, &folders).is_some()
        };
        self.needed.iter().filter(|(_, name)| !there(name)).map(|(package, _)| *package).collect()
    }

    fn look(&self, name: &str, folders: &[&str]) -> Option<Found> {
        let roots = [self.unpacked.as_path(), Path::new("/")];
        roots.iter().find_map(|root| {
            let files = folders.iter().map(|folder| root.join(folder).join(name));
            files.map(|file| self.placed(file)).find(|found| found.file.is_file())
        })
    }
}

/// Where the libraries of unpacked packages are, for their loader.
pub(super) fn library_path(tree: &Path) -> String {
    let folders = LIBRARY_FOLDERS.map(|folder| tree.join(folder));
    let there = folders.iter().filter(|folder| folder.exists());
    there.map(|folder| folder.to_string_lossy()).collect::<Vec<_>>().join(":")
}

/// Lines such as `libc.so.6 => /lib/libc.so.6 (0x7f…)` and `/lib64/ld-linux.so.2 (0x7f…)`; the
/// error is a library that is nowhere.
fn libraries(printed: &str) -> Result<Vec<PathBuf>, String> {
    let mut found = Vec::new();
    for line in printed.lines().map(str::trim) {
        let (name, place) = line.split_once(" => ").unwrap_or((line, line));
        if place == "not found" {
            return Err(name.to_owned());
        }
        let place = place.split(" (").next().unwrap_or_default();
        if place.starts_with('/') {
            found.push(PathBuf::from(place));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_read_off_ldd() {
        let printed = "\tlinux-vdso.so.1 (0x00007ffe)\n\
            \tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f61)\n\
            \t/lib64/ld-linux-x86-64.so.2 (0x00007f62)\n";
        assert_eq!(
            libraries(printed).unwrap(),
            [
                PathBuf::from("/lib/x86_64-linux-gnu/libc.so.6"),
                PathBuf::from("/lib64/ld-linux-x86-64.so.2"),
            ]
        );
        assert_eq!(libraries("\tlibx.so.1 => not found\n").unwrap_err(), "libx.so.1");
        assert!(libraries("\tstatically linked\n").unwrap().is_empty());
    }
}
