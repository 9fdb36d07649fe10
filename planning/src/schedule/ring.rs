//! Implements the algorithms ring and double ring, in which every rank forwards received data to the next rank.
//!
//! The ranks are ordered node after node, so the ring leaves each node once. A rank puts its own block to the
//! next rank, then forwards each chunk as soon as it has arrived. Every byte is put to its final position in the output,
//! so a rank only has to know that the next rank is `ready`. With two outputs in turn, an all-gather does not need that
//! either: in the last start, the block of the next rank has passed all ranks. In a broadcast only the block of the root
//! is forwarded, and with several chunks the ring is a pipeline.
//!
//! The double ring has two lanes, one for each direction. Each forwards every block half of the way. If the number of
//! ranks is even, the opposite rank gets even chunks from one direction and odd chunks from the other. Each direction
//! carries half of the bytes, with half of the hops of one ring.
//!
//! If a network reaches the other nodes, puts that leave the node are in a network lane. The local lane waits for
//! arrivals from this rank's node, and announces them to the network lane by a signal to its own rank. The lane that forwards
//! waits for arrivals from other nodes.
//!
//! With batched flags the `ready` signal and wait are adjacent; after that, the signal of one chunk and the wait for the
//! next are adjacent in any case.

use std::ops::Range;

use peerlane_hal::Rank;

use super::estimate::{ClusterSums, CostRequest, EffectiveLink, PathEstimate, Term, Traffic};
use super::steps::{after, arrived, put, signal, wait, writable};
use super::{PlanRequest, Schedule};
use crate::collective::Collective;
use crate::links::transfer_picoseconds;
use crate::plan::{Algorithm, Cell, FlagOrder, Lane, LaneId, Source, Step, Tier};
use crate::units::{bytes, rate, time};

pub(super) const RING: Schedule = Schedule {
    algorithm: Algorithm::Ring,
    suits: |collective| collective.all_ranks_get_the_same() && !collective.is_reduction(),
    lanes: ring_lanes,
    redundant,
    forwards,
    gets: false,
    needs_measurements: |_, _| true,
    lane_count: |nodes, tiers| if tiers && nodes > 1 { 2 } else { 1 },
    estimate: |request, node_ranks| estimate(request, node_ranks, 1),
    traffic,
};

pub(super) const DOUBLE_RING: Schedule = Schedule {
    algorithm: Algorithm::DoubleRing,
    suits: |collective| collective == Collective::AllGather,
    lanes: double_ring_lanes,
    redundant,
    forwards,
    gets: false,
    needs_measurements: |_, _| true,
    lane_count: |nodes, tiers| if tiers && nodes > 1 { 4 } else { 2 },
    estimate: |request, node_ranks| estimate(request, node_ranks, 2),
    traffic,
};

fn redundant(sums: &ClusterSums) -> Option<&'static str> {
    (sums.ranks <= 2).then_some("there are no more than two ranks")
}

fn forwards(sums: &ClusterSums) -> bool {
    sums.ranks > 2
}

fn traffic(request: &CostRequest<'_>) -> [Traffic; 2] {
    let sums = request.sums;
    let (rank, every) = (sums.total_bytes.saturating_sub(sums.block_bytes_min), sums.moved_bytes);
    if !request.has_network() {
        return [Traffic::new(rank, every), Traffic::default()];
    }
    // Each of the hops between nodes, one for every node, carries all blocks but that of the rank after it.
    let between = every / sums.ranks.max(1) * sums.nodes;
    [Traffic::new(rank, every.saturating_sub(between)), Traffic::new(rank, between)]
}

fn ring_lanes(request: &PlanRequest<'_>) -> Vec<Lane> {
    let order = ring_order(request);
    let last = order.len() - 1;
    let direction = Direction {
        order: &order,
        local: LaneId::HOME,
        network: LaneId(1),
        hops: [last; 2],
        copied: 0..request.shape.chunks,
    };
    let mut lanes = empty_lanes(request, 1);
    direction.extend(request, &mut lanes);
    lanes
}

