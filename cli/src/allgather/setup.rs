//! Prepares all-gathers according to the options, and knows the links for their prediction.

use std::time::Duration;

use peerlane::Algorithm;
use peerlane::bootstrap::Bootstrap;
use peerlane::collective::Collective;
use peerlane::group::Report;
use peerlane::hal::{Fabric, LinkKind};
use peerlane::planning::cost::{Key, Links};
use peerlane::topology::Topology;
use peerlane::{AllGather, Element, Group, Rank};

use super::host_operation::HostOperation;
use super::node_options::Network;
use super::options::Options;
use super::topology::{NetworkFabric, RankTopology};
use crate::calibration;
use crate::error::{Failure, Result};
use crate::goal;
use crate::ranks::comm::Comm;
use crate::ranks::data::Numbering;

/// Evaluates `$work` with `$element` as the Rust type of a `DType`.
macro_rules! with_dtype {
    ($dtype:expr, $element:ident => $work:expr) => {
        match $dtype {
            peerlane::DType::U8 => {
                type $element = u8;
                $work
            }
            peerlane::DType::I32 => {
                type $element = i32;
                $work
            }
            peerlane::DType::I64 => {
                type $element = i64;
                $work
            }
            peerlane::DType::F16 => {
                type $element = half::f16;
                $work
            }
            peerlane::DType::Bf16 => {
                type $element = half::bf16;
                $work
            }
            peerlane::DType::F32 => {
                type $element = f32;
                $work
            }
            peerlane::DType::F64 => {
                type $element = f64;
                $work
            }
            other => Err($crate::error::Failure::usage(format!(
                "--dtype {other} is not supported by this command"
            ))),
        }
    };
}

pub(super) use with_dtype;

/// The options, applied to an open group.
pub(crate) struct Setup<'a> {
    pub(super) options: &'a Options,
    pub(super) topology: Topology,
    /// Name of the backend inside a node.
    pub(super) backend: String,
    /// Links for the predictions, if they differ from those of the library.
    links: Option<Links>,
}

/// Choices with which an all-gather is prepared.
#[derive(Clone, Copy, Debug)]
pub(super) struct Variant {
    /// `None` is the choice of the library.
    pub(super) algorithm: Option<Algorithm>,
    pub(super) captured: bool,
    pub(super) traced: bool,
}

impl<'a> Setup<'a> {
    /// Applies the options to an open group. Collective.
    ///
    /// # Errors
    /// If the calibration cannot be loaded or is for another machine, or the ranks have different
    /// links.
    pub(super) fn of(
        options: &'a Options,
        comm: &Comm,
        rank_topology: &RankTopology,
        group: &Group,
    ) -> Result<Self> {
        let backend = group.fabric().backend().to_string();
        let links = links(options, rank_topology.network_fabric, &backend, comm.ranks())?;
        let all = comm.share("links", &links.as_ref().map(Links::fingerprint))?;
        if let Some(rank) = all.iter().position(|seen| *seen != all[0]) {
            let text =
                format!("the file of --calibration on rank {rank} differs from the file on rank 0");
            return Err(Failure::failed(text).with_advice("give the same file on all ranks"));
        }
        let topology = group.topology().clone();
        Ok(Self { options, topology, backend, links })
    }

    /// Returns the number of ranks.
    pub(super) fn ranks(&self) -> usize {
        self.topology.ranks()
    }

    /// Returns the algorithms to measure.
    pub(super) fn algorithms(&self) -> Vec<Option<Algorithm>> {
        self.options.algorithm.algorithms(self.topology.nodes(), self.options.collective)
    }

    /// Prepares an all-gather with shards of `shard_length` elements on average. Collective.
    ///
    /// # Errors
    /// If the group refuses the operation or has failed.
    pub(super) fn prepare<T: Element>(
        &self,
        group: &mut Group,
        shard_length: u64,
        variant: Variant,
    ) -> Result<AllGather<T>> {
        let Options { shape, algorithm, .. } = self.options;
        let pieces = shape.pieces(shard_length, self.ranks())?;
        let longest = self.shard_bytes(shard_length).into_iter().max().unwrap_or(0);
        let chunks = algorithm.chunks(longest)?;
        let mut builder = match self.options.collective {
            Collective::Broadcast { root } => {
                let len = pieces[0].iter().fold(0_usize, |sum, len| sum.saturating_add(*len));
                group.broadcast(root, len)
            }
            Collective::AllToAll => group.all_to_all(pieces[0][0]),
            _ => shape.describe::<T>(group, &pieces),
        };
        builder = builder.timeout(self.options.run.timeout);
        if let Some(links) = &self.links {
            builder = builder.links(links.clone());
        }
        if let Some(algorithm) = variant.algorithm {
            builder = builder.algorithm(algorithm);
        }
        if let Some(chunks) = chunks {
            builder = builder.chunks(chunks);
        }
        if self.options.in_place {
            builder = builder.in_place();
        }
        if let Some(outputs) = self.options.outputs {
            builder = builder.outputs(outputs);
        }
        if variant.captured {
            builder = builder.capturable();
        }
        if self.options.any_engine() {
            builder = builder.any_engine();
        }
        Ok(builder.trace(variant.traced).prepare()?)
    }

