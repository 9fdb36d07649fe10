//! A deterministic simulation of the control plane: whole groups under faults, in one thread.
//!
//! The hub, the clients and [`Control`] are the state machines that the threads drive. The simulation replaces
//! threads, connections and the clock: a seed determines the size of the group, the work of the ranks, the delay
//! of each message, and the fault. Each rank opens a group, prepares operations, runs starts in a ring or
//! directly, and closes the group.

mod checks;

use std::collections::{BTreeSet, BinaryHeap};
use std::fmt;
use std::mem;
use std::time::{Duration, Instant};

use peerlane_hal::{ErrorKind, Rank};

use super::{Action, Control, Message, RankState, Sight};
use crate::bootstrap::client::{ClientState, watch_time};
use crate::bootstrap::hub::{Event, HubState, Joining};
use crate::bootstrap::message::{Blob, Reply, Request};
use crate::bootstrap::{AbortRecord, Notice, ProcessState};

/// Timeout of the calls of all ranks.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Longest delay of a message.
const DELAY_MAX: Duration = Duration::from_millis(5);
/// Longest delay of a message on busy processors, which is longer than the time for an answer.
const BUSY_DELAY_MAX: Duration = Duration::from_millis(700);
/// Longest pause of a rank between two calls.
const PAUSE_MAX: Duration = Duration::from_millis(400);
/// Delay of each message of a slow connection. Its rank does not answer in time.
const SLOW: Duration = Duration::from_secs(8);
/// Longest time from the deadline of a call, or from the loss of a rank, until the call returns.
const RETURN_MAX: Duration = Duration::from_millis(500);
/// The same on busy processors: for an inquiry, its answers and the record, each to and from the hub, and as many for a second
/// inquiry.
const BUSY_RETURN_MAX: Duration = BUSY_DELAY_MAX.saturating_mul(10);

/// A part of the protocol that is replaced by an earlier version of it, with a defect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Defect {
    /// A rank whose own call failed returns its own error, although the group has ended.
    OwnErrorFirst,
    /// A rank whose deadline passed blames the first rank that it waits for.
    FirstWriter,
    /// The record of an exchange that timed out names no rank.
    NoRank,
}

/// What goes wrong with a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Kill,
    /// The process stops for this time.
    Stall(Duration),
    /// The connection to the hub breaks.
    Cut,
    /// The connection to the hub becomes slow.
    Slow,
}

/// A call of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Pause,
    Exchange(&'static str),
    /// Imports the keys of all ranks, and exchanges the result.
    Import,
    /// Runs a start in a ring, or else a direct one.
    Start {
        ring: bool,
    },
    Leave,
}

/// The progress of a rank within its call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Begin,
    Exchange {
        sequence: u64,
        own_error: Option<Rank>,
    },
    Import {
        peer: u32,
    },
    Start {
        step: u32,
    },
    /// The call failed; the rank waits until the record is known.
    Failed,
    Done,
}

/// Stands for the work of a rank between two calls of the library.
const PAUSED: Step = Step::Import { peer: u32::MAX };

/// An entry of the schedule of the simulation.
#[derive(Debug)]
enum Item {
    ToHub(usize, Event),
    ToRank(usize, Reply),
    /// The connection of a rank to the hub has closed.
    Closed(usize),
    Flag {
        to: usize,
        flag: (u32, u32, u32),
    },
    Wake(usize),
    Fault,
}

struct Scheduled {
    at: Instant,
    number: u64,
    item: Item,
}

impl PartialEq for Scheduled {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}
impl Eq for Scheduled {}
impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Scheduled {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (other.at, other.number).cmp(&(self.at, self.number))
    }
}

