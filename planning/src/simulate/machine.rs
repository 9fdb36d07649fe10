//! Simulates the lanes of all ranks, which execute copies, signals and waits in order.
//!
//! Only the end of the issue of a copy and the end of its transfer are events, because only they
//! change what lanes share. Signals and waits in between are handled at once, ahead of the clock if
//! they take time. Apart from their own lane, they change only the times of flags, and wake the
//! lanes that wait for these flags.

use std::collections::VecDeque;
use std::ops::Range;

use peerlane_hal::Rank;

use super::event_queue::EventQueue;
use super::flows::{CopyPath, Flows, LinkClass, Resources};
use super::program::{ModelStep, NEXT_START, Program};
use crate::cost::{Link, Links, picoseconds};
use crate::plan::Tier;
use crate::topology::Topology;

/// Marks the missing cause of a step that waited for no other step.
pub(super) const NO_STEP: u32 = u32::MAX;

/// Marks the time of a flag that is not set, or of a step that has not ended.
const UNKNOWN: u64 = u64::MAX;

/// The maximum simulated time in picoseconds.
///
/// It is far below [`UNKNOWN`] and below times that have saturated, so neither is mistaken for a
/// real time.
pub(super) const TIME_MAX: u64 = u64::MAX / 2;

/// The maximum number of transfers that one lane may have in progress at the same time, each with a
/// different peer.
///
/// More would only make each slower; later copies are issued and follow in order.
const FLOWS_MAX: u32 = 8;

/// Stores the cost parameters of one kind of link, with times in picoseconds.
#[derive(Clone, Copy, Debug)]
struct LinkTimes {
    put: u64,
    get: u64,
    flag: u64,
    step: u64,
    puts_in_flight: usize,
    /// The maximum number of transfers that a lane may have in progress after it starts one over
    /// this kind of link.
    flows: u32,
    bytes_per_second: f64,
    get_bytes_per_second: f64,
    /// The additional time of a put that forwards bytes received from a peer.
    passed_on_put: u64,
    /// The factor by which bytes that a peer has put here take longer to forward than other bytes.
    passed_on: f64,
    submit: u64,
}

impl LinkTimes {
    fn from_link(link: &Link) -> Self {
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

    /// Returns how long the issue of a copy occupies its lane, in picoseconds.
    fn copy(&self, get: bool, passed_on: bool) -> u64 {
        match (get, passed_on) {
            (true, _) => self.get,
            (false, false) => self.put,
            (false, true) => self.put.saturating_add(self.passed_on_put),
        }
    }
}

/// Returns the factor by which bytes that a peer has put here take longer to forward than other
/// bytes.
///
/// The bytes are read first from the caches of another processor, and then like any other bytes.
fn passed_on(link: &Link) -> f64 {
    let Link { bytes_per_second, passed_on_bytes_per_second, .. } = *link;
    passed_on_bytes_per_second.map_or(1.0, |first| 1.0 + bytes_per_second / first)
}

/// Simulates a [`Program`], and stores the state and the results of the simulation.
#[derive(Debug)]
pub(super) struct Machine<'a> {
    program: &'a Program,
    times: [LinkTimes; 3],
    /// The maximum number of transfers that one lane may have in progress at the same time, which
    /// is the largest of the limits of all kinds of links.
    flows_per_lane: u32,
    pub(super) lanes: Vec<Lane>,
    pub(super) resources: Resources<'a>,
    pub(super) flows: Flows,
    /// The scheduled ends of issues and transfers of copies.
    ///
    /// Each lane has one event number for issues, followed by one for each of its transfers.
    events: EventQueue,
    /// The lanes that can continue, because they have just started or the flag that they wait for
    /// is set.
    ready: Vec<u32>,
    /// The end time of each step; until a wait has ended, the time at which its flag is set.
    pub(super) ends: Vec<u64>,
    /// The earlier step whose end allowed each step to begin, or [`NO_STEP`].
    pub(super) causes: Vec<u32>,
    pub(super) recorder: Recorder,
}

