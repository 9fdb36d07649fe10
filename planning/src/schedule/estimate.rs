//! Predicts the time of each collective algorithm with a closed formula, without simulation.
//!
//! A schedule estimates the longest path through the plans of all ranks, term by term, under full
//! load: every rank of a node uses its links alike, shared engines, NICs, processors and memory are
//! divided evenly, and the largest block represents all blocks. What two lanes do at the same time
//! counts once, as the longer of both. A simulation goes through every step instead; an estimate
//! takes as long for 4 ranks as for 16,384.

use std::collections::BTreeMap;

use peerlane_hal::Rank;

use serde::Serialize;

use super::{Shape, schedule};
use crate::collective::Collective;
use crate::links::{Link, Links, picoseconds, transfer_picoseconds};
use crate::plan::{Algorithm, FlagOrder, Tier};
use crate::topology::Topology;

/// The algorithm, sizes, options and links from which a time is predicted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CostRequest<'a> {
    pub(crate) algorithm: Algorithm,
    pub(crate) sums: &'a ClusterSums,
    pub(crate) shape: Shape,
    pub(crate) links: &'a Links,
}

/// The predicted time of the longest path through the plans, term by term.
pub(crate) struct PathEstimate {
    pub(crate) terms: Vec<Term>,
    /// The picoseconds that the host takes to submit all puts.
    pub(crate) host: u64,
}

impl CostRequest<'_> {
    /// Returns how many blocks a rank sends to `peers` peers, and their total number of bytes.
    ///
    /// `among` is the total bytes of the blocks that can be among them.
    pub(crate) fn sent(&self, peers: u64, among: u64) -> (u64, u64) {
        let collective = self.shape.collective;
        // Where one rank receives everything, the others send to no other peer.
        let blocks = if collective.only_receiver().is_some() { peers.min(1) } else { peers };

        // With equal outputs it is the rank's own block that goes to every peer.
        (blocks, self.bytes_of(blocks, among, !collective.has_equal_outputs()))
    }

    /// Returns how many blocks a rank receives from `peers` peers, and their total number of bytes.
    ///
    /// `among` is the total bytes of the blocks that can be among them.
    pub(crate) fn received(&self, peers: u64, among: u64) -> (u64, u64) {
        let collective = self.shape.collective;
        let blocks = if collective.only_provider().is_some() { peers.min(1) } else { peers };

        (blocks, self.bytes_of(blocks, among, collective.has_equal_outputs()))
    }

    /// Returns an upper bound of the total length of `blocks` blocks, in bytes.
    ///
    /// Blocks of different ranks have at most `among` bytes together, without the shortest block.
    fn bytes_of(&self, blocks: u64, among: u64, of_different_ranks: bool) -> u64 {
        let largest = self.sums.block_bytes_max.saturating_mul(blocks);
        if of_different_ranks {
            // The rank's own block is not copied, and it may be the shortest.
            return largest.min(among.saturating_sub(self.sums.block_bytes_min));
        }

        largest
    }

    pub(crate) fn chunks(&self) -> u64 {
        self.shape.chunks.into()
    }

    pub(crate) fn chunk_bytes(&self) -> u64 {
        self.sums.block_bytes_max.div_ceil(self.chunks())
    }

    pub(crate) fn has_network(&self) -> bool {
        self.shape.tiers && self.sums.nodes > 1
    }

    /// Returns the tier of the lanes that reach other nodes.
    pub(crate) fn tier_between_nodes(&self) -> Tier {
        if self.has_network() { Tier::Network } else { Tier::Local }
    }

    pub(crate) fn local_lanes(&self) -> usize {
        // With a network, every local lane has a counterpart for the other nodes.
        if self.has_network() { self.lanes() / 2 } else { self.lanes() }
    }

    pub(crate) fn lanes(&self) -> usize {
        (schedule(self.algorithm).lane_count)(self.sums.nodes as usize, self.shape.tiers)
    }

    /// Returns the time that a lane needs for `count` signals, or waits whose flags are already
    /// set.
    ///
    /// Batched flags cost as much as one of them.
    pub(crate) fn flags(&self, link: &EffectiveLink, count: u64) -> u64 {
        let batches = if self.shape.flags.is_batched() { count.min(1) } else { count };
        batches.saturating_mul(link.step)
    }

    pub(crate) fn self_copy(&self, link: &EffectiveLink) -> u64 {
        if self.shape.in_place { 0 } else { link.puts(self.chunks(), self.sums.block_bytes_max) }
    }

    pub(crate) fn self_puts(&self) -> u64 {
        if self.shape.in_place { 0 } else { self.chunks() }
    }

    /// Returns the time that the self copy adds to `puts`, the time of the other copies.
    ///
    /// It is all of its time if one thread makes both. Otherwise it is what is left after them.
    pub(crate) fn self_copy_term(&self, own: &EffectiveLink, puts: u64) -> Term {
        if !own.by_processor {
            return self.rest_of_self_copy(own, puts);
        }

        Term::new("self copy", self.self_copy(own), "")
    }

    /// Returns the rest of the self copy's time, after concurrent copies that take the time `puts`.
    pub(crate) fn rest_of_self_copy(&self, own: &EffectiveLink, puts: u64) -> Term {
        let left = self.self_copy(own).saturating_sub(puts);
        Term::new("self copy", left, "the rest after the puts")
    }

    /// Returns how long a lane takes to wait for the `ready` signals of `peers` peers.
    ///
    /// A self copy can hide a part of it. With prompt flags it runs between signal and wait in the
    /// same lane, and hides the time if the same thread makes both.
    pub(crate) fn ready(
        &self,
        link: &EffectiveLink,
        peers: u64,
        own: Option<&EffectiveLink>,
    ) -> u64 {
        // With outputs or inboxes in turn, the flag has been signalled in the last start, if there
        // is one.
        if peers == 0 || self.shape.flag_sets() > 1 && !schedule(self.algorithm).gets {
            return 0;
        }

        let between = match (self.shape.flags, own) {
            (FlagOrder::Prompt | FlagOrder::Interleaved, Some(own)) if own.by_processor => {
                self.self_copy(own)
            }
            _ => 0,
        };

        self.flags(link, peers).saturating_add(link.hop.saturating_sub(between))
    }
}

