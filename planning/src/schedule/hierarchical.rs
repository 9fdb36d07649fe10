//! Implements the hierarchical algorithms, which send each block once to every other node and
//! distribute it inside the node.
//!
//! *Hierarchical.* Lane 1 puts this rank's block to one rank of every other node, and waits for
//! nothing else. Meanwhile lane 0 distributes this rank's block inside the node; then it puts each
//! chunk that arrives from another node to the other ranks of its node as soon as it has arrived.
//! Nodes are served in shifted order, so a block from the k-th node before is the k-th to arrive,
//! and lane 0 waits in this order. With one node there is no lane 1; with one rank on a node lane 0
//! has only arrivals. Neither is a special case.
//!
//! *Hierarchical ring.* Lane 1 puts this rank's block only to the next node, then forwards every
//! chunk that arrives from the previous node, until all nodes have it. So a rank has few peers in
//! other nodes for any number of nodes. Two lanes need each arrival, lane 0 to distribute it and
//! lane 1 to forward it, and each has a flag of its own.
//!
//! *Rails.* The block of local index l enters node j at the rank of local index l mod L, of the L
//! ranks of node j. On nodes with different numbers of ranks, several rails end at one rank of a
//! small node.
//!
//! With batched flags lane 0 has the `ready` signals and waits together, and the signals that
//! announce a chunk to all ranks of the node. With the network first, lane 0 waits for everything
//! that enters the node at this rank before it makes its own copies. Lane 1 announces every chunk
//! at once in any case, because lane 0 can continue with it.

use peerlane_hal::Rank;

use super::estimate::{ClusterSums, CostRequest, EffectiveLink, PathEstimate, Term, Traffic, sum};
use super::steps::{
    NETWORK_LANE, after, arrived, before, cells, put, self_copy, signal, wait, writable,
};
use super::{PlanRequest, Schedule};
use crate::collective::Collective;
use crate::plan::{Algorithm, Cell, FlagOrder, Lane, LaneId, Source, Step, Tier};
use crate::topology::Topology;
use crate::units::{bytes, rate, time};

pub(super) const HIERARCHICAL: Schedule = Schedule {
    algorithm: Algorithm::Hierarchical,
    suits: |collective| collective == Collective::AllGather,
    fits: |_, _| Ok(()),
    lanes: direct_lanes,
    redundant,
    forwards,
    chunks_in_round: |_| 1,
    gets: false,
    joins_blocks: false,
    needs_measurements: |_, _| false,
    lane_count: |nodes, _| if nodes > 1 { 2 } else { 1 },
    estimate,
    traffic,
};

pub(super) const HIERARCHICAL_RING: Schedule =
    Schedule { algorithm: Algorithm::HierarchicalRing, lanes: ring_lanes, ..HIERARCHICAL };

fn redundant(sums: &ClusterSums) -> Option<&'static str> {
    (sums.nodes == 1).then_some("there is one node")
}

fn forwards(sums: &ClusterSums) -> bool {
    sums.nodes > 1
}

/// Returns how many bytes the operation moves inside nodes, and how many over the network, in this
/// order.
fn traffic(request: &CostRequest<'_>) -> [Traffic; 2] {
    let sums = request.sums;
    let blocks = |count: u64| sums.block_bytes_max.saturating_mul(count);

    // A rank puts its own block and those that enter at it to the other ranks of its node.
    let of_node = |ranks: u64| blocks((sums.entering(ranks) + 1) * (ranks - 1));
    let inside_max = sums.node_ranks().map(of_node).max().unwrap_or(0);

    let others = sums.nodes - 1;
    let sent = if request.algorithm == Algorithm::HierarchicalRing {
        // A rank sends its own block once, and forwards those that enter at it, except at the last
        // hop. Most enter at one rank in the smallest node. The count is an upper bound.
        sums.entering(sums.node_ranks_min_max().0).max(others)
    } else {
        others
    };
    let between_max = blocks(sent);

    let every = sums.moved_bytes;
    if !request.has_network() {
        return [Traffic::new(inside_max.saturating_add(between_max), every), Traffic::default()];
    }

    // Each block enters every other node once.
    let between = sums.total_bytes.saturating_mul(others);
    [Traffic::new(inside_max, every.saturating_sub(between)), Traffic::new(between_max, between)]
}

