//! Creates installations of ROCm: folders with the library under the names of one release, without
//! the symbols of later releases.

use std::path::PathBuf;

use super::library::{Copied, whole};
use super::{Driver, control};

/// Symbols, and the release that brought them, counted as `rocm_version.h` does.
const NEW_SYMBOLS: &[(&str, u32)] = &[
    ("hsa_amd_memory_async_copy_on_engine", 60_100),
    ("hsa_amd_memory_copy_engine_status", 60_100),
    ("hsa_amd_portable_export_dmabuf", 60_100),
    ("hsa_amd_portable_close_dmabuf", 60_100),
    ("hipStreamBatchMemOp", 60_400),
    ("hipMemGetHandleForAddressRange", 70_200),
    ("hipMemcpyBatchAsync", 70_200),
    ("hsa_amd_memory_get_preferred_copy_engine", 70_200),
];

/// What is installed: HIP and the HSA runtime, of one release or of two.
///
/// ```no_run
/// use peerlane_simulated_driver::Rocm;
///
/// let driver = Rocm::release("6.4").install();
/// driver.set("NO_CU", "drop");
/// // Of other programs: LD_LIBRARY_PATH = this.
/// let folder = Rocm::release("7.2").hsa(Some("6.1")).folder();
/// ```
#[derive(Clone, Debug)]
pub struct Rocm {
    hip: Option<u32>,
    hsa: Option<u32>,
    without: Vec<&'static str>,
}

impl Rocm {
    /// HIP and HSA of this release, such as `5.7`, `6.1`, `6.4` or `7.2`.
    ///
    /// # Panics
    /// If it is no release.
    #[must_use]
    pub fn release(release: &str) -> Self {
        let number = Some(number(release));
        Self { hip: number, hsa: number, without: Vec::new() }
    }

    /// With HIP of this release, or without HIP.
    ///
    /// # Panics
    /// If it is no release.
    #[must_use]
    pub fn hip(self, release: Option<&str>) -> Self {
        Self { hip: release.map(number), ..self }
    }

    /// With the HSA runtime of this release, or without it.
    ///
    /// # Panics
    /// If it is no release.
    #[must_use]
    pub fn hsa(self, release: Option<&str>) -> Self {
        Self { hsa: release.map(number), ..self }
    }

    /// Without these symbols as well.
    #[must_use]
    pub fn without(mut self, symbols: &[&'static str]) -> Self {
        self.without.extend(symbols);
        self
    }

    /// A folder with the libraries, for `LD_LIBRARY_PATH` of other programs. Their file is the same,
    /// so that HIP and HSA see one machine.
    ///
    /// # Panics
    /// If the folder cannot be made beside the library, or the library lacks one of the symbols.
    #[must_use]
    pub fn folder(&self) -> PathBuf {
        let names = self.names();
        let versions = [("ROCM_VERSION", self.hip), ("HSA_VERSION", self.hsa)];
        let settings = versions.iter().filter_map(|(name, value)| Some((*name, (*value)?)));
        let settings: Vec<String> =
            settings.map(|(name, value)| format!("{name}={value}")).collect();
        let copied =
            Copied { names: &names, without: &self.missing(), settings: &settings.join(",") };
        copied.folder()
    }

    /// Loads it, so that whoever loads the libraries by their names in this process later gets
    /// them; one process can load only one installation. Cheap when it is loaded already.
    ///
    /// # Panics
    /// If it cannot be loaded, or another one was loaded first.
    #[must_use]
    pub fn install(&self) -> Driver {
        let folder = self.folder();
        let names = self.names();
        control::load(&folder.join(&names[0]), &names[1..])
    }

    /// The file's name and the others, from the most exact to the shortest.
    fn names(&self) -> Vec<String> {
        let mut names = Vec::new();
        if let Some(hip) = self.hip {
            let (major, minor) = (hip / 10_000, hip / 100 % 100);
            names.push(format!("libamdhip64.so.{major}.{minor}.43482"));
            names.push(format!("libamdhip64.so.{major}"));
            names.push("libamdhip64.so".to_owned());
        }
        if let Some(hsa) = self.hsa {
            names.push(format!("libhsa-runtime64.so.{}", hsa_file(hsa)));
            names.push("libhsa-runtime64.so.1".to_owned());
            names.push("libhsa-runtime64.so".to_owned());
        }
        assert!(!names.is_empty(), "neither HIP nor HSA is to be installed");
        names
    }

    /// What this release has not.
    fn missing(&self) -> Vec<&'static str> {
        let is_new = |(symbol, since): &&(&'static str, u32)| {
            let release = if symbol.starts_with("hsa") { self.hsa } else { self.hip };
            release.is_some_and(|release| release < *since)
        };
        let new = NEW_SYMBOLS.iter().filter(is_new).map(|(symbol, _)| *symbol);
        new.chain(self.without.iter().copied()).collect()
    }
}

/// `6.4` as 60400.
fn number(release: &str) -> u32 {
    let parts = release.split_once('.').and_then(|(major, minor)| {
        Some(major.parse::<u32>().ok()? * 10_000 + minor.parse::<u32>().ok()? * 100)
    });
    parts.unwrap_or_else(|| panic!("{release} is no release of ROCm; expected one such as 6.4"))
}

/// The version of the HSA runtime's file.
fn hsa_file(release: u32) -> &'static str {
    match release {
        0..60_000 => "1.11.0",
        60_000..60_400 => "1.13.0",
        60_400..70_000 => "1.15.0",
        _ => "1.18.0",
    }
}

/// The folder of the library as cargo built it, under the names of ROCm 7.2 and of CUDA, for
/// processes that use both.
///
/// # Panics
/// If the folder cannot be made beside the library.
#[must_use]
pub fn folder_of_all() -> PathBuf {
    whole("all", &names_of_all())
}

/// The names of the library for processes that use ROCm 7.2 and CUDA.
pub(super) fn names_of_all() -> Vec<String> {
    let mut names = Rocm::release("7.2").names();
    names.extend(super::library::NAMES.map(str::to_owned));
    names
}
