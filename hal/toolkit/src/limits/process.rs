//! Describes the limits of this process, which `ulimit` shows and sets.

use std::fs;

use rustix::io::Errno;
use rustix::process::{Resource, geteuid, getrlimit};

use super::control_groups::ControlGroups;

/// The address space in bytes that a thread needs: its stack, its signal stack and the first blocks
/// of its heap, with a reserve for threads that start at the same time.
pub(super) const THREAD_BYTES: u64 = 4 << 20;

const KIB: u64 = 1024;
const PAGE_BYTES: u64 = 4096;

/// A limit as users see it.
struct Limit {
    resource: Resource,
    /// The number of bytes that one unit of `ulimit` counts, or 1 for a number of objects.
    unit: u64,
    unit_name: &'static str,
    letter: char,
}

const DESCRIPTORS: Limit =
    Limit { resource: Resource::Nofile, unit: 1, unit_name: "file descriptors", letter: 'n' };
const ADDRESS_SPACE: Limit =
    Limit { resource: Resource::As, unit: KIB, unit_name: "KiB of address space", letter: 'v' };
const FILE: Limit =
    Limit { resource: Resource::Fsize, unit: KIB, unit_name: "KiB in one file", letter: 'f' };
const PROCESSES: Limit =
    Limit { resource: Resource::Nproc, unit: 1, unit_name: "processes and threads", letter: 'u' };

impl Limit {
    /// Returns the value that applies, or `None` if there is no limit.
    fn value(&self) -> Option<u64> {
        getrlimit(self.resource).current
    }

    /// Describes the limit of `of`, such as the user, and how to raise it; `None` if there is no
    /// limit.
    fn text(&self, of: &str, used: Option<u64>) -> Option<String> {
        let rlimit = getrlimit(self.resource);
        let soft = rlimit.current?;
        let hard = match rlimit.maximum {
            None => "the hard limit is unlimited".to_owned(),
            Some(hard) if hard > soft => format!("the hard limit is {}", hard / self.unit),
            Some(_) => "the hard limit is the same, so this needs root".to_owned(),
        };

        let used = used
            .map(|used| format!(", of which {} are used", used / self.unit))
            .unwrap_or_default();

        Some(format!(
            "the limit of the {of} is {} {}{used}: raise it with `ulimit -{}` ({hard})",
            soft / self.unit,
            self.unit_name,
            self.letter
        ))
    }
}

/// Returns the limit that has run out if a call fails with `errno`.
pub(super) fn limit_of(errno: Errno) -> Option<String> {
    match errno {
        Errno::MFILE => DESCRIPTORS.text("process", None),
        Errno::NFILE => Some(
            "the limit of the machine is reached: raise it with `sysctl fs.file-max`".to_owned(),
        ),
        Errno::NOMEM => address_space_limit(),
        Errno::FBIG => FILE.text("process", None),
        _ => None,
    }
}

/// Returns the limits that keep a thread or process from starting, where a thread needs `bytes`
/// bytes of address space.
pub(super) fn limit_of_threads(bytes: u64) -> Option<String> {
    if lacks_address_space(bytes) {
        return address_space_limit();
    }

    // Root has no limit by user.
    let of_user = (!geteuid().is_root()).then(|| PROCESSES.text("user", None)).flatten();
    let of_groups = ControlGroups::of_process().limits_of_threads();
    let reached = of_groups.iter().find(|group| group.is_reached);
    if let Some(reached) = reached {
        return Some(reached.text.clone());
    }

    // Another thread may have given address space back since.
    let of_space = address_space_limit();
    let of_groups = of_groups.into_iter().map(|group| group.text);
    let all: Vec<_> = of_space.into_iter().chain(of_user).chain(of_groups).collect();
    if all.is_empty() {
        let text = "the limit of the machine is reached: see `sysctl kernel.threads-max kernel.pid_max vm.max_map_count`";
        return Some(text.to_owned());
    }
    Some(all.join("; or "))
}

/// Describes the limit of the address space and how to raise it; `None` if there is no limit.
pub fn address_space_limit() -> Option<String> {
    ADDRESS_SPACE.text("process", address_space_bytes())
}

/// Returns whether a limit leaves less than `bytes` bytes of address space.
pub(super) fn lacks_address_space(bytes: u64) -> bool {
    // Without a limit nothing is read.
    ADDRESS_SPACE.value().is_some_and(|limit| {
        address_space_bytes().is_some_and(|used| used.saturating_add(bytes) > limit)
    })
}

fn address_space_bytes() -> Option<u64> {
    let text = fs::read_to_string("/proc/self/statm").ok()?;
    text.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(PAGE_BYTES)
}

/// Checks that a file, such as shared memory, may have `bytes` bytes. The kernel answers a larger
/// size with the signal `SIGXFSZ`, which ends the process.
///
/// # Errors
/// Returns [`Errno::FBIG`] if the limit is smaller.
pub fn check_file_bytes(bytes: u64) -> Result<(), Errno> {
    match FILE.value() {
        Some(limit) if bytes > limit => Err(Errno::FBIG),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use rustix::process::{Rlimit, setrlimit};

    use super::super::SystemError;
    use super::*;

    #[test]
    fn the_limits_that_keep_a_thread_from_starting_are_named() {
        let text = limit_of_threads(0).unwrap();
        let expected = ["`ulimit -u`", "pids.max", "kernel.threads-max"];
        assert!(expected.iter().any(|name| text.contains(name)), "{text}");
    }

    #[test]
    fn the_used_address_space_is_read() {
        assert!(address_space_bytes().unwrap() > PAGE_BYTES);
        // Without a limit, everything fits.
        assert_eq!(lacks_address_space(u64::MAX), ADDRESS_SPACE.value().is_some());

        // One that is not used up any more.
        let before = getrlimit(Resource::As);
        setrlimit(Resource::As, Rlimit { current: Some(1 << 46), maximum: before.maximum })
            .unwrap();
        let error = SystemError::of_thread("cannot start a thread", Errno::NOMEM);
        setrlimit(Resource::As, before).unwrap();
        assert!(error.to_string().contains("`ulimit -v`"), "{error}");
    }

    #[test]
    fn a_file_of_no_bytes_is_in_any_limit() {
        assert_eq!(check_file_bytes(0), Ok(()));
    }
}
