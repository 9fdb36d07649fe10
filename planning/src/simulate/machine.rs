//! Simulates the lanes of a collective, which issue their steps in order, copy bytes and signal flags.
//!
//! Only the end of the issue of a copy and the end of its transfer are events, because only they change what
//! lanes share. Signals and waits in between are handled at once, ahead of the clock if they take time. They
//! change only their own lane and the times of flags.

use std::collections::VecDeque;
use std::ops::Range;

use peerlane_hal::Rank;

use super::event_queue::EventQueue;
use super::flows::{CopyPath, Flows, LinkClass, Resources};
use super::program::{ModelStep, NEXT_START, Program};
use crate::cost::{Link, Links, picoseconds};
use crate::plan::Tier;
use crate::topology::Topology;

pub(super) const NO_STEP: u32 = u32::MAX;

const UNKNOWN: u64 = u64::MAX;
/// The maximum simulated time in picoseconds. No time near [`UNKNOWN`] or one that has saturated is mistaken
/// for a real one.
pub(super) const TIME_MAX: u64 = u64::MAX / 2;
/// The maximum number of puts of one lane that are transferred at once, all to different peers. More would
/// only make each slower; later puts are issued and follow in order.
const FLOWS_MAX: u32 = 8;

/// The parameters of one link, with times in picoseconds.
#[derive(Clone, Copy, Debug)]
struct LinkTimes {
    put: u64,
    get: u64,
    flag: u64,
    step: u64,
    puts_in_flight: usize,
    flows: u32,
    bytes_per_second: f64,
    get_bytes_per_second: f64,
    /// The additional time of a put that forwards bytes received from a peer.
    passed_on_put: u64,
    passed_on: f64,
    submit: u64,
}

impl LinkTimes {
    fn of(link: &Link) -> Self {
        Self {
            put: picoseconds(link.put_seconds),
            get: picoseconds(link.get_seconds),
            flag: picoseconds(link.flag_seconds),
            step: picoseconds(link.step_seconds),
            puts_in_flight: link.puts_in_flight as usize,
            flows: link.puts_in_flight.min(FLOWS_MAX),
            bytes_per_second: link.bytes_per_second,
            get_bytes_per_second: link.get_bytes_per_second.unwrap_or(link.bytes_per_second),
            passed_on_put: picoseconds(link.passed_on_seconds),
            passed_on: passed_on(link),
            submit: picoseconds(link.submit_seconds),
        }
    }

    /// Returns the time in picoseconds for which a copy occupies its lane.
    fn copy(&self, get: bool, passed_on: bool) -> u64 {
        match (get, passed_on) {
            (true, _) => self.get,
            (false, false) => self.put,
            (false, true) => self.put.saturating_add(self.passed_on_put),
        }
    }
}

/// Returns the factor by which it takes longer to forward bytes that were received from a peer. They are read
/// first from the caches of another processor, and then like any other bytes.
fn passed_on(link: &Link) -> f64 {
    let Link { bytes_per_second, passed_on_bytes_per_second, .. } = *link;
    passed_on_bytes_per_second.map_or(1.0, |first| 1.0 + bytes_per_second / first)
}

#[derive(Debug)]
pub(super) struct Machine<'a> {
    program: &'a Program,
    times: [LinkTimes; 3],
    flows_per_lane: u32,
    pub(super) lanes: Vec<Lane>,
    pub(super) resources: Resources<'a>,
    pub(super) flows: Flows,
    events: EventQueue,
    /// The lanes that can continue, because they have just started or the flag that they wait for is set.
    ready: Vec<u32>,
    /// The end time of each step, or for a wait that is not passed, the time at which its flag is set.
    pub(super) ends: Vec<u64>,
    /// For each step, the earlier step whose end allowed it to begin.
    pub(super) causes: Vec<u32>,
    pub(super) recorder: Recorder,
}

