//! Finds and loads the libraries of ROCm for the crates [`hip-sys`] and [`hsa-sys`].
//!
//! [`RocmLibrary::open`] asks the loader for each soname that a release of ROCm has had, the newest first.
//! Then it searches `$ROCM_PATH/lib` and `/opt/rocm/lib`, because ROCm's own packages do not register their
//! folder with the loader. [`table!`] declares a table of functions of a library: required ones, and optional
//! ones that only newer releases have. A missing library or function is a [`LoadError`] that names the file,
//! never a panic.
//!
//! [`hip-sys`]: https://docs.rs/peerlane-hip-sys
//! [`hsa-sys`]: https://docs.rs/peerlane-hsa-sys

use std::ffi::{CStr, c_void};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::{env, fmt, fs};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

/// The environment variable with the folder of a ROCm installation, which ROCm's own tools read too.
const ROOT_VARIABLE: &str = "ROCM_PATH";
/// The folder in which ROCm packages install by default.
const ROOT: &str = "/opt/rocm";

/// A library of ROCm and the names under which releases install it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RocmLibrary {
    /// The file name of the library without a version, such as `libamdhip64.so`.
    pub name: &'static str,
    /// The versions of the library's soname, in the order in which they are tried. The plain name is tried
    /// last.
    pub sonames: &'static [&'static str],
    /// The oldest release of ROCm that has all required functions, such as `5.7`.
    pub oldest: &'static str,
}

/// An error of finding or loading a library of ROCm or one of its functions.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// No file of the library was found.
    #[error("cannot find {name}: tried {tried}")]
    NotFound {
        /// The file name of the library without a version.
        name: &'static str,
        /// The file names and folders that were tried to find the library.
        tried: String,
    },
    /// A file of the library exists, but the loader failed to load it.
    #[error("cannot load {library}: {reason}")]
    LoadFailed {
        /// The name or path that was passed to the loader.
        library: String,
        /// The reason that the loader reported.
        reason: String,
    },
    /// The library lacks a required function.
    #[error(
        "{file} has no function {symbol}: the library is too old, expected ROCm {since} or newer"
    )]
    Symbol {
        /// The file of the library that was loaded.
        file: PathBuf,
        /// The name of the missing function.
        symbol: &'static str,
        /// The first release of ROCm that has the function.
        since: &'static str,
    },
}

/// A library of ROCm that is loaded into this process.
pub struct LoadedLibrary {
    /// Keeps the ROCm library loaded, which is never closed, because the runtime runs threads of its own.
    library: Library,
    requested: String,
    file: OnceLock<PathBuf>,
}

impl RocmLibrary {
    /// Loads the library from the first name or folder in which it exists.
    ///
    /// # Errors
    /// Returns [`LoadError::NotFound`] if there is none. Returns [`LoadError::LoadFailed`] if the first file
    /// cannot be loaded: an older one does not replace a broken newer one.
    pub fn open(&self) -> Result<LoadedLibrary, LoadError> {
        self.open_in(&roots())
    }

    /// Loads the library from a path, or by another name.
    ///
    /// # Errors
    /// Returns [`LoadError::LoadFailed`] with the reason of the loader.
    pub fn open_from(&self, path: impl AsRef<Path>) -> Result<LoadedLibrary, LoadError> {
        let requested = path.as_ref().display().to_string();
        match load(path.as_ref()) {
            Ok(library) => Ok(LoadedLibrary::new(library, requested)),
            Err(reason) => Err(LoadError::LoadFailed { library: requested, reason }),
        }
    }

    fn open_in(&self, roots: &[PathBuf]) -> Result<LoadedLibrary, LoadError> {
        for name in self.names() {
            match load(Path::new(&name)) {
                Ok(library) => return Ok(LoadedLibrary::new(library, name)),
                Err(reason) if is_not_found(&reason, &name) => {}
                Err(reason) => return Err(LoadError::LoadFailed { library: name, reason }),
            }
        }
        for root in roots {
            let paths = self.names().map(|name| root.join("lib").join(name));
            if let Some(path) = paths.into_iter().find(|path| path.exists()) {
                return self.open_from(path);
            }
        }
        Err(LoadError::NotFound { name: self.name, tried: self.tried(roots) })
    }

    fn names(&self) -> impl Iterator<Item = String> {
        let versioned = self.sonames.iter().map(|version| format!("{}.{version}", self.name));
        versioned.chain([self.name.to_owned()])
    }

    fn tried(&self, roots: &[PathBuf]) -> String {
        let names: Vec<String> = self.names().collect();
        let roots: Vec<String> =
            roots.iter().map(|root| format!("{}/lib", root.display())).collect();
        let rocm_path =
            if env::var_os(ROOT_VARIABLE).is_some() { "" } else { ", and ROCM_PATH is not set" };
        format!(
            "{}; searched the loader's path and {}{rocm_path}",
            names.join(", "),
            roots.join(", ")
        )
    }
}

