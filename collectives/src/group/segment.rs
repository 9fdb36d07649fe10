//! Registers memory with both fabrics of a group, and imports the same memory of the other ranks.
//!
//! With two fabrics, one registers the memory that the other has allocated.

use peerlane_hal::{
    Deadline, DynFabric, DynKey, DynRegion, ErrorKind, Fabric, Link, PeerMemory, Rank, Region,
    RemoteKey, Role, Space,
};

use crate::error::Error;
use crate::group::agreement::{Offer, agree, decode, encode};
use crate::group::runtime::Runtime;
use crate::plan::Tier;
use crate::run::buffers::RankRegions;
use crate::topology::Topology;

/// The fabrics of a group and the ranks that each of them reaches.
#[derive(Clone, Copy)]
pub(in crate::group) struct Fabrics<'g> {
    pub(in crate::group) local: &'g DynFabric,
    pub(in crate::group) network: Option<&'g DynFabric>,
    pub(in crate::group) topology: &'g Topology,
    /// The number of this rank in the group.
    pub(in crate::group) rank: Rank,
    /// The number of each rank in the fabrics.
    pub(in crate::group) fabric_ranks: &'g [Rank],
}

impl<'g> Fabrics<'g> {
    /// Returns the link to a rank of the group, if the fabric of `tier` connects it.
    pub(in crate::group) fn link(self, tier: Tier, peer: Rank) -> Option<Link> {
        let link = self.of(tier).ok()?.link(self.fabric_ranks[peer.index()])?;
        Some(Link { peer, ..link })
    }

    pub(in crate::group) fn of(self, tier: Tier) -> Result<&'g DynFabric, Error> {
        match (tier, self.network) {
            (Tier::Local, _) => Ok(self.local),
            (Tier::Network, Some(network)) => Ok(network),
            (Tier::Network, None) => {
                let text = "the plan has network lanes, but the group has no network fabric; open \
                            it with `open_tiers`";
                Err(Error::new(ErrorKind::Other, text))
            }
        }
    }
}

/// Returns whether the fabric of `tier` connects ranks `me` and `peer`. A single fabric connects all ranks. Of two, the
/// local one connects the ranks of a node, and the network the others; both connect a rank with itself.
pub(in crate::group) fn connects(
    topology: &Topology,
    is_tiered: bool,
    tier: Tier,
    (me, peer): (Rank, Rank),
) -> bool {
    let near = topology.node(peer) == topology.node(me);
    !is_tiered || peer == me || near == (tier == Tier::Local)
}

/// The remote keys of a segment, of the local fabric and of the network.
pub(in crate::group) type Keys = [Option<Vec<u8>>; 2];

/// Memory of every rank that one or both fabrics have registered.
#[derive(Clone, Default)]
pub(in crate::group) struct Segment {
    tiers: [Option<RankRegions>; 2],
    /// Memory that one fabric allocated stays registered while the other one uses it.
    keep: Vec<DynRegion>,
}

impl Segment {
    /// Creates a segment of memory that the fabric of `tier` has registered.
    pub(in crate::group) fn new(tier: Tier, region: DynRegion) -> Self {
        let mut segment = Self::default();
        segment.tiers[tier as usize] = Some(RankRegions::new(region));
        segment
    }

    /// Creates a segment of data, which all fabrics have registered.
    pub(in crate::group) fn of_data(
        fabrics: Fabrics<'_>,
        region: DynRegion,
        name: &str,
    ) -> Result<Self, Error> {
        let mut segment = Self::new(Tier::Local, region);
        if fabrics.network.is_some() {
            segment.register(Tier::Network, fabrics, Role::Data, name)?;
        }
        Ok(segment)
    }

    /// Allocates a segment of data.
    pub(in crate::group) fn allocate(
        fabrics: Fabrics<'_>,
        bytes: u64,
        name: &str,
    ) -> Result<Self, Error> {
        let region = fabrics.local.memory().allocate(bytes, Role::Data);
        let failed = |error| Error::of_fabric(format!("allocate {name}"), error);
        Self::of_data(fabrics, region.map_err(failed)?, name)
    }

