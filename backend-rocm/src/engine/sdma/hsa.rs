//! Signals and copies of the HSA runtime.
//!
//! A signal that only GPUs wait for is a word without an interrupt; the host looks at it. The runtime's
//! own wait looks for 200 µs too before it sleeps, so it would not give the processor away any sooner.
//!
//! The runtime picks the GPU that copies, and checks the engine, by the agents of a copy; memory is found by
//! its address. So they are those of the ranks, also where the memory is the host's: for two processors
//! there is no engine.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::hardware::{Copy, Direction, Given, Hardware};
use super::placement::{SdmaId, SdmaSet};
use crate::device::{Agent, AgentKind, Pool, pools};
use crate::error::Error;
use crate::sys::Hsa;
use crate::sys::hsa::{
    hsa_agent_t, hsa_amd_sdma_engine_id_t, hsa_amd_signal_attribute_t, hsa_signal_t, hsa_status_t,
};

/// Copies of one engine at once.
const SLOTS: usize = 128;
/// With fewer, two engines of a link would wait for signals.
const SLOTS_MIN: usize = 8;

/// The HSA runtime for one queue.
#[derive(Debug)]
pub(crate) struct HsaHardware {
    hsa: &'static Hsa,
    label: Arc<str>,
    own: hsa_agent_t,
    /// By rank; oneself has the own one.
    peers: Vec<Option<hsa_agent_t>>,
    signals: Vec<hsa_signal_t>,
    words: NonNull<AtomicU64>,
    waits_for_signals: bool,
    /// The signals that a copy is to look at.
    after: Vec<hsa_signal_t>,
    abandoned: bool,
}

// SAFETY: the words are this value's own until it is dropped, and touched as atomics.
unsafe impl Send for HsaHardware {}

impl HsaHardware {
    pub(super) fn open(
        hsa: &'static Hsa,
        label: &Arc<str>,
        agents: &[Agent],
        own: &Agent,
        peers: Vec<Option<hsa_agent_t>>,
    ) -> Result<Self, Error> {
        // The handles are of these agents.
        let used = |agent: &&Agent| peers.contains(&Some(agent.handle));
        let mut used = agents.iter().filter(used).chain([own]);
        let waits_for_signals = !used.any(|agent| forgets_to_wait(&agent.name));
        let words = allocate_words(hsa, label, agents, own)?;
        let mut hardware = Self {
            hsa,
            label: Arc::clone(label),
            own: own.handle,
            peers,
            signals: Vec::with_capacity(SLOTS),
            words,
            waits_for_signals,
            after: Vec::with_capacity(SLOTS),
            abandoned: false,
        };
        while hardware.signals.len() < SLOTS {
            match create_signal(hsa) {
                Ok(signal) => hardware.signals.push(signal),
                // Signals are scarce in a process with many queues.
                Err(_) if hardware.signals.len() >= SLOTS_MIN => break,
                Err(status) => {
                    return Err(Error::hsa(hsa, "hsa_amd_signal_create", Some(label), status));
                }
            }
        }
        Ok(hardware)
    }

    /// The agents of the destination and of the source. The GPU of the source copies, so a get has the
    /// own one in its place: the peer's does not reach what only this rank uses.
    fn agents(&self, peer: usize, direction: Direction) -> (hsa_agent_t, hsa_agent_t) {
        match direction {
            Direction::Put => (self.peer(peer), self.own),
            Direction::Get => (self.own, self.own),
        }
    }

    fn peer(&self, peer: usize) -> hsa_agent_t {
        self.peers[peer].expect("ops are checked against the ways")
    }

    fn word(&self, slot: usize) -> &AtomicU64 {
        assert!(slot < SLOTS, "there is a word for each signal");
        let word = self.words.as_ptr().wrapping_add(slot);
        // SAFETY: `allocate_words` has made SLOTS words, zero and alive as long as `self`.
        unsafe { &*word }
    }

