//! The time of a start as a closed formula, assembled from the estimates of the [schedules](crate::schedule).
//!
//! A schedule estimates the longest path through the plans of all ranks, term by term, under full load: every rank of a
//! node uses its links alike, shared engines, NICs, processors and memory are divided evenly, and the largest block
//! represents all blocks. What two lanes do at the same time counts once, as the longer of both. A simulation goes
//! through every step instead; an estimate takes as long for 4 ranks as for 16,384.

use super::effective::EffectiveLink;
use super::links::Links;
use super::predict::Term;
use super::sums::ClusterSums;
use crate::collective::Collective;
use crate::plan::{Algorithm, FlagOrder, Tier};
use crate::schedule::{self, Shape};

/// What a schedule estimates the cost of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CostRequest<'a> {
    pub(crate) algorithm: Algorithm,
    pub(crate) sums: &'a ClusterSums,
    pub(crate) shape: Shape,
    pub(crate) links: &'a Links,
}

/// The longest path of a start through one rank.
pub(crate) struct PathEstimate {
    /// What takes time on the path, in order.
    pub(crate) terms: Vec<Term>,
    /// How long the host of the rank is busy meanwhile, in picoseconds.
    pub(crate) host: u64,
}

/// Returns the terms of the longest path, in order; together they are the time of a start.
pub(super) fn terms(request: &CostRequest<'_>) -> Vec<Term> {
    let estimate = schedule::schedule(request.algorithm).estimate;
    let paths = request.sums.node_ranks().map(|node_ranks| {
        let path = estimate(request, node_ranks);
        let mut terms = vec![Term::new("start", request.links.start(request.local_lanes()), "")];
        terms.extend(path.terms.into_iter().filter(|term| term.picoseconds > 0));
        // Starts follow each other; the slower of host and engines sets the pace.
        let (engines, host) = (total(&terms), path.host);
        if host > engines {
            let note = format!("hides {} on the engines", super::units::time(engines));
            return vec![Term::new("calls of the host", host, note)];
        }
        terms
    });
    // The first of equal ones, which is the smallest node.
    paths
        .reduce(|longest, path| if total(&path) > total(&longest) { path } else { longest })
        .unwrap_or_default()
}

pub(super) fn total(terms: &[Term]) -> u64 {
    super::sums::sum(terms.iter().map(|term| term.picoseconds))
}

impl CostRequest<'_> {
    /// Returns whether every rank provides data, so that all ranks are as busy as each other.
    pub(crate) fn everyone_provides(&self) -> bool {
        !matches!(self.shape.collective, Collective::Broadcast { .. })
    }

    pub(crate) fn chunks(&self) -> u64 {
        self.shape.chunks.into()
    }

    pub(crate) fn chunk_bytes(&self) -> u64 {
        self.sums.shard_bytes_max.div_ceil(self.chunks())
    }

    pub(crate) fn has_network(&self) -> bool {
        self.shape.tiers && self.sums.nodes > 1
    }

    /// Returns the tier of a lane between nodes.
    pub(crate) fn tier_between_nodes(&self) -> Tier {
        if self.has_network() { Tier::Network } else { Tier::Local }
    }

    pub(crate) fn local_lanes(&self) -> usize {
        if self.has_network() { self.lanes() / 2 } else { self.lanes() }
    }

    /// Returns the number of lanes of each rank.
    pub(super) fn lanes(&self) -> usize {
        (schedule::schedule(self.algorithm).lane_count)(self)
    }

    /// Returns the time of `count` adjacent signals or waits.
    pub(crate) fn flags(&self, seen: &EffectiveLink, count: u64) -> u64 {
        let batches = if self.shape.flags == FlagOrder::Batched { count.min(1) } else { count };
        batches.saturating_mul(seen.step)
    }

    /// Returns the time of the self copy.
    pub(crate) fn self_copy(&self, seen: &EffectiveLink) -> u64 {
        if self.shape.in_place { 0 } else { seen.puts(self.chunks(), self.sums.shard_bytes_max) }
    }

    pub(crate) fn self_puts(&self) -> u64 {
        if self.shape.in_place { 0 } else { self.chunks() }
    }

    /// Returns what the self copy adds to `puts`: all of it if one thread makes both, else what is left of it.
    pub(crate) fn self_copy_term(&self, own: &EffectiveLink, puts: u64) -> Term {
        let copy = self.self_copy(own);
        let left = if own.by_processor { copy } else { copy.saturating_sub(puts) };
        let note = if own.by_processor { "" } else { "what is left beside the puts" };
        Term::new("own copy", left, note)
    }

    /// Returns the time from the `ready` signals of a rank to the arrival of a peer's.
    ///
    /// With prompt flags the self copy of the same lane comes between, and hides some of it if it takes the same
    /// thread.
    pub(crate) fn ready(
        &self,
        seen: &EffectiveLink,
        peers: u64,
        own: Option<&EffectiveLink>,
    ) -> u64 {
        if peers == 0
            || self.shape.outputs > 1
                && self.algorithm != Algorithm::Pull
                && self.everyone_provides()
        {
            return 0;
        }
        let between = match (self.shape.flags, own) {
            (FlagOrder::Prompt, Some(own)) if own.by_processor => self.self_copy(own),
            _ => 0,
        };
        self.flags(seen, peers).saturating_add(seen.hop.saturating_sub(between))
    }
}
