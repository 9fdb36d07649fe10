//! Implements the algorithms direct and pull, in which every rank exchanges data with every peer.
//!
//! *Direct.* Every rank puts its blocks to every peer, in one lane, or in two if a network reaches
//! other nodes. A peer's `ready` says that its output may be overwritten. With two outputs in turn,
//! the arrivals of the last start say so too, if every rank gets data from every other one;
//! otherwise a peer's `free` in the last start does. There is no barrier at the end: a put reads
//! only the rank's own input, and after the end of the lane the input may be reused. Peers are
//! served in shifted order, so that no two ranks put to the same peer first.
//!
//! In a reduction, peers write contributions to an inbox. With two inboxes in turn, the results of
//! the last start say that the other inbox has been read, if every rank gets data from every other
//! one; otherwise `free` does. A result needs no more: it depends on a contribution of the rank
//! that it goes to, which has therefore entered the start.
//!
//! With batched flags a lane consists of a few groups: all `ready` signals and waits, all puts, all
//! `arrived` signals and waits. The self copy is next to the puts, so that it divides no group.
//! Interleaved flags are for callers that use each block when it arrives: a lane waits for a block
//! after the put of the same turn.
//!
//! *Pull.* Every rank gets the blocks of every peer, in the same lanes. A peer's `ready` says that
//! its input may be read. No other rank writes the output, so two outputs in turn save nothing, and
//! `ready` stays. A rank knows that it has everything when its lanes end. Other ranks read its
//! input until each of them has signalled `taken`, so the lanes end with waits for that.

use peerlane_hal::Rank;

use super::estimate::{CostRequest, EffectiveLink, PathEstimate, Term, Traffic, sum};
use super::steps::{
    PeerLane, announced_puts, arrived, cells, contributed, inbox_writable, peer_lanes, put, ready,
    reduce, self_copy, signal, wait, writable,
};
use super::{PlanRequest, Schedule, Shape, schedule};
use crate::collective::Collective;
use crate::plan::{Algorithm, Cell, Flag, FlagOrder, Lane, LaneId, Source, Step, Tier};
use crate::units::{bytes, rate};

pub(super) const DIRECT: Schedule = Schedule {
    algorithm: Algorithm::Direct,
    suits: |_| true,
    fits: |_, _| Ok(()),
    lanes: direct_lanes,
    redundant: |_| None,
    forwards: |_| false,
    chunks_in_round: |_| 1,
    gets: false,
    joins_blocks: false,
    needs_measurements: |_, _| false,
    lane_count,
    estimate,
    traffic: direct_traffic,
};

pub(super) const PULL: Schedule = Schedule {
    algorithm: Algorithm::Pull,
    suits: |collective| !collective.is_reduction(),
    fits: |_, _| Ok(()),
    lanes: pull_lanes,
    redundant: |_| None,
    forwards: |_| false,
    chunks_in_round: |_| 1,
    gets: true,
    joins_blocks: false,
    // At any rates, the processors of all ranks copy faster than that of the root alone.
    needs_measurements: |collective, links| {
        !links.local.by_processor || collective.only_provider().is_none()
    },
    lane_count,
    estimate,
    traffic: pull_traffic,
};

fn direct_lanes(request: &PlanRequest<'_>) -> Vec<Lane> {
    let lanes = peer_lanes(request);
    if !request.shape.collective.is_reduction() {
        return lanes.iter().map(|peers| direct_lane(request, peers)).collect();
    }

    let (home_peers, others) = lanes.split_first().expect("lane 0 exists");
    let home = reducing_lane(request, home_peers, others);
    let network = others.iter().map(|peers| reducing_lane(request, peers, &[]));
    [home].into_iter().chain(network).collect()
}

