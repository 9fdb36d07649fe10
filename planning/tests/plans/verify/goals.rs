//! Tests the verifier on goals other than all-gather, with plans written by hand.
//!
//! The root of a broadcast gets no data from other ranks, so the end of a start does not tell it that they have entered
//! that start. In an all-gather the data itself shows that; in a broadcast it takes a flag.

use insta::assert_snapshot;
use peerlane_planning::plan::Plan;
use peerlane_planning::verify::{Fault, FaultClass, verify};

use crate::support::plans::edit;

/// Returns plans in which rank 0 puts its block to every other rank, with or without `ready` flags.
fn broadcast(ranks: u32, place: &str, outputs: u32, has_ready: bool) -> Vec<Plan> {
    let plan = |rank: u32| {
        let header = format!("broadcast from 0 direct: rank {rank} of {ranks}, 1 chunk, {place}");
        let mut lines = vec![match outputs {
            1 => header,
            _ => format!("{header}, {outputs} outputs in turn"),
        }];
        lines.push("lane 0".to_owned());
        if rank > 0 {
            lines.extend(has_ready.then(|| "signal ready to 0".to_owned()));
            lines.push("wait arrived 0.0".to_owned());
        } else {
            lines.extend((place == "out of place").then(|| "put 0.0 input to 0".to_owned()));
            for peer in 1..ranks {
                lines.extend(has_ready.then(|| format!("wait ready from {peer}")));
                lines.push(format!("put 0.0 input to {peer}"));
                lines.push(format!("signal arrived 0.0 to {peer}"));
            }
        }
        lines.join("\n").parse().unwrap()
    };
    (0..ranks).map(plan).collect()
}

fn fault(plans: &[Plan]) -> Fault {
    verify(plans).unwrap_err()
}

#[test]
fn broadcasts_with_ready_flags_are_proven() {
    for ranks in 1..=5 {
        for (place, outputs) in [("out of place", 1), ("out of place", 2), ("in place", 1)] {
            let proof = verify(&broadcast(ranks, place, outputs, true));
            proof.unwrap_or_else(|fault| panic!("{ranks} ranks, {place}, {outputs}: {fault}"));
        }
    }
}

/// An all-gather with two outputs needs no `ready`: a start cannot end before every rank has entered it. In a
/// broadcast the root can run ahead and overwrite an output that its owner still uses.
#[test]
fn double_buffering_does_not_replace_ready_if_the_root_gets_no_data() {
    let plans = broadcast(3, "out of place", 2, false);
    assert_eq!(fault(&plans).class(), FaultClass::Overwritten);
    assert_snapshot!(fault(&plans), @"rank 0, lane 0, step 2 (put 0.0 input to 1): in start 2, the step may write to rank 1 before rank 1 has entered this start");
}

#[test]
fn the_ready_of_one_peer_is_not_enough_for_another() {
    let mut plans = broadcast(3, "out of place", 2, true);
    edit(&mut plans[0], "  wait ready from 2\n", "");
    edit(&mut plans[2], "  signal ready to 0\n", "");
    assert_eq!(fault(&plans).class(), FaultClass::Overwritten);
    assert_snapshot!(fault(&plans), @"rank 0, lane 0, step 5 (put 0.0 input to 2): in start 2, the step may write to rank 2 before rank 2 has entered this start");
}

#[test]
fn cells_outside_the_goal_are_refused() {
    let mut plans = broadcast(2, "out of place", 1, true);
    edit(&mut plans[1], "wait arrived 0.0", "wait arrived 0.0\n put 1.0 input to 1");
    assert_eq!(fault(&plans).class(), FaultClass::Unknown);
    assert_snapshot!(fault(&plans), @"rank 1, lane 0, step 3 (put 1.0 input to 1): the output of rank 1 does not need the copied cell; expected no copy");
}

#[test]
fn a_missing_cell_of_the_goal_is_refused() {
    let mut plans = broadcast(2, "out of place", 1, true);
    edit(&mut plans[0], "put 0.0 input to 1", "");
    assert_eq!(fault(&plans).class(), FaultClass::Missing);
    assert_snapshot!(fault(&plans), @"rank 1: no step copies cell 0.0 into the output of rank 1");
}

