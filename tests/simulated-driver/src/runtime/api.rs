//! Describes in what the vendors' APIs differ.

use std::ffi::{c_int, c_uint};
use std::sync::Arc;

use super::call;
use super::code::{INVALID_DEVICE, Outcome, Status};
use crate::device::session::Session;

/// A vendor's API over the simulated devices.
pub(crate) trait Api {
    /// Flags that the creation of an event accepts.
    const EVENT_FLAGS: c_uint;
    /// Flags that the allocation of pinned host memory accepts.
    const HOST_FLAGS: c_uint;
    /// Flags that the registration of host memory accepts.
    const REGISTER_FLAGS: c_uint;
    /// Number of the first attribute of a pair of devices, its performance rank.
    const P2P_PERFORMANCE_RANK: c_int;
    /// Whether the branches of a running graph take the channels of its context, as on an H200 (docs/perf/cuda-release.md).
    const BRANCHES_TAKE_CHANNELS: bool;

    /// Returns the devices that this process sees, by ordinal, as the machine numbers them. Fails
    /// before the driver was started.
    fn visible() -> Outcome<&'static [u32]>;

    /// Returns the session that a call of this thread uses, if it still works.
    fn current() -> Outcome<Arc<Session>>;

    /// Fails if a call that names a stream, an event or memory may not be made from this thread.
    fn ready() -> Outcome;

    /// Returns an attribute of a device, by the vendor's number; 0 for one that is not simulated.
    fn attribute(physical: u32, attribute: c_int) -> Outcome<u64>;

    /// Runs the body of a call, unless a test lets it fail, and returns its result.
    fn enter(name: &'static str, body: impl FnOnce() -> Outcome) -> Status {
        call::enter(name, body)
    }

    /// Returns the device of an ordinal, as the machine numbers it.
    fn physical(ordinal: c_int) -> Outcome<u32> {
        let index = usize::try_from(ordinal).map_err(|_| INVALID_DEVICE)?;
        Self::visible()?.get(index).copied().ok_or(INVALID_DEVICE)
    }

    /// Returns the ordinal of a device, or `None` if this process does not see it.
    fn ordinal(physical: u32) -> Option<c_int> {
        let index = Self::visible().ok()?.iter().position(|device| *device == physical)?;
        c_int::try_from(index).ok()
    }
}
