//! The buffers of one operation on one fabric, registered here and imported from peers.
//!
//! A bound step names bytes by (rank, buffer, offset); windows are what these names mean on one
//! fabric. Two fabrics over the same bytes share no type: each has its own registrations and imports,
//! and the names are all that they have in common.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use peerlane_hal::{At, DynImport, DynRegion, Flag, Rank, Region, Role};
use serde::{Deserialize, Serialize};

use crate::plan::Tier;
use crate::run::turns::{Start, Turns};

/// A region that is kept as long as another fabric has it registered.
pub(crate) type Kept = DynRegion;

/// A buffer of an operation; every rank has one of that name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) enum BufferId {
    /// A buffer of the own shard; there is none in place, where the shard is part of the output.
    Input(u32),
    /// A buffer of what is gathered.
    Output(u32),
    /// The flags between lanes of this tier.
    Flags,
    /// The flags between lanes of unlike tiers: memory of the host that both fabrics know.
    Crossing,
}

impl BufferId {
    pub(crate) const INPUT: Self = Self::Input(0);
    pub(crate) const OUTPUT: Self = Self::Output(0);

    /// Whether something is gathered there.
    pub(crate) fn is_output(self) -> bool {
        matches!(self, Self::Output(_))
    }

    pub(crate) fn role(self) -> Role {
        match self {
            Self::Input(_) | Self::Output(_) => Role::Data,
            Self::Flags | Self::Crossing => Role::Flags,
        }
    }
}

impl fmt::Display for BufferId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Input(0) => f.write_str("the input"),
            Self::Output(0) => f.write_str("the output"),
            Self::Input(number) => write!(f, "input {number}"),
            Self::Output(number) => write!(f, "output {number}"),
            Self::Flags => f.write_str("flags"),
            Self::Crossing => f.write_str("flags between tiers"),
        }
    }
}

/// A byte of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Spot {
    pub(crate) buffer: BufferId,
    /// From the start of the buffer, or of one start's output in it.
    pub(crate) offset: u64,
}

/// A flag, as its writer and its reader both name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FlagSpot {
    /// Whether it lies among the flags between unlike tiers.
    pub(crate) crossing: bool,
    /// As the layout numbers it.
    pub(crate) word: u64,
}

impl FlagSpot {
    pub(crate) fn buffer(self) -> BufferId {
        if self.crossing { BufferId::Crossing } else { BufferId::Flags }
    }
}

/// A buffer of every rank: the local region, and the imported regions of peers.
#[derive(Clone, Default)]
pub(crate) struct Window {
    /// `None` if only peers have the buffer.
    local: Option<DynRegion>,
    /// The imports by rank, of this rank too.
    peers: Vec<Option<DynImport>>,
}

impl Window {
    pub(crate) fn new(local: DynRegion) -> Self {
        Self { local: Some(local), peers: Vec::new() }
    }

    /// Returns the local region.
    pub(crate) fn local(&self) -> &DynRegion {
        self.local.as_ref().expect("a buffer is made before it is used")
    }

    /// Adds the region imported from `peer`.
    pub(crate) fn add(&mut self, peer: Rank, region: DynImport) {
        if self.peers.len() <= peer.index() {
            self.peers.resize_with(peer.index() + 1, || None);
        }
        self.peers[peer.index()] = Some(region);
    }

    /// Returns whether the region of `peer` has been imported.
    pub(crate) fn has(&self, peer: Rank) -> bool {
        self.peers.get(peer.index()).is_some_and(Option::is_some)
    }

    fn peer(&self, rank: Rank) -> &DynImport {
        self.peers[rank.index()].as_ref().expect("what steps name has been imported")
    }
}

/// All buffers of one operation on one fabric.
pub(crate) struct Windows {
    /// Empty if the operation runs in place.
    pub(crate) inputs: Vec<Window>,
    pub(crate) outputs: Vec<Window>,
    pub(crate) flags: Window,
    /// The flags between the tiers, if the plan has lanes on two.
    pub(crate) crossing: Option<Window>,
    /// The division of outputs and flags among starts, equal on all ranks.
    pub(crate) turns: Turns,
    /// Regions of the other fabric that are registered here. Dropped last.
    pub(crate) keep: Vec<Kept>,
}

impl Windows {
    fn window(&self, buffer: BufferId) -> &Window {
        match buffer {
            BufferId::Input(number) => &self.inputs[number as usize],
            BufferId::Output(number) => &self.outputs[number as usize],
            BufferId::Flags => &self.flags,
            BufferId::Crossing => {
                self.crossing.as_ref().expect("lanes of two tiers have flags between them")
            }
        }
    }

    /// Returns bytes of this rank in a start.
    pub(crate) fn local(&self, spot: Spot, start: Start) -> At<'_, DynRegion> {
        let region = self.window(spot.buffer).local();
        At { region, offset: self.turns.offset(spot, start) }
    }

    /// Returns the same bytes of `peer`.
    pub(crate) fn remote(&self, peer: Rank, spot: Spot, start: Start) -> At<'_, DynImport> {
        let region = self.window(spot.buffer).peer(peer);
        At { region, offset: self.turns.offset(spot, start) }
    }

    /// Returns a flag of this rank in a start.
    pub(crate) fn own_flag(&self, spot: FlagSpot, start: Start) -> Flag<'_, DynRegion> {
        let region = self.window(spot.buffer()).local();
        Flag { region, word: self.turns.flag_word(spot.word, start) }
    }

    /// Returns the same flag of `peer`.
    pub(crate) fn flag_of(&self, peer: Rank, spot: FlagSpot, start: Start) -> Flag<'_, DynImport> {
        let region = self.window(spot.buffer()).peer(peer);
        Flag { region, word: self.turns.flag_word(spot.word, start) }
    }

    /// Returns the local region of a buffer.
    pub(crate) fn region(&self, buffer: BufferId) -> &DynRegion {
        self.window(buffer).local()
    }

    /// Returns the offset of the output of a start.
    pub(crate) fn output_offset(&self, start: Start) -> u64 {
        self.turns.output_offset(start)
    }

    /// Returns the flag of a start, if the host can read it.
    pub(crate) fn flag(&self, spot: FlagSpot, start: Start) -> Option<&AtomicU64> {
        let word = usize::try_from(self.turns.flag_word(spot.word, start)).ok()?;
        self.region(spot.buffer()).flags()?.get(word)
    }

    /// Returns the value of the flag of a start, even if the host cannot load it; slow then.
    pub(crate) fn flag_value(&self, spot: FlagSpot, start: Start) -> Option<u64> {
        self.region(spot.buffer()).flag_value(self.turns.flag_word(spot.word, start))
    }
}

/// The buffers of an operation on both tiers.
#[derive(Clone)]
pub(crate) struct Views {
    pub(crate) local: Arc<Windows>,
    pub(crate) network: Option<Arc<Windows>>,
}

impl Views {
    /// Returns the regions that the two fabrics keep for each other.
    pub(crate) fn kept(&self) -> impl Iterator<Item = &Kept> {
        let network = self.network.iter().flat_map(|network| &network.keep);
        self.local.keep.iter().chain(network)
    }

    /// Returns the buffers of a tier on which the plan has lanes.
    pub(crate) fn of(&self, tier: Tier) -> Option<&Windows> {
        match tier {
            Tier::Local => Some(&self.local),
            Tier::Network => self.network.as_deref(),
        }
    }
}
