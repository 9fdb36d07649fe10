//! Packs the plans of all ranks into memory, and links each signal to the step that waits for it.

use peerlane_hal::{ErrorKind, Rank, Rows};

use crate::error::Error;
use crate::layout::{self, BufferPosition, FLAG_WORDS, FlagLayout, Layout, Span};
use crate::plan::{Cell, Flag, LaneId, Plan, Source, Step, Tier};

/// The maximum number of plan steps of all ranks together in one simulation.
///
/// A step takes about 25 bytes, and this many steps take 3.2 GiB. Plans of 4096 ranks in one chunk
/// have up to 84 million steps.
pub const STEPS_MAX: u32 = 1 << 27;

/// The maximum number of flags of all ranks together in one simulation.
///
/// A flag takes 4 bytes until the program is linked, and this many flags take 1.25 GiB. Plans of
/// 4096 ranks with four lanes and one chunk have 256 Mi flags.
const FLAGS_MAX: u64 = 320 << 20;

/// Marks a flag that no step waits for.
const NO_WAIT: u32 = u32::MAX;

/// Stores the plan steps of all ranks in packed form, lane by lane.
///
/// Lane `l` of rank `r` has the number r × lanes + l.
#[derive(Debug)]
pub(super) struct Program {
    pub(super) steps: Vec<PackedStep>,
    /// The index of the first step of each lane, followed by the total number of steps.
    pub(super) first: Vec<u32>,
    /// The tier of each lane of a rank, equal on all ranks.
    pub(super) tiers: Vec<Tier>,
    outputs: u32,
    in_place: bool,
}

/// Identifies a plan step by its rank, its lane and its index in the lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct StepId {
    pub(super) rank: Rank,
    pub(super) lane: LaneId,
    pub(super) index: usize,
}

impl Program {
    pub(super) fn lanes(&self) -> usize {
        self.tiers.len()
    }

    /// Returns the largest number of input and output bytes that any rank accesses in consecutive
    /// starts.
    pub(super) fn accessed_bytes(&self, layout: &Layout) -> u64 {
        let of_rank = |rank| {
            let input = if self.in_place { 0 } else { layout.input_bytes(rank) };
            layout.output_bytes(rank).saturating_mul(self.outputs.into()).saturating_add(input)
        };

        Rank::all(layout.ranks()).map(of_rank).max().unwrap_or(0)
    }

    /// Returns the rank, the lane and the index in the lane of the step that has the index `number`
    /// in `steps`.
    pub(super) fn step_id(&self, number: u32) -> StepId {
        // Of several lanes that begin at the same step, only the last can have steps.
        let lane = self.first.partition_point(|&first| first <= number) - 1;
        StepId {
            rank: Rank::at(lane / self.lanes()),
            lane: LaneId((lane % self.lanes()) as u32),
            index: (number - self.first[lane]) as usize,
        }
    }
}

/// Builds a [`Program`] from the plans of all ranks, which are added in rank order.
#[derive(Debug)]
pub(super) struct Compiler<'a> {
    layout: &'a Layout,
    program: Program,
    flags: FlagLayout,
    /// The step that waits for each flag, indexed by rank and then by flag, or [`NO_WAIT`].
    waits: Vec<u32>,
    flags_per_rank: u64,
    /// The puts that the next step may be joined with.
    run: Option<PutRun>,
}

/// Describes puts of one lane to one peer that follow each other and are one copy.
#[derive(Clone, Copy, Debug)]
struct PutRun {
    /// The number of the first put.
    first: u32,
    peer: Rank,
    from: Source,
    span: Span,
    /// Whether a peer has put some of the bytes here.
    passed_on: bool,
}

impl<'a> Compiler<'a> {
    /// Creates a compiler for plans with the same lanes as `first`, the plan of rank 0.
    ///
    /// # Errors
    /// If there is no lane, or there are too many lanes or flags.
    pub(super) fn new(layout: &'a Layout, first: &Plan) -> Result<Self, Error> {
        let ranks = layout.ranks();
        let tiers: Vec<Tier> = first.lanes.iter().map(|lane| lane.tier).collect();
        let all_lanes = (ranks as u64).saturating_mul(tiers.len() as u64);
        // Lanes are numbered over all ranks, and a packed step has room for numbers up to
        // `PEER_MAX`.
        if tiers.is_empty() || all_lanes > PEER_MAX {
            let lanes = tiers.len();
            return Err(invalid(format!(
                "{ranks} ranks with {lanes} lanes each, expected 1 to {PEER_MAX} lanes in total"
            )));
        }

        let all_flags = check_flags(layout, tiers.len())?;
        let flags = flag_layout(layout, tiers.len());
        let flags_per_rank = flags.words() / FLAG_WORDS;

        let Plan { outputs, in_place, .. } = *first;
        let program = Program { steps: Vec::new(), first: vec![0], tiers, outputs, in_place };

        Ok(Self {
            layout,
            program,
            flags,
            waits: vec![NO_WAIT; all_flags as usize],
            flags_per_rank,
            run: None,
        })
    }