/// Returns plans of an all-to-all between two ranks.
fn all_to_all() -> Vec<Plan> {
    let plan = |rank: u32| {
        let peer = 1 - rank;
        let text = format!(
            "all-to-all direct: rank {rank} of 2, 1 chunk, out of place
            lane 0
              signal ready to {peer}
              put {rank}.0 input to {rank}
              wait ready from {peer}
              put {rank}.0 input to {peer}
              signal arrived {rank}.0 to {peer}
              wait arrived {peer}.0"
        );
        text.parse().unwrap()
    };
    vec![plan(0), plan(1)]
}

#[test]
fn all_to_alls_are_proven() {
    verify(&all_to_all()).unwrap();
}

/// Every output of an all-to-all holds other blocks, so none of them can be forwarded.
#[test]
fn an_all_to_all_forwards_nothing() {
    let mut plans = all_to_all();
    edit(&mut plans[0], "put 0.0 input to 1", "put 0.0 output to 1");
    let fault = verify(&plans).unwrap_err();
    assert_eq!(fault.class(), FaultClass::Unknown);
    assert_snapshot!(fault, @"rank 0, lane 0, step 4 (put 0.0 output to 1): the step copies from an output, expected an input, because the outputs of an all-to-all hold different blocks");
}

#[test]
fn impossible_goals_are_refused() {
    let refused = |plans: &mut [Plan], from: &str, to: &str| {
        plans.iter_mut().for_each(|plan| edit(plan, from, to));
        verify(plans).unwrap_err().to_string()
    };
    let in_place = refused(&mut all_to_all(), "out of place", "in place");
    assert_snapshot!(in_place, @"rank 0: in_place is true, expected false: an all-to-all cannot run in place");
    let mut plans = broadcast(2, "out of place", 1, true);
    assert_snapshot!(refused(&mut plans, "from 0 direct", "from 2 direct"), @"rank 0: root is 2, expected a rank below 2");
    let mut plans = all_to_all();
    edit(&mut plans[1], "all-to-all", "all-gather");
    let fault = verify(&plans).unwrap_err();
    assert_eq!(fault.class(), FaultClass::Disagreement);
    assert_snapshot!(fault, @"plan 1: collective is all-gather, expected all-to-all");
}

/// Returns plans of a gather to rank 0 with two outputs in turn.
fn gather(ranks: u32) -> Vec<Plan> {
    let plan = |rank: u32| {
        let header = format!("gather to 0 direct: rank {rank} of {ranks}, 1 chunk, out of place");
        let mut lines = vec![format!("{header}, 2 outputs in turn"), "lane 0".to_owned()];
        if rank == 0 {
            lines.extend((1..ranks).map(|peer| format!("signal free to {peer}")));
            lines.push("put 0.0 input to 0".to_owned());
            lines.extend((1..ranks).map(|peer| format!("wait arrived {peer}.0")));
        } else {
            lines.push("wait free from 0".to_owned());
            lines.push(format!("put {rank}.0 input to 0"));
            lines.push(format!("signal arrived {rank}.0 to 0"));
        }
        lines.join("\n").parse().unwrap()
    };
    (0..ranks).map(plan).collect()
}

#[test]
fn a_flag_of_the_last_start_frees_the_other_output() {
    for ranks in 1..=5 {
        verify(&gather(ranks)).unwrap_or_else(|fault| panic!("{ranks} ranks: {fault}"));
    }
}

#[test]
fn a_flag_of_the_last_start_does_not_free_the_only_output() {
    let mut plans = gather(3);
    plans.iter_mut().for_each(|plan| plan.outputs = 1);
    assert_snapshot!(fault(&plans), @"rank 0, lane 0, step 1 (signal free to 1): flag free from 0 does not exist, expected another flag, because neither outputs nor inboxes are used in turn");
}

/// Without the wait, a rank could be two starts ahead of the root, and write to the output that the root reads.
#[test]
fn an_output_is_not_free_without_the_flag() {
    let mut plans = gather(3);
    edit(&mut plans[0], "signal free to 2\n", "");
    edit(&mut plans[2], "wait free from 0\n", "");
    assert_snapshot!(fault(&plans), @"rank 2, lane 0, step 1 (put 2.0 input to 0): in start 2, the step may write to rank 0 before rank 0 has entered this start");
}