    fn store(&self, slot: usize, value: i64) {
        // SAFETY: the signal lives as long as `self`.
        unsafe { (self.hsa.calls.signal_store_screlease)(self.signals[slot], value) };
    }
}

/// The engines that the runtime prefers for the link from `own` to `peer`, if it says so.
pub(super) fn preferred(hsa: &Hsa, own: &Agent, peer: &Agent) -> Option<SdmaSet> {
    let call = hsa.calls.amd_memory_get_preferred_copy_engine?;
    let mut mask = 0;
    // SAFETY: agents of this runtime; the result is stored in a local.
    let status = unsafe { call(peer.handle, own.handle, &raw mut mask) };
    (status == hsa_status_t::HSA_STATUS_SUCCESS).then(|| SdmaSet::of_mask(mask))
}

/// The engines of that link that have nothing to do, if the runtime says so.
pub(super) fn available(hsa: &Hsa, own: &Agent, peer: &Agent) -> Option<SdmaSet> {
    let call = hsa.calls.amd_memory_copy_engine_status?;
    let mut mask = 0;
    // SAFETY: as above.
    let status = unsafe { call(peer.handle, own.handle, &raw mut mask) };
    (status == hsa_status_t::HSA_STATUS_SUCCESS).then(|| SdmaSet::of_mask(mask))
}

/// Whether a copy can be given to an engine by name.
pub(super) fn can_name(hsa: &Hsa) -> bool {
    hsa.calls.amd_memory_async_copy_on_engine.is_some()
}

/// Engines of these architectures were seen to start a copy before the signals that it was to wait for
/// were 0 (ROCm/rocm-systems#1469); runtimes since then work around it, and do not say so.
fn forgets_to_wait(architecture: &str) -> bool {
    architecture.starts_with("gfx90")
}

fn create_signal(hsa: &Hsa) -> Result<hsa_signal_t, hsa_status_t> {
    let mut signal = hsa_signal_t { handle: 0 };
    let attributes = hsa_amd_signal_attribute_t::HSA_AMD_SIGNAL_AMD_GPU_ONLY.0.into();
    let (none, place) = (std::ptr::null(), &raw mut signal);
    // SAFETY: no consumers are named; the result is stored in a local.
    let status = unsafe { (hsa.calls.amd_signal_create)(0, 0, none, attributes, place) };
    if status == hsa_status_t::HSA_STATUS_SUCCESS { Ok(signal) } else { Err(status) }
}

/// Words of the host that the own GPU reads: of processors that the runtime names first.
fn allocate_words(
    hsa: &Hsa,
    label: &Arc<str>,
    agents: &[Agent],
    own: &Agent,
) -> Result<NonNull<AtomicU64>, Error> {
    let refused = |call, status| Err(Error::hsa(hsa, call, Some(label), status));
    for agent in agents.iter().filter(|agent| agent.kind == AgentKind::Processor) {
        let fine = |pool: &Pool| pool.fine_grained;
        let Some(pool) = pools(hsa, agent)?.into_iter().find(fine) else { continue };
        let bytes = SLOTS * size_of::<AtomicU64>();
        let mut base: *mut c_void = std::ptr::null_mut();
        // SAFETY: a pool of this runtime; the result is stored in a local.
        let status =
            unsafe { (hsa.calls.amd_memory_pool_allocate)(pool.handle, bytes, 0, &raw mut base) };
        if status != hsa_status_t::HSA_STATUS_SUCCESS {
            return refused("hsa_amd_memory_pool_allocate", status);
        }
        let (own, flags) = (&raw const own.handle, std::ptr::null());
        // SAFETY: one agent, and memory that was just allocated.
        let status = unsafe { (hsa.calls.amd_agents_allow_access)(1, own, flags, base) };
        if status != hsa_status_t::HSA_STATUS_SUCCESS {
            // SAFETY: allocated above, and nobody has it.
            let _ = unsafe { (hsa.calls.amd_memory_pool_free)(base) };
            return refused("hsa_amd_agents_allow_access", status);
        }
        // SAFETY: as long as it was asked for.
        unsafe { base.cast::<u8>().write_bytes(0, bytes) };
        return Ok(NonNull::new(base.cast()).expect("the runtime allocates nothing at 0"));
    }
    Err(Error::unavailable(format!(
        "the HSA runtime ({}) has no fine-grained memory of the host, which flags are copied from; \
         see with rocminfo which pools its processors have",
        hsa.calls.file().display()
    )))
}

