//! Decides whether the starts of an operation can be fused, and how their data then moves.
//!
//! A fused start is one launch, whose blocks of threads carry out the plan. Two starts in turn use
//! two sets of flags and two inboxes, as the device counts them, also in graphs. Where peers write
//! outputs, starts use two outputs in turn as those on copy engines do, as the host counts them.
//!
//! | operation | tagged | direct |
//! | --- | --- | --- |
//! | those that copy | puts go into slots of peers, in place of their outputs; at its end a rank takes the blocks of its peers from there | puts go to the outputs of peers, which are ready, or use two outputs in turn |
//! | reductions, and all-reduces as whole | contributions go into slots | contributions go into inboxes |
//! | all-reduces in parts | not used | contributions go into inboxes, and sums to the outputs of peers, which have entered the start |
//!
//! A program has few ops, so starts with many tensors are not fused. Those with several chunks are
//! fused only if the root of a broadcast sends them to different ranks, or a hierarchical start
//! distributes few of them. With one tensor and chunk, a rank has at most a copy for each of 8
//! ranks, and three other ops.

use peerlane_hal::Rank;

use super::request::OperationSpec;
use crate::collective::Collective;
use crate::cost::{Form, Transfer};
use crate::group::engines::CommonFused;
use crate::layout::{CHUNK_ALIGN_BYTES, Layout};
use crate::plan::{Algorithm, FlagOrder, Plan};
use crate::run::fused::Inboxes;
use crate::run::lane::FusedPrograms;
use crate::schedule::Shape;
use crate::topology::Topology;

/// The most blocks of a launch beside kernels of the caller, as for additions.
const BLOCKS_BESIDE_COMPUTE: u32 = 16;

/// The most ranks whose tagged data can have a length for each pair. Every rank then has an op for
/// each block that it sends and for each one that it takes, and a program has at most 12 ops.
const RANKS_OF_PAIRS_MAX: usize = 6;

/// The most ops of a program that copy and add, beside those that signal and wait.
const TENSOR_OPS_MAX: usize = 9;

/// Returns how many ops of a program a rank needs for the copies and additions of several tensors;
/// 0 for one tensor.
fn tensor_ops(spec: &OperationSpec, ranks: usize) -> usize {
    let (tensors, collective) = (spec.lens.tensor_count(), spec.collective);
    if tensors <= 1 {
        return 0;
    }
    match collective.is_reduction() {
        // Peers get the same data, or each one its own.
        true if collective == Collective::ReduceScatter => tensors * ranks,
        true => 2 * tensors,
        false if collective.has_equal_outputs() => tensors,
        false => tensors * ranks,
    }
}

/// The algorithms whose starts can be fused.
const ALGORITHMS: [Algorithm; 4] = [
    Algorithm::Direct,
    Algorithm::ScatterAllGather,
    Algorithm::Hierarchical,
    Algorithm::HierarchicalRing,
];

/// How the starts of an operation are fused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FusedPlan {
    pub(super) transfer: Transfer,
    pub(super) algorithm: Algorithm,
    pub(super) chunks: u32,
    /// Whether peers write outputs of ranks that may not have entered the start.
    writes_outputs: bool,
    /// The number of blocks of threads of a launch.
    pub(super) blocks: u32,
    /// The distance of the blocks of consecutive ranks in an inbox, if peers put them there and not
    /// into the output.
    pub(super) stride_bytes: Option<u64>,
}

impl FusedPlan {
    /// Returns a plan with so many blocks, whose peers write inboxes.
    #[cfg(test)]
    pub(super) fn of_blocks(transfer: Transfer, blocks: u32) -> Self {
        let algorithm = Algorithm::Direct;
        Self { transfer, algorithm, chunks: 1, writes_outputs: false, blocks, stride_bytes: None }
    }

    /// Returns whether starts are faster if they use two outputs in turn.
    pub(super) fn takes_turns(self) -> bool {
        self.writes_outputs
    }

