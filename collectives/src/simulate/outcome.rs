//! What a simulation has found.

use std::fmt;

use peerlane_hal::Rank;

use super::lane::{Hold, Lane};
use super::machine::Machine;
use super::path::{self, Stage};
use super::program::{Place, Program};
use super::resources::Way;
use crate::cost::Link;
use crate::error::Error;
use crate::plan::{LaneId, Step, StepOf, Tier};
use crate::topology::Topology;

/// One start of all ranks. Times are picoseconds from the moment at which the first rank starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Simulation {
    /// When each rank has ended: its lanes, and its [host](RankUse::host_ps) if that takes longer.
    pub ends_ps: Vec<u64>,
    /// Steps of all ranks, with entry and exit of lanes.
    pub steps: u64,
    /// The tier of each lane of a rank.
    pub tiers: Vec<Tier>,
    /// What each rank has moved, by rank.
    pub ranks: Vec<RankUse>,
    /// The most flows at once into one rank over [`Way::Local`], and into one rank over
    /// [`Way::Network`], in this order.
    pub incast: [Incast; 2],
    /// The most flows at once into one network card, and a rank that uses it.
    pub card_incast: Incast,
    /// The chain of steps that decides when the last lane ends, in order of time.
    pub critical_path: Vec<Stage>,
    /// The steps of the traced ranks, by rank, lane and end.
    pub slices: Vec<Slice>,
}

/// What one rank has moved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankUse {
    /// By way, as [`Way::ALL`].
    pub traffic: [Traffic; 3],
    /// How long each lane has moved bytes, in picoseconds.
    pub busy_ps: Vec<u64>,
    /// How long its host is busy handing puts over to engines, which do them meanwhile. Where starts
    /// follow each other, the slower of host and engines sets the pace.
    pub host_ps: u64,
}

/// Bytes of one rank on one way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Read from the rank.
    pub sent_bytes: u64,
    /// Written to the rank.
    pub received_bytes: u64,
}

/// Shares of what a link gives, 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Utilisation {
    /// Of all ranks.
    pub mean: f64,
    /// Of the rank with the most bytes.
    pub most: f64,
}

/// Flows into one place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Incast {
    /// The most at once.
    pub flows: u32,
    /// The first rank that had so many.
    pub rank: Rank,
}

/// A step of a traced rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Whose step.
    pub rank: Rank,
    /// In which lane.
    pub lane: LaneId,
    /// The step.
    pub step: Step,
    /// When the lane came to it; of a put that had to wait for others, when its bytes began to move.
    pub begin_ps: u64,
    /// When its bytes had moved, the signal took effect, the wait was passed.
    pub end_ps: u64,
}

impl fmt::Display for Slice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, lane, step, .. } = *self;
        write!(f, "rank {rank} lane {lane}: {}", StepOf { rank, step })
    }
}

impl Slice {
    /// The step as a line of the plan's text.
    pub fn text(&self) -> String {
        StepOf { rank: self.rank, step: self.step }.to_string()
    }
}

impl Simulation {
    /// When the last rank has ended.
    pub fn end_ps(&self) -> u64 {
        self.ends_ps.iter().copied().max().unwrap_or(0)
    }

    /// The same in seconds.
    pub fn seconds(&self) -> f64 {
        self.end_ps() as f64 / 1e12
    }

    /// Where the bytes of a slice go; `None` of a signal or a wait.
    pub fn way(&self, slice: &Slice) -> Option<Way> {
        match slice.step {
            Step::Put { peer, .. } | Step::Get { peer, .. } => {
                Some(Way::of(self.tiers[slice.lane.index()], peer == slice.rank))
            }
            Step::Signal { .. } | Step::Wait { .. } => None,
        }
    }

    /// Bytes that all ranks together have sent on a way.
    pub fn bytes(&self, way: Way) -> u64 {
        self.ranks.iter().map(|rank| rank.traffic[way as usize].sent_bytes).sum()
    }
}