/// One part of a predicted time, such as all puts of the longest path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Term {
    /// The name of the part, such as `puts`.
    pub name: &'static str,
    /// The predicted duration in picoseconds.
    pub picoseconds: u64,
    /// The details for a report, such as counts and rates; may be empty.
    pub note: String,
}

/// The number of bytes that one operation moves inside nodes, or over the network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Traffic {
    /// An upper bound of the bytes that one rank sends or gets. It is exact if all blocks and nodes
    /// are equal.
    pub rank_bytes_max: u64,
    /// The total number of bytes that all ranks send or get.
    pub total_bytes: u64,
}

impl Traffic {
    pub(crate) fn new(rank_bytes_max: u64, total_bytes: u64) -> Self {
        Self { rank_bytes_max, total_bytes }
    }
}

impl Term {
    pub(crate) fn new(name: &'static str, picoseconds: u64, note: impl Into<String>) -> Self {
        Self { name, picoseconds, note: note.into() }
    }
}

/// Returns the total length in bytes of the input, outputs and inboxes of the rank that has the
/// most.
pub(crate) fn touched_bytes(sums: &ClusterSums, shape: Shape) -> u64 {
    let block = sums.block_bytes_max;
    let all = sums.total_bytes;

    if shape.collective.is_reduction() {
        let output = if shape.collective.has_equal_outputs() { all } else { block };
        // An inbox has a place for the contribution of every rank.
        let inbox = block.saturating_mul(sums.ranks);
        let outputs = output.saturating_mul(shape.outputs.into());
        let inboxes = inbox.saturating_mul(shape.flag_sets().into());
        let input = match shape.collective.contributes_whole_input() {
            _ if shape.in_place => 0,
            true => block,
            false => all,
        };
        return outputs.saturating_add(inboxes).saturating_add(input);
    }

    let (input, output) = match (shape.collective.has_equal_outputs(), shape.collective.root()) {
        (true, _) => (block, all),
        (false, Some(_)) => (all, block),
        (false, None) => (block.saturating_mul(sums.ranks), all),
    };
    let outputs = output.saturating_mul(shape.outputs.into());
    // In place, the input is a part of the output.
    if shape.in_place { outputs } else { outputs.saturating_add(input) }
}

