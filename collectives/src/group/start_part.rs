//! Describes the lengths and places of a start, which ranks compare.

use peerlane_hal::Rank;

use crate::layout::Layout;

/// The lengths and places of a start as ranks compare them, in elements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct StartPart {
    pub(super) hash: u64,
    lens: StartLens,
    input: u64,
    output: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum StartLens {
    /// Each pair of ranks has a length of its own, which only these two know.
    #[default]
    Pairs,
    Equal(u64),
    /// The length of all blocks together.
    Sum(u64),
}

impl StartPart {
    pub(super) fn new(layout: &Layout, rank: Rank, element_bytes: u64) -> Self {
        let [input, output] = layout.offsets(rank).map(|offset| offset / element_bytes);
        let equal = |bytes: u64| (StartLens::Equal(bytes / element_bytes), mix(0, bytes));
        let (lens, hash) = match layout.lengths() {
            None => (StartLens::Pairs, 2),
            // Ranks compare what the caller has set, and not the parts into which a plan cuts it.
            Some(_) if layout.has_one_length() => equal(layout.data_bytes()),
            Some(lengths) => {
                // Lengths that were different before are stored one by one, even if they are equal
                // now.
                let first = lengths.bytes(Rank(0));
                let is_uniform = || lengths.iter().all(|bytes| bytes == first);
                if lengths.uniform().is_some() || is_uniform() {
                    equal(first)
                } else {
                    let sum = lengths.total() / element_bytes;
                    (StartLens::Sum(sum), lengths.iter().fold(1, mix))
                }
            }
        };
        let hash = [input, output].into_iter().fold(hash, mix);
        Self { hash, lens, input, output }
    }

    /// Returns the hash of what both ranks of a pair know: the part, and the lengths in both
    /// directions.
    pub(super) fn hash_of_pair(&self, (rank, peer): (Rank, Rank), lens: PeerLens) -> u64 {
        let PeerLens { send, receive } = lens;
        let from_lower_rank = if rank <= peer { [send, receive] } else { [receive, send] };
        from_lower_rank.into_iter().fold(self.hash, mix)
    }

    /// Describes the part for an error. If each pair of ranks has lengths of its own, `pair` is
    /// another rank and the lengths that this rank exchanges with it.
    pub(super) fn describe(&self, pair: Option<(Rank, PeerLens)>) -> String {
        let Self { lens, input, output, .. } = self;
        let blocks = match (lens, pair) {
            (StartLens::Equal(len), _) => format!("blocks of {len} elements"),
            (StartLens::Sum(sum), _) => format!("blocks of {sum} elements in all"),
            (StartLens::Pairs, None) => "blocks with a length for each pair of ranks".to_owned(),
            (StartLens::Pairs, Some((peer, PeerLens { send, receive }))) => {
                format!("{send} elements for rank {peer} and {receive} elements from rank {peer}")
            }
        };
        format!("{blocks}, the input at element {input}, the output at element {output}")
    }
}

/// The lengths of the blocks that a rank and another one exchange, in elements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PeerLens {
    pub(super) send: u64,
    pub(super) receive: u64,
}

fn mix(hash: u64, value: u64) -> u64 {
    let mixed =
        (hash ^ value).wrapping_add(0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed ^ mixed >> 31
}
