//! Implements the algorithms ring and double ring, in which every rank forwards received data to
//! the next rank.
//!
//! The ranks are ordered node after node, so the ring leaves each node once. A rank puts its own
//! block to the next rank, then forwards each chunk as soon as it has arrived. Every byte is put to
//! its final position in the output, so a rank only has to know that the next rank is `ready`. With
//! two outputs in turn, an all-gather does not need that either: in the last start, the block of
//! the next rank has passed all ranks. In a broadcast only the block of the root is forwarded, and
//! with several chunks the ring is a pipeline.
//!
//! The double ring has two lanes, one for each direction. Each forwards every block half of the
//! way. If the number of ranks is even, the opposite rank gets even chunks from one direction and
//! odd chunks from the other. Each direction carries half of the bytes, with half of the hops of
//! one ring.
//!
//! If a network reaches the other nodes, puts that leave the node are in a network lane. The local
//! lane waits for arrivals from this rank's node, and announces them to the network lane by a
//! signal to its own rank. The lane that forwards waits for arrivals from other nodes.
//!
//! With batched flags the `ready` signal and wait are adjacent; after that, the signal of one chunk
//! and the wait for the next are adjacent in any case.

use std::ops::Range;

use peerlane_hal::Rank;

use super::estimate::{ClusterSums, CostRequest, EffectiveLink, PathEstimate, Term, Traffic};
use super::steps::{after, arrived, put, signal, wait, writable};
use super::{PlanRequest, Schedule, schedule};
use crate::collective::Collective;
use crate::links::transfer_picoseconds;
use crate::plan::{Algorithm, Cell, Lane, LaneId, Source, Step, Tier};
use crate::units::{bytes, rate, time};

pub(super) const RING: Schedule = Schedule {
    algorithm: Algorithm::Ring,
    suits: |collective| collective.all_ranks_get_the_same() && !collective.is_reduction(),
    fits: |_, _| Ok(()),
    lanes: ring_lanes,
    redundant,
    forwards,
    chunks_in_round: |_| 1,
    gets: false,
    joins_blocks: false,
    needs_measurements: |_, _| true,
    lane_count: |nodes, tiers| if tiers && nodes > 1 { 2 } else { 1 },
    estimate: |request, node_ranks| estimate(request, node_ranks, 1),
    traffic,
};

