//! What flows share: engines, the ways in and out of ranks, network cards, processors and memory.

use peerlane_hal::Rank;

use super::flows::Uses;
use crate::cost::{Link, Links};
use crate::plan::Tier;
use crate::topology::Topology;

/// Where bytes go: to the rank itself, or over a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Way {
    /// From a rank to itself.
    Own,
    /// Over [`Tier::Local`].
    Local,
    /// Over [`Tier::Network`].
    Network,
}

impl Way {
    /// All, in order.
    pub const ALL: [Self; 3] = [Self::Own, Self::Local, Self::Network];

    /// Of a lane of `tier`.
    pub const fn of(tier: Tier, to_self: bool) -> Self {
        match tier {
            _ if to_self => Self::Own,
            Tier::Local => Self::Local,
            Tier::Network => Self::Network,
        }
    }

    /// The name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Own => "own",
            Self::Local => Tier::Local.name(),
            Self::Network => Tier::Network.name(),
        }
    }

    /// Its figures.
    pub fn link(self, links: &Links) -> &Link {
        match self {
            Self::Own => &links.own,
            Self::Local => &links.local,
            Self::Network => &links.network,
        }
    }
}

/// Numbers the resources.
#[derive(Debug)]
pub(super) struct Resources<'a> {
    links: &'a Links,
    topology: &'a Topology,
    /// Lanes of all ranks.
    lanes: u32,
    /// The first card of each node.
    first_card: Vec<u32>,
    local_index: Vec<u32>,
}

/// One copy: who copies, from where to where, by which link.
#[derive(Clone, Copy, Debug)]
pub(super) struct Copy {
    pub(super) lane: u32,
    /// Whose engine it is.
    pub(super) by: Rank,
    pub(super) from: Rank,
    pub(super) to: Rank,
    pub(super) way: Way,
    /// Of the copy alone.
    pub(super) bytes_per_second: f64,
}

impl<'a> Resources<'a> {
    pub(super) fn new(links: &'a Links, topology: &'a Topology, lanes: u32) -> Self {
        let mut first_card = vec![0];
        let mut local_index = vec![0; topology.ranks()];
        for node in 0..topology.nodes() as u32 {
            let members = topology.members(node);
            let cards = links.node.nics.unwrap_or(members.len() as u32);
            first_card.push(first_card[node as usize] + cards);
            for (index, member) in (0..).zip(members) {
                local_index[member.index()] = index;
            }
        }
        Self { links, topology, lanes, first_card, local_index }
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        (self.memory(self.topology.nodes() as u32)) as usize
    }

    /// What a copy uses.
    pub(super) fn uses(&self, copy: Copy) -> Uses {
        let Copy { lane, by, from, to, way, bytes_per_second } = copy;
        let link = way.link(self.links);
        let mut uses = Uses::default();
        uses.push(lane, link.engine_bytes_per_second);
        uses.push(self.way_in(to, way), link.receive_bytes_per_second);
        uses.push(self.way_out(from, way), link.send_bytes_per_second);
        let node = &self.links.node;
        if way == Way::Network {
            let rate = node.nic_bytes_per_second.unwrap_or(f64::INFINITY);
            uses.push(self.card_out(from), rate);
            uses.push(self.card_in(to), rate);
        }
        if link.by_processor {
            let place = self.topology.node(by);
            uses.push(self.thread(by), bytes_per_second);
            if let Some(processors) = node.processors {
                uses.push(self.processors(place), f64::from(processors) * bytes_per_second);
            }
            if let Some(rate) = node.copy_bytes_per_second {
                uses.push(self.memory(place), rate);
            }
        }
        uses
    }

    /// The way into a rank.
    pub(super) fn way_in(&self, rank: Rank, way: Way) -> u32 {
        self.lanes + rank.0 * 3 + way as u32
    }

    fn way_out(&self, rank: Rank, way: Way) -> u32 {
        self.way_in(rank, way) + self.ranks() * 3
    }

    /// The way into the node by the network card of `rank`.
    pub(super) fn card_in(&self, rank: Rank) -> u32 {
        let node = self.topology.node(rank) as usize;
        let (first, end) = (self.first_card[node], self.first_card[node + 1]);
        let card = first + self.local_index[rank.index()] % (end - first);
        self.thread(Rank(self.ranks())) + card
    }

    fn card_out(&self, rank: Rank) -> u32 {
        self.card_in(rank) + self.cards()
    }

    /// The thread of a rank that makes copies by a processor.
    fn thread(&self, rank: Rank) -> u32 {
        self.way_out(Rank(self.ranks()), Way::Own) + rank.0
    }

    fn processors(&self, node: u32) -> u32 {
        self.thread(Rank(self.ranks())) + self.cards() * 2 + node
    }

    fn memory(&self, node: u32) -> u32 {
        self.processors(node) + self.topology.nodes() as u32
    }

    /// Network cards of all nodes.
    fn cards(&self) -> u32 {
        self.first_card[self.topology.nodes()]
    }

    fn ranks(&self) -> u32 {
        self.topology.ranks() as u32
    }
}
