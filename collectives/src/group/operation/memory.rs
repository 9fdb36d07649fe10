//! Collects the memory of an operation: the caller's buffers, windows, and blocks of the group's
//! heap.
//!
//! Every rank tells where each of its buffers is. Nothing else is exchanged for windows and the
//! heap, because their remote keys are known. Buffers of the caller are exported, and imported by
//! the ranks whose plans access them.
//!
//! Blocks of the heap have one size on all ranks. Where ranks need very different sizes, as for the
//! output of a gather, each rank allocates a buffer of its own instead.

use std::collections::{BTreeMap, BTreeSet};

use peerlane_hal::{Command, Deadline, DynRegion, ErrorKind, Rank, Region, Space};
use serde::{Deserialize, Serialize};

use super::plan::OperationPlan;
use super::request::Target;
use crate::error::Error;
use crate::group::heap::{Allocation, Demand, FlagLanes, Heap, Pool, WrittenBytes};
use crate::group::segment::{Fabrics, Keys, Segment};
use crate::group::stats::{Held, MemoryKind};
use crate::plan::Tier;
use crate::run::buffers::{BufferId, Digest, FlagRegions, OperationBuffers, RankRegions};
use crate::run::program::is_tiered;

/// Blocks of the heap may be this large on ranks that need less.
const UNEQUAL_BYTES_MAX: u64 = 64 << 10;

/// Says where a buffer of one rank is, as the rank tells it to the others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Origin {
    Heap,
    /// The number of the window.
    Window(u64),
    /// Memory of this buffer alone, with its remote keys.
    Own(Keys),
    /// Memory that no peer accesses.
    Private,
}

pub(super) type Origins = BTreeMap<BufferId, Origin>;

/// The memory of an operation while the operation is prepared.
#[derive(Default)]
pub(super) struct Memory {
    /// The buffers of this rank, except those of the heap.
    sources: BTreeMap<BufferId, Segment>,
    /// The buffers among them that Peerlane has allocated.
    allocated: BTreeSet<BufferId>,
    /// The blocks of the heap for buffers, also for those that only other ranks have there.
    blocks: BTreeMap<BufferId, Segment>,
    pub(super) origins: Origins,
    buffers: BTreeMap<BufferId, Segment>,
    /// The flags of eager starts, and those of captured ones.
    flags: [BTreeMap<FlagLanes, Segment>; 2],
    /// The blocks that the operation needs from the heap, the same on all ranks: first those of
    /// `heap_buffers`, then flags.
    demands: Vec<Demand>,
    /// The buffers that some rank has in the heap.
    heap_buffers: BTreeSet<BufferId>,
    /// Other operations that write these bytes can have the same inbox.
    written: Option<WrittenBytes>,
    allocation: Option<Allocation>,
}

impl Memory {
    /// Takes over the buffers that the caller has supplied, and allocates those that cannot be
    /// blocks of the heap.
    pub(super) fn new(operation: &mut OperationPlan, fabrics: Fabrics<'_>) -> Result<Self, Error> {
        let outputs = std::mem::take(&mut operation.spec.output_buffers);
        let inputs = std::mem::take(&mut operation.spec.inputs);
        let mut outputs = outputs.into_iter();
        let mut inputs = inputs.into_iter();
        // A list need not use all of a buffer.
        let exact = !matches!(operation.spec.target, Target::List(_));

        // Only a plan with lanes on the network accesses buffers over it.
        let network = fabrics.network.filter(|_| is_tiered(&operation.plan));
        let fabrics = Fabrics { network, ..fabrics };

        let gets = operation.gets;
        let mut sources = BTreeMap::new();
        let mut origins = Origins::new();
        let mut allocated = BTreeSet::new();
        for buffer in operation.request.buffers() {
            let (given, exact) = match buffer {
                BufferId::Output(_) => (outputs.next(), exact),
                BufferId::Input(_) => (inputs.next(), true),
                BufferId::Inbox => (None, true),
            };

            if let Some(window) = operation.request.window(buffer) {
                origins.insert(buffer, Origin::Window(window.number));
                sources.insert(buffer, window.segment.clone());
                continue;
            }

            let name = buffer.to_string();
            let bytes = operation.own_bytes(buffer);
            let segment = match given {
                Some(region) => {
                    let region = checked(region, buffer, bytes, exact)?;
                    Segment::of_data(fabrics, region, &name)?
                }
                None if exact && has_similar_bytes(operation, buffer) => {
                    origins.insert(buffer, Origin::Heap);
                    continue;
                }
                None => {
                    allocated.insert(buffer);
                    Segment::allocate(fabrics, bytes, &name)?
                }
            };

            // Only a plan with gets reads the input of a peer.
            let is_written = !matches!(buffer, BufferId::Input(_));
            let origin = match gets || is_written {
                true => Origin::Own(segment.keys(fabrics, &name)?),
                false => Origin::Private,
            };
            origins.insert(buffer, origin);
            sources.insert(buffer, segment);
        }

        let (blocks, buffers, flags, demands, heap_buffers) = Default::default();
        let (written, allocation) = (None, None);
        Ok(Self {
            sources,
            allocated,
            blocks,
            origins,
            buffers,
            flags,
            demands,
            heap_buffers,
            written,
            allocation,
        })
    }

