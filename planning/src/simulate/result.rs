//! Defines the result of a simulation, and finds the critical path.

use std::collections::BTreeMap;
use std::fmt;

use peerlane_hal::Rank;

use super::flows::LinkClass;
use super::machine::{LaneState, Machine, NO_STEP};
use super::program::{Program, StepId};
use crate::cost::Link;
use crate::error::Error;
use crate::plan::{LaneId, Step, Tier};
use crate::topology::Topology;

/// Stores the times, the traffic and the critical path of one simulated execution of an operation.
///
/// Times are picoseconds after the start of the first rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Simulation {
    /// The time at which the lanes and the [host](RankUse::host_ps) of each rank have finished, by
    /// rank.
    pub ends_ps: Vec<u64>,
    /// The number of plan steps of all ranks, including those that start and end each lane.
    pub steps: u64,
    /// Whether each lane of a rank works within a node or between nodes; equal on all ranks.
    pub tiers: Vec<Tier>,
    /// The number of bytes that each rank has sent and received, and the times in which its lanes
    /// and its host were busy, by rank.
    pub ranks: Vec<RankUse>,
    /// The maximum number of simultaneous transfers into one rank, counted separately for local
    /// links and for the network.
    ///
    /// The entries are those of [`LinkClass::Local`] and [`LinkClass::Network`].
    pub incast: [Incast; 2],
    /// The maximum number of simultaneous transfers into one NIC, and a rank that uses that NIC.
    pub nic_incast: Incast,
    /// The steps that determine when the last lane ends, in order of time.
    pub critical_path: Vec<PathStep>,
    /// The steps of the traced ranks with their times, ordered by rank, lane and end.
    pub slices: Vec<Slice>,
}

/// Stores how many bytes one rank has sent and received in a simulation, and how long its lanes and
/// its host were busy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankUse {
    /// The number of bytes sent and received over each kind of link, in the order of
    /// [`LinkClass::ALL`].
    pub traffic: [Traffic; 3],
    /// For each lane, the total time in picoseconds in which at least one of its transfers moved
    /// bytes.
    pub busy_ps: Vec<u64>,
    /// The total time that the host took to submit copies to engines, in picoseconds.
    ///
    /// The engines run meanwhile; in a sequence of starts, the slower of host and engines limits
    /// the rate.
    pub host_ps: u64,
}

/// Stores the number of bytes that one rank sends and receives over one kind of link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// The number of bytes that were read from the rank's memory.
    pub sent_bytes: u64,
    /// The number of bytes that were written to the rank's memory.
    pub received_bytes: u64,
}

/// Stores the used fraction of the ranks' send rate over one kind of link, where 1 is the full
/// rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Utilisation {
    /// The mean utilisation over all ranks.
    pub mean: f64,
    /// The utilisation of the rank that sends or receives the most bytes.
    pub most: f64,
}

/// Stores the largest number of simultaneous transfers into one rank or NIC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Incast {
    /// The largest number of simultaneous transfers.
    pub flows: u32,
    /// The first rank with this number of transfers, into the rank itself or into its NIC.
    pub rank: Rank,
}

/// Records when a step of a traced rank began and ended in the simulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    /// The rank that executes this step of a plan.
    pub rank: Rank,
    /// The lane of the plan that contains the step.
    pub lane: LaneId,
    /// The plan step that was simulated.
    pub step: Step,
    /// The time at which the lane reached the step, in picoseconds.
    ///
    /// For a copy that waited for other copies, it is the time at which its bytes began to move.
    /// For a signal, it is the time at which the signal was sent.
    pub begin_ps: u64,
    /// The time at which the copy was complete, the signal was sent, or the wait was passed.
    ///
    /// The reader of a signal sees it [`flag_seconds`](crate::cost::Link::flag_seconds) later.
    pub end_ps: u64,
}

impl fmt::Display for Slice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, lane, step, .. } = *self;
        write!(f, "rank {rank} lane {lane}: {}", step.display_for(rank))
    }
}

impl Slice {
    /// Returns the step in the text format of plans.
    pub fn text(&self) -> String {
        self.step.display_for(self.rank).to_string()
    }
}

impl Simulation {
    /// Returns the time at which the last rank has finished, in picoseconds.
    pub fn end_ps(&self) -> u64 {
        self.ends_ps.iter().copied().max().unwrap_or(0)
    }

    /// Returns the time at which the last rank has finished, in seconds.
    pub fn seconds(&self) -> f64 {
        self.end_ps() as f64 / 1e12
    }

