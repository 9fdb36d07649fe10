//! Translates the steps of a plan into commands, with places of bytes and flags.
//!
//! A plan names the flags that its rank waits for, and not their writers. Two questions need the
//! writers:
//!
//! - [`FlagTiers`] finds the flags whose writer is in a lane of another tier, because these are in
//!   other memory.
//! - [`FlagWriters`] finds the rank that signals a flag, for error texts.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use peerlane_hal::{Command, Direction, Rank, Reduction, RegionFlag, RegionOffset, Rows};

use crate::layout::{BufferPosition, FlagLayout, Layout, Span, reader};
use crate::plan::{Cell, Flag, LaneId, Plan, Source, Step, Tier};
use crate::run::buffers::{BufferId, CROSS_TIER_FLAGS, FLAGS, INBOX};
use crate::run::parts::{Handles, Parts};
use crate::topology::Topology;

/// The commands of one lane, in which the bytes and flags of the plan have places.
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) commands: Box<[Command]>,
    /// The sources of the reductions.
    pub(crate) sources: Box<[RegionOffset]>,
    /// The ranks whose contributions the sources are.
    pub(crate) contributors: Box<[Rank]>,
    /// The step of the plan that each command comes from, if the binding has origins. A reduction
    /// comes from several steps, of which this is the first.
    pub(crate) origins: Option<Box<[Step]>>,
    /// The number of commands that come before those of all other lanes.
    pub(crate) entry_commands: usize,
    /// The commands of a fused start that its launch runs; none if starts are not fused. The others
    /// order the launch against lanes of the network.
    pub(crate) launched: Range<usize>,
    pub(crate) waits: Box<[AwaitedFlag]>,
    /// Where chunks arrive, and where they must have departed.
    pub(crate) parts: Parts,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct AwaitedFlag {
    pub(crate) flag: Flag,
    pub(crate) tier: Tier,
    pub(crate) place: RegionFlag,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Binding<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) layout: &'a Layout,
    pub(crate) flags: FlagLayout,
    pub(crate) flag_tiers: &'a FlagTiers,
    /// `None` unless the plan adds.
    pub(crate) reduction: Option<Reduction>,
    pub(crate) with_origins: bool,
    /// The handles that starts have.
    pub(crate) handles: Handles,
    /// Whether the program can be [resized](Program::resize). Copies and additions of no bytes are
    /// then bound too, because they can get longer.
    pub(crate) resizable: bool,
    /// Whether the engines copy rows.
    pub(crate) rows: bool,
}

impl Program {
    /// Changes the copies and additions to those of a start whose blocks have other lengths and
    /// places. The program must be bound as resizable, with origins.
    pub(crate) fn resize(&mut self, plan: &Plan, layout: &Layout) {
        let origins = self.origins.iter().flatten();
        for (bound, origin) in self.commands.iter_mut().zip(origins) {
            match (bound, *origin) {
                (bound @ Command::Copy { .. }, _) => match copies(plan, layout, origin).next() {
                    Some(copy) => *bound = copy,
                    None => {
                        if let Command::Copy { bytes, .. } = bound {
                            *bytes = 0;
                        }
                    }
                },

                (Command::Reduce { dst, first, count, bytes, .. }, Step::Reduce { cell, .. }) => {
                    let Some(target) = targets(plan, layout, cell).next() else {
                        *bytes = 0;
                        continue;
                    };
                    (*dst, *bytes) = target;

                    let of_command = *first as usize..(*first + *count) as usize;
                    let contributors = &self.contributors[of_command.clone()];
                    for (source, &from) in self.sources[of_command].iter_mut().zip(contributors) {
                        // A resizable operation has one tensor, so the chunk is one range here too.
                        if let Some(place) = sources(plan, layout, cell, from).next() {
                            *source = place;
                        }
                    }
                }

                _ => {}
            }
        }

        join_neighbors(&mut self.commands);
    }

    /// Divides the commands into slices, of which none goes beyond the end of the entry.
    pub(crate) fn slices(&self, slice_ops_max: usize) -> impl Iterator<Item = &[Command]> {
        let (entry, rest) = self.commands.split_at(self.entry_commands);
        entry.chunks(slice_ops_max).chain(rest.chunks(slice_ops_max))
    }

    /// Returns whether a command adds contributions.
    pub(crate) fn adds(&self) -> bool {
        self.commands.iter().any(|command| matches!(command, Command::Reduce { .. }))
    }
}

