//! The events: lanes issue their steps in order, puts move their bytes, flags hop.
//!
//! Only the issue of a put and the end of one are events, because only they touch what others
//! share. Signals and waits in between are worked off at once, ahead of the clock where they take
//! time; all that they change is their own lane and the times of flags.

use peerlane_hal::Rank;

use super::agenda::Agenda;
use super::flows::Flows;
use super::lane::{Deferred, Entry, Hold, Lane, NO_STEP};
use super::meter::Meter;
use super::packed::Move;
use super::program::Program;
use super::resources::{Copy, Resources, Way};
use crate::cost::{Link, Links, picoseconds};
use crate::plan::Tier;
use crate::topology::Topology;

/// A time that is not known yet.
const UNKNOWN: u64 = u64::MAX;
/// The most puts of one lane whose bytes move at once, all to different peers. More of them would
/// only be slower each; those behind them have been issued and follow in order.
const FLOWS_MAX: u32 = 8;

/// The figures of one link in picoseconds.
#[derive(Clone, Copy, Debug)]
struct Price {
    put: u64,
    get: u64,
    flag: u64,
    step: u64,
    puts_in_flight: usize,
    /// Puts of one lane whose bytes move at once.
    flows: u32,
    bytes_per_second: f64,
    get_bytes_per_second: f64,
    /// What a put takes longer whose bytes a peer has put here, and how much more work each is.
    passed_on_put: u64,
    passed_on: f64,
    submit: u64,
}

impl Price {
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

    /// What a copy takes its lane for.
    fn copy(&self, get: bool, passed_on: bool) -> u64 {
        match (get, passed_on) {
            (true, _) => self.get,
            (false, false) => self.put,
            (false, true) => self.put.saturating_add(self.passed_on_put),
        }
    }
}

/// First out of the caches of another processor, then as any other byte.
fn passed_on(link: &Link) -> f64 {
    let Link { bytes_per_second, passed_on_bytes_per_second, .. } = *link;
    passed_on_bytes_per_second.map_or(1.0, |first| 1.0 + bytes_per_second / first)
}

/// All lanes of all ranks.
#[derive(Debug)]
pub(super) struct Machine<'a> {
    program: &'a Program,
    prices: [Price; 3],
    /// Flows that a lane can have.
    width: u32,
    pub(super) lanes: Vec<Lane>,
    pub(super) resources: Resources<'a>,
    pub(super) flows: Flows,
    agenda: Agenda,
    /// Lanes whose flag has come.
    ready: Vec<u32>,
    /// When each step has ended; of a wait that is not passed, when its flag is there.
    pub(super) ends: Vec<u64>,
    /// The step whose end let each step begin.
    pub(super) causes: Vec<u32>,
    pub(super) meter: Meter,
}

