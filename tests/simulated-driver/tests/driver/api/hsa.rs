//! Calls the HSA runtime as its users do: symbols of `libhsa-runtime64.so.1`, results as numbers.

use std::ffi::{c_int, c_void};
use std::sync::Once;
use std::time::Duration;

use super::{Alone, Answer, c_symbol};

/// The address of a symbol in whatever `libhsa-runtime64.so.1` is now.
pub(crate) fn symbol(name: &str) -> *mut c_void {
    c_symbol("libhsa-runtime64.so.1", name)
}

/// Calls a symbol that gives a status: `hsa!(hsa_init())`.
macro_rules! hsa {
    ($name:ident($($argument:expr => $type:ty),* $(,)?)) => {
        crate::api::call!(crate::api::hsa::symbol, $name($($argument => $type),*))
    };
}
pub(crate) use hsa;

/// Starts both runtimes of ROCm 7.2, on a machine of six devices.
pub(crate) fn start() -> Alone {
    static START: Once = Once::new();
    let driver = super::hip::start();
    START.call_once(|| hsa!(hsa_init()).expect("the simulated runtime starts"));
    driver.clear_log();
    driver
}

/// What a function that iterates gives.
fn collect(
    iterate: impl FnOnce(extern "C" fn(u64, *mut Vec<u64>) -> u32, *mut Vec<u64>),
) -> Vec<u64> {
    extern "C" fn push(handle: u64, list: *mut Vec<u64>) -> u32 {
        // SAFETY: the list that `collect` gives, which nobody else uses meanwhile.
        unsafe { &mut *list }.push(handle);
        0
    }
    let mut list = Vec::new();
    iterate(push, &raw mut list);
    list
}

pub(crate) fn agents() -> Vec<u64> {
    collect(|push, list| {
        hsa!(hsa_iterate_agents(
            push => extern "C" fn(u64, *mut Vec<u64>) -> u32, list => *mut Vec<u64>,
        ))
        .unwrap();
    })
}

pub(crate) fn agent_info<T: Default>(agent: u64, attribute: c_int) -> T {
    let mut value = T::default();
    hsa!(hsa_agent_get_info(agent => u64, attribute => c_int, &mut value => &mut T)).unwrap();
    value
}

/// The agents of this kind: 0 processors, 1 GPUs.
fn of_kind(kind: u32) -> Vec<u64> {
    agents().into_iter().filter(|agent| agent_info::<u32>(*agent, 17) == kind).collect()
}

pub(crate) fn cpus() -> Vec<u64> {
    of_kind(0)
}

pub(crate) fn gpus() -> Vec<u64> {
    of_kind(1)
}

pub(crate) fn pools(agent: u64) -> Vec<u64> {
    collect(|push, list| {
        hsa!(hsa_amd_agent_iterate_memory_pools(
            agent => u64, push => extern "C" fn(u64, *mut Vec<u64>) -> u32, list => *mut Vec<u64>,
        ))
        .unwrap();
    })
}

pub(crate) fn flags_of(pool: u64) -> u32 {
    let mut flags = 0;
    hsa!(hsa_amd_memory_pool_get_info(pool => u64, 1 => c_int, &mut flags => &mut u32)).unwrap();
    flags
}

/// Memory of an agent, from its first pool.
pub(crate) fn allocate(agent: u64, bytes: usize) -> u64 {
    let mut address = 0;
    hsa!(hsa_amd_memory_pool_allocate(
        pools(agent)[0] => u64, bytes => usize, 0 => u32, &mut address => &mut u64,
    ))
    .unwrap();
    address
}

pub(crate) fn allow(address: u64, agents: &[u64]) -> Answer {
    hsa!(hsa_amd_agents_allow_access(
        agents.len() as u32 => u32, agents.as_ptr() => *const u64,
        std::ptr::null() => *const u32, address => u64,
    ))
}

pub(crate) const IPC: u64 = 2;

pub(crate) fn new_signal(value: i64) -> u64 {
    signal_with(value, 0).unwrap()
}

pub(crate) fn signal_with(value: i64, attributes: u64) -> Answer<u64> {
    let mut signal = 0;
    hsa!(hsa_amd_signal_create(
        value => i64, 0 => u32, std::ptr::null() => *const u64, attributes => u64,
        &mut signal => &mut u64,
    ))
    .map(|()| signal)
}

fn function<F: Copy>(name: &str) -> F {
    let symbol = symbol(name);
    assert!(!symbol.is_null(), "there is no {name}");
    // SAFETY: the callers give the declaration of the function in hsa.h.
    unsafe { std::mem::transmute_copy(&symbol) }
}

pub(crate) fn load(signal: u64) -> i64 {
    function::<extern "C" fn(u64) -> i64>("hsa_signal_load_scacquire")(signal)
}

pub(crate) fn store(signal: u64, value: i64) {
    function::<extern "C" fn(u64, i64)>("hsa_signal_store_screlease")(signal, value);
}

/// Waits until the signal is less than the value.
pub(crate) fn wait_below(signal: u64, value: i64, limit: Duration) -> i64 {
    let ticks = u64::try_from(limit.as_nanos() / 10).unwrap();
    type Wait = extern "C" fn(u64, c_int, i64, u64, c_int) -> i64;
    function::<Wait>("hsa_signal_wait_scacquire")(signal, 2, value, ticks, 0)
}

/// One end of a copy: the agent and the address.
pub(crate) type End = (u64, u64);

pub(crate) fn copy(to: End, from: End, bytes: usize, after: &[u64], done: u64) -> Answer {
    hsa!(hsa_amd_memory_async_copy(
        to.1 => u64, to.0 => u64, from.1 => u64, from.0 => u64, bytes => usize,
        after.len() as u32 => u32, after.as_ptr() => *const u64, done => u64,
    ))
}

pub(crate) fn copy_on(
    engine: u32,
    to: End,
    from: End,
    bytes: usize,
    after: &[u64],
    done: u64,
) -> Answer {
    hsa!(hsa_amd_memory_async_copy_on_engine(
        to.1 => u64, to.0 => u64, from.1 => u64, from.0 => u64, bytes => usize,
        after.len() as u32 => u32, after.as_ptr() => *const u64, done => u64,
        1 << engine => u32, true => bool,
    ))
}

pub(crate) fn preferred(to: u64, from: u64) -> u32 {
    let mut mask = u32::MAX;
    hsa!(hsa_amd_memory_get_preferred_copy_engine(
        to => u64, from => u64, &mut mask => &mut u32,
    ))
    .unwrap();
    mask
}

pub(crate) fn idle(to: u64, from: u64) -> Answer<u32> {
    let mut mask = u32::MAX;
    hsa!(hsa_amd_memory_copy_engine_status(to => u64, from => u64, &mut mask => &mut u32))
        .map(|()| mask)
}

pub(crate) type Name = [u8; 32];

pub(crate) fn bytes_at<'a>(address: u64, bytes: usize) -> &'a mut [u8] {
    // SAFETY: memory of the simulated device is memory of this process; the tests that use it wait
    // for the copies before.
    unsafe { std::slice::from_raw_parts_mut(address as *mut u8, bytes) }
}