    /// Returns which programs the engine compiles for a plan, which has another one for the starts
    /// of a graph behind the first one, or not.
    pub(super) fn programs(self, plan: &Plan, following: Option<&Plan>) -> FusedPrograms {
        match following {
            Some(_) => FusedPrograms::ByIndex,
            None if self.writes_outputs && plan.outputs > 1 => FusedPrograms::ByOutput,
            None => FusedPrograms::One,
        }
    }

    /// Returns where the data of starts is until its receiver uses it.
    pub(super) fn inboxes(self) -> Inboxes {
        Inboxes { stride_bytes: self.stride_bytes, factor: self.inbox_factor() }
    }

    /// Returns how many words of a flag peers signal.
    pub(super) fn signalled_words(self) -> usize {
        match self.transfer {
            // One block tells that its rank has entered the start, which nobody waits for.
            Transfer::Tagged => 1,
            Transfer::Direct => self.blocks as usize,
        }
    }

    /// Returns by how much an inbox is longer than its data.
    pub(super) fn inbox_factor(self) -> u64 {
        match self.transfer {
            Transfer::Tagged => peerlane_hal::SLOT_FACTOR,
            Transfer::Direct => 1,
        }
    }
}

/// Returns why the starts of an operation cannot be fused by engines with such limits, or `None` if
/// they can. `is_named` tells that the caller names the kind of engines.
pub(super) fn unfit(
    spec: &OperationSpec,
    limits: CommonFused,
    (topology, tiers): (&Topology, bool),
    is_named: bool,
) -> Option<&'static str> {
    let is_fused = |algorithm| ALGORITHMS.contains(&algorithm);
    let tiers = tiers && topology.nodes() > 1;
    // An op adds the contributions of all ranks, and copies go to those of one node.
    let copies = !spec.collective.is_reduction();
    let largest = nodes(topology).max().unwrap_or(1);
    let ranks = if tiers && copies { largest } else { topology.ranks() };
    let chunks_max = match spec.method.algorithm {
        Some(Algorithm::ScatterAllGather) => ROUNDS_MAX * (ranks as u32).saturating_sub(1),
        Some(Algorithm::Hierarchical | Algorithm::HierarchicalRing) => chunks_max(topology),
        _ => 1,
    };
    let is_divided =
        spec.columns.is_some() || spec.method.chunks.is_some_and(|chunks| chunks > chunks_max);

    if !spec.method.algorithm.is_none_or(is_fused) {
        Some("starts by this algorithm are not fused")
    } else if tiers && (spec.capturable || spec.resizable || spec.lens.tensor_count() > 1) {
        Some("on several nodes, only eager starts of one tensor and length are fused")
    } else if ranks < 2 || ranks > limits.ranks_max {
        Some("a launch does not reach so many ranks")
    } else if spec.resizable && spec.lens.is_of_pairs() {
        Some("each pair of ranks compares the lengths of its own in each start")
    } else if spec.handles.any() {
        Some("a launch does not tell when single blocks have arrived, and waits for none to depart")
    } else if spec.traced {
        Some("the steps of a fused start cannot be traced")
    } else if is_divided {
        Some("blocks are divided into chunks or rows")
    } else if tensor_ops(spec, ranks) > TENSOR_OPS_MAX {
        Some("a launch does not copy so many tensors")
    } else if spec.outputs.is_some_and(|outputs| outputs > 1) && spec.collective.is_reduction() {
        Some("fused reductions have one output")
    } else if spec.strict {
        Some("strict is set, and a launch takes compute units")
    } else if limits.shares_device && !is_named {
        Some("ranks share a device, on which their launches would take turns")
    } else {
        None
    }
}

