//! Moves all transfers of a staged fabric's rank, on a background thread while no caller polls.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Waker;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use peerlane_hal::{Caps, CopyEngine as _, Error as _, Fabric, Rank, Ticket};
use peerlane_toolkit::Poison;
use peerlane_toolkit::limits::spawn;

use crate::channel::{Context, Event, LocalBuffers, OpenGets, Receiver, Sender, Started};
use crate::error::Error;
use crate::memory::RegionTable;
use crate::ops::{OpId, OpQueue, ResolvedOp};
use crate::queues::{DeviceCopier, NetworkQueue};
use crate::wire::InboxLayout;
use crate::{Inner, NetRemote};

pub(crate) const QUEUE_OPS: usize = 4096;
const SLICE_OPS_MAX: usize = 1024;
/// The id of the queue of replies to peers' gets, which the progress thread uses as its own id too.
pub(crate) const REPLIES: u64 = 0;
/// The longest sleep in `park` while a transfer is in flight, because its completion may change no
/// flag.
pub(crate) const BUSY_PARK_MAX: Duration = Duration::from_micros(20);
/// The longest sleep of the progress thread while nothing is in flight; the network wakes it when
/// bytes arrive.
const IDLE_PARK_MAX: Duration = Duration::from_secs(60);
/// The background thread drives the transfers of a rank when no caller has polled for this time.
pub(crate) const POLL_TIMEOUT: Duration = Duration::from_millis(1);
const PASSES_MAX: usize = 8;
/// Transfers of a released engine may end by themselves within this time. If the network is stuck,
/// it is released too after this time, and carries nothing any more.
const RELEASE_TIMEOUT: Duration = Duration::from_millis(500);

struct Channel<D: Fabric, N: Fabric> {
    sender: Sender<N>,
    receiver: Receiver<D, N>,
}

/// The op queues, peer connections and engines of a rank, all protected by one lock.
pub(crate) struct Transport<D: Fabric, N: Fabric> {
    // The engines come before the memory that they use, so that they are dropped first.
    copier: DeviceCopier<D>,
    network: Option<NetworkQueue<N>>,
    network_peers: usize,
    channels: Vec<Option<Channel<D, N>>>,
    queues: BTreeMap<u64, OpQueue<ResolvedOp<D, N>>>,
    next_queue: u64,
    gets: OpenGets<D, N>,
    regions: Arc<RegionTable<D, N>>,
    wakers: BTreeMap<u64, Waker>,
    poison: Poison<Error>,
    buffers: LocalBuffers<N>,
    last_poll: Instant,
    finished: Vec<OpId>,
}

impl<D: Fabric, N: Fabric> Transport<D, N> {
    pub(crate) fn new(
        buffers: LocalBuffers<N>,
        ranks: usize,
        copier: DeviceCopier<D>,
        regions: Arc<RegionTable<D, N>>,
    ) -> Self {
        let replies = OpQueue::new(ranks, QUEUE_OPS);

        Self {
            copier,
            network: None,
            network_peers: 0,
            channels: (0..ranks).map(|_| None).collect(),
            queues: BTreeMap::from([(REPLIES, replies)]),
            next_queue: REPLIES + 1,
            gets: OpenGets::default(),
            regions,
            wakers: BTreeMap::new(),
            poison: Poison::new(),
            buffers,
            last_poll: Instant::now(),
            finished: Vec::new(),
        }
    }

    pub(crate) fn connect(
        &mut self,
        peer: Rank,
        inbox: Arc<NetRemote<N>>,
        flags: Arc<NetRemote<N>>,
    ) {
        let peer = peer.index();
        let (sender, receiver) = (Sender::new(peer, inbox, flags), Receiver::new(peer));
        self.channels[peer] = Some(Channel { sender, receiver });
    }

    fn connected(&self) -> usize {
        self.channels.iter().flatten().count()
    }

    /// Returns whether a new network engine is needed, because the present one does not reach all
    /// peers.
    pub(crate) fn needs_network(&self) -> bool {
        let idle = self.network.as_ref().is_none_or(NetworkQueue::is_idle);
        idle && self.network_peers != self.connected()
    }

    pub(crate) fn set_network(&mut self, engine: N::Engine) {
        self.network_peers = self.connected();
        self.network = Some(NetworkQueue::new(engine));
    }

    /// Returns the capabilities of engines over a network whose puts need the alignment
    /// `network_align`.
    pub(crate) fn caps(&self, network_align: u64) -> Caps {
        Caps {
            gets: true,
            polled: true,
            slice_ops_max: SLICE_OPS_MAX,
            piece_bytes_max: self.buffers.layout.slot_bytes,
            put_align_bytes: self.copier.put_align_bytes().max(network_align),
            ..Caps::new("staged")
        }
    }

    pub(crate) fn add_queue(&mut self, waker: Waker) -> u64 {
        let id = self.next_queue;
        self.next_queue += 1;
        self.queues.insert(id, OpQueue::new(self.channels.len(), QUEUE_OPS));
        self.wakers.insert(id, waker);
        id
    }

