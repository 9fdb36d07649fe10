//! The buffers of one operation, registered here and imported from every peer.
//!
//! A plan names bytes by (rank, buffer, offset); a window is what these names mean on one fabric.

use std::sync::atomic::AtomicU64;

use peerlane_hal::{PeerMemory, Rank, Region};

use crate::run::turns::{Start, Turns};

/// The buffers of this rank, and those of its peers that it may reach.
pub(crate) struct Window<M: PeerMemory> {
    /// The own shard; `None` in place, where it is part of the output.
    pub(crate) input: Option<M::Local>,
    /// What is gathered.
    pub(crate) output: M::Local,
    /// The flags that this rank waits for.
    pub(crate) flags: M::Local,
    /// By rank; oneself is a peer too.
    pub(crate) peers: Vec<Peer<M>>,
    /// How outputs and flags are divided among starts; alike on all ranks.
    pub(crate) turns: Turns,
}

/// A peer's exported buffers.
pub(crate) struct Peer<M: PeerMemory> {
    /// Where puts go.
    pub(crate) output: M::Remote,
    /// Where signals go.
    pub(crate) flags: M::Remote,
}

impl<M: PeerMemory> Window<M> {
    /// The region that holds the own shard.
    pub(crate) fn input(&self) -> &M::Local {
        self.input.as_ref().unwrap_or(&self.output)
    }

    pub(crate) fn peer(&self, rank: Rank) -> &Peer<M> {
        &self.peers[rank.index()]
    }
}

/// The host's view of a window, whatever fabric it is on.
pub(crate) trait HostView: Send + Sync {
    /// The flag of a start, where the host can read it; `word` as the layout numbers it.
    fn flag(&self, word: u64, start: Start) -> Option<&AtomicU64>;
    /// What the flag of a start holds, also where the host cannot read it; slow there.
    fn flag_value(&self, word: u64, start: Start) -> Option<u64>;
    /// Where the output of a start begins.
    fn output_offset(&self, start: Start) -> u64;
    /// The region that holds the own shard.
    fn input(&self) -> &dyn Region;
    /// The gathered region.
    fn output(&self) -> &dyn Region;
}

impl<M: PeerMemory> HostView for Window<M> {
    fn flag(&self, word: u64, start: Start) -> Option<&AtomicU64> {
        let word = usize::try_from(self.turns.flag_word(word, start)).ok()?;
        self.flags.flags()?.get(word)
    }

    fn flag_value(&self, word: u64, start: Start) -> Option<u64> {
        self.flags.flag_value(self.turns.flag_word(word, start))
    }

    fn output_offset(&self, start: Start) -> u64 {
        self.turns.output_offset(start)
    }

    fn input(&self) -> &dyn Region {
        self.input()
    }

    fn output(&self) -> &dyn Region {
        &self.output
    }
}