    /// Appends the steps of `plan`, the plan of the next rank in rank order, to the program.
    ///
    /// With `flagged`, lanes other than the home lane start and end by flags.
    ///
    /// # Errors
    /// If the plan does not match those before it, names something that does not exist, or is too
    /// large.
    pub(super) fn push(&mut self, plan: &Plan, flagged: bool) -> Result<(), Error> {
        self.check(plan)?;

        for lane in plan.lane_ids() {
            self.run = None;
            for (index, step) in plan.closed_lane(lane, |_| flagged).into_iter().enumerate() {
                let number = self.program.steps.len() as u32;
                let packed = self.pack(plan.rank, number, step).map_err(|what| {
                    let rank = plan.rank;
                    invalid(format!("step {index} of lane {lane} of rank {rank}: {what}"))
                })?;
                let packed = self.join(plan.rank, number, step, packed);
                self.program.steps.push(PackedStep::new(packed));

                // The check after every step also keeps the numbers of steps within 32 bits.
                if number >= STEPS_MAX {
                    return Err(too_large(self.layout, &format!("more than {STEPS_MAX} steps")));
                }
            }

            self.program.first.push(self.program.steps.len() as u32);
        }

        Ok(())
    }

    /// Links each signal to the step that waits for its flag, and returns the finished program.
    ///
    /// # Errors
    /// A signal whose flag no step waits for, or that another signal duplicates.
    pub(super) fn link(mut self) -> Result<Program, (StepId, &'static str)> {
        let lanes = self.program.lanes() as u64;
        let unlinked = PackedStep::new(ModelStep::Wait { signal: None });

        for number in 0..self.program.steps.len() {
            let ModelStep::Signal { lane, target } = self.program.steps[number].unpack() else {
                continue;
            };
            if target == NEXT_START {
                continue;
            }

            let reader = u64::from(lane) / lanes;
            let wait = self.waits[(reader * self.flags_per_rank + target) as usize];
            if wait == NO_WAIT {
                return Err((
                    self.program.step_id(number as u32),
                    "no step waits for the signalled flag",
                ));
            }

            if self.program.steps[wait as usize] != unlinked {
                return Err((
                    self.program.step_id(number as u32),
                    "the flag is signalled twice in one start",
                ));
            }

            let signal = Some(number as u32);
            self.program.steps[wait as usize] = PackedStep::new(ModelStep::Wait { signal });
            self.program.steps[number] =
                PackedStep::new(ModelStep::Signal { lane, target: wait.into() });
        }
        Ok(self.program)
    }

    /// Checks that `plan` is the plan of the next rank, and has the same sizes and tiers as earlier
    /// plans.
    fn check(&self, plan: &Plan) -> Result<(), Error> {
        // Each rank before this one has added the beginnings of its lanes to `first`.
        let rank = (self.program.first.len() - 1) / self.program.lanes();
        let fields = [
            ("rank", u64::from(plan.rank.0), rank as u64),
            ("ranks", plan.ranks.into(), self.layout.ranks() as u64),
            ("chunks", plan.chunks.into(), self.layout.chunks().into()),
            ("lanes", plan.lanes.len() as u64, self.program.lanes() as u64),
        ];
        let differing = fields.iter().find(|(_, found, expected)| found != expected);
        if let Some((field, found, expected)) = differing {
            let text =
                format!("{field} of the plan of rank {rank} is {found}, expected {expected}");
            return Err(invalid(text));
        }

        let tiers = plan.lanes.iter().map(|lane| lane.tier);
        if !tiers.eq(self.program.tiers.iter().copied()) {
            let text = format!("tiers of the lanes differ between rank {rank} and rank 0");
            return Err(Error::new(ErrorKind::Mismatch, text));
        }

        Ok(())
    }

