//! Translates the chunks and flags of a plan into byte offsets and flag words.
//!
//! A plan names the flags that its rank waits for, and not their writers. Two questions need the
//! writers:
//!
//! - [`FlagTiers`] finds the flags whose writer is in a lane of another tier, because these are in
//!   other memory.
//! - [`FlagWriters`] finds the rank that signals a flag, for error texts.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use peerlane_hal::{Rank, Rows};

use crate::layout::{BufferPosition, CellSpan, FlagLayout, Layout, Span, reader};
use crate::plan::{Cell, Flag, LaneId, Plan, Source, Step, Tier};
use crate::run::buffers::{BufferId, BufferOffset, FlagAddress};
use crate::run::port::{BoundStep, slices};
use crate::topology::Topology;

/// The steps of one lane, with the addresses of their bytes and flags.
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) steps: Box<[BoundStep]>,
    /// The step of the plan that each bound step comes from, if the binding has origins.
    pub(crate) origins: Option<Box<[Step]>>,
    pub(crate) entry_steps: usize,
    pub(crate) waits: Box<[AwaitedFlag]>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct AwaitedFlag {
    pub(crate) flag: Flag,
    pub(crate) tier: Tier,
    pub(crate) address: FlagAddress,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Binding<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) layout: &'a Layout,
    pub(crate) flags: FlagLayout,
    pub(crate) flag_tiers: &'a FlagTiers,
    pub(crate) with_origins: bool,
    /// Whether the program can be [resized](Program::resize). Copies of no bytes are then bound
    /// too, because they can get longer.
    pub(crate) resizable: bool,
    /// Whether the engines copy rows.
    pub(crate) rows: bool,
}

impl Program {
    /// Changes the copies to those of a start whose blocks have other lengths and places. The
    /// program must be bound as resizable, with origins.
    pub(crate) fn resize(&mut self, plan: &Plan, layout: &Layout) {
        let origins = self.origins.iter().flatten();
        for (bound, origin) in self.steps.iter_mut().zip(origins) {
            let (BoundStep::Put { bytes, .. } | BoundStep::Get { bytes, .. }) = bound else {
                continue;
            };
            match copies(plan, layout, origin).next() {
                Some(copy) => *bound = copy,
                None => *bytes = 0,
            }
        }

        join_neighbors(&mut self.steps);
    }

    pub(crate) fn slices(&self, slice_ops_max: usize) -> impl Iterator<Item = &[BoundStep]> {
        let (entry, rest) = self.steps.split_at(self.entry_steps);
        slices(entry, slice_ops_max).chain(slices(rest, slice_ops_max))
    }

    /// Returns whether a step adds contributions.
    pub(crate) fn adds(&self) -> bool {
        self.steps.iter().any(|step| matches!(step, BoundStep::Reduce { .. }))
    }
}

