//! Reports: how a prepared operation runs, for logs and tables.

use std::fmt;
use std::sync::Arc;

use peerlane_hal::{BackendId, LinkKind, Rank};

use crate::collective::Collective;
use crate::cost::Choice;
use crate::plan::{Algorithm, FlagOrder, LaneId, Tier};

/// How a prepared operation runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The collective that was prepared.
    pub collective: Collective,
    /// The algorithm that moves the blocks.
    pub algorithm: Algorithm,
    /// The choice of the algorithm, with its alternatives and the predicted cost.
    pub choice: Choice,
    /// The number of ranks.
    pub ranks: usize,
    /// The number of chunks of a block.
    pub chunks: u32,
    /// The number of outputs that starts use in turn.
    pub outputs: u32,
    /// The order of flags and copies.
    pub flags: FlagOrder,
    /// Whether starts may be recorded into graphs.
    pub capturable: bool,
    /// Bytes of the input of this rank; in place, of its block of the output.
    pub input_bytes: u64,
    /// Bytes of the output of this rank.
    pub output_bytes: u64,
    /// Bytes of the shortest block of all ranks.
    pub shortest_block_bytes: u64,
    /// Bytes of the longest block of all ranks.
    pub longest_block_bytes: u64,
    /// The number of tensors.
    pub tensors: usize,
    /// Bytes of the largest input or output of a rank.
    pub total_bytes: u64,
    /// The links to the peers that the fabrics name, including this rank.
    pub links: Vec<LinkReport>,
    /// The lanes in which this rank has work.
    pub lanes: Vec<LaneReport>,
    /// The bytes that this rank moves over each fabric.
    pub tiers: Vec<TierReport>,
    /// The fallbacks in use.
    pub fallbacks: Vec<Fallback>,
    /// The claim of the proof of the plans.
    pub proof: String,
}

/// The link to one peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkReport {
    /// The rank at the other end of the link.
    pub peer: Rank,
    /// The tier of the fabric.
    pub tier: Tier,
    /// The kind of the link.
    pub kind: LinkKind,
}

/// One lane of this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneReport {
    /// The number of the lane in the plan.
    pub lane: LaneId,
    /// The tier of the fabric.
    pub tier: Tier,
    /// The backend of the engine.
    pub backend: BackendId,
    /// The kind of the engine, such as `streams` or `sdma`.
    pub kind: &'static str,
    /// Whether the engine queues waits; otherwise a thread of this rank polls flags.
    pub queued_waits: bool,
    /// Whether the engine makes progress only when a thread of this rank polls it.
    pub polled: bool,
}

/// The bytes that this rank moves over one fabric in a start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierReport {
    /// The tier of the fabric.
    pub tier: Tier,
    /// Bytes that the lane puts to other ranks.
    pub put_bytes: u64,
    /// Bytes that the lane gets from other ranks.
    pub got_bytes: u64,
    /// Bytes of the lane's self copies; 0 in place.
    pub own_bytes: u64,
    /// Bytes that compute units of the device copy; copy engines, NICs or processors copy the others.
    pub compute_bytes: u64,
}

/// A method that is slower, or uses compute units, where the best one is not available or not selected.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fallback {
    /// Data between nodes is staged in host memory.
    Staged {
        /// The reason why the network cannot register this rank's memory.
        reason: Arc<str>,
    },
    /// Data to a peer takes a slower path because the devices have no direct one.
    Link(LinkReport),
    /// Compute units of the device make copies, such as a copy from the rank's input to its output.
    Compute(TierReport),
    /// Starts on a stream need a thread of this rank, because an engine cannot wait by itself.
    Driven(LaneReport),
}

impl Fallback {
    /// Returns a short name for tables, such as `through host memory`.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Staged { .. } => LinkKind::HostStaged.name(),
            Self::Link(link) => link.kind.name(),
            Self::Compute(_) => "by compute units",
            Self::Driven(_) => "driven by a thread",
        }
    }
}

impl fmt::Display for Fallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Staged { reason } => {
                let way = self.name();
                write!(f, "copies between nodes go {way}, because {reason}")
            }
            Self::Link(LinkReport { peer, kind, .. }) => {
                write!(f, "copies to rank {peer} go {}", kind.name())
            }
            Self::Compute(TierReport { own_bytes, compute_bytes, .. })
                if compute_bytes <= own_bytes =>
            {
                write!(
                    f,
                    "compute units copy {compute_bytes} bytes from the rank to itself; run in place, or \
                     select `SelfCopy::Link` (--self-copy link) and an algorithm that puts these bytes \
                     to a peer too"
                )
            }
            Self::Compute(TierReport { compute_bytes, .. }) => {
                write!(
                    f,
                    "compute units make copies of {compute_bytes} bytes, because ranks share a device or \
                     the driver has no copies without compute units; give each rank a device, and see \
                     `peerlane doctor`"
                )
            }
            Self::Driven(LaneReport { lane, backend, .. }) => {
                write!(
                    f,
                    "starts on a stream need a thread, because engines of the backend {backend} \
                     (lane {lane}) make no progress by themselves"
                )
            }
        }
    }
}

impl Report {
    /// Returns whether starts can be enqueued on streams: the engine of lane 0 queues waits and needs no polling.
    pub fn takes_streams(&self) -> bool {
        self.lanes.first().is_some_and(LaneReport::is_queued)
    }
}

impl LaneReport {
    /// Returns whether the lane runs without a thread that drives it.
    pub(crate) fn is_queued(&self) -> bool {
        self.queued_waits && !self.polled
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { algorithm, ranks, chunks, outputs, flags, total_bytes, .. } = self;
        let (shortest, longest) = (self.shortest_block_bytes, self.longest_block_bytes);
        write!(f, "{algorithm}, {ranks} ranks, {shortest} ")?;
        if shortest != longest {
            write!(f, "to {longest} ")?;
        }
        write!(f, "bytes a block in {chunks} chunk(s), {total_bytes} bytes in all, ")?;
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
        for TierReport { tier, put_bytes, got_bytes, own_bytes, .. } in &self.tiers {
            if put_bytes + got_bytes + own_bytes > 0 {
                write!(
                    f,
                    "; {tier}: {put_bytes} bytes put, {got_bytes} got, {own_bytes} self copy"
                )?;
            }
        }
        Ok(())
    }
}
