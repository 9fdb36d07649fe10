//! Where the shared library is, and folders that have it under the names that programs ask for.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::patch;

const STEM: &str = "libpeerlane_simulated_driver";
/// The names under which programs load the vendor's library.
pub(super) const NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];
const FOLDER: &str = "simulated-driver";

/// The shared library that cargo built for the running test.
///
/// # Panics
/// If there is none beside the test program or a folder above.
pub fn library() -> PathBuf {
    let program = std::env::current_exe().expect("the running program has a path");
    // Test programs and the library lie in `deps`, other programs beside it.
    let above = program.ancestors().skip(1).take(2);
    let folders: Vec<PathBuf> =
        above.flat_map(|folder| [folder.to_owned(), folder.join("deps")]).collect();
    let newest = folders.iter().flat_map(|folder| candidates(folder)).max_by_key(|(age, _)| *age);
    let Some((_, path)) = newest else {
        panic!("no {STEM}*.so in {folders:?}; a dev-dependency on the package builds it");
    };
    path
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
    let library = library();
    let folder = folder_beside(&library, "whole");
    for name in NAMES {
        put(&folder, name, |path| std::os::unix::fs::symlink(&library, path));
    }
    folder
}

/// As [`library_folder`], with a library that lacks these symbols, as an older driver would.
///
/// # Panics
/// If the library has no such symbol, or the folder cannot be made.
pub fn without_symbols(symbols: &[&str]) -> PathBuf {
    let library = library();
    let mut bytes = std::fs::read(&library).expect("the library can be read");
    for symbol in symbols {
        patch::hide(&mut bytes, symbol).unwrap_or_else(|problem| panic!("{library:?}: {problem}"));
    }
    let mut hasher = DefaultHasher::new();
    symbols.hash(&mut hasher);
    let folder = folder_beside(&library, &format!("without-{:016x}", hasher.finish()));
    let [whole, short] = NAMES;
    put(&folder, whole, |path| std::fs::write(path, &bytes));
    // One file, so that who asks for one name and who asks for the other share the driver.
    put(&folder, short, |path| std::os::unix::fs::symlink(whole, path));
    folder
}

fn folder_beside(library: &Path, name: &str) -> PathBuf {
    let folder = library.with_file_name(FOLDER).join(name);
    std::fs::create_dir_all(&folder).unwrap_or_else(|error| panic!("{folder:?}: {error}"));
    folder
}

/// Makes a file whole or not at all: other tests may use the one that is there.
fn put(folder: &Path, name: &str, make: impl FnOnce(&Path) -> std::io::Result<()>) {
    let thread = std::thread::current().id();
    let fresh = folder.join(format!("{name}.{}-{thread:?}", std::process::id()));
    let _ = std::fs::remove_file(&fresh);
    let made = make(&fresh).and_then(|()| std::fs::rename(&fresh, folder.join(name)));
    made.unwrap_or_else(|error| panic!("{folder:?}/{name}: {error}"));
}
