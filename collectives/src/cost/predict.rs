//! What one all-gather costs.

use std::fmt;

use peerlane_hal::ErrorKind;
use serde::Serialize;

use super::ground::Ground;
use super::links::Links;
use super::model::{self, Task};
use super::residual::times_longer;
use super::units::{bytes, time};
use crate::allgather::Shape;
use crate::error::Error;
use crate::layout::FlagLayout;
use crate::plan::Algorithm;
use crate::topology::Topology;

/// What an all-gather is predicted to take, and what it needs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Cost {
    /// From start to start when many follow each other: the sum of the [terms](Self::terms).
    pub picoseconds: u64,
    /// The longest way, in order.
    pub terms: Vec<Term>,
    /// Copies of own shards.
    pub own: Traffic,
    /// Puts and gets over the local fabric.
    pub local: Traffic,
    /// Puts and gets over the network.
    pub network: Traffic,
    /// Memory of one rank, at most: input, outputs and flags.
    pub memory_bytes: u64,
}

/// A piece of the time, on the longest way through the plans.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Term {
    /// What takes the time.
    pub name: &'static str,
    /// How long.
    pub picoseconds: u64,
    /// More of it, or nothing.
    pub note: String,
}

/// Bytes over the links of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Traffic {
    /// Out of one rank, or where ranks get them into one; a bound, reached where shards and nodes are
    /// alike.
    pub rank_bytes_max: u64,
    /// Of all ranks.
    pub total_bytes: u64,
}

/// Predicts the cost of an all-gather of shards of `shard_bytes`. The same figures give the same
/// result on every rank and machine.
///
/// # Errors
/// [`InvalidArgument`](ErrorKind::InvalidArgument) if the links are impossible, there are not as
/// many shards as ranks, or the shape has no parts or outputs.
pub fn predict(
    algorithm: Algorithm,
    topology: &Topology,
    shape: Shape,
    shard_bytes: &[u64],
    links: &Links,
) -> Result<Cost, Error> {
    links.check()?;
    check_shards(topology, shard_bytes)?;
    for (name, count) in [("parts", shape.parts), ("outputs", shape.outputs)] {
        if count == 0 {
            return Err(invalid(format!("{name} is 0, expected at least 1")));
        }
    }
    let ground = Ground::new(topology, shard_bytes);
    let links = links.reaching(touched_bytes(&ground, shape));
    Ok(cost(&Task { algorithm, ground: &ground, shape, links: &links }))
}

/// # Errors
/// If there are not as many shards as ranks.
pub(super) fn check_shards(topology: &Topology, shard_bytes: &[u64]) -> Result<(), Error> {
    if shard_bytes.len() == topology.ranks() {
        return Ok(());
    }
    let (ranks, shards) = (topology.ranks(), shard_bytes.len());
    Err(invalid(format!("shard_bytes has {shards} shards, expected one for each of {ranks} ranks")))
}

/// What one rank reads and writes in starts that follow each other.
pub(super) fn touched_bytes(ground: &Ground, shape: Shape) -> u64 {
    let input = if shape.in_place { 0 } else { ground.shard_bytes_max };
    ground.total_bytes.saturating_mul(shape.outputs.into()).saturating_add(input)
}

/// The cost over links that already [reach](Links::reaching) as far as the task does.
pub(super) fn cost(task: &Task<'_>) -> Cost {
    let &Task { ground, shape, .. } = task;
    let mut terms = model::terms(task);
    correct(&mut terms, times_longer(&task.links.residuals, task));
    let copied = u64::from(!shape.in_place);
    let own = Traffic {
        rank_bytes_max: ground.shard_bytes_max * copied,
        total_bytes: ground.total_bytes * copied,
    };
    let [local, network] = traffic(task);
    let picoseconds = model::total(&terms);
    let memory_bytes = touched_bytes(ground, shape).saturating_add(flag_bytes(task));
    Cost { picoseconds, terms, own, local, network, memory_bytes }
}

/// Makes all terms as much longer as was measured.
fn correct(terms: &mut [Term], times_longer: f64) {
    if times_longer == 1.0 {
        return;
    }
    for term in terms.iter_mut() {
        term.picoseconds = (term.picoseconds as f64 * times_longer) as u64;
    }
    if let Some(Term { note, .. }) = terms.first_mut() {
        let measured = format!("all of it × {times_longer:.2}, as measured");
        *note = if note.is_empty() { measured } else { format!("{note}; {measured}") };
    }
}