impl<'a> Machine<'a> {
    /// The start delays in `delays` are in picoseconds, by rank; ranks without an entry are not delayed.
    pub(super) fn new(
        program: &'a Program,
        topology: &'a Topology,
        links: &'a Links,
        delays: &[u64],
        recorder: Recorder,
    ) -> Self {
        let times = LinkClass::ALL.map(|class| LinkTimes::of(class.link(links)));
        let flows_per_lane = times.iter().map(|times| times.flows).max().unwrap_or(1);
        let lanes = program.first.len() - 1;
        let local_lanes = program.tiers.iter().filter(|&&tier| tier == Tier::Local).count();
        let start = links.start(local_lanes);
        let lane = |(lane, ends): (usize, &[u32])| {
            let delay = delays.get(lane / program.lanes()).copied().unwrap_or(0);
            Lane::new(ends[0], ends[1], start.saturating_add(delay))
        };
        let resources = Resources::new(links, topology, lanes as u32);
        Self {
            program,
            times,
            flows_per_lane,
            lanes: program.first.windows(2).enumerate().map(lane).collect(),
            flows: Flows::new(lanes * flows_per_lane as usize, resources.count()),
            resources,
            events: EventQueue::new(lanes * (flows_per_lane as usize + 1)),
            ready: (0..lanes as u32).rev().collect(),
            ends: vec![UNKNOWN; program.steps.len()],
            causes: vec![NO_STEP; program.steps.len()],
            recorder,
        }
    }

    pub(super) fn run(&mut self) {
        self.resume();
        while let Some(now) = self.events.next_time().filter(|now| *now <= TIME_MAX) {
            while self.events.next_time() == Some(now) {
                let Some((_, number)) = self.events.pop() else { break };
                let (lane, flow) =
                    (number / (self.flows_per_lane + 1), number % (self.flows_per_lane + 1));
                match flow {
                    0 => self.finish_issue(lane, now),
                    flow => self.end_flow(lane, flow - 1, now),
                }
                self.resume();
            }
            let flows_per_lane = self.flows_per_lane;
            let event =
                |flow| flow / flows_per_lane * (flows_per_lane + 1) + 1 + flow % flows_per_lane;
            self.flows.update_rates(now, &mut self.events, event);
        }
    }

    /// Returns whether the simulation has stopped because the simulated time would exceed [`TIME_MAX`].
    pub(super) fn exceeds_clock(&self) -> bool {
        self.events.next_time().is_some() || self.lanes.iter().any(|lane| lane.at > TIME_MAX)
    }

    fn rank_of(&self, lane: u32) -> u32 {
        lane / self.program.lanes() as u32
    }

    fn link_class(&self, lane: u32, peer: u32) -> LinkClass {
        let lanes = self.program.lanes() as u32;
        LinkClass::of(self.program.tiers[(lane % lanes) as usize], peer == lane / lanes)
    }

    fn times_of(&self, lane: u32, peer: u32) -> &LinkTimes {
        &self.times[self.link_class(lane, peer) as usize]
    }

    fn resume(&mut self) {
        while let Some(lane) = self.ready.pop() {
            self.advance(lane);
        }
    }

    fn advance(&mut self, number: u32) {
        loop {
            let lane = &mut self.lanes[number as usize];
            let step = lane.next;
            if step == lane.end {
                lane.state =
                    if lane.copies.is_empty() { LaneState::Done } else { LaneState::WaitDrain };
                return;
            }
            match self.program.steps[step as usize].unpack() {
                ModelStep::Put { peer, passed_on, .. } => {
                    return self.begin_issue(number, peer, false, passed_on);
                }
                ModelStep::Get { peer, .. } => return self.begin_issue(number, peer, true, false),
                ModelStep::Signal { lane: reader, .. } => self.signal(number, step, reader),
                ModelStep::Wait { signal } if signal == Some(step) => {
                    self.ends[step as usize] = 0;
                    self.pass_wait(number, step, NO_STEP);
                }
                ModelStep::Wait { .. } if self.ends[step as usize] == UNKNOWN => {
                    lane.state = LaneState::WaitFlag;
                    return;
                }
                ModelStep::Wait { signal } => {
                    self.pass_wait(number, step, signal.unwrap_or(NO_STEP))
                }
            }
            self.lanes[number as usize].next += 1;
        }
    }

    fn begin_issue(&mut self, number: u32, peer: u32, get: bool, passed_on: bool) {
        let times = self.times_of(number, peer);
        let (copy, puts_in_flight) = (times.copy(get, passed_on), times.puts_in_flight);
        let lane = &mut self.lanes[number as usize];
        if lane.copies.len() >= puts_in_flight {
            lane.state = LaneState::WaitSlot;
            return;
        }
        lane.state = LaneState::Issuing;
        self.events.schedule(number * (self.flows_per_lane + 1), lane.at.saturating_add(copy));
    }

