//! Checks that all lanes end, by running them once.
//!
//! One interleaving is enough. Only a wait can hold a lane, and because its flag has one writer, one reader and one signal in
//! a start, no other lane can consume that signal: a lane that can continue now can continue later. So every order that runs
//! lanes as long as possible ends at the same steps. Starts do not mix: the n-th wait for a flag is for its n-th signal, so
//! all starts behave alike.

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
    /// Runs a lane until a wait holds it, and returns whether it made progress.
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

    /// Follows waits from a held lane to the lanes that lack the signals, until it returns to a lane. Those lanes form the cycle.
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