    pub(crate) fn remove_queue(&mut self, id: u64) {
        self.wakers.remove(&id);
        self.queues.remove(&id);
    }

    pub(crate) fn queue(&mut self, id: u64) -> &mut OpQueue<ResolvedOp<D, N>> {
        self.queues.get_mut(&id).expect("a queue exists as long as its engine")
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        self.poison.check()
    }

    pub(crate) fn is_busy(&self) -> bool {
        let idle = self.copier.from_device.is_idle()
            && self.copier.to_device.is_idle()
            && self.network.as_ref().is_none_or(NetworkQueue::is_idle)
            && self
                .channels
                .iter()
                .flatten()
                .all(|it| it.sender.is_idle() && it.receiver.is_idle());
        !idle
    }

    pub(crate) fn is_polled(&self) -> bool {
        self.last_poll.elapsed() < POLL_TIMEOUT
    }

    pub(crate) fn release(&mut self, id: u64) {
        self.queue(id).release();
        let finished = &mut self.finished;
        self.gets.drop_queue(id, |op_id| finished.push(op_id));
        self.deliver_completions();
        self.queue(id).settle_release();
    }

    /// Makes progress on all transfers of the rank without blocking, and does not wake the caller's
    /// own queue `by`.
    pub(crate) fn progress(&mut self, by: u64) -> Result<(), Error> {
        self.poison.check()?;
        if by != REPLIES {
            self.last_poll = Instant::now();
        }
        let mut result = Ok(true);
        for _ in 0..PASSES_MAX {
            result = self.poll_once(by);
            if !matches!(result, Ok(true)) {
                break;
            }
        }
        let result = result.and_then(|_| self.settle_releases());
        self.poison.keep(result)
    }

    fn poll_once(&mut self, by: u64) -> Result<bool, Error> {
        let Some(network) = &mut self.network else { return Ok(false) };
        let mut progressed = self.copier.from_device.poll()? | self.copier.to_device.poll()?;
        let finished = &mut self.finished;
        progressed |= network.poll(|op_id| finished.push(op_id))?;
        let mut flag_stored = false;
        let mut requested = Vec::new();
        for (peer, channel) in self.channels.iter_mut().enumerate() {
            let Some(Channel { sender, receiver }) = channel else { continue };
            let credit = self.buffers.flag(InboxLayout::credit_flag(peer)).load(Ordering::Acquire);
            progressed |= sender.credit(credit, |op_id| finished.push(op_id)).map_err(|()| {
                let what = format!(
                    "reports {credit} processed messages, expected at most the number that this \
                     rank has sent"
                );
                Error::of_peer(Rank::at(peer), what)
            })?;
            let mut context = Context {
                copier: &mut self.copier,
                network: &mut *network,
                gets: &mut self.gets,
                regions: &self.regions,
            };
            progressed |= receiver.receive(&self.buffers, &mut context, |event| match event {
                Event::FlagStored => flag_stored = true,
                Event::GetComplete(op_id) => finished.push(op_id),
                Event::GetRequested { get, src, from, bytes } => {
                    requested.push((peer, ResolvedOp::Reply { get, src, from, bytes }));
                }
            })?;
            if let Some(done) = receiver.take_credit_update() {
                let me = self.buffers.rank.index();
                sender.signal(network, InboxLayout::credit_flag(me), done, Vec::new());
            }
        }

        if !requested.is_empty() {
            self.queue(REPLIES).push(requested.into_iter());
        }

        self.deliver_completions();
        progressed |= self.start(&mut flag_stored)?;
        if flag_stored {
            let others = self.wakers.iter().filter(|(id, _)| **id != by);
            others.for_each(|(_, waker)| waker.wake_by_ref());
        }

        let Some(network) = &mut self.network else { return Ok(false) };
        for Channel { sender, .. } in self.channels.iter_mut().flatten() {
            progressed |= sender.post(network, &self.buffers, self.copier.from_device.done);
        }

        network.post()?;

        Ok(progressed)
    }

    fn deliver_completions(&mut self) {
        for op_id in self.finished.drain(..) {
            // The engine may have been dropped, and its queue with it.
            if let Some(queue) = self.queues.get_mut(&op_id.queue) {
                queue.finish(op_id);
            }
        }
    }

