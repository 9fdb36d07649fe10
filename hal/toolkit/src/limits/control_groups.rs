//! Reads the limits of the control groups that contain this process, of version 1 and 2.
//!
//! The groups form a tree, and the limits of all groups from the process to the root apply. Their files are below
//! `/sys/fs/cgroup`. In a container, the folder of the process can be missing there, and the root is the group of the
//! container.

use std::fs;
use std::path::{Path, PathBuf};

const ROOT: &str = "/sys/fs/cgroup";
/// Version 1 has no word for an absent limit, and shows the largest number of pages in bytes.
const UNLIMITED_BYTES_MIN: u64 = 1 << 62;

/// The folders of the control groups of a process, from the innermost group to the root of each tree.
#[derive(Debug, Default)]
pub(super) struct ControlGroups {
    folders: Vec<PathBuf>,
}

/// The memory that a control group leaves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct GroupMemory {
    pub(super) available_bytes: u64,
    pub(super) limit_bytes: u64,
    /// The file that holds the limit.
    pub(super) file: PathBuf,
}

/// A control group's limit of threads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct GroupThreads {
    pub(super) is_reached: bool,
    pub(super) text: String,
}

impl ControlGroups {
    /// Finds the control groups of this process; there are none if the files cannot be read.
    pub(super) fn of_process() -> Self {
        let text = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        Self::parse(&text, Path::new(ROOT))
    }

    /// Reads the format of `/proc/self/cgroup`, where each line is `number:controllers:path`. Version 2 has no controllers
    /// there. Next to version 1, its tree is in the folder `unified`.
    fn parse(text: &str, root: &Path) -> Self {
        let mut folders = Vec::new();
        for line in text.lines() {
            let mut fields = line.splitn(3, ':').skip(1);
            let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
            for name in controllers.split(',') {
                if name.is_empty() || name == "memory" || name == "pids" {
                    let tree = root.join(name);
                    let innermost = tree.join(path.trim_start_matches('/'));
                    let up = innermost.ancestors().take_while(|folder| folder.starts_with(&tree));
                    folders.extend(up.map(Path::to_owned));
                }
            }
        }
        Self { folders }
    }

    /// Returns the memory that the tightest group leaves, or `None` without a limit.
    pub(super) fn memory(&self) -> Option<GroupMemory> {
        let groups = self.folders.iter().filter_map(|folder| group_memory(folder));
        groups.min_by_key(|group| group.available_bytes)
    }

    /// Returns the limits of threads of all groups.
    pub(super) fn limits_of_threads(&self) -> Vec<GroupThreads> {
        self.folders.iter().filter_map(|folder| group_threads(folder)).collect()
    }
}

fn group_memory(folder: &Path) -> Option<GroupMemory> {
    // The counters of version 1 are those of the group alone, except for the totals.
    let version_2 = ("memory.max", "memory.current", "", "file_");
    let version_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_", "total_");
    [version_2, version_1].into_iter().find_map(|(limit, usage, total, unwritten)| {
        let file = folder.join(limit);
        let limit_bytes = number_in(&file).filter(|bytes| *bytes < UNLIMITED_BYTES_MIN)?;
        let used_bytes = number_in(&folder.join(usage))?;

        let stat = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
        let sum = |begin: &str, ends: &[&str]| -> u64 {
            ends.iter().map(|end| number_of(&stat, &format!("{begin}{end}"))).sum()
        };

        // The cache of files and parts of the kernel's memory count as used, but the kernel drops them before an allocation fails.
        // It must first write changed pages to their files. Pages of shared memory are in none of these counters.
        let cached = sum(total, &["inactive_file", "active_file", "slab_reclaimable"]);
        let reclaimable = cached.saturating_sub(sum(unwritten, &["dirty", "writeback"]));
        let available_bytes = limit_bytes.saturating_sub(used_bytes.saturating_sub(reclaimable));
        Some(GroupMemory { available_bytes, limit_bytes, file })
    })
}

/// Returns a counter of `memory.stat`, where each line is `name number`; 0 if it is not there.
fn number_of(stat: &str, name: &str) -> u64 {
    let mut lines = stat.lines().filter_map(|line| line.split_once(' '));
    let number = lines.find(|(counter, _)| *counter == name);
    number.and_then(|(_, number)| number.trim().parse().ok()).unwrap_or(0)
}