impl<'a> Machine<'a> {
    /// All lanes at their first step; `delays` in picoseconds by rank, as long as there are any.
    pub(super) fn new(
        program: &'a Program,
        topology: &'a Topology,
        links: &'a Links,
        delays: &[u64],
        meter: Meter,
    ) -> Self {
        let prices = Way::ALL.map(|way| Price::of(way.link(links)));
        let width = prices.iter().map(|price| price.flows).max().unwrap_or(1);
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
            prices,
            width,
            lanes: program.first.windows(2).enumerate().map(lane).collect(),
            flows: Flows::new(lanes * width as usize, resources.count()),
            resources,
            agenda: Agenda::new(lanes * (width as usize + 1)),
            ready: (0..lanes as u32).rev().collect(),
            ends: vec![UNKNOWN; program.steps.len()],
            causes: vec![NO_STEP; program.steps.len()],
            meter,
        }
    }

    /// Runs all lanes as far as they go.
    pub(super) fn run(&mut self) {
        self.resume();
        while let Some(now) = self.agenda.next_time() {
            while self.agenda.next_time() == Some(now) {
                let Some((_, number)) = self.agenda.pop() else { break };
                let (lane, flow) = (number / (self.width + 1), number % (self.width + 1));
                match flow {
                    0 => self.issue(lane, now),
                    flow => self.end_flow(lane, flow - 1, now),
                }
                self.resume();
            }
            let width = self.width;
            let entry = |flow| flow / width * (width + 1) + 1 + flow % width;
            self.flows.settle(now, &mut self.agenda, entry);
        }
    }

    fn rank_of(&self, lane: u32) -> u32 {
        lane / self.program.lanes() as u32
    }

    fn way(&self, lane: u32, peer: u32) -> Way {
        let lanes = self.program.lanes() as u32;
        Way::of(self.program.tiers[(lane % lanes) as usize], peer == lane / lanes)
    }

    fn price(&self, lane: u32, peer: u32) -> &Price {
        &self.prices[self.way(lane, peer) as usize]
    }

    fn resume(&mut self) {
        while let Some(lane) = self.ready.pop() {
            self.advance(lane);
        }
    }

    /// Works off signals and waits up to the next put, or to where the lane is held.
    fn advance(&mut self, number: u32) {
        loop {
            let lane = &mut self.lanes[number as usize];
            let step = lane.next;
            if step == lane.end {
                lane.hold = if lane.entries.is_empty() { Hold::Done } else { Hold::Drain };
                return;
            }
            match self.program.steps[step as usize].unpack() {
                Move::Put { peer, passed_on, .. } => {
                    return self.prepare(number, peer, false, passed_on);
                }
                Move::Get { peer, .. } => return self.prepare(number, peer, true, false),
                Move::Signal { lane: reader, .. } => self.signal(number, step, reader),
                Move::Wait { .. } if self.ends[step as usize] == UNKNOWN => {
                    lane.hold = Hold::Flag;
                    return;
                }
                Move::Wait { signal } => self.pass(number, step, signal.unwrap_or(NO_STEP)),
            }
            self.lanes[number as usize].next += 1;
        }
    }

    /// Begins to issue the next step, a put or a get, once it may be.
    fn prepare(&mut self, number: u32, peer: u32, get: bool, passed_on: bool) {
        let price = self.price(number, peer);
        let (copy, puts_in_flight) = (price.copy(get, passed_on), price.puts_in_flight);
        let lane = &mut self.lanes[number as usize];
        if lane.entries.len() >= puts_in_flight {
            lane.hold = Hold::Slot;
            return;
        }
        lane.hold = Hold::Issue;
        self.agenda.schedule(number * (self.width + 1), lane.at.saturating_add(copy));
    }

    fn signal(&mut self, number: u32, step: u32, reader: u32) {
        let (rank, peer) = (self.rank_of(number), self.rank_of(reader));
        let behind = (peer != rank).then_some(peer);
        let price = self.price(number, peer).step;
        let lane = &mut self.lanes[number as usize];
        let at = lane.at;
        lane.at = at.saturating_add(price);
        if let Some(entry) = lane.last(behind) {
            let deferred = Deferred { step, behind, number: entry.number, at };
            self.causes[step as usize] = lane.cause;
            lane.deferred.push(deferred);
        } else {
            let cause = std::mem::replace(&mut lane.cause, step);
            self.fire(number, step, at, cause);
        }
    }

    /// The signal takes effect.
    fn fire(&mut self, number: u32, step: u32, at: u64, cause: u32) {
        self.ends[step as usize] = at;
        self.causes[step as usize] = cause;
        let Move::Signal { lane: reader, what } = self.program.steps[step as usize].unpack() else {
            return;
        };
        let hop = self.price(number, self.rank_of(reader)).flag;
        self.ends[what as usize] = at.saturating_add(hop);
        self.meter.instant(step, at);
        let lane = &mut self.lanes[reader as usize];
        if lane.hold == Hold::Flag && u64::from(lane.next) == what {
            lane.hold = Hold::Free;
            self.ready.push(reader);
        }
    }

    /// The lane passes a wait whose flag is known.
    fn pass(&mut self, number: u32, step: u32, signal: u32) {
        let own = self.price(number, self.rank_of(number)).step;
        let lane = &mut self.lanes[number as usize];
        let (came, there) = (lane.at, self.ends[step as usize]);
        let (at, cause) = match came.saturating_add(own) {
            ready if ready >= there => (ready, lane.cause),
            _ => (there, signal),
        };
        self.ends[step as usize] = at;
        self.causes[step as usize] = cause;
        self.meter.slice(step, came, at);
        lane.at = at;
        lane.cause = step;
    }

    /// The next step of the lane, a put or a get, has been issued.
    fn issue(&mut self, number: u32, now: u64) {
        let rank = Rank(self.rank_of(number));
        let lane = &mut self.lanes[number as usize];
        let step = lane.next;
        let (peer, bytes, get, passed_on) = match self.program.steps[step as usize].unpack() {
            Move::Put { peer, bytes, passed_on } => (peer, bytes, false, passed_on),
            Move::Get { peer, bytes } => (peer, bytes, true, false),
            Move::Signal { .. } | Move::Wait { .. } => unreachable!("only copies are issued"),
        };
        let entry = Entry {
            number: lane.issued,
            step,
            peer,
            bytes,
            get,
            passed_on,
            issued: now,
            begun: None,
            cause: lane.cause,
        };
        lane.entries.push_back(entry);
        lane.issued = lane.issued.wrapping_add(1);
        lane.next += 1;
        lane.at = now;
        self.start_flows(number, now, NO_STEP);
        let Price { puts_in_flight, submit, .. } = *self.price(number, peer);
        self.meter.submit(rank, submit);
        if puts_in_flight == 1 {
            self.lanes[number as usize].hold = Hold::Drain;
        } else {
            self.advance(number);
        }
    }

    /// Lets puts move their bytes; `ended` is the step that has made room.
    fn start_flows(&mut self, number: u32, now: u64, ended: u32) {
        let rank = Rank(self.rank_of(number));
        loop {
            let (prices, own) = (&self.prices, rank.0);
            let tier = self.program.tiers[number as usize % self.program.lanes()];
            let price = |entry: &Entry| &prices[Way::of(tier, entry.peer == own) as usize];
            let lane = &mut self.lanes[number as usize];
            let flow = lane.moving.trailing_ones();
            let Some(entry) = lane.startable(|entry| price(entry).flows) else { return };
            entry.begun = Some((now, flow));
            if entry.issued < now {
                entry.cause = ended;
            }
            let Entry { bytes, peer, get, passed_on, .. } = *entry;
            let &Price { bytes_per_second, get_bytes_per_second, .. } = price(entry);
            let rate = if get { get_bytes_per_second } else { bytes_per_second };
            // It keeps busy for longer what the bytes go through.
            let work =
                if passed_on { (bytes as f64 * price(entry).passed_on) as u64 } else { bytes };
            let way = Way::of(tier, peer == own);
            let (from, to) = if get { (Rank(peer), rank) } else { (rank, Rank(peer)) };
            if lane.moving == 0 {
                lane.busy_since = now;
            }
            lane.moving |= 1 << flow;
            let bytes_per_second = rate;
            let copy = Copy { lane: number, by: rank, from, to, way, bytes_per_second };
            let uses = self.resources.uses(copy);
            self.flows.begin(number * self.width + flow, now, work, rate, uses);
            self.meter.bytes(from, to, way, bytes);
        }
    }

    /// The bytes of a put have moved.
    fn end_flow(&mut self, number: u32, flow: u32, now: u64) {
        self.flows.end(number * self.width + flow);
        let lane = &mut self.lanes[number as usize];
        lane.moving &= !(1 << flow);
        if lane.moving == 0 {
            lane.busy += now - lane.busy_since;
        }
        let moved = |entry: &Entry| entry.begun.is_some_and(|(_, with)| with == flow);
        let Some(index) = lane.entries.iter().position(moved) else { return };
        let Some(entry) = lane.entries.remove(index) else { return };
        let Entry { step, peer, get, passed_on, issued, begun, cause, .. } = entry;
        self.ends[step as usize] = now;
        self.causes[step as usize] = cause;
        let begun = begun.map_or(issued, |(begun, _)| begun);
        let alone = if begun == issued { self.price(number, peer).copy(get, passed_on) } else { 0 };
        self.meter.slice(step, begun - alone.min(begun), now);
        while let Some(deferred) = self.lanes[number as usize].release(peer) {
            let Deferred { step: signal, at, .. } = deferred;
            let cause = if at < now { step } else { self.causes[signal as usize] };
            self.fire(number, signal, at.max(now), cause);
        }
        self.start_flows(number, now, step);
        let lane = &mut self.lanes[number as usize];
        let goes_on = match lane.hold {
            Hold::Slot => true,
            Hold::Drain => lane.entries.is_empty(),
            Hold::Free | Hold::Issue | Hold::Flag | Hold::Done => false,
        };
        if goes_on {
            if lane.at < now {
                (lane.at, lane.cause) = (now, step);
            }
            lane.hold = Hold::Free;
            self.advance(number);
        }
    }
}