impl Binding<'_> {
    /// Translates one lane of a plan; without its copies of zero bytes, unless it can be resized.
    pub(crate) fn bind(&self, lane: LaneId) -> Program {
        let closed = self.plan.closed_lane(lane, |_| true);
        let tier = self.plan.lanes[lane.index()].tier;
        let waits = closed.iter().filter_map(|step| match *step {
            Step::Wait { flag } => {
                Some(AwaitedFlag { flag, tier, address: self.awaited_address(flag) })
            }
            _ => None,
        });
        let entry_steps = closed.iter().take_while(|step| is_entry(step)).count();

        let mut steps = Vec::with_capacity(closed.len());
        let mut origins = Vec::new();
        for step in &closed {
            self.bind_step(step, tier, &mut steps);
            // A step of the plan is the origin of all bound steps that it has added.
            if self.with_origins {
                origins.resize(steps.len(), *step);
            }
        }

        join_neighbors(&mut steps);
        if !self.resizable {
            // Origins and steps have the same indices, so both lose the same entries.
            let is_kept: Vec<bool> = steps.iter().map(|step| !step.is_empty()).collect();
            steps.retain(|step| !step.is_empty());
            let mut kept = is_kept.into_iter();
            origins.retain(|_| kept.next().unwrap_or(true));
        }

        let origins = self.with_origins.then(|| origins.into());
        Program { steps: steps.into(), origins, entry_steps, waits: waits.collect() }
    }

    /// Appends the bound steps of one step of the plan, which is in a lane of `tier`.
    fn bind_step(&self, step: &Step, tier: Tier, bound: &mut Vec<BoundStep>) {
        match *step {
            Step::Signal { peer, flag } => {
                let crosses_tiers = self.flag_tiers.is_signal_across(tier, flag);
                let flag = FlagAddress { crosses_tiers, word: self.flags.word(flag), peer, lag: 0 };
                bound.push(BoundStep::Signal { peer, flag });
            }
            Step::Wait { flag } => {
                bound.push(BoundStep::Wait { flag: self.awaited_address(flag) });
            }
            Step::Reduce { cell, from } => {
                let rank = self.plan.rank;
                let given = self.layout.contribution(Cell { block: from, ..cell }, rank);
                let src = match from == rank {
                    true => self.own_contribution(&given),
                    false => in_inbox(&given),
                };

                let targets = self.layout.spans(cell, (rank, Source::Output), rank);
                bound.extend(targets.map(|Span { dst, bytes, .. }| {
                    let (buffer, offset) = (BufferId::Output(dst.buffer), dst.offset);
                    BoundStep::Reduce { dst: BufferOffset { buffer, offset }, src, bytes }
                }));
            }
            Step::Put { peer, cell, .. } if step.contributes(self.plan.collective) => {
                let given = self.layout.contribution(cell, peer);
                let (src, dst) = (self.own_contribution(&given), in_inbox(&given));
                let bytes = given.bytes;

                let put = BoundStep::Put { peer, dst, src, bytes, rows: Rows::ONE };
                bound.extend((bytes > 0).then_some(put));
            }
            Step::Put { peer, from, .. } | Step::Get { peer, from, .. } => {
                let before = bound.len();
                bound.extend(copies(self.plan, self.layout, step).flat_map(|copy| {
                    // An engine without rows has a copy for each.
                    let rows = if self.rows { 1 } else { rows_of(&copy) };
                    (0..rows).map(move |row| if rows == 1 { copy } else { one_row(copy, row) })
                }));

                // `resize` only changes steps that exist, so a copy of no bytes has one too.
                if self.resizable && bound.len() == before {
                    let [src, dst] = [BufferPosition::default(); 2];
                    let none = Span { src, dst, bytes: 0, rows: Rows::ONE };
                    bound.push(bound_copy(
                        matches!(step, Step::Get { .. }),
                        peer,
                        addresses(from, self.plan.in_place, &none),
                        &none,
                    ));
                }
            }
        }
    }

    fn own_contribution(&self, given: &CellSpan) -> BufferOffset {
        let (source, buffer): (_, fn(u32) -> BufferId) = match self.plan.in_place {
            true => (Source::Output, BufferId::Output),
            false => (Source::Input, BufferId::Input),
        };

        let own = self.layout.own_position(self.plan.rank, 0, source);
        BufferOffset { buffer: buffer(own.buffer), offset: own.offset + given.input_offset }
    }

    fn awaited_address(&self, flag: Flag) -> FlagAddress {
        let crosses_tiers = self.flag_tiers.is_wait_across(flag);
        let (word, lag) = (self.flags.word(flag), flag.lag());
        FlagAddress { crosses_tiers, word, peer: provider_or_writer(flag, self.plan.rank), lag }
    }
}

/// Returns the rank that signals a flag to `reader`, or the rank that provides the bytes which the
/// flag announces.
///
/// Both are the same rank in all schedules of collectives in which each pair of ranks has a block
/// of its own, because no rank passes these blocks on.
fn provider_or_writer(flag: Flag, reader: Rank) -> Rank {
    match flag {
        Flag::Ready { from, .. } | Flag::Free { from, .. } => from,
        Flag::Taken { by, .. } => by,
        Flag::Go { .. } | Flag::Sent { .. } => reader,
        Flag::Contributed { cell, .. } | Flag::Arrived { cell, .. } => cell.block,
    }
}

/// Makes one copy of puts to one peer that follow each other, if their bytes are neighbors in the
/// source and in the destination.
///
/// The first put then moves all bytes, and the others none. Only puts of no bytes are between them,
/// and a signal behind the last one announces them all, so no rank can see that later bytes move
/// earlier.
fn join_neighbors(steps: &mut [BoundStep]) {
    let mut first = None;
    for at in 0..steps.len() {
        let BoundStep::Put { peer, dst, src, bytes, rows: Rows::ONE } = steps[at] else {
            first = None;
            continue;
        };
        // A put of no bytes separates nothing.
        if bytes == 0 {
            continue;
        }

        if let Some(run) = first
            && let BoundStep::Put { peer: of_run, dst: to, src: from, bytes: before, .. } =
                &mut steps[run]
            && *of_run == peer
            && to.is_followed_by(*before, dst)
            && from.is_followed_by(*before, src)
        {
            *before += bytes;
            if let BoundStep::Put { bytes, .. } = &mut steps[at] {
                *bytes = 0;
            }
        } else {
            first = Some(at);
        }
    }
}