    /// Registers the memory of this rank with the fabric of `tier`, too.
    pub(in crate::group) fn register(
        &mut self,
        tier: Tier,
        fabrics: Fabrics<'_>,
        role: Role,
        name: &str,
    ) -> Result<(), Error> {
        let other = if tier == Tier::Local { Tier::Network } else { Tier::Local };
        let fabric = fabrics.of(tier)?;
        let is_foreign = fabric.backend() != fabrics.of(other)?.backend();
        let region = self.of(other).expect("another fabric has registered it").local().clone();
        let what = || format!("register {name} with the fabric {}", fabric.backend());
        if role == Role::Flags && is_foreign && region.space() != Space::Host {
            let text = format!(
                "cannot {}: the flags are in device memory, expected host memory, because fabrics \
                 of two backends access them",
                what()
            );
            return Err(Error::new(ErrorKind::Mismatch, text));
        }
        // SAFETY: `keep` keeps the memory until this registration is dropped. The plan ensures that peers no longer use it by
        // then, or `GroupWork::quarantine` after an abort.
        let registered = unsafe { fabric.memory().adopt(&region, role) };
        let registered = registered.map_err(|error| Error::of_fabric(what(), error))?;
        self.tiers[tier as usize] = Some(RankRegions::new(registered));
        self.keep.push(region);
        Ok(())
    }

    pub(in crate::group) fn of(&self, tier: Tier) -> Option<&RankRegions> {
        self.tiers[tier as usize].as_ref()
    }

    /// Ends the imports from peers, and returns the memory of this rank, which stays registered.
    pub(in crate::group) fn without_imports(self) -> Self {
        let local = |regions: RankRegions| RankRegions::new(regions.local().clone());
        Self { tiers: self.tiers.map(|regions| regions.map(local)), keep: self.keep }
    }

    pub(in crate::group) fn keep(&self) -> &[DynRegion] {
        &self.keep
    }

    /// Returns the same bytes of the segment on every rank.
    pub(in crate::group) fn part(&self, offset: u64, bytes: u64) -> Self {
        let part = |regions: &Option<RankRegions>| {
            regions.as_ref().map(|regions| regions.part(offset, bytes))
        };
        Self { tiers: self.tiers.each_ref().map(part), keep: self.keep.clone() }
    }

    /// Returns the segment for a subgroup: rank i of the subgroup is `ranks[i]` of this group.
    pub(in crate::group) fn regroup(&self, ranks: &[Rank]) -> Self {
        let regroup =
            |regions: &Option<RankRegions>| regions.as_ref().map(|regions| regions.regroup(ranks));
        Self { tiers: self.tiers.each_ref().map(regroup), keep: self.keep.clone() }
    }

    /// Uses the memory of another segment as that of this rank.
    pub(in crate::group) fn set_local(&mut self, other: &Self) {
        for (tier, regions) in self.tiers.iter_mut().zip(&other.tiers) {
            if let Some(regions) = regions {
                tier.get_or_insert_default().set_local(regions);
            }
        }
        self.keep.extend(other.keep.iter().cloned());
    }

    /// Uses the imported memory of another segment as that of `peer`.
    pub(in crate::group) fn set_peer(&mut self, peer: Rank, other: &Self) {
        for (tier, regions) in self.tiers.iter_mut().zip(&other.tiers) {
            if let Some(regions) = regions {
                tier.get_or_insert_default().set_peer(peer, regions);
            }
        }
    }

    pub(in crate::group) fn keys(&self, fabrics: Fabrics<'_>, name: &str) -> Result<Keys, Error> {
        let mut keys = Keys::default();
        for tier in [Tier::Local, Tier::Network] {
            let Some(regions) = self.of(tier) else { continue };
            let key = fabrics.of(tier)?.memory().export(regions.local());
            let key = key.map_err(|error| Error::of_fabric(format!("export {name}"), error))?;
            keys[tier as usize] = Some(key.encode());
        }
        Ok(keys)
    }

