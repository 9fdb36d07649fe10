//! Contexts: the primary one of each device, counted, and which is current on a thread.

use std::cell::RefCell;
use std::ffi::{c_int, c_uint};
use std::sync::{Arc, Mutex};

use super::call::{enter, refuse_during_capture};
use super::code::{
    CUresult, DEVICE_UNAVAILABLE, INVALID_CONTEXT, INVALID_DEVICE, INVALID_VALUE, Outcome,
    PEER_ACCESS_ALREADY_ENABLED, PEER_ACCESS_NOT_ENABLED, PEER_ACCESS_UNSUPPORTED,
};
use super::device::{ordinal, physical};
use super::types::{CUcontext, CUdevice, Out, store};
use crate::device::fault::Fault;
use crate::device::machine::{Claim, memory};
use crate::device::session::Session;
use crate::device::settings::{DEVICES_MAX, Setting, reaches};
use crate::device::sync::lock;

/// The primary context of one device.
#[derive(Debug)]
struct Primary {
    users: u32,
    session: Option<Arc<Session>>,
    /// In exclusive mode.
    claim: Option<Claim>,
}

static PRIMARIES: [Mutex<Primary>; DEVICES_MAX] =
    [const { Mutex::new(Primary { users: 0, session: None, claim: None }) }; DEVICES_MAX];

/// The handles of primary contexts: those of a device never change, as with the vendor.
const FIRST_HANDLE: CUcontext = 0x50_0000_1000;
const HANDLE_STEP: CUcontext = 0x1000;

thread_local! {
    static STACK: RefCell<Vec<CUcontext>> = const { RefCell::new(Vec::new()) };
}

pub(crate) fn handle_of(physical: u32) -> CUcontext {
    FIRST_HANDLE + physical as usize * HANDLE_STEP
}

/// The session behind a context's handle, working or not.
pub(crate) fn session(context: CUcontext) -> Outcome<Arc<Session>> {
    let offset = context.checked_sub(FIRST_HANDLE).ok_or(INVALID_CONTEXT)?;
    let device = PRIMARIES.get(offset / HANDLE_STEP).ok_or(INVALID_CONTEXT)?;
    let known = offset.is_multiple_of(HANDLE_STEP);
    lock(device).session.clone().filter(|_| known).ok_or(INVALID_CONTEXT)
}

fn current_handle() -> Option<CUcontext> {
    STACK.with_borrow(|stack| stack.last().copied()).filter(|context| *context != 0)
}

/// The session of the current context, if it still works.
pub(crate) fn current() -> Outcome<Arc<Session>> {
    super::init::visible()?;
    let session = session(current_handle().ok_or(INVALID_CONTEXT)?)?;
    session.fault().map_or(Ok(session.clone()), |fault| Err(fault.into()))
}

/// The session that a device has open, for tests that break it.
pub(crate) fn session_of(physical: u32) -> Option<Arc<Session>> {
    lock(PRIMARIES.get(physical as usize)?).session.clone()
}

/// A context that is retained, with another that was destroyed under its users, is made anew.
fn retain(physical: u32) -> Outcome {
    let mut primary = lock(&PRIMARIES[physical as usize]);
    if Setting::ComputeMode.is("prohibited") {
        return Err(DEVICE_UNAVAILABLE);
    }
    if Setting::ComputeMode.is("exclusive") && primary.claim.is_none() {
        primary.claim = Some(Claim::take(physical).ok_or(DEVICE_UNAVAILABLE)?);
    }
    primary.users += 1;
    let gone = |session: &Arc<Session>| session.fault() == Some(Fault::Gone);
    if primary.session.as_ref().is_none_or(gone) {
        primary.session = Some(Session::begin(physical));
    }
    Ok(())
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRetain(context: Out<'_, CUcontext>, device: CUdevice) -> CUresult {
    enter("cuDevicePrimaryCtxRetain", || {
        let physical = physical(device)?;
        retain(physical)?;
        store(context, handle_of(physical))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRelease_v2(device: CUdevice) -> CUresult {
    enter("cuDevicePrimaryCtxRelease_v2", || {
        let mut primary = lock(&PRIMARIES[physical(device)? as usize]);
        primary.users = primary.users.checked_sub(1).ok_or(INVALID_CONTEXT)?;
        if primary.users == 0 {
            primary.claim = None;
            let ended = primary.session.take();
            drop(primary);
            if let Some(session) = ended {
                session.end(memory());
            }
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxGetState(
    device: CUdevice,
    flags: Out<'_, c_uint>,
    active: Out<'_, c_int>,
) -> CUresult {
    enter("cuDevicePrimaryCtxGetState", || {
        let primary = lock(&PRIMARIES[physical(device)? as usize]);
        store(flags, 0)?;
        store(active, c_int::from(primary.session.is_some()))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxGetCurrent(context: Out<'_, CUcontext>) -> CUresult {
    enter("cuCtxGetCurrent", || {
        super::init::visible()?;
        store(context, current_handle().unwrap_or(0))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetCurrent(context: CUcontext) -> CUresult {
    enter("cuCtxSetCurrent", || {
        super::init::visible()?;
        if context != 0 {
            session(context)?;
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
        session(context)?;
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
    enter("cuCtxGetDevice", || store(device, ordinal(current()?.device()).ok_or(INVALID_DEVICE)?))
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
    enter("cuCtxSynchronize", || {
        let session = current()?;
        refuse_during_capture()?;
        for queue in session.queues() {
            queue.refuse_while_capturing()?;
            queue.drain()?;
        }
        session.fault().map_or(Ok(()), |fault| Err(fault.into()))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxEnablePeerAccess(peer: CUcontext, flags: c_uint) -> CUresult {
    enter("cuCtxEnablePeerAccess", || {
        let (own, peer) = (current()?, session(peer)?);
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
        let (own, peer) = (current()?, session(peer)?);
        if own.reach(peer.device(), false) { Ok(()) } else { Err(PEER_ACCESS_NOT_ENABLED) }
    })
}