impl<'a> Machine<'a> {
    /// Creates a machine that will simulate `program` from its beginning.
    ///
    /// The start delays in `delays` are in picoseconds, by rank; ranks without an entry are not
    /// delayed.
    pub(super) fn new(
        program: &'a Program,
        topology: &'a Topology,
        links: &'a Links,
        delays: &[u64],
        recorder: Recorder,
    ) -> Self {
        let times = LinkClass::ALL.map(|class| LinkTimes::from_link(class.link(links)));
        let flows_per_lane = times.iter().map(|times| times.flows).max().unwrap_or(1);

        let local_lanes = program.tiers.iter().filter(|&&tier| tier == Tier::Local).count();
        let start = links.start(local_lanes);
        let new_lane = |(lane, ends): (usize, &[u32])| {
            let delay = delays.get(lane / program.lanes()).copied().unwrap_or(0);
            Lane::new(ends[0], ends[1], start.saturating_add(delay))
        };

        let lanes = program.first.len() - 1;
        let resources = Resources::new(links, topology, lanes as u32);
        Self {
            program,
            times,
            flows_per_lane,
            lanes: program.first.windows(2).enumerate().map(new_lane).collect(),
            flows: Flows::new(lanes * flows_per_lane as usize, resources.count()),
            resources,
            events: EventQueue::new(lanes * (flows_per_lane as usize + 1)),
            // The last entry continues first, so lanes begin in order of their numbers.
            ready: (0..lanes as u32).rev().collect(),
            ends: vec![UNKNOWN; program.steps.len()],
            causes: vec![NO_STEP; program.steps.len()],
            recorder,
        }
    }

    /// Runs the simulation until no event is left or the time exceeds [`TIME_MAX`].
    pub(super) fn run(&mut self) {
        // Before the first event, all lanes are ready.
        self.resume();

        let events_per_lane = self.flows_per_lane + 1;
        while let Some(now) = self.events.next_time().filter(|now| *now <= TIME_MAX) {
            while self.events.next_time() == Some(now) {
                let Some((_, number)) = self.events.pop() else { break };
                let lane = number / events_per_lane;
                match number % events_per_lane {
                    0 => self.finish_issue(lane, now),
                    flow => self.end_flow(lane, flow - 1, now),
                }
                self.resume();
            }

            // Rates change once for all events at this time, so that their order has no effect on
            // rates.
            let flows_per_lane = self.flows_per_lane;
            let event = |flow| flow / flows_per_lane * events_per_lane + 1 + flow % flows_per_lane;
            self.flows.update_rates(now, &mut self.events, event);
        }
    }

    /// Returns whether the simulation has stopped because the simulated time would exceed
    /// [`TIME_MAX`].
    pub(super) fn exceeds_clock(&self) -> bool {
        self.events.next_time().is_some() || self.lanes.iter().any(|lane| lane.at > TIME_MAX)
    }

    fn rank_of(&self, lane: u32) -> u32 {
        lane / self.program.lanes() as u32
    }

    fn link_class(&self, lane: u32, peer: u32) -> LinkClass {
        let lanes = self.program.lanes() as u32;
        LinkClass::from_tier(self.program.tiers[(lane % lanes) as usize], peer == lane / lanes)
    }

    fn times_of(&self, lane: u32, peer: u32) -> &LinkTimes {
        &self.times[self.link_class(lane, peer) as usize]
    }

    /// Continues all lanes in `ready`, including those that become ready meanwhile.
    fn resume(&mut self) {
        while let Some(lane) = self.ready.pop() {
            self.advance(lane);
        }
    }

    /// Executes the next steps of a lane, until the lane begins to issue a copy, waits or ends.
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
                ModelStep::Joined => {
                    self.ends[step as usize] = lane.at;
                    self.causes[step as usize] = lane.cause;
                    self.recorder.instant(step, lane.at);
                }

                // A wait that names itself is for a flag that the start before has set.
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

    /// Begins to issue a copy to or from `peer`, or waits until the lane has room for another copy.
    fn begin_issue(&mut self, number: u32, peer: u32, get: bool, passed_on: bool) {
        let times = *self.times_of(number, peer);
        let lane = &mut self.lanes[number as usize];
        if lane.copies.len() >= times.puts_in_flight {
            lane.state = LaneState::WaitSlot;
            return;
        }

        lane.state = LaneState::Issuing;
        let issued = lane.at.saturating_add(times.copy(get, passed_on));
        self.events.schedule(number * (self.flows_per_lane + 1), issued);
    }

