//! Plain allocations shared between processes, by a handle of 64 bytes.

use std::collections::BTreeMap;
use std::ffi::c_uint;
use std::sync::Mutex;

use super::call::{enter, refuse_during_capture};
use super::code::{CUresult, INVALID_VALUE, NOT_SUPPORTED, Outcome, PEER_ACCESS_UNSUPPORTED};
use super::context;
use super::types::{CUdeviceptr, CUipcMemHandle, Out, store};
use crate::device::machine::memory;
use crate::device::memory::{Kind, share};
use crate::device::session::Session;
use crate::device::settings::{Setting, reaches};
use crate::device::sync::lock;

/// The only flag, without which a handle cannot be opened.
const LAZY_ENABLE_PEER_ACCESS: c_uint = 1;

/// What is open, by session and allocation: where, and how often.
static OPEN: Mutex<BTreeMap<(u64, u128), (CUdeviceptr, u32)>> = Mutex::new(BTreeMap::new());

#[unsafe(no_mangle)]
extern "C" fn cuIpcGetMemHandle(out: Out<'_, CUipcMemHandle>, address: CUdeviceptr) -> CUresult {
    enter("cuIpcGetMemHandle", || {
        context::current()?;
        if !Setting::LegacyShare.is_on() {
            return Err(NOT_SUPPORTED);
        }
        let range = memory().find(address).ok_or(INVALID_VALUE)?;
        if !matches!(range.kind, Kind::Plain { .. }) {
            return Err(INVALID_VALUE);
        }
        store(out, CUipcMemHandle(share::name(&range.backing)))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuIpcOpenMemHandle_v2(
    address: Out<'_, CUdeviceptr>,
    handle: CUipcMemHandle,
    flags: c_uint,
) -> CUresult {
    enter("cuIpcOpenMemHandle_v2", || {
        let session = context::current()?;
        refuse_during_capture()?;
        if flags != LAZY_ENABLE_PEER_ACCESS || address.is_none() {
            return Err(INVALID_VALUE);
        }
        store(address, open(&session, &handle)?)
    })
}

/// A context that opens a handle again gets the same address.
fn open(session: &Session, handle: &CUipcMemHandle) -> Outcome<CUdeviceptr> {
    let mut open = lock(&OPEN);
    // What ended with its session, or was freed by its owner, is not open any more.
    open.retain(|_, (address, _)| memory().find(*address).is_some());
    let key = (session.id(), share::token(&handle.0));
    if let Some((address, count)) = open.get_mut(&key) {
        *count += 1;
        return Ok(*address);
    }
    let backing = share::open(&handle.0)?;
    if !reaches(session.device(), backing.identity().device) {
        return Err(PEER_ACCESS_UNSUPPORTED);
    }
    let kind = Kind::Imported { session: session.id(), by: session.device() };
    let address = memory().import(backing, kind)?;
    open.insert(key, (address, 1));
    Ok(address)
}

#[unsafe(no_mangle)]
extern "C" fn cuIpcCloseMemHandle(address: CUdeviceptr) -> CUresult {
    enter("cuIpcCloseMemHandle", || {
        context::current()?;
        refuse_during_capture()?;
        let mut open = lock(&OPEN);
        let mut entries = open.iter_mut();
        let (key, (_, count)) =
            entries.find(|(_, (opened, _))| *opened == address).ok_or(INVALID_VALUE)?;
        *count -= 1;
        if *count == 0 {
            let key = *key;
            open.remove(&key);
            memory().remove(address, |range| matches!(range.kind, Kind::Imported { .. }))?;
        }
        Ok(())
    })
}
