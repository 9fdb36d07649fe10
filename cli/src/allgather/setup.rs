//! What follows from the options when the group stands: how gathers are prepared, and what is
//! predicted of them.

use std::time::Duration;

use peerlane::bootstrap::Bootstrap;
use peerlane::collective::Collective;
use peerlane::cost::{Key, Links};
use peerlane::group::Report;
use peerlane::hal::{Fabric, LinkKind};
use peerlane::plan::Algorithm;
use peerlane::topology::Topology;
use peerlane::{AllGather, Element, Group, Rank};

use super::engine::Engine;
use super::options::Options;
use super::place::{Carrier, Network, Place};
use crate::calibrate;
use crate::error::{Failure, Result};
use crate::goal;
use crate::ranks::circle::Circle;
use crate::ranks::data::Numbering;

/// The options, and what they come to between these ranks.
pub(crate) struct Setup<'a> {
    pub(super) options: &'a Options,
    pub(super) topology: Topology,
    /// The name of the backend inside a node.
    pub(super) backend: String,
    /// What is known of the links beside what the library knows.
    links: Option<Links>,
}

/// One way to prepare a gather.
#[derive(Clone, Copy, Debug)]
pub(super) struct Way {
    /// `None`: the library's choice.
    pub(super) algorithm: Option<Algorithm>,
    pub(super) captured: bool,
    pub(super) traced: bool,
}

impl<'a> Setup<'a> {
    /// For a group that stands.
    ///
    /// # Errors
    /// If there is no such calibration, or it is for something else; if ranks know unlike links.
    pub(super) fn of<F: Fabric>(
        options: &'a Options,
        circle: &Circle,
        place: &Place,
        group: &Group<F>,
    ) -> Result<Self> {
        let backend = group.fabric().backend().to_string();
        let links = links(options, place.carrier, &backend, circle.ranks())?;
        let all = circle.share("links", &links.as_ref().map(Links::fingerprint))?;
        if let Some(rank) = all.iter().position(|seen| *seen != all[0]) {
            let text = format!("rank {rank} has another --calibration than rank 0");
            return Err(Failure::failed(text).with_advice("give all ranks the same file"));
        }
        let topology = group.topology().clone();
        Ok(Self { options, topology, backend, links })
    }

    /// How many ranks there are.
    pub(super) fn ranks(&self) -> usize {
        self.topology.ranks()
    }

    /// The algorithms that are measured.
    pub(super) fn algorithms(&self) -> Vec<Option<Algorithm>> {
        self.options.method.algorithms(self.topology.nodes(), self.options.collective)
    }

    /// Prepares a gather of shards of so many elements in the mean. Collective.
    ///
    /// # Errors
    /// That of the group.
    pub(super) fn prepare<F: Fabric, T: Element>(
        &self,
        group: &mut Group<F>,
        shard_length: u64,
        way: Way,
    ) -> Result<AllGather<T>> {
        let Options { shape, method, .. } = self.options;
        let pieces = shape.pieces(shard_length, self.ranks())?;
        let longest = self.shard_bytes(shard_length).into_iter().max().unwrap_or(0);
        let parts = method.parts(longest)?;
        let mut builder = match self.options.collective {
            Collective::Broadcast { root } => {
                let len = pieces[0].iter().fold(0_usize, |sum, len| sum.saturating_add(*len));
                group.broadcast(root, len)
            }
            Collective::AllToAll => group.all_to_all(pieces[0][0]),
            _ => shape.describe::<F, T>(group, &pieces),
        };
        builder = builder.timeout(self.options.timeout);
        if let Some(links) = &self.links {
            builder = builder.links(links.clone());
        }
        if let Some(algorithm) = way.algorithm {
            builder = builder.algorithm(algorithm);
        }
        if let Some(parts) = parts {
            builder = builder.parts(parts);
        }
        if self.options.in_place {
            builder = builder.in_place();
        }
        if let Some(outputs) = self.options.outputs {
            builder = builder.outputs(outputs);
        }
        if way.captured {
            builder = builder.capturable();
        }
        if Engine::is_open(self.options) {
            builder = builder.any_engine();
        }
        Ok(builder.trace(way.traced).prepare()?)
    }