    /// Signals the flag of `step` to the lane `reader`, or defers the signal until earlier copies
    /// have ended.
    fn signal(&mut self, number: u32, step: u32, reader: u32) {
        let peer = self.rank_of(reader);
        let step_time = self.times_of(number, peer).step;
        let lane = &mut self.lanes[number as usize];
        let at = lane.at;
        lane.at = at.saturating_add(step_time);

        // A signal to a peer follows the copies to that peer, and a signal to the own rank all
        // copies.
        let ordered_after = (peer != self.rank_of(number)).then_some(peer);
        let lane = &mut self.lanes[number as usize];
        if let Some(copy) = lane.last(ordered_after) {
            // The lane continues without the signal, so the signal is not the cause of its next
            // step.
            let deferred = DeferredSignal { step, ordered_after, number: copy.number, at };
            self.causes[step as usize] = lane.cause;
            lane.deferred.push(deferred);
        } else {
            let cause = std::mem::replace(&mut lane.cause, step);
            self.deliver_signal(number, step, at, cause);
        }
    }

    /// Sets the flag of a signal step at the time `at`, and wakes the lane that waits for it.
    fn deliver_signal(&mut self, number: u32, step: u32, at: u64, cause: u32) {
        self.ends[step as usize] = at;
        self.causes[step as usize] = cause;
        self.recorder.instant(step, at);

        let ModelStep::Signal { lane: reader, target } = self.program.steps[step as usize].unpack()
        else {
            return;
        };

        // A flag that is awaited in the next start wakes no lane of this one.
        if target == NEXT_START {
            return;
        }

        let flag_time = self.times_of(number, self.rank_of(reader)).flag;
        self.ends[target as usize] = at.saturating_add(flag_time);

        let lane = &mut self.lanes[reader as usize];
        if lane.state == LaneState::WaitFlag && u64::from(lane.next) == target {
            lane.state = LaneState::Running;
            self.ready.push(reader);
        }
    }

    /// Completes the wait `step` of a lane, after the step `signal` has set the flag.
    fn pass_wait(&mut self, number: u32, step: u32, signal: u32) {
        let step_time = self.times_of(number, self.rank_of(number)).step;
        let lane = &mut self.lanes[number as usize];
        let reached = lane.at;
        let ready = reached.saturating_add(step_time);

        // The time of a flag includes the wake-up of the lane that waits for it, so the time of the
        // step is not added to it: the later of the two times ends the wait.
        let set_at = self.ends[step as usize];
        let (at, cause) = if ready >= set_at { (ready, lane.cause) } else { (set_at, signal) };

        self.ends[step as usize] = at;
        self.causes[step as usize] = cause;
        self.recorder.slice(step, reached, at);

        lane.at = at;
        lane.cause = step;
    }