fn flag_bytes(task: &Task<'_>) -> u64 {
    let &Task { ground, shape, .. } = task;
    let words = FlagLayout::new(ground.ranks as usize, shape.parts, task.lanes()).words();
    words.saturating_mul(8).saturating_mul(shape.outputs.into())
}

/// Inside nodes, and between them.
fn traffic(task: &Task<'_>) -> [Traffic; 2] {
    let &Task { algorithm, ground, shape, .. } = task;
    let (shard, all) = (ground.shard_bytes_max, ground.total_bytes);
    let every = all.saturating_mul(ground.ranks - 1);
    let most = |bytes: u64, count: u64| bytes.saturating_mul(count);
    let last = ground.node_ranks().last().unwrap_or(1);
    let least = ground.node_ranks().next().unwrap_or(1);
    let mates = last - 1;
    let (inside_max, between_max, between) = match algorithm {
        Algorithm::Direct => {
            let others = ground.ranks - least;
            (most(shard, mates), most(shard, others), every.saturating_sub(ground.inside_bytes))
        }
        Algorithm::Pull => {
            let inside = ground.node_ranks().map(|ranks| ground.node_bytes(ranks)).max();
            let inside = inside.unwrap_or(0).saturating_sub(ground.shard_bytes_min);
            (inside, all, every.saturating_sub(ground.inside_bytes))
        }
        // Each of the `nodes` ways out of a node carries all shards but that of the rank behind it.
        Algorithm::Ring | Algorithm::DoubleRing => {
            let bytes = all.saturating_sub(ground.shard_bytes_min);
            (bytes, bytes, every / ground.ranks.max(1) * ground.nodes)
        }
        Algorithm::Hierarchical | Algorithm::HierarchicalRing => {
            let nodes = ground.node_ranks();
            let inside = nodes.map(|ranks| most(shard, (ground.entering(ranks) + 1) * (ranks - 1)));
            let others = ground.nodes - 1;
            let passed = match algorithm {
                Algorithm::HierarchicalRing => ground.entering(least).max(others),
                _ => others,
            };
            (inside.max().unwrap_or(0), most(shard, passed), all.saturating_mul(others))
        }
    };
    let traffic = |rank_bytes_max, total_bytes| Traffic { rank_bytes_max, total_bytes };
    if shape.tiers && ground.nodes > 1 {
        let inside = every.saturating_sub(between);
        return [traffic(inside_max, inside), traffic(between_max, between)];
    }
    let rank = match algorithm {
        Algorithm::Direct => most(shard, ground.ranks - 1),
        Algorithm::Pull | Algorithm::Ring | Algorithm::DoubleRing => {
            all.saturating_sub(ground.shard_bytes_min)
        }
        Algorithm::Hierarchical | Algorithm::HierarchicalRing => {
            inside_max.saturating_add(between_max)
        }
    };
    [traffic(rank, every), Traffic::default()]
}

fn invalid(text: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, text)
}

impl Term {
    pub(super) fn new(name: &'static str, picoseconds: u64, note: impl Into<String>) -> Self {
        Self { name, picoseconds, note: note.into() }
    }
}

impl Cost {
    /// The predicted time in seconds.
    pub fn seconds(&self) -> f64 {
        self.picoseconds as f64 / 1e12
    }
}

impl fmt::Display for Cost {
    /// The time, the longest way a line a term, and what is carried.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", time(self.picoseconds))?;
        for Term { name, picoseconds, note } in &self.terms {
            let note = if note.is_empty() { String::new() } else { format!("  {note}") };
            writeln!(f, "  {:>9}  {name}{note}", time(*picoseconds))?;
        }
        for (name, traffic) in
            [("own copies", self.own), ("local", self.local), ("network", self.network)]
        {
            if traffic.total_bytes > 0 {
                let Traffic { rank_bytes_max, total_bytes } = traffic;
                let (rank, total) = (bytes(rank_bytes_max), bytes(total_bytes));
                writeln!(f, "  {name}: {total} in all, at most {rank} of one rank")?;
            }
        }
        writeln!(f, "  memory of one rank: {}", bytes(self.memory_bytes))
    }
}