pub(super) const DOUBLE_RING: Schedule = Schedule {
    algorithm: Algorithm::DoubleRing,
    suits: |collective| collective == Collective::AllGather,
    fits: |_, _| Ok(()),
    lanes: double_ring_lanes,
    redundant,
    forwards,
    chunks_in_round: |_| 1,
    gets: false,
    joins_blocks: false,
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
    let every = sums.moved_bytes;
    // A rank puts all blocks but that of the next rank, or gets all but its own. The missing block
    // can be the shortest.
    let of_rank = sums.total_bytes.saturating_sub(sums.block_bytes_min);
    if !request.has_network() {
        return [Traffic::new(of_rank, every), Traffic::default()];
    }

    // The ring has one hop for every rank, of which one leaves each node, and all hops count as
    // equally busy.
    let between = every / sums.ranks.max(1) * sums.nodes;
    [Traffic::new(of_rank, every.saturating_sub(between)), Traffic::new(of_rank, between)]
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

/// Creates the lanes of a double ring, the local lanes first and then the network lanes.
fn double_ring_lanes(request: &PlanRequest<'_>) -> Vec<Lane> {
    let mut order = ring_order(request);
    let mut lanes = empty_lanes(request, 2);

    // For each chunk, the hops of both directions add up to the number of peers. If that is odd,
    // even chunks go one hop further forwards, and odd chunks one hop further backwards.
    let peers = order.len() - 1;
    let near = peers / 2;
    let far = peers.div_ceil(2);
    // Each direction makes half of the self copy.
    let middle = request.shape.chunks.div_ceil(2);

    let forwards = Direction {
        order: &order,
        local: LaneId::HOME,
        network: LaneId(2),
        hops: [far, near],
        copied: 0..middle,
    };
    forwards.extend(request, &mut lanes);

    // This rank stays first in the order, and the previous rank becomes the next one.
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

/// Returns the ranks in the order of the ring, node after node, beginning with this rank.
pub(super) fn ring_order(request: &PlanRequest<'_>) -> Vec<Rank> {
    let &PlanRequest { topology, rank, .. } = request;
    let node = topology.node(rank);
    let mates = topology.members(node);
    let at = topology.local_index(rank);

    let mut order = mates[at..].to_vec();
    for other in after(topology.nodes(), node as usize) {
        order.extend_from_slice(topology.members(Rank::at(other).0));
    }
    // The ranks before this one in its node are the end of the ring.
    order.extend_from_slice(&mates[..at]);
    order
}

/// Creates the steps of one rank for one direction of a ring.
///
/// The rank is the first in `order`.
struct Direction<'a> {
    order: &'a [Rank],
    /// The lane for puts inside the node.
    local: LaneId,
    /// The lane for puts to other nodes, if a network reaches them.
    network: LaneId,
    /// The number of hops that even chunks make, and the number that odd chunks make.
    hops: [usize; 2],
    /// The chunks of the rank's own block that this direction copies to the rank's output.
    copied: Range<u32>,
}

impl Direction<'_> {
    /// Appends the steps of this direction to `lanes`.
    fn extend(self, request: &PlanRequest<'_>, lanes: &mut [Lane]) {
        let &PlanRequest { rank, shape, .. } = request;
        let chunks = || (0..shape.chunks).map(|chunk| (chunk, self.hops(chunk)));
        let furthest = chunks().map(|(_, hops)| hops).max().unwrap_or(0);
        let mut push = |lane: LaneId, step: Step| lanes[lane.index()].steps.push(step);

        let next = self.rank_after(1);
        let previous = self.rank_after(self.order.len() - 1);
        let inward = self.lane(request, previous, rank);
        let outward = self.lane(request, rank, next);
        let reader = self.reader(request, 0);
        let reader_next = self.reader(request, 1);

        // The root of a broadcast gets no data, and neither does a direction without hops.
        let is_put_to = (0..furthest).any(|hop| request.is_provider(self.origin(hop + 1)));
        if let Some(flag) = writable(request, rank, inward).filter(|_| is_put_to) {
            push(inward, signal(previous, flag));
        }

        // The rank before the root of a broadcast puts nothing, and neither does a direction
        // without hops. Batched flags belong next to each other.
        let puts = (0..furthest).any(|hop| request.is_provider(self.origin(hop)));
        let awaited = writable(request, next, outward).filter(|_| puts);
        if let (Some(flag), true) = (awaited, shape.flags.is_batched()) {
            push(outward, wait(flag));
        }

        if request.is_provider(rank) && !shape.in_place {
            for chunk in self.copied.clone() {
                push(self.local, put(rank, Cell { block: rank, chunk }, Source::Input));
            }
        }

        // The self copy can run until the next rank is ready, so a prompt wait comes after it.
        if let (Some(flag), false) = (awaited, shape.flags.is_batched()) {
            push(outward, wait(flag));
        }

        for hop in 0..furthest {
            let block = self.origin(hop);
            if !request.is_provider(block) {
                continue;
            }

            let from = source(hop);
            // The chunks with fewer hops have reached their last rank.
            for (chunk, _) in chunks().filter(|&(_, hops)| hops > hop) {
                let cell = Cell { block, chunk };
                if hop > 0 {
                    push(reader, wait(arrived(cell, reader)));
                }
                // Only one lane waits for the previous rank, and relays the arrival to the one that
                // forwards.
                if hop > 0 && reader != outward {
                    push(reader, signal(rank, arrived(cell, outward)));
                    push(outward, wait(arrived(cell, outward)));
                }

                push(outward, put(next, cell, from));
                push(outward, signal(next, arrived(cell, reader_next)));
            }
        }

        // Nothing forwards the blocks that end here, so nothing has waited for them yet.
        for (chunk, hops) in chunks().filter(|&(_, hops)| hops > 0) {
            let block = self.origin(hops);
            if request.is_provider(block) {
                push(reader, wait(arrived(Cell { block, chunk }, reader)));
            }
        }
    }

    /// Returns the rank whose block reaches this rank after `hop` hops.
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

    /// Returns the lane in which the rank `by` places after this one waits for arrivals.
    ///
    /// The local fabric cannot write flags of the network fabric, so no local lane signals a
    /// network lane of a peer.
    fn reader(&self, request: &PlanRequest<'_>, by: usize) -> LaneId {
        let last = self.order.len() - 1;
        let rank = self.rank_after(by);
        let previous = self.rank_after(by + last);
        let next = self.rank_after(by + 1);

        match self.lane(request, previous, rank) == self.network {
            // The lane that forwards waits itself, so that no relay is needed.
            true => self.lane(request, rank, next),
            false => self.local,
        }
    }
}

