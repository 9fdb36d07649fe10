//! Prepares operations as the options require, and selects the links that predict their time.

use std::time::Duration;

use peerlane::Algorithm;
use peerlane::bootstrap::Bootstrap;
use peerlane::element::with_element;
use peerlane::group::Report;
use peerlane::hal::{BackendId, Fabric, LinkKind};
use peerlane::topology::Topology;
use peerlane::{Element, Group, Operation, Rank};
use peerlane_planning::cost::{Key, Links};
use peerlane_planning::layout::Layout;

use super::node_options::Network;
use super::operation::HostOperation;
use super::options::Options;
use super::shape::destinations;
use super::topology::{NetworkFabric, RankTopology};
use crate::calibration;
use crate::error::{Failure, Result};
use crate::options::check_needs;
use crate::ranks::comm::Comm;
use crate::ranks::data::Numbering;

/// The options of a run together with the topology and the links of its open group.
pub(crate) struct Setup<'a> {
    pub(super) options: &'a Options,
    pub(super) topology: Topology,
    pub(super) backend: String,
    pub(super) device_name: String,
    /// The links from which the time of an operation is predicted; none for the links of the
    /// library.
    links: Vec<Links>,
    /// The kinds of engines that all ranks offer.
    pub(super) kinds: Vec<String>,
}

/// The parameters of an operation that vary within one run of the program.
#[derive(Clone, Copy, Debug)]
pub(super) struct Variant {
    pub(super) algorithm: Option<Algorithm>,
    pub(super) captured: bool,
    pub(super) traced: bool,
}

impl<'a> Setup<'a> {
    /// Applies the options to an open group, and checks that all ranks predict with the same links.
    /// Collective.
    pub(super) fn from_group(
        options: &'a Options,
        comm: &Comm,
        rank_topology: &RankTopology,
        group: &Group,
        device_name: String,
    ) -> Result<Self> {
        let backend = group.fabric().backend().to_string();
        let network = match group.selection().network {
            None | Some(BackendId::RDMA) => LinkKind::Rdma,
            Some(_) => LinkKind::Network,
        };
        let fabrics = (rank_topology.network_fabric, network);
        let links = links(options, fabrics, &backend, comm.ranks())?;

        // Ranks that predict with different links could select different algorithms.
        let all = comm.share("links", &links.iter().map(Links::fingerprint).collect::<Vec<_>>())?;
        if let Some(rank) = all.iter().position(|seen| *seen != all[0]) {
            let text =
                format!("the file of --calibration on rank {rank} differs from the file on rank 0");
            return Err(Failure::failed(text).with_advice("give the same file on all ranks"));
        }

        let topology = group.topology().clone();
        let kinds = group.engines().iter().map(|kind| kind.name().to_owned()).collect();
        Ok(Self { options, topology, backend, device_name, links, kinds })
    }

    pub(super) fn ranks(&self) -> usize {
        self.topology.ranks()
    }

    pub(super) fn algorithms(&self) -> Vec<Option<Algorithm>> {
        self.options.algorithm.algorithms(&self.topology, self.options.goal.collective)
    }