    /// Prepares an operation as [`prepare`](Self::prepare), with the element type of the options. Collective.
    ///
    /// # Errors
    /// As [`prepare`](Self::prepare).
    pub(super) fn prepare_on_host(
        &self,
        group: &mut Group,
        shard_length: u64,
        variant: Variant,
    ) -> Result<Box<dyn HostOperation>> {
        with_dtype!(self.options.dtype, T => {
            Ok(Box::new(self.prepare::<T>(group, shard_length, variant)?) as _)
        })
    }

    /// Returns the shard of every rank in bytes, with `shard_length` elements on average.
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

    /// Returns offset and length of a rank's shard in the output, in bytes.
    pub(super) fn own_bytes(&self, shard_length: u64, rank: Rank) -> (u64, u64) {
        let shards = self.shard_bytes(shard_length);
        (shards[..rank.index()].iter().sum(), shards[rank.index()])
    }

    /// Returns the predicted time, if predictions are shown.
    pub(super) fn predicted(&self, report: &Report) -> Option<Duration> {
        let predicts = self.options.algorithm.predicts();
        predicts.then(|| Duration::from_nanos(report.choice.cost.picoseconds / 1000))
    }

    /// Returns the reason for the choice of the algorithm, if it is printed.
    pub(super) fn explanation(&self, report: &Report) -> Option<String> {
        self.options.algorithm.explain.then(|| report.choice.explain())
    }
}

/// Checks the options before ranks are started.
///
/// # Errors
/// A failure that names the option.
pub(super) fn check(options: &Options, backend: &str, ranks: usize) -> Result<()> {
    options.shape.check(ranks)?;
    goal::check_root(options.collective, ranks)?;
    options.node_options.topology(ranks)?;
    if backend != "host" && options.node_options.local_bandwidth.is_some() {
        let text =
            format!("--local-bandwidth needs the backend host, but the backend is {backend}");
        return Err(Failure::usage(text).with_advice("remove the option, or use --backend host"));
    }
    if options.node_options.network == Network::Rdma {
        options.nics.check()?;
    }
    let largest = options.sweep(ranks).shard_lengths().last().copied().unwrap_or(0);
    let longest = options.shape.lengths(largest, ranks).into_iter().max().unwrap_or(0);
    options.algorithm.chunks(longest.saturating_mul(options.dtype.bytes() as u64))?;
    calibrated_links(options, backend, ranks).map(drop)
}

/// Returns the links for the predictions, if they differ from those of the library: calibrated
/// links, and the throttled network.
fn links(
    options: &Options,
    network_fabric: NetworkFabric,
    backend: &str,
    ranks: usize,
) -> Result<Option<Links>> {
    let calibrated = calibrated_links(options, backend, ranks)?;
    let known_by_library = match network_fabric {
        NetworkFabric::None => true,
        NetworkFabric::Same => false,
        NetworkFabric::Rdma => !options.node_options.is_throttled(),
    };
    if known_by_library {
        return Ok(calibrated);
    }
    let known = || match backend {
        // These links do not depend on the machine, because all ranks must use the same.
        "host" => Links::of_kinds(LinkKind::SharedMemory, LinkKind::Rdma),
        _ => Links::default(),
    };
    Ok(Some(
        network_fabric.links(options.node_options.throttle(), calibrated.unwrap_or_else(known)),
    ))
}

/// Loads the links from the `--calibration` file, or returns `None` without the option.
fn calibrated_links(options: &Options, backend: &str, ranks: usize) -> Result<Option<Links>> {
    let Some(path) = &options.algorithm.calibration else { return Ok(None) };
    // Virtual nodes are ranks of this machine, which were calibrated as one node.
    let topology = Topology::flat(ranks)?;
    // A spawned rank is bound to one core and sees only that core; its parent has compared the key.
    let sees = options.run.spawned_by.is_none();
    let expected = sees.then(|| Key::new(backend, &calibration::machine(backend), &topology));
    Ok(Some(calibration::load(path, expected.as_ref())?.links))
}