/// Creates one lane of a rank's plan for a reduction.
///
/// Contributions go to the ranks that add them, and the results to the ranks that need them. Lane 0
/// also adds the contributions that arrive over the lanes `others`, and signals these lanes when a
/// result is complete.
fn reducing_lane(request: &PlanRequest<'_>, peers: &PeerLane, others: &[PeerLane]) -> Lane {
    let &PlanRequest { rank, shape: Shape { collective, chunks, flags, .. }, .. } = request;
    let &PeerLane { lane, tier, ref served, ref serving } = peers;
    let own: Vec<Cell> = cells(rank, chunks).collect();
    let reduces = collective.reduces(rank);
    let (group_peers, group_cells) = match flags {
        FlagOrder::Prompt | FlagOrder::Interleaved => (1, 1),
        // `slice::chunks` panics if groups have 0 elements.
        FlagOrder::Batched | FlagOrder::NetworkFirst => (served.len().max(1), own.len()),
    };

    let mut steps = Vec::new();
    if flags == FlagOrder::NetworkFirst && reduces {
        let given = contributors(request, others.iter().flat_map(|lane| &lane.serving));
        let cells = own.iter().flat_map(|&cell| given.iter().map(move |&block| (block, cell)));
        steps.extend(cells.map(|(block, cell)| wait(contributed(Cell { block, ..cell }))));
    }
    // Only ranks that contribute, or send results, write here; the latter also contribute.
    if let Some(flag) = inbox_writable(request, rank, lane) {
        let contributors = filtered(served, |peer| collective.contributes(peer, rank));
        steps.extend(contributors.into_iter().map(|peer| signal(peer, flag)));
    }

    let adders = filtered(served, |peer| collective.contributes(rank, peer));
    for group in adders.chunks(group_peers) {
        let flags_of_group = group.iter().filter_map(|&peer| inbox_writable(request, peer, lane));
        steps.extend(flags_of_group.map(wait));
        steps.extend(copies(flags, group, &own, Source::Input, contributed));
    }

    if reduces {
        let targets = filtered(served, |peer| collective.requires(rank, peer));
        for group in own.chunks(group_cells) {
            for &cell in group {
                if lane == LaneId::HOME {
                    steps.extend(addition(request, serving, others, cell));
                } else if !targets.is_empty() {
                    // Lane 0 signals that the result is complete.
                    steps.push(wait(arrived(cell, lane)));
                }
            }

            let announced = |cell| arrived(cell, lane);
            steps.extend(copies(flags, &targets, group, Source::Output, announced));
        }
    }

    for &peer in serving.iter().filter(|&&peer| collective.requires(peer, rank)) {
        steps.extend(cells(peer, chunks).map(|cell| wait(arrived(cell, lane))));
    }

    Lane { tier, steps }
}

/// Returns the steps that add the contributions to the chunk `cell`.
///
/// They first wait for each contribution, and finally signal the result to the lanes `others`.
fn addition(
    request: &PlanRequest<'_>,
    serving: &[Rank],
    others: &[PeerLane],
    cell: Cell,
) -> Vec<Step> {
    let &PlanRequest { rank, shape: Shape { collective, flags, .. }, .. } = request;
    // With the network first, the lane has waited for what comes over it.
    let waited = flags == FlagOrder::NetworkFirst;
    let others_serving = others.iter().filter(|_| !waited).flat_map(|lane| &lane.serving);
    let given = contributors(request, serving.iter().chain(others_serving));
    let given = given.into_iter().map(|block| Cell { block, ..cell });
    let mut steps: Vec<Step> = given.map(|cell| wait(contributed(cell))).collect();

    steps.extend(reduce(request, cell));

    // A lane without peers that need the result does not wait for it.
    for other in others {
        if other.served.iter().any(|&peer| collective.requires(rank, peer)) {
            steps.push(signal(rank, arrived(cell, other.lane)));
        }
    }

    steps
}

/// Returns the peers whose contributions this rank adds.
fn contributors<'p>(request: &PlanRequest<'_>, peers: impl Iterator<Item = &'p Rank>) -> Vec<Rank> {
    let collective = request.shape.collective;
    peers.copied().filter(|&peer| collective.contributes(peer, request.rank)).collect()
}

fn filtered(peers: &[Rank], is_kept: impl Fn(Rank) -> bool) -> Vec<Rank> {
    peers.iter().copied().filter(|&peer| is_kept(peer)).collect()
}