/// The latencies and bandwidths that one rank gets from a link when all ranks of its node use it.
///
/// Times are in picoseconds and rates in bytes per second.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EffectiveLink {
    put: u64,
    get: u64,
    /// The additional time of a put that forwards bytes received from a peer.
    passed_on_put: u64,
    /// The rate of reading received bytes from a peer's cache, before a put forwards them.
    passed_on: f64,
    in_flight: u64,
    /// The rate of a single put.
    flow: f64,
    /// The rate of a single get.
    get_flow: f64,
    /// The rate of all copies of one lane together.
    lane: f64,
    /// The rate of all copies out of one rank together.
    send: f64,
    /// The rate of all copies into one rank together.
    receive: f64,
    /// The time of a signal, or of a wait whose flag is set.
    pub(crate) step: u64,
    /// The time from a signal until the waiting engine continues.
    pub(crate) hop: u64,
    /// The time that the host needs to submit a put.
    pub(crate) submit: u64,
    pub(crate) by_processor: bool,
}

impl EffectiveLink {
    /// Computes the share of a link that each rank gets under full load.
    ///
    /// Without a tier, it is the link of the rank to itself. `node_ranks` ranks of a node copy at
    /// the same time, and `senders` lanes put to other nodes.
    pub(crate) fn new(links: &Links, tier: Option<Tier>, node_ranks: u64, senders: u64) -> Self {
        let link = links.link_of_tier(tier.unwrap_or_default(), tier.is_none());
        let mut slowdown = 1.0;
        let mut shared = f64::INFINITY;
        if link.by_processor {
            // With fewer processors than ranks, the ranks take turns, so all steps take longer.
            let processors = links.node.processors.map_or(node_ranks, u64::from).max(1);
            slowdown = (node_ranks as f64 / processors as f64).max(1.0);
            let copies = node_ranks.min(processors) as f64;
            shared = links.node.copy_bytes_per_second.map_or(shared, |all| all / copies);
        }

        let senders = senders.max(1);
        if tier == Some(Tier::Network)
            && let Some(nics) = links.node.nics
        {
            let nic = links.node.nic_bytes_per_second.unwrap_or(link.engine_bytes_per_second);
            let busy = senders.min(nics.into()) as f64;
            shared = shared.min(nic * busy / senders as f64);
        }

        let Link { put_seconds, get_seconds, step_seconds, flag_seconds, submit_seconds, .. } =
            *link;
        let get_flow = link.get_bytes_per_second.unwrap_or(link.bytes_per_second);
        let lane = link.engine_bytes_per_second.min(link.send_bytes_per_second);
        let slowed = |seconds: f64| picoseconds(seconds * slowdown);
        Self {
            put: slowed(put_seconds),
            get: slowed(get_seconds),
            passed_on_put: slowed(link.passed_on_seconds),
            passed_on: link.passed_on_bytes_per_second.unwrap_or(f64::INFINITY) / slowdown,
            in_flight: link.puts_in_flight.max(1).into(),
            flow: link.bytes_per_second.min(shared) / slowdown,
            get_flow: get_flow.min(shared) / slowdown,
            lane: lane.min(shared) / slowdown,
            send: link.send_bytes_per_second.min(shared) / slowdown,
            receive: link.receive_bytes_per_second.min(shared) / slowdown,
            step: slowed(step_seconds),
            hop: picoseconds(flag_seconds),
            submit: picoseconds(submit_seconds),
            by_processor: link.by_processor,
        }
    }

    /// Returns the time of `count` puts that move `bytes` bytes in total.
    ///
    /// If several puts can be in flight, the lane continues while the bytes of the last ones move.
    pub(crate) fn puts(&self, count: u64, bytes: u64) -> u64 {
        self.copies(self.put, self.flow, count, bytes)
    }

    pub(crate) fn gets(&self, count: u64, bytes: u64) -> u64 {
        self.copies(self.get, self.get_flow, count, bytes)
    }

    /// Returns by how much flags between copies, which take the time `flags`, lengthen `copies`.
    ///
    /// `copies` is the time of `count` puts, or of gets with `gets`, that move `bytes` bytes. If
    /// several copies can be in flight, flags only cost time where the lane is busy and not the
    /// link.
    pub(crate) fn unhidden_flags(
        &self,
        gets: bool,
        (count, bytes): (u64, u64),
        copies: u64,
        flags: u64,
    ) -> u64 {
        if self.in_flight == 1 || count == 0 {
            return flags;
        }

        let (each, flow) = if gets { (self.get, self.get_flow) } else { (self.put, self.flow) };
        let last = transfer_picoseconds(bytes / count, self.shared_rate(flow, 1));
        let lane = count.saturating_mul(each).saturating_add(last).saturating_add(flags);
        lane.saturating_sub(copies)
    }