/// Returns the buffer that holds a block which has made so many hops.
pub(super) fn source(hop: usize) -> Source {
    if hop == 0 { Source::Input } else { Source::Output }
}

/// Estimates the time of the longest path through a ring with `ways` directions.
///
/// If ranks get instead of putting, the links of the hops have the times of gets, and each hop but
/// the first one begins with a relay.
///
/// The path goes through a node of `node_ranks` ranks.
fn estimate(request: &CostRequest<'_>, node_ranks: u64, ways: u64) -> PathEstimate {
    if request.shape.collective.only_provider().is_some() {
        return broadcast_estimate(request, node_ranks);
    }

    let CostRequest { algorithm, sums, links, .. } = *request;
    let gets = schedule(algorithm).gets;
    let own = EffectiveLink::new(links, None, node_ranks, node_ranks);
    let hop_links = HopLinks::new(request, node_ranks, ways);
    let slowest = hop_links.slowest(request, |link| chunk_time(request, link));
    let furthest = hop_links.slowest(request, |link| link.hop);

    let peers = sums.ranks - 1;
    let chunks = request.chunks();
    // With two directions, even chunks pass more hops in one direction, odd ones in the other.
    let near = peers / ways;
    let hops = peers.div_ceil(ways);
    let puts = hops * chunks.div_ceil(ways) + near * (chunks - chunks.div_ceil(ways));

    // All blocks except the own one came from the previous rank.
    let foreign = peers.saturating_sub(1);
    let foreign_bytes = sums.block_bytes_max.saturating_mul(foreign);
    let passed_on = slowest.passed_on(foreign * chunks, foreign_bytes);

    // Either the puts one after the other take longest, or the transfers over the shared links.
    let one_by_one = chunk_time(request, slowest).saturating_mul(puts);
    let even = one_by_one
        .max(time_of_sends(request, &hop_links, node_ranks, ways))
        .saturating_add(passed_on);
    let all = uneven(request, slowest, even);

    // A signal from lane 0 announces the data that leaves the node to the network lane.
    let relay = if request.has_network() && hop_links.inside { own.hop } else { 0 };
    let journey = time_of_journey(request, &hop_links, slowest, hops, relay);

    // The journey goes on while the rank puts other chunks, and only the rest is waited for. If
    // starts overlap and blocks differ in length, the rest falls into the next start.
    let last_hop = furthest.hop;
    let uneven_overlap = overlaps(request, slowest) && sums.block_bytes_max > sums.block_bytes_min;
    let waits = match uneven_overlap {
        true => 0,
        false => journey.saturating_sub(all.saturating_add(last_hop)),
    };

    // If only network lanes have work, they start on a flag from lane 0 and end with one to it.
    let entry = if hop_links.inside { 0 } else { own.hop };
    let ready = request.ready(furthest, peers.min(1), Some(&own)).saturating_add(entry);
    let last_arrival = last_hop.saturating_add(entry);

    let longer = match passed_on {
        0 => String::new(),
        _ => format!(", {} longer as peers have just put it there", time(passed_on)),
    };
    let note = format!(
        "{hops} steps of {chunks} × {} at {}{longer}",
        bytes(request.chunk_bytes()),
        rate(slowest.rate(1))
    );

    let mut terms = vec![
        Term::new("ready", ready, ready_note(gets)),
        request.self_copy_term(&own, all.saturating_add(waits)),
        Term::new(if gets { "gets" } else { "puts" }, all, note),
    ];
    if hops > 0 {
        terms.push(Term::new("waits for the next chunk", waits, format!("on {hops} steps")));
        let last = if gets { "last taken" } else { "last arrival" };
        terms.push(Term::new(last, last_arrival, ""));
    }

    let submits = peers.saturating_mul(chunks).saturating_mul(slowest.submit);
    let host = submits.saturating_add(request.self_puts().saturating_mul(own.submit));
    PathEstimate { terms, host }
}

/// Returns which rank is waited for before a rank puts, or with `gets` before it gets.
fn ready_note(gets: bool) -> &'static str {
    if gets { "of the previous rank" } else { "of the next rank" }
}

