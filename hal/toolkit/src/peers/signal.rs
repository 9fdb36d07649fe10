//! How signals get to peers, as trials have shown.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, PoisonError};

use crate::streams::SignalBy;
use peerlane_hal::BackendId;

/// Two devices, by their UUIDs; their backend.
pub(super) type Pair = (BackendId, [u8; 16], [u8; 16]);

static TRIED: LazyLock<Mutex<HashMap<Pair, SignalBy>>> = LazyLock::new(Mutex::default);

/// What a trial has shown between two devices, or shows now.
pub(super) fn tried<E>(
    pair: Pair,
    trial: impl FnOnce() -> Result<SignalBy, E>,
) -> Result<SignalBy, E> {
    let lock = || TRIED.lock().unwrap_or_else(PoisonError::into_inner);
    let known = lock().get(&pair).copied();
    // Not under the lock: a trial may take its time.
    match known {
        Some(signal) => Ok(signal),
        None => {
            let signal = trial()?;
            lock().insert(pair, signal);
            Ok(signal)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trial_that_showed_something_is_made_once_for_a_pair() {
        let pair = |other| (BackendId(0x8002), [1; 16], [other; 16]);
        assert_eq!(tried(pair(2), || Err("nothing arrives")), Err("nothing arrives"));
        assert_eq!(tried(pair(2), || Ok::<_, &str>(SignalBy::Copy)), Ok(SignalBy::Copy));
        assert_eq!(tried(pair(2), || -> Result<_, &str> { panic!("known") }), Ok(SignalBy::Copy));
        let stream = tried(pair(3), || Ok::<_, &str>(SignalBy::StreamWrite));
        assert_eq!(stream, Ok(SignalBy::StreamWrite));
    }
}
