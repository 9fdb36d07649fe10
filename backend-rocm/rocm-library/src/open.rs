//! Where a library is looked for, and what is said if it is not there.

use std::ffi::{CStr, c_void};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::{env, fmt, fs};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

/// The root of an installation of ROCm, as its own tools read it.
const ROOT_VARIABLE: &str = "ROCM_PATH";
/// Where ROCm's packages put it.
const ROOT: &str = "/opt/rocm";

/// A library of ROCm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// The name before the version, such as `libamdhip64.so`.
    pub name: &'static str,
    /// The versions of its soname, in the order in which they are tried; the plain name is last.
    pub sonames: &'static [&'static str],
    /// The oldest release of ROCm that has all required functions, such as `5.7`.
    pub oldest: &'static str,
}

/// Why a library cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// It is nowhere.
    #[error("there is no {name}: looked for {looked}")]
    Absent {
        /// The name before the version.
        name: &'static str,
        /// The names and places.
        looked: String,
    },
    /// It is there, and the loader refuses it.
    #[error("cannot load {library}: {reason}")]
    Refused {
        /// The name or path that was asked for.
        library: String,
        /// The loader's words.
        reason: String,
    },
    /// It lacks a function.
    #[error("{file} has no {symbol}: it is too old, wanted ROCm {since} or newer")]
    Symbol {
        /// The library's file.
        file: PathBuf,
        /// The function.
        symbol: &'static str,
        /// The first release of ROCm that has it.
        since: &'static str,
    },
}

/// A library that was opened, and its file.
pub struct Opened {
    /// Keeps the code mapped; never closed, because the runtime has threads of its own.
    library: Library,
    asked: String,
    /// Known as soon as a function of it is.
    file: OnceLock<PathBuf>,
}

impl Wanted {
    /// The first of this library that there is.
    ///
    /// # Errors
    /// [`LoadError::Absent`] if there is none, and [`LoadError::Refused`] if the first that there is
    /// cannot be loaded: a newer one that is broken is not passed over for an older one.
    pub fn open(&self) -> Result<Opened, LoadError> {
        self.open_in(&roots())
    }

    /// The library at this path, or of this name.
    ///
    /// # Errors
    /// [`LoadError::Refused`].
    pub fn open_from(&self, path: impl AsRef<Path>) -> Result<Opened, LoadError> {
        let asked = path.as_ref().display().to_string();
        match load(path.as_ref()) {
            Ok(library) => Ok(Opened::new(library, asked)),
            Err(reason) => Err(LoadError::Refused { library: asked, reason }),
        }
    }

    fn open_in(&self, roots: &[PathBuf]) -> Result<Opened, LoadError> {
        for name in self.names() {
            match load(Path::new(&name)) {
                Ok(library) => return Ok(Opened::new(library, name)),
                Err(reason) if is_absence_of(&reason, &name) => {}
                Err(reason) => return Err(LoadError::Refused { library: name, reason }),
            }
        }
        for root in roots {
            let paths = self.names().map(|name| root.join("lib").join(name));
            if let Some(path) = paths.into_iter().find(|path| path.exists()) {
                return self.open_from(path);
            }
        }
        Err(LoadError::Absent { name: self.name, looked: self.looked(roots) })
    }

    /// The sonames, and the name that only development packages have.
    fn names(&self) -> impl Iterator<Item = String> {
        let versioned = self.sonames.iter().map(|version| format!("{}.{version}", self.name));
        versioned.chain([self.name.to_owned()])
    }

    fn looked(&self, roots: &[PathBuf]) -> String {
        let names: Vec<String> = self.names().collect();
        let roots: Vec<String> =
            roots.iter().map(|root| format!("{}/lib", root.display())).collect();
        let rocm_path =
            if env::var_os(ROOT_VARIABLE).is_some() { "" } else { ", and ROCM_PATH is not set" };
        format!("{} by the loader and in {}{rocm_path}", names.join(", "), roots.join(", "))
    }
}

impl Opened {
    fn new(library: Library, asked: String) -> Self {
        Self { library, asked, file: OnceLock::new() }
    }

    /// A function of the library.
    ///
    /// # Errors
    /// [`LoadError::Symbol`] with this release, if the library has no such function.
    ///
    /// # Safety
    /// `F` is the type of the function that the library exports under this name.
    pub unsafe fn symbol<F: Copy>(
        &self,
        symbol: &'static str,
        since: &'static str,
    ) -> Result<F, LoadError> {
        // SAFETY: the caller's; the pointer is copied out and the library is never closed.
        let Ok(found) = (unsafe { self.library.get::<F>(symbol) }) else {
            return Err(LoadError::Symbol { file: self.file().to_owned(), symbol, since });
        };
        let function = *found;
        self.file.get_or_init(|| file_of(found.into_raw()).unwrap_or(self.asked.clone().into()));
        Ok(function)
    }

