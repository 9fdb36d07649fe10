//! Exports the sharing of memory and signals between processes, by names of 32 bytes.

use super::agent::Agent;
use super::call::enter;
use super::memory::{NOBODY, agents, find};
use super::signal;
use super::status::{ERROR, INVALID_ARGUMENT, INVALID_SIGNAL, Outcome, store};
use super::types::{hsa_agent_t, hsa_amd_ipc_memory_t, hsa_signal_t, hsa_status_t};
use crate::device::machine::memory;
use crate::device::memory::share::{self, NAME_BYTES};
use crate::device::memory::{Backing, Kind, Range};
use crate::device::settings::{Setting, reaches};
use crate::device::signal::Signal;
use crate::runtime::out::Out;

const BYTES: usize = 32;

/// The part of a name that says anything.
fn handle(name: [u8; NAME_BYTES]) -> Outcome<hsa_amd_ipc_memory_t> {
    if Setting::LegacyShare.is("off") {
        return Err(ERROR);
    }
    let mut short = [0; BYTES];
    short.copy_from_slice(&name[..BYTES]);
    Ok(hsa_amd_ipc_memory_t(short))
}

fn open(handle: Option<&hsa_amd_ipc_memory_t>) -> Outcome<Backing> {
    let mut name = [0; NAME_BYTES];
    name[..BYTES].copy_from_slice(&handle.ok_or(INVALID_ARGUMENT)?.0);
    Ok(share::open_any(&name)?)
}

/// Only whole allocations, by their first byte.
#[unsafe(no_mangle)]
extern "C" fn hsa_amd_ipc_memory_create(
    address: u64,
    bytes: usize,
    out: Out<'_, hsa_amd_ipc_memory_t>,
) -> hsa_status_t {
    enter("hsa_amd_ipc_memory_create", || {
        let range = find(address).map_err(|_| INVALID_ARGUMENT)?;
        let whole = [range.bytes, range.backing.bytes()].contains(&(bytes as u64));
        let plain = matches!(range.kind, Kind::Plain { .. });
        if range.base != address || !whole || !plain {
            return Err(INVALID_ARGUMENT);
        }
        store(out, handle(share::name(&range.backing))?)
    })
}

/// At a new address each time.
#[unsafe(no_mangle)]
extern "C" fn hsa_amd_ipc_memory_attach(
    name: Option<&hsa_amd_ipc_memory_t>,
    bytes: usize,
    count: u32,
    list: *const hsa_agent_t,
    out: Out<'_, u64>,
) -> hsa_status_t {
    enter("hsa_amd_ipc_memory_attach", || {
        let agents = if count == 0 { Agent::all() } else { agents(list, count)? };
        let backing = open(name)?;
        let owner = backing.identity().device;
        let devices: Vec<u32> = agents.iter().filter_map(|agent| agent.device()).collect();
        let refused = |device: &u32| count > 0 && !reaches(*device, owner);
        let whole = backing.bytes() == (bytes as u64).next_multiple_of(4096);
        if !whole || out.is_none() || devices.iter().any(refused) {
            return Err(INVALID_ARGUMENT);
        }
        let by = devices.first().copied().unwrap_or(u32::MAX);
        let base = memory().import(backing, Kind::Imported { session: NOBODY, by })?;
        let range = find(base)?;
        let reached = devices.into_iter().filter(|device| reaches(*device, owner));
        reached.for_each(|device| range.allow(device, true));
        store(out, base)
    })
}

#[unsafe(no_mangle)]
extern "C" fn hsa_amd_ipc_memory_detach(address: u64) -> hsa_status_t {
    enter("hsa_amd_ipc_memory_detach", || {
        let imported = |range: &Range| matches!(range.kind, Kind::Imported { .. });
        memory().remove(address, imported).map_err(|_| INVALID_ARGUMENT)
    })
}

#[unsafe(no_mangle)]
extern "C" fn hsa_amd_ipc_signal_create(
    signal: hsa_signal_t,
    out: Out<'_, hsa_amd_ipc_memory_t>,
) -> hsa_status_t {
    enter("hsa_amd_ipc_signal_create", || {
        let name = signal::find(signal)?.name().ok_or(INVALID_ARGUMENT)?;
        store(out, handle(name)?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn hsa_amd_ipc_signal_attach(
    name: Option<&hsa_amd_ipc_memory_t>,
    out: Out<'_, hsa_signal_t>,
) -> hsa_status_t {
    enter("hsa_amd_ipc_signal_attach", || {
        let opened = Signal::open(open(name)?).map_err(|_| INVALID_SIGNAL)?;
        store(out, hsa_signal_t(opened))
    })
}
