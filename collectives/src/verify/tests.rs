//! Faults that no plan can have, because lanes are closed here: what if they were closed wrongly.

use insta::assert_snapshot;
use peerlane_hal::Rank;

use super::*;
use crate::plan::{Algorithm, Cell, FlagOrder, Lane, Source, Step};
use crate::verify::program::ClosedLane;

/// One rank that copies its shard in lane 1; `change` gets the closed lanes 0 and 1.
fn fault(change: impl FnOnce(&mut [ClosedLane])) -> Option<String> {
    let rank = Rank(0);
    let cell = Cell { shard: rank, part: 0 };
    let copy = Step::Put { peer: rank, cell, from: Source::Input };
    let lanes = vec![Lane::default(), Lane { steps: vec![copy], ..Lane::default() }];
    let algorithm = Algorithm::Direct;
    let (in_place, outputs) = (false, 1);
    let flags = FlagOrder::Prompt;
    let plan = Plan { algorithm, rank, ranks: 1, parts: 1, in_place, outputs, flags, lanes };
    let mut program = Program::new(&[plan], Symmetry::none(1));
    change(&mut program.lanes);
    follow(&program).err().map(|fault| fault.to_string())
}

#[test]
fn a_closed_lane_is_right() {
    assert_eq!(fault(|_| {}), None);
}

#[test]
fn a_lane_that_ends_before_its_puts_is_a_fault() {
    let early = fault(|lanes| lanes[1].steps.swap(1, 2)).unwrap();
    assert_snapshot!(early, @"rank 0, end of lane 0 in start 1: lane 1 may still read its sources");
}

#[test]
fn a_lane_that_begins_before_the_caller_is_a_fault() {
    let early = fault(|lanes| lanes[1].steps.swap(0, 1)).unwrap();
    assert_snapshot!(early, @"rank 0, lane 1, entry (put 0.0 input to 0) in start 1: the source may not have arrived");
}

#[test]
fn a_caller_that_does_not_wait_for_a_lane_is_a_fault() {
    let unawaited = fault(|lanes| {
        for lane in lanes {
            lane.steps.pop();
        }
    });
    assert_snapshot!(unawaited.unwrap(), @"rank 0, end of lane 0 in start 1: lane 1 may still read its sources");
}