fn direct_lanes(request: &PlanRequest<'_>) -> Vec<Lane> {
    lanes_with(request, direct_between)
}

/// Creates lane 0 and, if there are several nodes, lane 1 with the steps that `between` returns.
fn lanes_with(
    request: &PlanRequest<'_>,
    between: impl FnOnce(&PlanRequest<'_>, &Rails<'_>) -> Vec<Step>,
) -> Vec<Lane> {
    let rails = Rails::new(request);
    let mut lanes = vec![Lane { tier: Tier::Local, steps: home_steps(request, &rails) }];

    if rails.nodes() > 1 {
        let tier = if request.has_network() { Tier::Network } else { Tier::Local };
        lanes.push(Lane { tier, steps: between(request, &rails) });
    }

    lanes
}

/// Returns the steps of lane 1, which puts this rank's block to the rank with the same local index
/// on every other node.
///
/// On a smaller node, the local index is taken modulo the number of ranks of that node.
fn direct_between(request: &PlanRequest<'_>, rails: &Rails<'_>) -> Vec<Step> {
    let &PlanRequest { rank, shape, .. } = request;
    let writable = |owner| writable(request, owner, NETWORK_LANE);

    let mut steps = Vec::new();
    if let Some(flag) = writable(rank) {
        let sources = (1..rails.nodes()).flat_map(|by| rails.entering(by, rails.local_index()));
        steps.extend(sources.map(|source| signal(source, flag)));
    }

    let targets = || (1..rails.nodes()).map(|by| entry(rails.ahead(by), rails.local_index()));
    if shape.flags.is_batched() {
        steps.extend(targets().filter_map(writable).map(wait));
    }
    for target in targets() {
        if !shape.flags.is_batched() {
            steps.extend(writable(target).map(wait));
        }
        // Even with batched flags each chunk is announced at once, because lane 0 of the target
        // distributes it.
        steps.extend(announced(target, cells(rank, shape.chunks), Source::Input));
    }

    steps
}

/// Returns, for each of `cells`, a put to `peer` and a signal to lane 0 of `peer` after the put.
fn announced(
    peer: Rank,
    cells: impl Iterator<Item = Cell>,
    from: Source,
) -> impl Iterator<Item = Step> {
    cells.flat_map(move |cell| [put(peer, cell, from), signal(peer, arrived(cell, LaneId::HOME))])
}

/// Returns the steps of lane 0, which distributes this rank's block, and the blocks that enter the
/// node at this rank, inside the node.
fn home_steps(request: &PlanRequest<'_>, rails: &Rails<'_>) -> Vec<Step> {
    let &PlanRequest { rank, shape, .. } = request;
    let lane = LaneId::HOME;
    let mates = rails.mates();
    let at = rails.local_index();
    let served = || after(mates.len(), at).map(|mate| mates[mate]);
    let writable = |owner| writable(request, owner, lane);

    let entering = || entering_cells(request, rails, at);
    let waits_first = shape.flags == FlagOrder::NetworkFirst;
    let mut steps = Vec::new();
    if waits_first {
        steps.extend(entering().map(|cell| wait(arrived(cell, lane))));
    }
    if let Some(flag) = writable(rank) {
        steps.extend(served().map(|mate| signal(mate, flag)));
    }

    match shape.flags {
        // The self copy comes first, as it can run until the first rank is ready.
        FlagOrder::Prompt | FlagOrder::Interleaved => {
            steps.extend(self_copy(request));
            for mate in served() {
                steps.extend(writable(mate).map(wait));
                steps.extend(announced(mate, cells(rank, shape.chunks), Source::Input));
            }
        }
        FlagOrder::Batched | FlagOrder::NetworkFirst => {
            steps.extend(served().filter_map(writable).map(wait));
            steps.extend(self_copy(request));
            let to_mates = || served().flat_map(|m| cells(rank, shape.chunks).map(move |c| (m, c)));
            steps.extend(to_mates().map(|(mate, cell)| put(mate, cell, Source::Input)));
            steps.extend(to_mates().map(|(mate, cell)| signal(mate, arrived(cell, lane))));
        }
    }

    // The ranks of the node are ready by now, so what enters is distributed without a further wait.
    for cell in entering() {
        if !waits_first {
            steps.push(wait(arrived(cell, lane)));
        }
        match shape.flags {
            FlagOrder::Prompt | FlagOrder::Interleaved => {
                for mate in served() {
                    steps.extend(announced(mate, [cell].into_iter(), Source::Output));
                }
            }
            FlagOrder::Batched | FlagOrder::NetworkFirst => {
                steps.extend(served().map(|mate| put(mate, cell, Source::Output)));
                steps.extend(served().map(|mate| signal(mate, arrived(cell, lane))));
            }
        }
    }

    // Every rank puts its own block before the blocks that enter at it, so the waits have this
    // order.
    let serving = before(mates.len(), at);
    for mate in serving.clone() {
        steps.extend(cells(mates[mate], shape.chunks).map(|cell| wait(arrived(cell, lane))));
    }
    for mate in serving {
        steps.extend(entering_cells(request, rails, mate).map(|cell| wait(arrived(cell, lane))));
    }

    steps
}

