//! Checks that every flag has one writer and one reader, and that plans have no deadlock.
//!
//! A flag is signalled and waited for once in a start. It cannot be used twice, because all values
//! of a start are the same epoch: a second wait would pass on the first signal.

use peerlane_hal::Rank;

use super::fault::{Fault, Location};
use super::plan_set::PlanSet;
use crate::plan::{Flag, LaneId, Step, Tier};

/// Stores the signal and the wait of every flag, and maps each step to its flag.
///
/// Only flags that a followed rank reads have an entry.
#[derive(Debug)]
pub(super) struct Flags {
    uses: Vec<FlagUse>,
    by_step: Vec<Vec<u32>>,
}

/// Identifies the rank that signals a flag, and the steps that signal it and wait for it.
///
/// A step is identified by the index of its lane and its index in the lane.
#[derive(Clone, Copy, Debug)]
pub(super) struct FlagUse {
    pub(super) writer: Rank,
    pub(super) signal: (usize, usize),
    pub(super) wait: (usize, usize),
}

impl Flags {
    pub(super) fn len(&self) -> usize {
        self.uses.len()
    }

    pub(super) fn of_step(&self, lane: usize, at: usize) -> FlagUse {
        self.uses[self.by_step[lane][at] as usize]
    }
}

/// A step that signals `flag` or waits for it.
///
/// Its ranks are rotated so that a followed rank reads the flag.
///
/// The order of the fields sorts the steps of a flag together, with signals before waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct NamingStep {
    flag: Flag,
    is_wait: bool,
    rank: Rank,
    lane: usize,
    at: usize,
}

impl NamingStep {
    fn location(&self, set: &PlanSet) -> Location {
        set.rotated_location(self.rank, (self.lane, self.at))
    }
}

/// Checks that each flag has one signal and one wait in a start, and returns the uses of all flags.
pub(super) fn check(set: &PlanSet) -> Result<Flags, Fault> {
    let symmetry = &set.symmetry;
    let mut by_reader: Vec<Vec<NamingStep>> =
        vec![Vec::new(); set.lanes.len() / set.lanes_per_rank];
    for (lane, at, step) in set.steps() {
        let own_rank = set.lanes[lane].rank;
        let (reader, flag, is_wait) = match step {
            Step::Put { .. } | Step::Get { .. } | Step::Reduce { .. } => continue,
            Step::Signal { peer, flag } => (peer, flag, false),
            Step::Wait { flag } => (own_rank, flag, true),
        };

        // Each step stands for the steps of its whole orbit. The rotation turns the reader into the
        // followed rank of its orbit.
        let back = symmetry.rotation_back(reader);
        let naming_step = NamingStep {
            flag: symmetry.rotated_flag(back, flag),
            is_wait,
            rank: symmetry.rotated(back, own_rank),
            lane,
            at,
        };
        by_reader[symmetry.representative_index(reader)].push(naming_step);
    }

    let by_step = set.lanes.iter().map(|lane| vec![0; lane.steps.len()]).collect();
    let mut flags = Flags { uses: Vec::new(), by_step };
    for ((reader, _), mut steps) in set.followed_ranks().zip(by_reader) {
        steps.sort_unstable();
        for steps_of_flag in steps.chunk_by(|a, b| a.flag == b.flag) {
            let flag_use = check_flag(set, reader, steps_of_flag)?;

            let number = u32::try_from(flags.uses.len()).expect("fewer than 2^32 flags");
            flags.uses.push(flag_use);
            for (lane, at) in [flag_use.signal, flag_use.wait] {
                flags.by_step[lane][at] = number;
            }
        }
    }

    Ok(flags)
}

/// Checks that a flag of `reader` has exactly one signal and one wait among `steps`, and returns
/// the pair.
fn check_flag(set: &PlanSet, reader: Rank, steps: &[NamingStep]) -> Result<FlagUse, Fault> {
    let location = |step: &NamingStep| step.location(set);
    // The steps are sorted, signals first.
    let (signals, waits) = steps.split_at(steps.partition_point(|step| !step.is_wait));

    if let Some((first, second)) = steps_of_two_lanes(signals) {
        return Err(Fault::TwoWriters { first: location(first), second: location(second) });
    }
    if let Some((first, second)) = steps_of_two_lanes(waits) {
        return Err(Fault::TwoReaders { first: location(first), second: location(second) });
    }

    // Each flag contains the lane of its reader, except `sent`, which lane 0 always awaits.
    let flag = steps[0].flag;
    let reader_lane = match flag {
        Flag::Ready { lane, .. }
        | Flag::Free { lane, .. }
        | Flag::Arrived { lane, .. }
        | Flag::Contributed { lane, .. }
        | Flag::Taken { lane, .. } => lane,
        Flag::Go { lane } => lane,
        Flag::Sent { .. } => LaneId::HOME,
    };
    if let Some(wait) = waits.first()
        && set.lanes[wait.lane].lane != reader_lane
    {
        return Err(Fault::OtherReader { location: location(wait), lane: reader_lane });
    }

    match (signals, waits) {
        ([signal], [wait]) => {
            // The local fabric of a rank cannot write the flags of another rank's network fabric.
            let crosses_tiers = set.lanes[signal.lane].tier == Tier::Local
                && set.lanes[wait.lane].tier == Tier::Network;
            if crosses_tiers && signal.rank != reader {
                return Err(Fault::AcrossTiers { location: location(signal), peer: reader });
            }

            Ok(FlagUse {
                writer: signal.rank,
                signal: (signal.lane, signal.at),
                wait: (wait.lane, wait.at),
            })
        }
        // There are enough signals, but all store the same epoch.
        ([first, second, ..], _) if signals.len() == waits.len() => {
            Err(Fault::Repeated { first: location(first), second: location(second) })
        }
        _ => Err(Fault::Unbalanced {
            location: location(&steps[0]),
            reader,
            flag,
            signals: signals.len(),
            waits: waits.len(),
        }),
    }
}

