//! Implements the algorithms direct and pull, in which every rank exchanges data with every peer.
//!
//! *Direct.* Every rank puts its blocks to every peer, in one lane, or in two if a network reaches other nodes. A
//! peer's `ready` says that its output may be overwritten. With two outputs in turn, the arrivals of the last start
//! say so too, if every rank gets data from every other one; otherwise a peer's `free` in the last start does. There is no barrier at the end: a put reads only the rank's own input,
//! and the end of the lane gives that back. Peers are served in shifted order, so that no two ranks put to the same
//! peer first.
//!
//! With batched flags a lane consists of a few groups: all `ready` signals and waits, all puts, all `arrived`
//! signals and waits. The self copy is next to the puts, so that it divides no group.
//!
//! *Pull.* Every rank gets the blocks of every peer, in the same lanes. A peer's `ready` says that its input may be
//! read. No other rank writes the output, so two outputs in turn save nothing, and `ready` stays. A rank knows that it
//! has everything when its lanes end. Other ranks read its input until each of them has signalled `taken`, so the
//! lanes end with waits for that.

use peerlane_hal::Rank;

use super::estimate::{CostRequest, EffectiveLink, PathEstimate, Term, Traffic};
use super::steps::{
    PeerLane, arrived, cells, contributed, peer_lanes, put, ready, reduce, self_copy, signal, wait,
    writable,
};
use super::{PlanRequest, Schedule, Shape, schedule};
use crate::collective::Collective;
use crate::plan::{Algorithm, Cell, Flag, FlagOrder, Lane, LaneId, Source, Step, Tier};
use crate::units::{bytes, rate};

pub(super) const DIRECT: Schedule = Schedule {
    algorithm: Algorithm::Direct,
    suits: |_| true,
    lanes: direct_lanes,
    redundant: |_| None,
    forwards: |_| false,
    gets: false,
    needs_measurements: |_, _| false,
    lane_count,
    estimate,
    traffic: direct_traffic,
};

pub(super) const PULL: Schedule = Schedule {
    algorithm: Algorithm::Pull,
    suits: |collective| !collective.is_reduction(),
    lanes: pull_lanes,
    redundant: |_| None,
    forwards: |_| false,
    gets: true,
    // At any rates, many processors copy faster than that of the root alone.
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
    let (home, others) = lanes.split_first().expect("lane 0 exists");
    let home = reducing_lane(request, home, others);
    let network = others.iter().map(|peers| reducing_lane(request, peers, &[]));
    [home].into_iter().chain(network).collect()
}

/// Contributions go to the rank that adds them, and the result to the ranks that need it.
///
/// Lane 0 adds, also what arrives over `others`, and signals these lanes when the result is complete.
fn reducing_lane(request: &PlanRequest<'_>, peers: &PeerLane, others: &[PeerLane]) -> Lane {
    let &PlanRequest { rank, shape: Shape { collective, chunks, flags, .. }, .. } = request;
    let &PeerLane { lane, tier, ref served, ref serving } = peers;
    let needs_result = |&peer: &Rank| collective.requires(rank, peer);
    let own: Vec<Cell> = cells(rank, chunks).collect();
    let (group_peers, group_cells) = match flags {
        FlagOrder::Prompt => (1, 1),
        FlagOrder::Batched => (served.len().max(1), own.len()),
    };
    let mut steps = Vec::new();
    let reduces = collective.reduces(rank);
    if reduces && let Some(flag) = writable(request, rank, lane) {
        steps.extend(served.iter().map(|&peer| signal(peer, flag)));
    }
    let adders: Vec<Rank> =
        served.iter().copied().filter(|&peer| collective.reduces(peer)).collect();
    for peers in adders.chunks(group_peers) {
        steps.extend(peers.iter().filter_map(|&peer| writable(request, peer, lane)).map(wait));
        steps.extend(copies(flags, peers, &own, Source::Input, contributed));
    }
    let targets: Vec<Rank> = served.iter().copied().filter(needs_result).collect();
    for group in own.chunks(group_cells).filter(|_| reduces) {
        for &cell in group {
            if lane == LaneId::HOME {
                let contributors =
                    serving.iter().chain(others.iter().flat_map(|lane| &lane.serving));
                let given = contributors.map(|&block| Cell { block, ..cell });
                steps.extend(given.map(|cell| wait(contributed(cell))));
                steps.extend(reduce(request, cell));
                let waiting = others.iter().filter(|lane| lane.served.iter().any(needs_result));
                steps.extend(waiting.map(|other| signal(rank, arrived(cell, other.lane))));
            } else if !targets.is_empty() {
                steps.push(wait(arrived(cell, lane)));
            }
        }
        steps.extend(copies(flags, &targets, group, Source::Output, |cell| arrived(cell, lane)));
    }
    for &peer in serving.iter().filter(|&&peer| collective.requires(peer, rank)) {
        steps.extend(cells(peer, chunks).map(|cell| wait(arrived(cell, lane))));
    }
    Lane { tier, steps }
}

