//! Compares the kinds of engines that the fabrics of all ranks offer, before any engine is created.
//!
//! Every rank sends its offers when the group opens. A kind counts if all ranks of a tier offer it,
//! with what all of them can do. Operations then choose among the kinds by predicted times, and
//! each rank creates engines of the chosen kind.

use peerlane_hal::{DynFabric, EngineOffer, ErrorKind, Fabric, FusedLimits, Rank};
use serde::{Deserialize, Serialize};

use super::agreement::{Offer, decode, encode};
use super::links;
use crate::cost::Links;
use crate::error::Error;
use crate::plan::Tier;

/// A kind of engines that all ranks of a group offer.
///
/// If a network connects the nodes, it is a pair of kinds: one inside nodes, and one of the
/// network.
#[derive(Clone, Debug)]
pub struct EngineKind {
    name: String,
    /// The names by which the fabrics of this rank know such engines, by tier.
    kinds: [Option<&'static str>; 2],
    /// Whether this rank polls flags for such engines, by tier.
    polls: [bool; 2],
    pub(super) common: CommonOffer,
    links: Links,
    is_measured: bool,
}

impl EngineKind {
    /// Returns the name of the kind, such as `streams`, or `streams + queue pairs` with a network.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the link rates from which times with such engines are predicted.
    pub fn links(&self) -> &Links {
        &self.links
    }

    /// Returns whether the link rates were measured with such engines, and not assumed.
    pub fn is_measured(&self) -> bool {
        self.is_measured
    }

    /// Returns whether engines of the kind support streams and graphs.
    pub fn has_streams(&self) -> bool {
        self.common.streams
    }

    /// Returns whether engines of the kind make fused starts.
    pub(super) fn is_fused(&self) -> bool {
        self.common.fused.is_some()
    }

    /// Returns whether a caller who names a kind means this one: by its whole name, or by that of
    /// one tier.
    pub(super) fn is_named(&self, name: &str) -> bool {
        self.name == name || self.name.split(SEPARATOR).any(|part| part == name)
    }

    /// Returns a kind of engines that can do everything, for tests of choices.
    #[cfg(test)]
    pub(super) fn of_links(name: &str, links: Links, is_measured: bool) -> Self {
        let caps = peerlane_hal::Caps { gets: true, ..peerlane_hal::Caps::new("test") };
        let common = CommonOffer::new(&EngineOffer::new(caps));
        let (kinds, polls) = ([None; 2], [false; 2]);
        Self { name: name.to_owned(), kinds, polls, common, links, is_measured }
    }

    pub(super) fn kind(&self, tier: Tier) -> Option<&'static str> {
        self.kinds[tier as usize]
    }

    pub(super) fn polls(&self, tier: Tier) -> bool {
        self.polls[tier as usize]
    }
}

const SEPARATOR: &str = " + ";

/// What the engines of one kind can do on all ranks, and what they cost.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct CommonOffer {
    kind: String,
    pub(super) streams: bool,
    pub(super) gets: bool,
    pub(super) flags_batched: bool,
    pub(super) signal_growth_max: u64,
    bytes_per_second: Option<f64>,
    start_seconds: f64,
    /// The time in seconds that a start takes longer in a graph.
    pub(super) captured_seconds: f64,
    pub(super) copy_blocks: u32,
    pub(super) resident_blocks_max: u32,
    /// The limits of fused starts, if engines of the kind make them.
    pub(super) fused: Option<CommonFused>,
}

/// What all ranks can do in fused starts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct CommonFused {
    pub(super) blocks_max: u32,
    pub(super) ranks_max: usize,
    /// Whether some ranks share a device.
    pub(super) shares_device: bool,
}

impl CommonFused {
    fn new(limits: FusedLimits) -> Self {
        let FusedLimits { blocks_max, ranks_max, shares_device, .. } = limits;
        Self { blocks_max, ranks_max, shares_device }
    }

    fn and(self, other: Self) -> Self {
        Self {
            blocks_max: self.blocks_max.min(other.blocks_max),
            ranks_max: self.ranks_max.min(other.ranks_max),
            shares_device: self.shares_device || other.shares_device,
        }
    }
}

impl CommonOffer {
    fn new(offer: &EngineOffer) -> Self {
        let EngineOffer { caps, streams, bytes_per_second, start_seconds, .. } = *offer;

        Self {
            kind: caps.kind.to_owned(),
            streams,
            gets: caps.gets,
            flags_batched: caps.flags_batched,
            signal_growth_max: caps.signal_growth_max,
            bytes_per_second,
            start_seconds,
            captured_seconds: offer.captured_seconds,
            copy_blocks: offer.copy_blocks,
            resident_blocks_max: offer.resident_blocks_max,
            fused: offer.fused.map(CommonFused::new),
        }
    }

