//! Tests the verifier on reductions with two inboxes in turn and one output.
//!
//! A contribution may go to the inbox that was used two starts ago if the rank that adds has entered the last start. A result
//! goes to the only output, so its target must have entered this start.

use insta::assert_snapshot;
use peerlane_planning::collective::Collective;
use peerlane_planning::plan::{Algorithm, Flag, FlagOrder, Lane, Plan, Step};
use peerlane_planning::schedule::{self, Shape};
use peerlane_planning::topology::Topology;
use peerlane_planning::verify::{Fault, FaultClass, verify};

use crate::support::oracle::{Harm, Oracle};
use crate::support::plans::{Form, REDUCE, edit};

fn plans(collective: Collective, ranks: u32) -> Vec<Plan> {
    Form::Inboxes(collective, FlagOrder::Prompt).plans(ranks, 1, false)
}

fn fault(class: FaultClass, plans: &[Plan]) -> Fault {
    let fault = verify(plans).unwrap_err();
    assert_eq!(fault.class(), class, "{fault}");
    fault
}

/// Returns the first harm that some runs show.
fn harm(plans: &[Plan]) -> Option<Harm> {
    let oracle = Oracle::new(plans, &vec![2; plans.len()], 5).unwrap();
    (0..200).find_map(|seed| oracle.run(seed).err())
}

/// Returns whether a step says, or waits until, an inbox can be written.
fn is_free(step: &Step) -> bool {
    matches!(
        step,
        Step::Signal { flag: Flag::Free { .. }, .. } | Step::Wait { flag: Flag::Free { .. } }
    )
}

fn steps(plans: &[Plan]) -> impl Iterator<Item = &Step> {
    plans.iter().flat_map(|plan| &plan.lanes).flat_map(|lane| &lane.steps)
}

fn drop_free(plans: &mut [Plan]) {
    let lanes = plans.iter_mut().flat_map(|plan| &mut plan.lanes);
    lanes.for_each(|lane: &mut Lane| lane.steps.retain(|step| !is_free(step)));
}

#[test]
fn reductions_need_a_flag_of_the_last_start_or_none() {
    let reductions = Collective::ALL.iter().filter(|one| one.is_reduction());
    for collective in reductions.map(|one| one.with_root(peerlane_hal::Rank(0))) {
        for (flags, in_place) in
            FlagOrder::ALL.iter().flat_map(|&flags| [false, true].map(|place| (flags, place)))
        {
            if in_place && !collective.runs_in_place() {
                continue;
            }
            for ranks in 1..=9 {
                let topology = Topology::flat(ranks).unwrap();
                let shape = Shape {
                    collective,
                    chunks: 2,
                    in_place,
                    inboxes: 2,
                    flags,
                    ..Shape::default()
                };
                let context = format!("{ranks} ranks, {shape:?}");
                let plans = schedule::plans(Algorithm::Direct, &topology, shape).unwrap();
                verify(&plans).unwrap_or_else(|fault| panic!("{context}: {fault}"));

                let is_heard =
                    [Collective::ReduceScatter, Collective::AllReduce].contains(&collective);
                let has_free = ranks > 1 && !is_heard;
                assert_eq!(steps(&plans).any(is_free), has_free, "{context}");
                assert!(!plans[0].to_string().contains("ready"), "{context}");

                let oracle = Oracle::new(&plans, &vec![4; ranks], 5).unwrap();
                for seed in 0..5 {
                    assert_eq!(oracle.run(seed), Ok(()), "{context}, seed {seed}");
                }
            }
        }
    }
}

#[test]
fn one_inbox_needs_ready() {
    let mut plans = plans(Collective::ReduceScatter, 3);
    plans.iter_mut().for_each(|plan| plan.inboxes = 1);
    assert_snapshot!(fault(FaultClass::Overwritten, &plans), @"rank 0, lane 0, step 1 (put 0.0 input to 1): in start 1, the step may write to rank 1 before rank 1 has entered this start");

    for collective in [Collective::ReduceScatter, Collective::AllReduce] {
        let mut plans = self::plans(collective, 3);
        plans.iter_mut().for_each(|plan| plan.inboxes = 1);
        fault(FaultClass::Overwritten, &plans);
        assert!(harm(&plans).is_some(), "{collective}");

        // Each of two outputs has an inbox.
        plans.iter_mut().for_each(|plan| plan.outputs = 2);
        verify(&plans).unwrap();
        assert_eq!(harm(&plans), None);
    }
}

