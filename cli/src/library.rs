//! Finds and loads vendor libraries at run time, such as NCCL and cuBLAS.
//!
//! The first library that loads is used, in this order: the value of the option, and then nothing
//! else; the folder in an environment variable; the search path of the loader; the folders of
//! Python packages and CUDA toolkits. The search reads a few dozen folders and starts no other
//! program.

use std::error::Error;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use libloading::Library;

use crate::error::{Failure, Result};
use crate::printable::file_name;

/// The file names and folders by which a vendor library is found.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LibrarySpec {
    pub(crate) name: &'static str,
    pub(crate) option: &'static str,
    /// The environment variables that name the folder of an installation.
    pub(crate) variables: &'static [&'static str],
    /// The file names of the library, newest version first.
    pub(crate) files: &'static [&'static str],
    /// The folders of the library inside `site-packages` of a Python installation.
    pub(crate) packages: &'static [&'static str],
    pub(crate) advice: &'static str,
}

#[derive(Debug)]
pub(crate) struct LoadedLibrary {
    pub(crate) library: Library,
    pub(crate) path: String,
}

/// Patterns of folders that may contain a Python installation or a toolkit.
const ROOTS: [&str; 5] = ["/usr/local", "/usr", "/opt", "/opt/*", "/opt/*/.venv"];
/// Patterns of folders below the home folder that may contain a Python installation.
const AT_HOME: [&str; 2] = [".local", "*"];
/// Patterns of the package folders inside a Python installation.
const PYTHONS: [&str; 4] = [
    "lib/python3*/site-packages",
    "lib/python3*/dist-packages",
    "lib64/python3*/site-packages",
    "local/lib/python3*/dist-packages",
];
/// Patterns of the library folders of CUDA toolkits and Linux distributions.
const FOLDERS: [&str; 4] =
    ["/usr/local/cuda/lib64", "/usr/local/cuda*/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib64"];

impl LibrarySpec {
    /// Loads the library from the value of its option, or else from the first folder where it
    /// loads.
    pub(crate) fn open(&self, given: Option<&Path>) -> Result<LoadedLibrary> {
        let tried = match given {
            None => self.candidates(),
            Some(folder) if folder.is_dir() => {
                self.files.iter().map(|it| folder.join(it)).collect()
            }
            Some(file) => vec![file.to_owned()],
        };
        let mut refusals = Vec::new();
        for file in tried {
            match load(&file) {
                Ok(library) => {
                    return Ok(LoadedLibrary { library, path: file.display().to_string() });
                }
                Err(refusal) => refusals.push(refusal),
            }
        }
        let Self { name, option, advice, .. } = self;
        Err(match given {
            None => {
                let first = refusals.into_iter().next().unwrap_or_default();
                let advice =
                    format!("give the file with {option}, or install the library: {advice}");
                Failure::failed(format!("cannot find {name}: {first}")).with_advice(advice)
            }
            Some(given) => {
                let (given, last) = (file_name(given), refusals.pop().unwrap_or_default());
                Failure::failed(format!("cannot load {given}, the file of {option}: {last}"))
                    .with_advice(format!("give the file {} or its folder", self.files[0]))
            }
        })
    }

    /// Returns the other installed files of the library, besides `used`; links to one file count
    /// once.
    pub(crate) fn others(&self, used: &str) -> Vec<PathBuf> {
        let canonical = |path: &Path| path.canonicalize().ok();
        let mut seen: Vec<PathBuf> = canonical(Path::new(used)).into_iter().collect();
        let installed = self.candidates().into_iter().filter(|path| path.is_absolute());
        installed
            .filter(|path| {
                let Some(file) = canonical(path) else { return false };
                let is_new = !seen.contains(&file);
                seen.push(file);
                is_new
            })
            .collect()
    }

