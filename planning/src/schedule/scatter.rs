//! Implements scatter and all-gather, in which the root of a broadcast puts a part of its block to
//! each other rank, and these ranks exchange their parts.
//!
//! The root sends each byte once, where direct sends it to every peer. Chunks go to the other ranks
//! by turns, so there are as many chunks as other ranks, or a multiple. The chunks of one turn are
//! a *round*. With several rounds, ranks exchange the parts of a round while the root puts those of
//! the next one.
//!
//! The root waits until the outputs of all ranks may be overwritten, so whoever has a chunk of the
//! root knows so too. The self copy of the root comes last, as no other rank waits for it.

use peerlane_hal::Rank;

use super::estimate::{CostRequest, EffectiveLink, PathEstimate, Term, Traffic};
use super::steps::{after, announced_puts, arrived, self_copy, signal, wait, writable};
use super::{PlanRequest, Schedule};
use crate::collective::Collective;
use crate::plan::{Algorithm, Cell, Lane, LaneId, Source, Step, Tier};
use crate::units::{bytes, rate};

pub(super) const SCATTER_ALL_GATHER: Schedule = Schedule {
    algorithm: Algorithm::ScatterAllGather,
    suits: |collective| matches!(collective, Collective::Broadcast { .. }),
    fits: |topology, shape| match shape.tiers && topology.nodes() > 1 {
        true => Err("a network connects the nodes"),
        false => Ok(()),
    },
    lanes: |request| vec![Lane { tier: Tier::Local, steps: steps(request) }],
    redundant: |sums| (sums.ranks <= 2).then_some("there are no more than two ranks"),
    forwards: |sums| sums.ranks > 2,
    chunks_in_round: |ranks| (ranks - 1).max(1),
    gets: false,
    joins_blocks: false,
    needs_measurements: |_, _| true,
    lane_count: |_, _| 1,
    estimate,
    traffic: |request| {
        [Traffic::new(request.sums.block_bytes_max, request.sums.moved_bytes), Traffic::default()]
    },
};

fn steps(request: &PlanRequest<'_>) -> Vec<Step> {
    let &PlanRequest { topology, rank, shape } = request;
    let root = shape.collective.only_provider().expect("a broadcast has a root");
    let others: Vec<Rank> = after(topology.ranks(), root.index()).map(Rank::at).collect();
    let cells: Vec<Cell> = (0..shape.chunks).map(|chunk| Cell { block: root, chunk }).collect();
    let rounds = cells.chunks(others.len().max(1));
    let announced = |cell| arrived(cell, LaneId::HOME);

    let mut steps = Vec::new();
    if rank == root {
        let flags = others.iter().filter_map(|&peer| writable(request, peer, LaneId::HOME));
        steps.extend(flags.map(wait));
        for round in rounds {
            let puts = others.iter().copied().zip(round.iter().copied());
            steps.extend(announced_puts(shape.flags, puts, Source::Input, announced));
        }
        steps.extend(self_copy(request));
        return steps;
    }

    let flag = writable(request, rank, LaneId::HOME);
    steps.extend(flag.map(|flag| signal(root, flag)));
    let place = others.iter().position(|&other| other == rank).expect("it is not the root");
    for round in rounds.clone() {
        let Some(&own) = round.get(place) else { continue };
        steps.push(wait(announced(own)));
        let puts = after(others.len(), place).map(|at| (others[at], own));
        steps.extend(announced_puts(shape.flags, puts, Source::Output, announced));
    }

    for round in rounds {
        let foreign = round.iter().enumerate().filter(|(at, _)| *at != place);
        steps.extend(foreign.map(|(_, &cell)| wait(announced(cell))));
    }
    steps
}

/// Estimates the time until the chunks of the last round have reached the last rank.
fn estimate(request: &CostRequest<'_>, node_ranks: u64) -> PathEstimate {
    let CostRequest { sums, links, .. } = *request;
    if sums.root_node_ranks.is_some_and(|ranks| ranks != node_ranks) {
        // The longest path goes through the root.
        return PathEstimate { terms: Vec::new(), host: 0 };
    }

    let (others, chunks) = (sums.ranks - 1, request.chunks());
    let rounds = chunks.div_ceil(others.max(1));
    let own = EffectiveLink::new(links, None, node_ranks, node_ranks);
    // Processors and shared links serve all ranks at the same time.
    let link = EffectiveLink::new(links, Some(Tier::Local), node_ranks, node_ranks);
    let puts = if others == 0 { 0 } else { link.puts(chunks, sums.block_bytes_max) };

    // A rank passes on the chunk of one round while the root puts the next one. So it either lags
    // one round behind the root, or the root waits for nothing and ranks take longer.
    let copies = others.saturating_sub(1);
    let chunk = request.chunk_bytes();
    let of_round = link
        .puts(copies, chunk.saturating_mul(copies))
        .saturating_add(link.passed_on(copies, chunk.saturating_mul(copies)));
    let first = puts / rounds.max(1);
    let longer = of_round.saturating_mul(rounds).saturating_add(first).saturating_sub(puts);
    let passed_on = of_round.max(longer);

    // Each round has flags between its copies. Those of the last one follow each other.
    let hops = if others == 0 { 0 } else { rounds + 1 };
    let flags = request.flags(&link, chunks).saturating_add(request.flags(&own, chunks));
    let note = |count: u64| format!("{count} × {} at {}", bytes(chunk), rate(link.rate(count)));
    let terms = vec![
        Term::new("ready", request.ready(&link, others, None), format!("of {others} peers")),
        request.self_copy_term(&own, puts.saturating_add(passed_on)),
        Term::new("puts of the root", puts, note(chunks)),
        Term::new("puts of the last round", passed_on, note(copies)),
        Term::new("flags", flags, "signals and waits"),
        Term::new("arrivals", link.hop.saturating_mul(hops), format!("of {rounds} rounds")),
    ];

    let forwarded = copies.saturating_mul(rounds);
    let submits = chunks.max(forwarded).saturating_mul(link.submit);
    let host = submits.saturating_add(request.self_puts().saturating_mul(own.submit));
    PathEstimate { terms, host }
}