    /// Records the blocks that the operation needs from the heap.
    ///
    /// `polled` tells for each tier whether some rank must poll its flags.
    pub(super) fn plan_blocks(
        &mut self,
        operation: &OperationPlan,
        origins: &[Origins],
        polled: [bool; 2],
    ) {
        let in_heap =
            |(buffer, origin): (&BufferId, &Origin)| (*origin == Origin::Heap).then_some(*buffer);
        self.heap_buffers = origins.iter().flatten().filter_map(in_heap).collect();

        // Blocks have one size on all ranks, so the rank that needs the most decides.
        for &buffer in &self.heap_buffers {
            let wants = |rank: &Rank| origins[rank.index()].get(&buffer) == Some(&Origin::Heap);
            let ranks = Rank::all(origins.len()).filter(wants);
            let bytes = ranks.map(|rank| operation.block_bytes(rank, buffer)).max();
            let pool = if buffer == BufferId::Inbox { Pool::Inbox } else { Pool::Data };
            self.demands.push((pool, bytes.unwrap_or(0)));
        }

        // Contributions of other operations would look like tagged data.
        self.written = written_bytes(operation).filter(|_| operation.fused.is_none());

        let network = [FlagLanes::Of(Tier::Network), FlagLanes::Across];
        let network = network.into_iter().filter(|_| is_tiered(&operation.plan));
        for lanes in [FlagLanes::Of(Tier::Local)].into_iter().chain(network) {
            let polled = polled[usize::from(lanes != FlagLanes::Of(Tier::Local))];
            let pool = |captured| Pool::Flags { lanes, polled, captured };

            self.demands.push((pool(false), operation.buffering.flag_bytes()));
            let captured = operation.buffering.captured_flag_bytes();
            self.demands.extend(captured.map(|bytes| (pool(true), bytes)));
        }
    }

    /// Takes the planned blocks from the heap, unless it has them; returns the demands that do not
    /// fit.
    pub(super) fn allocate(&mut self, heap: &mut Heap) -> Vec<Demand> {
        if self.allocation.is_some() {
            return Vec::new();
        }

        let (allocation, blocks) = match heap.allocate(&self.demands, self.written.as_ref()) {
            Ok(allocated) => allocated,
            Err(missing) => return missing,
        };

        // The blocks of buffers come in the order of `heap_buffers`, as `plan_blocks` demands them.
        let mut buffers = self.heap_buffers.iter();
        for (&(pool, _), block) in self.demands.iter().zip(blocks) {
            match pool {
                Pool::Data | Pool::Inbox => {
                    let buffer = *buffers.next().expect("one demand for each buffer");
                    self.blocks.insert(buffer, block);
                }
                Pool::Flags { lanes, captured, .. } => {
                    self.flags[usize::from(captured)].insert(lanes, block);
                }
            }
        }

        self.allocation = Some(allocation);
        Vec::new()
    }

    /// Returns the bytes of a window by which the operation can share an inbox with others.
    pub(super) fn written(&self) -> Option<&WrittenBytes> {
        self.written.as_ref()
    }

    /// Returns the size of the inbox that the operation takes from the heap.
    pub(super) fn heap_inbox_bytes(&self) -> u64 {
        let inbox = self.demands.iter().find(|(pool, _)| *pool == Pool::Inbox);
        inbox.map_or(0, |(_, bytes)| *bytes)
    }

    /// Returns the memory for another plan of the same operation. Plans of one operation share
    /// buffers and flags, and have the same names for them.
    pub(super) fn shared(&self) -> Self {
        Self {
            sources: self.sources.clone(),
            blocks: self.blocks.clone(),
            origins: self.origins.clone(),
            buffers: self.buffers.clone(),
            flags: self.flags.clone(),
            ..Self::default()
        }
    }

