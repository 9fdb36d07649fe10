//! Starts the driver, and keeps its contexts: the primary one of each device, and the current one of
//! each thread.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int, c_uint};
use std::sync::{Arc, OnceLock};

use super::Cuda;
use crate::calls::calls;
use crate::device::session::Session;
use crate::device::settings::{Setting, reaches};
use crate::runtime::Api;
use crate::runtime::call::enter;
use crate::runtime::code::{
    INVALID_CONTEXT, INVALID_DEVICE, INVALID_VALUE, NO_DEVICE, NOT_INITIALIZED, Outcome,
    PEER_ACCESS_ALREADY_ENABLED, PEER_ACCESS_NOT_ENABLED, PEER_ACCESS_UNSUPPORTED, Status, UNKNOWN,
    cuda_words,
};
use crate::runtime::out::{Out, store};
use crate::runtime::pci;
use crate::runtime::primary::{self, by_handle};
use crate::runtime::start::{read_environment, variable};
use crate::runtime::visible::parse;

/// Devices that this process sees, by ordinal, as the machine numbers them.
static VISIBLE: OnceLock<Vec<u32>> = OnceLock::new();

/// Returns [`VISIBLE`]. Fails before the driver was started.
pub(super) fn visible() -> Outcome<&'static [u32]> {
    VISIBLE.get().map(Vec::as_slice).ok_or(NOT_INITIALIZED)
}

fn start() -> Outcome {
    static STARTED: OnceLock<Outcome> = OnceLock::new();
    *STARTED.get_or_init(|| {
        read_environment()?;
        let count = u32::try_from(Setting::Devices.value()).map_err(|_| UNKNOWN)?;
        let devices: Vec<u32> = (0..count).collect();
        let selection = variable("CUDA_VISIBLE_DEVICES");
        let visible = parse(selection.as_deref(), &devices, pci::uuid_text);
        if visible.is_empty() {
            return Err(NO_DEVICE);
        }
        VISIBLE.get_or_init(|| visible);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuInit(flags: c_uint) -> Status {
    // Starts first, because the environment that `start` reads may name this call as one that fails.
    let started = start();
    enter("cuInit", || if flags == 0 { started } else { Err(INVALID_VALUE) })
}

calls! {
    [Cuda cuDriverGetVersion](version: Out<'_, c_int>) => {
        let number = c_int::try_from(Setting::DriverVersion.value()).map_err(|_| UNKNOWN)?;
        store(version, number)
    };
    [Cuda cuGetErrorName](code: Status, text: Out<'_, *const c_char>) =>
        store_words(cuda_words(code).map(|(name, _)| name), text);
    [Cuda cuGetErrorString](code: Status, text: Out<'_, *const c_char>) =>
        store_words(cuda_words(code).map(|(_, words)| words), text);
}

fn store_words(words: Option<&'static CStr>, text: Out<'_, *const c_char>) -> Outcome {
    store(text, words.map_or(std::ptr::null(), CStr::as_ptr))?;
    words.map(|_| ()).ok_or(INVALID_VALUE)
}

type Context = usize;

thread_local! {
    static STACK: RefCell<Vec<Context>> = const { RefCell::new(Vec::new()) };
}

fn current_handle() -> Option<Context> {
    STACK.with_borrow(|stack| stack.last().copied()).filter(|context| *context != 0)
}

/// Returns the session of the current context, if it still works.
pub(super) fn current() -> Outcome<Arc<Session>> {
    Cuda::visible()?;
    let session = by_handle(current_handle().ok_or(INVALID_CONTEXT)?)?;
    session.fault().map_or(Ok(session.clone()), |fault| Err(fault.into()))
}

calls! {
    [Cuda cuDevicePrimaryCtxRetain](context: Out<'_, Context>, device: c_int) => {
        let physical = Cuda::physical(device)?;
        primary::retain(physical)?;
        store(context, primary::handle_of(physical))
    };
    [Cuda cuDevicePrimaryCtxRelease_v2](device: c_int) =>
        primary::release(Cuda::physical(device)?);
    [Cuda cuDevicePrimaryCtxGetState](
        device: c_int,
        flags: Out<'_, c_uint>,
        active: Out<'_, c_int>,
    ) => {
        let open = primary::session(Cuda::physical(device)?).is_some();
        store(flags, 0)?;
        store(active, c_int::from(open))
    };
    [Cuda cuCtxGetCurrent](context: Out<'_, Context>) => {
        Cuda::visible()?;
        store(context, current_handle().unwrap_or(0))
    };
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetCurrent(context: Context) -> Status {
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

calls! {
    [Cuda cuCtxPushCurrent_v2](context: Context) => {
        by_handle(context)?;
        STACK.with_borrow_mut(|stack| stack.push(context));
        Ok(())
    };
    [Cuda cuCtxCreate_v2](context: Out<'_, Context>, _flags: c_uint, device: c_int) => {
        let created = primary::create(Cuda::physical(device)?)?;
        STACK.with_borrow_mut(|stack| stack.push(created));
        store(context, created)
    };
    [Cuda cuCtxDestroy_v2](context: Context) => primary::destroy(context);
    [Cuda cuCtxPopCurrent_v2](context: Out<'_, Context>) => {
        let popped = STACK.with_borrow_mut(Vec::pop).ok_or(INVALID_CONTEXT)?;
        if context.is_some() { store(context, popped) } else { Ok(()) }
    };
    [Cuda cuCtxGetDevice](device: Out<'_, c_int>) =>
        store(device, Cuda::ordinal(current()?.device()).ok_or(INVALID_DEVICE)?);
    [Cuda cuCtxGetStreamPriorityRange](least: Out<'_, c_int>, greatest: Out<'_, c_int>) => {
        current()?;
        store(least, 0)?;
        store(greatest, -5)
    };
    [Cuda cuCtxSetFlags](_flags: c_uint) => current().map(|_| ());
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxEnablePeerAccess(peer: Context, flags: c_uint) -> Status {
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

calls! {
    [Cuda cuCtxDisablePeerAccess](peer: Context) => {
        let (own, peer) = (current()?, by_handle(peer)?);
        if own.reach(peer.device(), false) { Ok(()) } else { Err(PEER_ACCESS_NOT_ENABLED) }
    };
}