/// Returns the puts of cells to peers, each with its flag behind it, or the flags behind all puts.
fn copies(
    flags: FlagOrder,
    peers: &[Rank],
    cells: &[Cell],
    from: Source,
    flag: impl Fn(Cell) -> Flag,
) -> Vec<Step> {
    let pairs = || peers.iter().flat_map(|&peer| cells.iter().map(move |&cell| (peer, cell)));
    let puts = pairs().map(|(peer, cell)| put(peer, cell, from));
    let signals = pairs().map(|(peer, cell)| signal(peer, flag(cell)));
    match flags {
        FlagOrder::Prompt => puts.zip(signals).flat_map(|(put, flag)| [put, flag]).collect(),
        FlagOrder::Batched => puts.chain(signals).collect(),
    }
}

fn direct_lane(request: &PlanRequest<'_>, peers: &PeerLane) -> Lane {
    let &PlanRequest { rank, shape, .. } = request;
    let &PeerLane { lane, tier, ref served, ref serving } = peers;
    let writable = |from| writable(request, from, lane);
    let collective = shape.collective;
    let targets: Vec<Rank> =
        served.iter().copied().filter(|&peer| collective.requires(rank, peer)).collect();
    let sources = |peers: &[Rank]| {
        peers.iter().copied().filter(|&peer| collective.requires(peer, rank)).collect::<Vec<_>>()
    };
    let own: Vec<Cell> = cells(rank, shape.chunks).collect();
    let copies = |peers: &[Rank]| {
        copies(shape.flags, peers, &own, Source::Input, |cell| arrived(cell, lane))
    };
    let self_copy = self_copy(request).filter(|_| lane == LaneId::HOME);
    let mut steps = Vec::new();
    if let Some(flag) = writable(rank) {
        steps.extend(sources(served).into_iter().map(|peer| signal(peer, flag)));
    }
    match shape.flags {
        FlagOrder::Prompt => {
            steps.extend(self_copy);
            for peer in targets {
                steps.extend(writable(peer).map(wait));
                steps.extend(copies(&[peer]));
            }
        }
        FlagOrder::Batched => {
            steps.extend(targets.iter().copied().filter_map(writable).map(wait));
            steps.extend(self_copy);
            steps.extend(copies(&targets));
        }
    }
    for peer in sources(serving) {
        steps.extend(cells(peer, shape.chunks).map(|cell| wait(arrived(cell, lane))));
    }
    Lane { tier, steps }
}

fn pull_lanes(request: &PlanRequest<'_>) -> Vec<Lane> {
    peer_lanes(request).iter().map(|peers| pull_lane(request, peers)).collect()
}