    /// Returns `packed`, or a step that takes no time if the put of `step` is part of the copy of
    /// an earlier step.
    ///
    /// An engine makes one copy of puts to one peer that follow each other, if their bytes are
    /// neighbors in the source and in the destination.
    fn join(&mut self, rank: Rank, number: u32, step: Step, packed: ModelStep) -> ModelStep {
        let (Step::Put { peer, cell, from }, ModelStep::Put { peer: target, bytes, passed_on }) =
            (step, packed)
        else {
            self.run = None;
            return packed;
        };
        // A put of no bytes separates nothing.
        if bytes == 0 {
            return packed;
        }

        let before = self.run.take();
        let Some(span) = self.single_span(rank, peer, step, (cell, from)) else { return packed };

        if let Some(run) = before.filter(|run| (run.peer, run.from) == (peer, from))
            && let Some(span) = run.span.joined(span).filter(|span| span.bytes <= OPERAND_MAX)
        {
            let passed_on = run.passed_on || passed_on;
            let whole = ModelStep::Put { peer: target, bytes: span.bytes, passed_on };
            self.program.steps[run.first as usize] = PackedStep::new(whole);
            self.run = Some(PutRun { span, passed_on, ..run });
            return ModelStep::Joined;
        }

        self.run = Some(PutRun { first: number, peer, from, span, passed_on });
        packed
    }

    /// Returns the bytes that a put of `rank` copies, or `None` if they are in several pieces or
    /// the put is one that only the verifier refuses.
    fn single_span(
        &self,
        rank: Rank,
        peer: Rank,
        step: Step,
        (cell, from): (Cell, Source),
    ) -> Option<Span> {
        let collective = self.layout.collective();
        let position = |offset| BufferPosition { buffer: 0, offset };
        if step.contributes(collective) {
            let source = if self.program.in_place { Source::Output } else { from };
            let mut spans = self.layout.contribution_spans(cell, source, peer);
            return match (spans.next(), spans.next()) {
                (Some(span), None) => Some(span),
                (Some(_), Some(_)) => None,
                (None, _) => {
                    // A put of no bytes can be joined with any other that begins at its offsets.
                    let given = self.layout.contribution(cell, peer);
                    let [src, dst] = [given.input_offset, given.output_offset].map(position);
                    Some(Span { src, dst, bytes: 0, rows: Rows::ONE })
                }
            };
        }

        let source = if self.program.in_place { Source::Output } else { from };
        let is_readable = match source {
            Source::Input => cell.block == rank,
            Source::Output => collective.requires(cell.block, rank),
        };
        if !is_readable || !collective.requires(cell.block, peer) {
            return None;
        }

        let mut spans = self.layout.spans(cell, (rank, source), peer);
        let span = spans.next()?;
        spans.next().is_none().then_some(span)
    }

    /// Checks a plan step of `rank`, and converts it to a step of the simulation's model.
    ///
    /// A wait for a flag of this start is registered under the flag, with `number` as its number.
    fn pack(&mut self, rank: Rank, number: u32, step: Step) -> Result<ModelStep, String> {
        Ok(match step {
            Step::Put { peer, cell, .. } | Step::Get { peer, cell, .. } => {
                let peer_number = self.known_rank(peer)?;
                self.check_cell(cell)?;

                let receiver = if matches!(step, Step::Put { .. }) { peer } else { rank };
                let bytes = match step.contributes(self.layout.collective()) {
                    true => self.layout.contribution(cell, receiver).bytes,
                    false => self.layout.cell(cell, receiver).bytes,
                };
                check_bytes(cell, bytes)?;

                match step {
                    Step::Get { .. } => ModelStep::Get { peer: peer_number, bytes },
                    // A block of another rank has come from a peer, whose cache may still hold it.
                    _ => {
                        let passed_on = cell.block != rank;
                        ModelStep::Put { peer: peer_number, bytes, passed_on }
                    }
                }
            }

            // An addition is modelled as a copy inside the rank. Peers have put all contributions
            // but one here, so all count as forwarded bytes.
            Step::Reduce { cell, from } => {
                self.known_rank(from)?;
                let peer = self.known_rank(rank)?;
                self.check_cell(cell)?;

                let bytes = self.layout.cell(cell, rank).bytes;
                check_bytes(cell, bytes)?;

                ModelStep::Put { peer, bytes, passed_on: true }
            }

            Step::Signal { peer, flag } => {
                let (reader, flag_number) = self.flag_reader(flag)?;
                let lane = self.known_rank(peer)? * self.program.lanes() as u32 + reader.0;
                let target = if flag.lag() == 0 { flag_number } else { NEXT_START };
                ModelStep::Signal { lane, target }
            }

            // The start before has signalled the flag. Such a wait names itself as the signal.
            Step::Wait { flag } if flag.lag() > 0 => {
                self.flag_reader(flag)?;
                ModelStep::Wait { signal: Some(number) }
            }

            Step::Wait { flag } => {
                let (_, flag_number) = self.flag_reader(flag)?;
                let index = u64::from(rank.0) * self.flags_per_rank + flag_number;
                let wait = &mut self.waits[index as usize];
                if *wait != NO_WAIT {
                    return Err(format!("two waits in one start use the flag {flag}"));
                }

                *wait = number;
                ModelStep::Wait { signal: None }
            }
        })
    }

