//! Implements the sharing of plain allocations between processes, by a handle of 64 bytes.

use std::collections::BTreeMap;
use std::ffi::c_uint;
use std::sync::{Arc, Mutex};

use super::Api;
use super::call::refuse_during_capture;
use super::code::{INVALID_VALUE, NOT_SUPPORTED, Outcome, PEER_ACCESS_UNSUPPORTED};
use super::out::Out;
use crate::device::machine::memory;
use crate::device::memory::share::{self, NAME_BYTES};
use crate::device::memory::{Kind, Range};
use crate::device::session::Session;
use crate::device::settings::{Setting, reaches};
use crate::device::sync::lock;

/// The only flag; a handle cannot be opened without it.
const LAZY_ENABLE_PEER_ACCESS: c_uint = 1;

/// A handle, in the layout of both vendors.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Handle(pub(crate) [u8; NAME_BYTES]);

/// An allocation that is open in a session.
#[derive(Clone, Copy, Debug)]
struct Opened {
    base: u64,
    times: u32,
}

/// Open allocations, by session and allocation.
static OPEN: Mutex<BTreeMap<(u64, u128), Opened>> = Mutex::new(BTreeMap::new());

/// Returns the plain allocation that holds the address, if it can be shared.
pub(crate) fn shared<A: Api>(address: u64) -> Outcome<Arc<Range>> {
    A::current()?;
    if Setting::LegacyShare.is("off") {
        return Err(NOT_SUPPORTED);
    }
    let range = memory().find(address).ok_or(INVALID_VALUE)?;
    if matches!(range.kind, Kind::Plain { .. }) { Ok(range) } else { Err(INVALID_VALUE) }
}

/// Opens a shared allocation, and stores the address `offset` bytes after its base.
pub(crate) fn open<A: Api>(
    out: Out<'_, u64>,
    handle: &Handle,
    flags: c_uint,
    offset: u64,
) -> Outcome {
    let session = A::current()?;
    refuse_during_capture()?;
    if flags != LAZY_ENABLE_PEER_ACCESS {
        return Err(INVALID_VALUE);
    }
    let place = out.ok_or(INVALID_VALUE)?;
    place.write(open_in(&session, handle)? + offset);
    Ok(())
}

/// Opens a shared allocation in a session. A second open returns the same address.
fn open_in(session: &Session, handle: &Handle) -> Outcome<u64> {
    let mut open = lock(&OPEN);
    // An allocation that ended with its session, or was freed by its owner, is no longer open.
    open.retain(|_, opened| memory().find(opened.base).is_some());
    let key = (session.id(), share::token(&handle.0));
    if let Some(opened) = open.get_mut(&key) {
        opened.times += 1;
        return Ok(opened.base);
    }
    let backing = share::open(&handle.0)?;
    if !reaches(session.device(), backing.identity().device) {
        return Err(PEER_ACCESS_UNSUPPORTED);
    }
    let kind = Kind::Imported { session: session.id(), by: session.device() };
    let base = memory().import(backing, kind)?;
    open.insert(key, Opened { base, times: 1 });
    Ok(base)
}

/// Closes an open allocation, selected by its base.
pub(crate) fn close<A: Api>(is_it: impl Fn(u64) -> bool) -> Outcome {
    A::ready()?;
    refuse_during_capture()?;
    let mut open = lock(&OPEN);
    let mut entries = open.iter_mut();
    let (key, opened) = entries.find(|(_, opened)| is_it(opened.base)).ok_or(INVALID_VALUE)?;
    opened.times -= 1;
    if opened.times == 0 {
        let (key, base) = (*key, opened.base);
        open.remove(&key);
        memory().remove(base, |range| matches!(range.kind, Kind::Imported { .. }))?;
    }
    Ok(())
}