    /// Returns the existing files of the library in the order of the search, and bare names for the
    /// loader.
    fn candidates(&self) -> Vec<PathBuf> {
        let named = self.variables.iter().filter_map(std::env::var_os).map(PathBuf::from);
        let named = named.flat_map(|home| [home.join("lib"), home.join("lib64"), home]);
        let mut candidates: Vec<PathBuf> = self.in_folders(named);
        candidates.extend(self.files.iter().map(PathBuf::from));
        let environments = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter();
        let environments = environments.filter_map(std::env::var_os).map(PathBuf::from);
        let home = std::env::var_os("HOME").map(PathBuf::from).into_iter();
        let roots = environments
            .chain(pythons_of_path())
            .chain(home.flat_map(|home| AT_HOME.map(|root| expand(&home, root))).flatten())
            .chain(ROOTS.into_iter().flat_map(|root| expand(Path::new("/"), root)));
        let packages = roots.flat_map(|root| PYTHONS.map(|python| expand(&root, python)));
        let packages = packages.flatten().flat_map(|site| {
            self.packages.iter().map(move |package| site.join(package)).collect::<Vec<_>>()
        });
        candidates.extend(self.in_folders(packages));
        let folders = FOLDERS.into_iter().flat_map(|folder| expand(Path::new("/"), folder));
        candidates.extend(self.in_folders(folders));
        candidates
    }

    fn in_folders(&self, folders: impl Iterator<Item = PathBuf>) -> Vec<PathBuf> {
        let files = |folder: PathBuf| self.files.iter().map(move |file| folder.join(file));
        folders.flat_map(files).filter(|path| path.is_file()).collect()
    }
}

/// Returns the folders of the Python installations that `PATH` contains.
fn pythons_of_path() -> Vec<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).filter(|folder| folder.join("python3").exists());
    folders.filter_map(|folder| Some(folder.parent()?.to_owned())).collect()
}

fn load(path: &Path) -> std::result::Result<Library, String> {
    // The loader would wait for the writer of a named pipe. A bare name is no path.
    let is_path = path.components().count() > 1;
    if is_path && path.metadata().is_ok_and(|metadata| !metadata.is_file()) {
        return Err("it is not a regular file".to_owned());
    }
    // SAFETY: loading runs the initialisers of the library. The candidates are vendor libraries that
    // are made to be loaded into any process, and the user installed or named them.
    unsafe { Library::new(path) }.map_err(|error| {
        // The text of the loader is the source of this error.
        error.source().map_or_else(|| error.to_string(), ToString::to_string)
    })
}

/// Returns the folders below `root` that match a pattern, highest names first. Each segment may
/// contain one `*`.
fn expand(root: &Path, pattern: &str) -> Vec<PathBuf> {
    let segments = pattern.split('/').filter(|segment| !segment.is_empty());
    segments.fold(vec![root.to_owned()], |folders, segment| {
        folders.iter().flat_map(|folder| children(folder, segment)).collect()
    })
}

fn children(folder: &Path, segment: &str) -> Vec<PathBuf> {
    let Some((head, tail)) = segment.split_once('*') else {
        let child = folder.join(segment);
        return if child.is_dir() { vec![child] } else { vec![] };
    };
    let matches = |name: &OsStr| {
        name.to_str().is_some_and(|name| {
            name.len() >= head.len() + tail.len() && name.starts_with(head) && name.ends_with(tail)
        })
    };
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = entries
        .filter(|entry| matches(&entry.file_name()))
        .map(|entry| entry.path())
        .filter(|path| path.is_dir())
        .collect();
    found.sort_unstable_by(|left, right| right.cmp(left));
    found
}