fn pull_lane(request: &PlanRequest<'_>, peers: &PeerLane) -> Lane {
    let &PlanRequest { rank, shape, .. } = request;
    let PeerLane { lane, tier, served, serving } = peers;
    let (lane, tier) = (*lane, *tier);
    let self_copy = self_copy(request).filter(|_| lane == LaneId::HOME);
    let taken = |by: Rank| Flag::Taken { by, lane };
    let gets = |peer: Rank| {
        cells(peer, shape.chunks).map(move |cell| Step::Get { peer, cell, from: Source::Input })
    };
    let requires = |provider, receiver| shape.collective.requires(provider, receiver);
    let served: Vec<Rank> = served.iter().copied().filter(|&peer| requires(peer, rank)).collect();
    let serving: Vec<Rank> = serving.iter().copied().filter(|&peer| requires(rank, peer)).collect();
    let mut steps: Vec<Step> =
        serving.iter().map(|&peer| signal(peer, ready(rank, lane))).collect();
    match shape.flags {
        FlagOrder::Prompt => {
            steps.extend(self_copy);
            for &peer in &served {
                steps.push(wait(ready(peer, lane)));
                steps.extend(gets(peer));
                steps.push(signal(peer, taken(rank)));
            }
        }
        FlagOrder::Batched => {
            steps.extend(served.iter().map(|&peer| wait(ready(peer, lane))));
            steps.extend(self_copy);
            steps.extend(served.iter().flat_map(|&peer| gets(peer)));
            steps.extend(served.iter().map(|&peer| signal(peer, taken(rank))));
        }
    }
    steps.extend(serving.iter().map(|&peer| wait(taken(peer))));
    Lane { tier, steps }
}

fn lane_count(nodes: usize, tiers: bool) -> usize {
    if tiers && nodes > 1 { 2 } else { 1 }
}

fn direct_traffic(request: &CostRequest<'_>) -> [Traffic; 2] {
    let sent = traffic(request, |peers, among| request.sent(peers, among).1);
    match request.shape.collective {
        // Contributions, and as many bytes of results.
        Collective::AllReduce => sent.map(|one| Traffic {
            rank_bytes_max: one.rank_bytes_max.saturating_mul(2),
            total_bytes: one.total_bytes.saturating_mul(2),
        }),
        _ => sent,
    }
}

fn pull_traffic(request: &CostRequest<'_>) -> [Traffic; 2] {
    traffic(request, |peers, among| request.received(peers, among).1)
}

