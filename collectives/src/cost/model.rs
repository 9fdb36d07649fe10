//! The time of each algorithm as a closed formula.
//!
//! The longest way through the plans of all ranks, term by term, under full load: every rank of a
//! node uses its links alike, shared engines, cards, processors and memory are divided evenly, and
//! the largest shard stands for all where shards are unlike. What two lanes do beside each other
//! counts once, as the longer of both. A simulation goes through every step instead; this takes as
//! long for 4 ranks as for 16,384.

mod direct;
mod hierarchical;
mod ring;

use super::ground::Ground;
use super::links::Links;
use super::predict::Term;
use super::seen::Seen;
use crate::allgather::Shape;
use crate::plan::{Algorithm, FlagOrder};

/// What is predicted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Task<'a> {
    pub(super) algorithm: Algorithm,
    pub(super) ground: &'a Ground,
    pub(super) shape: Shape,
    pub(super) links: &'a Links,
}

/// The terms of the longest way, in order; together they are the time.
pub(super) fn terms(task: &Task<'_>) -> Vec<Term> {
    let ways = task.ground.node_ranks().map(|node_ranks| {
        let way = match task.algorithm {
            Algorithm::Direct | Algorithm::Pull => direct::way(task, node_ranks),
            Algorithm::Ring => ring::way(task, node_ranks, 1),
            Algorithm::DoubleRing => ring::way(task, node_ranks, 2),
            Algorithm::Hierarchical | Algorithm::HierarchicalRing => {
                hierarchical::way(task, node_ranks)
            }
        };
        let mut terms = vec![Term::new("start", task.links.start(task.local_lanes()), "")];
        terms.extend(way.terms.into_iter().filter(|term| term.picoseconds > 0));
        // Starts follow each other; the slower of host and engines sets the pace.
        let (path, host) = (total(&terms), way.host);
        if host > path {
            let note = format!("hides {} on the engines", super::units::time(path));
            return vec![Term::new("calls of the host", host, note)];
        }
        terms
    });
    // Of equal ones the first, which is the smallest node.
    ways.reduce(|longest, way| if total(&way) > total(&longest) { way } else { longest })
        .unwrap_or_default()
}

pub(super) fn total(terms: &[Term]) -> u64 {
    super::ground::sum(terms.iter().map(|term| term.picoseconds))
}

/// What a rank's longest way is made of.
struct Way {
    terms: Vec<Term>,
    /// What its host does meanwhile.
    host: u64,
}

impl Task<'_> {
    fn parts(&self) -> u64 {
        self.shape.parts.into()
    }

    fn part_bytes(&self) -> u64 {
        self.ground.shard_bytes_max.div_ceil(self.parts())
    }

    fn has_network(&self) -> bool {
        self.shape.tiers && self.ground.nodes > 1
    }

    fn local_lanes(&self) -> usize {
        if self.has_network() { self.lanes() / 2 } else { self.lanes() }
    }

    /// Of each rank.
    pub(super) fn lanes(&self) -> usize {
        let tiers = if self.has_network() { 2 } else { 1 };
        match self.algorithm {
            Algorithm::Direct | Algorithm::Pull | Algorithm::Ring => tiers,
            Algorithm::DoubleRing => 2 * tiers,
            Algorithm::Hierarchical | Algorithm::HierarchicalRing if self.ground.nodes > 1 => 2,
            Algorithm::Hierarchical | Algorithm::HierarchicalRing => 1,
        }
    }

    /// So many signals or waits side by side.
    fn flags(&self, seen: &Seen, count: u64) -> u64 {
        let batches = if self.shape.flags == FlagOrder::Batched { count.min(1) } else { count };
        batches.saturating_mul(seen.step)
    }

    /// The copy of the own shard.
    fn own_copy(&self, seen: &Seen) -> u64 {
        if self.shape.in_place { 0 } else { seen.puts(self.parts(), self.ground.shard_bytes_max) }
    }

    fn own_puts(&self) -> u64 {
        if self.shape.in_place { 0 } else { self.parts() }
    }

    /// Own copies and puts: one behind the other if one thread makes them, else beside each other.
    fn own_term(&self, own: &Seen, puts: u64) -> Term {
        let copy = self.own_copy(own);
        let left = if own.by_processor { copy } else { copy.saturating_sub(puts) };
        let note = if own.by_processor { "" } else { "what is left beside the puts" };
        Term::new("own copy", left, note)
    }

    /// From the signals that say `ready` to the moment at which a peer's is there. With prompt flags
    /// the own copy stands between where it is made by the same lane, and hides some of that where it
    /// takes the same thread.
    fn ready(&self, seen: &Seen, peers: u64, own: Option<&Seen>) -> u64 {
        if peers == 0 || self.shape.outputs > 1 && self.algorithm != Algorithm::Pull {
            return 0;
        }
        let between = match (self.shape.flags, own) {
            (FlagOrder::Prompt, Some(own)) if own.by_processor => self.own_copy(own),
            _ => 0,
        };
        self.flags(seen, peers).saturating_add(seen.hop.saturating_sub(between))
    }
}