    fn signal(&mut self, number: u32, step: u32, reader: u32) {
        let (rank, peer) = (self.rank_of(number), self.rank_of(reader));
        let ordered_after = (peer != rank).then_some(peer);
        let step_time = self.times_of(number, peer).step;
        let lane = &mut self.lanes[number as usize];
        let at = lane.at;
        lane.at = at.saturating_add(step_time);
        if let Some(copy) = lane.last(ordered_after) {
            let deferred = DeferredSignal { step, ordered_after, number: copy.number, at };
            self.causes[step as usize] = lane.cause;
            lane.deferred.push(deferred);
        } else {
            let cause = std::mem::replace(&mut lane.cause, step);
            self.deliver_signal(number, step, at, cause);
        }
    }

    fn deliver_signal(&mut self, number: u32, step: u32, at: u64, cause: u32) {
        self.ends[step as usize] = at;
        self.causes[step as usize] = cause;
        let ModelStep::Signal { lane: reader, target } = self.program.steps[step as usize].unpack()
        else {
            return;
        };
        if target == NEXT_START {
            self.recorder.instant(step, at);
            return;
        }
        let flag_time = self.times_of(number, self.rank_of(reader)).flag;
        self.ends[target as usize] = at.saturating_add(flag_time);
        self.recorder.instant(step, at);
        let lane = &mut self.lanes[reader as usize];
        if lane.state == LaneState::WaitFlag && u64::from(lane.next) == target {
            lane.state = LaneState::Running;
            self.ready.push(reader);
        }
    }

    fn pass_wait(&mut self, number: u32, step: u32, signal: u32) {
        let own = self.times_of(number, self.rank_of(number)).step;
        let lane = &mut self.lanes[number as usize];
        let (reached, set_at) = (lane.at, self.ends[step as usize]);
        let (at, cause) = match reached.saturating_add(own) {
            ready if ready >= set_at => (ready, lane.cause),
            _ => (set_at, signal),
        };
        self.ends[step as usize] = at;
        self.causes[step as usize] = cause;
        self.recorder.slice(step, reached, at);
        lane.at = at;
        lane.cause = step;
    }

    fn finish_issue(&mut self, number: u32, now: u64) {
        let rank = Rank(self.rank_of(number));
        let lane = &mut self.lanes[number as usize];
        let step = lane.next;
        let (peer, bytes, get, passed_on) = match self.program.steps[step as usize].unpack() {
            ModelStep::Put { peer, bytes, passed_on } => (peer, bytes, false, passed_on),
            ModelStep::Get { peer, bytes } => (peer, bytes, true, false),
            ModelStep::Signal { .. } | ModelStep::Wait { .. } => {
                unreachable!("only copies are issued")
            }
        };
        let copy = CopyInFlight {
            number: lane.issued,
            step,
            peer,
            bytes,
            get,
            passed_on,
            issued: now,
            started: None,
            cause: lane.cause,
        };
        lane.copies.push_back(copy);
        lane.issued = lane.issued.wrapping_add(1);
        lane.next += 1;
        lane.at = now;
        self.start_flows(number, now, NO_STEP);
        let LinkTimes { puts_in_flight, submit, .. } = *self.times_of(number, peer);
        self.recorder.submit(rank, submit);
        if puts_in_flight == 1 {
            self.lanes[number as usize].state = LaneState::WaitDrain;
        } else {
            self.advance(number);
        }
    }

