//! Selects ranks and nodes if there are too many to examine all.

use peerlane_hal::Rank;

use crate::topology::Topology;

/// A selection of ranks that depends only on the topology: the first, the last, and pseudo-random others.
#[derive(Clone, Debug)]
pub(super) struct Sample {
    ranks: Vec<Rank>,
}

impl Sample {
    /// Selects at least `most` ranks or all, and never fewer than two if there are two.
    pub(super) fn new(topology: &Topology, most: usize) -> Self {
        let ranks = topology.ranks();
        if most >= ranks {
            return Self { ranks: Rank::all(ranks).collect() };
        }
        let mut strewn = Strewn::new(topology);
        let mut picked = vec![Rank(0), Rank::at(ranks - 1)];
        picked.extend((2..most).map(|_| Rank::at(strewn.below(ranks))));
        picked.sort_unstable();
        picked.dedup();
        Self { ranks: picked }
    }

    pub(super) fn ranks(&self) -> impl Iterator<Item = Rank> + '_ {
        self.ranks.iter().copied()
    }
}

/// Returns a topology of some of the nodes with at most about `ranks` ranks: the smallest, the largest, and pseudo-random
/// others. If one node is too large, it returns a part of it.
pub(super) fn some_nodes(topology: &Topology, ranks: usize) -> Topology {
    let members = |node: usize| topology.members(Rank::at(node).0);
    let nodes = topology.nodes();
    let mut strewn = Strewn::new(topology);
    let by_size = |node: &usize| members(*node).len();
    let ends = [(0..nodes).min_by_key(by_size), (0..nodes).max_by_key(by_size)];
    let mut picked: Vec<usize> = Vec::new();
    let mut room = ranks;
    let candidates = (0..4 * nodes).map(|_| strewn.below(nodes)).chain(0..nodes);
    for node in ends.into_iter().flatten().chain(candidates) {
        let fits = members(node).len() <= room || picked.is_empty();
        if fits && !picked.contains(&node) {
            room = room.saturating_sub(members(node).len());
            picked.push(node);
        }
    }
    let kept = |node: usize| members(node).iter().take(ranks.max(1)).copied();
    let mut places: Vec<(Rank, usize)> =
        picked.iter().flat_map(|&node| kept(node).map(move |rank| (rank, node))).collect();
    places.sort_unstable();
    picked.sort_unstable();
    let number = |node| Rank::at(picked.partition_point(|&other| other < node)).0;
    let node_of_rank: Vec<u32> = places.into_iter().map(|(_, node)| number(node)).collect();
    Topology::of_nodes(&node_of_rank).expect("there is a rank, and the nodes are numbered anew")
}

/// A pseudo-random sequence that depends only on its seed.
struct Strewn(u64);

impl Strewn {
    fn new(topology: &Topology) -> Self {
        let mut state = Self(topology.ranks() as u64);
        for &node in topology.node_of_rank() {
            state.0 = state.next() ^ u64::from(node);
        }
        state
    }

    /// Returns the next number of SplitMix64.
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed(self.0)
    }

    fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next() % limit as u64).expect("below a usize")
    }
}

/// Spreads the bits of a number.
pub(super) fn mixed(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}