impl Hardware for HsaHardware {
    type Error = Error;

    fn slots(&self) -> usize {
        self.signals.len()
    }

    fn waits_for_signals(&self) -> bool {
        self.waits_for_signals
    }

    fn arm(&self, slot: usize) {
        self.store(slot, 1);
    }

    fn value(&self, slot: usize) -> i64 {
        // SAFETY: the signal lives as long as `self`.
        unsafe { (self.hsa.calls.signal_load_scacquire)(self.signals[slot]) }
    }

    fn excuse(&self, slot: usize) {
        self.store(slot, 0);
    }

    fn store_word(&self, slot: usize, value: u64) -> u64 {
        let word = self.word(slot);
        word.store(value, Ordering::Release);
        word.as_ptr() as u64
    }

    unsafe fn copy(&mut self, copy: &Copy, after: &[usize], slot: usize) -> Given<Error> {
        let (dst_agent, src_agent) = self.agents(copy.peer, copy.direction);
        let Self { hsa, signals, after: list, label, .. } = self;
        list.clear();
        list.extend(after.iter().map(|slot| signals[*slot]));
        let count = list.len() as u32;
        // The runtime refuses a list without signals.
        let list = if list.is_empty() { std::ptr::null() } else { list.as_ptr() };
        let (dst, src) = (copy.span.dst as *mut c_void, copy.span.src as *const c_void);
        let (bytes, done) = (copy.span.bytes as usize, signals[slot]);
        let on = copy.on.and_then(|on| Some((on, hsa.calls.amd_memory_async_copy_on_engine?)));
        let (name, status) = match on {
            Some((on, call)) => {
                let on = hsa_amd_sdma_engine_id_t(on.bit());
                // SAFETY: the caller's; agents and signals are of this runtime.
                let status = unsafe {
                    call(dst, dst_agent, src, src_agent, bytes, count, list, done, on, true)
                };
                ("hsa_amd_memory_async_copy_on_engine", status)
            }
            None => {
                let call = hsa.calls.amd_memory_async_copy;
                // SAFETY: as above.
                let status =
                    unsafe { call(dst, dst_agent, src, src_agent, bytes, count, list, done) };
                ("hsa_amd_memory_async_copy", status)
            }
        };
        match status {
            hsa_status_t::HSA_STATUS_SUCCESS => Given::Taken,
            hsa_status_t::HSA_STATUS_ERROR_OUT_OF_RESOURCES => Given::Exhausted,
            status => Given::Refused(Error::hsa(hsa, name, Some(label), status)),
        }
    }

    fn failure(&self, copy: &Copy, value: i64) -> Error {
        let Copy { peer, direction, on, span } = copy;
        let way = if *direction == Direction::Put { "put to" } else { "get from" };
        let on = on.map_or_else(String::new, |on| format!(" by SDMA {}", SdmaId::index(on)));
        let what = format!("a {way} rank {peer} of {} bytes{on}", span.bytes);
        Error::Copy { what, device: Arc::clone(&self.label), value }
    }

    fn abandon(&mut self) {
        self.abandoned = true;
    }
}

impl Drop for HsaHardware {
    fn drop(&mut self) {
        if self.abandoned {
            return;
        }
        for signal in self.signals.drain(..) {
            // SAFETY: created by `open`, destroyed once, and no copy is on its way.
            let _ = unsafe { (self.hsa.calls.signal_destroy)(signal) };
        }
        // SAFETY: allocated by `open`, freed once, and no copy reads it.
        let _ = unsafe { (self.hsa.calls.amd_memory_pool_free)(self.words.as_ptr().cast()) };
    }
}