fn double_ring_lanes(request: &PlanRequest<'_>) -> Vec<Lane> {
    let mut order = ring_order(request);
    let last = order.len() - 1;
    let (near, far) = (last / 2, last.div_ceil(2));
    let middle = request.shape.chunks.div_ceil(2);
    let mut lanes = empty_lanes(request, 2);
    let forwards = Direction {
        order: &order,
        local: LaneId::HOME,
        network: LaneId(2),
        hops: [far, near],
        copied: 0..middle,
    };
    forwards.extend(request, &mut lanes);
    order[1..].reverse();
    let backwards = Direction {
        order: &order,
        local: LaneId(1),
        network: LaneId(3),
        hops: [near, far],
        copied: middle..request.shape.chunks,
    };
    backwards.extend(request, &mut lanes);
    lanes
}

fn empty_lanes(request: &PlanRequest<'_>, directions: usize) -> Vec<Lane> {
    let tiers = if request.has_network() { Tier::ALL } else { &[Tier::Local] };
    let lane = |&tier| vec![Lane { tier, steps: Vec::new() }; directions];
    tiers.iter().flat_map(lane).collect()
}

fn ring_order(request: &PlanRequest<'_>) -> Vec<Rank> {
    let &PlanRequest { topology, rank, .. } = request;
    let node = topology.node(rank);
    let (mates, at) = (topology.members(node), topology.local_index(rank));
    let others = after(topology.nodes(), node as usize)
        .flat_map(|node| topology.members(Rank::at(node).0).iter().copied());
    mates[at..].iter().copied().chain(others).chain(mates[..at].iter().copied()).collect()
}

struct Direction<'a> {
    order: &'a [Rank],
    local: LaneId,
    network: LaneId,
    hops: [usize; 2],
    copied: Range<u32>,
}

impl Direction<'_> {
    fn extend(self, request: &PlanRequest<'_>, lanes: &mut [Lane]) {
        let &PlanRequest { rank, shape, .. } = request;
        let chunks = || (0..shape.chunks).map(|chunk| (chunk, self.hops(chunk)));
        let furthest = chunks().map(|(_, hops)| hops).max().unwrap_or(0);
        let is_copied = request.is_provider(rank) && !shape.in_place;
        let copies = self.copied.clone().filter(|_| is_copied);
        let copies = copies.map(|chunk| put(rank, Cell { block: rank, chunk }, Source::Input));
        let (next, previous) = (self.rank_after(1), self.rank_after(self.order.len() - 1));
        let (inward, outward) =
            (self.lane(request, previous, rank), self.lane(request, rank, next));
        let (reader, reader_next) = (self.reader(request, 0), self.reader(request, 1));
        let mut push = |lane: LaneId, step: Step| lanes[lane.index()].steps.push(step);
        // Whether the previous rank puts data to this one, and this one to the next.
        let is_put_to = (0..furthest).any(|hop| request.is_provider(self.origin(hop + 1)));
        let puts = (0..furthest).any(|hop| request.is_provider(self.origin(hop)));
        let awaited = writable(request, next, outward).filter(|_| puts);
        if let Some(flag) = writable(request, rank, inward).filter(|_| is_put_to) {
            push(inward, signal(previous, flag));
        }
        if let (Some(flag), FlagOrder::Batched) = (awaited, shape.flags) {
            push(outward, wait(flag));
        }
        copies.for_each(|copy| push(self.local, copy));
        if let (Some(flag), FlagOrder::Prompt) = (awaited, shape.flags) {
            push(outward, wait(flag));
        }
        for hop in 0..furthest {
            let (block, from) = (self.origin(hop), source(hop));
            if !request.is_provider(block) {
                continue;
            }
            for (chunk, _) in chunks().filter(|&(_, hops)| hops > hop) {
                let cell = Cell { block, chunk };
                if hop > 0 {
                    push(reader, wait(arrived(cell, reader)));
                }
                if hop > 0 && reader != outward {
                    push(reader, signal(rank, arrived(cell, outward)));
                    push(outward, wait(arrived(cell, outward)));
                }
                push(outward, put(next, cell, from));
                push(outward, signal(next, arrived(cell, reader_next)));
            }
        }
        for (chunk, hops) in chunks().filter(|&(_, hops)| hops > 0) {
            let block = self.origin(hops);
            if request.is_provider(block) {
                push(reader, wait(arrived(Cell { block, chunk }, reader)));
            }
        }
    }

    fn origin(&self, hop: usize) -> Rank {
        self.rank_after(self.order.len() - hop)
    }

    fn hops(&self, chunk: u32) -> usize {
        self.hops[chunk as usize % 2]
    }

    fn rank_after(&self, by: usize) -> Rank {
        self.order[by % self.order.len()]
    }

    fn lane(&self, request: &PlanRequest<'_>, from: Rank, to: Rank) -> LaneId {
        let leaves = request.topology.node(from) != request.topology.node(to);
        if leaves && request.has_network() { self.network } else { self.local }
    }

    /// The local fabric cannot write flags of the network fabric, so no local lane signals a network lane of a peer.
    fn reader(&self, request: &PlanRequest<'_>, by: usize) -> LaneId {
        let last = self.order.len() - 1;
        let (rank, previous, next) =
            (self.rank_after(by), self.rank_after(by + last), self.rank_after(by + 1));
        match self.lane(request, previous, rank) == self.network {
            true => self.lane(request, rank, next),
            false => self.local,
        }
    }
}