    /// Returns what engines can do that do both.
    fn and(self, other: &Self) -> Self {
        let rates = [self.bytes_per_second, other.bytes_per_second];
        Self {
            kind: self.kind,
            streams: self.streams && other.streams,
            gets: self.gets && other.gets,
            flags_batched: self.flags_batched && other.flags_batched,
            signal_growth_max: self.signal_growth_max.min(other.signal_growth_max),
            bytes_per_second: rates.into_iter().flatten().min_by(f64::total_cmp),
            start_seconds: self.start_seconds.max(other.start_seconds),
            captured_seconds: self.captured_seconds.max(other.captured_seconds),
            copy_blocks: self.copy_blocks.max(other.copy_blocks),
            resident_blocks_max: self.resident_blocks_max.min(other.resident_blocks_max),
            fused: self.fused.zip(other.fused).map(|(one, other)| one.and(other)),
        }
    }
}

/// The offers of the fabrics of one rank, the local one first.
pub(super) struct OwnOffers([Vec<EngineOffer>; 2]);

impl OwnOffers {
    pub(super) fn new(local: &DynFabric, network: Option<&DynFabric>) -> Result<Self, Error> {
        let offers = |fabric: &DynFabric| {
            let offers = fabric.offers();
            offers.map_err(|error| Error::of_fabric("learn which engines there are", error))
        };
        let network = network.map(offers).transpose()?;
        Ok(Self([offers(local)?, network.unwrap_or_default()]))
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        encode(
            &self
                .0
                .each_ref()
                .map(|offers| offers.iter().map(CommonOffer::new).collect::<Vec<CommonOffer>>()),
        )
    }

    /// Returns the kinds that all ranks offer, in the order of preference of the lowest rank.
    ///
    /// The offers of each rank are the blob `index`. `links` are those of the fabrics, and `given`
    /// those that the caller has measured.
    pub(super) fn of_all(
        &self,
        offers: &[Offer],
        index: usize,
        links: &Links,
        given: &[Links],
    ) -> Result<Vec<EngineKind>, Error> {
        let mut of_tiers: [Vec<Vec<CommonOffer>>; 2] = Default::default();
        for (peer, offer) in Rank::all(offers.len()).zip(offers) {
            let [local, network]: [Vec<CommonOffer>; 2] =
                decode("offers of engines", offer, peer, index)?;
            of_tiers[0].push(local);
            of_tiers[1].push(network);
        }

        let [local, network] = of_tiers.map(|of_ranks| common(&of_ranks));
        let mut kinds = Vec::new();
        for local in &local {
            // Without a network there is one kind, which is that of the local fabric.
            let networks = network.iter().map(Some).chain(network.is_empty().then_some(None));
            kinds.extend(networks.map(|network| self.kind(local, network, links, given)));
        }

        match kinds.is_empty() {
            false => Ok(kinds),
            true => {
                let text = "the fabrics offer no engine, expected at least one kind";
                Err(Error::new(ErrorKind::Unavailable, text))
            }
        }
    }

    fn kind(
        &self,
        local: &CommonOffer,
        network: Option<&CommonOffer>,
        links: &Links,
        given: &[Links],
    ) -> EngineKind {
        // Where ranks share no kind, each has the one that it prefers.
        let own = |tier: Tier, common: &CommonOffer| {
            let offers = &self.0[tier as usize];
            offers.iter().find(|offer| offer.kind() == common.kind).or(offers.first())
        };
        let own =
            [own(Tier::Local, local), network.and_then(|network| own(Tier::Network, network))];

        let mut common = local.clone();
        let mut name = local.kind.clone();
        if let Some(network) = network {
            name = format!("{name}{SEPARATOR}{}", network.kind);
            common.gets &= network.gets;
            common.signal_growth_max = common.signal_growth_max.min(network.signal_growth_max);
        }

        // Links for any kind are those of copy engines, from which those of launches follow.
        let is_fused = local.fused.is_some();
        let measured = links_of(given, &name).filter(|links| !is_fused || !links.engine.is_empty());
        let links = match measured {
            Some(links) => links.clone(),
            None => {
                let mut links = links.clone();
                links::limit(&mut links.local, local.bytes_per_second);
                links.start_seconds += local.start_seconds;
                links
            }
        };

        EngineKind {
            name,
            kinds: own.map(|offer| offer.map(EngineOffer::kind)),
            polls: own.map(|offer| offer.is_some_and(|offer| !offer.caps.queued_wait)),
            common,
            links,
            is_measured: measured.is_some(),
        }
    }
}

/// Returns the links that were measured with engines of a kind, or else those for any kind.
pub(super) fn links_of<'l>(links: &'l [Links], engine: &str) -> Option<&'l Links> {
    let of = |engine: &str| links.iter().find(|links| links.engine == engine);
    of(engine).or_else(|| of(""))
}

/// Checks that a kind of engines that the caller names is one of those that all ranks offer.
pub(super) fn check_engine(name: &str, engines: &[EngineKind]) -> Result<(), Error> {
    if engines.iter().any(|kind| kind.is_named(name)) {
        return Ok(());
    }

    let known: Vec<_> = engines.iter().map(EngineKind::name).collect();
    let text =
        format!("engine is {name:?}, expected a kind that all ranks offer: {}", known.join(" or "));
    Err(Error::new(ErrorKind::InvalidArgument, text))
}

