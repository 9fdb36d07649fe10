//! Runs functions in forked children.

use std::io::Error;
use std::thread;
use std::time::{Duration, Instant};

/// How long a child may run.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Runs `body` in a forked child, and returns whether it ended well and within 20 s.
///
/// The child has the memory of this process but only one thread, so `body` uses what the calling thread owns.
///
/// # Panics
/// If there is no room for a process.
pub fn ends_in_child(body: impl FnOnce()) -> bool {
    // SAFETY: the child uses what this thread owns, and ends without destructors of the process.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "{}", Error::last_os_error());
    if child == 0 {
        body();
        // SAFETY: it ends the process at once.
        unsafe { libc::_exit(0) };
    }

    let (begun, mut status) = (Instant::now(), 0);
    loop {
        // SAFETY: the child belongs to this process, and the status outlives the call.
        match unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } {
            0 if begun.elapsed() < TIMEOUT => thread::sleep(Duration::from_millis(5)),
            0 => {
                // SAFETY: as above.
                unsafe { libc::kill(child, libc::SIGKILL) };
                return false;
            }
            ended => return ended == child && status == 0,
        }
    }
}