    fn known_rank(&self, rank: Rank) -> Result<u32, String> {
        let ranks = self.layout.ranks();
        if rank.index() < ranks {
            Ok(rank.0)
        } else {
            Err(format!("rank {rank} does not exist, expected a rank below {ranks}"))
        }
    }

    /// Checks that a cell has a rank and a chunk that exist.
    fn check_cell(&self, cell: Cell) -> Result<(), String> {
        self.known_rank(cell.block)?;
        let chunks = self.layout.chunks();
        if cell.chunk >= chunks {
            return Err(format!("cell {cell} does not exist, expected a chunk below {chunks}"));
        }
        Ok(())
    }

    /// Returns the lane that waits for `flag`, and the number of the flag on the waiting rank.
    ///
    /// Fails if the flag contains a rank, a chunk or a lane that does not exist.
    fn flag_reader(&self, flag: Flag) -> Result<(LaneId, u64), String> {
        let (lane, rank) = match flag {
            Flag::Ready { from: rank, lane }
            | Flag::Free { from: rank, lane }
            | Flag::Taken { by: rank, lane } => (lane, rank),
            Flag::Arrived { cell, lane } | Flag::Contributed { cell, lane } => (lane, cell.block),
            // These flags contain no rank; rank 0 always exists.
            Flag::Go { lane } | Flag::Sent { lane } => (lane, Rank(0)),
        };
        self.known_rank(rank)?;

        let chunk = match flag {
            Flag::Arrived { cell, .. } | Flag::Contributed { cell, .. } => cell.chunk,
            _ => 0,
        };
        if chunk >= self.layout.chunks() || lane.index() >= self.program.lanes() {
            return Err(format!("the flag {flag} names a chunk or a lane that does not exist"));
        }

        // Only the flags of a reduction have words for contributions.
        let is_reduction = self.layout.collective().is_reduction();
        if matches!(flag, Flag::Contributed { .. }) && !is_reduction {
            return Err(format!(
                "the flag {flag} is one of a reduction, which the collective is not"
            ));
        }

        let reader = layout::reader(flag);
        Ok((reader, self.flags.word(flag) / FLAG_WORDS))
    }
}

/// Checks that the bytes of a cell fit into a packed step.
fn check_bytes(cell: Cell, bytes: u64) -> Result<(), String> {
    if bytes > OPERAND_MAX {
        return Err(format!("cell {cell} has {bytes} bytes, expected at most {OPERAND_MAX}"));
    }
    Ok(())
}

pub(super) fn invalid(text: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, text)
}

/// Returns the number of flags of all ranks with `lanes` lanes each, or an error above
/// [`FLAGS_MAX`].
///
/// # Errors
/// If there are more than [`FLAGS_MAX`] flags.
pub(super) fn check_flags(layout: &Layout, lanes: usize) -> Result<u64, Error> {
    let flags_per_rank = flag_layout(layout, lanes).words() / FLAG_WORDS;
    let flags = flags_per_rank.saturating_mul(layout.ranks() as u64);
    if flags > FLAGS_MAX {
        let found = format!("{flags} flags, more than {FLAGS_MAX}");
        return Err(too_large(layout, &found));
    }

    Ok(flags)
}

fn flag_layout(layout: &Layout, lanes: usize) -> FlagLayout {
    let flags = FlagLayout::new(layout.ranks(), layout.chunks(), lanes);
    flags.for_collective(layout.collective())
}

fn too_large(layout: &Layout, found: &str) -> Error {
    let ranks = layout.ranks();
    let chunks = layout.chunks();
    let plural = if chunks == 1 { "" } else { "s" };
    invalid(format!(
        "{ranks} ranks with {chunks} chunk{plural} have {found}, the maximum of a simulation; use fewer ranks \
         or chunks"
    ))
}