/// Returns how a form of an operation can be fused, each with the options of its plan.
pub(super) fn plans(
    spec: &OperationSpec,
    (form, layout, topology): (Option<Form>, &Layout, &Topology),
    shape: Shape,
    limits: CommonFused,
) -> Vec<(FusedPlan, Shape)> {
    let (_, longest) = layout.block_bytes_min_max();
    let most = match spec.beside_compute {
        true => limits.blocks_max.min(BLOCKS_BESIDE_COMPUTE),
        false => limits.blocks_max,
    };
    let reduces = shape.collective.is_reduction();
    let plan = |transfer: Transfer, stride_bytes| {
        let blocks = transfer.blocks(form, longest, most);
        let writes_outputs = transfer == Transfer::Direct && !reduces;
        let algorithm = Algorithm::Direct;
        FusedPlan { transfer, algorithm, chunks: 1, writes_outputs, blocks, stride_bytes }
    };
    let tagged = |stride_bytes| plan(Transfer::Tagged, stride_bytes);
    let direct = plan(Transfer::Direct, None);

    // A rank hears from a peer by its data only if there is some. Slots are the only memory that
    // starts use in turn then.
    let is_named = spec.method.transfer == Some(Transfer::Tagged);
    // A shorter start would leave words with the tags of earlier starts, and one without data would
    // not be heard of.
    let has_tensors = spec.lens.tensor_count() > 1;
    let has_data = !spec.resizable
        && !has_tensors
        && is_heard_by_data(layout)
        && (layout.lengths().is_some() || layout.ranks() <= RANKS_OF_PAIRS_MAX)
        && spec.outputs.is_none_or(|outputs| outputs == 1)
        && (is_named || Transfer::Tagged.suits(longest, most));
    let tiers = shape.tiers && topology.nodes() > 1;
    let mut plans = Vec::new();
    match form {
        // Sums would go to the network from the middle of a launch.
        Some(Form::InParts) if tiers => {}
        _ if tiers => plans.extend(in_nodes(spec, (direct, shape), topology)),
        None if !reduces => {
            let stride = longest.checked_next_multiple_of(CHUNK_ALIGN_BYTES);
            // The slots are the outputs of a plan with two outputs in turn.
            let in_slots = Shape { outputs: 2, in_place: false, ..shape };
            let stride = stride.filter(|_| has_data);
            plans.extend(stride.map(|stride| (tagged(Some(stride)), in_slots)));
            plans.push((direct, shape));

            // Shorter starts would have chunks without data, so that their programs had other ops.
            let others = layout.ranks().saturating_sub(1) as u64;
            let is_broadcast = matches!(shape.collective, Collective::Broadcast { .. });
            if is_broadcast && others > 1 && !spec.resizable && !has_tensors {
                let blocks = Transfer::Direct.blocks(form, longest / others, most);
                let chunks = others as u32 * rounds(longest);
                let chunks = spec.method.chunks.unwrap_or(chunks);
                let algorithm = Algorithm::ScatterAllGather;
                plans.push((FusedPlan { algorithm, chunks, blocks, ..direct }, shape));
            }
        }
        None | Some(Form::Whole) => {
            let in_inboxes = Shape { outputs: 1, inboxes: 2, ..shape };
            plans.extend(has_data.then(|| (tagged(None), in_inboxes)));
            plans.push((direct, in_inboxes));
        }
        // The sums of each tensor would go to peers by an op of their own, with no flag between.
        Some(Form::InParts) if has_tensors => {}
        Some(Form::InParts) => plans.push((direct, Shape { outputs: 1, inboxes: 2, ..shape })),
    }
    let named = spec.method.algorithm;
    plans.retain(|(plan, _)| named.is_none_or(|algorithm| algorithm == plan.algorithm));
    plans
}

/// The largest number of rounds in which the root of a broadcast sends parts, by the ops of a
/// program.
const ROUNDS_MAX: u32 = 3;

/// Returns the plans of an operation on several nodes, whose lane inside the node is fused.
///
/// It first waits for what enters the node, and then distributes everything by one launch. Streams
/// wait, so no launch keeps compute units while data is on the network.
fn in_nodes(
    spec: &OperationSpec,
    (direct, shape): (FusedPlan, Shape),
    topology: &Topology,
) -> Vec<(FusedPlan, Shape)> {
    let turns = if shape.collective.is_reduction() {
        Shape { outputs: 1, inboxes: 2, ..shape }
    } else {
        shape
    };
    let shape = Shape { flags: FlagOrder::NetworkFirst, ..turns };
    let chunks = spec.method.chunks.unwrap_or(1);
    let has_room = spec.collective == Collective::AllGather && chunks <= chunks_max(topology);
    let hierarchical = [Algorithm::Hierarchical, Algorithm::HierarchicalRing];
    let hierarchical = hierarchical.into_iter().filter(|_| has_room);
    let hierarchical = hierarchical.map(|algorithm| FusedPlan { algorithm, chunks, ..direct });

    [direct].into_iter().chain(hierarchical).map(|plan| (plan, shape)).collect()
}