/// Returns how long a rank takes to send all its blocks at the rates of its links.
fn time_of_sends(
    request: &CostRequest<'_>,
    hop_links: &HopLinks,
    node_ranks: u64,
    ways: u64,
) -> u64 {
    let peers = request.sums.ranks - 1;
    // Two directions leave a node at two ranks, unless it has only one; and of two ranks each has
    // one direction inside.
    let one_way = peers.div_ceil(ways);
    let inside_blocks = if request.has_network() && node_ranks == 2 { one_way } else { peers };
    let out_blocks = if node_ranks > 1 { one_way } else { peers };

    let HopLinks { inside, local, network, .. } = hop_links;
    let blocks = |count: u64| request.sums.block_bytes_max.saturating_mul(count);
    let inside_time = match local.by_processor {
        _ if !inside => 0,
        // One thread makes the copies of both directions, one after the other.
        true => {
            let puts = inside_blocks.saturating_mul(request.chunks());
            chunk_time(request, local).saturating_mul(puts)
        }
        false => local.sends(blocks(inside_blocks)),
    };
    let out_time = if request.has_network() { network.sends(blocks(out_blocks)) } else { 0 };

    inside_time.max(out_time)
}

/// Returns how long it takes until all chunks of one block have passed `hops` hops.
///
/// Each hop between nodes takes the time `relay` longer.
fn time_of_journey(
    request: &CostRequest<'_>,
    hop_links: &HopLinks,
    slowest: &EffectiveLink,
    hops: u64,
    relay: u64,
) -> u64 {
    let passed_on = |link: &EffectiveLink| link.passed_on(1, request.chunk_bytes());
    let forwarded =
        |link: &EffectiveLink| chunk_time(request, link).saturating_add(passed_on(link));
    let near_hop = forwarded(&hop_links.local)
        .saturating_add(hop_links.local.hop)
        .saturating_add(hop_links.inside_relay);
    let far_hop =
        forwarded(&hop_links.network).saturating_add(hop_links.network.hop).saturating_add(relay);

    // A block crosses at most one way out of each node, and every other link at most once. The hops
    // to other nodes may be the slower or the faster ones, so as many or as few as possible count.
    let sums = request.sums;
    let ways_out = if request.has_network() { sums.nodes } else { 0 };
    let out_max = ways_out.min(hops);
    let out_min = hops - hops.min(sums.ranks - ways_out);
    let first_chunk =
        |out: u64| far_hop.saturating_mul(out).saturating_add(near_hop.saturating_mul(hops - out));
    let first = first_chunk(out_max).max(first_chunk(out_min));

    // The other chunks follow at the pace of the slowest hop.
    let others = forwarded(slowest).saturating_mul(request.chunks() - 1);
    // The path begins at the rank that provides the block, and its put forwards nothing.
    first
        .saturating_add(others)
        .saturating_sub(passed_on(&hop_links.local).min(passed_on(slowest)))
        .saturating_sub(hop_links.inside_relay)
}

/// Returns whether one start of the operation can overlap with the next start.
///
/// This needs puts to alternating outputs, by an engine instead of a processor.
fn overlaps(request: &CostRequest<'_>, link: &EffectiveLink) -> bool {
    request.shape.outputs > 1 && !link.by_processor && !schedule(request.algorithm).gets
}

/// Reduces the time `even`, which assumes blocks of the largest length, if blocks differ in length.
///
/// Every link of a ring carries all blocks but one. If blocks differ in length, the largest block
/// reaches the last rank chunk by chunk. With outputs in turn and engines of a device, the journey
/// of one start overlaps with the next start.
fn uneven(request: &CostRequest<'_>, link: &EffectiveLink, even: u64) -> u64 {
    let sums = request.sums;
    let peers = sums.ranks - 1;
    if sums.block_bytes_max == sums.block_bytes_min || peers == 0 {
        return even;
    }

    // The busiest link leads to the rank whose block is the shortest.
    let carried = sums.total_bytes - sums.block_bytes_min;
    let others = request.chunk_bytes().saturating_mul(peers - 1);
    let journey = sums.block_bytes_max.saturating_add(others);
    let needed = if overlaps(request, link) { carried } else { carried.max(journey) };

    let equal = sums.block_bytes_max.saturating_mul(peers);
    let saved = equal.saturating_sub(needed);
    even.saturating_sub(transfer_picoseconds(saved, link.rate(1)))
}

/// Stores the links inside and between nodes over which the hops of a ring go.
struct HopLinks {
    /// Whether hops inside the node exist.
    inside: bool,
    local: EffectiveLink,
    network: EffectiveLink,
    /// The additional time of a hop inside a node in which one lane gets and another one announces,
    /// for all hops but the first.
    inside_relay: u64,
}

