//! Limits how many copies a device runs at once to its number of copy engines.

use std::sync::{Condvar, Mutex, PoisonError};

use super::counters::Counter;
use super::settings::{DEVICES_MAX, Setting};
use super::sync::lock;

/// Copies that need an engine, and copies that have one.
#[derive(Debug)]
struct State {
    wanting: u64,
    running: u64,
}

#[derive(Debug)]
pub(crate) struct CopyEngines {
    state: Mutex<State>,
    freed: Condvar,
}

/// A copy engine, taken for one copy.
#[derive(Debug)]
pub(crate) struct Engine(u32);

static ENGINES: [CopyEngines; DEVICES_MAX] = [const { CopyEngines::new() }; DEVICES_MAX];

impl CopyEngines {
    const fn new() -> Self {
        Self { state: Mutex::new(State { wanting: 0, running: 0 }), freed: Condvar::new() }
    }
}

impl Engine {
    /// Waits for an engine of this device; copies are short.
    pub(crate) fn take(device: u32) -> Self {
        let engines = &ENGINES[device as usize];
        let mut state = lock(&engines.state);
        state.wanting += 1;
        Counter::MostCopiesAtOnce.peak(device, state.wanting.cast_signed());
        if state.running >= Setting::CopyEngines.value() {
            Counter::CopiesThatWaited.add(device, 1);
        }
        while state.running >= Setting::CopyEngines.value() {
            state = engines.freed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.running += 1;
        Counter::MostCopiesRunning.peak(device, state.running.cast_signed());
        Self(device)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let engines = &ENGINES[self.0 as usize];
        let mut state = lock(&engines.state);
        state.wanting -= 1;
        state.running -= 1;
        engines.freed.notify_one();
    }
}