/// Returns the largest number of chunks, at most 4, of a hierarchical start whose program has room
/// for the ops of any rank; 0 if none has.
fn chunks_max(topology: &Topology) -> u32 {
    let has_room = |chunks: &u32| {
        let chunks = *chunks as usize;
        nodes(topology).all(|node| node_ops(&nodes(topology), node, chunks) <= OPS_MAX)
    };
    (1..=4).rev().find(has_room).unwrap_or(0)
}

/// Returns how many ops a rank of a node has at most, given the numbers of ranks of all nodes.
///
/// They are those of `ready` and of the own block, and a copy and a signal for each chunk that
/// enters the node at a rank. Flags of more than 8 peers or chunks need further ops.
fn node_ops(
    nodes: &(impl Iterator<Item = usize> + Clone),
    node_ranks: usize,
    chunks: usize,
) -> usize {
    let mates = node_ranks - 1;
    // Blocks enter by turns at the ranks of the node. The own node is among the nodes.
    let entering: usize = nodes.clone().map(|ranks| ranks.div_ceil(node_ranks)).sum();
    let passed_on = if mates == 0 { 0 } else { (entering - 1) * chunks };
    let lists = |flags: usize| flags.div_ceil(LIST_MAX);
    2 + lists(mates * chunks) + 2 * passed_on + lists(mates * (chunks + passed_on))
}

/// The most ops of a program, and flags of an op.
const OPS_MAX: usize = 12;
const LIST_MAX: usize = 8;

/// Returns the number of ranks of each node.
fn nodes(topology: &Topology) -> impl Iterator<Item = usize> + Clone + '_ {
    (0..topology.nodes()).map(|node| topology.members(Rank::at(node).0).len())
}

/// Returns the number of rounds in which the root of a broadcast sends parts of `bytes` bytes.
///
/// Each round takes a flag, which costs as much time as 1 MiB of the block. With more rounds, the
/// other ranks exchange less data after the last one.
fn rounds(bytes: u64) -> u32 {
    match bytes {
        0..0x20_0000 => 1,
        0x20_0000..0x80_0000 => 2,
        _ => ROUNDS_MAX,
    }
}

/// Returns whether data tells each rank that another one has entered a start, where it waits for
/// that one: no such block is empty.
fn is_heard_by_data(layout: &Layout) -> bool {
    let collective = layout.collective();
    let ranks = || Rank::all(layout.ranks());
    let bytes = |from: Rank, to: Rank| match collective.is_reduction() {
        true => collective.contributes(from, to).then(|| layout.block_bytes(to, to)),
        false => collective.requires(from, to).then(|| layout.block_bytes(from, to)),
    };
    ranks().all(|from| ranks().filter(|to| *to != from).all(|to| bytes(from, to) != Some(0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hierarchical_starts_have_as_many_chunks_as_fit_into_a_program() {
        let of = |ranks: &[u32]| {
            let nodes = (0..).zip(ranks).flat_map(|(node, ranks)| (0..*ranks).map(move |_| node));
            chunks_max(&Topology::of_nodes(&nodes.collect::<Vec<_>>()).unwrap())
        };
        assert_eq!([of(&[2, 2]), of(&[4, 4]), of(&[8, 8])], [4, 2, 2]);
        assert_eq!([of(&[4; 3]), of(&[4; 4]), of(&[4; 5])], [1, 1, 0]);
        assert_eq!([of(&[2; 16]), of(&[2, 1, 2]), of(&[8, 1])], [0, 2, 2]);
    }
}
