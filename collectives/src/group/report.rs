//! What an operation runs on, for people and for logs.

use std::fmt;

use peerlane_hal::{BackendId, LinkKind, Rank};

use crate::plan::{Algorithm, FlagOrder};

/// How a prepared operation runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The algorithm.
    pub algorithm: Algorithm,
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
    /// Bytes that each rank contributes.
    pub shard_bytes: u64,
    /// Bytes gathered.
    pub total_bytes: u64,
    /// How this rank reaches the peers that its fabric names, oneself included.
    pub links: Vec<LinkReport>,
    /// The lanes of this rank.
    pub lanes: Vec<LaneReport>,
    /// What was proven of the plans before they ran.
    pub proof: String,
}

/// The way to one peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkReport {
    /// The peer.
    pub peer: Rank,
    /// What carries the bytes.
    pub kind: LinkKind,
}

/// One lane of this rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaneReport {
    /// Whose engine it is.
    pub backend: BackendId,
    /// Whether its waits are queued with the engine; otherwise the caller's thread polls them.
    pub queued_waits: bool,
}

impl Report {
    /// The peers to whom bytes go around what devices lack, more slowly than they could.
    pub fn fallbacks(&self) -> impl Iterator<Item = &LinkReport> {
        self.links.iter().filter(|link| link.kind.is_fallback())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { algorithm, ranks, parts, outputs, flags, shard_bytes, total_bytes, .. } = self;
        write!(
            f,
            "{algorithm}, {ranks} ranks, {shard_bytes} bytes a shard in {parts} part(s), \
             {total_bytes} bytes in all, {outputs} output(s) in turn, flags {flags}"
        )?;
        for LinkReport { peer, kind } in self.fallbacks() {
            write!(f, "; to rank {peer} {}", kind.name())?;
        }
        for (index, lane) in self.lanes.iter().enumerate() {
            let waits = if lane.queued_waits { "queued" } else { "polled" };
            write!(f, "; lane {index} on {}, waits {waits}", lane.backend)?;
        }
        Ok(())
    }
}
