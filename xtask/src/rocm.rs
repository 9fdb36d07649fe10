//! Fetches the releases of ROCm in Debian: headers, and libraries with all that they need.
//!
//! Everything is unpacked below `target/rocm/SUITE` and not installed. The C library is included, so that programs
//! run with the loader of that folder on any machine. The headers say which release a suite has. Removing the
//! folder fetches newer ones.

use std::fs;
use std::path::{Path, PathBuf};

use crate::workspace;
use peerlane_rxe_vm::packages::{self, Store};
use peerlane_rxe_vm::process::Outcome;

/// The suites with different releases, the newest first, and the suites that their dependencies come from.
const SUITES: [(&str, &[&str]); 3] =
    [("experimental", &["experimental", "sid"]), ("sid", &["sid"]), ("trixie", &["trixie"])];
/// The name of HIP's packages without the version of the soname.
const HIP: &str = "libamdhip64-";
const HSA: &str = "libhsa-runtime64-1";
const HEADERS: [&str; 2] = ["libamdhip64-dev", "libhsa-runtime-dev"];
/// The file that marks a complete folder.
const COMPLETE: &str = "release";

/// An unpacked release.
pub(crate) struct Release {
    /// The version, such as `7.2`.
    pub(crate) name: String,
    folder: PathBuf,
}

impl Release {
    /// Returns the folder of its headers.
    pub(crate) fn headers(&self) -> PathBuf {
        self.folder.join("usr/include")
    }
}

/// Returns every release in Debian, the newest first, and fetches missing ones.
pub(crate) fn releases() -> Outcome<Vec<Release>> {
    let folder = workspace::members()?.target_directory.join("rocm").into_std_path_buf();
    let mut releases: Vec<Release> = Vec::new();
    let mut complaints = String::new();
    for (suite, from) in SUITES {
        match release(&folder.join(suite), suite, from) {
            Ok(release) if releases.iter().all(|other| other.name != release.name) => {
                releases.push(release);
            }
            Ok(_) => {}
            Err(error) => complaints += &format!("\n{suite}: {error}"),
        }
    }
    if releases.is_empty() {
        return Err(format!("no release of ROCm could be fetched{complaints}").into());
    }
    if !complaints.is_empty() {
        println!("note: not every release of ROCm could be fetched{complaints}");
    }
    Ok(releases)
}

/// Returns the release of a suite, and fetches it if it is missing.
fn release(folder: &Path, suite: &str, from: &[&str]) -> Outcome<Release> {
    if let Ok(name) = fs::read_to_string(folder.join(COMPLETE)) {
        return Ok(Release { name, folder: folder.to_owned() });
    }
    if !packages::available() {
        return Err("packages are fetched with apt-get and dpkg-deb, which are missing here".into());
    }
    let mut last = "this machine has no source of Debian".to_owned();
    for source in packages::of_debian() {
        let lines: Vec<String> = from.iter().map(|suite| source.line(suite)).collect();
        match take(folder, suite, &lines) {
            Ok(release) => return Ok(release),
            Err(error) => last = error.to_string(),
        }
    }
    Err(last.into())
}

fn take(folder: &Path, suite: &str, lines: &[String]) -> Outcome<Release> {
    let _ = fs::remove_dir_all(folder);
    let apt = folder.join("apt");
    let store = Store::bare(&apt, lines, suite)?;
    let hip = newest(&store, HIP)?;
    println!("rocm: fetching {hip} of {suite}, about 70 MB");
    store.unpack_with_needs(&[&hip, HSA], folder)?;
    store.unpack_alone(&HEADERS.map(str::to_owned), folder)?;
    fs::remove_dir_all(&apt)?;
    let header = folder.join("usr/include/hip/hip_version.h");
    let text =
        fs::read_to_string(&header).map_err(|error| format!("{}: {error}", header.display()))?;
    let name = version(&text).ok_or_else(|| format!("{} has no version", header.display()))?;
    fs::write(folder.join(COMPLETE), &name)?;
    Ok(Release { name, folder: folder.to_owned() })
}

/// Returns the package with the highest version after `prefix`.
pub(crate) fn newest(store: &Store, prefix: &str) -> Outcome<String> {
    let version = highest(&store.names(prefix), prefix);
    let version =
        version.ok_or_else(|| format!("there is no package {prefix}*\n{}", store.complaints()))?;
    Ok(format!("{prefix}{version}"))
}

fn highest(names: &[String], prefix: &str) -> Option<u32> {
    names.iter().filter_map(|name| name.strip_prefix(prefix)?.parse().ok()).max()
}

/// Returns the major and minor version in a header of HIP.
fn version(header: &str) -> Option<String> {
    let number = |name: &str| {
        let mut lines = header.lines().filter_map(|line| line.strip_prefix("#define "));
        lines.find_map(|line| line.strip_prefix(name)?.trim().parse::<u32>().ok())
    };
    Some(format!("{}.{}", number("HIP_VERSION_MAJOR ")?, number("HIP_VERSION_MINOR ")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_package_has_the_highest_version() {
        let names = ["libamdhip64-5", "libamdhip64-dev", "libamdhip64-10", "libamdhip64-7"];
        assert_eq!(highest(&names.map(str::to_owned), HIP), Some(10));
        assert_eq!(highest(&["libamdhip64-dev".to_owned()], HIP), None);
    }

    #[test]
    fn the_release_is_read_from_the_header() {
        let text = "#define HIP_VERSION_MAJOR 7\n#define HIP_VERSION_MINOR 2\n#define HIP_VERSION 70253211\n";
        assert_eq!(version(text).unwrap(), "7.2");
        assert_eq!(version("#define HIP_VERSION_MAJOR 7\n"), None);
    }
}