    fn start_flows(&mut self, number: u32, now: u64, ended: u32) {
        let rank = Rank(self.rank_of(number));
        loop {
            let (times, own) = (&self.times, rank.0);
            let tier = self.program.tiers[number as usize % self.program.lanes()];
            let times_of =
                |copy: &CopyInFlight| &times[LinkClass::of(tier, copy.peer == own) as usize];
            let lane = &mut self.lanes[number as usize];
            let flow = lane.moving_flows.trailing_ones();
            let Some(copy) = lane.startable(|copy| times_of(copy).flows) else { return };
            copy.started = Some((now, flow));
            if copy.issued < now {
                copy.cause = ended;
            }
            let CopyInFlight { bytes, peer, get, passed_on, .. } = *copy;
            let &LinkTimes { bytes_per_second, get_bytes_per_second, .. } = times_of(copy);
            let rate = if get { get_bytes_per_second } else { bytes_per_second };
            // The bytes occupy what they pass through for longer.
            let work =
                if passed_on { (bytes as f64 * times_of(copy).passed_on) as u64 } else { bytes };
            let class = LinkClass::of(tier, peer == own);
            let (from, to) = if get { (Rank(peer), rank) } else { (rank, Rank(peer)) };
            if lane.moving_flows == 0 {
                lane.busy_since = now;
            }
            lane.moving_flows |= 1 << flow;
            let bytes_per_second = rate;
            let copy = CopyPath { lane: number, by: rank, from, to, class, bytes_per_second };
            let demands = self.resources.demands(copy);
            self.flows.begin(number * self.flows_per_lane + flow, now, work, rate, demands);
            self.recorder.bytes(from, to, class, bytes);
        }
    }

