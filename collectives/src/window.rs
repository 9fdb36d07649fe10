//! The buffers of one operation on one fabric, registered here and imported from peers.
//!
//! A bound step names bytes by (rank, buffer, offset); windows are what these names mean on one
//! fabric. Two fabrics over the same bytes share no type: each has its own registrations and imports,
//! and the names are all that they have in common.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use peerlane_hal::{At, Flag, PeerMemory, Rank, Region, Role};
use serde::{Deserialize, Serialize};

use crate::plan::Tier;
use crate::run::turns::{Start, Turns};

/// Memory that lives as long as this is held.
pub(crate) type Kept = Arc<dyn Any + Send + Sync>;

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

/// One region of every rank: the own one, and those of peers that steps name.
pub(crate) struct Window<M: PeerMemory> {
    /// Peers may have more buffers than this rank.
    local: Option<Arc<M::Local>>,
    /// By rank, as far as anything is imported; oneself is a peer too.
    peers: Vec<Option<Arc<M::Remote>>>,
}

impl<M: PeerMemory> Clone for Window<M> {
    fn clone(&self) -> Self {
        Self { local: self.local.clone(), peers: self.peers.clone() }
    }
}

impl<M: PeerMemory> Window<M> {
    pub(crate) fn new(local: M::Local) -> Self {
        Self { local: Some(Arc::new(local)), peers: Vec::new() }
    }

    /// Of a buffer that only peers have.
    pub(crate) fn of_peers() -> Self {
        Self { local: None, peers: Vec::new() }
    }

    /// The own region.
    pub(crate) fn local(&self) -> &Arc<M::Local> {
        self.local.as_ref().expect("a buffer is made before it is used")
    }

    /// Enters the region that was imported from `peer`.
    pub(crate) fn enter(&mut self, peer: Rank, region: M::Remote) {
        if self.peers.len() <= peer.index() {
            self.peers.resize_with(peer.index() + 1, || None);
        }
        self.peers[peer.index()] = Some(Arc::new(region));
    }

    /// Whether the region of `peer` has been imported.
    pub(crate) fn has(&self, peer: Rank) -> bool {
        self.peers.get(peer.index()).is_some_and(Option::is_some)
    }

    fn peer(&self, rank: Rank) -> &M::Remote {
        self.peers[rank.index()].as_ref().expect("what steps name has been imported")
    }
}

/// All windows of one operation on one fabric.
pub(crate) struct Windows<M: PeerMemory> {
    /// Empty in place.
    pub(crate) inputs: Vec<Window<M>>,
    pub(crate) outputs: Vec<Window<M>>,
    pub(crate) flags: Window<M>,
    /// Where lanes are on two tiers.
    pub(crate) crossing: Option<Window<M>>,
    /// How outputs and flags are divided among starts; alike on all ranks.
    pub(crate) turns: Turns,
    /// What the other fabric allocated and this one registered. Dropped last.
    pub(crate) keep: Vec<Kept>,
}

impl<M: PeerMemory> Windows<M> {
    fn window(&self, buffer: BufferId) -> &Window<M> {
        match buffer {
            BufferId::Input(number) => &self.inputs[number as usize],
            BufferId::Output(number) => &self.outputs[number as usize],
            BufferId::Flags => &self.flags,
            BufferId::Crossing => {
                self.crossing.as_ref().expect("lanes of two tiers have flags between them")
            }
        }
    }

    /// Bytes of this rank, in a start.
    pub(crate) fn local(&self, spot: Spot, start: Start) -> At<'_, M::Local> {
        let region = &**self.window(spot.buffer).local();
        At { region, offset: self.turns.offset(spot, start) }
    }

    /// The same bytes of `peer`.
    pub(crate) fn remote(&self, peer: Rank, spot: Spot, start: Start) -> At<'_, M::Remote> {
        let region = self.window(spot.buffer).peer(peer);
        At { region, offset: self.turns.offset(spot, start) }
    }

    /// A flag of this rank, in a start.
    pub(crate) fn own_flag(&self, spot: FlagSpot, start: Start) -> Flag<'_, M::Local> {
        let region = &**self.window(spot.buffer()).local();
        Flag { region, word: self.turns.flag_word(spot.word, start) }
    }

    /// The same flag of `peer`.
    pub(crate) fn flag_of(&self, peer: Rank, spot: FlagSpot, start: Start) -> Flag<'_, M::Remote> {
        let region = self.window(spot.buffer()).peer(peer);
        Flag { region, word: self.turns.flag_word(spot.word, start) }
    }
}

/// The host's view of an operation's windows, whatever fabric they are on.
pub(crate) trait HostView: Send + Sync {
    /// The own region of a buffer.
    fn region(&self, buffer: BufferId) -> &dyn Region;

    fn turns(&self) -> Turns;

    /// The memory that another fabric allocated and this one registered.
    fn kept(&self) -> &[Kept];

    /// Where the output of a start begins.
    fn output_offset(&self, start: Start) -> u64 {
        self.turns().output_offset(start)
    }

    /// The flag of a start, where the host can read it.
    fn flag(&self, spot: FlagSpot, start: Start) -> Option<&AtomicU64> {
        let word = usize::try_from(self.turns().flag_word(spot.word, start)).ok()?;
        self.region(spot.buffer()).flags()?.get(word)
    }

    /// What the flag of a start holds, also where the host cannot read it; slow there.
    fn flag_value(&self, spot: FlagSpot, start: Start) -> Option<u64> {
        self.region(spot.buffer()).flag_value(self.turns().flag_word(spot.word, start))
    }
}

impl<M: PeerMemory> HostView for Windows<M> {
    fn region(&self, buffer: BufferId) -> &dyn Region {
        &**self.window(buffer).local()
    }

    fn turns(&self) -> Turns {
        self.turns
    }

    fn kept(&self) -> &[Kept] {
        &self.keep
    }
}

/// The views of both tiers.
#[derive(Clone)]
pub(crate) struct Views {
    pub(crate) local: Arc<dyn HostView>,
    pub(crate) network: Option<Arc<dyn HostView>>,
}

impl Views {
    /// See [`HostView::kept`].
    pub(crate) fn kept(&self) -> impl Iterator<Item = &Kept> {
        let network = self.network.iter().flat_map(|network| network.kept());
        self.local.kept().iter().chain(network)
    }

    /// The view of a tier on which the plan has lanes.
    pub(crate) fn of(&self, tier: Tier) -> Option<&dyn HostView> {
        match tier {
            Tier::Local => Some(&*self.local),
            Tier::Network => self.network.as_deref(),
        }
    }
}