/// Declares a struct with the functions of a vendor library, and their lookup by symbol name.
macro_rules! functions {
    (
        $(#[$meta:meta])*
        struct $table:ident { $($field:ident = $symbol:literal ($($arg:ty),*) -> $result:ty;)* }
    ) => {
        $(#[$meta])*
        pub(crate) struct $table {
            $(pub(crate) $field: unsafe extern "C" fn($($arg),*) -> $result,)*
            /// The handle that keeps the library mapped, which is never unloaded, because vendor
            /// libraries start threads.
            _library: std::mem::ManuallyDrop<libloading::Library>,
        }

        impl $table {
            /// Looks up all functions, and returns the name of the first missing symbol as the
            /// error.
            pub(crate) fn look_up(
                library: libloading::Library,
            ) -> std::result::Result<Self, &'static str> {
                Ok(Self {
                    $($field: {
                        // SAFETY: the type is the declaration of this symbol in the header of the
                        // vendor.
                        let symbol = unsafe { library.get($symbol.as_bytes()) };
                        *symbol.map_err(|_| $symbol)?
                    },)*
                    _library: std::mem::ManuallyDrop::new(library),
                })
            }
        }
    };
}

pub(crate) use functions;

#[cfg(test)]
mod tests {
    use super::*;

    const NOTHING: LibrarySpec = LibrarySpec {
        name: "Nothing",
        option: "--nothing",
        variables: &["PEERLANE_TEST_NOTHING_HOME"],
        files: &["libpeerlane-nothing.so.1"],
        packages: &["nothing/lib"],
        advice: "pip install nothing",
    };

    #[test]
    fn a_missing_library_names_its_option() {
        let error = NOTHING.open(None).unwrap_err().to_string();
        assert!(error.starts_with("error: cannot find Nothing: libpeerlane-nothing"), "{error}");
        assert!(
            error.contains("give the file with --nothing, or install the library: pip"),
            "{error}"
        );
    }

    #[test]
    fn a_given_path_is_the_only_candidate() {
        let error = NOTHING.open(Some(Path::new("/proc/none.so"))).unwrap_err().to_string();
        assert!(error.contains("cannot load /proc/none.so, the file of --nothing"), "{error}");
        let error = NOTHING.open(Some(Path::new("/proc"))).unwrap_err().to_string();
        assert!(error.contains("/proc/libpeerlane-nothing.so.1"), "{error}");
    }

    #[test]
    fn other_installations_are_listed_once() {
        let root = std::env::temp_dir().join(format!("peerlane-others-{}", std::process::id()));
        let file = |folder: &str| root.join(folder).join("libpeerlane-others.so.1");
        for folder in ["lib", "lib64"] {
            std::fs::create_dir_all(root.join(folder)).unwrap();
        }
        std::fs::write(file("lib"), "").unwrap();
        std::os::unix::fs::symlink(file("lib"), file("lib64")).unwrap();
        std::fs::write(file(""), "").unwrap();
        let spec = LibrarySpec {
            files: &["libpeerlane-others.so.1"],
            variables: &["PEERLANE_TEST_OTHERS_HOME"],
            ..NOTHING
        };
        // SAFETY: no other thread of this test program reads or changes this variable.
        unsafe { std::env::set_var("PEERLANE_TEST_OTHERS_HOME", &root) };
        let others = spec.others(&file("lib").display().to_string());
        let all = spec.others("libpeerlane-others.so.1");
        std::fs::remove_dir_all(&root).unwrap();
        assert_eq!(others, [file("")]);
        assert_eq!(all, [file("lib"), file("")]);
    }

    #[test]
    fn patterns_match_folders_only_and_the_newest_first() {
        let root = std::env::temp_dir().join(format!("peerlane-library-{}", std::process::id()));
        for folder in ["lib/python3.9/site", "lib/python3.12/site", "lib/python2/site"] {
            std::fs::create_dir_all(root.join(folder)).unwrap();
        }
        std::fs::write(root.join("lib/python3.txt"), "").unwrap();
        let found = expand(&root, "lib/python3*/site");
        let wanted = ["lib/python3.9/site", "lib/python3.12/site"].map(|path| root.join(path));
        std::fs::remove_dir_all(&root).unwrap();
        assert_eq!(found, wanted);
    }
}
