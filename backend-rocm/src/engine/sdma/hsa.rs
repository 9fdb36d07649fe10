//! Submits copies to SDMA engines through the HSA runtime and reads their completion signals.
//!
//! Signals are created for GPUs only: they are words without an interrupt, and the host polls them. The
//! runtime's own wait also polls for 200 µs before it sleeps, so it would not free the processor sooner.
//!
//! The runtime selects the GPU that copies, and checks the engine, by the agents of a copy. It finds memory
//! by address. The agents passed are therefore always those of the ranks, even if the memory is on the host:
//! there is no engine between two processors.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::runtime::{CopyCommand, Direction, SdmaRuntime, Submission};
use super::set::SdmaSet;
use crate::device::{Agent, AgentKind, MemoryPool, memory_pools};
use crate::error::Error;
use crate::sys::Hsa;
use crate::sys::hsa::{
    hsa_agent_t, hsa_amd_sdma_engine_id_t, hsa_amd_signal_attribute_t, hsa_signal_t, hsa_status_t,
};

/// The number of completion signals of a queue, which limits its copies in flight.
const SIGNALS: usize = 128;
/// With fewer completion signals, two SDMA engines of one link would wait for signals.
const SIGNALS_MIN: usize = 8;

#[derive(Debug)]
pub(crate) struct HsaSdma {
    hsa: &'static Hsa,
    label: Arc<str>,
    own: hsa_agent_t,
    /// The HSA agents of the peers by rank, with this rank's own agent at its own index.
    peers: Vec<Option<hsa_agent_t>>,
    signals: Vec<hsa_signal_t>,
    /// One word of host memory for each completion signal, from which an SDMA engine copies the value of a flag.
    words: NonNull<AtomicU64>,
    waits_for_signals: bool,
    dependencies: Vec<hsa_signal_t>,
    leaked: bool,
}

// SAFETY: this value owns the words until it is dropped, and accesses them as atomics.
unsafe impl Send for HsaSdma {}

impl HsaSdma {
    pub(super) fn open(
        hsa: &'static Hsa,
        label: &Arc<str>,
        agents: &[Agent],
        own: &Agent,
        peers: Vec<Option<hsa_agent_t>>,
    ) -> Result<Self, Error> {
        let is_peer = |agent: &&Agent| peers.contains(&Some(agent.handle));
        let mut used = agents.iter().filter(is_peer).chain([own]);
        let waits_for_signals = !used.any(|agent| starts_copies_early(&agent.name));
        let words = allocate_words(hsa, label, agents, own)?;
        let mut runtime = Self {
            hsa,
            label: Arc::clone(label),
            own: own.handle,
            peers,
            signals: Vec::with_capacity(SIGNALS),
            words,
            waits_for_signals,
            dependencies: Vec::with_capacity(SIGNALS),
            leaked: false,
        };
        while runtime.signals.len() < SIGNALS {
            match create_signal(hsa) {
                Ok(signal) => runtime.signals.push(signal),
                // Signals are scarce in a process with many queues.
                Err(_) if runtime.signals.len() >= SIGNALS_MIN => break,
                Err(status) => {
                    return Err(Error::hsa(hsa, "hsa_amd_signal_create", Some(label), status));
                }
            }
        }
        Ok(runtime)
    }

    /// Returns the HSA agents of a copy's destination and source; the GPU of the source executes the copy.
    ///
    /// A get therefore passes this rank's agent for the source too: the peer's GPU has no access to memory that only
    /// this rank uses.
    fn agents(&self, peer: usize, direction: Direction) -> (hsa_agent_t, hsa_agent_t) {
        match direction {
            Direction::Put => (self.peer(peer), self.own),
            Direction::Get => (self.own, self.own),
        }
    }

    fn peer(&self, peer: usize) -> hsa_agent_t {
        self.peers[peer].expect("ops are checked against the peers")
    }

    fn word(&self, signal: usize) -> &AtomicU64 {
        assert!(signal < SIGNALS, "there is a word for each signal");
        let word = self.words.as_ptr().wrapping_add(signal);
        // SAFETY: `allocate_words` made SIGNALS zeroed words, which live as long as `self`.
        unsafe { &*word }
    }

