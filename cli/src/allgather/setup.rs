//! What follows from the options when the group stands: how gathers are prepared, and what is
//! predicted of them.

use std::time::Duration;

use peerlane::bootstrap::Bootstrap;
use peerlane::cost::{self, Key, Links, Question};
use peerlane::group::Report;
use peerlane::hal::{Fabric, LinkKind};
use peerlane::plan::Algorithm;
use peerlane::topology::Topology;
use peerlane::{AllGather, Element, Group, Rank};

use super::circle::Circle;
use super::options::Options;
use crate::calibrate;
use crate::error::{Failure, Result};

/// The options, and what they come to between these ranks.
pub(crate) struct Setup<'a> {
    pub(super) options: &'a Options,
    pub(super) topology: Topology,
    /// The name of the backend inside a node.
    pub(super) backend: String,
    /// Whether a second fabric is between nodes.
    tiers: bool,
    links: Links,
    /// Whether somebody has measured or set them; else the group chooses by its own.
    measured: bool,
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
        group: &Group<F>,
        tiers: bool,
    ) -> Result<Self> {
        let backend = group.fabric().backend().to_string();
        let calibrated = calibrated(options, &backend, circle.ranks())?;
        let measured = calibrated.is_some() || options.tiers.nodes.is_some();
        let links = calibrated.unwrap_or_else(|| group.links().clone());
        let links = match options.tiers.nodes {
            Some(_) => options.tiers.between(links),
            None => links,
        };
        let all = circle.share("links", &links.fingerprint())?;
        if let Some(rank) = all.iter().position(|seen| *seen != all[0]) {
            let text = format!("rank {rank} has another --calibration than rank 0");
            return Err(Failure::failed(text).with_advice("give all ranks the same file"));
        }
        let topology = group.topology().clone();
        Ok(Self { options, topology, backend, tiers, links, measured })
    }

    /// How many ranks there are.
    pub(super) fn ranks(&self) -> usize {
        self.topology.ranks()
    }

    /// The algorithms that are measured.
    pub(super) fn algorithms(&self) -> Vec<Option<Algorithm>> {
        self.options.method.algorithms(self.topology.nodes())
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
        let mut builder = shape.describe::<F, T>(group, &pieces);
        builder = builder.timeout(self.options.timeout);
        if self.measured {
            builder = builder.links(self.links.clone());
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
        Ok(builder.trace(way.traced).prepare()?)
    }

    /// The shard of every rank in bytes, where the mean is so many elements.
    pub(super) fn shard_bytes(&self, shard_length: u64) -> Vec<u64> {
        let element = self.options.dtype.bytes() as u64;
        let lengths = self.options.shape.lengths(shard_length, self.ranks());
        lengths.into_iter().map(|length| length.saturating_mul(element)).collect()
    }

    /// Where a rank's shard begins behind those before it, and how long it is, in bytes.
    pub(super) fn own_bytes(&self, shard_length: u64, rank: Rank) -> (u64, u64) {
        let shards = self.shard_bytes(shard_length);
        (shards[..rank.index()].iter().sum(), shards[rank.index()])
    }

    /// The time that is predicted for what was prepared, if predictions are shown.
    ///
    /// # Errors
    /// If the links are impossible.
    pub(super) fn predicted(&self, report: &Report, shard_length: u64) -> Result<Option<Duration>> {
        if !self.options.method.predicts() {
            return Ok(None);
        }
        let (shards, shape) = (self.shard_bytes(shard_length), self.shape(report));
        let cost = cost::predict(report.algorithm, &self.topology, shape, &shards, &self.links)?;
        Ok(Some(Duration::from_nanos(cost.picoseconds / 1000)))
    }

    /// Why the library chooses what it does, if that is asked for.
    ///
    /// # Errors
    /// If the links are impossible.
    pub(super) fn explanation(
        &self,
        report: &Report,
        shard_length: u64,
        way: Way,
    ) -> Result<Option<String>> {
        if !self.options.method.explain {
            return Ok(None);
        }
        let shard_bytes = self.shard_bytes(shard_length);
        let longest = shard_bytes.iter().copied().max().unwrap_or(0);
        let choice = cost::choose(&Question {
            topology: &self.topology,
            shard_bytes: &shard_bytes,
            shape: self.shape(report),
            links: &self.links,
            measured: self.measured,
            algorithm: way.algorithm,
            parts: self.options.method.parts(longest)?,
            refused: &[],
        })?;
        Ok(Some(choice.explain()))
    }

    fn shape(&self, report: &Report) -> peerlane::allgather::Shape {
        let Report { parts, outputs, flags, .. } = *report;
        let in_place = self.options.in_place;
        peerlane::allgather::Shape { parts, in_place, outputs, flags, tiers: self.tiers }
    }
}

/// What can be said against the options before there are ranks.
///
/// # Errors
/// A usage failure that names the option.
pub(super) fn check(options: &Options, backend: &str, ranks: usize) -> Result<()> {
    options.shape.check(ranks)?;
    options.tiers.topology(ranks)?;
    calibrated(options, backend, ranks).map(drop)
}

/// The links of the calibration, if there is one.
fn calibrated(options: &Options, backend: &str, ranks: usize) -> Result<Option<Links>> {
    let Some(path) = &options.method.calibration else { return Ok(None) };
    // Virtual nodes are this machine's ranks, which were calibrated as one node.
    let topology = Topology::flat(ranks)?;
    let wanted = Key::new(backend, &calibrate::machine(backend), &topology);
    Ok(Some(calibrate::load(path, Some(&wanted))?.links))
}
