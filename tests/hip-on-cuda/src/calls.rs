//! Exports a function of HIP that calls one of the CUDA driver.

use hip_sys::hipError_t;

use crate::cuda::{CUresult, Cuda, cuda};
use crate::device;
use crate::result::{NO_DEVICE, remembered};

/// Functions of HIP, each with the type that the table of `hip-sys` has for it. A body is a call of the
/// driver, or any expression of its result, with the driver and the thread's device current.
macro_rules! hip {
    ($(fn $name:ident($($argument:ident: $type:ty),* $(,)?) = |$cuda:ident| $body:expr;)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($argument: $type),*) -> hip_sys::hipError_t {
            crate::calls::forward(|$cuda| {
                // SAFETY: the caller keeps the rules of HIP's function, which are those of the
                // driver's.
                unsafe { $body }
            })
        }
        const _: hip_sys::$name = $name;
    )*};
}

pub(crate) use hip;

/// Calls the driver with the thread's device current; without a driver there is no device.
pub(crate) fn forward(call: impl FnOnce(&'static Cuda) -> CUresult) -> hipError_t {
    let result = match cuda() {
        None => NO_DEVICE,
        Some(cuda) => match device::make_current(cuda) {
            Ok(()) => call(cuda),
            Err(refusal) => refusal,
        },
    };
    remembered(result)
}