    /// Prepares the collective of the options with blocks of `block_length` elements on average.
    /// Collective.
    pub(super) fn prepare<T: Element>(
        &self,
        group: &mut Group,
        block_length: u64,
        variant: Variant,
    ) -> Result<Operation<T>> {
        let Options { shape, algorithm, .. } = self.options;
        let goal = self.options.goal;
        let pieces = shape.pieces(goal, block_length, self.ranks())?;
        let (_, longest) = self.layout(block_length)?.block_bytes_min_max();
        let chunks = algorithm.chunks(longest)?;

        let lens = goal.lens(&pieces, group.rank());
        let mut builder = group.operation(goal.collective, lens);
        builder = builder.timeout(self.options.run.timeout);

        if shape.list {
            builder = builder.destinations(&destinations(&pieces[0]));
        }
        for links in &self.links {
            builder = builder.links(links.clone());
        }
        if let Some(algorithm) = variant.algorithm {
            builder = builder.algorithm(algorithm);
        }
        if let Some(chunks) = chunks {
            builder = builder.chunks(chunks);
        }
        if let Some(form) = self.options.form {
            builder = builder.form(form);
        }
        if let Some(transfer) = self.options.transfer {
            builder = builder.transfer(transfer);
        }
        if self.options.in_place {
            builder = builder.in_place();
        }
        if let Some(outputs) = self.options.outputs {
            builder = builder.outputs(outputs);
        }

        if variant.captured {
            // SAFETY: a candidate finishes the stream after its replays, and destroys its graph
            // before the operation. After an error, the program ends. The host only reads copies of
            // the output.
            builder = unsafe { builder.capturable() };
        }
        if self.options.any_engine() {
            builder = builder.any_engine();
        }

        Ok(builder.trace(variant.traced).prepare()?)
    }

    /// Prepares an operation on host memory with the element type of the options. Collective.
    pub(super) fn prepare_on_host(
        &self,
        group: &mut Group,
        block_length: u64,
        variant: Variant,
    ) -> Result<Box<dyn HostOperation>> {
        with_element!(self.options.dtype, T => {
            Ok(Box::new(self.prepare::<T>(group, block_length, variant)?) as _)
        })
    }

    /// Returns the layout of blocks that have `block_length` elements on average, with all tensors
    /// as one.
    pub(super) fn layout(&self, block_length: u64) -> Result<Layout> {
        layout(self.options, self.ranks(), block_length)
    }

    /// Returns the bytes of each input block of a rank, one for each tensor or for each receiving
    /// rank.
    pub(super) fn input_blocks(&self, block_length: u64, rank: Rank) -> Result<Vec<u64>> {
        let Options { shape, goal, .. } = self.options;
        let pieces = shape.pieces(*goal, block_length, self.ranks())?;
        let pieces =
            pieces.into_iter().map(|lens| lens.into_iter().map(|len| len as u64).collect());
        let layout = layout_of(self.options, pieces.collect())?;

        Ok(match goal.collective.has_input_block_per_receiver() {
            false => {
                (0..layout.tensors()).map(|tensor| layout.input_piece_bytes(tensor, rank)).collect()
            }
            // In a reduction, the layout keeps a block under the rank that adds it.
            true => Rank::all(layout.ranks())
                .map(|to| {
                    let of = if goal.collective.is_reduction() { to } else { rank };
                    layout.block_bytes(of, to)
                })
                .collect(),
        })
    }

    pub(super) fn numbering(&self, rank: Rank) -> Numbering {
        let (rank, ranks) = (rank.index(), self.ranks());
        let dtype = self.options.dtype;
        Numbering { collective: self.options.goal.collective, dtype, rank, ranks }
    }

    /// Returns the predicted time of an operation, if rows show predictions.
    pub(super) fn predicted(&self, report: &Report) -> Option<Duration> {
        let predicts = self.options.algorithm.predicts();
        predicts.then(|| Duration::from_nanos(report.choice.cost.picoseconds / 1000))
    }

    pub(super) fn explanation(&self, report: &Report) -> Option<String> {
        self.options.algorithm.explain.then(|| report.choice.explain())
    }
}

/// Returns the length of the largest memory for contributions that a rank has, in bytes.
pub(super) fn inbox_bytes_max(options: &Options, ranks: usize, block_length: u64) -> u64 {
    // Lengths that have no layout are refused when the operation is prepared.
    layout(options, ranks, block_length).map_or(0, |layout| layout.inbox_bytes_max())
}

fn layout(options: &Options, ranks: usize, block_length: u64) -> Result<Layout> {
    layout_of(options, vec![options.shape.lengths(options.goal, block_length, ranks)])
}