/// Returns the kinds that all ranks offer, or one kind for all if they have none in common.
fn common(of_ranks: &[Vec<CommonOffer>]) -> Vec<CommonOffer> {
    let Some((first, others)) = of_ranks.split_first() else { return Vec::new() };

    let shared = first.iter().filter_map(|offer| {
        others.iter().try_fold(offer.clone(), |all, offers| {
            Some(all.and(offers.iter().find(|other| other.kind == offer.kind)?))
        })
    });
    let shared: Vec<_> = shared.collect();
    if !shared.is_empty() {
        return shared;
    }

    let preferred: Vec<_> = of_ranks.iter().filter_map(|offers| offers.first()).collect();
    let mut names: Vec<_> = preferred.iter().map(|offer| &*offer.kind).collect();
    names.sort_unstable();
    names.dedup();

    let all = preferred.iter().copied().cloned().reduce(|all, other| all.and(&other));
    // Engines of different kinds order signals differently, and every kind can set them one by one.
    let all = all.map(|all| CommonOffer { kind: names.join(" or "), flags_batched: false, ..all });
    all.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use peerlane_hal::Caps;

    use super::*;

    const STREAMS: EngineOffer = EngineOffer {
        streams: true,
        bytes_per_second: Some(50e9),
        ..EngineOffer::new(Caps {
            queued_wait: true,
            gets: true,
            flags_batched: true,
            ..Caps::new("streams")
        })
    };
    const SDMA: EngineOffer = EngineOffer {
        start_seconds: 1e-4,
        ..EngineOffer::new(Caps { gets: true, polled: true, ..Caps::new("sdma") })
    };

    fn agreed(of_ranks: &[OwnOffers], given: &[Links]) -> Vec<EngineKind> {
        let offers = of_ranks.iter().map(|own| Offer::default().blob(own.encode()));
        let offers: Vec<_> = offers.collect();
        of_ranks[0].of_all(&offers, 0, &Links::default(), given).unwrap()
    }

    fn local(offers: &[EngineOffer]) -> OwnOffers {
        OwnOffers([offers.to_vec(), Vec::new()])
    }

    #[test]
    fn a_kind_counts_if_all_ranks_offer_it() {
        let both = || local(&[STREAMS, SDMA]);
        let names = |of_ranks: &[OwnOffers]| {
            agreed(of_ranks, &[]).into_iter().map(|kind| kind.name).collect::<Vec<_>>()
        };
        assert_eq!(names(&[both(), both()]), ["streams", "sdma"]);
        assert_eq!(names(&[both(), local(&[SDMA])]), ["sdma"]);
        assert_eq!(names(&[local(&[STREAMS]), local(&[SDMA])]), ["sdma or streams"]);
    }

    #[test]
    fn an_offer_is_what_all_ranks_can_do() {
        let slow = EngineOffer {
            bytes_per_second: Some(20e9),
            caps: Caps { gets: false, ..STREAMS.caps },
            ..STREAMS
        };
        let kinds = agreed(&[local(&[STREAMS, SDMA]), local(&[slow, SDMA])], &[]);
        assert!(!kinds[0].common.gets && kinds[0].has_streams());
        assert_eq!(kinds[0].links().local.bytes_per_second, 20e9);
        assert!(kinds[1].links().start_seconds > kinds[0].links().start_seconds);
        assert_eq!([&kinds[0], &kinds[1]].map(|kind| kind.polls(Tier::Local)), [false, true]);
    }

    #[test]
    fn ranks_without_a_common_kind_use_their_own() {
        let kinds = agreed(&[local(&[SDMA]), local(&[STREAMS])], &[]);
        assert_eq!(kinds[0].kind(Tier::Local), Some("sdma"));
        assert!(!kinds[0].common.flags_batched && !kinds[0].has_streams());
    }

    #[test]
    fn a_network_makes_pairs() {
        let nic = EngineOffer::new(Caps { signal_growth_max: 7, ..Caps::new("queue pairs") });
        let own = || OwnOffers([vec![STREAMS, SDMA], vec![nic]]);
        let kinds = agreed(&[own(), own()], &[]);
        assert_eq!(kinds[1].name(), "sdma + queue pairs");
        assert!(kinds[1].is_named("sdma") && kinds[1].is_named("queue pairs"));
        assert!(!kinds[0].is_named("sdma") && !kinds[0].common.gets);
        assert_eq!(kinds[0].common.signal_growth_max, 7);
        assert_eq!(kinds[0].kind(Tier::Network), Some("queue pairs"));
    }

    #[test]
    fn measured_links_are_those_of_their_kind() {
        let measured = Links { engine: "sdma".to_owned(), start_seconds: 0.5, ..Links::default() };
        let kinds = agreed(&[local(&[STREAMS, SDMA])], &[measured]);
        assert_eq!([&kinds[0], &kinds[1]].map(EngineKind::is_measured), [false, true]);
        assert_eq!(kinds[1].links().start_seconds, 0.5);

        let any = Links { start_seconds: 0.25, ..Links::default() };
        let kinds = agreed(&[local(&[STREAMS, SDMA])], &[any]);
        assert!(kinds.iter().all(|kind| kind.links().start_seconds == 0.25));
    }
}
