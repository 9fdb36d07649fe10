//! Waits until the threads of the exchanges are asleep.

use std::fs;
use std::time::{Duration, Instant};

const LOOKS: u32 = 3;
const BETWEEN_LOOKS: Duration = Duration::from_millis(10);
const PATIENCE: Duration = Duration::from_secs(10);

/// Waits until all other threads of this process sleep: one that was just made, or has just passed
/// something on, may still allocate or call the system.
///
/// # Panics
/// If they do not come to rest.
pub fn come_to_rest() {
    let begin = Instant::now();
    let mut quiet = 0;
    while quiet < LOOKS {
        assert!(begin.elapsed() < PATIENCE, "the threads of this process do not come to rest");
        std::thread::sleep(BETWEEN_LOOKS);
        quiet = if others_sleep() { quiet + 1 } else { 0 };
    }
}

fn others_sleep() -> bool {
    let own = fs::read_link("/proc/thread-self").expect("every thread has a place in /proc");
    let tasks = fs::read_dir("/proc/self/task").expect("every process has threads");
    let others =
        tasks.flatten().filter(|task| Some(task.file_name().as_os_str()) != own.file_name());
    // A thread that has ended meanwhile is at rest. The state stands behind the name.
    others
        .filter_map(|task| fs::read_to_string(task.path().join("stat")).ok())
        .all(|stat| stat.rsplit_once(") ").is_some_and(|(_, state)| state.starts_with('S')))
}