impl HopLinks {
    fn new(request: &CostRequest<'_>, node_ranks: u64, ways: u64) -> Self {
        let links = request.links;
        let gets = schedule(request.algorithm).gets;
        let of_copies = |link: EffectiveLink| if gets { link.of_gets() } else { link };
        let local = EffectiveLink::new(links, Some(Tier::Local), node_ranks, node_ranks);
        // The ring leaves each node once in each direction.
        let network = EffectiveLink::new(links, Some(Tier::Network), node_ranks, ways);
        let own = EffectiveLink::new(links, None, node_ranks, node_ranks);

        // Both directions of a rank use the same link, unless one of them leaves the node: their
        // puts begin together, and share the rate.
        let local_ways = if !request.has_network() || node_ranks > 2 { ways } else { 1 };
        let network_ways = if node_ranks == 1 { ways } else { 1 };
        Self {
            inside: !request.has_network() || node_ranks > 1,
            local: of_copies(local).shared_by(local_ways),
            network: of_copies(network).shared_by(network_ways),
            inside_relay: if gets { own.hop } else { 0 },
        }
    }

    /// Returns the link whose `time` is the longest, among the links that the ring uses.
    fn slowest(
        &self,
        request: &CostRequest<'_>,
        time: impl Fn(&EffectiveLink) -> u64,
    ) -> &EffectiveLink {
        let local = self.inside.then_some(&self.local);
        let network = request.has_network().then_some(&self.network);
        let used = local.into_iter().chain(network);

        // There is always a link; of equally slow ones this is the last.
        used.max_by_key(|link| time(link)).unwrap_or(&self.local)
    }
}

/// Returns the time of one hop of a chunk, including a wait, a copy and a signal.
fn chunk_time(request: &CostRequest<'_>, link: &EffectiveLink) -> u64 {
    // While the rank puts a chunk, it receives another one.
    let chunk = link.puts(1, request.chunk_bytes()).max(link.receives(request.chunk_bytes()));
    let flags = request.flags(link, 1).saturating_mul(2);

    chunk.saturating_add(flags)
}

/// Estimates the time of a broadcast over a ring.
///
/// The first chunk passes every hop, and the other chunks follow over the slowest hop.
fn broadcast_estimate(request: &CostRequest<'_>, node_ranks: u64) -> PathEstimate {
    let sums = request.sums;
    let hops = sums.ranks - 1;
    let own = EffectiveLink::new(request.links, None, 1, 1);
    let hop_links = HopLinks::new(request, node_ranks, 1);

    // With one hop the root puts all data. With more, ranks forward data that has just arrived.
    let forwarded = |link: &EffectiveLink| {
        let passed_on = if hops > 1 { link.passed_on(1, request.chunk_bytes()) } else { 0 };
        chunk_time(request, link).saturating_add(passed_on)
    };
    let slowest = hop_links.slowest(request, forwarded);

    // A signal from lane 0 announces the data that leaves a node.
    let between = if request.has_network() { (sums.nodes - 1).min(hops) } else { 0 };
    let relay = if between > 0 && hop_links.inside { own.hop } else { 0 };

    let HopLinks { local, network, .. } = &hop_links;
    let near_hop =
        forwarded(local).saturating_add(local.hop).saturating_add(hop_links.inside_relay);
    let far_hop = forwarded(network).saturating_add(network.hop).saturating_add(relay);
    let first = far_hop
        .saturating_mul(between)
        .saturating_add(near_hop.saturating_mul(hops - between))
        // The put of the root forwards nothing, and a get from the root needs no relay.
        .saturating_sub(forwarded(slowest) - chunk_time(request, slowest))
        .saturating_sub(hop_links.inside_relay);
    let others = forwarded(slowest).saturating_mul(request.chunks() - 1);

    // If only network lanes have work, they start on a flag from lane 0 and end with one to it.
    let entry = if between > 0 && !hop_links.inside { own.hop } else { 0 };
    let furthest = hop_links.slowest(request, |link| link.hop);
    let ready = request.ready(furthest, hops.min(1), Some(&own)).saturating_add(entry);

    let note = format!(
        "{} × {} at {} over {hops} hops",
        request.chunks(),
        bytes(request.chunk_bytes()),
        rate(slowest.rate(1))
    );

    let mut terms = vec![
        Term::new("ready", ready, ready_note(schedule(request.algorithm).gets)),
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