    fn store(&self, signal: usize, value: i64) {
        // SAFETY: the signal lives as long as `self`.
        unsafe { (self.hsa.calls.signal_store_screlease)(self.signals[signal], value) };
    }
}

pub(super) fn preferred_engines(hsa: &Hsa, own: &Agent, peer: &Agent) -> Option<SdmaSet> {
    let call = hsa.calls.amd_memory_get_preferred_copy_engine?;
    let mut mask = 0;
    // SAFETY: the agents are of this runtime; the result is stored in a local.
    let status = unsafe { call(peer.handle, own.handle, &raw mut mask) };
    (status == hsa_status_t::HSA_STATUS_SUCCESS).then(|| SdmaSet::from_mask(mask))
}

pub(super) fn idle_engines(hsa: &Hsa, own: &Agent, peer: &Agent) -> Option<SdmaSet> {
    let call = hsa.calls.amd_memory_copy_engine_status?;
    let mut mask = 0;
    // SAFETY: as above.
    let status = unsafe { call(peer.handle, own.handle, &raw mut mask) };
    (status == hsa_status_t::HSA_STATUS_SUCCESS).then(|| SdmaSet::from_mask(mask))
}

pub(super) fn can_select_engine(hsa: &Hsa) -> bool {
    hsa.calls.amd_memory_async_copy_on_engine.is_some()
}

/// Returns whether SDMA engines of an architecture may start a copy before its dependencies are complete.
///
/// This was observed on gfx90x (ROCm/rocm-systems#1469). Newer runtimes work around it, but do not report it.
fn starts_copies_early(architecture: &str) -> bool {
    architecture.starts_with("gfx90")
}

fn create_signal(hsa: &Hsa) -> Result<hsa_signal_t, hsa_status_t> {
    let mut signal = hsa_signal_t { handle: 0 };
    let attributes = hsa_amd_signal_attribute_t::HSA_AMD_SIGNAL_AMD_GPU_ONLY.0.into();
    let (consumers, out) = (std::ptr::null(), &raw mut signal);
    // SAFETY: the list of consumers is empty; the result is stored in a local.
    let status = unsafe { (hsa.calls.amd_signal_create)(0, 0, consumers, attributes, out) };
    if status == hsa_status_t::HSA_STATUS_SUCCESS { Ok(signal) } else { Err(status) }
}

/// Allocates one word for each completion signal in host memory that the GPU can read.
///
/// The memory belongs to the first processor agent with a fine-grained pool.
fn allocate_words(
    hsa: &Hsa,
    label: &Arc<str>,
    agents: &[Agent],
    own: &Agent,
) -> Result<NonNull<AtomicU64>, Error> {
    let failed = |call, status| Err(Error::hsa(hsa, call, Some(label), status));
    for agent in agents.iter().filter(|agent| agent.kind == AgentKind::Processor) {
        let is_fine = |pool: &MemoryPool| pool.fine_grained;
        let Some(pool) = memory_pools(hsa, agent)?.into_iter().find(is_fine) else { continue };
        let bytes = SIGNALS * size_of::<AtomicU64>();
        let mut base: *mut c_void = std::ptr::null_mut();
        // SAFETY: the pool is of this runtime; the result is stored in a local.
        let status =
            unsafe { (hsa.calls.amd_memory_pool_allocate)(pool.handle, bytes, 0, &raw mut base) };
        if status != hsa_status_t::HSA_STATUS_SUCCESS {
            return failed("hsa_amd_memory_pool_allocate", status);
        }
        let (own, flags) = (&raw const own.handle, std::ptr::null());
        // SAFETY: the list holds one agent, and the memory was allocated above.
        let status = unsafe { (hsa.calls.amd_agents_allow_access)(1, own, flags, base) };
        if status != hsa_status_t::HSA_STATUS_SUCCESS {
            // SAFETY: the memory was allocated above and is not used.
            let _ = unsafe { (hsa.calls.amd_memory_pool_free)(base) };
            return failed("hsa_amd_agents_allow_access", status);
        }
        // SAFETY: the allocation has this length.
        unsafe { base.cast::<u8>().write_bytes(0, bytes) };
        return Ok(NonNull::new(base.cast()).expect("an allocation is not at address 0"));
    }
    Err(Error::unavailable(format!(
        "the HSA runtime ({}) offers no fine-grained host memory, which SDMA engines copy flags \
         from; run rocminfo to see the memory pools of the processors",
        hsa.calls.file().display()
    )))
}