/// A rank that gets no sum does not know that the root has entered the last start, so it can run ahead of the root.
#[test]
fn a_contribution_to_a_rank_that_is_not_heard_is_refused() {
    let mut plans = plans(REDUCE, 3);
    drop_free(&mut plans);
    let refused = fault(FaultClass::Overwritten, &plans);
    assert_snapshot!(refused, @"rank 0, lane 0, step 1 (put 0.0 input to 2): in start 2, the step may write to rank 2 before rank 2 has entered this start");
    assert_snapshot!(refused.counterexample(&plans), @r"
      1. rank 0, lane 0, step 1 (put 0.0 input to 2) in start 2
         rank 2 may not have entered start 1
    ");
    assert!(harm(&plans).is_some());

    let mut plans = self::plans(Collective::Scan, 3);
    drop_free(&mut plans);
    assert_snapshot!(fault(FaultClass::Overwritten, &plans), @"rank 0, lane 0, step 1 (put 0.0 input to 1): in start 2, the step may write to rank 1 before rank 1 has entered this start");
    assert!(harm(&plans).is_some());
}

/// The `free` of the root to one rank tells another one nothing.
#[test]
fn the_free_of_a_rank_is_needed_by_each_contributor() {
    let mut plans = plans(REDUCE, 3);
    verify(&plans).unwrap();
    edit(&mut plans[2], "  signal free to 1\n", "");
    edit(&mut plans[1], "  wait free from 2\n", "");
    assert_snapshot!(fault(FaultClass::Overwritten, &plans), @"rank 1, lane 0, step 1 (put 1.0 input to 2): in start 2, the step may write to rank 2 before rank 2 has entered this start");
    assert!(harm(&plans).is_some());
}

/// A result depends on a contribution of the rank that it goes to. Without the wait for it the addition is too early, and
/// so is the put.
#[test]
fn a_result_before_the_contributions_is_refused() {
    let mut plans = plans(Collective::AllReduce, 2);
    let wait = "  wait contributed 1.0\n";
    edit(&mut plans[0], wait, "");
    edit(
        &mut plans[0],
        "  signal arrived 0.0 to 1\n",
        "  signal arrived 0.0 to 1\n  wait contributed 1.0\n",
    );
    assert_snapshot!(fault(FaultClass::ReadEarly, &plans), @"rank 0, lane 0, step 4 (reduce 0.0 of 1): in start 1, the step may read its source before the data has arrived");
    assert!(harm(&plans).is_some());
}

/// Two sets of flags do not make a flag of the same start unnecessary.
#[test]
fn a_result_that_overtakes_its_additions_is_refused() {
    let mut plans = plans(Collective::AllReduce, 2);
    let put = "  put 0.0 output to 1\n";
    edit(&mut plans[0], put, "");
    edit(&mut plans[0], "  put 0.0 input to 1\n", &format!("{put}  put 0.0 input to 1\n"));
    assert_snapshot!(fault(FaultClass::ReadEarly, &plans), @"rank 0, lane 0, step 1 (put 0.0 output to 1): in start 1, the step may read its source before the data has arrived");
}

/// There are two sets of flags, so a signal in start 3 is the next one after that in start 1.
#[test]
fn a_flag_of_two_starts_ago_that_may_not_be_consumed_is_refused() {
    // Their `ready` tells more than `free`.
    let topology = Topology::flat(3).unwrap();
    let collective = REDUCE.with_root(peerlane_hal::Rank(2));
    let shape = Shape { collective, ..Shape::default() };
    let mut plans = schedule::plans(Algorithm::Direct, &topology, shape).unwrap();
    plans.iter_mut().for_each(|plan| plan.inboxes = 2);
    edit(&mut plans[0], "lane 0\n", "lane 0\n  signal arrived 0.0 to 1\n");
    let last = "  signal contributed 1.0 to 2\n";
    edit(&mut plans[1], last, &format!("{last}  wait arrived 0.0\n"));
    let refused = fault(FaultClass::Stale, &plans);
    assert_snapshot!(refused, @"rank 0, lane 0, step 1 (signal arrived 0.0 to 1): in start 3, the flag may be signalled again before its reader has passed the wait of the previous start");
    assert_snapshot!(refused.counterexample(&plans), @r"
      1. rank 2, lane 0, step 1 (signal ready to 0) in start 1
      2. rank 0, lane 0, step 2 (wait ready from 2) in start 1
      3. rank 2, lane 0, step 1 (signal ready to 0) in start 2
      4. rank 0, lane 0, step 2 (wait ready from 2) in start 2
      5. rank 0, lane 0, step 1 (signal arrived 0.0 to 1) in start 3
         rank 1, lane 0, step 4 (wait arrived 0.0) may not have passed in start 1
    ");
    assert!(harm(&plans).is_some());

    // Behind the wait for the root, the signal comes late enough.
    edit(&mut plans[0], "  signal arrived 0.0 to 1\n", "");
    edit(&mut plans[0], "wait ready from 2\n", "wait ready from 2\n  signal arrived 0.0 to 1\n");
    verify(&plans).unwrap();
    assert_eq!(harm(&plans), None);
}

#[test]
fn impossible_numbers_of_inboxes_are_refused() {
    let mut some = plans(Collective::ReduceScatter, 2);
    some[1].inboxes = 1;
    assert_snapshot!(fault(FaultClass::Disagreement, &some), @"plan 1: inboxes is 1, expected 2");
    for inboxes in [0, 3] {
        some.iter_mut().for_each(|plan| plan.inboxes = inboxes);
        fault(FaultClass::Unknown, &some);
    }
    assert_snapshot!(fault(FaultClass::Unknown, &some), @"rank 0: inboxes is 3, expected 1 to 2 in a reduction, or 1 in another collective");
    let mut gather = Form::Direct.plans(2, 1, false);
    gather.iter_mut().for_each(|plan| plan.inboxes = 2);
    assert_snapshot!(fault(FaultClass::Unknown, &gather), @"rank 0: inboxes is 2, expected 1 to 2 in a reduction, or 1 in another collective");
}

#[test]
fn a_flag_of_the_last_start_needs_memory_in_turn() {
    let mut some = plans(Collective::ReduceScatter, 2);
    some.iter_mut().for_each(|plan| plan.inboxes = 1);
    edit(&mut some[0], "lane 0\n", "lane 0\n  signal free to 1\n");
    edit(&mut some[1], "lane 0\n", "lane 0\n  wait free from 0\n");
    assert_snapshot!(fault(FaultClass::Unknown, &some), @"rank 0, lane 0, step 1 (signal free to 1): flag free from 0 does not exist, expected another flag, because neither outputs nor inboxes are used in turn");
}
