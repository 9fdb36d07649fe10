//! Finds the rank that signals a flag, for error texts.
//!
//! A plan names the flags that its rank waits for, and not their writers. A group can have too many ranks to plan for all of
//! them at every preparation, so the writer is searched when a text needs it, in likely places first.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use peerlane_hal::Rank;

use crate::plan::{Flag, Plan, Step};
use crate::topology::Topology;

type Planner = Box<dyn Fn(Rank) -> Option<Plan> + Send + Sync>;

/// Finds the writers of the flags that one rank reads.
pub(crate) struct Writers {
    reader: Rank,
    topology: Topology,
    plan: Planner,
    found: Mutex<BTreeMap<Flag, Rank>>,
}

impl Writers {
    /// Creates a search over the plans that `plan` makes.
    pub(crate) fn new(
        reader: Rank,
        topology: Topology,
        plan: impl Fn(Rank) -> Option<Plan> + Send + Sync + 'static,
    ) -> Self {
        Self { reader, topology, plan: Box::new(plan), found: Mutex::default() }
    }

    /// Returns the rank that signals `flag`; a verified plan has exactly one.
    pub(crate) fn of(&self, flag: Flag) -> Rank {
        let cell = match flag {
            Flag::Ready { from, .. } => return from,
            Flag::Taken { by, .. } => return by,
            Flag::Go { .. } | Flag::Sent { .. } => return self.reader,
            Flag::Arrived { cell, .. } => cell,
        };
        // A map that a panic left behind is still whole.
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        *found.entry(flag).or_insert_with(|| {
            self.candidates(cell.shard).find(|&rank| self.signals(rank, flag)).unwrap_or(cell.shard)
        })
    }

    /// Returns all ranks, some of them twice: the provider of the block, the neighbours of a ring, the own node, then the rest.
    fn candidates(&self, shard: Rank) -> impl Iterator<Item = Rank> {
        let (me, ranks) = (self.reader.0, Rank::at(self.topology.ranks()).0);
        let neighbours = [(me + ranks - 1) % ranks, (me + 1) % ranks, me].map(Rank);
        let node = self.topology.members(self.topology.node(self.reader)).iter().copied();
        [shard].into_iter().chain(neighbours).chain(node).chain((0..ranks).map(Rank))
    }

    fn signals(&self, rank: Rank, wanted: Flag) -> bool {
        let Some(plan) = (self.plan)(rank) else { return false };
        plan.lanes.iter().flat_map(|lane| &lane.steps).any(|step| {
            matches!(step, Step::Signal { peer, flag } if *peer == self.reader && *flag == wanted)
        })
    }
}
