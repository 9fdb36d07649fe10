//! Counterexamples for one fault of each class.

use insta::assert_snapshot;
use peerlane_planning::plan::{Algorithm, Lane, Plan, Tier};
use peerlane_planning::verify::{FaultClass, verify};

use crate::support::plans::{Form, edit};

/// Returns the fault of plans of 3 ranks with some lines of their text changed, and its counterexample.
fn counterexample(class: FaultClass, form: Form, edits: &[(usize, &str, &str)]) -> String {
    counterexample_after(class, form, |plans| {
        edits.iter().for_each(|&(rank, from, to)| edit(&mut plans[rank], from, to));
        let lanes = plans.iter().map(|plan| plan.lanes.len()).max().unwrap();
        plans.iter_mut().for_each(|plan| plan.lanes.resize(lanes, Lane::default()));
    })
}

fn counterexample_after(
    class: FaultClass,
    form: Form,
    change: impl FnOnce(&mut Vec<Plan>),
) -> String {
    let mut plans = form.plans(3, 1, false);
    change(&mut plans);
    let fault = verify(&plans).unwrap_err();
    assert_eq!(fault.class(), class, "{fault}");
    format!("{fault}\n\n{}", fault.counterexample(&plans))
}

#[test]
fn plans_that_do_not_belong_together() {
    assert_snapshot!(counterexample_after(FaultClass::Disagreement, Form::Direct, |plans| plans[2].chunks = 2), @r"
    plan 2: chunks is 2, expected 1

         the plans show this fault in every order of events
    ");
    assert_snapshot!(counterexample(FaultClass::Unknown, Form::Direct, &[(1, "put 1.0 input to 2", "put 1.0 input to 3")]), @r"
    rank 1, lane 0, step 5 (put 1.0 input to 3): rank 3 does not exist, expected a rank below 3

         the plans show this fault in every order of events
    ");
}

#[test]
fn a_byte_that_is_missing() {
    let dropped = (1, "put 1.0 input to 2\n", "\n");
    assert_snapshot!(counterexample(FaultClass::Missing, Form::Direct, &[dropped]), @r"
    rank 2: no step copies cell 1.0 into the output of rank 2

         all lanes end, but the output of rank 2 has no cell 1.0
    ");
    let overtaken = (
        1,
        "put 1.0 input to 2\n  signal arrived 1.0 to 2",
        "signal arrived 1.0 to 2\n put 1.0 input to 2",
    );
    assert_snapshot!(counterexample(FaultClass::Missing, Form::Direct, &[overtaken]), @r"
    rank 2: start 1 may end before cell 1.0 has arrived in the output

      1. rank 1, lane 0, step 1 (signal ready to 2)
      2. rank 2, lane 0, step 2 (signal ready to 1)
      3. rank 2, lane 0, step 7 (wait ready from 1)
      4. rank 1, lane 0, step 4 (wait ready from 2)
      5. rank 1, lane 0, step 5 (signal arrived 1.0 to 2)
      6. rank 2, lane 0, step 10 (wait arrived 1.0)
      7. rank 2: lane 0 has ended in start 1
         rank 1, lane 0, step 6 (put 1.0 input to 2) may not have begun
    ");
}

#[test]
fn a_byte_that_arrives_twice() {
    let twice = (1, "put 1.0 input to 2", "put 1.0 input to 2\nput 1.0 input to 2");
    assert_snapshot!(counterexample(FaultClass::Twice, Form::Direct, &[twice]), @r"
    rank 1, lane 0, step 6 (put 1.0 input to 2): the same cell is already copied to the same output by rank 1, lane 0, step 5 (put 1.0 input to 2)

      1. rank 1, lane 0, step 5 (put 1.0 input to 2)
      2. rank 1, lane 0, step 6 (put 1.0 input to 2)
         both steps write the same bytes, and no flag orders the second write
    ");
}

#[test]
fn a_read_that_is_early() {
    let early =
        (1, "wait arrived 0.0\n  put 0.0 output to 2", "put 0.0 output to 2\n wait arrived 0.0");
    assert_snapshot!(counterexample(FaultClass::ReadEarly, Form::Ring, &[early]), @r"
    rank 1, lane 0, step 6 (put 0.0 output to 2): in start 1, the step may read its source before the data has arrived

      1. rank 2, lane 0, step 1 (signal ready to 1)
      2. rank 1, lane 0, step 3 (wait ready from 2)
      3. rank 1, lane 0, step 6 (put 0.0 output to 2) in start 1
         rank 0, lane 0, step 4 (put 0.0 input to 1) may not have begun
    ");
    let unasked = (1, "put 1.0 input to 2", "put 1.0 output to 2");
    assert_snapshot!(counterexample(FaultClass::ReadEarly, Form::SelfCopyLane, &[unasked]), @r"
    rank 1, lane 0, step 4 (put 1.0 output to 2): in start 1, the step may read its source before the data has arrived

      1. rank 2, lane 0, step 2 (signal ready to 1)
      2. rank 1, lane 0, step 3 (wait ready from 2)
      3. rank 1, lane 0, step 4 (put 1.0 output to 2) in start 1
         rank 1, lane 1, step 1 (put 1.0 input to 1) may not have begun
    ");
}

#[test]
fn a_deadlock() {
    let last = [
        (0, "signal ready to 1\n", "\n"),
        (0, "wait arrived 1.0", "wait arrived 1.0\n signal ready to 1"),
    ];
    assert_snapshot!(counterexample(FaultClass::Deadlock, Form::Direct, &last), @r"
    deadlock in start 1: rank 0, lane 0, step 10 (wait arrived 1.0) needs a signal that comes after rank 1, lane 0, step 7 (wait ready from 0), which needs a signal that comes after the first wait

      1. rank 0, lane 0, step 10 (wait arrived 1.0) blocks: its signal comes later in rank 1, lane 0
      2. rank 1, lane 0, step 7 (wait ready from 0) blocks: its signal comes later in rank 0, lane 0
         none of these lanes can continue
    ");
}

#[test]
fn a_flag_that_is_shared() {
    let writer = (0, "wait arrived 1.0", "wait arrived 1.0\n signal arrived 1.0 to 2");
    assert_snapshot!(counterexample(FaultClass::Shared, Form::Direct, &[writer]), @r"
    rank 1, lane 0, step 6 (signal arrived 1.0 to 2): the same flag is signalled in another lane, by rank 0, lane 0, step 12 (signal arrived 1.0 to 2); expected one lane that signals a flag

      1. rank 0, lane 0, step 12 (signal arrived 1.0 to 2)
      2. rank 1, lane 0, step 6 (signal arrived 1.0 to 2)
         a wait for this flag passes on the signal that comes first
    ");
}

#[test]
fn a_flag_without_a_wait() {
    let dropped = (1, "wait arrived 2.0", "");
    assert_snapshot!(counterexample(FaultClass::Unbalanced, Form::Direct, &[dropped]), @r#"
    rank 2, lane 0, step 9 (signal arrived 2.0 to 1): in one start, rank 1 receives 1 signals of the flag `arrived 2.0` and waits for it 0 times, expected 1 signal and 1 wait

      1. rank 2, lane 0, step 9 (signal arrived 2.0 to 1)
         no lane waits for the flag, so its value after the start differs from the value before
    "#);
}

#[test]
fn a_flag_that_is_stale() {
    let unanswered = [
        (0, "signal ready to 1", "signal arrived 1.0 to 1\n signal ready to 1"),
        (1, "wait arrived 2.0", "wait arrived 2.0\n wait arrived 1.0"),
    ];
    assert_snapshot!(counterexample(FaultClass::Stale, Form::Direct, &unanswered), @r"
    rank 0, lane 0, step 1 (signal arrived 1.0 to 1): in start 2, the flag may be signalled again before its reader has passed the wait of the previous start

      1. rank 0, lane 0, step 2 (signal ready to 1) in start 1
      2. rank 1, lane 0, step 2 (signal ready to 0) in start 1
      3. rank 0, lane 0, step 5 (wait ready from 1) in start 1
      4. rank 1, lane 0, step 7 (wait ready from 0) in start 1
      5. rank 1, lane 0, step 9 (signal arrived 1.0 to 0) in start 1
      6. rank 0, lane 0, step 12 (wait arrived 1.0) in start 1
      7. rank 0, lane 0, step 1 (signal arrived 1.0 to 1) in start 2
         rank 1, lane 0, step 12 (wait arrived 1.0) may not have passed in start 1
    ");
}

#[test]
fn memory_that_is_in_use() {
    let early =
        (1, "wait ready from 2\n  put 1.0 input to 2", "put 1.0 input to 2\n wait ready from 2");
    assert_snapshot!(counterexample(FaultClass::Overwritten, Form::Direct, &[early]), @r"
    rank 1, lane 0, step 4 (put 1.0 input to 2): in start 1, the step may write to rank 2 before rank 2 has entered this start

      1. rank 1, lane 0, step 4 (put 1.0 input to 2) in start 1
         rank 2 may not have entered start 1
    ");
    let taken =
        (1, "get 0.0 input of 0\n  signal taken to 0", "signal taken to 0\n get 0.0 input of 0");
    let pull = Form::Flat(Algorithm::Pull);
    assert_snapshot!(counterexample(FaultClass::Overwritten, pull, &[taken]), @r"
    rank 0: start 1 may end while rank 1, lane 0, still gets data from rank 0

      1. rank 0, lane 0, step 2 (signal ready to 1)
      2. rank 1, lane 0, step 1 (signal ready to 0)
      3. rank 0, lane 0, step 4 (wait ready from 1)
      4. rank 1, lane 0, step 7 (wait ready from 0)
      5. rank 1, lane 0, step 8 (signal taken to 0)
      6. rank 0, lane 0, step 11 (wait taken by 1)
      7. rank 0: lane 0 has ended in start 1
         rank 1, lane 0, step 9 (get 0.0 input of 0) may not have begun
    ");
}

#[test]
fn a_flag_that_the_fabric_does_not_reach() {
    let tiers = |plans: &mut Vec<Plan>| {
        plans.iter_mut().for_each(|plan| plan.lanes[1].tier = Tier::Network);
    };
    assert_snapshot!(counterexample_after(FaultClass::Unreachable, Form::PutLane, tiers), @r"
    rank 1, lane 0, step 2 (signal ready for lane 1 to 0): a local lane cannot signal a network lane of rank 0; expected a signal to lane 0 of rank 0, which relays it

         the plans show this fault in every order of events
    ");
}