/// Returns steps that put each of `cells` to each of `peers`, and signal its arrival.
///
/// Depending on `flags`, each put is followed by its signal, or all puts come before all signals.
fn copies(
    flags: FlagOrder,
    peers: &[Rank],
    cells: &[Cell],
    from: Source,
    flag: impl Fn(Cell) -> Flag,
) -> Vec<Step> {
    let pairs = peers.iter().flat_map(|&peer| cells.iter().map(move |&cell| (peer, cell)));
    announced_puts(flags, pairs, from, flag)
}

/// Creates one lane of the algorithm direct, which puts the rank's blocks to the peers of the lane.
fn direct_lane(request: &PlanRequest<'_>, peers: &PeerLane) -> Lane {
    let &PlanRequest { rank, shape, .. } = request;
    let &PeerLane { lane, tier, ref served, ref serving } = peers;
    let collective = shape.collective;
    let writable = |from| writable(request, from, lane);

    let mut steps = Vec::new();
    if let Some(flag) = writable(rank) {
        let providers = filtered(served, |peer| collective.requires(peer, rank));
        steps.extend(providers.into_iter().map(|peer| signal(peer, flag)));
    }

    let receivers = filtered(served, |peer| collective.requires(rank, peer));
    let own: Vec<Cell> = cells(rank, shape.chunks).collect();
    let self_copy = self_copy(request).filter(|_| lane == LaneId::HOME);
    let announced = |cell| arrived(cell, lane);
    let copies = |peers: &[Rank]| copies(shape.flags, peers, &own, Source::Input, announced);
    match shape.flags {
        // The self copy comes first, as it can run until the first peer is ready.
        FlagOrder::Interleaved if tier == Tier::Local => {
            steps.extend(interleaved(request, peers, &receivers, self_copy.collect()));
            return Lane { tier, steps };
        }
        // Nodes may have different numbers of ranks, whose turns would wait for each other.
        FlagOrder::Prompt | FlagOrder::Interleaved => {
            steps.extend(self_copy);
            for peer in receivers {
                steps.extend(writable(peer).map(wait));
                steps.extend(copies(&[peer]));
            }
        }
        FlagOrder::Batched | FlagOrder::NetworkFirst => {
            steps.extend(receivers.iter().copied().filter_map(writable).map(wait));
            steps.extend(self_copy);
            steps.extend(copies(&receivers));
        }
    }

    for peer in filtered(serving, |peer| collective.requires(peer, rank)) {
        steps.extend(cells(peer, shape.chunks).map(|cell| wait(arrived(cell, lane))));
    }

    Lane { tier, steps }
}

/// Returns the puts of a lane, each followed by the wait for the chunk that arrives in the same
/// turn.
///
/// In turn i, a rank puts to the peer i places after it, and the peer i places before it puts here.
/// The self copy is in the last turn: its caller has these bytes in the input, and before another
/// turn it would delay what peers wait for.
fn interleaved(
    request: &PlanRequest<'_>,
    peers: &PeerLane,
    receivers: &[Rank],
    self_copy: Vec<Step>,
) -> Vec<Step> {
    let &PlanRequest { rank, shape, .. } = request;
    let &PeerLane { lane, ref serving, .. } = peers;
    let providers = filtered(serving, |peer| shape.collective.requires(peer, rank));
    let turns = receivers.len().max(providers.len());

    let mut steps = Vec::new();
    if turns == 0 {
        steps.extend(self_copy.iter().copied());
    }
    for turn in 0..turns {
        let receiver = receivers.get(turn).copied();
        steps.extend(receiver.and_then(|peer| writable(request, peer, lane)).map(wait));
        if turn + 1 == turns {
            steps.extend(self_copy.iter().copied());
        }

        for chunk in 0..shape.chunks {
            if let Some(peer) = receiver {
                let cell = Cell { block: rank, chunk };
                steps.extend([put(peer, cell, Source::Input), signal(peer, arrived(cell, lane))]);
            }
            if let Some(&block) = providers.get(turn) {
                steps.push(wait(arrived(Cell { block, chunk }, lane)));
            }
        }
    }
    steps
}

fn pull_lanes(request: &PlanRequest<'_>) -> Vec<Lane> {
    peer_lanes(request).iter().map(|peers| pull_lane(request, peers)).collect()
}