/// Returns the cells of other nodes that reach this node through the rank with local index `at`.
///
/// The cells are in the order of their arrival.
fn entering_cells(
    request: &PlanRequest<'_>,
    rails: &Rails<'_>,
    at: usize,
) -> impl Iterator<Item = Cell> {
    let chunks = request.shape.chunks;

    (1..rails.nodes()).flat_map(move |by| {
        let blocks = rails.entering(by, at);
        (0..chunks).flat_map(move |chunk| blocks.clone().map(move |block| Cell { block, chunk }))
    })
}

fn ring_lanes(request: &PlanRequest<'_>) -> Vec<Lane> {
    lanes_with(request, ring_between)
}

/// Returns the steps of lane 1 in a hierarchical ring, which puts this rank's block and blocks of
/// other nodes to the next node.
fn ring_between(request: &PlanRequest<'_>, rails: &Rails<'_>) -> Vec<Step> {
    let &PlanRequest { rank, shape, .. } = request;
    let writable = |owner| writable(request, owner, NETWORK_LANE);

    let mut steps = Vec::new();
    if let Some(flag) = writable(rank) {
        steps.extend(writers(rails).into_iter().map(|writer| signal(writer, flag)));
    }

    let mut awaited = targets(rails);
    if shape.flags.is_batched() {
        steps.extend(awaited.drain(..).filter_map(writable).map(wait));
    }

    for hop in 0..last_hop(rails) + 1 {
        let from = if hop == 0 { Source::Input } else { Source::Output };
        for chunk in 0..shape.chunks {
            for (block, place) in passing(rails, hop) {
                let cell = Cell { block, chunk };
                if hop > 0 {
                    steps.push(wait(arrived(cell, NETWORK_LANE)));
                }

                // With prompt flags, only the first put to a target waits for it. With batched
                // flags, the lane has waited for all targets.
                let target = entry(rails.ahead(1), place);
                if let Some(at) = awaited.iter().position(|&other| other == target) {
                    awaited.remove(at);
                    steps.extend(writable(target).map(wait));
                }
                steps.push(put(target, cell, from));

                // Lane 1 of the target forwards the chunk, except after the last hop, and its lane
                // 0 distributes it. A flag has one reader, so each lane has its own.
                if hop < last_hop(rails) {
                    steps.push(signal(target, arrived(cell, NETWORK_LANE)));
                }
                steps.push(signal(target, arrived(cell, LaneId::HOME)));
            }
        }
    }

    steps
}

/// Returns the number of the hop, counted from 0, at which a block reaches the last of the other
/// nodes.
///
/// Lane 1 exists only with two nodes or more.
fn last_hop(rails: &Rails<'_>) -> usize {
    rails.nodes() - 2
}

