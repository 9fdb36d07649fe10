//! What an operation runs on, for people and for logs.

use std::fmt;
use std::sync::Arc;

use peerlane_hal::{BackendId, LinkKind, Rank};

use crate::collective::Collective;
use crate::cost::Choice;
use crate::plan::{Algorithm, FlagOrder, LaneId, Tier};

/// How a prepared operation runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The collective.
    pub collective: Collective,
    /// The algorithm.
    pub algorithm: Algorithm,
    /// What it was chosen from and why, as far as that was left open, and what it is predicted to take.
    pub choice: Choice,
    /// Ranks of the group.
    pub ranks: usize,
    /// Parts of a shard.
    pub parts: u32,
    /// Outputs that are used in turn; with two there is no `ready`.
    pub outputs: u32,
    /// Where the flags stand among the copies.
    pub flags: FlagOrder,
    /// Whether starts may be recorded into graphs.
    pub capturable: bool,
    /// Bytes that this rank contributes.
    pub shard_bytes: u64,
    /// Bytes of the shortest shard of all ranks.
    pub shortest_shard_bytes: u64,
    /// Bytes of the longest shard of all ranks.
    pub longest_shard_bytes: u64,
    /// How many tensors are gathered at once.
    pub tensors: usize,
    /// Bytes gathered.
    pub total_bytes: u64,
    /// How this rank reaches the peers that its fabrics name, oneself included.
    pub links: Vec<LinkReport>,
    /// The lanes in which this rank has something to do.
    pub lanes: Vec<LaneReport>,
    /// What this rank moves over each fabric.
    pub tiers: Vec<TierReport>,
    /// What is not done as it could be.
    pub fallbacks: Vec<Fallback>,
    /// What was proven of the plans before they ran.
    pub proof: String,
}

/// The way to one peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkReport {
    /// The peer.
    pub peer: Rank,
    /// Which fabric it is of.
    pub tier: Tier,
    /// What carries the bytes.
    pub kind: LinkKind,
}

/// One lane of this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneReport {
    /// Its number in the plan.
    pub lane: LaneId,
    /// Which fabric it is on.
    pub tier: Tier,
    /// Whose engine it is.
    pub backend: BackendId,
    /// Which of the backend's kinds of engine it is, such as `streams` or `sdma`.
    pub kind: &'static str,
    /// Whether its waits are queued with the engine; otherwise a thread of this rank polls them.
    pub queued_waits: bool,
    /// Whether nothing moves unless a thread of this rank drives the engine.
    pub polled: bool,
}

/// What this rank moves over one fabric in a start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierReport {
    /// Which fabric.
    pub tier: Tier,
    /// Bytes that it puts to other ranks.
    pub put_bytes: u64,
    /// Bytes that it gets from other ranks.
    pub got_bytes: u64,
    /// Bytes that it copies within its own memory.
    pub own_bytes: u64,
}

/// Something that is done another way than the best one, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fallback {
    /// Memory of this rank goes through memory of the host on its way to other nodes and from there.
    Staged {
        /// Why the network does not register it.
        reason: Arc<str>,
    },
    /// Bytes to a peer go around what devices lack, more slowly than they could.
    Link(LinkReport),
    /// Starts on a stream need a thread of this rank, because an engine cannot wait by itself.
    Driven(LaneReport),
}

impl Fallback {
    /// A short name for tables, such as `through host memory`.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Staged { .. } => LinkKind::HostStaged.name(),
            Self::Link(link) => link.kind.name(),
            Self::Driven(_) => "driven by a thread",
        }
    }
}

impl fmt::Display for Fallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Staged { reason } => {
                let way = self.name();
                write!(f, "between nodes, memory of this rank goes {way}, because {reason}")
            }
            Self::Link(LinkReport { peer, kind, .. }) => {
                write!(f, "to rank {peer} {}", kind.name())
            }
            Self::Driven(LaneReport { lane, backend, .. }) => {
                write!(
                    f,
                    "starts on a stream keep a thread busy, because engines of {backend} (lane \
                     {lane}) do not move by themselves"
                )
            }
        }
    }
}

impl Report {
    /// Whether starts may go onto streams: the engine of lane 0 queues waits and moves by itself.
    pub fn takes_streams(&self) -> bool {
        self.lanes.first().is_some_and(LaneReport::is_queued)
    }
}

impl LaneReport {
    /// Whether nobody has to drive it.
    pub(crate) fn is_queued(&self) -> bool {
        self.queued_waits && !self.polled
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { algorithm, ranks, parts, outputs, flags, total_bytes, .. } = self;
        let (shortest, longest) = (self.shortest_shard_bytes, self.longest_shard_bytes);
        write!(f, "{algorithm}, {ranks} ranks, {shortest} ")?;
        if shortest != longest {
            write!(f, "to {longest} ")?;
        }
        write!(f, "bytes a shard in {parts} part(s), {total_bytes} bytes in all, ")?;
        if self.tensors > 1 {
            write!(f, "{} tensors, ", self.tensors)?;
        }
        write!(f, "{outputs} output(s) in turn, flags {flags}")?;
        for fallback in &self.fallbacks {
            write!(f, "; {fallback}")?;
        }
        for LaneReport { lane, tier, backend, kind, queued_waits, .. } in &self.lanes {
            let waits = if *queued_waits { "queued" } else { "polled" };
            let network = if *tier == Tier::Network { " (network)" } else { "" };
            write!(f, "; lane {lane} on {backend}{network} by {kind}, waits {waits}")?;
        }
        for TierReport { tier, put_bytes, got_bytes, .. } in &self.tiers {
            if put_bytes + got_bytes > 0 {
                write!(f, "; {tier}: {put_bytes} bytes put, {got_bytes} got")?;
            }
        }
        Ok(())
    }
}
