//! Describes how a prepared operation runs, for logs and tables.

use std::fmt;
use std::sync::Arc;

use peerlane_hal::{BackendId, Caps, Launch, LinkKind, Rank, Reducer};

use crate::collective::Collective;
use crate::cost::{Choice, Form};
use crate::group::stats::MemoryUse;
use crate::plan::{Algorithm, FlagOrder, LaneId, Tier};

/// Describes how a prepared operation runs: its algorithm, engines, links and fallbacks.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// The collective that the operation executes.
    pub collective: Collective,
    /// The algorithm that moves the blocks between ranks.
    pub algorithm: Algorithm,
    /// The predicted costs of all algorithms, from which the algorithm of the operation was chosen.
    pub choice: Choice,
    /// The number of ranks that take part in the operation.
    pub ranks: usize,
    /// The number of chunks into which each block is cut.
    pub chunks: u32,
    /// The number of output buffers that the operation alternates between, 1 or 2.
    pub outputs: u32,
    /// The order of signals, waits and copies in the plan.
    pub flags: FlagOrder,
    /// Whether the operation may be recorded into graphs.
    pub capturable: bool,
    /// The size of this rank's input in bytes; in place, the size of its block in the output.
    pub input_bytes: u64,
    /// The size of this rank's output in bytes.
    pub output_bytes: u64,
    /// The size of the shortest block of all ranks, in bytes.
    pub shortest_block_bytes: u64,
    /// The size of the longest block of all ranks, in bytes.
    pub longest_block_bytes: u64,
    /// The number of tensors that the operation moves.
    pub tensors: usize,
    /// The size in bytes of the largest input or output that any rank has.
    pub total_bytes: u64,
    /// The links from this rank to its peers and to itself.
    pub links: Vec<LinkReport>,
    /// The sequences of steps that this rank executes, each with its engine.
    pub lanes: Vec<LaneReport>,
    /// The bytes that this rank moves over each fabric.
    pub tiers: Vec<TierReport>,
    /// What each start launches on the compute units, if starts are fused.
    pub launch: Option<Launch>,
    /// The fallbacks that the operation uses.
    pub fallbacks: Vec<Fallback>,
    /// The properties that the verifier has proved for the plans of all ranks.
    pub proof: String,
    /// The plans that a resizable operation uses for shorter starts, largest first.
    pub shorter: Vec<PlanRange>,
    /// The memory of this rank that Peerlane has allocated for the operation, by kind.
    ///
    /// Operations that write the same bytes of a window can share an inbox, so it can be that of
    /// other operations too.
    pub memory: Vec<MemoryUse>,
}

/// Describes the plan that a resizable operation uses for starts up to a total size.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PlanRange {
    /// The largest size of all blocks together, in bytes, of a start that uses the plan. In an
    /// all-reduce, it is the size of one input.
    pub bytes_max: u64,
    /// The form of an all-reduce; `None` for other collectives.
    pub form: Option<Form>,
    /// The algorithm that moves the blocks between ranks.
    pub algorithm: Algorithm,
    /// The number of chunks into which each block is cut.
    pub chunks: u32,
    /// The kind of engines that execute the plan.
    pub engine: String,
}

impl PlanRange {
    /// Returns whether the plan is for starts of all sizes, unlike those that reports list.
    pub(super) fn is_for_all(&self) -> bool {
        self.bytes_max == u64::MAX
    }

    /// Returns whether the plan has the form, algorithm and engines of `other`, and differs at most
    /// in its chunks.
    pub(super) fn is_similar(&self, other: &Self) -> bool {
        self.form == other.form && self.algorithm == other.algorithm && self.engine == other.engine
    }
}

/// Describes the link from this rank to one peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LinkReport {
    /// The rank at the other end of the link.
    pub peer: Rank,
    /// Whether the link is inside a node or crosses the network.
    pub tier: Tier,
    /// The kind of the link, such as NVLink or PCIe, as the fabric reports it.
    pub kind: LinkKind,
}