/// Returns the blocks that this rank puts to the next node at hop `hop`.
///
/// Each has the local index of its provider.
fn passing<'a>(rails: &Rails<'a>, hop: usize) -> impl Iterator<Item = (Rank, usize)> + use<'a> {
    // At hop 0 the rank puts only its own block, later those that entered this node at it.
    let step = if hop == 0 { usize::MAX } else { rails.mates().len() };
    rails.behind(hop).iter().copied().zip(0..).skip(rails.local_index()).step_by(step)
}

/// Returns the ranks of the next node to which this rank puts a block at any hop.
fn targets(rails: &Rails<'_>) -> Vec<Rank> {
    let next = rails.ahead(1);
    let mut is_target = vec![false; next.len()];
    for hop in 0..last_hop(rails) + 1 {
        passing(rails, hop).for_each(|(_, place)| is_target[place % next.len()] = true);
    }

    picked(next, &is_target)
}

/// Returns the ranks of the previous node that put a block to this rank at any hop.
fn writers(rails: &Rails<'_>) -> Vec<Rank> {
    let previous = rails.behind(1);
    let mut is_writer = vec![false; previous.len()];
    for by in 1..rails.nodes() {
        // A block enters this node from the rank of the previous node that provides it, or at which
        // it entered that node by the same rule.
        let places = (rails.local_index()..rails.behind(by).len()).step_by(rails.mates().len());
        places.for_each(|place| is_writer[place % previous.len()] = true);
    }

    picked(previous, &is_writer)
}

fn picked(members: &[Rank], is_picked: &[bool]) -> Vec<Rank> {
    members.iter().zip(is_picked).filter(|&(_, &picked)| picked).map(|(&rank, _)| rank).collect()
}

/// Computes at which rank of each node a block enters the node, as seen from one rank.
#[derive(Clone, Copy, Debug)]
struct Rails<'a> {
    topology: &'a Topology,
    node: usize,
    local_index: usize,
}

impl<'a> Rails<'a> {
    fn new(request: &PlanRequest<'a>) -> Self {
        let &PlanRequest { topology, rank, .. } = request;
        let node = topology.node(rank) as usize;
        Self { topology, node, local_index: topology.local_index(rank) }
    }

    fn nodes(&self) -> usize {
        self.topology.nodes()
    }

    fn local_index(&self) -> usize {
        self.local_index
    }

    fn mates(&self) -> &'a [Rank] {
        self.ahead(0)
    }

    /// Returns the ranks of the node `by` places after this rank's node.
    fn ahead(&self, by: usize) -> &'a [Rank] {
        self.topology.members(Rank::at((self.node + by) % self.nodes()).0)
    }

    fn behind(&self, by: usize) -> &'a [Rank] {
        self.ahead(self.nodes() - by)
    }

    /// Returns the blocks of the node `by` places before this node that enter here at local index
    /// `at`.
    fn entering(&self, by: usize, at: usize) -> impl Iterator<Item = Rank> + Clone {
        self.behind(by).iter().copied().skip(at).step_by(self.mates().len())
    }
}

/// Returns the member of a node that receives the blocks of ranks with local index `at`.
fn entry(members: &[Rank], at: usize) -> Rank {
    members[at % members.len()]
}