fn source(hop: usize) -> Source {
    if hop == 0 { Source::Input } else { Source::Output }
}

fn estimate(request: &CostRequest<'_>, node_ranks: u64, ways: u64) -> PathEstimate {
    if request.shape.collective.only_provider().is_some() {
        return broadcast_estimate(request, node_ranks);
    }
    let CostRequest { sums, links, .. } = *request;
    let own = EffectiveLink::new(links, None, node_ranks, node_ranks);
    let Hops { inside, local, network } = Hops::new(request, node_ranks, ways);
    let peers = sums.ranks - 1;
    let used = || Hops::used(request, inside, &local, &network);
    let chunk_time = |link: &EffectiveLink| chunk_time(request, link);
    // There is always a link; of equally slow ones this is the last.
    let slowest = used().max_by_key(|link| chunk_time(link)).unwrap_or(&local);
    let chunk = chunk_time(slowest);
    let chunks = request.chunks();
    // With two directions, even chunks pass more hops in one direction, odd ones in the other.
    let (near, hops) = (peers / ways, peers.div_ceil(ways));
    let puts = hops * chunks.div_ceil(ways) + near * (chunks - chunks.div_ceil(ways));
    let blocks = |count: u64| sums.block_bytes_max.saturating_mul(count);
    // Two directions leave a node at two ranks, unless it has only one; and of two ranks each has one
    // direction inside.
    let one_way = peers.div_ceil(ways);
    let inside_blocks = if request.has_network() && node_ranks == 2 { one_way } else { peers };
    let out_blocks = if node_ranks > 1 { one_way } else { peers };
    let every = match local.by_processor {
        _ if !inside => 0,
        // One thread drives both directions, one after the other.
        true => chunk_time(&local).saturating_mul(inside_blocks.saturating_mul(chunks)),
        false => local.sends(blocks(inside_blocks)),
    };
    let out = if request.has_network() { network.sends(blocks(out_blocks)) } else { 0 };
    let every = every.max(out);
    // All blocks except the own one came from the previous rank.
    let foreign = peers.saturating_sub(1);
    let passed_on = slowest.passed_on(foreign * chunks, blocks(foreign));
    let all =
        uneven(request, slowest, chunk.saturating_mul(puts).max(every).saturating_add(passed_on));
    // A signal from lane 0 announces the data that leaves the node to the network lane.
    let relay = if request.has_network() && inside { own.hop } else { 0 };
    let last_hop = used().map(|link| link.hop).max().unwrap_or(0);
    let passed_on_chunk = |link: &EffectiveLink| link.passed_on(1, request.chunk_bytes());
    let edge = |link: &EffectiveLink, relay: u64| {
        chunk_time(link)
            .saturating_add(passed_on_chunk(link))
            .saturating_add(link.hop)
            .saturating_add(relay)
    };
    let (near_edge, far_edge) = (edge(&local, 0), edge(&network, relay));
    // A block crosses at most one way out of each node, and every other link at most once.
    let out = if request.has_network() { sums.nodes.min(hops) } else { 0 };
    let stay = hops.min(sums.ranks - if request.has_network() { sums.nodes } else { 0 });
    let by = |out: u64| {
        far_edge.saturating_mul(out).saturating_add(near_edge.saturating_mul(hops - out))
    };
    let others = chunk.saturating_add(passed_on_chunk(slowest)).saturating_mul(chunks - 1);
    let journey = by(out).max(by(hops - stay)).saturating_add(others);
    // The path begins at the rank that provides the block.
    let journey = journey.saturating_sub(passed_on_chunk(&local).min(passed_on_chunk(slowest)));
    let uneven_overlap = overlaps(request, slowest) && sums.block_bytes_max > sums.block_bytes_min;
    let waits = match uneven_overlap {
        true => 0,
        false => journey.saturating_sub(all.saturating_add(last_hop)),
    };

    let mut terms = Vec::new();
    let furthest = used().max_by_key(|link| link.hop).unwrap_or(&local);
    let ready = request.ready(furthest, peers.min(1), Some(&own));
    // If only network lanes have work, they start on a flag from lane 0 and end with one to it.
    let entry = if inside { 0 } else { own.hop };
    let ready = ready.saturating_add(entry);
    let last_hop = last_hop.saturating_add(entry);
    terms.push(Term::new("ready", ready, "of the next rank"));
    terms.push(request.self_copy_term(&own, all.saturating_add(waits)));
    let longer = match passed_on {
        0 => String::new(),
        _ => format!(", {} longer as peers have just put it there", time(passed_on)),
    };
    let note = format!(
        "{hops} steps of {chunks} × {} at {}{longer}",
        bytes(request.chunk_bytes()),
        rate(slowest.rate(1))
    );
    terms.push(Term::new("puts", all, note));
    if hops > 0 {
        terms.push(Term::new("waits for the next chunk", waits, format!("on {hops} steps")));
        terms.push(Term::new("last arrival", last_hop, ""));
    }
    let puts = peers.saturating_mul(chunks).saturating_mul(slowest.submit);
    let host = puts.saturating_add(request.self_puts().saturating_mul(own.submit));
    PathEstimate { terms, host }
}