    /// Returns to how many of `peers` peers bytes move at the same time, if a lane puts `chunks`
    /// chunks with `bytes` bytes in all to one peer after the other.
    ///
    /// The puts to one peer follow each other, but those to the next ones begin meanwhile.
    pub(crate) fn peers_at_once(&self, peers: u64, chunks: u64, bytes: u64) -> u64 {
        let issued = self.put.saturating_add(self.step).saturating_mul(chunks).max(1);
        let transfer = transfer_picoseconds(bytes, self.shared_rate(self.flow, 1));
        let begun = (transfer / issued).saturating_add(1);
        begun.min(self.in_flight.div_ceil(chunks)).min(peers)
    }

    /// Returns the link with its gets in the place of its puts.
    ///
    /// A get reads from the memory of a peer, whose cache may hold the bytes, in any case. So its
    /// time does not depend on whether the peer has just received them.
    pub(crate) fn of_gets(&self) -> Self {
        Self {
            put: self.get,
            flow: self.get_flow,
            passed_on_put: 0,
            passed_on: f64::INFINITY,
            ..*self
        }
    }

    /// Returns the link as one of `directions` lanes gets it, which copy at the same time.
    pub(crate) fn shared_by(&self, directions: u64) -> Self {
        let send = self.send / directions as f64;
        Self { flow: self.flow.min(send), lane: self.lane.min(send), ..*self }
    }

    /// Returns the additional time of `count` puts that forward `bytes` bytes received from a peer.
    pub(crate) fn passed_on(&self, count: u64, bytes: u64) -> u64 {
        let first = count.saturating_mul(self.passed_on_put);
        first.saturating_add(transfer_picoseconds(bytes, self.passed_on))
    }

    /// Returns the time of `count` copies of `bytes` bytes in total, with latency `each` and rate
    /// `flow`.
    fn copies(&self, each: u64, flow: f64, count: u64, bytes: u64) -> u64 {
        if count == 0 {
            return 0;
        }

        let latency = count.saturating_mul(each);
        if self.in_flight == 1 {
            return latency.saturating_add(transfer_picoseconds(bytes, self.shared_rate(flow, 1)));
        }

        // Latencies and transfers overlap. The longer of both counts, with the transfer of the last
        // copy or the latency of the first one.
        let last = transfer_picoseconds(bytes / count, self.shared_rate(flow, 1));
        let all = transfer_picoseconds(bytes, self.shared_rate(flow, count));
        latency.saturating_add(last).max(each.saturating_add(all))
    }

    pub(crate) fn rate(&self, count: u64) -> f64 {
        self.shared_rate(self.flow, count)
    }

    pub(crate) fn rate_of_gets(&self, count: u64) -> f64 {
        self.shared_rate(self.get_flow, count)
    }

    /// Returns the total rate of `count` copies in one lane, limited by how many are in flight at
    /// once.
    fn shared_rate(&self, flow: f64, count: u64) -> f64 {
        self.lane.min(flow * self.in_flight.min(count).max(1) as f64)
    }

    pub(crate) fn sends(&self, bytes: u64) -> u64 {
        transfer_picoseconds(bytes, self.send)
    }

    pub(crate) fn receives(&self, bytes: u64) -> u64 {
        transfer_picoseconds(bytes, self.receive)
    }
}

/// Stores sums over ranks and nodes, so that cost formulas need not loop over them.
#[derive(Clone, Debug)]
pub(crate) struct ClusterSums {
    pub(crate) ranks: u64,
    pub(crate) nodes: u64,
    /// The number of ranks of the root's node, if there is a root.
    pub(crate) root_node_ranks: Option<u64>,
    /// The total number of bytes of all blocks.
    pub(crate) total_bytes: u64,
    /// The total number of bytes that all self copies copy.
    pub(crate) own_bytes: u64,
    pub(crate) block_bytes_max: u64,
    pub(crate) block_bytes_min: u64,
    /// The nodes, grouped by their number of ranks.
    sizes: BTreeMap<u64, Size>,
    /// The total number of bytes that move between ranks.
    pub(crate) moved_bytes: u64,
    /// The total number of bytes that move between ranks of the same node if no data is forwarded.
    pub(crate) inside_bytes: u64,
}

/// Summarizes the nodes that have the same number of ranks.
#[derive(Clone, Copy, Debug, Default)]
struct Size {
    nodes: u64,
    /// The largest total length in bytes of the blocks of one of these nodes.
    block_bytes_max: u64,
}

