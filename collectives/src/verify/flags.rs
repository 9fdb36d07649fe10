//! Checks that every flag has one writer lane and one reader lane, and is signalled and waited for once in a start.
//!
//! A flag may be used only once in a start, because all values of a start are the same epoch: a second wait would pass on
//! the first signal.

use peerlane_hal::Rank;

use super::fault::{Fault, Place};
use super::program::Program;
use crate::plan::{Flag, LaneId, Step, Tier};

/// The flags that the followed ranks read, and the steps that name them.
#[derive(Debug)]
pub(super) struct Flags {
    ends: Vec<Ends>,
    /// The flag of every signal and wait, by lane and step; unused for copies.
    of_step: Vec<Vec<u32>>,
}

/// The two ends of one flag.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ends {
    /// The rank that signals the flag of the followed rank.
    pub(super) writer: Rank,
    /// The number of the lane that represents the writer's, and the index of the signal in it.
    pub(super) signal: (usize, usize),
    /// The number of the reader's lane, and the index of the wait in it.
    pub(super) wait: (usize, usize),
}

impl Flags {
    /// Returns the number of flags.
    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    /// Returns the two ends of the flag that a step names.
    pub(super) fn of_step(&self, lane: usize, at: usize) -> Ends {
        self.ends[self.of_step[lane][at] as usize]
    }
}

/// A step that names a flag, with the rank whose lane is represented.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Use {
    flag: Flag,
    is_wait: bool,
    rank: Rank,
    lane: usize,
    at: usize,
}

/// Checks and numbers the flags.
pub(super) fn check(program: &Program) -> Result<Flags, Fault> {
    let symmetry = &program.symmetry;
    let mut uses: Vec<Vec<Use>> = vec![Vec::new(); program.lanes.len() / program.width];
    for (lane, at, step) in program.steps() {
        let me = program.lanes[lane].rank;
        let (reader, flag, is_wait) = match step {
            Step::Put { .. } | Step::Get { .. } => continue,
            Step::Signal { peer, flag } => (peer, flag, false),
            Step::Wait { flag } => (me, flag, true),
        };
        let turn = symmetry.turn_back(reader);
        let (flag, rank) = (symmetry.turned_flag(turn, flag), symmetry.turned(turn, me));
        uses[symmetry.number(reader)].push(Use { flag, is_wait, rank, lane, at });
    }
    let of_step = program.lanes.iter().map(|lane| vec![0; lane.steps.len()]).collect();
    let mut flags = Flags { ends: Vec::new(), of_step };
    for ((reader, _), mut uses) in program.homes().zip(uses) {
        uses.sort_unstable();
        for uses in uses.chunk_by(|a, b| a.flag == b.flag) {
            let ends = Ends::check(program, reader, uses)?;
            let number = u32::try_from(flags.ends.len()).expect("fewer than 2^32 flags");
            flags.ends.push(ends);
            for (lane, at) in [ends.signal, ends.wait] {
                flags.of_step[lane][at] = number;
            }
        }
    }
    Ok(flags)
}

impl Use {
    fn place(&self, program: &Program) -> Place {
        program.turned_place(self.rank, (self.lane, self.at))
    }
}

impl Ends {
    fn check(program: &Program, reader: Rank, uses: &[Use]) -> Result<Self, Fault> {
        let place = |used: &Use| used.place(program);
        let flag = uses[0].flag;
        let (signals, waits) = uses.split_at(uses.partition_point(|used| !used.is_wait));
        if let Some((first, second)) = two_lanes(signals) {
            return Err(Fault::TwoWriters { first: place(first), second: place(second) });
        }
        if let Some((first, second)) = two_lanes(waits) {
            return Err(Fault::TwoReaders { first: place(first), second: place(second) });
        }
        let named = match flag {
            Flag::Ready { lane, .. } | Flag::Arrived { lane, .. } | Flag::Taken { lane, .. } => {
                lane
            }
            Flag::Go { lane } => lane,
            Flag::Sent { .. } => LaneId::HOME,
        };
        if let Some(wait) = waits.first()
            && program.lanes[wait.lane].lane != named
        {
            return Err(Fault::OtherReader { place: place(wait), lane: named });
        }
        match (signals, waits) {
            ([signal], [wait]) => {
                let tiers = (program.lanes[signal.lane].tier, program.lanes[wait.lane].tier);
                if tiers == (Tier::Local, Tier::Network) && signal.rank != reader {
                    return Err(Fault::AcrossTiers { place: place(signal), peer: reader });
                }
                let (signal, writer) = ((signal.lane, signal.at), signal.rank);
                Ok(Self { writer, signal, wait: (wait.lane, wait.at) })
            }
            ([first, second, ..], _) if signals.len() == waits.len() => {
                Err(Fault::Repeated { first: place(first), second: place(second) })
            }
            _ => Err(Fault::Unbalanced {
                place: place(&uses[0]),
                reader,
                flag,
                signals: signals.len(),
                waits: waits.len(),
            }),
        }
    }
}

fn two_lanes(uses: &[Use]) -> Option<(&Use, &Use)> {
    let first = uses.first()?;
    let is_other = |other: &&Use| (other.rank, other.lane) != (first.rank, first.lane);
    uses.iter().find(is_other).map(|second| (first, second))
}