    /// The shard of every rank in bytes, where the mean is so many elements.
    pub(super) fn shard_bytes(&self, shard_length: u64) -> Vec<u64> {
        let element = self.options.dtype.bytes() as u64;
        let mut lengths = self.options.shape.lengths(shard_length, self.ranks());
        if let Collective::Broadcast { root } = self.options.collective {
            let total = lengths.iter().fold(0_u64, |sum, length| sum.saturating_add(*length));
            lengths.fill(0);
            lengths[root.index()] = total;
        }
        lengths.into_iter().map(|length| length.saturating_mul(element)).collect()
    }

    /// Returns the numbers of the blocks of a rank.
    pub(super) fn numbering(&self, rank: Rank) -> Numbering {
        let (rank, ranks) = (rank.index(), self.ranks());
        Numbering { collective: self.options.collective, rank, ranks }
    }

    /// Where a rank's shard begins behind those before it, and how long it is, in bytes.
    pub(super) fn own_bytes(&self, shard_length: u64, rank: Rank) -> (u64, u64) {
        let shards = self.shard_bytes(shard_length);
        (shards[..rank.index()].iter().sum(), shards[rank.index()])
    }

    /// The time that is predicted for what was prepared, if predictions are shown.
    pub(super) fn predicted(&self, report: &Report) -> Option<Duration> {
        let predicts = self.options.method.predicts();
        predicts.then(|| Duration::from_nanos(report.choice.cost.picoseconds / 1000))
    }

    /// Why it is what was prepared, if that is asked for.
    pub(super) fn explanation(&self, report: &Report) -> Option<String> {
        self.options.method.explain.then(|| report.choice.explain())
    }
}

/// What can be said against the options before there are ranks.
///
/// # Errors
/// A usage failure that names the option.
pub(super) fn check(options: &Options, backend: &str, ranks: usize) -> Result<()> {
    options.shape.check(ranks)?;
    if let Collective::Broadcast { root } = options.collective {
        goal::broadcast(root.0, ranks)?;
    }
    options.tiers.topology(ranks)?;
    if backend != "host" && options.tiers.local_bandwidth.is_some() {
        let text = format!("--local-bandwidth is of the host backend, this one is {backend}");
        return Err(Failure::usage(text).with_advice("leave it out, or take --backend host"));
    }
    if options.tiers.network == Network::Rdma {
        options.cards.check()?;
    }
    let largest = options.sweep(ranks).shard_lengths().last().copied().unwrap_or(0);
    let longest = options.shape.lengths(largest, ranks).into_iter().max().unwrap_or(0);
    options.method.parts(longest.saturating_mul(options.dtype.bytes() as u64))?;
    calibration(options, backend, ranks).map(drop)
}

/// What is known of the links between these ranks beside what the library knows: what was measured,
/// and how slow the network is made.
fn links(
    options: &Options,
    carrier: Carrier,
    backend: &str,
    ranks: usize,
) -> Result<Option<Links>> {
    let calibration = calibration(options, backend, ranks)?;
    let known_by_library = match carrier {
        Carrier::None => true,
        Carrier::Same => false,
        Carrier::Rdma => !options.tiers.is_throttled(),
    };
    if known_by_library {
        return Ok(calibration);
    }
    let known = || match backend {
        // Not by what this machine has: all ranks must know the same.
        "host" => Links::of_kinds(LinkKind::SharedMemory, LinkKind::Rdma),
        _ => Links::default(),
    };
    Ok(Some(options.tiers.between(carrier, calibration.unwrap_or_else(known))))
}

/// The links of the calibration that is given.
fn calibration(options: &Options, backend: &str, ranks: usize) -> Result<Option<Links>> {
    let Some(path) = &options.method.calibration else { return Ok(None) };
    // Virtual nodes are this machine's ranks, which were calibrated as one node.
    let topology = Topology::flat(ranks)?;
    // A spawned rank is bound to a core and sees no more; its parent has checked.
    let sees = options.spawned_by.is_none();
    let wanted = sees.then(|| Key::new(backend, &calibrate::machine(backend), &topology));
    Ok(Some(calibrate::load(path, wanted.as_ref())?.links))
}