impl ClusterSums {
    /// Sums up the ranks and nodes of `topology` and the bytes that `collective` moves, where the
    /// block of rank r has `block_bytes[r]` bytes.
    pub(crate) fn new(topology: &Topology, collective: Collective, block_bytes: &[u64]) -> Self {
        let used = |rank: Rank| match collective.has_block_of(rank) {
            true => block_bytes[rank.index()],
            false => 0,
        };
        let used_bytes: Vec<u64> = Rank::all(topology.ranks()).map(used).collect();

        let mut sizes = BTreeMap::<u64, Size>::new();
        let mut inside_bytes = 0u64;
        for node in 0..Rank::at(topology.nodes()).0 {
            let members = topology.members(node);
            let bytes = sum(members.iter().map(|rank| used_bytes[rank.index()]));
            let node_ranks = members.len() as u64;

            // Where one rank sends or receives everything, each block goes to or comes from it.
            let inside = match collective.only_end() {
                _ if collective.is_reduction() => sum(members.iter().map(|&adder| {
                    let contributors = contributors_among(collective, members, adder);
                    used_bytes[adder.index()].saturating_mul(contributors)
                })),
                Some(root) if topology.node(root) == node => bytes - used_bytes[root.index()],
                Some(_) => 0,
                None => bytes.saturating_mul(node_ranks - 1),
            };
            inside_bytes = inside_bytes.saturating_add(inside);

            let size = sizes.entry(node_ranks).or_default();
            size.nodes += 1;
            size.block_bytes_max = size.block_bytes_max.max(bytes);
        }

        let ranks = topology.ranks() as u64;
        let total_bytes = sum(used_bytes.iter().copied());
        let (own_bytes, moved_bytes) = match collective.only_end() {
            // A rank adds its own contribution and makes no self copy.
            _ if collective.is_reduction() => {
                let all: Vec<Rank> = Rank::all(topology.ranks()).collect();
                let contributed = all.iter().map(|&adder| {
                    let contributors = contributors_among(collective, &all, adder);
                    used_bytes[adder.index()].saturating_mul(contributors)
                });
                (0, sum(contributed))
            }
            Some(root) => {
                let own_bytes = used_bytes[root.index()];
                (own_bytes, total_bytes.saturating_sub(own_bytes))
            }
            None => (total_bytes, total_bytes.saturating_mul(ranks - 1)),
        };

        let node_ranks = |root| topology.members(topology.node(root)).len() as u64;
        Self {
            ranks,
            nodes: topology.nodes() as u64,
            root_node_ranks: collective.root().map(node_ranks),
            total_bytes,
            own_bytes,
            moved_bytes,
            block_bytes_max: used_bytes.iter().copied().max().unwrap_or(0),
            block_bytes_min: used_bytes.iter().copied().min().unwrap_or(0),
            sizes,
            inside_bytes,
        }
    }

    /// Returns the number of ranks of the smallest node, and that of the largest node.
    pub(crate) fn node_ranks_min_max(&self) -> (u64, u64) {
        (self.node_ranks().next().unwrap_or(1), self.node_ranks().last().unwrap_or(1))
    }

    /// Returns each number of ranks that a node has, once and in ascending order.
    pub(crate) fn node_ranks(&self) -> impl Iterator<Item = u64> + '_ {
        self.sizes.keys().copied()
    }

    /// Returns the largest number of bytes in the blocks of a single node with `node_ranks` ranks.
    pub(crate) fn node_bytes(&self, node_ranks: u64) -> u64 {
        self.sizes.get(&node_ranks).map_or(0, |size| size.block_bytes_max)
    }

    /// Returns the largest number of blocks that one rank receives from other nodes, on a node of
    /// `node_ranks` ranks.
    ///
    /// A block of the rank with local index l enters the node at the rank with local index l mod
    /// `node_ranks`.
    pub(crate) fn entering(&self, node_ranks: u64) -> u64 {
        let all = self.sizes.iter().map(|(ranks, size)| ranks.div_ceil(node_ranks) * size.nodes);
        // The node itself is among those counted, with one block at each of its ranks.
        sum(all) - 1
    }

    /// Returns the largest number of blocks that one rank receives from one other node, on a node
    /// of `node_ranks` ranks.
    pub(crate) fn entering_from_one(&self, node_ranks: u64) -> u64 {
        self.sizes.keys().last().map_or(1, |most| most.div_ceil(node_ranks))
    }
}