/// Estimates the time of the longest path through a rank, on a node with `node_ranks` ranks.
///
/// It is one of three: over the network, through lane 0, or the work of both lanes by one thread.
fn estimate(request: &CostRequest<'_>, node_ranks: u64) -> PathEstimate {
    let CostRequest { sums, links, shape, .. } = *request;
    let tier = request.tier_between_nodes();
    let own = EffectiveLink::new(links, None, node_ranks, node_ranks);
    let local = EffectiveLink::new(links, Some(Tier::Local), node_ranks, node_ranks);
    let network = EffectiveLink::new(links, Some(tier), node_ranks, node_ranks);
    let mates = node_ranks - 1;
    let between = NetworkTime::new(request, &network, node_ranks);

    let spread = spread_own(request, &local, mates, request.chunks(), sums.block_bytes_max);
    // The cells that lane 0 distributes came from another node.
    let cell = spread_cell(request, &local, mates)
        .saturating_add(local.passed_on(mates, request.chunk_bytes().saturating_mul(mates)));
    let entering = sums.entering(node_ranks);
    let forwards = spread_cells(cell, entering.saturating_mul(request.chunks()));

    // Only a processor makes the self copy in lane 0, other engines make it at the same time.
    let copy = request.self_copy(&own);
    let copy_home = if own.by_processor { copy } else { 0 };

    // Both lanes wait for `ready`; only home has the self copy in between.
    let ready_home = request.ready(&local, mates, Some(&own));
    let ready_network = request.ready(&network, between.targets, None);

    // The path over the network: all chunks arrive, and the last of them are distributed. Blocks of
    // nodes that send at the same time arrive at the same time, and lane 0 distributes one after
    // the other.
    let waiting = between.senders.saturating_sub(1).saturating_mul(request.chunks());
    let at_once = sums.entering_from_one(node_ranks).saturating_mul(waiting.saturating_add(1));
    let tail = match shape.flags {
        // All copies inside the node come behind the last arrival.
        FlagOrder::NetworkFirst if between.time > 0 => spread.saturating_add(forwards),
        _ if between.time > 0 => spread_cells(cell, at_once),
        _ => 0,
    };
    // Lane 0 signals lane 1 that the operation has begun.
    let go = if between.time > 0 { own.hop } else { 0 };
    let by_network = sum([ready_network, go, between.time, between.hop, tail]);

    // The path of lane 0 begins with the rank's own block, and goes on when the first chunk has
    // entered.
    let first = sum([ready_network, go, between.first, between.hop]);
    let home = sum([ready_home, copy_home, spread]);
    let home_end = if forwards > 0 { home.max(first).saturating_add(forwards) } else { home };

    // Both lanes on one fabric share the rate at which the rank can send.
    let sent_blocks = (entering + 1).saturating_mul(mates).saturating_add(between.blocks);
    let sent = local.sends(sent_blocks.saturating_mul(sums.block_bytes_max));
    let by_home = match tier {
        Tier::Local => home_end.max(ready_home.saturating_add(sent)),
        Tier::Network => home_end,
    };

    // One thread makes the copies of both lanes, one after the other.
    let one_thread = local.by_processor && network.by_processor;
    let in_turn = [ready_home, copy_home, between.work, spread, forwards];
    let by_thread = if one_thread { sum(in_turn) } else { 0 };

    let longest = by_network.max(by_home).max(by_thread);
    let ready = if longest == by_network { ready_network } else { ready_home };

    let inside = format!("{} own, {} passed on", time(spread), time(forwards));
    let outside = format!(
        "{} × {} at {}",
        between.puts,
        bytes(request.chunk_bytes()),
        rate(network.rate(between.puts))
    );
    let path = if longest == by_thread {
        let note = format!("{outside} between nodes; {inside}");
        Term::new("both lanes in turn", by_thread - ready, note)
    } else if longest == by_home {
        let hidden = match between.time {
            0 => String::new(),
            _ => format!("; {outside} between nodes at the same time"),
        };
        Term::new("puts inside the node", by_home - ready, format!("{inside}{hidden}"))
    } else {
        let last = time(tail);
        let note =
            format!("{outside}, the last spread in {last}; inside {inside} at the same time");
        Term::new("puts between nodes", by_network - ready, note)
    };

    let mut terms =
        vec![Term::new("ready", ready, format!("of {} peers", mates + between.targets)), path];
    // A processor makes the self copy in lane 0, where it is counted already.
    if !own.by_processor {
        terms.push(Term::new("self copy", copy.saturating_sub(longest), "the rest after the puts"));
    }
    if mates > 0 {
        terms.push(Term::new("last arrival", local.hop, ""));
    }

    let local_puts = mates.saturating_mul(entering + 1).saturating_mul(request.chunks());
    let host = (local_puts.saturating_mul(local.submit))
        .saturating_add(between.puts.saturating_mul(network.submit))
        .saturating_add(request.self_puts().saturating_mul(own.submit));
    PathEstimate { terms, host }
}