/// Creates one lane of the algorithm pull, which gets the blocks of the lane's peers.
fn pull_lane(request: &PlanRequest<'_>, peers: &PeerLane) -> Lane {
    let &PlanRequest { rank, shape, .. } = request;
    let &PeerLane { lane, tier, ref served, ref serving } = peers;
    let collective = shape.collective;

    // Even with two outputs in turn, `ready` is needed: it says that the input may be read.
    let receivers = filtered(serving, |peer| collective.requires(rank, peer));
    let mut steps = Vec::new();
    steps.extend(receivers.iter().map(|&peer| signal(peer, ready(rank, lane))));

    let providers = filtered(served, |peer| collective.requires(peer, rank));
    let self_copy = self_copy(request).filter(|_| lane == LaneId::HOME);
    let taken = |by: Rank| Flag::Taken { by, lane };
    let gets = |peer: Rank| {
        cells(peer, shape.chunks).map(move |cell| Step::Get { peer, cell, from: Source::Input })
    };
    match shape.flags {
        FlagOrder::Prompt | FlagOrder::Interleaved => {
            steps.extend(self_copy);
            for &peer in &providers {
                steps.push(wait(ready(peer, lane)));
                steps.extend(gets(peer));
                steps.push(signal(peer, taken(rank)));
            }
        }
        FlagOrder::Batched | FlagOrder::NetworkFirst => {
            steps.extend(providers.iter().map(|&peer| wait(ready(peer, lane))));
            steps.extend(self_copy);
            steps.extend(providers.iter().flat_map(|&peer| gets(peer)));
            steps.extend(providers.iter().map(|&peer| signal(peer, taken(rank))));
        }
    }

    steps.extend(receivers.iter().map(|&peer| wait(taken(peer))));
    Lane { tier, steps }
}

fn lane_count(nodes: usize, tiers: bool) -> usize {
    if tiers && nodes > 1 { 2 } else { 1 }
}

fn direct_traffic(request: &CostRequest<'_>) -> [Traffic; 2] {
    let sent = traffic(request, |peers, among| request.sent(peers, among).1);
    if !returns_results(request.shape.collective) {
        return sent;
    }

    // The results have as many bytes as the contributions.
    sent.map(|one| Traffic {
        rank_bytes_max: one.rank_bytes_max.saturating_mul(2),
        total_bytes: one.total_bytes.saturating_mul(2),
    })
}

/// Returns whether ranks send the blocks that they have added to all others.
fn returns_results(collective: Collective) -> bool {
    collective.is_reduction() && collective.all_ranks_get_the_same()
}

fn pull_traffic(request: &CostRequest<'_>) -> [Traffic; 2] {
    traffic(request, |peers, among| request.received(peers, among).1)
}

/// Returns how many bytes the operation moves inside nodes, and how many over the network, in this
/// order.
///
/// `copied` takes the number of peers of a rank and the total bytes of the blocks that can move,
/// and returns the bytes that the rank copies.
fn traffic(request: &CostRequest<'_>, copied: impl Fn(u64, u64) -> u64) -> [Traffic; 2] {
    let sums = request.sums;
    let all = sums.total_bytes;
    let moved = sums.moved_bytes;
    if !request.has_network() {
        return [Traffic::new(copied(sums.ranks - 1, all), moved), Traffic::default()];
    }

    // A rank of the largest node has the most peers inside, one of the smallest the most outside.
    let (least, most) = sums.node_ranks_min_max();
    let of_node = sums.node_ranks().map(|ranks| sums.node_bytes(ranks)).max().unwrap_or(0);
    [
        Traffic::new(copied(most - 1, of_node), sums.inside_bytes),
        Traffic::new(copied(sums.ranks - least, all), moved.saturating_sub(sums.inside_bytes)),
    ]
}

fn estimate(request: &CostRequest<'_>, node_ranks: u64) -> PathEstimate {
    match request.shape.collective.is_reduction() {
        true => reduction_estimate(request, node_ranks),
        false => copy_estimate(request, node_ranks),
    }
}

