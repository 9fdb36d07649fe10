//! Contexts: the primary one of each device, counted, and which is current on a thread.

use std::cell::RefCell;
use std::ffi::{c_int, c_uint};
use std::sync::Arc;

use super::Cuda;
use super::types::{CUcontext, CUdevice, CUresult};
use crate::device::session::Session;
use crate::device::settings::reaches;
use crate::runtime::call::enter;
use crate::runtime::code::{
    INVALID_CONTEXT, INVALID_DEVICE, INVALID_VALUE, Outcome, PEER_ACCESS_ALREADY_ENABLED,
    PEER_ACCESS_NOT_ENABLED, PEER_ACCESS_UNSUPPORTED,
};
use crate::runtime::out::{Out, store};
use crate::runtime::primary::{self, by_handle};
use crate::runtime::{Face, stream};

thread_local! {
    static STACK: RefCell<Vec<CUcontext>> = const { RefCell::new(Vec::new()) };
}

fn current_handle() -> Option<CUcontext> {
    STACK.with_borrow(|stack| stack.last().copied()).filter(|context| *context != 0)
}

/// The session of the current context, if it still works.
pub(super) fn current() -> Outcome<Arc<Session>> {
    Cuda::visible()?;
    let session = by_handle(current_handle().ok_or(INVALID_CONTEXT)?)?;
    session.fault().map_or(Ok(session.clone()), |fault| Err(fault.into()))
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRetain(context: Out<'_, CUcontext>, device: CUdevice) -> CUresult {
    enter("cuDevicePrimaryCtxRetain", || {
        let physical = Cuda::physical(device)?;
        primary::retain(physical)?;
        store(context, primary::handle_of(physical))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRelease_v2(device: CUdevice) -> CUresult {
    enter("cuDevicePrimaryCtxRelease_v2", || primary::release(Cuda::physical(device)?))
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxGetState(
    device: CUdevice,
    flags: Out<'_, c_uint>,
    active: Out<'_, c_int>,
) -> CUresult {
    enter("cuDevicePrimaryCtxGetState", || {
        let open = primary::session(Cuda::physical(device)?).is_some();
        store(flags, 0)?;
        store(active, c_int::from(open))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxGetCurrent(context: Out<'_, CUcontext>) -> CUresult {
    enter("cuCtxGetCurrent", || {
        Cuda::visible()?;
        store(context, current_handle().unwrap_or(0))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetCurrent(context: CUcontext) -> CUresult {
    enter("cuCtxSetCurrent", || {
        Cuda::visible()?;
        if context != 0 {
            by_handle(context)?;
        }
        STACK.with_borrow_mut(|stack| {
            stack.pop();
            stack.push(context);
        });
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxPushCurrent_v2(context: CUcontext) -> CUresult {
    enter("cuCtxPushCurrent_v2", || {
        by_handle(context)?;
        STACK.with_borrow_mut(|stack| stack.push(context));
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxPopCurrent_v2(context: Out<'_, CUcontext>) -> CUresult {
    enter("cuCtxPopCurrent_v2", || {
        let popped = STACK.with_borrow_mut(Vec::pop).ok_or(INVALID_CONTEXT)?;
        if context.is_some() { store(context, popped) } else { Ok(()) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxGetDevice(device: Out<'_, CUdevice>) -> CUresult {
    enter("cuCtxGetDevice", || {
        store(device, Cuda::ordinal(current()?.device()).ok_or(INVALID_DEVICE)?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxGetStreamPriorityRange(
    least: Out<'_, c_int>,
    greatest: Out<'_, c_int>,
) -> CUresult {
    enter("cuCtxGetStreamPriorityRange", || {
        current()?;
        store(least, 0)?;
        store(greatest, -5)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetFlags(_flags: c_uint) -> CUresult {
    enter("cuCtxSetFlags", || current().map(|_| ()))
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSynchronize() -> CUresult {
    enter("cuCtxSynchronize", stream::synchronize_all::<Cuda>)
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxEnablePeerAccess(peer: CUcontext, flags: c_uint) -> CUresult {
    enter("cuCtxEnablePeerAccess", || {
        let (own, peer) = (current()?, by_handle(peer)?);
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        if own.device() == peer.device() {
            return Err(INVALID_DEVICE);
        }
        if !reaches(own.device(), peer.device()) {
            return Err(PEER_ACCESS_UNSUPPORTED);
        }
        if own.reach(peer.device(), true) { Ok(()) } else { Err(PEER_ACCESS_ALREADY_ENABLED) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxDisablePeerAccess(peer: CUcontext) -> CUresult {
    enter("cuCtxDisablePeerAccess", || {
        let (own, peer) = (current()?, by_handle(peer)?);
        if own.reach(peer.device(), false) { Ok(()) } else { Err(PEER_ACCESS_NOT_ENABLED) }
    })
}
