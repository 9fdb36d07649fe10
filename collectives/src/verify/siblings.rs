//! Computes what a lane knows of the other lanes of its rank at each signal.

use super::clocks::Clocks;
use super::flags::Flags;
use super::past::Past;
use super::program::Program;
use super::start::{Kind, Passing, run_start};

/// The known times of the other lanes of a rank, for every followed lane and each of its signals, relative to the beginning
/// of the start.
pub(super) type Siblings = Vec<Vec<i64>>;

/// Computes this for all followed lanes; the result is empty if ranks have one lane.
pub(super) fn siblings(program: &Program, flags: &Flags) -> Siblings {
    let width = program.width;
    let mut siblings = Siblings::new();
    if width == 1 {
        return siblings;
    }
    let past = Past::new(program, flags);
    siblings.extend(program.lanes.iter().map(|lane| vec![0; lane.steps.len() * width]));
    let mut clocks = Clocks::new(width, width);
    for (_, home) in program.homes() {
        clocks.clear();
        for start in 0..=i64::from(program.outputs) {
            let begun = past.at(start, 0);
            run_start(program, flags, home, |moment| {
                let Passing { lane, at, kind } = moment;
                match kind {
                    Kind::Copy | Kind::Heard => {}
                    Kind::Told { from, snapshot } => clocks.take(lane, from, snapshot),
                    Kind::Signal => {
                        clocks.learn(lane, lane, past.at(start, at));
                        let times = (0..width).map(|other| clocks.known(lane, other) - begun);
                        let first = at * width;
                        for (slot, time) in siblings[home + lane][first..].iter_mut().zip(times) {
                            *slot = time;
                        }
                    }
                }
                Ok(clocks.snapshot(lane))
            })
            .expect("nothing is checked here");
        }
    }
    siblings
}