    /// Returns the kind of link that the step of `slice` uses, or `None` for a signal or a wait.
    pub fn link_class(&self, slice: &Slice) -> Option<LinkClass> {
        match slice.step {
            Step::Put { peer, .. } | Step::Get { peer, .. } => {
                Some(LinkClass::from_tier(self.tiers[slice.lane.index()], peer == slice.rank))
            }
            Step::Reduce { .. } => Some(LinkClass::from_tier(self.tiers[slice.lane.index()], true)),
            Step::Signal { .. } | Step::Wait { .. } => None,
        }
    }

    /// Returns the number of bytes that all ranks together have sent over one kind of link.
    ///
    /// The sum saturates.
    pub fn bytes(&self, class: LinkClass) -> u64 {
        let sent = self.ranks.iter().map(|rank| rank.traffic[class as usize].sent_bytes);
        sent.fold(0, u64::saturating_add)
    }
}

impl Simulation {
    /// Returns the used fraction of the send rate of `link`, as the mean over the ranks and for the
    /// busiest rank.
    pub fn utilisation(&self, class: LinkClass, link: &Link) -> Utilisation {
        // The busiest rank can be one that mostly receives, such as the root of a gather.
        let busiest = self.ranks.iter().map(|rank| {
            let Traffic { sent_bytes, received_bytes } = rank.traffic[class as usize];
            sent_bytes.max(received_bytes)
        });

        let full = link.send_bytes_per_second * self.seconds();
        let share = |bytes: u64| if full > 0.0 { bytes as f64 / full } else { 0.0 };
        Utilisation {
            mean: share(self.bytes(class)) / self.ranks.len() as f64,
            most: share(busiest.max().unwrap_or(0)),
        }
    }
}

/// Returns the step at which the first deadlocked lane waits, and the reason; `None` if all lanes
/// have ended.
pub(super) fn deadlock(machine: &Machine<'_>, program: &Program) -> Option<(StepId, &'static str)> {
    let lane = machine.lanes.iter().find(|lane| lane.state != LaneState::Done)?;
    Some((program.step_id(lane.next), "deadlock: the awaited flag is never signalled"))
}

/// Builds the [`Simulation`] from the state of a machine that has simulated all steps.
///
/// `closed` returns the steps of all lanes of a rank, including the signals and waits by which they
/// begin and end.
pub(super) fn collect(
    machine: &Machine<'_>,
    program: &Program,
    topology: &Topology,
    closed: &mut impl FnMut(Rank) -> Result<Vec<Vec<Step>>, Error>,
) -> Result<Simulation, Error> {
    let lanes = program.lanes();
    let ranks = Rank::all(topology.ranks()).map(|rank| rank_use(machine, lanes, rank)).collect();

    // A rank also ends no earlier than its host has submitted all copies.
    let mut ends_ps = Vec::with_capacity(topology.ranks());
    for (lanes_of_rank, &host) in machine.lanes.chunks(lanes).zip(&machine.recorder.host) {
        let lanes_end = lanes_of_rank.iter().map(|lane| lane.at).max().unwrap_or(0);
        ends_ps.push(lanes_end.max(host));
    }

    let into_rank = |class| {
        incast(topology, |rank| {
            machine.flows.flows_max(machine.resources.rank_ingress(rank, class))
        })
    };
    let into_nic =
        incast(topology, |rank| machine.flows.flows_max(machine.resources.nic_ingress(rank)));

    let path = critical_path(machine, program);
    let mut steps = StepLookup::from_ids(path.iter().map(|step| step.id), closed)?;
    let critical_path = path.iter().map(|step| step.resolve(&steps)).collect();

    // Slices are recorded out of order, because lanes can be ahead of the clock.
    let recorded = machine.recorder.slices.iter();
    let mut traced: Vec<(StepId, u64, u64)> =
        recorded.map(|&(step, begin, end)| (program.step_id(step), begin, end)).collect();
    traced.sort_by_key(|&(id, begin, end)| (id.rank, id.lane, end, begin, id.index));

    steps.add(traced.iter().map(|&(id, ..)| id), closed)?;
    let slice = |&(id, begin_ps, end_ps): &(StepId, u64, u64)| {
        let StepId { rank, lane, .. } = id;
        Slice { rank, lane, step: steps.step(id), begin_ps, end_ps }
    };

    Ok(Simulation {
        ends_ps,
        steps: program.steps.len() as u64,
        tiers: program.tiers.clone(),
        ranks,
        incast: [into_rank(LinkClass::Local), into_rank(LinkClass::Network)],
        nic_incast: into_nic,
        critical_path,
        slices: traced.iter().map(slice).collect(),
    })
}

