//! CopyBatch of HIP.
//!
//! | between | the kind of `hipMemcpyAsync` |
//! | --- | --- |
//! | two places of this device, this device and a peer, a word and a flag | `hipMemcpyDeviceToDeviceNoCU`: SDMA engines and no compute units |
//! | the same, where a trial shows that such a copy copies nothing (ROCm/rocm-systems#11318), or the runtime is older than 6.0 | `hipMemcpyDeviceToDevice` |
//! | a device and the host | `hipMemcpyDefault`: SDMA engines by themselves |

use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};

use peerlane_toolkit::device::{
    Between, CopyBatch, CopyCalls, DeviceContext as _, DevicePtr, StreamHandle,
};

use super::queue::raw;
use crate::device::{Context, Version};
use crate::error::Error;
use crate::sys::hip::hipMemcpyKind as Kind;

/// The first release that knows copies without compute units.
const NO_CU_SINCE: Version = Version { major: 6, minor: 0, patch: 0 };

/// Devices whose copies without compute units copy nothing, a bit for each number.
static BROKEN: AtomicU64 = AtomicU64::new(0);

impl Context {
    /// Its bit; devices beyond the last one are not trusted.
    fn bit(&self) -> Option<u64> {
        u32::try_from(self.device()).ok().and_then(|number| 1_u64.checked_shl(number))
    }

    fn keeps_units_free(&self) -> bool {
        let sound = self.bit().is_some_and(|bit| BROKEN.load(Ordering::Relaxed) & bit == 0);
        sound && self.hip.version >= NO_CU_SINCE
    }

    fn kind(&self, between: Between) -> Kind {
        match between {
            Between::Host => Kind::hipMemcpyDefault,
            Between::Own | Between::Peers | Between::Flags if self.keeps_units_free() => {
                Kind::hipMemcpyDeviceToDeviceNoCU
            }
            Between::Own | Between::Peers | Between::Flags => Kind::hipMemcpyDeviceToDevice,
        }
    }
}

impl CopyCalls for Context {
    /// `hipMemcpyBatchAsync` names no kind of copy, so that it may take compute units.
    fn may_copy_together(&self) -> bool {
        false
    }

    fn needs_probe(&self, between: Between) -> bool {
        self.kind(between) == Kind::hipMemcpyDeviceToDeviceNoCU
    }

    fn record_probe(&self, _between: Between, works: bool) {
        if let (false, Some(bit)) = (works, self.bit()) {
            BROKEN.fetch_or(bit, Ordering::Relaxed);
        }
    }

    unsafe fn copy(
        &self,
        stream: StreamHandle,
        to: DevicePtr,
        from: DevicePtr,
        bytes: usize,
        between: Between,
    ) -> Result<(), Error> {
        let (to, from) = (to as *mut c_void, from as *const c_void);
        let (kind, stream) = (self.kind(between), raw(stream));
        // SAFETY: the caller's.
        let code = unsafe { (self.hip.calls.memcpy_async)(to, from, bytes, kind, stream) };
        let call = match between {
            Between::Flags => "hipMemcpyAsync of a signal",
            _ => "hipMemcpyAsync",
        };
        self.check(call, code)
    }

    /// Never asked for, see [`may_copy_together`](Self::may_copy_together); one by one all the same.
    unsafe fn copy_together(
        &self,
        stream: StreamHandle,
        copies: CopyBatch<'_>,
    ) -> Result<(), Error> {
        for ((to, from), bytes) in copies.to.iter().zip(&*copies.from).zip(&*copies.bytes) {
            // SAFETY: the caller's.
            unsafe { self.copy(stream, *to, *from, *bytes, Between::Peers) }?;
        }
        Ok(())
    }

    unsafe fn clear(
        &self,
        stream: StreamHandle,
        address: DevicePtr,
        bytes: usize,
    ) -> Result<(), Error> {
        let at = address as *mut c_void;
        // SAFETY: the caller's.
        let code = unsafe { (self.hip.calls.memset_d8_async)(at, 0, bytes, raw(stream)) };
        self.check("hipMemsetD8Async", code)
    }
}
