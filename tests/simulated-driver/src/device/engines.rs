//! The copy engines of a device: as many copies run at once as it has, the others wait.

use std::sync::{Condvar, Mutex, PoisonError};

use super::counters::Counter;
use super::settings::{DEVICES_MAX, Setting};
use super::sync::lock;

/// How many copies want an engine and how many have one.
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

/// One engine, for one copy.
#[derive(Debug)]
pub(crate) struct Engine(u32);

static ENGINES: [CopyEngines; DEVICES_MAX] = [const { CopyEngines::new() }; DEVICES_MAX];

impl CopyEngines {
    const fn new() -> Self {
        Self { state: Mutex::new(State { wanting: 0, running: 0 }), freed: Condvar::new() }
    }
}

impl Engine {
    /// Waits for an engine of this device; copies are short, so it comes.
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
