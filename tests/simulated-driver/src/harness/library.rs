//! Finds the shared library, and creates folders that hold it under the vendors' names.

use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::patch;

const STEM: &str = "libpeerlane_simulated_driver";
/// The names under which programs load the vendor's library.
pub(super) const NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];
const FOLDER: &str = "simulated-driver";
/// The file beside a copy that names the build of the library from which it was made.
const MADE_OF: &str = "made-of";

/// Returns the path of the shared library that cargo built for the running program.
///
/// # Panics
/// If there is none beside the program, in a folder above, or where cargo built this package.
pub fn library() -> PathBuf {
    let program = std::env::current_exe().expect("the running program has a path");
    // Test programs and the library are in `deps`, other programs beside that folder.
    let mut places: Vec<&Path> = program.ancestors().skip(1).take(2).collect();
    // The folder of the profile, for documentation tests, which run in a temporary folder.
    let built = Path::new(env!("OUT_DIR")).ancestors().nth(3);
    places.extend(built.filter(|built| !places.contains(built)));

    let folders: Vec<PathBuf> =
        places.iter().flat_map(|place| [place.to_path_buf(), place.join("deps")]).collect();
    let found = folders.iter().flat_map(|folder| candidates(folder));
    let Some((_, newest)) = found.max_by_key(|(age, _)| *age) else {
        panic!("{}", absent(&folders))
    };
    newest
}

/// Returns what to do when no folder has the library.
fn absent(folders: &[PathBuf]) -> String {
    let folders: Vec<_> = folders.iter().map(|folder| folder.display().to_string()).collect();
    format!(
        "the simulated driver was not found: no file {STEM}*.so in {}. Cargo builds it, on Linux only, for every package \
         that has peerlane-simulated-driver among its dependencies or dev-dependencies. If the program was moved after \
         its build, copy the file from target/PROFILE/deps beside the program",
        folders.join(", ")
    )
}

/// The libraries in one folder, with the time when they were built.
fn candidates(folder: &Path) -> Vec<(SystemTime, PathBuf)> {
    let Ok(entries) = folder.read_dir() else { return Vec::new() };
    let paths = entries.flatten().map(|entry| entry.path());
    let ours = paths.filter(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with(STEM) && name.ends_with(".so")
    });
    ours.filter_map(|path| Some((path.metadata().ok()?.modified().ok()?, path))).collect()
}

/// A folder with the library as `libcuda.so.1`, for `LD_LIBRARY_PATH` of other programs.
///
/// # Panics
/// If the folder cannot be made beside the library.
pub fn library_folder() -> PathBuf {
    whole("whole", &NAMES.map(str::to_owned))
}

/// A folder with the library itself under these names.
pub(super) fn whole(folder: &str, names: &[String]) -> PathBuf {
    let library = library();
    let folder = folder_beside(&library, folder);
    for name in names {
        put_link(&folder, name, &library);
    }
    folder
}

/// As [`library_folder`], with a library that lacks these symbols, as an older driver would.
///
/// # Panics
/// If the library has no such symbol, or the folder cannot be made.
pub fn without_symbols(symbols: &[&str]) -> PathBuf {
    Copied { names: &NAMES.map(str::to_owned), without: symbols, settings: "" }.folder()
}

/// A copy of the library that is not quite the same.
#[derive(Debug, Hash)]
pub(super) struct Copied<'a> {
    /// Of its file, and the others that lead there.
    pub(super) names: &'a [String],
    /// The symbols that it lacks.
    pub(super) without: &'a [&'a str],
    /// Settings that it has of its own.
    pub(super) settings: &'a str,
}

impl Copied<'_> {
    /// The folder that holds it.
    pub(super) fn folder(&self) -> PathBuf {
        let library = library();
        let mut hasher = DefaultHasher::new();
        self.hash(&mut hasher);
        let folder = folder_beside(&library, &format!("copy-{:016x}", hasher.finish()));
        let (file, others) = self.names.split_first().expect("a library has a name");
        // Of processes that start together, one makes the file and the others load the same.
        let _alone = alone_in(&folder);
        let built = library.metadata().and_then(|it| it.modified()).expect("the library is there");
        let made_of = format!("{library:?} {built:?}");
        // What is there stays: a process that has loaded it looks for the same file by other names.
        if !std::fs::read_to_string(folder.join(MADE_OF)).is_ok_and(|there| there == made_of) {
            let mut bytes = std::fs::read(&library).expect("the library can be read");
            let hidden = self.without.iter().try_for_each(|symbol| patch::hide(&mut bytes, symbol));
            let patched = hidden.and_then(|()| patch::own(&mut bytes, self.settings));
            patched.unwrap_or_else(|problem| panic!("{library:?}: {problem}"));
            put(&folder, file, |path| std::fs::write(path, &bytes));
            put(&folder, MADE_OF, |path| std::fs::write(path, &made_of));
        }
        // One file, so that who asks for one name and who asks for another share the driver.
        for name in others {
            put_link(&folder, name, Path::new(file));
        }
        folder
    }
}

fn folder_beside(library: &Path, name: &str) -> PathBuf {
    let folder = library.with_file_name(FOLDER).join(name);
    std::fs::create_dir_all(&folder).unwrap_or_else(|error| panic!("{folder:?}: {error}"));
    folder
}

/// Keeps other processes, and other threads, from making files there until it is dropped.
fn alone_in(folder: &Path) -> File {
    let path = folder.join("lock");
    let lock = File::create(&path).unwrap_or_else(|error| panic!("{path:?}: {error}"));
    // SAFETY: the descriptor is open; its last owner gives the lock back by closing it.
    let wait = || unsafe { libc::flock(lock.as_raw_fd(), libc::LOCK_EX) };
    while wait() != 0 {
        let error = std::io::Error::last_os_error();
        // A signal can interrupt the wait.
        assert_eq!(error.kind(), std::io::ErrorKind::Interrupted, "{path:?}: {error}");
    }
    lock
}

/// Lets a name lead somewhere, if it does not yet.
fn put_link(folder: &Path, name: &str, target: &Path) {
    if !std::fs::read_link(folder.join(name)).is_ok_and(|there| there == target) {
        put(folder, name, |path| std::os::unix::fs::symlink(target, path));
    }
}

/// Makes a file whole or not at all: other tests may use the one that is there.
fn put(folder: &Path, name: &str, make: impl FnOnce(&Path) -> std::io::Result<()>) {
    let thread = std::thread::current().id();
    let fresh = folder.join(format!("{name}.{}-{thread:?}", std::process::id()));
    let _ = std::fs::remove_file(&fresh);
    let made = make(&fresh).and_then(|()| std::fs::rename(&fresh, folder.join(name)));
    made.unwrap_or_else(|error| panic!("{folder:?}/{name}: {error}"));
}