    /// Completes the issue of a lane's next copy, which is in flight from the time `now` on.
    fn finish_issue(&mut self, number: u32, now: u64) {
        let lane = &mut self.lanes[number as usize];
        let step = lane.next;
        let (peer, bytes, get, passed_on) = match self.program.steps[step as usize].unpack() {
            ModelStep::Put { peer, bytes, passed_on } => (peer, bytes, false, passed_on),
            ModelStep::Get { peer, bytes } => (peer, bytes, true, false),
            ModelStep::Joined | ModelStep::Signal { .. } | ModelStep::Wait { .. } => {
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

        // Only the new copy can start, so no copy that has ended is the cause of a start.
        self.start_flows(number, now, NO_STEP);

        let times = *self.times_of(number, peer);
        self.recorder.submit(Rank(self.rank_of(number)), times.submit);

        // If no other copy may be in flight, the lane waits for the end of this one.
        if times.puts_in_flight == 1 {
            self.lanes[number as usize].state = LaneState::WaitDrain;
        } else {
            self.advance(number);
        }
    }

    /// Starts transfers of copies that a lane has issued, as many as it may have in progress at the
    /// same time.
    ///
    /// The copies have waited for the end of the copy of step `ended`.
    fn start_flows(&mut self, number: u32, now: u64, ended: u32) {
        let rank = Rank(self.rank_of(number));
        let tier = self.program.tiers[number as usize % self.program.lanes()];
        let class_to = |peer: u32| LinkClass::from_tier(tier, peer == rank.0);

        loop {
            let times = &self.times;
            let lane = &mut self.lanes[number as usize];
            let flow = lane.moving_flows.trailing_ones();
            let startable = lane.startable(|copy| times[class_to(copy.peer) as usize].flows);
            let Some(copy) = startable else { return };

            copy.started = Some((now, flow));
            if copy.issued < now {
                copy.cause = ended;
            }
            let CopyInFlight { bytes, peer, get, passed_on, .. } = *copy;

            if lane.moving_flows == 0 {
                lane.busy_since = now;
            }
            lane.moving_flows |= 1 << flow;

            let class = class_to(peer);
            let (from, to) = if get { (Rank(peer), rank) } else { (rank, Rank(peer)) };
            self.recorder.bytes(from, to, class, bytes);

            let times = &self.times[class as usize];
            let bytes_per_second =
                if get { times.get_bytes_per_second } else { times.bytes_per_second };
            let path = CopyPath { lane: number, by: rank, from, to, class, bytes_per_second };
            let demands = self.resources.demands(path);
            // Forwarded bytes count as more bytes, because they are read twice.
            let work = if passed_on { (bytes as f64 * times.passed_on) as u64 } else { bytes };
            let machine_flow = number * self.flows_per_lane + flow;
            self.flows.begin(machine_flow, now, work, bytes_per_second, demands);
        }
    }

    /// Ends a transfer of a lane, delivers the signals that waited for its copy, and continues the
    /// lane.
    fn end_flow(&mut self, number: u32, flow: u32, now: u64) {
        self.flows.end(number * self.flows_per_lane + flow);
        let lane = &mut self.lanes[number as usize];
        lane.moving_flows &= !(1 << flow);
        if lane.moving_flows == 0 {
            lane.busy += now - lane.busy_since;
        }

        // A transfer in progress always belongs to a copy in flight, so the copy is found.
        let has_ended = |copy: &CopyInFlight| copy.started.is_some_and(|(_, moved)| moved == flow);
        let index = lane.copies.iter().position(has_ended);
        let Some(copy) = index.and_then(|index| lane.copies.remove(index)) else { return };

        let CopyInFlight { step, peer, get, passed_on, issued, started, cause, .. } = copy;
        self.ends[step as usize] = now;
        self.causes[step as usize] = cause;

        // The slice of a copy that did not wait for other copies includes the time of its issue.
        let began = started.map_or(issued, |(began, _)| began);
        let issue =
            if began == issued { self.times_of(number, peer).copy(get, passed_on) } else { 0 };
        self.recorder.slice(step, began - issue.min(began), now);

        while let Some(deferred) = self.lanes[number as usize].release(peer) {
            // A lane can be ahead of the clock, so its signal can be later than the end of the
            // copy.
            let DeferredSignal { step: signal, at, .. } = deferred;
            let cause = if at < now { step } else { self.causes[signal as usize] };
            self.deliver_signal(number, signal, at.max(now), cause);
        }

        // Copies that have waited for this one can start.
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
                lane.at = now;
                lane.cause = step;
            }
            lane.state = LaneState::Running;
            self.advance(number);
        }
    }
}

/// Describes what a simulated lane does or waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LaneState {
    Running,
    /// The lane occupies its engine until the next copy is issued.
    Issuing,
    /// The lane waits, because its maximum number of copies is in flight.
    WaitSlot,
    /// The lane waits until all its copies in flight have ended.
    WaitDrain,
    /// The lane waits until the flag of its next step is set.
    WaitFlag,
    /// The lane has executed all its steps, and its copies have ended.
    Done,
}

/// Stores a copy that a lane has issued and that has not ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct CopyInFlight {
    /// The position of the copy among all copies of its lane.
    pub(super) number: u32,
    pub(super) step: u32,
    pub(super) peer: u32,
    pub(super) bytes: u64,
    pub(super) get: bool,
    pub(super) passed_on: bool,
    /// The time at which the copy was issued, in picoseconds.
    pub(super) issued: u64,
    /// The time at which the transfer started, and its number in the lane; `None` if it has not
    /// started.
    pub(super) started: Option<(u64, u32)>,
    /// The step whose end allowed the copy to begin.
    pub(super) cause: u32,
}

/// Stores a signal that waits until earlier copies of its lane have ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeferredSignal {
    pub(super) step: u32,
    /// The peer whose earlier copies must end before the signal; `None` if the copies of all peers
    /// must end.
    pub(super) ordered_after: Option<u32>,
    /// The number of the last copy that must end before the signal.
    pub(super) number: u32,
    /// The time at which the lane reached the signal, in picoseconds.
    pub(super) at: u64,
}

impl DeferredSignal {
    /// Returns whether the signal must follow earlier copies to `peer`.
    fn follows(&self, peer: u32) -> bool {
        self.ordered_after.is_none_or(|only| only == peer)
    }
}

