//! Calls of other libraries that may wait for peers without a deadline of their own.

use std::io::Write;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use crate::error::{Failure, Result};

/// Does `work`, and ends this process with an error if that takes longer than `timeout`: such a call
/// cannot be interrupted, and peers must not wait for this rank for ever.
///
/// # Errors
/// That of `work`.
pub(super) fn bounded<T>(
    what: &'static str,
    timeout: Duration,
    work: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let (done, waits) = channel::<()>();
    let guard = move || {
        if waits.recv_timeout(timeout) == Err(RecvTimeoutError::Timeout) {
            let failure = Failure::failed(format!("{what} took longer than {timeout:?}"))
                .with_advice("see whether all ranks run; raise --timeout if they are slow");
            // A closed standard error leaves nobody to tell.
            writeln!(std::io::stderr(), "{failure}").ok();
            std::io::stdout().flush().ok();
            end();
        }
    };
    let guard = thread::Builder::new()
        .name("guard".to_owned())
        .spawn(guard)
        .map_err(|error| Failure::io("cannot start a thread", &error))?;
    let result = work();
    drop(done);
    // It cannot panic, and ends as soon as the channel is closed.
    guard.join().ok();
    result
}

/// Ends this process, and calls nobody: exit handlers of a library would run under the feet of the
/// call that hangs in it, and NCCL's have ended in a segmentation fault there.
fn end() -> ! {
    // SAFETY: the call takes nothing and does not return; the kernel closes what is open.
    unsafe { libc::_exit(1) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ends_in_time_gives_its_result() {
        let long = Duration::from_secs(60);
        assert_eq!(bounded("nothing", long, || Ok(7)), Ok(7));
        let failure = Failure::failed("refused");
        assert_eq!(bounded("nothing", long, || Err::<(), _>(failure.clone())), Err(failure));
    }
}
