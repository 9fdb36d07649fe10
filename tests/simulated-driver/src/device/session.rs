//! Holds a device that this process has opened: its queues, the devices it can access, and its
//! fault.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use super::counters::Counter;
use super::fault::Fault;
use super::memory::AddressSpace;
use super::queue::{Queue, QueueKind, Refused};
use super::settings::Setting;
use super::sync::lock;

/// Time between two looks at the graphs that hold up queues.
const LOOK: Duration = Duration::from_micros(200);

/// From the first user of a device to the last. A new one begins whole.
#[derive(Debug)]
pub(crate) struct Session {
    id: u64,
    device: u32,
    fault: OnceLock<Fault>,
    gone: AtomicBool,
    /// The other devices that it may touch, a bit each.
    peers: AtomicU64,
    queues: Mutex<Vec<Weak<Queue>>>,
    default_queue: Mutex<Option<Arc<Queue>>>,
    /// The commands of each hardware queue that are not complete, by number.
    channels: Box<[Mutex<BTreeSet<u64>>]>,
    /// The number of the next command.
    next_command: AtomicU64,
    /// Number of running graphs that hold up the queues.
    holding: AtomicUsize,
    /// Number of calls that wait for all queues and let nobody submit meanwhile.
    draining: AtomicUsize,
}

impl Session {
    pub(crate) fn begin(device: u32) -> Arc<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Counter::LiveContexts.add(device, 1);
        Arc::new(Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            device,
            fault: OnceLock::new(),
            gone: AtomicBool::new(false),
            peers: AtomicU64::new(0),
            queues: Mutex::default(),
            default_queue: Mutex::default(),
            channels: (0..Setting::Connections.value()).map(|_| Mutex::default()).collect(),
            next_command: AtomicU64::new(0),
            holding: AtomicUsize::new(0),
            draining: AtomicUsize::new(0),
        })
    }

    /// Never used again in this process.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Numbered as the machine does.
    pub(crate) fn device(&self) -> u32 {
        self.device
    }

    pub(crate) fn reaches(&self, device: u32) -> bool {
        device == self.device || self.peers.load(Ordering::Acquire) & (1 << device) != 0
    }

    /// Lets it touch the other device's memory, or no longer; `false` if that was so already.
    pub(crate) fn reach(&self, device: u32, access: bool) -> bool {
        let bit = 1 << device;
        let before = if access {
            self.peers.fetch_or(bit, Ordering::AcqRel)
        } else {
            self.peers.fetch_and(!bit, Ordering::AcqRel)
        };
        (before & bit != 0) != access
    }

    /// The first fault stays.
    pub(crate) fn break_with(&self, fault: Fault) {
        let _ = self.fault.set(fault);
    }

    /// Why it takes no more work.
    pub(crate) fn fault(&self) -> Option<Fault> {
        if self.gone.load(Ordering::Acquire) {
            Some(Fault::Gone)
        } else {
            self.fault.get().copied()
        }
    }

    /// Returns the hardware queue of a new queue: queues share them in turn.
    pub(super) fn channel(&self) -> usize {
        let queues = lock(&self.queues).len();
        queues.checked_rem(self.channels.len()).unwrap_or(0)
    }

    /// Appends a command to a hardware queue. Returns the number of the command.
    pub(super) fn enter_channel(&self, channel: usize) -> u64 {
        let Some(commands) = self.channels.get(channel) else { return 0 };
        let mut commands = lock(commands);
        let number = self.next_command.fetch_add(1, Ordering::AcqRel);
        commands.insert(number);
        number
    }

    /// Waits until a command is the first of its hardware queue, also behind commands of other queues.
    pub(super) fn wait_for_turn(&self, channel: usize, number: u64) {
        let Some(commands) = self.channels.get(channel) else { return };
        while lock(commands).first() != Some(&number) && self.fault().is_none() {
            std::thread::sleep(LOOK);
        }
    }

    pub(super) fn leave_channel(&self, channel: usize, number: u64) {
        if let Some(commands) = self.channels.get(channel) {
            lock(commands).remove(&number);
        }
    }

    /// Lets no queue begin a command while `run` runs.
    pub(super) fn hold_queues(&self, run: impl FnOnce()) {
        self.holding.fetch_add(1, Ordering::AcqRel);
        run();
        self.holding.fetch_sub(1, Ordering::AcqRel);
    }

    /// Waits until no graph holds up the queues, or until the session has a fault.
    pub(super) fn wait_until_free(&self) {
        while self.holding.load(Ordering::Acquire) > 0 && self.fault().is_none() {
            std::thread::sleep(LOOK);
        }
    }

    /// Waits for everything that was submitted, and holds up further submissions meanwhile.
    pub(crate) fn drain_alone(&self) -> Result<(), Refused> {
        self.draining.fetch_add(1, Ordering::AcqRel);
        let mut queues = self.queues().into_iter().filter(|queue| !queue.is_capturing());
        let drained = queues.try_for_each(|queue| queue.drain());
        self.draining.fetch_sub(1, Ordering::AcqRel);
        drained
    }

    /// Waits until no call drains the queues alone.
    pub(super) fn wait_until_open(&self) {
        while self.draining.load(Ordering::Acquire) > 0 && self.fault().is_none() {
            std::thread::sleep(LOOK);
        }
    }

    /// Ends it under its users.
    pub(crate) fn destroy(&self) {
        self.gone.store(true, Ordering::Release);
        self.break_with(Fault::Gone);
    }

    /// Ends it after its last user: what it allocated and opened goes.
    pub(crate) fn end(&self, memory: &AddressSpace) {
        self.destroy();
        self.queues().iter().for_each(|queue| queue.close());
        *lock(&self.default_queue) = None;
        for range in memory.select(|range| range.session() == Some(self.id)) {
            let _ = memory.remove(range.base, |found| found.id == range.id);
        }
    }

    pub(crate) fn new_queue(self: &Arc<Self>, kind: QueueKind) -> Arc<Queue> {
        let queue = Queue::start(self.clone(), kind);
        let mut queues = lock(&self.queues);
        queues.retain(|queue| queue.strong_count() > 0);
        queues.push(Arc::downgrade(&queue));
        queue
    }

    /// The queue that belongs to nobody and orders itself with every blocking one.
    pub(crate) fn default_queue(self: &Arc<Self>) -> Arc<Queue> {
        let mut queue = lock(&self.default_queue);
        queue.get_or_insert_with(|| self.new_queue(QueueKind::Default)).clone()
    }

    pub(crate) fn existing_default_queue(&self) -> Option<Arc<Queue>> {
        lock(&self.default_queue).clone()
    }

    pub(crate) fn queues(&self) -> Vec<Arc<Queue>> {
        lock(&self.queues).iter().filter_map(Weak::upgrade).collect()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        Counter::LiveContexts.add(self.device, -1);
    }
}
