//! Exports copies by engines, which wait for signals.

use std::sync::Arc;

use super::agent::Agent;
use super::call::enter;
use super::memory::owner;
use super::signal;
use super::status::{
    INVALID_AGENT, INVALID_ARGUMENT, INVALID_SIGNAL, OUT_OF_RESOURCES, Outcome, store,
};
use super::types::{hsa_agent_t, hsa_amd_profiling_async_copy_time_t, hsa_signal_t, hsa_status_t};
use crate::device::copy::{Copy, End};
use crate::device::machine::memory;
use crate::device::sdma::{self, COMPUTE_UNITS, Job};
use crate::runtime::out::Out;
use crate::runtime::primary;

/// What both forms of a copy are given.
struct Call {
    dst: u64,
    dst_agent: hsa_agent_t,
    src: u64,
    src_agent: hsa_agent_t,
    bytes: usize,
    after_count: u32,
    after: *const hsa_signal_t,
    done: hsa_signal_t,
}

/// The agent of one end; who does not say it has it looked up.
fn agent(said: hsa_agent_t, address: u64) -> Outcome<Agent> {
    if said.0 != 0 {
        return Agent::find(said);
    }
    memory().find(address).map(|range| owner(&range)).ok_or(INVALID_AGENT)
}

/// The device whose engines copy from one agent to another: the source's, if that is a GPU.
fn copying(dst: Agent, src: Agent) -> Outcome<u32> {
    src.device().or(dst.device()).ok_or(INVALID_AGENT)
}

impl Call {
    /// Gives it to an engine of the one that copies, which `choose` names for both agents. Nothing is
    /// copied, and no signal changed, where there are no bytes.
    fn submit(&self, choose: impl FnOnce(Agent, Agent) -> Outcome<u32>) -> Outcome {
        if self.dst == 0 || self.src == 0 || (self.after_count > 0 && self.after.is_null()) {
            return Err(INVALID_ARGUMENT);
        }
        let dst = agent(self.dst_agent, self.dst)?;
        let src = agent(self.src_agent, self.src)?;
        if self.done.0 == 0 {
            return Err(INVALID_SIGNAL);
        }
        let done = signal::find(self.done)?;
        if self.bytes == 0 {
            return Ok(());
        }
        let session = primary::open(copying(dst, src)?)?;
        let number = choose(dst, src)?;
        let copy = Copy {
            dst: End::Memory(self.dst),
            src: End::Memory(self.src),
            bytes: self.bytes as u64,
            by_one_engine: true,
        };
        let job = Job {
            session,
            copy,
            source: src.device(),
            destination: dst.device(),
            after: self.after()?,
            done,
        };
        if sdma::submit(number, job) { Ok(()) } else { Err(OUT_OF_RESOURCES) }
    }

    fn after(&self) -> Outcome<Vec<Arc<crate::device::signal::Signal>>> {
        if self.after_count == 0 {
            return Ok(Vec::new());
        }
        // SAFETY: the caller gives an array of this length.
        let after = unsafe { std::slice::from_raw_parts(self.after, self.after_count as usize) };
        after.iter().map(|signal| signal::find(*signal)).collect()
    }
}

/// The engines from one agent to the other; none inside of a device.
fn leading(dst: Agent, src: Agent) -> Outcome<u32> {
    let device = copying(dst, src)?;
    let other = if src.device() == Some(device) { dst.device() } else { src.device() };
    Ok(sdma::leading(device, other))
}

/// What the runtime takes where nobody asks for an engine.
fn usual(dst: Agent, src: Agent) -> Outcome<u32> {
    let mask = leading(dst, src)?;
    Ok(if mask == 0 { COMPUTE_UNITS } else { mask.trailing_zeros() })
}

/// The engine that the caller names, which has to be one, and one that there is.
fn named(dst: Agent, src: Agent, engine: u32, force: bool) -> Outcome<u32> {
    if !engine.is_power_of_two() || engine.trailing_zeros() >= sdma::engines() {
        return Err(INVALID_ARGUMENT);
    }
    let inside = dst == src && !force;
    Ok(if inside { COMPUTE_UNITS } else { engine.trailing_zeros() })
}

/// A form of the call: its name, what it is given besides, and the engine that it takes.
macro_rules! copy {
    ($name:ident($($more:ident: $type:ty),*) by $choose:expr) => {
        #[unsafe(no_mangle)]
        extern "C" fn $name(
            dst: u64,
            dst_agent: hsa_agent_t,
            src: u64,
            src_agent: hsa_agent_t,
            bytes: usize,
            after_count: u32,
            after: *const hsa_signal_t,
            done: hsa_signal_t,
            $($more: $type,)*
        ) -> hsa_status_t {
            enter(stringify!($name), || {
                let call = Call { dst, dst_agent, src, src_agent, bytes, after_count, after, done };
                call.submit($choose)
            })
        }
    };
}

copy!(hsa_amd_memory_async_copy() by usual);
copy!(hsa_amd_memory_async_copy_on_engine(engine: u32, force: bool)
    by |dst, src| named(dst, src, engine, force));

/// The engines that lead where other engines of the same kind do as well, and have nothing to do.
#[unsafe(no_mangle)]
extern "C" fn hsa_amd_memory_copy_engine_status(
    dst_agent: hsa_agent_t,
    src_agent: hsa_agent_t,
    out: Out<'_, u32>,
) -> hsa_status_t {
    enter("hsa_amd_memory_copy_engine_status", || {
        let (dst, src) = (Agent::find(dst_agent)?, Agent::find(src_agent)?);
        let device = copying(dst, src)?;
        let to_host = sdma::leading(device, None);
        let all = (1_u32 << sdma::engines()) - 1;
        let kind = if leading(dst, src)? & to_host == 0 { all & !to_host } else { to_host };
        let idle = sdma::idle(device, kind);
        store(out, idle)?;
        if idle == 0 { Err(OUT_OF_RESOURCES) } else { Ok(()) }
    })
}

/// The engines of the link, whatever they do.
#[unsafe(no_mangle)]
extern "C" fn hsa_amd_memory_get_preferred_copy_engine(
    dst_agent: hsa_agent_t,
    src_agent: hsa_agent_t,
    out: Out<'_, u32>,
) -> hsa_status_t {
    enter("hsa_amd_memory_get_preferred_copy_engine", || {
        store(out, leading(Agent::find(dst_agent)?, Agent::find(src_agent)?)?)
    })
}

/// Times are always kept here.
#[unsafe(no_mangle)]
extern "C" fn hsa_amd_profiling_async_copy_enable(_enable: bool) -> hsa_status_t {
    enter("hsa_amd_profiling_async_copy_enable", || Ok(()))
}

#[unsafe(no_mangle)]
extern "C" fn hsa_amd_profiling_get_async_copy_time(
    signal: hsa_signal_t,
    out: Out<'_, hsa_amd_profiling_async_copy_time_t>,
) -> hsa_status_t {
    enter("hsa_amd_profiling_get_async_copy_time", || {
        let (start, end) = signal::find(signal)?.times();
        let ticks = |nanos: u64| nanos / super::init::TICK_NS;
        store(out, hsa_amd_profiling_async_copy_time_t { start: ticks(start), end: ticks(end) })
    })
}