/// One rank of the simulation.
struct Node {
    client: ClientState,
    control: Control,
    call: usize,
    step: Step,
    deadline: Instant,
    /// The flags that have arrived: start, step and writer.
    flags: BTreeSet<(u32, u32, u32)>,
    starts: u32,
    /// The step of a start that is overdue.
    overdue_step: Option<u32>,
    /// The end of the last pause.
    paused_until: Instant,
    /// Whether the rank has asked which ranks are missing in its exchange.
    watches: bool,
    killed: bool,
    stalled_until: Option<Instant>,
    /// Time of delivery of the last message in each direction, which keeps messages in order.
    last_up: Instant,
    last_down: Instant,
    slow: bool,
    cut: bool,
    /// The first error of the rank, as text, and the time at which it was returned.
    error: Option<(String, Instant)>,
    /// Whether the memory of the rank has been freed.
    freed: bool,
}

/// What each rank sees of the processes of all.
struct View {
    ranks: Vec<ProcessState>,
    relay: ProcessState,
}

impl Sight for View {
    fn process(&self, rank: Rank) -> ProcessState {
        self.ranks[rank.index()]
    }

    fn relay(&self) -> ProcessState {
        self.relay
    }
}

struct World {
    now: Instant,
    rng: fastrand::Rng,
    defect: Option<Defect>,
    hub: HubState,
    /// Whether the process of rank 0 runs the hub.
    hub_in_rank_0: bool,
    /// Whether the ranks see each other's processes, and the processors are so busy that every message is late.
    is_busy: bool,
    nodes: Vec<Node>,
    calls: Vec<Call>,
    schedule: BinaryHeap<Scheduled>,
    scheduled: u64,
    fault: Option<(usize, Fault)>,
    /// Time of the loss of a rank, if its connection closed.
    lost_at: Option<Instant>,
    /// The ranks that computed between two calls when the group ended, or shortly before.
    paused_at_end: BTreeSet<usize>,
}

