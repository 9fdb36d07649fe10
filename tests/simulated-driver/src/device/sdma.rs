//! Implements the numbered engines of AMD's devices.
//!
//! Each engine runs its copies in submission order, and blocks while the first copy waits for its
//! dependencies. The first engines of a device lead to the host and over PCIe; the later ones lead
//! to the devices of its hive, a few to each.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::copy::Copy;
use super::counters::Counter;
use super::fault::Fault;
use super::log::{self, Transfer};
use super::machine::memory;
use super::session::Session;
use super::settings::{DEVICES_MAX, Setting};
use super::signal::{Condition, Signal};
use super::sync::lock;
use super::topology::{self, LinkKind};

/// Not an engine: copies inside of a device that nobody asked to be made by one.
pub(crate) const COMPUTE_UNITS: u32 = u32::MAX;
/// How often an engine that stands still looks whether its device still works.
const LOOK: Duration = Duration::from_millis(1);

/// A copy with what it waits for and who waits for it.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) session: Arc<Session>,
    pub(crate) copy: Copy,
    /// The devices that the memory belongs to; `None` for the host.
    pub(crate) source: Option<u32>,
    pub(crate) destination: Option<u32>,
    /// All must be 0.
    pub(crate) after: Vec<Arc<Signal>>,
    /// Gets one less.
    pub(crate) done: Arc<Signal>,
}

#[derive(Debug, Default)]
struct State {
    pending: VecDeque<(Job, u64)>,
    running: bool,
}

#[derive(Debug)]
struct Engine {
    number: u32,
    state: Mutex<State>,
    told: Condvar,
}

static ENGINES: Mutex<BTreeMap<(u32, u32), Arc<Engine>>> = Mutex::new(BTreeMap::new());

/// How many engines a device has.
pub(crate) fn engines() -> u32 {
    (Setting::SdmaEngines.value() + Setting::XgmiEngines.value()) as u32
}

/// The engines that lead from one device to another or to the host, a bit each; none inside of a
/// device.
pub(crate) fn leading(from: u32, to: Option<u32>) -> u32 {
    let first = Setting::SdmaEngines.value() as u32;
    let to_host = (1_u32 << first) - 1;
    let Some(to) = to else { return to_host };
    if from == to {
        return 0;
    }
    let xgmi = Setting::XgmiEngines.value() as u32;
    if topology::between(from, to).kind != LinkKind::Xgmi || xgmi == 0 {
        return to_host;
    }
    // The other devices in their order, without this one.
    let place = if to > from { to - 1 } else { to } % DEVICES_MAX as u32;
    let each = Setting::EnginesPerLink.value() as u32;
    (0..each).fold(0, |mask, engine| mask | 1 << (first + (place * each + engine) % xgmi))
}

/// Those of a mask that have nothing to do.
pub(crate) fn idle(device: u32, mask: u32) -> u32 {
    let engines = lock(&ENGINES);
    let busy = |number: u32| {
        engines.get(&(device, number)).is_some_and(|engine| {
            let state = lock(&engine.state);
            state.running || !state.pending.is_empty()
        })
    };
    (0..u32::BITS)
        .filter(|number| mask & 1 << number != 0 && !busy(*number))
        .fold(0, |mask, number| mask | 1 << number)
}

/// Tells an engine of the session's device; `false` if it has been told too much already.
pub(crate) fn submit(number: u32, job: Job) -> bool {
    let device = job.session.device();
    let engine = lock(&ENGINES)
        .entry((device, number))
        .or_insert_with(|| Engine::start(device, number))
        .clone();
    let mut state = lock(&engine.state);
    let held = state.pending.len() as u64 + u64::from(state.running);
    if held >= Setting::SdmaQueue.value() {
        return false;
    }
    state.pending.push_back((job, log::now_ns()));
    engine.told.notify_one();
    true
}

impl Engine {
    fn start(device: u32, number: u32) -> Arc<Self> {
        let engine = Arc::new(Self { number, state: Mutex::default(), told: Condvar::new() });
        let worker = engine.clone();
        std::thread::Builder::new()
            .name(format!("sim-sdma-{device}-{}", number as i32))
            .stack_size(256 << 10)
            .spawn(move || worker.work())
            .expect("a thread for a simulated engine");
        engine
    }

    fn work(&self) {
        let mut state = lock(&self.state);
        loop {
            let Some((job, submitted)) = state.pending.pop_front() else {
                state = self.told.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            state.running = true;
            drop(state);
            let outcome = job.run(self.number, submitted);
            let done = job.done.clone();
            // What the copy held goes before anybody hears that it is done.
            drop(job);
            state = lock(&self.state);
            state.running = false;
            match outcome {
                Ok(()) => done.add(-1),
                // How the vendor says that a copy went wrong.
                Err(_) => done.store(-1),
            }
        }
    }
}

impl Job {
    fn run(&self, engine: u32, submitted_ns: u64) -> Result<(), Fault> {
        let session = &self.session;
        for signal in &self.after {
            signal.wait(Condition::Equal, 0, None, || session.fault().is_some());
        }
        if let Some(fault) = session.fault() {
            return Err(fault);
        }
        let start_ns = log::now_ns();
        if engine != COMPUTE_UNITS {
            stall(self.copy.bytes, session)?;
        }
        let far = self.is_far(engine);
        let times = if far { Setting::FarFactor.value() } else { 1 };
        (0..times).for_each(|_| self.copy.take_time());
        self.copy.carry(session, memory())?;
        let end_ns = log::now_ns();
        self.done.set_times(start_ns, end_ns);
        let place = |device: Option<u32>| device.map_or(Transfer::HOST, u64::from);
        log::write(Transfer {
            device: session.device().into(),
            engine: if engine == COMPUTE_UNITS { Transfer::COMPUTE } else { engine.into() },
            source: place(self.source),
            destination: place(self.destination),
            bytes: self.copy.bytes,
            submitted_ns,
            start_ns,
            end_ns,
            far: far.into(),
        });
        Counter::SdmaCopies.add(session.device(), 1);
        Ok(())
    }

    /// Whether the engine does not lead to the other end.
    fn is_far(&self, engine: u32) -> bool {
        let device = self.session.device();
        let other = if self.source == Some(device) { self.destination } else { self.source };
        let leading = leading(device, other);
        engine != COMPUTE_UNITS && leading != 0 && leading & 1 << engine == 0
    }
}

/// One engine never ends a copy that is too large, where the machine is like that.
pub(crate) fn stall(bytes: u64, session: &Session) -> Result<(), Fault> {
    let most = Setting::StallMib.value() << 20;
    if most == 0 || bytes <= most {
        return Ok(());
    }
    Counter::StalledCopies.add(session.device(), 1);
    loop {
        if let Some(fault) = session.fault() {
            return Err(fault);
        }
        std::thread::sleep(LOOK);
    }
}