/// Stores the simulated state of one lane of one rank.
#[derive(Clone, Debug)]
pub(super) struct Lane {
    /// The number of the lane's next step in the program.
    pub(super) next: u32,
    /// The number of the step after the last step of the lane.
    pub(super) end: u32,
    pub(super) state: LaneState,
    /// The time at which the lane's next step can begin, or at which the lane was blocked.
    pub(super) at: u64,
    /// The step whose end allowed the lane to reach the time `at`.
    pub(super) cause: u32,
    /// The copies in flight, in the order of their issue.
    pub(super) copies: VecDeque<CopyInFlight>,
    pub(super) deferred: Vec<DeferredSignal>,
    /// The number of copies that the lane has issued.
    pub(super) issued: u32,
    /// A bit mask of the lane's transfers that are moving bytes.
    pub(super) moving_flows: u64,
    /// The total time in which at least one transfer of the lane moved bytes.
    pub(super) busy: u64,
    /// The time at which the lane last began to move bytes.
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

    /// Returns the first issued copy whose transfer may start.
    ///
    /// Its lane has fewer than `flows` transfers that move bytes, and no earlier copy to the same
    /// peer is in flight.
    pub(super) fn startable(
        &mut self,
        flows: impl Fn(&CopyInFlight) -> u32,
    ) -> Option<&mut CopyInFlight> {
        let moving_flows = self.moving_flows.count_ones();
        let waiting = (0..self.copies.len()).filter(|&index| self.copies[index].started.is_none());
        for index in waiting {
            let copy = &self.copies[index];
            // A copy that only lacks a free transfer holds up all later ones, even if their links
            // permit more transfers.
            if moving_flows >= flows(copy) {
                return None;
            }

            if !self.copies.range(..index).any(|before| before.peer == copy.peer) {
                return self.copies.get_mut(index);
            }
        }
        None
    }

    /// Removes and returns the first deferred signal that can be delivered after a copy to `peer`
    /// has ended.
    pub(super) fn release(&mut self, peer: u32) -> Option<DeferredSignal> {
        for (index, deferred) in self.deferred.iter().enumerate() {
            // The end of the copy changes nothing for signals that follow copies to other peers.
            if !deferred.follows(peer) {
                continue;
            }

            let mut before = self.copies.iter().take_while(|copy| copy.number <= deferred.number);
            if !before.any(|copy| deferred.follows(copy.peer)) {
                return Some(self.deferred.remove(index));
            }
        }
        None
    }
}

/// Records how many bytes each rank sends and receives, and the times of the steps of traced ranks.
#[derive(Debug)]
pub(super) struct Recorder {
    /// The number of bytes that each rank has sent, by rank and then by class of link.
    pub(super) sent: Vec<u64>,
    /// The number of bytes that each rank has received, in the order of [`sent`](Self::sent).
    pub(super) received: Vec<u64>,
    /// The total time that the host of each rank takes to submit copies, in picoseconds.
    pub(super) host: Vec<u64>,
    /// The range of step numbers of each traced rank, in ascending order.
    traced: Vec<Range<u32>>,
    /// The step number, the begin time and the end time of each recorded step.
    pub(super) slices: Vec<(u32, u64, u64)>,
}

impl Recorder {
    /// Creates a recorder for the steps of the ranks in `traced`, which must be sorted and contain
    /// no duplicates.
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

    /// Adds a copy of `bytes` bytes to the sent bytes of `from` and the received bytes of `to`.
    pub(super) fn bytes(&mut self, from: Rank, to: Rank, class: LinkClass, bytes: u64) {
        let sent = &mut self.sent[from.index() * LinkClass::ALL.len() + class as usize];
        *sent = sent.saturating_add(bytes);

        let received = &mut self.received[to.index() * LinkClass::ALL.len() + class as usize];
        *received = received.saturating_add(bytes);
    }

    /// Adds the time that the host of `rank` takes to submit one copy.
    pub(super) fn submit(&mut self, rank: Rank, picoseconds: u64) {
        let host = &mut self.host[rank.index()];
        *host = host.saturating_add(picoseconds);
    }

    /// Records a step that takes no time, if its rank is traced.
    pub(super) fn instant(&mut self, step: u32, at: u64) {
        self.slice(step, at, at);
    }

    /// Records the beginning and the end of a step, if its rank is traced.
    pub(super) fn slice(&mut self, step: u32, begin: u64, end: u64) {
        // Only the first range that ends after the step can contain it.
        let before = self.traced.partition_point(|steps| steps.end <= step);
        if self.traced.get(before).is_some_and(|steps| steps.contains(&step)) {
            self.slices.push((step, begin, end));
        }
    }
}
