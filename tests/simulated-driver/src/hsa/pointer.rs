//! Exports the attributes of addresses.

use std::ffi::{c_int, c_void};

use super::agent::Agent;
use super::call::enter;
use super::memory::owner;
use super::status::{INVALID_ARGUMENT, OUT_OF_RESOURCES, Outcome};
use super::types::{hsa_agent_t, hsa_amd_pointer_info_t, hsa_status_t};
use crate::device::machine::memory;
use crate::device::memory::{Kind, Range};
use crate::runtime::primary;
use crate::runtime::rocm::{COARSE_GRAINED, FINE_GRAINED};

const UNKNOWN: c_int = 0;
const ALLOCATED: c_int = 1;
const LOCKED: c_int = 2;
const IPC: c_int = 4;
const VIRTUAL: c_int = 6;

/// A function of the caller that gives memory.
type Allocate = unsafe extern "C" fn(usize) -> *mut c_void;

fn info_of(range: &Range) -> hsa_amd_pointer_info_t {
    let grain = if range.is_host() { FINE_GRAINED } else { COARSE_GRAINED };
    hsa_amd_pointer_info_t {
        size: size_of::<hsa_amd_pointer_info_t>() as u32,
        kind: match range.kind {
            Kind::Registered { .. } => LOCKED,
            Kind::Imported { .. } => IPC,
            Kind::Mapped { .. } => VIRTUAL,
            _ => ALLOCATED,
        },
        agent_base_address: range.base,
        host_base_address: range.base,
        size_in_bytes: range.bytes as usize,
        user_data: 0,
        agent_owner: owner(range).handle(),
        global_flags: if range.note() == 0 { grain } else { range.note() },
        registered: true,
    }
}

/// The agents that may touch it now.
fn accessible(range: &Range) -> Vec<hsa_agent_t> {
    let reached = |agent: &Agent| match agent {
        Agent::Cpu(_) => true,
        Agent::Gpu(device) => {
            let session = primary::session(*device);
            let reached = session.map(|session| range.is_reached_by(&session));
            reached.unwrap_or_else(|| range.is_host() || range.device() == *device)
        }
    };
    Agent::all().into_iter().filter(reached).map(Agent::handle).collect()
}

fn pointer_info(
    address: u64,
    info: *mut hsa_amd_pointer_info_t,
    allocate: Option<Allocate>,
    count: *mut u32,
    list: *mut *mut hsa_agent_t,
) -> Outcome {
    if address == 0 || info.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: the caller gives its structure, with its size set.
    let room = unsafe { (*info).size } as usize;
    if room == 0 {
        return Err(INVALID_ARGUMENT);
    }
    let range = memory().find(address);
    let mut answer = range.as_deref().map(info_of).unwrap_or(hsa_amd_pointer_info_t {
        size: 0,
        kind: UNKNOWN,
        agent_base_address: 0,
        host_base_address: 0,
        size_in_bytes: 0,
        user_data: 0,
        agent_owner: hsa_agent_t(0),
        global_flags: 0,
        registered: false,
    });
    let bytes = room.min(size_of::<hsa_amd_pointer_info_t>());
    answer.size = bytes as u32;
    // SAFETY: the caller's structure is at least so long, and the answer is not shorter.
    unsafe {
        std::ptr::copy_nonoverlapping((&raw const answer).cast::<u8>(), info.cast(), bytes);
    }
    let (Some(allocate), false, false) = (allocate, count.is_null(), list.is_null()) else {
        return Ok(());
    };
    let agents = range.as_deref().map(accessible).unwrap_or_default();
    // SAFETY: the caller gives a function that allocates.
    let place = unsafe { allocate(agents.len() * size_of::<hsa_agent_t>()) }.cast::<hsa_agent_t>();
    if place.is_null() {
        return Err(OUT_OF_RESOURCES);
    }
    // SAFETY: the caller's function has given room for all of them.
    unsafe { std::ptr::copy_nonoverlapping(agents.as_ptr(), place, agents.len()) };
    // SAFETY: the caller gives the places of both results.
    unsafe { count.write(agents.len() as u32) };
    // SAFETY: as above.
    unsafe { list.write(place) };
    Ok(())
}

#[unsafe(no_mangle)]
extern "C" fn hsa_amd_pointer_info(
    address: u64,
    info: *mut hsa_amd_pointer_info_t,
    allocate: Option<Allocate>,
    count: *mut u32,
    list: *mut *mut hsa_agent_t,
) -> hsa_status_t {
    enter("hsa_amd_pointer_info", || pointer_info(address, info, allocate, count, list))
}
