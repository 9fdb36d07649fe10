//! Runs the lanes once: every wait passes.
//!
//! One interleaving decides for all. Only a wait can hold a lane, and since its flag has one writer,
//! one reader and one signal a start, no other lane can take that signal away: a lane that can go on
//! can still go on later. Hence every order that runs lanes for as long as any can go on ends at the
//! same steps. Starts do not mix: the n-th wait for a flag is for the n-th signal, so what one start
//! does, all do.

use super::fault::Fault;
use super::flags::Flags;
use super::program::Program;
use crate::plan::Step;

/// Checks that all lanes end.
pub(super) fn check(program: &Program, flags: &Flags) -> Result<(), Fault> {
    let mut order = Order {
        program,
        flags,
        at: vec![0; program.lanes.len()],
        held: vec![Vec::new(); program.lanes.len()],
    };
    let mut runnable: Vec<usize> = (0..program.lanes.len()).rev().collect();
    while let Some(lane) = runnable.pop() {
        if order.run_lane(lane) {
            runnable.append(&mut order.held[lane]);
        }
    }
    match (0..program.lanes.len()).find(|&lane| order.is_held(lane)) {
        Some(stuck) => Err(order.deadlock(stuck)),
        None => Ok(()),
    }
}

struct Order<'a> {
    program: &'a Program,
    flags: &'a Flags,
    /// The next step of each lane.
    at: Vec<usize>,
    /// The lanes that wait for a signal of each lane.
    held: Vec<Vec<usize>>,
}

impl Order<'_> {
    /// Runs a lane until a wait holds it; whether it came any further.
    fn run_lane(&mut self, lane: usize) -> bool {
        let steps = &self.program.lanes[lane].steps;
        let first = self.at[lane];
        while let Some(step) = steps.get(self.at[lane]) {
            if matches!(step, Step::Wait { .. }) {
                let (writer, signal) = self.flags.of_step(lane, self.at[lane]).signal;
                if self.at[writer] <= signal {
                    self.held[writer].push(lane);
                    break;
                }
            }
            self.at[lane] += 1;
        }
        self.at[lane] > first
    }

    fn is_held(&self, lane: usize) -> bool {
        self.at[lane] < self.program.lanes[lane].steps.len()
    }

    /// Follows the waits from a lane that is held to the lanes whose signals they lack. Each of those
    /// is held too, so the way must come back to a lane where it was.
    fn deadlock(&self, stuck: usize) -> Fault {
        let symmetry = &self.program.symmetry;
        let mut way = Vec::new();
        let mut next = (self.program.lanes[stuck].rank, stuck);
        while !way.contains(&next) {
            way.push(next);
            let (rank, lane) = next;
            let ends = self.flags.of_step(lane, self.at[lane]);
            next = (symmetry.turned(symmetry.turn_of(rank), ends.writer), ends.signal.0);
        }
        let first = way.iter().position(|&seen| seen == next).unwrap_or(0);
        let place = |&(rank, lane)| self.program.turned_place(rank, (lane, self.at[lane]));
        Fault::Deadlock { waits: way[first..].iter().map(place).collect(), start: 1 }
    }
}