fn overlaps(request: &CostRequest<'_>, link: &EffectiveLink) -> bool {
    request.shape.outputs > 1 && !link.by_processor
}

/// Every link of a ring carries all blocks but one. If blocks differ in length, the largest block reaches the last rank
/// chunk by chunk. With outputs in turn and engines of a device, the journey of one start overlaps with the next start.
fn uneven(request: &CostRequest<'_>, link: &EffectiveLink, even: u64) -> u64 {
    let sums = request.sums;
    let peers = sums.ranks - 1;
    if sums.block_bytes_max == sums.block_bytes_min || peers == 0 {
        return even;
    }
    let equal = sums.block_bytes_max.saturating_mul(peers);
    let carried = sums.total_bytes - sums.block_bytes_min;
    let others = request.chunk_bytes().saturating_mul(peers - 1);
    let journey = sums.block_bytes_max.saturating_add(others);
    let needed = if overlaps(request, link) { carried } else { carried.max(journey) };
    let saved = equal.saturating_sub(needed);
    even.saturating_sub(transfer_picoseconds(saved, link.rate(1)))
}

struct Hops {
    inside: bool,
    local: EffectiveLink,
    network: EffectiveLink,
}

impl Hops {
    fn new(request: &CostRequest<'_>, node_ranks: u64, ways: u64) -> Self {
        let links = request.links;
        Self {
            inside: !request.has_network() || node_ranks > 1,
            local: EffectiveLink::new(links, Some(Tier::Local), node_ranks, node_ranks),
            // The ring leaves each node once in each direction.
            network: EffectiveLink::new(links, Some(Tier::Network), node_ranks, ways),
        }
    }