fn in_inbox(given: &CellSpan) -> BufferOffset {
    BufferOffset { buffer: BufferId::Inbox, offset: given.output_offset }
}

/// Returns the copies of a step that puts or gets, one for each tensor.
fn copies(plan: &Plan, layout: &Layout, step: &Step) -> impl Iterator<Item = BoundStep> {
    let (is_get, peer, cell, from) = match *step {
        Step::Get { peer, cell, from } => (true, peer, cell, from),
        Step::Put { peer, cell, from } => (false, peer, cell, from),
        Step::Reduce { .. } | Step::Signal { .. } | Step::Wait { .. } => {
            unreachable!("only copies have bytes")
        }
    };

    let (of, into) = if is_get { (peer, plan.rank) } else { (plan.rank, peer) };
    let in_place = plan.in_place;
    let source = if in_place { Source::Output } else { from };

    layout
        .spans(cell, (of, source), into)
        .map(move |span| bound_copy(is_get, peer, addresses(from, in_place, &span), &span))
}

fn bound_copy(
    is_get: bool,
    peer: Rank,
    (src, dst): (BufferOffset, BufferOffset),
    &Span { bytes, rows, .. }: &Span,
) -> BoundStep {
    match is_get {
        true => BoundStep::Get { peer, dst, src, bytes, rows },
        false => BoundStep::Put { peer, dst, src, bytes, rows },
    }
}

fn rows_of(copy: &BoundStep) -> u64 {
    match copy {
        BoundStep::Put { rows, .. } | BoundStep::Get { rows, .. } => rows.count,
        _ => 1,
    }
}

/// Returns a copy of one of the rows of a copy.
fn one_row(mut copy: BoundStep, row: u64) -> BoundStep {
    if let BoundStep::Put { dst, src, rows, .. } | BoundStep::Get { dst, src, rows, .. } = &mut copy
    {
        dst.offset += row * rows.dst_pitch;
        src.offset += row * rows.src_pitch;
        *rows = Rows::ONE;
    }
    copy
}

fn addresses(from: Source, in_place: bool, span: &Span) -> (BufferOffset, BufferOffset) {
    let src = match from {
        Source::Input if !in_place => BufferId::Input(span.src.buffer),
        Source::Input | Source::Output => BufferId::Output(span.src.buffer),
    };
    let dst = BufferOffset { buffer: BufferId::Output(span.dst.buffer), offset: span.dst.offset };
    (BufferOffset { buffer: src, offset: span.src.offset }, dst)
}

/// Returns whether a step belongs to the entry of lane 0, which alone signals `go`.
fn is_entry(step: &Step) -> bool {
    matches!(step, Step::Signal { flag: Flag::Go { .. }, .. })
}

/// Finds the flags whose writer and reader are in lanes of different tiers.
///
/// A local lane signals only ranks of its own node, so a flag that no rank of the reader's node
/// signals comes over the network. The plans of this rank's node are therefore enough to find where
/// each flag comes from.
#[derive(Debug)]
pub(crate) struct FlagTiers {
    lanes: Box<[Tier]>,
    node_writers: BTreeMap<Flag, Tier>,
}

impl FlagTiers {
    /// Collects the tiers of the lanes that write and read the flags of `plan`.
    ///
    /// `node_plans` are the plans of the other ranks of the node, which are read only if there are
    /// network lanes.
    pub(crate) fn new<'p>(plan: &'p Plan, node_plans: impl IntoIterator<Item = &'p Plan>) -> Self {
        let lanes = plan.lanes.iter().map(|lane| lane.tier).collect();
        let mut node_writers = BTreeMap::new();
        if is_tiered(plan) {
            for writer in node_plans.into_iter().chain([plan]) {
                add_signals(writer, plan, &mut node_writers);
            }
        }
        Self { lanes, node_writers }
    }

    fn is_signal_across(&self, from: Tier, flag: Flag) -> bool {
        from != self.reader_tier(flag)
    }

    fn is_wait_across(&self, flag: Flag) -> bool {
        let other_nodes =
            if self.lanes.contains(&Tier::Network) { Tier::Network } else { Tier::Local };
        let writer = self.node_writers.get(&flag).copied().unwrap_or(other_nodes);
        writer != self.reader_tier(flag)
    }

    fn reader_tier(&self, flag: Flag) -> Tier {
        self.lanes[reader(flag).index()]
    }
}

pub(crate) fn is_tiered(plan: &Plan) -> bool {
    plan.lanes.iter().any(|lane| lane.tier == Tier::Network)
}

