//! Holds the session of each device, which is its primary context.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use super::code::{DEVICE_UNAVAILABLE, INVALID_CONTEXT, Outcome};
use crate::device::fault::Fault;
use crate::device::machine::{Claim, memory};
use crate::device::session::Session;
use crate::device::settings::{DEVICES_MAX, Setting};
use crate::device::sync::lock;

#[derive(Debug)]
struct Primary {
    users: u32,
    session: Option<Arc<Session>>,
    /// In exclusive mode.
    claim: Option<Claim>,
}

static PRIMARIES: [Mutex<Primary>; DEVICES_MAX] =
    [const { Mutex::new(Primary { users: 0, session: None, claim: None }) }; DEVICES_MAX];

/// The handles of primary contexts: those of a device never change, as with the vendors.
const FIRST_HANDLE: usize = 0x50_0000_1000;
const HANDLE_STEP: usize = 0x1000;

impl Primary {
    fn begin(&mut self, physical: u32) -> Outcome {
        if Setting::ComputeMode.is("prohibited") {
            return Err(DEVICE_UNAVAILABLE);
        }
        if Setting::ComputeMode.is("exclusive") && self.claim.is_none() {
            self.claim = Some(Claim::take(physical).ok_or(DEVICE_UNAVAILABLE)?);
        }
        Ok(())
    }
}

pub(crate) fn handle_of(physical: u32) -> usize {
    FIRST_HANDLE + physical as usize * HANDLE_STEP
}

/// Contexts that are not primary, by their handles.
static SECOND_CONTEXTS: Mutex<BTreeMap<usize, Arc<Session>>> = Mutex::new(BTreeMap::new());
const FIRST_SECOND_HANDLE: usize = 0x60_0000_1000;

/// Creates a second context of the device, with its own queues.
pub(crate) fn create(physical: u32) -> Outcome<usize> {
    session(physical).ok_or(INVALID_CONTEXT)?;
    let mut contexts = lock(&SECOND_CONTEXTS);
    let handle =
        contexts.last_key_value().map_or(FIRST_SECOND_HANDLE, |(last, _)| last + HANDLE_STEP);
    contexts.insert(handle, Session::begin(physical));
    Ok(handle)
}

/// Ends a context that [`create`] has made.
pub(crate) fn destroy(context: usize) -> Outcome {
    let ended = lock(&SECOND_CONTEXTS).remove(&context).ok_or(INVALID_CONTEXT)?;
    ended.end(memory());
    Ok(())
}

/// The session behind a context's handle, working or not.
pub(crate) fn by_handle(context: usize) -> Outcome<Arc<Session>> {
    if let Some(session) = lock(&SECOND_CONTEXTS).get(&context) {
        return Ok(Arc::clone(session));
    }
    let offset = context.checked_sub(FIRST_HANDLE).ok_or(INVALID_CONTEXT)?;
    let device = PRIMARIES.get(offset / HANDLE_STEP).ok_or(INVALID_CONTEXT)?;
    let known = offset.is_multiple_of(HANDLE_STEP);
    lock(device).session.clone().filter(|_| known).ok_or(INVALID_CONTEXT)
}

/// The session that a device has open, working or not.
pub(crate) fn session(physical: u32) -> Option<Arc<Session>> {
    lock(PRIMARIES.get(physical as usize)?).session.clone()
}

/// Opens the device for one more user. A session that is retained, with another that was destroyed
/// under its users, is made anew.
pub(crate) fn retain(physical: u32) -> Outcome {
    let mut primary = lock(&PRIMARIES[physical as usize]);
    primary.begin(physical)?;
    primary.users += 1;
    let gone = |session: &Arc<Session>| session.fault() == Some(Fault::Gone);
    if primary.session.as_ref().is_none_or(gone) {
        primary.session = Some(Session::begin(physical));
    }
    Ok(())
}

/// Opens the device for the rest of the process, if it is not open.
pub(crate) fn open(physical: u32) -> Outcome<Arc<Session>> {
    let mut primary = lock(&PRIMARIES[physical as usize]);
    if let Some(session) = &primary.session {
        return Ok(session.clone());
    }
    primary.begin(physical)?;
    let session = Session::begin(physical);
    primary.users += 1;
    primary.session = Some(session.clone());
    Ok(session)
}

/// Closes it for one user; with the last one the session ends.
pub(crate) fn release(physical: u32) -> Outcome {
    let mut primary = lock(&PRIMARIES[physical as usize]);
    primary.users = primary.users.checked_sub(1).ok_or(INVALID_CONTEXT)?;
    if primary.users == 0 {
        primary.claim = None;
        // Under the lock, so that a new session never finds memory that is about to go.
        if let Some(session) = primary.session.take() {
            session.end(memory());
        }
    }
    Ok(())
}
