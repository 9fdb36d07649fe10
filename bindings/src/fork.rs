//! Detects that a process was forked from one that uses Peerlane.

use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

use peerlane::{Error, ErrorKind};

static IN_CHILD: AtomicBool = AtomicBool::new(false);

extern "C" fn enter_child() {
    IN_CHILD.store(true, Ordering::Relaxed);
}

/// Refuses calls in a process that was forked after the first call of this function.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] in a forked child.
pub fn check_process() -> Result<(), Error> {
    static WATCH_FORKS: Once = Once::new();
    WATCH_FORKS.call_once(|| {
        // SAFETY: the handler only stores a flag. If it cannot be registered, forked children are
        // not told apart.
        unsafe { libc::pthread_atfork(None, None, Some(enter_child)) };
    });
    if IN_CHILD.load(Ordering::Relaxed) {
        let text = "this process was forked from one that uses Peerlane; use Peerlane in the parent, or after `exec`";
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    Ok(())
}