/// Returns two steps of different lanes, or `None` if all `steps` are in one lane.
fn steps_of_two_lanes(steps: &[NamingStep]) -> Option<(&NamingStep, &NamingStep)> {
    let first = steps.first()?;

    let is_other = |other: &&NamingStep| (other.rank, other.lane) != (first.rank, first.lane);
    steps.iter().find(is_other).map(|second| (first, second))
}

/// Checks that the lanes do not wait for each other's signals in a cycle.
///
/// One interleaving is enough to find a deadlock. Only a wait can block a lane, and because its
/// flag has one writer, one reader and one signal in a start, no other lane can consume that
/// signal: a lane that can continue now can continue later. So every order that runs lanes as long
/// as possible ends at the same steps. Starts do not mix: the n-th wait for a flag is for its n-th
/// signal, or the one before, so all starts behave alike.
pub(super) fn check_deadlock(set: &PlanSet, flags: &Flags) -> Result<(), Fault> {
    let mut run = DeadlockRun {
        set,
        flags,
        next: vec![0; set.lanes.len()],
        blocked_on: vec![Vec::new(); set.lanes.len()],
    };

    // The last lane is popped first, so the reversed order begins with lane 0.
    let mut runnable: Vec<usize> = (0..set.lanes.len()).rev().collect();
    while let Some(lane) = runnable.pop() {
        // The lane may have signalled what other lanes wait for, so these lanes run again.
        if run.run_lane(lane) {
            runnable.append(&mut run.blocked_on[lane]);
        }
    }

    match (0..set.lanes.len()).find(|&lane| run.is_blocked(lane)) {
        Some(lane) => Err(run.deadlock(lane)),
        None => Ok(()),
    }
}

/// Simulates the signals and waits of all lanes until each lane is blocked or has ended.
struct DeadlockRun<'a> {
    set: &'a PlanSet,
    flags: &'a Flags,
    /// For each lane, the index of its next step.
    next: Vec<usize>,
    /// For each lane, the blocked lanes that wait for a signal of this lane.
    blocked_on: Vec<Vec<usize>>,
}

impl DeadlockRun<'_> {
    /// Executes steps of `lane` until the lane blocks or ends, and returns whether any step was
    /// executed.
    fn run_lane(&mut self, lane: usize) -> bool {
        let steps = &self.set.lanes[lane].steps;
        let first = self.next[lane];
        while let Some(step) = steps.get(self.next[lane]) {
            // Only a wait for a signal of this start can block. Signals of an earlier start come
            // before all steps of this one.
            if matches!(step, Step::Wait { flag } if flag.lag() == 0) {
                let (writer, signal) = self.flags.of_step(lane, self.next[lane]).signal;
                if self.next[writer] <= signal {
                    self.blocked_on[writer].push(lane);
                    break;
                }
            }
            self.next[lane] += 1;
        }

        self.next[lane] > first
    }

    fn is_blocked(&self, lane: usize) -> bool {
        self.next[lane] < self.set.lanes[lane].steps.len()
    }

    /// Returns a deadlock fault with the cycle of waits that keeps the lane `blocked` from
    /// continuing.
    fn deadlock(&self, blocked: usize) -> Fault {
        // The writer of a flag that was never signalled is blocked too, so the path goes on until
        // it meets itself.
        let symmetry = &self.set.symmetry;
        let mut path = Vec::new();
        let mut next = (self.set.lanes[blocked].rank, blocked);
        while !path.contains(&next) {
            path.push(next);

            let (rank, lane) = next;
            let flag_use = self.flags.of_step(lane, self.next[lane]);
            let writer = symmetry.rotated(symmetry.rotation_of(rank), flag_use.writer);
            next = (writer, flag_use.signal.0);
        }

        // The lanes before the first repeated lane lead to the cycle, but are not part of it.
        let first = path.iter().position(|&lane| lane == next).unwrap_or(0);

        let location = |&(rank, lane): &(Rank, usize)| {
            self.set.rotated_location(rank, (lane, self.next[lane]))
        };
        // All starts behave alike, so the first one has the deadlock.
        Fault::Deadlock { waits: path[first..].iter().map(location).collect(), start: 1 }
    }
}