    fn end_flow(&mut self, number: u32, flow: u32, now: u64) {
        self.flows.end(number * self.flows_per_lane + flow);
        let lane = &mut self.lanes[number as usize];
        lane.moving_flows &= !(1 << flow);
        if lane.moving_flows == 0 {
            lane.busy += now - lane.busy_since;
        }
        let moved = |copy: &CopyInFlight| copy.started.is_some_and(|(_, with)| with == flow);
        let Some(index) = lane.copies.iter().position(moved) else { return };
        let Some(copy) = lane.copies.remove(index) else { return };
        let CopyInFlight { step, peer, get, passed_on, issued, started, cause, .. } = copy;
        self.ends[step as usize] = now;
        self.causes[step as usize] = cause;
        let started = started.map_or(issued, |(started, _)| started);
        let alone =
            if started == issued { self.times_of(number, peer).copy(get, passed_on) } else { 0 };
        self.recorder.slice(step, started - alone.min(started), now);
        while let Some(deferred) = self.lanes[number as usize].release(peer) {
            let DeferredSignal { step: signal, at, .. } = deferred;
            let cause = if at < now { step } else { self.causes[signal as usize] };
            self.deliver_signal(number, signal, at.max(now), cause);
        }
        self.start_flows(number, now, step);
        let lane = &mut self.lanes[number as usize];
        let can_advance = match lane.state {
            LaneState::WaitSlot => true,
            LaneState::WaitDrain => lane.copies.is_empty(),
            LaneState::Running | LaneState::Issuing | LaneState::WaitFlag | LaneState::Done => {
                false
            }
        };
        if can_advance {
            if lane.at < now {
                (lane.at, lane.cause) = (now, step);
            }
            lane.state = LaneState::Running;
            self.advance(number);
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LaneState {
    Running,
    Issuing,
    /// The lane waits, because its maximum number of copies is in flight.
    WaitSlot,
    /// The lane waits until all its copies in flight have ended.
    WaitDrain,
    WaitFlag,
    Done,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct CopyInFlight {
    pub(super) number: u32,
    pub(super) step: u32,
    pub(super) peer: u32,
    pub(super) bytes: u64,
    pub(super) get: bool,
    pub(super) passed_on: bool,
    /// The time at which the copy was issued, in picoseconds.
    pub(super) issued: u64,
    pub(super) started: Option<(u64, u32)>,
    pub(super) cause: u32,
}

/// A signal that waits until earlier copies have ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeferredSignal {
    pub(super) step: u32,
    /// The peer to which earlier copies must end before the signal; `None` for all peers.
    pub(super) ordered_after: Option<u32>,
    pub(super) number: u32,
    pub(super) at: u64,
}

#[derive(Clone, Debug)]
pub(super) struct Lane {
    pub(super) next: u32,
    pub(super) end: u32,
    pub(super) state: LaneState,
    /// The time at which the lane's next step can begin, or since when the lane is blocked.
    pub(super) at: u64,
    pub(super) cause: u32,
    pub(super) copies: VecDeque<CopyInFlight>,
    pub(super) deferred: Vec<DeferredSignal>,
    pub(super) issued: u32,
    /// A bit mask of the lane's transfers that are moving bytes.
    pub(super) moving_flows: u64,
    /// The total time in which at least one transfer of the lane moved bytes. `busy_since` is the begin of
    /// the current such time.
    pub(super) busy: u64,
    pub(super) busy_since: u64,
}

impl Lane {
    pub(super) fn new(next: u32, end: u32, at: u64) -> Self {
        Self {
            next,
            end,
            state: LaneState::Running,
            at,
            cause: NO_STEP,
            copies: VecDeque::new(),
            deferred: Vec::new(),
            issued: 0,
            moving_flows: 0,
            busy: 0,
            busy_since: 0,
        }
    }

    /// Returns the last copy in flight to `peer`, or to any rank if `peer` is `None`.
    pub(super) fn last(&self, peer: Option<u32>) -> Option<&CopyInFlight> {
        self.copies.iter().rev().find(|copy| peer.is_none_or(|peer| copy.peer == peer))
    }

    /// Returns the first copy whose transfer may start, because no earlier copy to the same peer is in
    /// flight. Fewer than `flows` flows of the lane are moving.
    pub(super) fn startable(
        &mut self,
        flows: impl Fn(&CopyInFlight) -> u32,
    ) -> Option<&mut CopyInFlight> {
        let moving_flows = self.moving_flows.count_ones();
        let waiting = (0..self.copies.len()).filter(|&index| self.copies[index].started.is_none());
        for index in waiting {
            let copy = &self.copies[index];
            if moving_flows >= flows(copy) {
                return None;
            }
            if !self.copies.range(..index).any(|before| before.peer == copy.peer) {
                return self.copies.get_mut(index);
            }
        }
        None
    }

    pub(super) fn release(&mut self, peer: u32) -> Option<DeferredSignal> {
        let index = self.deferred.iter().position(|deferred| {
            let DeferredSignal { ordered_after, number, .. } = *deferred;
            let mut before = self.copies.iter().take_while(|copy| copy.number <= number);
            ordered_after.is_none_or(|ordered_after| ordered_after == peer)
                && !before.any(|copy| {
                    ordered_after.is_none_or(|ordered_after| ordered_after == copy.peer)
                })
        })?;
        Some(self.deferred.remove(index))
    }
}

#[derive(Debug)]
pub(super) struct Recorder {
    /// The number of bytes that each rank has sent, indexed by rank and then by kind of link.
    pub(super) sent: Vec<u64>,
    pub(super) received: Vec<u64>,
    /// The time in which each rank's host submits copies, in picoseconds.
    pub(super) host: Vec<u64>,
    traced: Vec<Range<u32>>,
    pub(super) slices: Vec<(u32, u64, u64)>,
}

impl Recorder {
    /// The ranks in `traced` must be sorted and contain no duplicates.
    pub(super) fn new(ranks: usize, program: &Program, traced: &[Rank]) -> Self {
        let lanes = program.lanes();
        let steps = |rank: &Rank| {
            let first = rank.index() * lanes;
            program.first[first]..program.first[first + lanes]
        };
        Self {
            sent: vec![0; ranks * LinkClass::ALL.len()],
            received: vec![0; ranks * LinkClass::ALL.len()],
            host: vec![0; ranks],
            traced: traced.iter().map(steps).collect(),
            slices: Vec::new(),
        }
    }

    pub(super) fn bytes(&mut self, from: Rank, to: Rank, class: LinkClass, bytes: u64) {
        let sent = &mut self.sent[from.index() * LinkClass::ALL.len() + class as usize];
        *sent = sent.saturating_add(bytes);
        let received = &mut self.received[to.index() * LinkClass::ALL.len() + class as usize];
        *received = received.saturating_add(bytes);
    }

    pub(super) fn submit(&mut self, rank: Rank, picoseconds: u64) {
        let host = &mut self.host[rank.index()];
        *host = host.saturating_add(picoseconds);
    }

    pub(super) fn instant(&mut self, step: u32, at: u64) {
        self.slice(step, at, at);
    }

    pub(super) fn slice(&mut self, step: u32, begin: u64, end: u64) {
        let before = self.traced.partition_point(|steps| steps.end <= step);
        if self.traced.get(before).is_some_and(|steps| steps.contains(&step)) {
            self.slices.push((step, begin, end));
        }
    }
}