    /// The file, its links followed, so that its name has the version; what was asked for as long as
    /// no function was found.
    pub fn file(&self) -> &Path {
        self.file.get().map_or(Path::new(&self.asked), PathBuf::as_path)
    }
}

/// The file that holds this address.
fn file_of(address: *const c_void) -> Option<PathBuf> {
    let mut found = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: std::ptr::null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: std::ptr::null_mut(),
    };
    // SAFETY: any address may be asked for; the answer is stored in a local.
    let known = unsafe { libc::dladdr(address, &raw mut found) };
    if known == 0 || found.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the loader's own text, which stays as long as the library, and that is for ever.
    let name = unsafe { CStr::from_ptr(found.dli_fname) };
    let file = PathBuf::from(name.to_string_lossy().into_owned());
    Some(fs::canonicalize(&file).unwrap_or(file))
}

impl fmt::Debug for Opened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Opened").field("file", &self.file()).finish_non_exhaustive()
    }
}

/// The installations to look into when the loader knows none.
fn roots() -> Vec<PathBuf> {
    let own = env::var_os(ROOT_VARIABLE).filter(|root| !root.is_empty()).map(PathBuf::from);
    let mut roots: Vec<PathBuf> = own.into_iter().collect();
    if !roots.iter().any(|root| root == Path::new(ROOT)) {
        roots.push(ROOT.into());
    }
    roots
}

/// # Errors
/// The loader's words.
fn load(name: &Path) -> Result<Library, String> {
    // At once, so that a runtime whose other libraries are of another release is refused here; later
    // the loader would end the process at the first call.
    // SAFETY: loading the vendor's runtime runs its initialisers, which every program over ROCm does.
    unsafe { Library::open(Some(name), RTLD_NOW | RTLD_LOCAL) }.map_err(|error| {
        // libloading's own text says only that `dlopen` failed; the loader's reason is behind it.
        let source = std::error::Error::source(&error);
        source.map_or_else(|| error.to_string(), ToString::to_string)
    })
}

/// Whether the loader found no such file; the same words about another name are of a library that
/// this one needs.
fn is_absence_of(reason: &str, name: &str) -> bool {
    reason.strip_prefix(name).is_some_and(|rest| rest.contains("No such file"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: Wanted =
        Wanted { name: "libpeerlane-none.so", sonames: &["7", "6"], oldest: "5.7" };

    #[test]
    fn a_library_that_is_nowhere_says_where_it_was_looked_for() {
        let error = NONE.open_in(&["/opt/none".into()]).unwrap_err().to_string();
        let wanted = "there is no libpeerlane-none.so: looked for libpeerlane-none.so.7, \
                      libpeerlane-none.so.6, libpeerlane-none.so by the loader and in /opt/none/lib";
        assert!(error.starts_with(wanted), "{error}");
    }

    #[test]
    fn a_file_that_is_no_library_is_refused_and_not_passed_over() {
        let root = env::temp_dir().join(format!("peerlane-rocm-library-{}", std::process::id()));
        fs::create_dir_all(root.join("lib")).unwrap();
        let file = root.join("lib/libpeerlane-none.so.6");
        fs::write(&file, "no library").unwrap();
        let error = NONE.open_in(std::slice::from_ref(&root)).unwrap_err();
        fs::remove_dir_all(&root).unwrap();
        let LoadError::Refused { library, reason } = error else { panic!("{error}") };
        assert_eq!(library, file.display().to_string());
        assert!(reason.contains("file too short") || reason.contains("invalid"), "{reason}");
    }

    #[test]
    fn the_loader_is_understood() {
        let text = "libx.so.7: cannot open shared object file: No such file or directory";
        assert!(is_absence_of(text, "libx.so.7"));
        let needs = "libcomgr.so.3: cannot open shared object file: No such file or directory";
        assert!(!is_absence_of(needs, "libx.so.7"));
        assert!(!is_absence_of("libx.so.7: invalid ELF header", "libx.so.7"));
    }

    #[test]
    fn a_missing_function_tells_the_file() {
        let opened = NONE.open_from("libc.so.6").unwrap();
        let missing = |opened: &Opened| {
            // SAFETY: it is not called.
            let found = unsafe { opened.symbol::<unsafe extern "C" fn()>("hipNone", "7.2") };
            found.unwrap_err().to_string()
        };
        let rest = " has no hipNone: it is too old, wanted ROCm 7.2 or newer";
        assert_eq!(missing(&opened), format!("libc.so.6{rest}"));

        // SAFETY: the declaration in stdlib.h; it is not called.
        unsafe { opened.symbol::<unsafe extern "C" fn(i32) -> i32>("abs", "5.7") }.unwrap();
        let text = missing(&opened);
        assert!(text.starts_with('/') && text.ends_with(rest), "{text}");
        assert_eq!(text, format!("{}{rest}", opened.file().display()));
    }
}