/// Estimates the time of a reduction as that of its copies and its additions.
///
/// A rank that adds the contributions of all ranks receives as much as in an all-to-all. The
/// results of an all-reduce move as in an all-gather. An addition takes as long as a copy of the
/// contribution inside the rank.
fn reduction_estimate(request: &CostRequest<'_>, node_ranks: u64) -> PathEstimate {
    let CostRequest { shape, sums, links, .. } = *request;
    let copies = |collective| {
        // In place, because the additions take the place of the self copy.
        let shape = Shape { collective, in_place: true, ..shape };
        copy_estimate(&CostRequest { shape, ..*request }, node_ranks)
    };
    let PathEstimate { mut terms, mut host } = copies(Collective::AllToAll);

    let own = EffectiveLink::new(links, None, node_ranks, node_ranks);
    // The last rank adds the most contributions, where ranks differ.
    let ranks = u32::try_from(sums.ranks).unwrap_or(u32::MAX);
    let adder = shape.collective.only_receiver().unwrap_or(Rank(ranks - 1));
    let contributions = u64::from(shape.collective.contributors(adder, ranks).end);
    let bytes_added = sums.block_bytes_max.saturating_mul(contributions);
    let added = if contributions > 0 { own.puts(request.chunks(), bytes_added) } else { 0 };
    terms.push(Term::new("additions", added, format!("of {contributions} contributions")));

    if returns_results(shape.collective) {
        let results = copies(Collective::AllGather);
        // The rank has waited for the same peers before it sent its contributions.
        terms.extend(results.terms.into_iter().filter(|term| term.name != "ready"));
        host = host.saturating_add(results.host);
    }

    PathEstimate { terms, host }
}

/// Estimates the time of the longest path through a rank that puts to, or gets from, every peer.
fn copy_estimate(request: &CostRequest<'_>, node_ranks: u64) -> PathEstimate {
    let CostRequest { algorithm, sums, links, .. } = *request;
    if sums.root_node_ranks.is_some_and(|ranks| ranks != node_ranks) {
        // The longest path goes through the root.
        return PathEstimate { terms: Vec::new(), host: 0 };
    }

    let collective = request.shape.collective;
    let pull = schedule(algorithm).gets;
    // The only rank that makes copies, if there is one.
    let only = if pull { collective.only_receiver() } else { collective.only_provider() };
    let copying = if only.is_some() { 1 } else { node_ranks };
    let own = EffectiveLink::new(links, None, copying, copying);
    let local = EffectiveLink::new(links, Some(Tier::Local), copying, copying);
    let network = EffectiveLink::new(links, Some(Tier::Network), copying, copying);

    let mates = if request.has_network() { node_ranks - 1 } else { sums.ranks - 1 };
    let others = sums.ranks - 1 - mates;
    let among = if others == 0 { sums.total_bytes } else { sums.node_bytes(node_ranks) };
    // Lane 0 makes the self copy, which can hide a part of its wait for `ready`.
    let ready_near = request.ready(&local, mates, Some(&own));
    let ready_far = request.ready(&network, others, None);
    let near = LaneTime::new(request, [&local, &own], ready_near, mates, among);
    let mut far = LaneTime::new(request, [&network, &own], ready_far, others, sums.total_bytes);
    if others > 0 {
        // The lane starts on a flag from lane 0, and ends with one to it.
        far.ready = far.ready.saturating_add(own.hop);
        far.hop = far.hop.saturating_add(own.hop);
    }

    // Where only the root has a self copy and the other ranks make the other copies, both happen at
    // the same time.
    let is_apart = collective.root().is_some() && only.is_none();

    // A processor makes the self copy in lane 0, before the other copies of that lane.
    let delays_lane = own.by_processor && !is_apart;
    let copy = if delays_lane { request.self_copy(&own) } else { 0 };
    let one_thread = others > 0 && local.by_processor && network.by_processor;
    let is_far = !one_thread && far.end() > near.end().saturating_add(copy);
    let mut path = if is_far { far } else { near };
    if one_thread {
        // Two lanes of one thread take turns.
        path.ready = path.ready.max(far.ready);
        path.puts = path.puts.saturating_add(far.puts);
        path.flags = path.flags.saturating_add(far.flags);
        path.hop = path.hop.max(far.hop);
    }

    let busy = |lane: &LaneTime| lane.puts.saturating_add(lane.flags);
    let puts = busy(&near).max(busy(&far));
    let copied = if is_apart {
        request.rest_of_self_copy(&own, puts)
    } else if is_far && delays_lane {
        // Lane 0 is not on this path.
        Term::new("self copy", 0, "")
    } else {
        request.self_copy_term(&own, puts)
    };

    let inside = copies_note(request, &local, near.count);
    let outside = copies_note(request, &network, far.count);
    let note = match (mates, others) {
        (_, 0) => inside,
        (0, _) => format!("{outside} between nodes"),
        _ => format!("{outside} between nodes, {inside} inside"),
    };

    let (verb, last) = if pull { ("gets", "last taken") } else { ("puts", "last arrival") };
    let terms = vec![
        Term::new("ready", path.ready, format!("of {} peers", mates + others)),
        copied,
        Term::new(verb, path.puts, note),
        Term::new("flags", path.flags, "signals and waits"),
        Term::new(last, path.hop, ""),
    ];

    let host = request
        .self_puts()
        .saturating_mul(own.submit)
        .saturating_add(near.count.saturating_mul(local.submit))
        .saturating_add(far.count.saturating_mul(network.submit));
    PathEstimate { terms, host }
}