/// The predicted work of lane 1, which reaches other nodes, with times in picoseconds.
///
/// All values are 0 if there is one node.
#[derive(Default)]
struct NetworkTime {
    /// The number of ranks that the lane puts to.
    targets: u64,
    /// The number of blocks that the lane puts.
    blocks: u64,
    /// The number of chunks that the lane puts.
    puts: u64,
    /// The time that the puts and their flags occupy the lane.
    work: u64,
    /// The time until all chunks have been put and received.
    time: u64,
    /// The number of nodes to which, and from which, bytes move at the same time.
    senders: u64,
    /// The time until the first chunk has been put.
    first: u64,
    /// The time until a signal is visible in another node.
    hop: u64,
}

impl NetworkTime {
    /// Builds the cost model of lane 1, for a rank on a node with `node_ranks` ranks.
    fn new(request: &CostRequest<'_>, link: &EffectiveLink, node_ranks: u64) -> Self {
        let sums = request.sums;
        let others = sums.nodes - 1;
        if others == 0 {
            return Self::default();
        }

        let chunks = request.chunks();
        let block = sums.block_bytes_max;
        let ring = request.algorithm == Algorithm::HierarchicalRing;
        // In a ring, a rank of a small node forwards everything that enters at it.
        let entering = sums.entering(node_ranks);
        let blocks = if ring { entering } else { others };
        let puts = blocks.saturating_mul(chunks);

        // In a ring a put has a wait before it and two signals behind it, otherwise one signal.
        let flags_per_put = if ring { 3 } else { 1 };
        let flags = request.flags(link, 1).saturating_mul(puts).saturating_mul(flags_per_put);
        // In a ring, all blocks except the own one came from the previous node.
        let foreign = blocks - 1;
        let passed_on = match ring {
            true => link.passed_on(foreign.saturating_mul(chunks), block.saturating_mul(foreign)),
            false => 0,
        };
        let work = link
            .puts(puts, block.saturating_mul(blocks))
            .saturating_add(passed_on)
            .saturating_add(flags);

        // In a ring all bytes go to the next node. Otherwise puts to different nodes share the
        // link.
        let senders = if ring { 1 } else { link.peers_at_once(others, chunks, block) };
        let first = link.puts(senders, request.chunk_bytes().saturating_mul(senders));
        // A ring waits at every hop but the first, unless it puts other chunks in the meantime.
        let bubble = if ring {
            let others_chunks = first.saturating_mul(chunks * entering.div_ceil(others) - 1);
            link.hop.saturating_sub(others_chunks).saturating_mul(others - 1)
        } else {
            0
        };
        let received = link.receives(block.saturating_mul(entering));
        let time = work.saturating_add(bubble).max(received);

        Self {
            targets: if ring { 1 } else { others },
            blocks,
            puts,
            work,
            time,
            senders,
            first,
            hop: link.hop,
        }
    }
}

/// Returns how long lane 0 takes to distribute one chunk from another node to `mates` ranks.
fn spread_cell(request: &CostRequest<'_>, local: &EffectiveLink, mates: u64) -> u64 {
    if mates == 0 {
        return 0;
    }

    let bytes = request.chunk_bytes().saturating_mul(mates);
    // While the rank distributes a chunk, it receives as much from the ranks of its node.
    let puts = local.puts(mates, bytes).max(local.receives(bytes));
    puts.saturating_add(request.flags(local, mates)).saturating_add(request.flags(local, 1))
}

fn spread_cells(cell: u64, cells: u64) -> u64 {
    cell.saturating_mul(cells)
}

/// Returns how long lane 0 takes to distribute the rank's own block to `mates` ranks.
fn spread_own(
    request: &CostRequest<'_>,
    local: &EffectiveLink,
    mates: u64,
    chunks: u64,
    block: u64,
) -> u64 {
    let puts = mates.saturating_mul(chunks);
    local.puts(puts, block.saturating_mul(mates)).saturating_add(request.flags(local, puts))
}