/// Returns how many other ranks of `members` contribute to the block that `adder` adds.
///
/// `members` are in rank order.
fn contributors_among(collective: Collective, members: &[Rank], adder: Rank) -> u64 {
    let contributors = collective.contributors(adder, u32::MAX);
    let before = |end: u32| members.partition_point(|&member| member.0 < end);
    let all = before(contributors.end) - before(contributors.start);
    let is_member = members.binary_search(&adder).is_ok();
    let own = usize::from(is_member && contributors.contains(&adder.0));

    (all - own) as u64
}

/// Returns the sum of the times of all `terms`, in picoseconds.
pub(crate) fn total(terms: &[Term]) -> u64 {
    sum(terms.iter().map(|term| term.picoseconds))
}

/// Returns the sum of `terms`, or the largest `u64` if the sum overflows.
pub(crate) fn sum(terms: impl IntoIterator<Item = u64>) -> u64 {
    terms.into_iter().fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use peerlane_hal::LinkKind;

    use super::*;

    #[test]
    fn puts_share_an_engine_and_overlap_in_flight() {
        let mut links = Links::of_kinds(LinkKind::NvLink, LinkKind::Rdma);
        links.local.put_seconds = 1e-6;
        links.local.puts_in_flight = 2;
        links.local.bytes_per_second = 100e9;
        links.local.engine_bytes_per_second = 150e9;
        links.local.send_bytes_per_second = 200e9;
        let link = EffectiveLink::new(&links, Some(Tier::Local), 4, 4);
        // One put alone has the flow's rate, two together the engine's, two lanes the rank's.
        assert_eq!(link.puts(1, 100_000), 2_000_000);
        assert_eq!(link.puts(3, 150_000), 3_500_000);
        assert_eq!(link.puts(3, 1_500_000), 11_000_000);
        assert_eq!(link.sends(200_000), 1_000_000);
        assert_eq!(link.puts(0, 0), 0);
    }

    #[test]
    fn ranks_share_nics() {
        let mut links = Links::default();
        links.network.put_seconds = 0.0;
        links.node.nics = Some(2);
        links.node.nic_bytes_per_second = Some(40e9);
        let time =
            |senders| EffectiveLink::new(&links, Some(Tier::Network), 8, senders).puts(1, 40_000);
        assert_eq!([1, 2, 8].map(time), [1_000_000, 1_000_000, 4_000_000]);
    }

    #[test]
    fn ranks_share_processors_and_memory() {
        let mut links = Links::of_kinds(LinkKind::SharedMemory, LinkKind::Rdma);
        links.local.put_seconds = 1e-6;
        links.node.processors = Some(2);
        let time = |links: &Links, ranks| {
            EffectiveLink::new(links, Some(Tier::Local), ranks, ranks).puts(1, 10_000)
        };
        assert_eq!([1, 2, 4].map(|ranks| time(&links, ranks)), [2_000_000, 2_000_000, 4_000_000]);
        links.node.copy_bytes_per_second = Some(10e9);
        assert_eq!([1, 2, 4].map(|ranks| time(&links, ranks)), [2_000_000, 3_000_000, 6_000_000]);
    }

    #[test]
    fn uneven_nodes_are_counted() {
        let topology = Topology::of_nodes(&[0, 0, 0, 1, 2, 2]).unwrap();
        let sums = ClusterSums::new(&topology, Collective::AllGather, &[1, 2, 3, 40, 5, 6]);
        assert_eq!((sums.ranks, sums.nodes, sums.total_bytes), (6, 3, 57));
        assert_eq!((sums.block_bytes_max, sums.block_bytes_min), (40, 1));
        assert_eq!(sums.node_ranks().collect::<Vec<_>>(), [1, 2, 3]);
        assert_eq!([1, 2, 3].map(|ranks| sums.node_bytes(ranks)), [40, 11, 6]);
        assert_eq!(sums.inside_bytes, 6 * 2 + 11);
        // A single rank gets all 5 foreign blocks, the first of two gets 2 + 1, the first of three
        // 1 + 1.
        assert_eq!([1, 2, 3].map(|ranks| sums.entering(ranks)), [5, 3, 2]);
        assert_eq!([1, 2, 3].map(|ranks| sums.entering_from_one(ranks)), [3, 2, 1]);
    }

    #[test]
    fn sums_saturate() {
        let topology = Topology::flat(2).unwrap();
        assert_eq!(
            ClusterSums::new(&topology, Collective::AllGather, &[u64::MAX, 7]).total_bytes,
            u64::MAX
        );
    }
}