/// The predicted times of one lane in picoseconds, without the self copy.
#[derive(Clone, Copy, Default)]
struct LaneTime {
    /// The number of puts or gets.
    count: u64,
    /// The time until the `ready` signals of the peers have been waited for.
    ready: u64,
    /// The time of all puts or gets, or of the transfers by the peers if these take longer.
    puts: u64,
    /// The time of the waits for `ready`, and of the signals and waits that announce copies, as far
    /// as it is not hidden behind copies in flight.
    flags: u64,
    /// The time until the last flag of a peer is visible.
    hop: u64,
}

impl LaneTime {
    /// Predicts the times of a lane with `peers` peers.
    ///
    /// `among` is the total bytes of the blocks that can move in the lane, and `own` is the link of
    /// a rank to itself, which has the time of its waits. `ready` is the time until the first peer
    /// is ready.
    fn new(
        request: &CostRequest<'_>,
        [link, own]: [&EffectiveLink; 2],
        ready: u64,
        peers: u64,
        among: u64,
    ) -> Self {
        if peers == 0 {
            return Self::default();
        }

        let pull = schedule(request.algorithm).gets;
        let sent = request.sent(peers, among);
        let received = request.received(peers, among);
        let (copied, other) = if pull { (received, sent) } else { (sent, received) };
        let (copied_blocks, copied_bytes) = copied;
        let (other_blocks, other_bytes) = other;

        let chunks = request.chunks();
        let count = copied_blocks.saturating_mul(chunks);
        let copies =
            if pull { link.gets(count, copied_bytes) } else { link.puts(count, copied_bytes) };

        // Ranks signal `arrived` for each chunk, but `taken` only once, after all gets from a peer.
        let flags = |blocks: u64| if pull { blocks } else { blocks.saturating_mul(chunks) };
        let signals = request.flags(link, flags(copied_blocks));
        let waits = request.flags(own, flags(other_blocks));
        // `ready` counts only the first of the waits for that flag.
        let ready_waits = if ready > 0 { request.flags(own, copied_blocks) } else { 0 };
        let all_flags = sum([ready_waits, signals, waits]);

        let puts = copies.max(link.receives(other_bytes));
        let copied = (count, copied_bytes);
        Self {
            count,
            ready,
            puts,
            flags: link.unhidden_flags(pull, copied, puts, all_flags),
            hop: link.hop,
        }
    }

    fn end(&self) -> u64 {
        self.ready.saturating_add(self.puts).saturating_add(self.flags).saturating_add(self.hop)
    }
}

fn copies_note(request: &CostRequest<'_>, link: &EffectiveLink, count: u64) -> String {
    let pull = schedule(request.algorithm).gets;
    let at = if pull { link.rate_of_gets(count) } else { link.rate(count) };

    format!("{count} × {} at {}", bytes(request.chunk_bytes()), rate(at))
}