fn add_signals(writer: &Plan, reader: &Plan, tiers: &mut BTreeMap<Flag, Tier>) {
    for lane in writer.lane_ids() {
        let tier = writer.lanes[lane.index()].tier;

        // Entry and exit signal only the rank itself.
        let closed = (writer.rank == reader.rank).then(|| writer.closed_lane(lane, |_| true));
        let steps = closed.as_ref().unwrap_or(&writer.lanes[lane.index()].steps);

        tiers.extend(steps.iter().filter_map(|step| match *step {
            Step::Signal { peer, flag } if peer == reader.rank => Some((flag, tier)),
            _ => None,
        }));
    }
}

type Planner = Box<dyn Fn(Rank) -> Option<Plan> + Send + Sync>;

/// Finds the rank that signals a flag, for error texts.
///
/// A group can have too many ranks to make all plans at every preparation, so the writer of a flag
/// is searched when an error text needs it, in likely plans first.
pub(crate) struct FlagWriters {
    reader: Rank,
    topology: Topology,
    planner: Planner,
    found: Mutex<BTreeMap<Flag, Rank>>,
}

impl FlagWriters {
    pub(crate) fn new(
        reader: Rank,
        topology: Topology,
        planner: impl Fn(Rank) -> Option<Plan> + Send + Sync + 'static,
    ) -> Self {
        Self { reader, topology, planner: Box::new(planner), found: Mutex::default() }
    }

    /// Returns the rank that signals a flag, of which a verified plan has exactly one.
    pub(crate) fn find_writer(&self, flag: Flag) -> Rank {
        let Flag::Arrived { cell, .. } = flag else {
            return provider_or_writer(flag, self.reader);
        };

        // The map is valid even if a thread has panicked while it held the lock.
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        *found.entry(flag).or_insert_with(|| {
            self.candidates(cell.block).find(|&rank| self.signals(rank, flag)).unwrap_or(cell.block)
        })
    }

    /// Returns the ranks that can signal a flag, the most likely ones first.
    ///
    /// The order is: the provider of the block, the neighbours of a ring, the node of this rank,
    /// then the rest.
    fn candidates(&self, block: Rank) -> impl Iterator<Item = Rank> {
        let (own_rank, ranks) = (self.reader.0, Rank::at(self.topology.ranks()).0);
        let neighbours =
            [(own_rank + ranks - 1) % ranks, (own_rank + 1) % ranks, own_rank].map(Rank);
        let node = self.topology.members(self.topology.node(self.reader)).iter().copied();

        [block].into_iter().chain(neighbours).chain(node).chain((0..ranks).map(Rank))
    }