const KIND_BITS: u32 = 3;
const PEER_BITS: u32 = 22;
const OPERAND_BITS: u32 = u64::BITS - KIND_BITS - PEER_BITS;

/// The largest number of a rank or a lane in a packed step.
pub(super) const PEER_MAX: u64 = (1 << PEER_BITS) - 1;
/// The largest operand of a packed step, such as a number of bytes.
///
/// [`NONE`] is one more.
pub(super) const OPERAND_MAX: u64 = (1 << OPERAND_BITS) - 2;
/// Marks a signal whose flag is awaited only in the next execution of the operation.
pub(super) const NEXT_START: u64 = OPERAND_MAX;
/// Marks a wait for a flag that no step signals.
const NONE: u64 = OPERAND_MAX + 1;

/// Stores the properties of a plan step that determine its simulated time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ModelStep {
    /// Writes `bytes` bytes to the memory of rank `peer`, which can be this rank.
    ///
    /// `passed_on` is true if a peer has put the bytes here.
    Put { peer: u32, bytes: u64, passed_on: bool },
    /// Reads `bytes` bytes from the memory of rank `peer`, which can be this rank.
    Get { peer: u32, bytes: u64 },
    /// Signals a flag that lane `lane` waits for.
    ///
    /// Lanes are numbered over all ranks.
    ///
    /// Linking replaces `target`, which is the number of the flag, by the step that waits for the
    /// flag.
    Signal { lane: u32, target: u64 },
    /// Is a put whose bytes the copy of an earlier step moves, and takes no time.
    Joined,
    /// Waits for the flag that the step `signal` sets.
    ///
    /// `signal` is the wait itself if the start before has set the flag, and `None` if no step sets
    /// it or before signals are linked.
    Wait { signal: Option<u32> },
}

/// Stores a [`ModelStep`] in 8 bytes, so that the plans of thousands of ranks fit in memory at
/// once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PackedStep(u64);

impl PackedStep {
    /// Packs a model step into 8 bytes.
    ///
    /// The caller has checked that numbers are at most [`PEER_MAX`] and [`OPERAND_MAX`].
    pub(super) fn new(step: ModelStep) -> Self {
        let (kind, number, operand) = match step {
            ModelStep::Put { peer, bytes, passed_on: false } => (0, peer, bytes),
            ModelStep::Put { peer, bytes, passed_on: true } => (4, peer, bytes),
            ModelStep::Get { peer, bytes } => (1, peer, bytes),
            ModelStep::Joined => (5, 0, 0),
            ModelStep::Signal { lane, target } => (2, lane, target),
            ModelStep::Wait { signal } => (3, 0, signal.map_or(NONE, u64::from)),
        };

        // A larger number would change the other fields.
        debug_assert!(u64::from(number) <= PEER_MAX && operand <= NONE, "{step:?}");
        Self(kind | u64::from(number) << KIND_BITS | operand << (KIND_BITS + PEER_BITS))
    }

    /// Returns the step that [`new`](Self::new) has packed.
    pub(super) fn unpack(self) -> ModelStep {
        let number = (self.0 >> KIND_BITS & PEER_MAX) as u32;
        let operand = self.0 >> (KIND_BITS + PEER_BITS);
        match self.0 & ((1 << KIND_BITS) - 1) {
            kind @ (0 | 4) => ModelStep::Put { peer: number, bytes: operand, passed_on: kind == 4 },
            1 => ModelStep::Get { peer: number, bytes: operand },
            5 => ModelStep::Joined,
            2 => ModelStep::Signal { lane: number, target: operand },
            _ => ModelStep::Wait { signal: u32::try_from(operand).ok() },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_has_8_bytes_and_comes_back() {
        assert_eq!(size_of::<PackedStep>(), 8);
        let number = PEER_MAX as u32;
        for step in [
            ModelStep::Put { peer: 0, bytes: OPERAND_MAX, passed_on: false },
            ModelStep::Put { peer: number, bytes: 0, passed_on: true },
            ModelStep::Get { peer: 1, bytes: 17 },
            ModelStep::Joined,
            ModelStep::Signal { lane: number, target: OPERAND_MAX },
            ModelStep::Wait { signal: None },
            ModelStep::Wait { signal: Some(0) },
            ModelStep::Wait { signal: Some(u32::MAX - 1) },
        ] {
            assert_eq!(PackedStep::new(step).unpack(), step);
        }
    }
}