    /// Returns the memory of this rank that Peerlane has allocated for the operation, by kind.
    pub(super) fn held(&self) -> Vec<Held> {
        let blocks = self.blocks.iter().map(|(buffer, block)| {
            let kind = match buffer {
                BufferId::Inbox => MemoryKind::Inboxes,
                BufferId::Input(_) | BufferId::Output(_) => MemoryKind::Heap,
            };
            (kind, block)
        });
        let flags = self.flags.iter().flat_map(BTreeMap::values);
        let flags = flags.map(|flags| (MemoryKind::Flags, flags));
        let allocated = self.sources.iter().filter(|(buffer, _)| self.allocated.contains(buffer));
        let allocated = allocated.map(|(_, segment)| (MemoryKind::Buffers, segment));

        let held = blocks.chain(flags).chain(allocated).filter_map(|(kind, segment)| {
            let (region, bytes) = segment.of(Tier::Local).or(segment.of(Tier::Network))?.memory();
            Some(Held { kind, space: region.space(), bytes: bytes.end - bytes.start })
        });
        held.collect()
    }

    /// Returns whether a buffer of this rank is in memory of the host.
    pub(super) fn is_on_host(&self) -> bool {
        let buffers = self.sources.values().chain(self.blocks.values());
        let regions = buffers.filter_map(|buffer| buffer.of(Tier::Local));
        regions.map(|regions| regions.local().space()).any(|space| space == Space::Host)
    }

    /// Returns the blocks of the heap, which the operation keeps until its last start is complete.
    pub(super) fn take_allocation(&mut self) -> Option<Allocation> {
        self.allocation.take()
    }

    /// Finds or imports the buffers of peers that `commands` name, and completes the memory of this
    /// rank.
    pub(super) fn import<'s>(
        &mut self,
        operation: &OperationPlan,
        fabrics: Fabrics<'_>,
        commands: impl Iterator<Item = (Tier, &'s Command)>,
        origins: &[Origins],
        deadline: Deadline,
    ) -> Result<(), Error> {
        for (buffer, origin) in &self.origins {
            let sources = if *origin == Origin::Heap { &self.blocks } else { &self.sources };
            let source = &sources[buffer];
            self.buffers.entry(*buffer).or_default().set_local(source);
        }

        let named: BTreeSet<_> = commands
            .filter_map(|(tier, command)| match *command {
                Command::Copy { peer, remote, .. } => {
                    Some((tier, BufferId::of_region(remote.region)?, peer))
                }
                Command::Reduce { .. } | Command::Signal { .. } | Command::Wait { .. } => None,
            })
            .collect();

        for (tier, buffer, peer) in named {
            let target = self.buffers.entry(buffer).or_default();
            let name = buffer.to_string();

            match origins[peer.index()].get(&buffer) {
                Some(Origin::Heap) => target.set_peer(peer, &self.blocks[&buffer]),
                // `check_windows` has passed, so it is the same window as on this rank.
                Some(Origin::Window(_)) => target.set_peer(peer, &self.sources[&buffer]),
                origin => {
                    let key = match origin {
                        Some(Origin::Own(keys)) => keys[tier as usize].as_ref(),
                        _ => None,
                    };
                    let bytes = operation.peer_bytes(peer, buffer);
                    target.import(fabrics, tier, (peer, key), (&name, bytes), deadline)?;
                }
            }
        }
        Ok(())
    }

    /// Returns the buffers and flags of the operation on one fabric.
    pub(super) fn buffers_on_tier(
        &self,
        tier: Tier,
        operation: &OperationPlan,
        epoch_base: u64,
    ) -> OperationBuffers {
        let keep = self.buffers.values().flat_map(Segment::keep).cloned();

        OperationBuffers {
            inputs: self.numbered(tier, BufferId::Input),
            outputs: self.numbered(tier, BufferId::Output),
            inbox: self.buffer(tier, BufferId::Inbox).unwrap_or_default(),
            flags: self.flags(tier, FlagLanes::Of(tier)).expect("an operation has flags"),
            cross_tier_flags: self.flags(tier, FlagLanes::Across),
            buffering: operation.buffering,
            epoch_base,
            digest: operation
                .spec
                .resizable
                .then(|| Digest::new(operation.digest_bits, operation.pairs())),
            _keep: keep.collect(),
        }
    }

