//! The plans of all ranks, packed: made one after the other, and every flag resolved to the steps
//! that signal it and wait for it.

use peerlane_hal::{ErrorKind, Rank};

use super::packed::{Move, Packed, WHAT_MAX, WHO_MAX};
use crate::error::Error;
use crate::layout::{FLAG_WORDS, FlagLayout, Layout};
use crate::plan::{Flag, LaneId, Plan, Step, Tier};

/// The most steps of all ranks together: they take about 25 bytes each, 12 GiB in all.
pub const STEPS_MAX: u32 = 1 << 29;

/// The most flags of all ranks, used or not: they take 4 bytes each until the program is linked.
const FLAGS_MAX: u64 = 1 << 30;

/// No step waits for the flag.
const NOBODY: u32 = u32::MAX;

/// All steps of all ranks. Lanes are counted over all ranks: lane l of rank r is r × lanes + l.
#[derive(Debug)]
pub(super) struct Program {
    /// By lane, then as in the closed lane of the plan.
    pub(super) steps: Vec<Packed>,
    /// Where the steps of each lane begin; one more than there are lanes.
    pub(super) first: Vec<u32>,
    /// Of each lane of a rank; the same for all ranks.
    pub(super) tiers: Vec<Tier>,
    outputs: u32,
    in_place: bool,
}

/// Where a step stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    pub(super) rank: Rank,
    pub(super) lane: LaneId,
    /// Among the steps of the closed lane.
    pub(super) index: usize,
}

impl Program {
    /// How many lanes a rank has.
    pub(super) fn lanes(&self) -> usize {
        self.tiers.len()
    }

    /// The most bytes that one rank touches in a start, with the outputs that are used in turn.
    pub(super) fn reach_bytes(&self, layout: &Layout) -> u64 {
        let inputs = Rank::all(layout.ranks()).map(|rank| layout.input_bytes(rank));
        let input = if self.in_place { 0 } else { inputs.max().unwrap_or(0) };
        layout.total_bytes().saturating_mul(self.outputs.into()).saturating_add(input)
    }

    /// Where step `number` stands.
    pub(super) fn place(&self, number: u32) -> Place {
        let lane = self.first.partition_point(|&first| first <= number) - 1;
        Place {
            rank: Rank::at(lane / self.lanes()),
            lane: LaneId((lane % self.lanes()) as u32),
            index: (number - self.first[lane]) as usize,
        }
    }
}

/// Packs plans.
#[derive(Debug)]
pub(super) struct Compiler<'a> {
    layout: &'a Layout,
    program: Program,
    flags: FlagLayout,
    /// For each rank and flag the step that waits.
    waits: Vec<u32>,
    /// Flags that a rank can wait for.
    lines: u64,
}

impl<'a> Compiler<'a> {
    /// For plans such as `first`.
    ///
    /// # Errors
    /// If they are too large.
    pub(super) fn new(layout: &'a Layout, first: &Plan) -> Result<Self, Error> {
        let ranks = layout.ranks();
        let tiers: Vec<Tier> = first.lanes.iter().map(|lane| lane.tier).collect();
        let all_lanes = (ranks as u64).saturating_mul(tiers.len() as u64);
        if tiers.is_empty() || all_lanes > WHO_MAX {
            let lanes = tiers.len();
            return Err(invalid(format!(
                "{ranks} ranks have {lanes} lanes each, expected 1 to {WHO_MAX} lanes in all"
            )));
        }
        let flags = FlagLayout::new(ranks, layout.chunks(), tiers.len());
        let lines = flags.words() / FLAG_WORDS;
        let all_flags = lines.saturating_mul(ranks as u64);
        if all_flags > FLAGS_MAX {
            return Err(too_large(ranks, layout.chunks()));
        }
        let Plan { outputs, in_place, .. } = *first;
        let program = Program { steps: Vec::new(), first: vec![0], tiers, outputs, in_place };
        Ok(Self { layout, program, flags, waits: vec![NOBODY; all_flags as usize], lines })
    }

    /// Takes the plan of the next rank. Lanes other than home are entered and left by flags if
    /// `flagged`.
    ///
    /// # Errors
    /// If it does not fit to those before it, names what is not there, or is too large.
    pub(super) fn push(&mut self, plan: &Plan, flagged: bool) -> Result<(), Error> {
        self.check(plan)?;
        for lane in plan.lane_ids() {
            for (index, step) in plan.closed_lane(lane, |_| flagged).into_iter().enumerate() {
                let number = self.program.steps.len() as u32;
                let packed = self.pack(plan.rank, number, step).map_err(|what| {
                    let rank = plan.rank;
                    invalid(format!("step {index} of lane {lane} of rank {rank}: {what}"))
                })?;
                self.program.steps.push(Packed::new(packed));
                if number >= STEPS_MAX {
                    return Err(too_large(self.layout.ranks(), self.layout.chunks()));
                }
            }
            self.program.first.push(self.program.steps.len() as u32);
        }
        Ok(())
    }