/// Returns how many bytes `rank` has sent and received, and how long each of its `lanes` lanes and
/// its host were busy.
fn rank_use(machine: &Machine<'_>, lanes: usize, rank: Rank) -> RankUse {
    let first = rank.index() * LinkClass::ALL.len();
    let traffic = |class: LinkClass| Traffic {
        sent_bytes: machine.recorder.sent[first + class as usize],
        received_bytes: machine.recorder.received[first + class as usize],
    };

    let lanes_of_rank = &machine.lanes[rank.index() * lanes..][..lanes];
    RankUse {
        traffic: LinkClass::ALL.map(traffic),
        busy_ps: lanes_of_rank.iter().map(|lane| lane.busy).collect(),
        host_ps: machine.recorder.host[rank.index()],
    }
}

/// Returns the largest number that `flows` returns for a rank, and the first rank with this number.
fn incast(topology: &Topology, flows: impl Fn(Rank) -> u32) -> Incast {
    let all = Rank::all(topology.ranks()).map(|rank| Incast { flows: flows(rank), rank });

    // `max_by_key` returns the last of several maxima, so in reverse order it returns the rank with
    // the lowest number.
    all.rev().max_by_key(|incast| incast.flows).unwrap_or_default()
}

/// Records when a step of the critical path began and ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathStep {
    /// The rank that executes this step of a plan.
    pub rank: Rank,
    /// The lane of the plan that contains the step.
    pub lane: LaneId,
    /// The plan step that was simulated.
    pub step: Step,
    /// The end of the previous step on the critical path, in picoseconds; 0 for the first step.
    pub begin_ps: u64,
    /// The time at which the step ends, in picoseconds.
    pub end_ps: u64,
}

impl PathStep {
    /// Returns the step in the text format of plans.
    pub fn text(&self) -> String {
        self.step.display_for(self.rank).to_string()
    }
}

impl fmt::Display for PathStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, lane, step, .. } = *self;
        write!(f, "rank {rank} lane {lane}: {}", step.display_for(rank))
    }
}

/// Stores the position and the times of a step of the critical path, without the step itself.
///
/// The step is known once the plan of its rank has been requested again.
#[derive(Clone, Copy, Debug)]
struct UnresolvedStep {
    id: StepId,
    begin: u64,
    end: u64,
}

impl UnresolvedStep {
    fn resolve(&self, steps: &StepLookup) -> PathStep {
        let StepId { rank, lane, .. } = self.id;
        let step = steps.step(self.id);
        PathStep { rank, lane, step, begin_ps: self.begin, end_ps: self.end }
    }
}

/// Returns the chain of steps that determine when the last lane ends, in order of time.
fn critical_path(machine: &Machine<'_>, program: &Program) -> Vec<UnresolvedStep> {
    // `max_by_key` returns the last of several maxima, so in reverse order it returns the lane with
    // the lowest number.
    let last = machine.lanes.iter().rev().max_by_key(|lane| lane.at);
    let mut step = last.map_or(NO_STEP, |lane| lane.cause);

    // Every cause is simulated before its step, so the chain ends at a step without a cause.
    let mut path = Vec::new();
    while step != NO_STEP {
        let cause = machine.causes[step as usize];
        let begin = if cause == NO_STEP { 0 } else { machine.ends[cause as usize] };
        path.push(UnresolvedStep {
            id: program.step_id(step),
            begin,
            end: machine.ends[step as usize],
        });
        step = cause;
    }

    path.reverse();
    path
}

/// Stores plan steps by their positions in the plans.
#[derive(Debug, Default)]
struct StepLookup(BTreeMap<StepId, Step>);

impl StepLookup {
    /// Creates a lookup of the steps at the positions `ids`, from the lanes that `closed` returns.
    fn from_ids(
        ids: impl Iterator<Item = StepId>,
        closed: &mut impl FnMut(Rank) -> Result<Vec<Vec<Step>>, Error>,
    ) -> Result<Self, Error> {
        let mut steps = Self::default();
        steps.add(ids, closed)?;
        Ok(steps)
    }

    /// Adds the steps at the positions `ids`, from the lanes that `closed` returns for a rank.
    ///
    /// `closed` is called once for each rank.
    fn add(
        &mut self,
        ids: impl Iterator<Item = StepId>,
        closed: &mut impl FnMut(Rank) -> Result<Vec<Vec<Step>>, Error>,
    ) -> Result<(), Error> {
        // Plans are large, so each call requests a plan at most once.
        let mut ids: Vec<StepId> = ids.collect();
        ids.sort_unstable();
        ids.dedup();

        for of_rank in ids.chunk_by(|a, b| a.rank == b.rank) {
            let lanes = closed(of_rank[0].rank)?;
            self.0.extend(of_rank.iter().map(|&id| (id, lanes[id.lane.index()][id.index])));
        }
        Ok(())
    }

    fn step(&self, id: StepId) -> Step {
        self.0[&id]
    }
}