impl LoadedLibrary {
    fn new(library: Library, requested: String) -> Self {
        Self { library, requested, file: OnceLock::new() }
    }

    /// Looks up a function of the library by its symbol name.
    ///
    /// # Errors
    /// Returns [`LoadError::Symbol`] with the release `since` if the library has no such function.
    ///
    /// # Safety
    /// `F` must be the type of the function that the library exports under this name.
    pub unsafe fn symbol<F: Copy>(
        &self,
        symbol: &'static str,
        since: &'static str,
    ) -> Result<F, LoadError> {
        // SAFETY: the caller vouches for the type; the library is never closed, so the pointer stays valid.
        let Ok(found) = (unsafe { self.library.get::<F>(symbol) }) else {
            return Err(LoadError::Symbol { file: self.file().to_owned(), symbol, since });
        };
        let function = *found;
        self.file
            .get_or_init(|| file_of(found.into_raw()).unwrap_or(self.requested.clone().into()));
        Ok(function)
    }

    /// Returns the file from which the library was loaded.
    ///
    /// Links are resolved, so the name contains the version. Until a function was found it is the name or
    /// path that was requested.
    pub fn file(&self) -> &Path {
        self.file.get().map_or(Path::new(&self.requested), PathBuf::as_path)
    }
}

fn file_of(address: *const c_void) -> Option<PathBuf> {
    let mut info = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: std::ptr::null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: std::ptr::null_mut(),
    };
    // SAFETY: `dladdr` accepts any address; the result is stored in a local.
    let known = unsafe { libc::dladdr(address, &raw mut info) };
    if known == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the loader keeps the text as long as the library is loaded, and it is never closed.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    let file = PathBuf::from(name.to_string_lossy().into_owned());
    Some(fs::canonicalize(&file).unwrap_or(file))
}

impl fmt::Debug for LoadedLibrary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadedLibrary").field("file", &self.file()).finish_non_exhaustive()
    }
}

fn roots() -> Vec<PathBuf> {
    let own = env::var_os(ROOT_VARIABLE).filter(|root| !root.is_empty()).map(PathBuf::from);
    let mut roots: Vec<PathBuf> = own.into_iter().collect();
    if !roots.iter().any(|root| root == Path::new(ROOT)) {
        roots.push(ROOT.into());
    }
    roots
}

fn load(name: &Path) -> Result<Library, String> {
    // `RTLD_NOW` detects libraries of different releases here. With lazy binding the loader would end the
    // process at the first call of a missing function.
    // SAFETY: loading the vendor's runtime runs its initialisers, which every program over ROCm does.
    unsafe { Library::open(Some(name), RTLD_NOW | RTLD_LOCAL) }.map_err(|error| {
        // libloading's own text says only that `dlopen` failed; its source holds the loader's reason.
        let source = std::error::Error::source(&error);
        source.map_or_else(|| error.to_string(), ToString::to_string)
    })
}

/// Returns whether the loader failed because the file `name` itself does not exist.
///
/// The same reason with another name means that a library that this one needs is missing.
fn is_not_found(reason: &str, name: &str) -> bool {
    reason.strip_prefix(name).is_some_and(|rest| rest.contains("No such file"))
}

/// A function in the table of a library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Symbol {
    /// The name under which the library exports the function.
    pub name: &'static str,
    /// The first release of ROCm that has the function, or `None` if every supported release has it.
    pub since: Option<&'static str>,
}