impl Binding<'_> {
    /// Translates one lane of a plan; without its copies and additions of zero bytes, unless it can
    /// be resized.
    pub(crate) fn bind(&self, lane: LaneId) -> Program {
        let closed = self.plan.closed_lane(lane, |_| true);
        let tier = self.plan.lanes[lane.index()].tier;
        let waits = closed.iter().filter_map(|step| match *step {
            Step::Wait { flag } => Some(AwaitedFlag { flag, tier, place: self.awaited(flag) }),
            _ => None,
        });
        let entry_commands = closed.iter().take_while(|step| is_entry(step)).count();

        let mut bound = BoundSteps::default();
        bound.commands.reserve(closed.len());
        let mut origins = Vec::new();
        let mut steps = &closed[..];
        while let Some(step) = steps.first() {
            // An addition is one command for all contributions to a chunk, which follow each other.
            let count = addition_len(steps);
            match *step {
                Step::Reduce { cell, .. } => self.bind_addition(cell, &steps[..count], &mut bound),
                _ => self.bind_step(step, tier, &mut bound.commands),
            }
            steps = &steps[count..];

            // A step of the plan is the origin of all commands that it has added.
            if self.with_origins || self.handles.any() {
                origins.resize(bound.commands.len(), *step);
            }
        }
        let BoundSteps { mut commands, sources, contributors } = bound;

        // A joined copy would read chunks that depart later.
        if !self.handles.departures {
            join_neighbors(&mut commands);
        }
        if !self.resizable {
            // Origins and commands have the same indices, so both lose the same entries.
            let is_kept: Vec<bool> = commands.iter().map(|command| !command.is_empty()).collect();
            commands.retain(|command| !command.is_empty());
            let mut kept = is_kept.into_iter();
            origins.retain(|_| kept.next().unwrap_or(true));
        }

        let parts = Parts::new(self.plan, &origins, self.handles);
        Program {
            commands: commands.into(),
            sources: sources.into(),
            contributors: contributors.into(),
            origins: self.with_origins.then(|| origins.into()),
            entry_commands,
            launched: 0..0,
            waits: waits.collect(),
            parts,
        }
    }

    /// Appends the commands of one step of the plan, which is in a lane of `tier` and adds nothing.
    fn bind_step(&self, step: &Step, tier: Tier, commands: &mut Vec<Command>) {
        match *step {
            Step::Signal { peer, flag } => {
                let crosses_tiers = self.flag_tiers.is_signal_across(tier, flag);
                let (region, word) = (region_of_flag(crosses_tiers), self.flags.word(flag));
                commands.push(Command::Signal { flag: RegionFlag { region, word, peer, lag: 0 } });
            }
            Step::Wait { flag } => commands.push(Command::Wait { flag: self.awaited(flag) }),
            Step::Reduce { .. } => unreachable!("additions are bound together"),
            Step::Put { peer, from, .. } | Step::Get { peer, from, .. } => {
                let before = commands.len();
                commands.extend(copies(self.plan, self.layout, step).flat_map(|copy| {
                    // An engine without rows has a copy for each.
                    let rows = if self.rows { 1 } else { rows_of(&copy) };
                    (0..rows).map(move |row| if rows == 1 { copy } else { one_row(copy, row) })
                }));

                // `resize` only changes commands that exist, so a copy of no bytes has one too. Its
                // memory must be what all starts copy from and to, because only that is imported.
                if self.resizable && commands.len() == before {
                    let [src, dst] = [BufferPosition::default(); 2];
                    let none = Span { src, dst, bytes: 0, rows: Rows::ONE };
                    let direction = direction_of(step);
                    let (src, dst) = places(from, self.plan.in_place, &none);
                    let is_added = step.contributes(self.plan.collective);
                    let dst = if is_added { in_inbox(&none) } else { dst };
                    commands.push(bound_copy(direction, peer, (src, dst), &none));
                }
            }
        }
    }

    /// Appends the commands that add the contributions to the chunk `cell`, with their sources.
    ///
    /// There is one for each tensor that the chunk touches, or one for several of them if their
    /// bytes are neighbors in the output and in all sources. `steps` are the additions to the
    /// chunk, in their order.
    fn bind_addition(&self, cell: Cell, steps: &[Step], bound: &mut BoundSteps) {
        let (plan, layout) = (self.plan, self.layout);
        let reduction = self.reduction.expect("an operation whose plan adds is a reduction");
        let contributors = || {
            steps.iter().filter_map(|step| match *step {
                Step::Reduce { from, .. } => Some(from),
                _ => None,
            })
        };

        let mut targets: Vec<_> = targets(plan, layout, cell).collect();
        if targets.is_empty() && self.resizable {
            // `resize` only changes commands and sources that exist.
            targets.push((RegionOffset { region: BufferId::OUTPUT.region(), offset: 0 }, 0));
        }
        let given = contributors().map(|from| sources(plan, layout, cell, from).collect());
        let given: Vec<Vec<RegionOffset>> = given.collect();
        let none = RegionOffset { region: INBOX, offset: 0 };

        let before = bound.commands.len();
        for (index, (dst, bytes)) in targets.into_iter().enumerate() {
            let places = given.iter().map(|of_rank| of_rank.get(index).copied().unwrap_or(none));
            if bound.commands.len() > before && bound.extend_addition(dst, bytes, places.clone()) {
                continue;
            }

            let number =
                |count| u32::try_from(count).expect("a lane adds fewer than 2^32 contributions");
            let (first, count) = (number(bound.sources.len()), number(given.len()));
            bound.commands.push(Command::Reduce { dst, first, count, bytes, reduction });
            bound.sources.extend(places);
            bound.contributors.extend(contributors());
        }
    }

    fn awaited(&self, flag: Flag) -> RegionFlag {
        let region = region_of_flag(self.flag_tiers.is_wait_across(flag));
        let (word, lag) = (self.flags.word(flag), flag.lag());
        RegionFlag { region, word, peer: provider_or_writer(flag, self.plan.rank), lag }
    }
}