    fn signals(&self, rank: Rank, searched: Flag) -> bool {
        let Some(plan) = (self.planner)(rank) else { return false };
        plan.lanes.iter().flat_map(|lane| &lane.steps).any(|step| {
            matches!(step, Step::Signal { peer, flag } if *peer == self.reader && *flag == searched)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::Collective;
    use crate::plan::{Algorithm, Cell, FlagOrder, Lane};

    const NETWORK: LaneId = LaneId(1);

    fn plan(rank: u32, home: Vec<Step>, network: Vec<Step>) -> Plan {
        Plan {
            collective: Collective::AllGather,
            algorithm: Algorithm::Direct,
            rank: Rank(rank),
            ranks: 3,
            chunks: 1,
            in_place: false,
            outputs: 1,
            flags: FlagOrder::Prompt,
            lanes: vec![
                Lane { tier: Tier::Local, steps: home },
                Lane { tier: Tier::Network, steps: network },
            ],
        }
    }

    fn arrived(block: u32, lane: LaneId) -> Flag {
        Flag::Arrived { cell: Cell { block: Rank(block), chunk: 0 }, lane }
    }

    fn signal(peer: u32, flag: Flag) -> Step {
        Step::Signal { peer: Rank(peer), flag }
    }

    #[test]
    fn only_puts_of_neighboring_bytes_are_joined() {
        let at = |buffer, offset| BufferOffset { buffer, offset };
        let put = |peer, from: u64, to: u64, bytes| BoundStep::Put {
            peer: Rank(peer),
            dst: at(BufferId::Output(0), to),
            src: at(BufferId::Output(0), from),
            bytes,
            rows: Rows::ONE,
        };
        let joined = |mut steps: Vec<BoundStep>| -> Vec<u64> {
            join_neighbors(&mut steps);
            steps.iter().map(BoundStep::bytes).collect()
        };
        let first = put(1, 100, 200, 8);
        let flag = FlagAddress { crosses_tiers: false, word: 0, peer: Rank(1), lag: 0 };
        let signal = BoundStep::Signal { peer: Rank(1), flag };
        let other_source = BoundStep::Put {
            peer: Rank(1),
            dst: at(BufferId::Output(0), 208),
            src: at(BufferId::Input(0), 108),
            bytes: 4,
            rows: Rows::ONE,
        };
        let get = BoundStep::Get {
            peer: Rank(1),
            dst: at(BufferId::Output(0), 208),
            src: at(BufferId::Output(0), 108),
            bytes: 4,
            rows: Rows::ONE,
        };

        assert_eq!(joined(vec![first, put(1, 108, 208, 4), put(1, 112, 212, 2)]), [14, 0, 0]);
        assert_eq!(joined(vec![first, put(2, 0, 0, 0), put(1, 108, 208, 4)]), [12, 0, 0]);
        assert_eq!(joined(vec![first, put(2, 108, 208, 4)]), [8, 4], "another peer");
        assert_eq!(joined(vec![first, put(1, 109, 208, 4)]), [8, 4], "a gap in the source");
        assert_eq!(joined(vec![first, put(1, 108, 209, 4)]), [8, 4], "a gap in the destination");
        assert_eq!(joined(vec![first, put(1, 92, 192, 8)]), [8, 8], "in the other order");
        assert_eq!(joined(vec![first, signal, put(1, 108, 208, 4)]), [8, 0, 4], "a signal between");
        assert_eq!(joined(vec![first, other_source]), [8, 4], "another buffer");
        assert_eq!(joined(vec![first, get]), [8, 4], "a get");
    }

    #[test]
    fn writer_and_reader_agree_on_the_memory_of_a_flag() {
        let (home, network) = (LaneId::HOME, NETWORK);
        let relayed = arrived(0, network);
        let ready = Flag::Ready { from: Rank(2), lane: network };
        let mine = plan(0, vec![signal(0, relayed)], vec![Step::Wait { flag: ready }]);
        let neighbour = plan(1, vec![signal(0, arrived(1, home))], vec![]);
        let flag_tiers = FlagTiers::new(&mine, [&neighbour]);
        let cases = [
            ("a neighbour's arrival", arrived(1, home), Tier::Local, false),
            ("an arrival over the network", arrived(2, home), Tier::Network, true),
            ("a relay", relayed, Tier::Local, true),
            ("from network lane to network lane", ready, Tier::Network, false),
            ("go", Flag::Go { lane: network }, Tier::Local, true),
            ("sent", Flag::Sent { lane: network }, Tier::Network, true),
        ];
        for (what, flag, writer, crosses) in cases {
            assert_eq!(flag_tiers.is_wait_across(flag), crosses, "{what}, read");
            assert_eq!(flag_tiers.is_signal_across(writer, flag), crosses, "{what}, written");
        }
    }

    /// The digest of a pair of ranks is compared with that of the rank which the flag names.
    #[test]
    fn a_flag_names_its_writer_if_each_pair_of_ranks_has_a_block() {
        use crate::schedule::{Shape, plan};

        let collective = Collective::AllToAll;
        for nodes in [&[0][..], &[0; 2], &[0; 5], &[0, 0, 1, 1], &[0, 1, 1, 2, 1]] {
            let topology = Topology::of_nodes(nodes).unwrap();
            let tiers = topology.nodes() > 1;
            for flags in [FlagOrder::Prompt, FlagOrder::Batched] {
                for algorithm in [Algorithm::Direct, Algorithm::Pull] {
                    let shape =
                        Shape { collective, chunks: 2, in_place: false, outputs: 1, flags, tiers };
                    for rank in Rank::all(nodes.len()) {
                        let plan = plan(algorithm, &topology, rank, shape).unwrap();
                        let steps =
                            plan.lane_ids().flat_map(|lane| plan.closed_lane(lane, |_| true));
                        for step in steps {
                            if let Step::Signal { peer, flag } = step {
                                assert_eq!(
                                    provider_or_writer(flag, peer),
                                    rank,
                                    "{algorithm}: {flag}"
                                );
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn on_one_tier_nothing_crosses() {
        let mut mine = plan(0, vec![], vec![signal(0, arrived(0, LaneId::HOME))]);
        mine.lanes[1].tier = Tier::Local;
        let flag_tiers = FlagTiers::new(&mine, []);
        for flag in [arrived(1, NETWORK), arrived(0, LaneId::HOME), Flag::Go { lane: NETWORK }] {
            assert!(!flag_tiers.is_wait_across(flag), "{flag:?}");
            assert!(!flag_tiers.is_signal_across(Tier::Local, flag), "{flag:?}");
        }
    }
}