/// Declares the struct `Library`, a table of the functions of a ROCm library that is loaded once per process.
///
/// The type of each function has the name of the function and must be in scope.
#[macro_export]
macro_rules! table {
    (
        $(#[$attribute:meta])*
        pub struct Library($library:expr);
        required { $($need:ident = $need_symbol:ident;)* }
        optional { $($may:ident = $may_symbol:ident since $since:literal;)* }
    ) => {
        $(#[$attribute])*
        pub struct Library {
            $(
                #[doc = concat!("`", stringify!($need_symbol), "`.")]
                pub $need: $need_symbol,
            )*
            $(
                #[doc = concat!("`", stringify!($may_symbol), "`, since ROCm ", $since, ".")]
                pub $may: Option<$may_symbol>,
            )*
            loaded: $crate::LoadedLibrary,
        }

        impl Library {
            /// The names of all functions of the table, with the releases that introduced them.
            pub const SYMBOLS: &[$crate::Symbol] = &[
                $($crate::Symbol { name: stringify!($need_symbol), since: None },)*
                $($crate::Symbol { name: stringify!($may_symbol), since: Some($since) },)*
            ];

            /// Loads the library and looks up its functions, once per process.
            ///
            /// # Errors
            /// Fails if the library is missing or too old, with the same error at every call.
            pub fn load() -> Result<&'static Self, $crate::LoadError> {
                static LOADED: std::sync::OnceLock<Result<Library, $crate::LoadError>> =
                    std::sync::OnceLock::new();
                let load = || $library.open().and_then(Self::look_up);
                LOADED.get_or_init(load).as_ref().map_err(Clone::clone)
            }

            /// Loads the library from a path or by another name, and looks up its functions.
            ///
            /// # Errors
            /// Fails if the library is missing or lacks a required function.
            pub fn load_from(
                path: impl AsRef<std::path::Path>,
            ) -> Result<Self, $crate::LoadError> {
                $library.open_from(path).and_then(Self::look_up)
            }

            /// Returns the file from which the library was loaded, with links resolved.
            pub fn file(&self) -> &std::path::Path {
                self.loaded.file()
            }

            /// Returns whether the loaded library has a function of the table.
            pub fn has(&self, symbol: &str) -> bool {
                match symbol {
                    $(stringify!($need_symbol) => true,)*
                    $(stringify!($may_symbol) => self.$may.is_some(),)*
                    _ => false,
                }
            }

            /// Creates the error which says that the loaded library lacks a function.
            pub fn lacks(&self, symbol: &str) -> $crate::LoadError {
                let found = Self::SYMBOLS.iter().find(|it| it.name == symbol);
                let known = found.copied().unwrap_or($crate::Symbol {
                    name: "a function that is in no table",
                    since: None,
                });
                $crate::LoadError::Symbol {
                    file: self.file().to_owned(),
                    symbol: known.name,
                    since: known.since.unwrap_or($library.oldest),
                }
            }

            fn look_up(loaded: $crate::LoadedLibrary) -> Result<Self, $crate::LoadError> {
                let oldest = $library.oldest;
                $(
                    // SAFETY: the type is the header's declaration of this function.
                    let $need: $need_symbol =
                        unsafe { loaded.symbol(stringify!($need_symbol), oldest) }?;
                )*
                $(
                    // SAFETY: as above.
                    let $may: Option<$may_symbol> =
                        unsafe { loaded.symbol(stringify!($may_symbol), $since) }.ok();
                )*
                Ok(Self { $($need,)* $($may,)* loaded })
            }
        }

        impl std::fmt::Debug for Library {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_struct("Library").field("file", &self.file()).finish_non_exhaustive()
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: RocmLibrary =
        RocmLibrary { name: "libpeerlane-none.so", sonames: &["7", "6"], oldest: "5.7" };

    #[test]
    fn a_missing_library_is_an_error_with_the_names_tried() {
        let error = NONE.open_in(&["/opt/none".into()]).unwrap_err().to_string();
        let expected = "cannot find libpeerlane-none.so: tried libpeerlane-none.so.7, libpeerlane-none.so.6, libpeerlane-none.so; searched the loader's path and /opt/none/lib";
        assert!(error.starts_with(expected), "{error}");
    }

    #[test]
    fn a_file_that_is_not_a_library_is_an_error() {
        let root = env::temp_dir().join(format!("peerlane-rocm-library-{}", std::process::id()));
        fs::create_dir_all(root.join("lib")).unwrap();
        let file = root.join("lib/libpeerlane-none.so.6");
        fs::write(&file, "no library").unwrap();
        let error = NONE.open_in(std::slice::from_ref(&root)).unwrap_err();
        fs::remove_dir_all(&root).unwrap();
        let LoadError::LoadFailed { library, reason } = error else { panic!("{error}") };
        assert_eq!(library, file.display().to_string());
        assert!(reason.contains("file too short") || reason.contains("invalid"), "{reason}");
    }

    #[test]
    fn a_missing_file_is_recognised() {
        let text = "libx.so.7: cannot open shared object file: No such file or directory";
        assert!(is_not_found(text, "libx.so.7"));
        let needs = "libcomgr.so.3: cannot open shared object file: No such file or directory";
        assert!(!is_not_found(needs, "libx.so.7"));
        assert!(!is_not_found("libx.so.7: invalid ELF header", "libx.so.7"));
    }

    #[test]
    fn a_missing_function_names_the_file() {
        let opened = NONE.open_from("libc.so.6").unwrap();
        let missing = |opened: &LoadedLibrary| {
            // SAFETY: the function is not called.
            let found = unsafe { opened.symbol::<unsafe extern "C" fn()>("hipNone", "7.2") };
            found.unwrap_err().to_string()
        };
        let rest = " has no function hipNone: the library is too old, expected ROCm 7.2 or newer";
        assert_eq!(missing(&opened), format!("libc.so.6{rest}"));

        // SAFETY: the type is the declaration in stdlib.h, and the function is not called.
        unsafe { opened.symbol::<unsafe extern "C" fn(i32) -> i32>("abs", "5.7") }.unwrap();
        let text = missing(&opened);
        assert!(text.starts_with('/') && text.ends_with(rest), "{text}");
        assert_eq!(text, format!("{}{rest}", opened.file().display()));
    }
}