/// Returns the layout of blocks whose lengths are given in elements, by tensor and rank.
fn layout_of(options: &Options, mut lengths: Vec<Vec<u64>>) -> Result<Layout> {
    let element = options.dtype.bytes() as u64;
    let lengths_mut = lengths.iter_mut().flatten();
    lengths_mut.for_each(|length| *length = length.saturating_mul(element));
    Ok(options.goal.layout(&lengths, 1)?)
}

/// Rejects options that do not fit this number of ranks, before any rank is started.
pub(super) fn check(options: &Options, backend: &str, ranks: usize) -> Result<()> {
    options.shape.check(ranks)?;
    options.goal.check_root(ranks)?;
    options.node_options.topology(ranks)?;

    let throttled = options.node_options.local_bandwidth.filter(|_| backend != "host");
    let advice = "remove the option, or use --backend host";
    check_needs(throttled.map(|_| "--local-bandwidth"), "the backend host", backend, advice)?;

    if let Network::Backend(network) = options.node_options.network {
        options.nics.check(network)?;
    }

    let largest = options.sweep(ranks).block_lengths().last().copied().unwrap_or(0);
    let longest =
        options.shape.lengths(options.goal, largest, ranks).into_iter().max().unwrap_or(0);
    options.algorithm.chunks(longest.saturating_mul(options.dtype.bytes() as u64))?;

    calibrated_links(options, backend, ranks).map(drop)
}

/// Returns calibrated or throttled links for predictions; none if the library knows the links.
fn links(
    options: &Options,
    (network_fabric, network): (NetworkFabric, LinkKind),
    backend: &str,
    ranks: usize,
) -> Result<Vec<Links>> {
    let calibrated = calibrated_links(options, backend, ranks)?;
    let known_by_library = match network_fabric {
        NetworkFabric::None => true,
        NetworkFabric::Same => false,
        NetworkFabric::Network(_) => !options.node_options.is_throttled(),
    };
    if known_by_library {
        return Ok(calibrated);
    }

    let known = || match backend {
        // These links do not depend on the machine, because all ranks must use the same.
        "host" => Links::of_kinds(LinkKind::SharedMemory, network),
        _ => Links::of_kinds(LinkKind::NvLink, network),
    };

    let throttle = options.node_options.throttle();
    let known = if calibrated.is_empty() { vec![known()] } else { calibrated };
    Ok(known.into_iter().map(|links| network_fabric.links(throttle, links)).collect())
}

/// Loads the links from the file of `--calibration`, one for each kind of engines; none without the
/// option.
fn calibrated_links(options: &Options, backend: &str, ranks: usize) -> Result<Vec<Links>> {
    let Some(path) = &options.algorithm.calibration else { return Ok(Vec::new()) };
    // Virtual nodes are ranks of this machine, which were calibrated as one node.
    let topology = Topology::flat(ranks)?;
    // A spawned rank is bound to one core and sees only that core; its parent has compared the key.
    let sees = options.run.spawned_by.is_none();
    let expected = sees.then(|| Key::new(backend, &calibration::machine(backend), &topology));
    Ok(calibration::load(path, expected.as_ref())?.links().cloned().collect())
}

#[cfg(test)]
mod tests {
    use peerlane_planning::plan::{Cell, Source};

    use super::super::options::tests::parse;
    use super::*;

    /// Verifies that a block of several tensors is one span, which the limit copies as a whole.
    #[test]
    fn a_block_of_several_tensors_is_one_copy() {
        let layout = layout(&parse("--tensors 3 --dtype f32").unwrap(), 2, 10).unwrap();
        let cell = Cell { block: Rank(1), chunk: 0 };
        let spans: Vec<_> = layout.spans(cell, (Rank(1), Source::Input), Rank(0)).collect();
        assert_eq!((spans.len(), spans[0].bytes, spans[0].dst.offset), (1, 40, 40));
    }
}