fn group_threads(folder: &Path) -> Option<GroupThreads> {
    let file = folder.join("pids.max");
    let most = number_in(&file)?;
    let current = number_in(&folder.join("pids.current"))?;
    let text = format!(
        "the limit of the control group is {most} processes and threads, of which {current} are used: raise it in {}",
        file.display()
    );
    Some(GroupThreads { is_reached: current >= most, text })
}

/// Returns the number in a file; `None` if it is `max`, or if there is no file.
fn number_in(file: &Path) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder with control groups, which is removed at the end.
    struct Tree(PathBuf);

    impl Tree {
        fn new(name: &str, files: &[(&str, &str)]) -> Self {
            let root = std::env::temp_dir().join(format!("peerlane-{name}-{}", std::process::id()));
            for (file, text) in files {
                let file = root.join(file);
                fs::create_dir_all(file.parent().unwrap()).unwrap();
                fs::write(file, text).unwrap();
            }
            Self(root)
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    #[test]
    fn the_tightest_group_of_version_2_counts() {
        let tree = Tree::new(
            "version-2",
            &[
                ("job/memory.max", "268435456\n"),
                ("job/memory.current", "200000000\n"),
                ("job/memory.stat", "anon 1\ninactive_file 1000000\n"),
                ("job/step/memory.max", "max\n"),
                ("job/step/memory.current", "1\n"),
                ("job/step/pids.max", "12\n"),
                ("job/step/pids.current", "12\n"),
                ("job/pids.max", "100\n"),
                ("job/pids.current", "12\n"),
            ],
        );
        let groups = ControlGroups::parse("0::/job/step\n", &tree.0);
        let memory = groups.memory().unwrap();
        assert_eq!(memory.available_bytes, 268_435_456 - 199_000_000);
        assert_eq!(memory.file, tree.0.join("job/memory.max"));
        let threads = groups.limits_of_threads();
        assert_eq!(threads.iter().map(|group| group.is_reached).collect::<Vec<_>>(), [true, false]);
        let file = tree.0.join("job/step/pids.max");
        let text = format!(
            "the limit of the control group is 12 processes and threads, of which 12 are used: raise it in {}",
            file.display()
        );
        assert_eq!(threads[0].text, text);
    }

    #[test]
    fn clean_cache_is_available() {
        let tree = Tree::new(
            "cache",
            &[
                ("2/memory.max", "1000\n"),
                ("2/memory.current", "950\n"),
                (
                    "2/memory.stat",
                    "anon 100\nshmem 50\nfile_dirty 40\nfile_writeback 10\ninactive_file 20\nactive_file 700\n\
                     slab_reclaimable 30\n",
                ),
                ("memory/memory.limit_in_bytes", "1000\n"),
                ("memory/memory.usage_in_bytes", "950\n"),
                (
                    "memory/memory.stat",
                    "active_file 1\ndirty 2\ntotal_dirty 40\ntotal_writeback 10\ntotal_inactive_file 20\n\
                     total_active_file 700\n",
                ),
            ],
        );
        let version_2 = ControlGroups::parse("0::/2\n", &tree.0);
        assert_eq!(version_2.memory().unwrap().available_bytes, 50 + 700);
        let version_1 = ControlGroups::parse("5:memory:/\n", &tree.0);
        assert_eq!(version_1.memory().unwrap().available_bytes, 50 + 670);
    }

    #[test]
    fn groups_of_version_1_and_of_a_container_are_found() {
        let none = i64::MAX / 4096 * 4096;
        let tree = Tree::new(
            "version-1",
            &[
                // The container sees its own group as the root.
                ("memory/memory.limit_in_bytes", "1000\n"),
                ("memory/memory.usage_in_bytes", "400\n"),
                ("memory/inner/memory.limit_in_bytes", &format!("{none}\n")),
                ("memory/inner/memory.usage_in_bytes", "400\n"),
                ("pids/pids.max", "max\n"),
                ("pids/pids.current", "3\n"),
            ],
        );
        let text = "5:memory:/docker/1\n4:cpu,cpuacct:/a\n3:pids:/docker/1\n0::/\n";
        let groups = ControlGroups::parse(text, &tree.0);
        assert_eq!(groups.memory().unwrap().available_bytes, 600);
        assert_eq!(groups.limits_of_threads(), []);
        let inner = ControlGroups::parse("5:memory:/inner\n", &tree.0);
        assert_eq!(inner.memory().unwrap().limit_bytes, 1000);
        assert_eq!(ControlGroups::parse("", &tree.0).memory(), None);
    }
}