/// Returns the number of the region of a flag.
fn region_of_flag(crosses_tiers: bool) -> u32 {
    if crosses_tiers { CROSS_TIER_FLAGS } else { FLAGS }
}

fn direction_of(step: &Step) -> Direction {
    if matches!(step, Step::Get { .. }) { Direction::Get } else { Direction::Put }
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
fn join_neighbors(commands: &mut [Command]) {
    let mut first = None;
    for at in 0..commands.len() {
        let Command::Copy {
            direction: Direction::Put,
            peer,
            remote,
            local,
            bytes,
            rows: Rows::ONE,
        } = commands[at]
        else {
            first = None;
            continue;
        };
        // A put of no bytes separates nothing.
        if bytes == 0 {
            continue;
        }

        if let Some(run) = first
            && let Command::Copy { peer: of_run, remote: to, local: from, bytes: before, .. } =
                &mut commands[run]
            && *of_run == peer
            && to.is_followed_by(*before, remote)
            && from.is_followed_by(*before, local)
        {
            *before += bytes;
            if let Command::Copy { bytes, .. } = &mut commands[at] {
                *bytes = 0;
            }
        } else {
            first = Some(at);
        }
    }
}

/// The commands of several steps, and the sources of their additions with the ranks that
/// contribute them.
#[derive(Default)]
struct BoundSteps {
    commands: Vec<Command>,
    sources: Vec<RegionOffset>,
    contributors: Vec<Rank>,
}

impl BoundSteps {
    /// Adds bytes to the addition that was bound last, and returns whether they are neighbors of
    /// its bytes in the output and in all sources.
    fn extend_addition(
        &mut self,
        next: RegionOffset,
        next_bytes: u64,
        places: impl Iterator<Item = RegionOffset>,
    ) -> bool {
        let Some(Command::Reduce { dst, first, bytes, .. }) = self.commands.last_mut() else {
            return false;
        };
        let mut sources = self.sources[*first as usize..].iter().zip(places);
        let is_neighbor = dst.is_followed_by(*bytes, next)
            && sources.all(|(source, place)| source.is_followed_by(*bytes, place));
        if is_neighbor {
            *bytes += next_bytes;
        }
        is_neighbor
    }
}

/// Returns the number of steps at the beginning that add to one chunk, or 1 if the first step adds
/// nothing.
fn addition_len(steps: &[Step]) -> usize {
    let Some(Step::Reduce { cell: first, .. }) = steps.first() else { return 1 };
    let adds = |step: &&Step| matches!(step, Step::Reduce { cell, .. } if cell == first);
    steps.iter().take_while(adds).count()
}

/// Returns the places of the parts of a chunk that this rank adds, one for each tensor, and their
/// lengths in bytes.
fn targets(plan: &Plan, layout: &Layout, cell: Cell) -> impl Iterator<Item = (RegionOffset, u64)> {
    let spans = layout.spans(cell, (plan.rank, Source::Output), plan.rank);
    spans.map(|Span { dst, bytes, .. }| {
        let region = BufferId::Output(dst.buffer).region();
        (RegionOffset { region, offset: dst.offset }, bytes)
    })
}

/// Returns the places of a contribution to the chunk `cell`, which this rank adds, one for each
/// tensor.
fn sources(
    plan: &Plan,
    layout: &Layout,
    cell: Cell,
    from: Rank,
) -> impl Iterator<Item = RegionOffset> {
    let (rank, in_place) = (plan.rank, plan.in_place);
    let given = Cell { block: from, ..cell };
    layout.contribution_spans(given, own_source(in_place), rank).map(move |span| {
        match from == rank {
            true => places(Source::Input, in_place, &span).0,
            false => in_inbox(&span),
        }
    })
}

/// Returns the buffers that hold what a rank contributes.
fn own_source(in_place: bool) -> Source {
    if in_place { Source::Output } else { Source::Input }
}

/// Returns the place in an inbox to which a contribution goes.
fn in_inbox(contribution: &Span) -> RegionOffset {
    RegionOffset { region: INBOX, offset: contribution.dst.offset }
}

/// Returns the copies of a step that puts or gets, one for each tensor.
fn copies(plan: &Plan, layout: &Layout, step: &Step) -> impl Iterator<Item = Command> {
    let (peer, cell, from) = match *step {
        Step::Get { peer, cell, from } | Step::Put { peer, cell, from } => (peer, cell, from),
        Step::Reduce { .. } | Step::Signal { .. } | Step::Wait { .. } => {
            unreachable!("only copies have bytes")
        }
    };

    let direction = direction_of(step);
    let (of, into) = match direction {
        Direction::Put => (plan.rank, peer),
        Direction::Get => (peer, plan.rank),
    };
    let in_place = plan.in_place;
    let source = if in_place { Source::Output } else { from };

    let contributes = step.contributes(plan.collective);
    let given = contributes.then(|| layout.contribution_spans(cell, source, peer));
    let given = given.into_iter().flatten().map(move |span| {
        let (src, _) = places(from, in_place, &span);
        bound_copy(direction, peer, (src, in_inbox(&span)), &span)
    });

    let moved = (!contributes).then(|| layout.spans(cell, (of, source), into));
    let moved = moved
        .into_iter()
        .flatten()
        .map(move |span| bound_copy(direction, peer, places(from, in_place, &span), &span));
    given.chain(moved)
}

fn bound_copy(
    direction: Direction,
    peer: Rank,
    (src, dst): (RegionOffset, RegionOffset),
    &Span { bytes, rows, .. }: &Span,
) -> Command {
    let (remote, local) = match direction {
        Direction::Put => (dst, src),
        Direction::Get => (src, dst),
    };
    Command::Copy { direction, peer, remote, local, bytes, rows }
}

fn rows_of(copy: &Command) -> u64 {
    match copy {
        Command::Copy { rows, .. } => rows.count,
        Command::Reduce { .. } | Command::Signal { .. } | Command::Wait { .. } => 1,
    }
}

/// Returns a copy of one of the rows of a copy.
fn one_row(mut copy: Command, row: u64) -> Command {
    if let Command::Copy { direction, remote, local, rows, .. } = &mut copy {
        let (remote_pitch, local_pitch) = match direction {
            Direction::Put => (rows.dst_pitch, rows.src_pitch),
            Direction::Get => (rows.src_pitch, rows.dst_pitch),
        };
        remote.offset += row * remote_pitch;
        local.offset += row * local_pitch;
        *rows = Rows::ONE;
    }
    copy
}

/// Returns the places of the source and of the destination of a copy.
fn places(from: Source, in_place: bool, span: &Span) -> (RegionOffset, RegionOffset) {
    let src = match from {
        Source::Input if !in_place => BufferId::Input(span.src.buffer),
        Source::Input | Source::Output => BufferId::Output(span.src.buffer),
    };
    let dst = BufferId::Output(span.dst.buffer);

    let place = |buffer: BufferId, offset| RegionOffset { region: buffer.region(), offset };
    (place(src, span.src.offset), place(dst, span.dst.offset))
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
    use crate::element::{DType, Operator};
    use crate::layout::{BlockBytes, Lengths};
    use crate::plan::{Algorithm, Cell, FlagOrder, Lane};
    use crate::schedule::{self, Shape};

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
            inboxes: 1,
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
        let at = |buffer: BufferId, offset| RegionOffset { region: buffer.region(), offset };
        let copy = |direction, source: BufferId, from: u64, to: u64, bytes| Command::Copy {
            direction,
            peer: Rank(1),
            remote: at(BufferId::Output(0), to),
            local: at(source, from),
            bytes,
            rows: Rows::ONE,
        };
        let put = |to_peer, from, to, bytes| {
            let mut put = copy(Direction::Put, BufferId::Output(0), from, to, bytes);
            if let Command::Copy { peer, .. } = &mut put {
                *peer = Rank(to_peer);
            }
            put
        };
        let joined = |mut commands: Vec<Command>| -> Vec<u64> {
            join_neighbors(&mut commands);
            commands.iter().map(Command::bytes).collect()
        };
        let first = put(1, 100, 200, 8);
        let flag = RegionFlag { region: FLAGS, word: 0, peer: Rank(1), lag: 0 };
        let signal = Command::Signal { flag };
        let other_source = copy(Direction::Put, BufferId::Input(0), 108, 208, 4);
        let get = copy(Direction::Get, BufferId::Output(0), 108, 208, 4);

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

    /// Returns the bytes of the additions of rank 0 to tensors of these lengths.
    fn added(
        collective: Collective,
        blocks: BlockBytes,
        is_shared: bool,
        (chunks, resizable): (u32, bool),
    ) -> Vec<u64> {
        let layout = Layout::of_blocks(collective, blocks, chunks).unwrap();
        let layout = if is_shared { layout.with_shared_input() } else { layout };
        let topology = Topology::flat(layout.ranks()).unwrap();
        let shape = Shape { collective, chunks, ..Shape::default() };
        let plan = schedule::plan(Algorithm::Direct, &topology, Rank(0), shape).unwrap();
        let flags = FlagLayout::new(layout.ranks(), chunks, 1).for_collective(collective);
        let binding = Binding {
            plan: &plan,
            layout: &layout,
            flags,
            flag_tiers: &FlagTiers::new(&plan, []),
            reduction: Reduction::new(Operator::Sum, DType::U8).ok(),
            with_origins: resizable,
            handles: Handles::default(),
            resizable,
            rows: false,
        };
        let program = binding.bind(LaneId::HOME);
        assert_eq!(program.sources.len(), program.contributors.len());
        let additions = program.commands.iter();
        let additions = additions.filter(|one| matches!(one, Command::Reduce { .. }));
        additions.map(Command::bytes).collect()
    }

    #[test]
    fn pieces_that_are_neighbors_are_added_at_once() {
        let tensors = |lens: &[u64]| {
            let lengths = |&bytes: &u64| Lengths::equal(2, bytes).unwrap();
            BlockBytes::ByTensor(lens.iter().map(lengths).collect())
        };
        // Whole inputs have nothing between the tensors.
        let scatter = Collective::ReduceScatter;
        assert_eq!(added(scatter, tensors(&[64, 10, 0, 70]), true, (1, false)), [144]);
        assert_eq!(added(scatter, tensors(&[64, 10, 0, 70]), true, (2, false)), [64, 80]);
        // Blocks for other ranks are between them.
        assert_eq!(added(scatter, tensors(&[64, 10, 0, 70]), false, (1, false)), [64, 10, 70]);
        let parts = tensors(&[256, 0, 64]).parts().unwrap();
        assert_eq!(added(Collective::AllReduce, parts, false, (1, false)), [128]);
        // What has no bytes can get longer.
        assert_eq!(added(scatter, tensors(&[0]), false, (2, false)), [0; 0]);
        assert_eq!(added(scatter, tensors(&[0]), false, (2, true)), [0; 2]);
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
        let collective = Collective::AllToAll;
        for nodes in [&[0][..], &[0; 2], &[0; 5], &[0, 0, 1, 1], &[0, 1, 1, 2, 1]] {
            let topology = Topology::of_nodes(nodes).unwrap();
            let tiers = topology.nodes() > 1;
            for flags in [FlagOrder::Prompt, FlagOrder::Batched] {
                for algorithm in [Algorithm::Direct, Algorithm::Pull] {
                    let shape = Shape { collective, chunks: 2, flags, tiers, ..Shape::default() };
                    for rank in Rank::all(nodes.len()) {
                        let plan = schedule::plan(algorithm, &topology, rank, shape).unwrap();
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