fn traffic(request: &CostRequest<'_>, copied: impl Fn(u64, u64) -> u64) -> [Traffic; 2] {
    let sums = request.sums;
    let (all, moved) = (sums.total_bytes, sums.moved_bytes);
    if !request.has_network() {
        return [Traffic::new(copied(sums.ranks - 1, all), moved), Traffic::default()];
    }
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

/// A rank that adds receives as much as in an all-to-all. The results of an all-reduce move as in an all-gather. An addition takes
/// as long as a copy of the contribution inside the rank.
fn reduction_estimate(request: &CostRequest<'_>, node_ranks: u64) -> PathEstimate {
    let CostRequest { shape, sums, links, .. } = *request;
    let copies = |collective| {
        let shape = Shape { collective, in_place: true, ..shape };
        copy_estimate(&CostRequest { shape, ..*request }, node_ranks)
    };
    let PathEstimate { mut terms, mut host } = copies(Collective::AllToAll);
    let own = EffectiveLink::new(links, None, node_ranks, node_ranks);
    let bytes_added = sums.block_bytes_max.saturating_mul(sums.ranks);
    let added = own.puts(request.chunks(), bytes_added);
    terms.push(Term::new("additions", added, format!("of {} contributions", sums.ranks)));
    if shape.collective == Collective::AllReduce {
        let results = copies(Collective::AllGather);
        terms.extend(results.terms.into_iter().filter(|term| term.name != "ready"));
        host = host.saturating_add(results.host);
    }
    PathEstimate { terms, host }
}

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
    let of_tier = |tier| EffectiveLink::new(links, Some(tier), copying, copying);
    let (local, network) = (of_tier(Tier::Local), of_tier(Tier::Network));
    let mates = if request.has_network() { node_ranks - 1 } else { sums.ranks - 1 };
    let others = sums.ranks - 1 - mates;
    let among = if others == 0 { sums.total_bytes } else { sums.node_bytes(node_ranks) };
    let near = LaneTime::new(request, &local, mates, among, Some(&own));
    let mut far = LaneTime::new(request, &network, others, sums.total_bytes, None);
    if others > 0 {
        // The lane starts on a flag from lane 0, and ends with one to it.
        far.ready = far.ready.saturating_add(own.hop);
        far.hop = far.hop.saturating_add(own.hop);
    }
    // Two lanes of one thread take turns.
    let one_thread = others > 0 && local.by_processor && network.by_processor;
    let (mut ready, mut puts, mut flags, mut hop) = near.terms();
    // Where only the root has a self copy and the other ranks make the other copies, both happen at the same time.
    let is_apart = collective.root().is_some() && only.is_none();
    let copy = if own.by_processor && !is_apart { request.self_copy(&own) } else { 0 };
    let mut copied = match is_apart {
        true => request.rest_of_self_copy(&own, puts.max(far.puts)),
        false => request.self_copy_term(&own, puts.max(far.puts)),
    };
    if one_thread {
        puts = puts.saturating_add(far.puts);
        flags = flags.saturating_add(far.flags);
        hop = hop.max(far.hop);
    } else if far.end() > near.end().saturating_add(copy) {
        (ready, puts, flags, hop) = far.terms();
        if own.by_processor && !is_apart {
            copied = Term::new(copied.name, 0, "");
        }
    }
    let (verb, last) = if pull { ("gets", "last taken") } else { ("puts", "last arrival") };
    let inside = note(request, &local, near.count);
    let note = match (mates, others) {
        (_, 0) => inside,
        (0, _) => format!("{} between nodes", note(request, &network, far.count)),
        _ => format!("{} between nodes, {inside} inside", note(request, &network, far.count)),
    };
    let terms = vec![
        Term::new("ready", ready, format!("of {} peers", mates + others)),
        copied,
        Term::new(verb, puts, note),
        Term::new("flags", flags, "signals and waits"),
        Term::new(last, hop, ""),
    ];
    let copies = request.self_puts().saturating_mul(own.submit);
    let host = copies
        .saturating_add(near.count.saturating_mul(local.submit))
        .saturating_add(far.count.saturating_mul(network.submit));
    PathEstimate { terms, host }
}

#[derive(Default)]
struct LaneTime {
    count: u64,
    ready: u64,
    puts: u64,
    flags: u64,
    hop: u64,
}

impl LaneTime {
    fn new(
        request: &CostRequest<'_>,
        link: &EffectiveLink,
        peers: u64,
        among: u64,
        own: Option<&EffectiveLink>,
    ) -> Self {
        if peers == 0 {
            return Self::default();
        }
        let pull = schedule(request.algorithm).gets;
        let chunks = request.chunks();
        let (sent, received) = (request.sent(peers, among), request.received(peers, among));
        let (copied, other) = if pull { (received, sent) } else { (sent, received) };
        let count = copied.0.saturating_mul(chunks);
        // `arrived` or `taken` signals, and the waits for those of others.
        let flags = |blocks: u64| if pull { blocks } else { blocks.saturating_mul(chunks) };
        Self {
            count,
            ready: request.ready(link, peers, own),
            puts: if pull { link.gets(count, copied.1) } else { link.puts(count, copied.1) }
                .max(link.receives(other.1)),
            flags: request
                .flags(link, flags(copied.0))
                .saturating_add(request.flags(link, flags(other.0))),
            hop: link.hop,
        }
    }

    fn terms(&self) -> (u64, u64, u64, u64) {
        (self.ready, self.puts, self.flags, self.hop)
    }

    fn end(&self) -> u64 {
        self.ready.saturating_add(self.puts).saturating_add(self.flags).saturating_add(self.hop)
    }
}

fn note(request: &CostRequest<'_>, link: &EffectiveLink, count: u64) -> String {
    let pull = schedule(request.algorithm).gets;
    let at = if pull { link.rate_of_gets(count) } else { link.rate(count) };
    format!("{count} × {} at {}", bytes(request.chunk_bytes()), rate(at))
}