// SAFETY: `hsa_amd_memory_async_copy_on_engine` and `hsa_amd_memory_async_copy` start a copy after its dependencies, and change the
// completion signal last. `Drop` frees the words, unless they were leaked.
unsafe impl SdmaRuntime for HsaSdma {
    type Error = Error;

    fn signals(&self) -> usize {
        self.signals.len()
    }

    fn waits_for_signals(&self) -> bool {
        self.waits_for_signals
    }

    fn arm(&self, signal: usize) {
        self.store(signal, 1);
    }

    fn value(&self, signal: usize) -> i64 {
        // SAFETY: the signal lives as long as `self`.
        unsafe { (self.hsa.calls.signal_load_scacquire)(self.signals[signal]) }
    }

    fn clear(&self, signal: usize) {
        self.store(signal, 0);
    }

    fn store_word(&self, signal: usize, value: u64) -> u64 {
        let word = self.word(signal);
        word.store(value, Ordering::Release);
        word.as_ptr() as u64
    }

    unsafe fn copy(
        &mut self,
        copy: &CopyCommand,
        dependencies: &[usize],
        signal: usize,
    ) -> Submission<Error> {
        let (dst_agent, src_agent) = self.agents(copy.peer, copy.direction);
        let Self { hsa, signals, dependencies: list, label, .. } = self;
        list.clear();
        list.extend(dependencies.iter().map(|dependency| signals[*dependency]));
        let count = list.len() as u32;
        // The runtime rejects a list without signals.
        let list = if list.is_empty() { std::ptr::null() } else { list.as_ptr() };
        let (dst, src) = (copy.span.dst as *mut c_void, copy.span.src as *const c_void);
        let (bytes, done) = (copy.span.bytes as usize, signals[signal]);
        let selected = copy
            .engine
            .and_then(|engine| Some((engine, hsa.calls.amd_memory_async_copy_on_engine?)));
        let (name, status) = match selected {
            Some((engine, call)) => {
                let engine = hsa_amd_sdma_engine_id_t(engine.bit());
                // SAFETY: the caller upholds the contract of this function; agents and signals are of this
                // runtime.
                let status = unsafe {
                    call(dst, dst_agent, src, src_agent, bytes, count, list, done, engine, true)
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
            hsa_status_t::HSA_STATUS_SUCCESS => Submission::Accepted,
            hsa_status_t::HSA_STATUS_ERROR_OUT_OF_RESOURCES => Submission::NoResources,
            status => Submission::Rejected(Error::hsa(hsa, name, Some(label), status)),
        }
    }

    fn copy_error(&self, copy: &CopyCommand, value: i64) -> Error {
        let CopyCommand { peer, direction, engine, span } = copy;
        let kind = if *direction == Direction::Put { "put to" } else { "get from" };
        let engine =
            engine.map_or_else(String::new, |engine| format!(" by SDMA {}", engine.index()));
        let what = format!("{kind} rank {peer} of {} bytes{engine}", span.bytes);
        Error::Copy { what, device: Arc::clone(&self.label), value }
    }

    fn leak(&mut self) {
        self.leaked = true;
    }
}

impl Drop for HsaSdma {
    fn drop(&mut self) {
        if self.leaked {
            return;
        }
        for signal in self.signals.drain(..) {
            // SAFETY: `open` created the signal, it is destroyed once, and no copy is in flight.
            let _ = unsafe { (self.hsa.calls.signal_destroy)(signal) };
        }
        // SAFETY: `open` allocated the words, they are freed once, and no copy reads them.
        let _ = unsafe { (self.hsa.calls.amd_memory_pool_free)(self.words.as_ptr().cast()) };
    }
}