impl World {
    fn new(seed: u64, defect: Option<Defect>) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let now = Instant::now();
        let ranks = rng.usize(2..=9);
        let hub_in_rank_0 = rng.bool();
        let is_busy = rng.u8(..4) == 0;
        let relay = hub_in_rank_0.then_some(Rank(0));
        let nodes = Rank::all(ranks).map(|rank| Node {
            client: ClientState::new(ranks),
            control: Control::new(rank, ranks, relay),
            call: 0,
            step: Step::Begin,
            deadline: now,
            flags: BTreeSet::new(),
            starts: 0,
            overdue_step: None,
            paused_until: now,
            watches: false,
            killed: false,
            stalled_until: None,
            last_up: now,
            last_down: now,
            slow: false,
            cut: false,
            error: None,
            freed: false,
        });
        let mut calls = vec![Call::Exchange("open"), Call::Exchange("connect")];
        for _ in 0..rng.usize(1..=2) {
            calls.extend([Call::Pause, Call::Exchange("keys"), Call::Import]);
            let ring = rng.bool();
            for _ in 0..rng.usize(0..=3) {
                calls.extend([Call::Pause, Call::Start { ring }]);
            }
        }
        calls.extend([Call::Pause, Call::Exchange("close"), Call::Leave]);
        let nodes = nodes.collect();
        let (schedule, hub) = (BinaryHeap::new(), HubState::new(ranks));
        let mut world = Self {
            now,
            rng,
            defect,
            hub,
            hub_in_rank_0,
            is_busy,
            nodes,
            calls,
            schedule,
            scheduled: 0,
            fault: None,
            lost_at: None,
            paused_at_end: BTreeSet::new(),
        };
        for rank in 0..ranks {
            let runs_hub = hub_in_rank_0 && rank == 0;
            let joining = Joining { runs_hub, ..Joining::default() };
            let _ = world.hub.apply(Rank::at(rank), Event::Joined(joining));
            world.put(Duration::ZERO, Item::Wake(rank));
        }
        let victim = world.rng.usize(0..ranks);
        let stall = Duration::from_millis(world.rng.u64(0..20_000));
        // On busy processors every connection is slow, so a slow one is no fault.
        let faults = [Fault::Kill, Fault::Stall(stall), Fault::Cut, Fault::Slow];
        let faults = if is_busy { &faults[..2] } else { &faults[..] };
        world.fault = Some((victim, faults[world.rng.usize(0..faults.len())]));
        // Mostly while the group works; sometimes a little before its end.
        let at = Duration::from_micros(world.rng.u64(0..1_500_000));
        world.put(at, Item::Fault);
        world
    }

    fn put(&mut self, after: Duration, item: Item) {
        self.put_at(self.now + after, item);
    }

    fn put_at(&mut self, at: Instant, item: Item) {
        self.scheduled += 1;
        self.schedule.push(Scheduled { at, number: self.scheduled, item });
    }

    fn delay(&mut self) -> Duration {
        Duration::from_nanos(self.rng.u64(0..DELAY_MAX.as_nanos() as u64))
    }

    /// Returns the delay of a message to or from the hub.
    fn message_delay(&mut self, rank: usize) -> Duration {
        let longest = if self.is_busy { BUSY_DELAY_MAX } else { DELAY_MAX };
        let delay = Duration::from_nanos(self.rng.u64(0..longest.as_nanos() as u64));
        delay + if self.nodes[rank].slow { SLOW } else { Duration::ZERO }
    }

    fn return_max(&self) -> Duration {
        if self.is_busy { BUSY_RETURN_MAX } else { RETURN_MAX }
    }

    /// Sends an event of a rank to the hub, after the events before it.
    fn send(&mut self, rank: usize, event: Event) {
        let at = (self.now + self.message_delay(rank)).max(self.nodes[rank].last_up);
        self.nodes[rank].last_up = at;
        self.put_at(at, Item::ToHub(rank, event));
    }

    fn broadcast(&mut self, replies: Vec<Reply>) {
        for reply in replies {
            for rank in self.hub.live().collect::<Vec<_>>() {
                let rank = rank.index();
                let at = (self.now + self.message_delay(rank)).max(self.nodes[rank].last_down);
                self.nodes[rank].last_down = at;
                self.put_at(at, Item::ToRank(rank, reply.clone()));
            }
        }
    }

    /// Returns the time until which a process does not run.
    fn stopped(&self, rank: usize) -> Option<Instant> {
        self.nodes[rank].stalled_until.filter(|until| *until > self.now)
    }

    fn run(&mut self) {
        let mut steps = 0;
        while let Some(Scheduled { at, item, .. }) = self.schedule.pop() {
            self.now = at;
            steps += 1;
            assert!(steps < 1_000_000, "the simulation does not end");
            match item {
                Item::ToHub(rank, event) => self.deliver_to_hub(rank, event),
                Item::ToRank(rank, _) | Item::Closed(rank) | Item::Wake(rank)
                    if self.nodes[rank].killed =>
                {
                    drop(item);
                }
                Item::ToRank(rank, _) | Item::Closed(rank) | Item::Wake(rank)
                    if self.stopped(rank).is_some() =>
                {
                    // In the order in which the items were scheduled.
                    let until = self.stopped(rank).expect("checked");
                    self.put_at(until, item);
                }
                Item::ToRank(rank, reply) => {
                    if !self.nodes[rank].cut {
                        self.deliver_to_rank(rank, reply);
                    }
                }
                Item::Closed(rank) => {
                    let how = "the connection to the hub closed".to_owned();
                    for notice in self.nodes[rank].client.close(how) {
                        self.notice(rank, notice);
                    }
                    self.step(rank);
                }
                Item::Flag { to, flag } => {
                    self.nodes[to].flags.insert(flag);
                    self.put(Duration::ZERO, Item::Wake(to));
                }
                Item::Wake(rank) => {
                    self.tick(rank);
                    self.step(rank);
                }
                Item::Fault => self.fail(),
            }
        }
    }

    fn deliver_to_hub(&mut self, rank: usize, event: Event) {
        let in_rank_0 = self.hub_in_rank_0;
        if in_rank_0 && self.nodes[0].killed {
            return;
        }
        if in_rank_0 && let Some(until) = self.stopped(0) {
            return self.put_at(until, Item::ToHub(rank, event));
        }
        let replies = self.hub.apply(Rank::at(rank), event);
        if replies.iter().any(|reply| matches!(reply, Reply::Ended(_))) {
            let is_paused =
                |rank: &usize| self.nodes[*rank].paused_until + self.return_max() > self.now;
            self.paused_at_end = (0..self.nodes.len()).filter(is_paused).collect();
        }
        self.broadcast(replies);
    }

    fn deliver_to_rank(&mut self, rank: usize, reply: Reply) {
        if let Some(notice) = self.nodes[rank].client.apply(reply) {
            let must_acknowledge = matches!(notice, Notice::Abort { .. } | Notice::Lost { .. });
            self.notice(rank, notice);
            if must_acknowledge {
                self.send(rank, Event::Request(Request::Acknowledge));
            }
        }
        self.step(rank);
    }

    fn notice(&mut self, rank: usize, notice: Notice) {
        let waits = self.waits(rank);
        let sight = self.sight();
        let state = |_: &AbortRecord| RankState { waits: waits.clone(), ..RankState::default() };
        let action = self.nodes[rank].control.receive(self.now, notice, state, &sight);
        self.act(rank, action);
    }

    fn sight(&self) -> View {
        let process = |rank: usize| match rank {
            _ if !self.is_busy => ProcessState::Unknown,
            rank if self.nodes[rank].killed => ProcessState::Ended,
            rank if self.stopped(rank).is_some() => ProcessState::Stopped,
            _ => ProcessState::Running,
        };
        let ranks: Vec<_> = (0..self.nodes.len()).map(process).collect();
        let outside = if self.is_busy { ProcessState::Running } else { ProcessState::Unknown };
        View { relay: if self.hub_in_rank_0 { ranks[0] } else { outside }, ranks }
    }

    fn tick(&mut self, rank: usize) {
        if self.nodes[rank].control.next_tick().is_some_and(|at| at <= self.now) {
            let sight = self.sight();
            let action = self.nodes[rank].control.tick(self.now, &sight);
            self.act(rank, action);
        }
    }

    fn act(&mut self, rank: usize, action: Option<Action>) {
        let request = match action {
            Some(Action::Broadcast(message)) => Some(Request::Broadcast { message: Blob(message) }),
            Some(Action::Abort(record)) => Some(Request::Abort { record: Blob(record.encode()) }),
            Some(Action::Order { .. }) => unreachable!("ranks of the simulation compare no calls"),
            None => None,
        };
        if let Some(request) = request
            && !self.nodes[rank].cut
        {
            self.send(rank, Event::Request(request));
        }
        if let Some(at) = self.nodes[rank].control.next_tick() {
            self.put_at(at.max(self.now), Item::Wake(rank));
        }
    }

    /// Returns the ranks that a rank waits for.
    fn waits(&self, rank: usize) -> Vec<u32> {
        let node = &self.nodes[rank];
        let mut waits: BTreeSet<u32> = node.client.missing().iter().map(|rank| rank.0).collect();
        waits.extend(self.missing_writers(rank));
        waits.remove(&(rank as u32));
        waits.into_iter().collect()
    }

    fn missing_writers(&self, rank: usize) -> Vec<u32> {
        let step = match (self.nodes[rank].step, self.nodes[rank].overdue_step) {
            (Step::Start { step }, _) | (Step::Failed, Some(step)) => step,
            _ => return Vec::new(),
        };
        let Call::Start { ring } = self.calls[self.nodes[rank].call] else { return Vec::new() };
        let (ranks, start) = (self.nodes.len() as u32, self.nodes[rank].starts);
        let writers = match ring {
            true => vec![(rank as u32 + ranks - 1) % ranks],
            false => (0..ranks).filter(|other| *other != rank as u32).collect(),
        };
        let missing = |writer: &u32| !self.nodes[rank].flags.contains(&(start, step, *writer));
        writers.into_iter().filter(missing).collect()
    }

    /// Lets a rank go on with its calls as far as it can.
    fn step(&mut self, rank: usize) {
        while self.nodes[rank].step != Step::Done && self.step_once(rank) {}
    }

    /// Returns whether the rank made progress.
    fn step_once(&mut self, rank: usize) -> bool {
        let call = self.calls[self.nodes[rank].call];
        let is_late = self.now >= self.nodes[rank].deadline;
        match self.nodes[rank].step {
            Step::Done => false,
            Step::Begin => self.begin(rank, call),
            Step::Import { peer } => self.import(rank, peer, is_late),
            Step::Exchange { sequence, own_error } => {
                self.exchange(rank, sequence, own_error, is_late)
            }
            Step::Start { step } => self.start(rank, step, is_late),
            Step::Failed => {
                let Some(record) = self.nodes[rank].control.record().cloned() else { return false };
                self.end_with(rank, self.error_of(&record));
                true
            }
        }
    }

    fn begin(&mut self, rank: usize, call: Call) -> bool {
        // Every call checks first whether the group has ended.
        if self.nodes[rank].control.record().is_some() {
            self.nodes[rank].step = Step::Failed;
            return true;
        }
        self.nodes[rank].deadline = self.now + TIMEOUT;
        match call {
            Call::Pause => {
                let pause = Duration::from_micros(self.rng.u64(0..PAUSE_MAX.as_micros() as u64));
                self.nodes[rank].call += 1;
                // The rank computes until then: no item makes it go on.
                self.nodes[rank].step = PAUSED;
                self.nodes[rank].deadline = self.now + pause;
                self.nodes[rank].paused_until = self.now + pause;
                self.put(pause, Item::Wake(rank));
                return false;
            }
            Call::Exchange(label) => self.contribute(rank, label, None),
            Call::Import => {
                self.nodes[rank].step = Step::Import { peer: 0 };
                self.put(Duration::ZERO, Item::Wake(rank));
            }
            Call::Start { .. } => {
                self.nodes[rank].starts += 1;
                self.nodes[rank].step = Step::Start { step: 0 };
                self.signal(rank, 0);
            }
            Call::Leave => {
                self.send(rank, Event::Request(Request::Leave));
                self.nodes[rank].step = Step::Done;
            }
        }
        self.put(TIMEOUT, Item::Wake(rank));
        true
    }

    fn contribute(&mut self, rank: usize, label: &str, own_error: Option<Rank>) {
        match self.nodes[rank].client.begin_exchange(label) {
            Ok(sequence) => {
                // The rank that a failed call blames, plus one.
                let blob = Blob(vec![own_error.map_or(0, |peer| peer.0 as u8 + 1)]);
                let request = Request::Contribute { label: label.to_owned(), blob };
                self.send(rank, Event::Request(request));
                self.nodes[rank].watches = false;
                self.put_at(self.nodes[rank].deadline - watch_time(TIMEOUT), Item::Wake(rank));
                self.nodes[rank].step = Step::Exchange { sequence, own_error };
            }
            Err(_) => self.fail_call(rank, own_error),
        }
    }

    /// Imports the key of one peer after the other; the memory of a rank whose call has failed is gone.
    fn import(&mut self, rank: usize, peer: u32, is_late: bool) -> bool {
        if peer == u32::MAX {
            // The end of a pause.
            if is_late {
                self.nodes[rank].step = Step::Begin;
            }
            return is_late;
        }
        if peer as usize == self.nodes.len() {
            self.contribute(rank, "import", None);
            return true;
        }
        if self.nodes[peer as usize].freed {
            self.contribute(rank, "import", Some(Rank(peer)));
            return true;
        }
        self.nodes[rank].step = Step::Import { peer: peer + 1 };
        let delay = self.delay();
        self.put(delay, Item::Wake(rank));
        false
    }

    fn exchange(
        &mut self,
        rank: usize,
        sequence: u64,
        own_error: Option<Rank>,
        is_late: bool,
    ) -> bool {
        match self.nodes[rank].client.outcome(sequence, "exchange") {
            Some(Ok(blobs)) => {
                self.nodes[rank].client.end_exchange(sequence);
                let failed = blobs.iter().find_map(|blob| blob[0].checked_sub(1));
                if let Some(failed) = failed {
                    let peer = own_error.map_or(failed.into(), Rank::index);
                    self.end_with(rank, format!("invalid key of rank {peer}"));
                } else {
                    self.nodes[rank].call += 1;
                    self.nodes[rank].step = Step::Begin;
                }
                true
            }
            Some(Err(error)) => {
                self.nodes[rank].client.end_exchange(sequence);
                assert_ne!(error.kind(), ErrorKind::Mismatch, "{error}");
                self.fail_call(rank, own_error);
                true
            }
            None if is_late => {
                let missing = self.nodes[rank].client.missing();
                let mut waits: Vec<_> = missing.iter().map(|rank| rank.0).collect();
                waits.retain(|other| *other as usize != rank);
                if waits.is_empty() && self.hub_in_rank_0 && rank != 0 {
                    waits.push(0);
                }
                let peer = waits.first().map(|rank| Rank(*rank));
                let peer = peer.filter(|_| self.defect != Some(Defect::NoRank));
                self.overdue(rank, waits, AbortRecord::timeout(peer, "exchange"));
                self.fail_call(rank, own_error);
                true
            }
            None => {
                let watch_at = self.nodes[rank].deadline - watch_time(TIMEOUT);
                if self.now >= watch_at && !mem::replace(&mut self.nodes[rank].watches, true) {
                    self.send(rank, Event::Request(Request::Watch));
                }
                false
            }
        }
    }

    fn start(&mut self, rank: usize, step: u32, is_late: bool) -> bool {
        if self.nodes[rank].control.record().is_some() {
            self.nodes[rank].step = Step::Failed;
            return true;
        }
        let missing = self.missing_writers(rank);
        if missing.is_empty() {
            let ring = matches!(self.calls[self.nodes[rank].call], Call::Start { ring: true });
            let steps = if ring { self.nodes.len() as u32 - 1 } else { 1 };
            if step + 1 < steps {
                self.nodes[rank].step = Step::Start { step: step + 1 };
                self.signal(rank, step + 1);
            } else {
                self.nodes[rank].call += 1;
                self.nodes[rank].step = Step::Begin;
            }
            return true;
        }
        if is_late {
            let record = AbortRecord::timeout(Some(Rank(missing[0])), "start");
            let record = AbortRecord { operation: "all-gather 1".to_owned(), ..record };
            self.nodes[rank].step = Step::Failed;
            self.nodes[rank].overdue_step = Some(step);
            self.overdue(rank, missing, record);
        }
        is_late
    }

    /// Writes the flags of a step of a start into the memory of the ranks that wait for them.
    fn signal(&mut self, rank: usize, step: u32) {
        let Call::Start { ring } = self.calls[self.nodes[rank].call] else { return };
        let (ranks, start) = (self.nodes.len(), self.nodes[rank].starts);
        let readers = match ring {
            true => vec![(rank + 1) % ranks],
            false => (0..ranks).filter(|other| *other != rank).collect(),
        };
        for to in readers {
            let delay = self.delay();
            self.put(delay, Item::Flag { to, flag: (start, step, rank as u32) });
        }
    }

    /// Handles a deadline of a rank that has passed.
    fn overdue(&mut self, rank: usize, waits: Vec<u32>, record: AbortRecord) {
        let now = self.now;
        let control = &mut self.nodes[rank].control;
        let action = match self.defect {
            Some(Defect::FirstWriter) => control.abort(now, record),
            Some(Defect::NoRank) if record.peer.is_none() => control.abort(now, record),
            _ => {
                control.set_timeout(TIMEOUT);
                control.overdue(now, RankState { waits, ..RankState::default() }, record)
            }
        };
        self.act(rank, action);
    }

    /// Ends a call that failed with an error of its own or because the group has ended.
    fn fail_call(&mut self, rank: usize, own_error: Option<Rank>) {
        match (own_error, self.defect) {
            (Some(peer), Some(Defect::OwnErrorFirst)) => {
                self.end_with(rank, format!("invalid key of rank {peer}"));
            }
            _ => self.nodes[rank].step = Step::Failed,
        }
    }

    fn error_of(&self, record: &AbortRecord) -> String {
        let peer = record.peer.map_or("none".to_owned(), |peer| peer.to_string());
        format!("{}; rank {peer}", record.text)
    }

    fn end_with(&mut self, rank: usize, error: String) {
        let node = &mut self.nodes[rank];
        node.error = Some((error, self.now));
        node.step = Step::Done;
        node.freed = true;
    }

    fn fail(&mut self) {
        let Some((victim, fault)) = self.fault else { return };
        if self.nodes[victim].step == Step::Done {
            // It has left; nothing can fail.
            self.fault = None;
            return;
        }
        match fault {
            Fault::Kill => {
                self.nodes[victim].killed = true;
                self.nodes[victim].freed = true;
                self.disconnect(victim);
            }
            Fault::Stall(time) => self.nodes[victim].stalled_until = Some(self.now + time),
            Fault::Cut if self.hub_in_rank_0 && victim == 0 => self.fault = None,
            Fault::Cut => {
                self.nodes[victim].cut = true;
                self.put(Duration::ZERO, Item::Closed(victim));
                self.disconnect(victim);
            }
            Fault::Slow => self.nodes[victim].slow = true,
        }
    }

    /// Closes the connections of a process that ended, or of a rank whose connection broke.
    fn disconnect(&mut self, rank: usize) {
        self.lost_at = Some(self.now);
        if self.nodes[rank].killed && rank == 0 && self.hub_in_rank_0 {
            for other in 1..self.nodes.len() {
                let delay = self.delay();
                let at = (self.now + delay).max(self.nodes[other].last_down);
                self.put_at(at, Item::Closed(other));
            }
        } else {
            self.send(rank, Event::Lost { how: "its connection closed".to_owned() });
        }
    }

    /// Returns what is wrong with the end of the run.
    fn check(&self) -> Result<(), String> {
        let victim = self.fault.map(|(victim, _)| victim);
        let survivors = || (0..self.nodes.len()).filter(|rank| Some(*rank) != victim);
        let mut first: Option<&str> = None;
        for rank in survivors() {
            let node = &self.nodes[rank];
            if node.step != Step::Done {
                return Err(format!("rank {rank} is still in {:?}", node.step));
            }
            let Some((error, at)) = &node.error else { continue };
            let Some(victim) = victim else {
                return Err(format!("rank {rank} failed without a fault: {error}"));
            };
            let names = |rank: usize| error.ends_with(&format!("rank {rank}"));
            // A rank that goes on while the others ask for it waits like all of them, or a rank that it has
            // delayed is late now.
            let returns = matches!(self.fault, Some((_, Fault::Stall(time)))
                if time < TIMEOUT + self.return_max() + PAUSE_MAX);
            // On busy processors, so is one that waits for a message on its way.
            let is_on_way = self.is_busy && error.contains("is alive but late");
            let is_late = is_on_way || self.paused_at_end.iter().any(|rank| names(*rank));
            let is_true = is_late || error.ends_with("rank none");
            let is_right = names(victim) || returns && is_true;
            if !is_right {
                return Err(format!("rank {rank} returned {error:?}, expected rank {victim}"));
            }
            if *first.get_or_insert(error) != error {
                return Err(format!("rank {rank} returned {error:?}, others {first:?}"));
            }
            let due = self.lost_at.map_or(node.deadline, |lost| lost.min(node.deadline));
            // A rank that computes notices the end of the group in its next call.
            let bound = due + self.return_max() + PAUSE_MAX;
            if *at > bound {
                return Err(format!("rank {rank} returned {:?} late: {error}", *at - due));
            }
            if node.control.pending.is_some() {
                return Err(format!("rank {rank} still waits for its own message"));
            }
        }
        Ok(())
    }
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ranks, fault {:?}, calls {:?}", self.nodes.len(), self.fault, self.calls)
    }
}