impl Simulation {
    /// What share of the time the ranks use what they can send on a way of `link`: on average, and
    /// the one that uses most, sent or received.
    pub fn utilisation(&self, way: Way, link: &Link) -> Utilisation {
        let full = link.send_bytes_per_second * self.seconds();
        let share = |bytes: u64| if full > 0.0 { bytes as f64 / full } else { 0.0 };
        let busiest = self.ranks.iter().map(|rank| {
            let Traffic { sent_bytes, received_bytes } = rank.traffic[way as usize];
            sent_bytes.max(received_bytes)
        });
        Utilisation {
            mean: share(self.bytes(way)) / self.ranks.len() as f64,
            most: share(busiest.max().unwrap_or(0)),
        }
    }
}

/// The first lane that has not ended, which is a fault of the plans.
pub(super) fn fault(machine: &Machine<'_>, program: &Program) -> Option<(Place, &'static str)> {
    let lane = machine.lanes.iter().find(|lane| lane.hold != Hold::Done)?;
    Some((program.place(lane.next), "deadlock: its flag does not come"))
}

/// What the machine has found; `closed` makes the steps of a rank once more.
pub(super) fn collect(
    machine: &Machine<'_>,
    program: &Program,
    topology: &Topology,
    closed: &mut impl FnMut(Rank) -> Result<Vec<Vec<Step>>, Error>,
) -> Result<Simulation, Error> {
    let lanes = program.lanes();
    let end = |(lanes, host): (&[Lane], &u64)| {
        lanes.iter().map(|lane| lane.at).max().unwrap_or(0).max(*host)
    };
    let ends_ps: Vec<u64> = machine.lanes.chunks(lanes).zip(&machine.meter.host).map(end).collect();
    let ranks = Rank::all(topology.ranks()).map(|rank| rank_use(machine, lanes, rank)).collect();
    let into = |way| most(topology, |rank| machine.flows.most(machine.resources.way_in(rank, way)));
    let path = path::critical(machine, program);
    let mut steps = path::Steps::of(path.iter().map(|stage| stage.place), closed)?;
    let critical_path = path.iter().map(|raw| raw.stage(&steps)).collect();
    let mut places: Vec<(Place, u64, u64)> = machine
        .meter
        .slices
        .iter()
        .map(|&(step, begin, end)| (program.place(step), begin, end))
        .collect();
    places.sort_by_key(|&(place, begin, end)| (place.rank, place.lane, end, begin, place.index));
    steps.add(places.iter().map(|&(place, ..)| place), closed)?;
    let slice = |&(place, begin_ps, end_ps): &(Place, u64, u64)| {
        let Place { rank, lane, .. } = place;
        Slice { rank, lane, step: steps.step(place), begin_ps, end_ps }
    };
    Ok(Simulation {
        ends_ps,
        steps: program.steps.len() as u64,
        tiers: program.tiers.clone(),
        ranks,
        incast: [into(Way::Local), into(Way::Network)],
        card_incast: most(topology, |rank| machine.flows.most(machine.resources.card_in(rank))),
        critical_path,
        slices: places.iter().map(slice).collect(),
    })
}

fn rank_use(machine: &Machine<'_>, lanes: usize, rank: Rank) -> RankUse {
    let first = rank.index() * Way::ALL.len();
    let traffic = |way: Way| Traffic {
        sent_bytes: machine.meter.sent[first + way as usize],
        received_bytes: machine.meter.received[first + way as usize],
    };
    let own = &machine.lanes[rank.index() * lanes..][..lanes];
    RankUse {
        traffic: Way::ALL.map(traffic),
        busy_ps: own.iter().map(|lane| lane.busy).collect(),
        host_ps: machine.meter.host[rank.index()],
    }
}

fn most(topology: &Topology, flows: impl Fn(Rank) -> u32) -> Incast {
    let all = Rank::all(topology.ranks()).map(|rank| Incast { flows: flows(rank), rank });
    all.rev().max_by_key(|incast| incast.flows).unwrap_or_default()
}