/// Describes the engine that executes one lane, that is, one sequence of steps of this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LaneReport {
    /// The identifier of the sequence of steps in the plan.
    pub lane: LaneId,
    /// Whether the engine copies inside a node or over the network.
    pub tier: Tier,
    /// The backend that provides the engine, such as CUDA or RDMA.
    pub backend: BackendId,
    /// The kind of the engine, such as `streams` or `sdma`.
    pub kind: &'static str,
    /// Whether the engine executes waits for flags itself; otherwise a thread of this rank polls
    /// the flags.
    pub queued_waits: bool,
    /// Whether the engine makes progress only when a thread of this rank polls it.
    pub polled: bool,
}

/// The number of bytes that this rank moves inside its node, or over the network, in each start of
/// an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TierReport {
    /// Whether the bytes move inside a node or over the network.
    pub tier: Tier,
    /// The number of bytes that this rank writes to other ranks with puts.
    pub put_bytes: u64,
    /// The number of bytes that this rank reads from other ranks with gets.
    pub got_bytes: u64,
    /// The number of bytes that this rank copies from its own input to its own output; 0 in place.
    pub own_bytes: u64,
    /// The number of bytes that the device's compute units copy; copy engines, NICs or processors
    /// copy the others.
    pub compute_bytes: u64,
}

/// Describes what adds the contributions of a reduction on this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AdditionReport {
    /// The part of the device that adds.
    pub reducer: Reducer,
    /// The number of bytes of the result that it writes in each start.
    pub bytes: u64,
}

/// A slower path, or one that uses compute units, that an operation takes because the best one is
/// not available.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fallback {
    /// Data between nodes is copied through host memory, because the NIC cannot register device
    /// memory.
    Staged {
        /// The reason why the NIC cannot register this rank's memory.
        reason: Arc<str>,
    },
    /// Data to a peer takes a slower path because the devices have no direct one.
    Link(LinkReport),
    /// Compute units of the device add the contributions of a reduction.
    Additions(AdditionReport),
    /// Compute units of the device execute copies, such as a copy from the rank's input to its
    /// output.
    Compute(TierReport),
    /// A host thread must poll an engine to finish operations on a stream.
    Driven(LaneReport),
}

impl Fallback {
    /// Returns the short name of the fallback, such as `through host memory`.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Staged { .. } => LinkKind::HostStaged.name(),
            Self::Link(link) => link.kind.name(),
            Self::Compute(_) | Self::Additions(_) => "by compute units",
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
            // Each text says what to change, where something can be changed.
            Self::Link(LinkReport { peer, kind, .. }) => {
                write!(f, "copies to rank {peer} go {}", kind.name())
            }
            Self::Compute(TierReport { own_bytes, compute_bytes, .. })
                if compute_bytes <= own_bytes =>
            {
                write!(
                    f,
                    "compute units copy {compute_bytes} bytes from the rank to itself; run in place, or \
                     set `beside_compute` (--beside-compute) with an algorithm that puts these bytes to \
                     a peer too"
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
            Self::Additions(AdditionReport { reducer, bytes }) => {
                write!(f, "compute units add {bytes} bytes in {reducer}")
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
    /// Returns whether the operation can be enqueued on a stream.
    ///
    /// The engine of lane 0 must queue waits and need no polling.
    pub fn takes_streams(&self) -> bool {
        self.lanes.first().is_some_and(LaneReport::is_queued)
    }
}

impl LaneReport {
    pub(super) fn new(lane: LaneId, tier: Tier, backend: BackendId, caps: &Caps) -> Self {
        let Caps { kind, queued_wait: queued_waits, polled, .. } = *caps;
        Self { lane, tier, backend, kind, queued_waits, polled }
    }

    pub(super) fn is_queued(&self) -> bool {
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
        for PlanRange { bytes_max, form, algorithm, chunks, engine } in &self.shorter {
            write!(f, "; up to {bytes_max} bytes in all {algorithm} in {chunks} chunk(s)")?;
            if let Some(form) = form {
                write!(f, ", {}", form.name())?;
            }
            if *engine != self.choice.engine {
                write!(f, " by {engine}")?;
            }
        }

        for (engine, why) in &self.choice.refused_engines {
            write!(f, "; not by {engine}: {why}")?;
        }

        if let Some(launch) = self.launch {
            write!(f, "; each start is {launch}")?;
        }
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