    fn used<'a>(
        request: &CostRequest<'_>,
        inside: bool,
        local: &'a EffectiveLink,
        network: &'a EffectiveLink,
    ) -> impl Iterator<Item = &'a EffectiveLink> + use<'a> {
        let used = [(inside, local), (request.has_network(), network)];
        used.into_iter().filter(|(used, _)| *used).map(|(_, link)| link)
    }
}

fn chunk_time(request: &CostRequest<'_>, link: &EffectiveLink) -> u64 {
    let flags = request.flags(link, 1).saturating_mul(2);
    let chunk = link.puts(1, request.chunk_bytes()).max(link.receives(request.chunk_bytes()));
    chunk.saturating_add(flags)
}

/// In a ring broadcast, the first chunk passes every hop, and the other chunks follow over the slowest hop.
fn broadcast_estimate(request: &CostRequest<'_>, node_ranks: u64) -> PathEstimate {
    let sums = request.sums;
    let own = EffectiveLink::new(request.links, None, 1, 1);
    let Hops { inside, local, network } = Hops::new(request, node_ranks, 1);
    let used = || Hops::used(request, inside, &local, &network);
    let hops = sums.ranks - 1;
    // Every rank except the root forwards data that has just arrived.
    let forwarded = |link: &EffectiveLink| {
        let passed_on = if hops > 1 { link.passed_on(1, request.chunk_bytes()) } else { 0 };
        chunk_time(request, link).saturating_add(passed_on)
    };
    let slowest = used().max_by_key(|link| forwarded(link)).unwrap_or(&local);
    let furthest = used().max_by_key(|link| link.hop).unwrap_or(&local);
    let between = if request.has_network() { (sums.nodes - 1).min(hops) } else { 0 };
    // A signal from lane 0 announces the data that leaves a node. If only network lanes have work, they start on a flag from
    // lane 0 and end with one to it.
    let relay = if between > 0 && inside { own.hop } else { 0 };
    let entry = if between > 0 && !inside { own.hop } else { 0 };
    let hop = |link: &EffectiveLink, relay: u64| {
        forwarded(link).saturating_add(link.hop).saturating_add(relay)
    };
    let first = hop(&network, relay)
        .saturating_mul(between)
        .saturating_add(hop(&local, 0).saturating_mul(hops - between))
        .saturating_sub(forwarded(slowest) - chunk_time(request, slowest));
    let others = forwarded(slowest).saturating_mul(request.chunks() - 1);
    let ready = request.ready(furthest, hops.min(1), Some(&own)).saturating_add(entry);
    let note = format!(
        "{} × {} at {} over {hops} hops",
        request.chunks(),
        bytes(request.chunk_bytes()),
        rate(slowest.rate(1))
    );
    let mut terms = vec![
        Term::new("ready", ready, "of the next rank"),
        request.self_copy_term(&own, first.saturating_add(others)),
    ];
    if hops > 0 {
        terms.push(Term::new("first chunk", first, note));
        terms.push(Term::new("other chunks", others, "behind it"));
        terms.push(Term::new("end of the network lane", entry, ""));
    }
    let host = request.chunks().saturating_mul(slowest.submit);
    PathEstimate { terms, host }
}