    /// Joins signals and waits.
    ///
    /// # Errors
    /// The place of a signal that nobody waits for, or that another one has made already.
    pub(super) fn link(mut self) -> Result<Program, (Place, &'static str)> {
        let lanes = self.program.lanes() as u64;
        for number in 0..self.program.steps.len() {
            let Move::Signal { lane, what } = self.program.steps[number].unpack() else { continue };
            let reader = u64::from(lane) / lanes;
            let wait = self.waits[(reader * self.lines + what) as usize];
            if wait == NOBODY {
                return Err((self.program.place(number as u32), "nobody waits for it"));
            }
            let signal = Some(number as u32);
            if self.program.steps[wait as usize] != Packed::new(Move::Wait { signal: None }) {
                return Err((self.program.place(number as u32), "it is signalled twice"));
            }
            self.program.steps[wait as usize] = Packed::new(Move::Wait { signal });
            self.program.steps[number] = Packed::new(Move::Signal { lane, what: wait.into() });
        }
        Ok(self.program)
    }

    fn check(&self, plan: &Plan) -> Result<(), Error> {
        let (ranks, chunks) = (self.layout.ranks() as u64, self.layout.chunks());
        let rank = (self.program.first.len() - 1) / self.program.lanes();
        let tiers = plan.lanes.iter().map(|lane| lane.tier);
        let fields = [
            ("rank", u64::from(plan.rank.0), rank as u64),
            ("ranks", plan.ranks.into(), ranks),
            ("chunks", plan.chunks.into(), chunks.into()),
            ("lanes", plan.lanes.len() as u64, self.program.lanes() as u64),
        ];
        if let Some((field, seen, wanted)) = fields.iter().find(|(_, seen, wanted)| seen != wanted)
        {
            let text = format!("{field} of the plan of rank {rank} is {seen}, expected {wanted}");
            return Err(invalid(text));
        }
        if !tiers.eq(self.program.tiers.iter().copied()) {
            let text = format!("tiers of the lanes of rank {rank} are not those of rank 0");
            return Err(Error::new(ErrorKind::Mismatch, text));
        }
        Ok(())
    }

    fn pack(&mut self, rank: Rank, number: u32, step: Step) -> Result<Move, String> {
        Ok(match step {
            Step::Put { peer, cell, .. } | Step::Get { peer, cell, .. } => {
                let peer = self.known_rank(peer)?;
                self.known_rank(cell.shard)?;
                if cell.chunk >= self.layout.chunks() {
                    return Err(format!(
                        "cell {cell} is not one of {} chunks",
                        self.layout.chunks()
                    ));
                }
                let bytes = self.layout.cell(cell).bytes;
                if bytes > WHAT_MAX {
                    return Err(format!("cell {cell} has {bytes} bytes, at most {WHAT_MAX} fit"));
                }
                match step {
                    Step::Get { .. } => Move::Get { peer, bytes },
                    _ => Move::Put { peer, bytes, passed_on: cell.shard != rank },
                }
            }
            Step::Signal { peer, flag } => {
                let (lane, what) = self.line(flag)?;
                let lane = self.known_rank(peer)? * self.program.lanes() as u32 + lane.0;
                Move::Signal { lane, what }
            }
            Step::Wait { flag } => {
                let (_, line) = self.line(flag)?;
                let wait = &mut self.waits[(u64::from(rank.0) * self.lines + line) as usize];
                if *wait != NOBODY {
                    return Err(format!("{flag} is waited for twice"));
                }
                *wait = number;
                Move::Wait { signal: None }
            }
        })
    }

    fn known_rank(&self, rank: Rank) -> Result<u32, String> {
        let ranks = self.layout.ranks();
        if rank.index() < ranks {
            Ok(rank.0)
        } else {
            Err(format!("rank {rank} is none of {ranks}"))
        }
    }

    /// The lane that waits for the flag, and the flag's number among those of its reader.
    fn line(&self, flag: Flag) -> Result<(LaneId, u64), String> {
        let (lane, rank) = match flag {
            Flag::Ready { from: rank, lane } | Flag::Taken { by: rank, lane } => (lane, rank),
            Flag::Arrived { cell, lane } => (lane, cell.shard),
            Flag::Go { lane } | Flag::Sent { lane } => (lane, Rank(0)),
        };
        self.known_rank(rank)?;
        let chunk = if let Flag::Arrived { cell, .. } = flag { cell.chunk } else { 0 };
        if chunk >= self.layout.chunks() || lane.index() >= self.program.lanes() {
            return Err(format!("{flag} names a chunk or a lane that is not there"));
        }
        let reader = if let Flag::Sent { .. } = flag { LaneId::HOME } else { lane };
        Ok((reader, self.flags.word(flag) / FLAG_WORDS))
    }
}

pub(super) fn invalid(text: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, text)
}

fn too_large(ranks: usize, chunks: u32) -> Error {
    invalid(format!(
        "ranks is {ranks} and chunks is {chunks}: more than {STEPS_MAX} steps, the most that are \
         simulated at once"
    ))
}