    /// Imports the memory of `peer`, which must have at least `bytes` bytes. Does nothing if it has been imported.
    pub(in crate::group) fn import(
        &mut self,
        fabrics: Fabrics<'_>,
        tier: Tier,
        (peer, key): (Rank, Option<&Vec<u8>>),
        (name, bytes): (&str, u64),
        deadline: Deadline,
    ) -> Result<(), Error> {
        let regions = self.tiers[tier as usize].get_or_insert_default();
        if regions.has(peer) {
            return Ok(());
        }
        let number = fabrics.fabric_ranks[peer.index()];
        let what = match number == peer {
            true => format!("import {name} of rank {peer}"),
            false => format!("import {name} of rank {peer}, rank {number} of its fabric"),
        };
        let failed = |error: Error| error.with_other_side(peer);
        let memory = fabrics.of(tier)?.memory();
        let key = if peer == fabrics.rank {
            // Some memory is exported to nobody else.
            let key = memory.export(regions.local());
            key.map_err(|error| failed(Error::of_fabric(&what, error)))?
        } else {
            let Some(key) = key else {
                let text = format!("cannot {what}: rank {peer} did not send its remote key");
                return Err(failed(Error::new(ErrorKind::Mismatch, text)));
            };
            DynKey::decode(key).map_err(|error| failed(Error::of_backend(&what, error)))?
        };
        if key.region_bytes() < bytes {
            let found = key.region_bytes();
            let text = format!(
                "cannot {what}: the buffer has {found} bytes, expected at least {bytes} bytes"
            );
            return Err(failed(Error::new(ErrorKind::Mismatch, text)));
        }
        let region = memory.import(number, &key, deadline);
        let region = region.map_err(|error| failed(Error::of_fabric(&what, error)))?;
        regions.import(peer, region);
        Ok(())
    }
}

/// Exchanges the remote keys of segments with all ranks, and imports their memory. Collective.
///
/// If `mine` is an error, all ranks return it.
pub(in crate::group) fn exchange(
    runtime: &Runtime,
    fabrics: Fabrics<'_>,
    label: &str,
    mine: Result<(Offer, Vec<Segment>), Error>,
    deadline: Deadline,
) -> Result<Vec<Segment>, Error> {
    let offered = mine.and_then(|(offer, segments)| {
        let keys = segments.iter().map(|segment| segment.keys(fabrics, label));
        let keys: Vec<Keys> = keys.collect::<Result<_, Error>>()?;
        Ok((offer.blob(encode(&keys)), segments))
    });
    let (offer, mut segments) = match offered {
        Ok((offer, segments)) => (Ok(offer), Ok(segments)),
        Err(error) => (Err(error.clone()), Err(error)),
    };
    let offers = agree(runtime, label, offer, deadline)?;
    let imported = match &mut segments {
        Ok(segments) => import_all(segments, fabrics, label, &offers, deadline),
        Err(error) => Err(error.clone()),
    };
    let vote = imported.as_ref().map(|()| Offer::default()).map_err(Error::clone);
    // After an error the memory lives until all ranks know of it: they may be importing it.
    agree(runtime, &format!("{label}, import"), vote, deadline)?;
    imported?;
    segments
}

fn import_all(
    segments: &mut [Segment],
    fabrics: Fabrics<'_>,
    label: &str,
    offers: &[Offer],
    deadline: Deadline,
) -> Result<(), Error> {
    for (peer, offer) in Rank::all(offers.len()).zip(offers) {
        let keys: Vec<Keys> = decode("remote keys", offer, peer, 0)?;
        for (index, segment) in segments.iter_mut().enumerate() {
            for tier in [Tier::Local, Tier::Network] {
                let Some(regions) = segment.of(tier) else { continue };
                let ranks = (fabrics.rank, peer);
                if !connects(fabrics.topology, fabrics.network.is_some(), tier, ranks) {
                    continue;
                }
                let bytes = regions.local().bytes();
                let key = keys.get(index).and_then(|keys| keys[tier as usize].as_ref());
                segment.import(fabrics, tier, (peer, key), (label, bytes), deadline)?;
            }
        }
    }
    Ok(())
}
