//! What the faces differ in.

use std::ffi::c_int;
use std::sync::Arc;

use super::code::{INVALID_DEVICE, Outcome};
use crate::device::session::Session;

/// One vendor's runtime.
pub(crate) trait Face {
    /// The devices that this process sees, numbered as the machine does, in the order of ordinals;
    /// an error before the driver was started.
    fn visible() -> Outcome<&'static [u32]>;

    /// The session that a call of this thread is about, if it still works.
    fn current() -> Outcome<Arc<Session>>;

    /// Whether a call that names a stream, an event or memory may be made from this thread.
    fn ready() -> Outcome;

    /// The device behind an ordinal, numbered as the machine does.
    fn physical(ordinal: c_int) -> Outcome<u32> {
        let place = usize::try_from(ordinal).map_err(|_| INVALID_DEVICE)?;
        Self::visible()?.get(place).copied().ok_or(INVALID_DEVICE)
    }

    /// The ordinal of a device here; `None` if this process does not see it.
    fn ordinal(physical: u32) -> Option<c_int> {
        let place = Self::visible().ok()?.iter().position(|device| *device == physical)?;
        c_int::try_from(place).ok()
    }
}
