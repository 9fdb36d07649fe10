//! Every flag has one writer lane and one reader lane, on tiers that it can cross, and is signalled
//! once and waited for once a start.
//!
//! Once, and not as often as one likes: all values of a start are the same epoch, so a second wait
//! of the same start would pass on the first value.

use std::collections::HashMap;

use peerlane_hal::Rank;

use super::fault::Fault;
use super::program::Program;
use crate::plan::{Flag, LaneId, Step, Tier};

/// The flags of all ranks, numbered.
#[derive(Debug)]
pub(super) struct Flags {
    numbers: HashMap<(Rank, Flag), usize>,
    ends: Vec<Ends>,
}

/// The lanes at the two ends of one flag.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ends {
    pub(super) writer: usize,
    pub(super) reader: usize,
}

impl Flags {
    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    /// The number of a flag that the program names.
    pub(super) fn number(&self, reader: Rank, flag: Flag) -> usize {
        self.numbers[&(reader, flag)]
    }

    /// The lanes at its two ends.
    pub(super) fn ends(&self, number: usize) -> Ends {
        self.ends[number]
    }
}

/// A step that names a flag: the lane, and the step's index in it.
type Use = (usize, usize);

/// Checks and numbers the flags.
pub(super) fn check(program: &Program) -> Result<Flags, Fault> {
    let mut uses: Vec<((Rank, Flag), bool, Use)> = program
        .steps()
        .filter_map(|(lane, at, step)| match step {
            Step::Put { .. } | Step::Get { .. } => None,
            Step::Signal { peer, flag } => Some(((peer, flag), false, (lane, at))),
            Step::Wait { flag } => Some(((program.lanes[lane].rank, flag), true, (lane, at))),
        })
        .collect();
    uses.sort_unstable();
    let mut flags = Flags { numbers: HashMap::with_capacity(uses.len() / 2), ends: Vec::new() };
    for uses in uses.chunk_by(|(a, ..), (b, ..)| a == b) {
        let name = uses[0].0;
        let (signals, waits) = uses.split_at(uses.partition_point(|&(_, is_wait, _)| !is_wait));
        let ends = Ends::check(program, name, &places(signals), &places(waits))?;
        flags.numbers.insert(name, flags.ends.len());
        flags.ends.push(ends);
    }
    Ok(flags)
}

fn places(uses: &[((Rank, Flag), bool, Use)]) -> Vec<Use> {
    uses.iter().map(|&(_, _, place)| place).collect()
}

impl Ends {
    fn check(
        program: &Program,
        (reader, flag): (Rank, Flag),
        signals: &[Use],
        waits: &[Use],
    ) -> Result<Self, Fault> {
        let place = |(lane, at): Use| program.place(lane, at);
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
        if let Some(&wait) = waits.first()
            && program.lanes[wait.0].lane != named
        {
            return Err(Fault::OtherReader { place: place(wait), lane: named });
        }
        match (signals, waits) {
            (&[signal], &[wait]) => {
                let (writer, reading) = (&program.lanes[signal.0], &program.lanes[wait.0]);
                let crosses = (writer.tier, reading.tier) == (Tier::Local, Tier::Network);
                if crosses && writer.rank != reader {
                    return Err(Fault::AcrossTiers { place: place(signal), peer: reader });
                }
                Ok(Self { writer: signal.0, reader: wait.0 })
            }
            (&[first, second, ..], _) if signals.len() == waits.len() => {
                Err(Fault::Repeated { first: place(first), second: place(second) })
            }
            _ => Err(Fault::Unbalanced {
                place: place(*signals.first().or(waits.first()).expect("a use names the flag")),
                reader,
                flag,
                signals: signals.len(),
                waits: waits.len(),
            }),
        }
    }
}

fn two_lanes(uses: &[Use]) -> Option<(Use, Use)> {
    let first = *uses.first()?;
    uses.iter().find(|other| other.0 != first.0).map(|&second| (first, second))
}
