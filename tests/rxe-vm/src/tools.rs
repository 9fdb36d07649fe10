//! Finds programs and libraries for the guest.
//!
//! A program that is installed on this machine is used as it is. Missing ones come from packages that are unpacked
//! below `target/`.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::packages::Store;
use crate::process::{self, Outcome};

/// Packages that the virtual machine needs, each with a program or file that shows that it is present.
pub(crate) const NEEDED: [(&str, &str); 8] = [
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

/// A file on this machine and its path in the guest.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct GuestFile {
    /// Path on this machine.
    pub file: PathBuf,
    /// Path in the guest, absolute, as if the file were installed.
    pub guest_path: PathBuf,
}

/// Looks files up in unpacked packages first, then on this machine.
#[derive(Debug)]
pub struct Tools {
    unpacked: PathBuf,
    needed: &'static [(&'static str, &'static str)],
}

impl Tools {
    /// Fetches the packages that are missing, each identified by a program or file.
    ///
    /// # Errors
    /// If a package cannot be fetched or lacks its file.
    pub fn obtain(folder: &Path, needed: &'static [(&'static str, &'static str)]) -> Outcome<Self> {
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

    /// Finds a program by name.
    ///
    /// # Errors
    /// If it is missing.
    pub fn program(&self, name: &str) -> Outcome<GuestFile> {
        self.look(name, &PROGRAM_FOLDERS).ok_or_else(|| format!("{name} is missing").into())
    }

    /// Finds a library by name.
    pub(crate) fn library(&self, name: &str) -> Outcome<GuestFile> {
        self.look(name, &LIBRARY_FOLDERS).ok_or_else(|| format!("{name} is missing").into())
    }

    /// Finds a file by path in the unpacked packages or on this machine.
    ///
    /// # Errors
    /// If it is missing.
    pub fn file(&self, path: &str) -> Outcome<GuestFile> {
        self.look(path, &[""]).ok_or_else(|| format!("{path} is missing").into())
    }

    /// Finds all files below a folder, except static libraries.
    ///
    /// # Errors
    /// If the folder is missing or cannot be read.
    pub fn below(&self, folder: &str) -> Outcome<Vec<GuestFile>> {
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

    /// Finds the loader and the libraries that these programs link.
    ///
    /// # Errors
    /// If a library is missing.
    pub fn closure(&self, programs: &[PathBuf]) -> Outcome<BTreeSet<GuestFile>> {
        let mut found = BTreeSet::new();
        for program in programs {
            let mut command = Command::new("ldd");
            command.arg(program).env("LD_LIBRARY_PATH", library_path(&self.unpacked));
            // ldd fails for a static program, which has no libraries.
            let Ok(printed) = process::output(&mut command) else { continue };
            for library in libraries(&printed)
                .map_err(|missing| format!("{} needs {missing}", program.display()))?
            {
                found.insert(self.placed(library));
            }
        }
        Ok(found)
    }

    fn placed(&self, file: PathBuf) -> GuestFile {
        let guest_path = file.strip_prefix(&self.unpacked).map(|inner| Path::new("/").join(inner));
        GuestFile { guest_path: guest_path.unwrap_or_else(|_| file.clone()), file }
    }

    fn missing(&self) -> Vec<&'static str> {
        let there = |name: &str| {
            let folders = [&[""], &PROGRAM_FOLDERS[..], &LIBRARY_FOLDERS[..]].concat();
            self.look(name, &folders).is_some()
        };
        self.needed.iter().filter(|(_, name)| !there(name)).map(|(package, _)| *package).collect()
    }

    fn look(&self, name: &str, folders: &[&str]) -> Option<GuestFile> {
        let roots = [self.unpacked.as_path(), Path::new("/")];
        roots.iter().find_map(|root| {
            let files = folders.iter().map(|folder| root.join(folder).join(name));
            files.map(|file| self.placed(file)).find(|found| found.file.is_file())
        })
    }
}

/// Returns the library path of an unpacked tree.
pub(crate) fn library_path(tree: &Path) -> String {
    let folders = LIBRARY_FOLDERS.map(|folder| tree.join(folder));
    let there = folders.iter().filter(|folder| folder.exists());
    there.map(|folder| folder.to_string_lossy()).collect::<Vec<_>>().join(":")
}

/// Parses ldd's lines such as `libc.so.6 => /lib/libc.so.6 (0x7f…)` and `/lib64/ld-linux.so.2 (0x7f…)`. The error is
/// a library that was not found.
fn libraries(printed: &str) -> Result<Vec<PathBuf>, String> {
    let mut found = Vec::new();
    for line in printed.lines().map(str::trim) {
        let (name, path) = line.split_once(" => ").unwrap_or((line, line));
        if path == "not found" {
            return Err(name.to_owned());
        }
        let path = path.split(" (").next().unwrap_or_default();
        if path.starts_with('/') {
            found.push(PathBuf::from(path));
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
