//! Finds what a group has left behind: in a process that continues, and on the machine.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use peerlane_hal::Deadline;

/// Limits how long threads without work may take to end.
const ENDING: Duration = Duration::from_secs(2);

/// Returns shared memory, descriptors and threads of Peerlane in this process.
///
/// Waits a moment for threads that are about to end.
pub fn leftovers() -> Vec<String> {
    let deadline = Deadline::after(ENDING);
    loop {
        let left: Vec<_> = mappings().chain(descriptors()).chain(threads()).collect();
        if left.is_empty() || deadline.has_passed() {
            return left;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn mappings() -> impl Iterator<Item = String> {
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let lines: Vec<_> = maps.lines().filter(|line| is_ours(line)).map(str::to_owned).collect();
    lines.into_iter().map(|line| format!("mapping {line}"))
}

fn descriptors() -> impl Iterator<Item = String> {
    let targets = entries("/proc/self/fd").filter_map(|path| fs::read_link(path).ok());
    let targets = targets.map(|target| target.display().to_string());
    targets.filter(|target| is_ours(target)).map(|target| format!("descriptor {target}"))
}

fn threads() -> impl Iterator<Item = String> {
    let names =
        entries("/proc/self/task").filter_map(|path| fs::read_to_string(path.join("comm")).ok());
    names.filter(|name| is_ours(name)).map(|name| format!("thread {}", name.trim_end()))
}

/// Returns files and socket files of Peerlane that other processes could find by name.
pub fn named_files() -> Vec<String> {
    let files = entries("/dev/shm").map(|path| path.display().to_string());
    let files = files.filter(|path| path.contains("peerlane"));
    // Names of abstract sockets begin with @; they are not files.
    let sockets = fs::read_to_string("/proc/net/unix").unwrap_or_default();
    let sockets = sockets.lines().filter_map(|line| line.split_whitespace().nth(7));
    let sockets = sockets.filter(|name| !name.starts_with('@') && name.contains("peerlane"));
    files.chain(sockets.map(str::to_owned)).collect()
}

fn is_ours(text: &str) -> bool {
    text.contains("memfd:peerlane") || text.starts_with("peerlane")
}

fn entries(folder: impl AsRef<Path>) -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).collect::<Vec<_>>().into_iter()
}