    fn start(&mut self, flag_stored: &mut bool) -> Result<bool, Error> {
        let Some(network) = &mut self.network else { return Ok(false) };
        let me = self.buffers.rank.index();
        let mut progressed = false;
        for (&id, queue) in &mut self.queues {
            for peer in 0..queue.peers.len() {
                let Some(Channel { sender, .. }) = &mut self.channels[peer] else { continue };
                while let Some(order) = queue.peers[peer].next().map(|entry| entry.order) {
                    let earlier_complete = peer == me && queue.is_complete_before(order);
                    let peer_queue = &mut queue.peers[peer];
                    let get_incomplete =
                        peer_queue.has_incomplete(|op| matches!(op, ResolvedOp::Get { .. }));
                    let Some(entry) = peer_queue.next() else { break };
                    let started = match &entry.op {
                        ResolvedOp::Signal { .. } if peer == me && !earlier_complete => {
                            Started::Blocked
                        }
                        ResolvedOp::Signal { flag, word, value } if peer == me => {
                            let flags = flag.local.as_ref().and_then(|local| local.flags());
                            // `submit` has checked the bounds.
                            if let Some(flag) = flags.and_then(|flags| flags.get(*word as usize)) {
                                flag.store(*value, Ordering::Release);
                                *flag_stored = true;
                            }
                            Started::Complete
                        }
                        _ => {
                            let op_id = OpId { queue: id, peer, order };
                            let mut context = Context {
                                copier: &mut self.copier,
                                network: &mut *network,
                                gets: &mut self.gets,
                                regions: &self.regions,
                            };
                            sender.start(
                                entry,
                                op_id,
                                get_incomplete,
                                &self.buffers,
                                &mut context,
                            )?
                        }
                    };
                    let all_started = match started {
                        Started::Blocked => break,
                        Started::Bytes(bytes) => {
                            entry.start_transfer();
                            entry.bytes_started += bytes;
                            entry.bytes_started == bytes_of(&entry.op)
                        }
                        Started::All => {
                            entry.start_transfer();
                            true
                        }
                        Started::Complete => true,
                    };
                    progressed = true;
                    if all_started {
                        peer_queue.advance();
                        queue.settle(peer);
                    }
                }
            }
        }
        Ok(progressed)
    }

    fn settle_releases(&mut self) -> Result<(), Error> {
        let mut stuck = false;
        for queue in self.queues.values_mut() {
            queue.settle_release();
            stuck |= queue.len() > 0
                && queue.released.is_some_and(|since| since.elapsed() > RELEASE_TIMEOUT);
        }
        match &mut self.network {
            Some(network) if stuck => network.release(),
            _ => Ok(()),
        }
    }

    pub(crate) fn completed(&mut self, id: u64) -> Ticket {
        self.queue(id).tickets.completed()
    }
}

fn bytes_of<D: Fabric, N: Fabric>(op: &ResolvedOp<D, N>) -> u64 {
    match op {
        ResolvedOp::Put { bytes, .. }
        | ResolvedOp::Get { bytes, .. }
        | ResolvedOp::Reply { bytes, .. } => *bytes,
        ResolvedOp::Signal { .. } => 0,
    }
}

/// Runs the thread that drives a transport while no caller polls; dropping it ends the thread.
///
/// A NIC serves writes and reads by itself. Here a processor must copy to the device, and from the
/// device when a peer reads. A caller that polls does so. Meanwhile the thread only checks that a
/// caller still polls.
pub(crate) struct ProgressThread {
    stop: Arc<AtomicBool>,
    waker: Waker,
    thread: Option<JoinHandle<()>>,
    /// The process of the thread, which does not exist in a forked child.
    process: u32,
}

impl ProgressThread {
    pub(crate) fn start<D: Fabric, N: Fabric>(
        inner: &Arc<Inner<D, N>>,
        parker: N::Engine,
    ) -> Result<Self, Error> {
        let (stop, waker) = (Arc::new(AtomicBool::new(false)), parker.waker());
        let (driven, stopped) = (Arc::clone(inner), Arc::clone(&stop));
        let name = format!("peerlane-staged-{}", inner.rank);
        let thread = spawn(name, move || run(&driven, parker, &stopped))
            .map_err(|error| Error::new(error.kind(), error.to_string()))?;
        Ok(Self { stop, waker, thread: Some(thread), process: std::process::id() })
    }
}

impl Drop for ProgressThread {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            return;
        }

        self.stop.store(true, Ordering::SeqCst);
        self.waker.wake_by_ref();
        if let Some(thread) = self.thread.take() {
            // The panic hook has reported a panic of the thread, and `drop` cannot return it.
            let _ = thread.join();
        }
    }
}

fn run<D: Fabric, N: Fabric>(inner: &Inner<D, N>, mut parker: N::Engine, stop: &AtomicBool) {
    while !stop.load(Ordering::SeqCst) {
        // Polled first, so that whatever arrives after the pass ends the park.
        if parker.completed().is_err() {
            return;
        }
        let limit = {
            let mut transport = inner.transport();
            if transport.is_polled() {
                POLL_TIMEOUT
            } else if transport.progress(REPLIES).is_err() {
                // The transport keeps the error, and the next caller gets it.
                return;
            } else if transport.is_busy() {
                BUSY_PARK_MAX
            } else {
                IDLE_PARK_MAX
            }
        };
        if parker.park(limit).is_err() {
            return;
        }
    }
}
