//! Runs one start of one rank, with the flags between its lanes.

use std::collections::HashMap;

use super::fault::Fault;
use super::flags::Flags;
use super::program::Program;
use crate::plan::Step;

/// A step that a lane of a rank reaches.
pub(super) struct Passing {
    /// The lane of the rank.
    pub(super) lane: usize,
    /// The index of the step in the lane.
    pub(super) at: usize,
    pub(super) kind: Kind,
}

/// What kind of step it is.
pub(super) enum Kind {
    Copy,
    Signal,
    /// A wait for a signal of another rank.
    Heard,
    /// A wait for a signal of another lane of the same rank, with the answer of `visit` at that signal.
    Told {
        from: usize,
        snapshot: usize,
    },
}

/// Runs the lanes of one rank through a start, as if all other ranks were ahead.
///
/// The answer of `visit` at a signal is passed to the wait.
pub(super) fn run_start(
    program: &Program,
    flags: &Flags,
    home: usize,
    mut visit: impl FnMut(Passing) -> Result<usize, Fault>,
) -> Result<(), Fault> {
    let rank = program.lanes[home].rank;
    let mut next = vec![0; program.width];
    let mut told: HashMap<(usize, usize), usize> = HashMap::new();
    let mut moves = true;
    while moves {
        moves = false;
        for (lane, next) in next.iter_mut().enumerate() {
            let number = home + lane;
            while let Some(step) = program.lanes[number].steps.get(*next) {
                let at = *next;
                let kind = match step {
                    Step::Put { .. } | Step::Get { .. } => Kind::Copy,
                    Step::Signal { .. } => Kind::Signal,
                    Step::Wait { .. } => {
                        let ends = flags.of_step(number, at);
                        if ends.writer != rank {
                            Kind::Heard
                        } else if let Some(&snapshot) = told.get(&ends.signal) {
                            Kind::Told { from: ends.signal.0 - home, snapshot }
                        } else {
                            break;
                        }
                    }
                };
                let is_relay = matches!(step, Step::Signal { peer, .. } if *peer == rank);
                let snapshot = visit(Passing { lane, at, kind })?;
                if is_relay {
                    told.insert((number, at), snapshot);
                }
                *next += 1;
                moves = true;
            }
        }
    }
    Ok(())
}