    fn flags(&self, tier: Tier, lanes: FlagLanes) -> Option<FlagRegions> {
        let [eager, captured] = &self.flags;
        let of = |flags: &BTreeMap<FlagLanes, Segment>| flags.get(&lanes)?.of(tier).cloned();
        Some(FlagRegions { eager: of(eager)?, captured: of(captured) })
    }

    /// Returns the buffers from number 0; numbers that this rank neither has nor accesses are
    /// empty.
    fn numbered(&self, tier: Tier, name: fn(u32) -> BufferId) -> Vec<RankRegions> {
        let last = self.buffers.range(name(0)..=name(u32::MAX)).next_back();
        let count = match last {
            Some((BufferId::Input(last) | BufferId::Output(last), _)) => last + 1,
            Some((BufferId::Inbox, _)) | None => 0,
        };
        (0..count).map(|number| self.buffer(tier, name(number)).unwrap_or_default()).collect()
    }

    fn buffer(&self, tier: Tier, name: BufferId) -> Option<RankRegions> {
        self.buffers.get(&name)?.of(tier).cloned()
    }

    /// Returns whether the host can read the flags of captured starts.
    pub(super) fn has_host_flags(&self, tier: Tier, crosses_tiers: bool) -> bool {
        let lanes = if crosses_tiers { FlagLanes::Across } else { FlagLanes::Of(tier) };
        let flags = self.flags(tier, lanes).and_then(|flags| flags.captured);
        flags.is_some_and(|flags| flags.local().flags().is_some())
    }
}

/// Checks that ranks that read the inputs of their peers all have the same window, if one has its
/// input in a window.
///
/// All ranks return the same error. The output is compared with the description of the operation.
pub(super) fn check_windows(
    name: &str,
    operation: &OperationPlan,
    origins: &[Origins],
) -> Result<(), Error> {
    let place = |origins: &Origins| match origins.get(&BufferId::INPUT) {
        Some(Origin::Window(number)) => format!("in window {number}"),
        _ => "in no window".to_owned(),
    };
    if !operation.gets {
        return Ok(());
    }

    let places: Vec<_> = origins.iter().map(place).collect();
    let Some(other) = places.iter().position(|place| *place != places[0]) else { return Ok(()) };

    let (rank, algorithm) = (Rank::at(other), operation.plan.algorithm);
    let text = format!(
        "{name}: ranks disagree: the input is {} on rank {rank}, {} on rank 0; {algorithm} reads the \
         inputs of all ranks",
        places[other], places[0]
    );
    Err(Error::new(ErrorKind::Mismatch, text).with_peer(rank))
}

/// Returns the bytes of a window that each start of the operation writes on every rank, if all
/// starts write the same ones.
///
/// With two outputs in turn, peers may put into the inbox of a rank that has not entered the start.
fn written_bytes(operation: &OperationPlan) -> Option<WrittenBytes> {
    let window = operation.request.window(BufferId::OUTPUT)?;
    let Target::Window(_, begin) = &operation.spec.target else { return None };
    if operation.spec.resizable || operation.buffering.outputs() > 1 {
        return None;
    }

    let begin = (begin * operation.spec.dtype.bytes()) as u64;
    let lengths = Rank::all(operation.layout.ranks());
    let least = lengths.map(|rank| operation.layout.output_bytes(rank)).min()?;
    (least > 0).then(|| WrittenBytes { window: window.number, bytes: begin..begin + least })
}

/// Returns whether all ranks need a buffer of a similar size, so that one size for all wastes
/// little.
fn has_similar_bytes(operation: &OperationPlan, buffer: BufferId) -> bool {
    let bytes = Rank::all(operation.layout.ranks()).map(|rank| match buffer {
        BufferId::Input(_) => operation.layout.input_bytes(rank),
        BufferId::Output(_) => operation.layout.output_bytes(rank),
        BufferId::Inbox => operation.inbox_bytes(rank),
    });

    let (least, most) =
        bytes.fold((u64::MAX, 0), |(least, most), bytes| (least.min(bytes), most.max(bytes)));
    most <= UNEQUAL_BYTES_MAX || least >= most / 2
}

/// Checks the length of a region that the caller supplies, and returns the region.
///
/// The region may be longer than `bytes` unless `exact` is set.
fn checked(
    region: DynRegion,
    buffer: BufferId,
    bytes: u64,
    exact: bool,
) -> Result<DynRegion, Error> {
    if region.bytes() < bytes || (exact && region.bytes() != bytes) {
        let least = if exact { "" } else { "at least " };
        let text = format!("{buffer} has {} bytes, expected {least}{bytes} bytes", region.bytes());
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    Ok(region)
}
