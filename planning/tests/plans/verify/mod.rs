//! Verifies correct plans, and one incorrect plan for each fault, with the text of the fault.

use insta::assert_snapshot;
use peerlane_hal::{Error as _, ErrorKind};
use peerlane_planning::collective::Collective;
use peerlane_planning::plan::{Algorithm, Lane, Plan, Tier};
use peerlane_planning::schedule;
use peerlane_planning::topology::Topology;
use peerlane_planning::verify::{Fault, FaultClass, Proof, verify};

use crate::support::plans::{Form, edit};

mod counterexamples;
mod goals;
mod inboxes;

/// A change in the text of one rank's plan: the rank, the text to replace, and the new text.
type Edit = (usize, &'static str, &'static str);

/// Verifies plans of 3 ranks, 1 chunk, out of place, with some lines of their text changed.
fn edited(form: Form, edits: &[Edit]) -> Result<Proof, Fault> {
    let mut plans = form.plans(3, 1, false);
    for &(rank, from, to) in edits {
        edit(&mut plans[rank], from, to);
    }
    let lanes = plans.iter().map(|plan| plan.lanes.len()).max().unwrap();
    plans.iter_mut().for_each(|plan| plan.lanes.resize(lanes, Lane::default()));
    verify(&plans)
}

fn refused(class: FaultClass, form: Form, edits: &[Edit]) -> Fault {
    let fault = edited(form, edits).unwrap_err();
    assert_eq!(fault.class(), class, "{fault}");
    fault
}

fn refused_after(class: FaultClass, change: impl FnOnce(&mut Vec<Plan>)) -> Fault {
    let mut plans = Form::Direct.plans(3, 1, false);
    change(&mut plans);
    let fault = verify(&plans).unwrap_err();
    assert_eq!(fault.class(), class, "{fault}");
    fault
}

#[test]
fn correct_plans_are_proven() {
    for form in Form::ALL {
        for ranks in (1..=9).chain([12, 16]) {
            for (chunks, in_place) in [(1, false), (1, true), (2, true), (3, false)] {
                let plans = form.plans(ranks, chunks, in_place);
                let proof = verify(&plans).unwrap_or_else(|fault| {
                    panic!("{form:?}, {ranks} ranks, {chunks} chunks, in place {in_place}: {fault}")
                });
                let starts = form.outputs().max(form.inboxes()) + 1;
                let ranks = plans.len() as u32;
                assert_eq!((proof.ranks, proof.chunks, proof.starts), (ranks, chunks, starts));
            }
        }
    }
}

#[test]
fn direct_serves_any_topology() {
    for nodes in [&[0, 0, 1][..], &[0, 1, 2], &[0, 1, 0, 1, 1], &[2, 0, 1, 1, 1, 0, 0]] {
        let topology = Topology::of_nodes(nodes).unwrap();
        let shape = schedule::Shape { chunks: 2, ..Default::default() };
        let plans = schedule::plans(Algorithm::Direct, &topology, shape).unwrap();
        verify(&plans).unwrap_or_else(|fault| panic!("{topology}: {fault}"));
    }
}

#[test]
fn sixty_four_ranks_are_proven() {
    let proof = verify(&Form::Direct.plans(64, 1, false)).unwrap();
    assert_eq!((proof.steps, proof.flags), (64 * (1 + 63 * 5), 2 * 64 * 63));
}

#[test]
fn the_text_of_a_proof_states_what_is_proven() {
    let proof = verify(&Form::PutLane.plans(2, 1, true)).unwrap();
    assert_snapshot!(proof, @"verified (ranks: 2, chunks: 1, starts: 2, steps: 18, flags: 8): every byte of every output arrives exactly once; no byte is read before it has arrived; no deadlock; every flag has one writer and one reader and ends where it began; no start passes on the flags of the one before; nothing is overwritten while a rank may still read it");
}

#[test]
fn plans_that_disagree_are_refused() {
    let text = |change: fn(&mut Vec<Plan>)| refused_after(FaultClass::Disagreement, change);
    assert_eq!(text(Vec::clear).kind(), ErrorKind::Mismatch);
    assert_snapshot!(text(Vec::clear), @"the set of plans is empty, expected one plan for each rank");
    assert_snapshot!(text(|plans| plans.truncate(2)), @"plan 0: ranks is 3, expected 2");
    assert_snapshot!(text(|plans| plans.swap(0, 2)), @"plan 0: rank is 2, expected 0");
    assert_snapshot!(text(|plans| plans[2].chunks = 2), @"plan 2: chunks is 2, expected 1");
    assert_snapshot!(text(|plans| plans[1].in_place = true), @"plan 1: in_place is true, expected false");
}

#[test]
fn impossible_sizes_are_refused() {
    let text = |change: fn(&mut Vec<Plan>)| refused_after(FaultClass::Unknown, change);
    assert_eq!(text(|plans| plans[1].lanes.clear()).kind(), ErrorKind::InvalidArgument);
    assert_snapshot!(text(|plans| plans[1].lanes.clear()), @"rank 1: the plan has no lanes, expected at least lane 0");
    let many = text(|plans| {
        let lane = plans[0].lanes[0].clone();
        plans.iter_mut().for_each(|plan| plan.lanes.resize(100_000, lane.clone()));
    });
    assert_snapshot!(many, @"rank 0: the plan has 100000 lanes, expected at most 64");
    let of_chunks = |chunks| {
        let change = |plans: &mut Vec<Plan>| plans.iter_mut().for_each(|plan| plan.chunks = chunks);
        refused_after(FaultClass::Unknown, change)
    };
    assert_snapshot!(of_chunks(0), @"rank 0: chunks is 0, expected 1 to 65536");
    assert_snapshot!(of_chunks(u32::MAX), @"rank 0: chunks is 4294967295, expected 1 to 65536");
}

#[test]
fn names_that_do_not_exist_are_refused() {
    let text = |from, to| refused(FaultClass::Unknown, Form::Direct, &[(1, from, to)]);
    assert_snapshot!(text("put 1.0 input to 2", "put 1.0 input to 3"), @"rank 1, lane 0, step 5 (put 1.0 input to 3): rank 3 does not exist, expected a rank below 3");
    assert_snapshot!(text("put 1.0 input to 2", "put 3.0 output to 2"), @"rank 1, lane 0, step 5 (put 3.0 output to 2): rank 3 does not exist, expected a rank below 3");
    assert_snapshot!(text("put 1.0 input to 2", "put 1.1 input to 2"), @"rank 1, lane 0, step 5 (put 1.1 input to 2): chunk 1 does not exist, expected a chunk below 1");
    assert_snapshot!(text("put 1.0 input to 2", "put 0.0 input to 2"), @"rank 1, lane 0, step 5 (put 0.0 input to 2): cell 0.0 of the input does not exist, expected a cell of block 1");
    assert_snapshot!(text("wait arrived 0.0", "wait arrived 0.7"), @"rank 1, lane 0, step 10 (wait arrived 0.7): chunk 7 does not exist, expected a chunk below 1");
    assert_snapshot!(text("signal ready to 2", "signal ready for lane 1 to 2"), @"rank 1, lane 0, step 1 (signal ready for lane 1 to 2): lane 1 of rank 2 does not exist, expected a lane below 1");
    assert_snapshot!(text("signal ready to 2", "signal ready from 9 to 2"), @"rank 1, lane 0, step 1 (signal ready from 9 to 2): rank 9 does not exist, expected a rank below 3");
    assert_snapshot!(text("wait arrived 0.0", "wait sent lane 0"), @"rank 1, lane 0, step 10 (wait sent lane 0): the flags `go` and `sent` are reserved for the entry and exit of lanes, expected another flag");
}

#[test]
fn missing_bytes_are_refused() {
    let text = |from, to| refused(FaultClass::Missing, Form::Direct, &[(1, from, to)]);
    assert_snapshot!(text("put 1.0 input to 2\n", "\n"), @"rank 2: no step copies cell 1.0 into the output of rank 2");
    // The signal overtakes the put that it announces.
    assert_snapshot!(text("put 1.0 input to 2\n  signal arrived 1.0 to 2", "signal arrived 1.0 to 2\n put 1.0 input to 2"), @"rank 2: start 1 may end before cell 1.0 has arrived in the output");
}

#[test]
fn bytes_that_arrive_twice_are_refused() {
    let twice = [(1, "put 1.0 input to 2", "put 1.0 input to 2\nput 1.0 input to 2")];
    assert_snapshot!(refused(FaultClass::Twice, Form::Direct, &twice), @"rank 1, lane 0, step 6 (put 1.0 input to 2): the same cell is already copied to the same output by rank 1, lane 0, step 5 (put 1.0 input to 2)");
    let mut plans = Form::Direct.plans(2, 1, true);
    edit(&mut plans[0], "wait ready", "put 0.0 output to 0\n wait ready");
    let fault = verify(&plans).unwrap_err();
    assert_eq!(fault.class(), FaultClass::Twice);
    assert_snapshot!(fault, @"rank 0, lane 0, step 2 (put 0.0 output to 0): the step copies the rank's own block, which is already in its output, because the operation is in place");
}

#[test]
fn contributions_that_are_fetched_are_refused() {
    let mut plans = Form::Goal(Collective::AllReduce, Algorithm::Direct).plans(2, 1, false);
    edit(&mut plans[0], "wait contributed 1.0", "get 1.0 input of 1\n wait contributed 1.0");
    let fault = verify(&plans).unwrap_err();
    assert_eq!(fault.class(), FaultClass::Unknown, "{fault}");
    assert_snapshot!(fault, @"rank 0, lane 0, step 5 (get 1.0 input of 1): the step gets a contribution, expected a put by its rank, because only puts write to an inbox");
}

#[test]
fn early_reads_are_refused() {
    let text = |form, edit| refused(FaultClass::ReadEarly, form, &[edit]);
    let swapped =
        (1, "wait arrived 0.0\n  put 0.0 output to 2", "put 0.0 output to 2\n wait arrived 0.0");
    assert_snapshot!(text(Form::Ring, swapped), @"rank 1, lane 0, step 6 (put 0.0 output to 2): in start 1, the step may read its source before the data has arrived");
    // Without a flag, a lane does not know that its self copy is complete.
    let copied = (1, "put 1.0 input to 2", "put 1.0 output to 2");
    assert_snapshot!(text(Form::Direct, copied), @"rank 1, lane 0, step 5 (put 1.0 output to 2): in start 1, the step may read its source before the data has arrived");
    assert_snapshot!(text(Form::SelfCopyLane, copied), @"rank 1, lane 0, step 4 (put 1.0 output to 2): in start 1, the step may read its source before the data has arrived");
}

#[test]
fn a_flag_to_the_own_rank_publishes_a_copy() {
    let own = "put 1.0 input to 1";
    let announced = "put 1.0 input to 1\n signal arrived 1.0 to 1";
    let forwarded = (1, "put 1.0 input to 2", "wait arrived 1.0\n put 1.0 output to 2");
    for form in [Form::Direct, Form::SelfCopyLane] {
        edited(form, &[(1, own, announced), forwarded]).unwrap();
    }
}

#[test]
fn deadlocks_are_refused() {
    let last = [
        (0, "signal ready to 1\n", "\n"),
        (0, "wait arrived 1.0", "wait arrived 1.0\n signal ready to 1"),
    ];
    assert_snapshot!(refused(FaultClass::Deadlock, Form::Direct, &last), @"deadlock in start 1: rank 0, lane 0, step 10 (wait arrived 1.0) needs a signal that comes after rank 1, lane 0, step 7 (wait ready from 0), which needs a signal that comes after the first wait");
}

#[test]
fn shared_flags_are_refused() {
    let text = |edits: &[Edit]| refused(FaultClass::Shared, Form::Direct, edits);
    let writer = (0, "wait arrived 1.0", "wait arrived 1.0\n signal arrived 1.0 to 2");
    assert_snapshot!(text(&[writer]), @"rank 1, lane 0, step 6 (signal arrived 1.0 to 2): the same flag is signalled in another lane, by rank 0, lane 0, step 12 (signal arrived 1.0 to 2); expected one lane that signals a flag");
    let reader = (0, "wait arrived 1.0", "wait arrived 1.0\n lane 1\n wait arrived 1.0");
    assert_snapshot!(text(&[reader]), @"rank 0, lane 1, step 1 (wait arrived 1.0): the same flag is awaited in another lane, by rank 0, lane 0, step 11 (wait arrived 1.0); expected one lane that waits for a flag");
    let moved = [
        (0, "wait ready from 2\n", "\n"),
        (0, "wait arrived 1.0", "wait arrived 1.0\n lane 1\n wait ready from 2"),
    ];
    assert_snapshot!(text(&moved), @"rank 0, lane 1, step 1 (wait ready from 2): the wait is in the wrong lane, expected lane 0, which the flag names");
}

#[test]
fn unbalanced_flags_are_refused() {
    let text = |from, to| refused(FaultClass::Unbalanced, Form::Direct, &[(1, from, to)]);
    assert_snapshot!(text("signal ready to 2\n", "\n"), @r#"rank 2, lane 0, step 7 (wait ready from 1): in one start, rank 2 receives 0 signals of the flag `ready from 1` and waits for it 1 times, expected 1 signal and 1 wait"#);
    assert_snapshot!(text("wait arrived 2.0", ""), @r#"rank 2, lane 0, step 9 (signal arrived 2.0 to 1): in one start, rank 1 receives 1 signals of the flag `arrived 2.0` and waits for it 0 times, expected 1 signal and 1 wait"#);
    assert_snapshot!(text("signal ready to 2", "signal ready to 2\n signal ready to 2"), @r#"rank 1, lane 0, step 1 (signal ready to 2): in one start, rank 2 receives 2 signals of the flag `ready from 1` and waits for it 1 times, expected 1 signal and 1 wait"#);
}

#[test]
fn stale_flags_are_refused() {
    let text = |edits: &[Edit]| refused(FaultClass::Stale, Form::Direct, edits);
    // The second wait passes on the first value, which is of the same epoch.
    let repeated = [
        (1, "signal ready to 2", "signal ready to 2\n signal ready to 2"),
        (2, "wait ready from 1", "wait ready from 1\n wait ready from 1"),
    ];
    assert_snapshot!(text(&repeated), @"rank 1, lane 0, step 2 (signal ready to 2): the same flag is already signalled in this start, by rank 1, lane 0, step 1 (signal ready to 2), so a wait may pass too early; expected one signal");
    // In the second start, rank 1 may still be at the end of the first.
    let unanswered = [
        (0, "signal ready to 1", "signal arrived 1.0 to 1\n signal ready to 1"),
        (1, "wait arrived 2.0", "wait arrived 2.0\n wait arrived 1.0"),
    ];
    assert_snapshot!(text(&unanswered), @"rank 0, lane 0, step 1 (signal arrived 1.0 to 1): in start 2, the flag may be signalled again before its reader has passed the wait of the previous start");
}

#[test]
fn outputs_in_use_are_not_overwritten() {
    let late =
        [(1, "wait ready from 2\n  put 1.0 input to 2", "put 1.0 input to 2\n wait ready from 2")];
    assert_snapshot!(refused(FaultClass::Overwritten, Form::Direct, &late), @"rank 1, lane 0, step 4 (put 1.0 input to 2): in start 1, the step may write to rank 2 before rank 2 has entered this start");
}

/// Returns plans that get all blocks, written by hand.
fn pull(ranks: u32, in_place: bool) -> Vec<Plan> {
    let place = if in_place { "in place" } else { "out of place" };
    let plan = |rank: u32| {
        let peers = || (rank + 1..ranks).chain(0..rank);
        let each = |line: &dyn Fn(u32) -> String| peers().map(line).collect::<String>();
        let own = if in_place { String::new() } else { format!("put {rank}.0 input to {rank}\n") };
        format!("all-gather direct: rank {rank} of {ranks}, 1 chunk, {place}\nlane 0\n")
            + &each(&|peer| format!("signal ready to {peer}\n"))
            + &own
            + &each(&|peer| {
                format!(
                    "wait ready from {peer}\nget {peer}.0 input of {peer}\nsignal taken to {peer}\n"
                )
            })
            + &each(&|peer| format!("wait taken by {peer}\n"))
    };
    (0..ranks).map(|rank| plan(rank).parse().unwrap()).collect()
}

fn pull_refused(class: FaultClass, edits: &[Edit]) -> Fault {
    let mut plans = pull(3, false);
    for &(rank, from, to) in edits {
        edit(&mut plans[rank], from, to);
    }
    let fault = verify(&plans).unwrap_err();
    assert_eq!(fault.class(), class, "{fault}");
    fault
}

#[test]
fn gets_are_proven() {
    for ranks in 1..=9 {
        for in_place in [false, true] {
            verify(&pull(ranks, in_place)).unwrap_or_else(|fault| panic!("{ranks}: {fault}"));
        }
    }
}

#[test]
fn a_source_is_not_given_back_while_a_peer_gets_from_it() {
    let text = |edits: &[Edit]| pull_refused(FaultClass::Overwritten, edits);
    let early =
        [(1, "get 0.0 input of 0\n  signal taken to 0", "signal taken to 0\n get 0.0 input of 0")];
    assert_snapshot!(text(&early), @"rank 0: start 1 may end while rank 1, lane 0, still gets data from rank 0");
    let never = [(1, "signal taken to 0", ""), (0, "wait taken by 1", "")];
    assert_snapshot!(text(&never), @"rank 0: start 1 may end while rank 1, lane 0, still gets data from rank 0");
    // A signal to a third rank does not publish a get from rank 0.
    let mut plans = pull(3, false);
    edit(&mut plans[1], "signal taken to 0", "signal arrived 1.0 to 2");
    edit(
        &mut plans[2],
        "wait taken by 1",
        "wait taken by 1\n wait arrived 1.0\n signal taken by 1 to 0",
    );
    assert_eq!(verify(&plans).unwrap_err().class(), FaultClass::Overwritten);
}

#[test]
fn a_get_waits_for_its_source() {
    let early =
        [(1, "wait ready from 0\n  get 0.0 input of 0", "get 0.0 input of 0\n wait ready from 0")];
    assert_snapshot!(pull_refused(FaultClass::ReadEarly, &early), @"rank 1, lane 0, step 7 (get 0.0 input of 0): in start 1, the step may read its source before the data has arrived");
    let of_output = [(1, "get 0.0 input of 0", "get 0.0 output of 0")];
    assert_snapshot!(pull_refused(FaultClass::ReadEarly, &of_output), @"rank 1, lane 0, step 8 (get 0.0 output of 0): in start 1, the step may read its source before the data has arrived");
    let other = [(1, "get 0.0 input of 0", "get 2.0 input of 0")];
    assert_snapshot!(pull_refused(FaultClass::Unknown, &other), @"rank 1, lane 0, step 8 (get 2.0 input of 0): cell 2.0 of the input does not exist, expected a cell of block 0");
}

/// A cell that a get has copied may be forwarded after a flag to the own rank.
#[test]
fn a_cell_from_a_get_is_forwarded() {
    let get = "get 0.0 input of 0\n  signal taken to 0";
    let passed = "signal arrived 0.0 to 1\n wait arrived 0.0\n put 0.0 output to 2\n signal arrived 0.0 to 2";
    let mut plans = pull(3, false);
    edit(&mut plans[1], get, &format!("{get}\n {passed}"));
    edit(&mut plans[2], "get 0.0 input of 0\n", "");
    edit(&mut plans[2], "wait taken by 1", "wait taken by 1\n wait arrived 0.0");
    verify(&plans).unwrap();
    edit(&mut plans[1], "  signal arrived 0.0 to 1\n  wait arrived 0.0\n", "");
    assert_eq!(verify(&plans).unwrap_err().class(), FaultClass::ReadEarly);
}

#[test]
fn lanes_and_tiers_agree() {
    let text = |class, change: fn(&mut [Plan])| {
        let mut plans = Form::PutLane.plans(3, 1, false);
        change(&mut plans);
        let fault = verify(&plans).unwrap_err();
        assert_eq!(fault.class(), class, "{fault}");
        fault
    };
    let class = FaultClass::Disagreement;
    assert_snapshot!(text(class, |plans| { plans[1].lanes.pop(); }), @"plan 1: number of lanes is 1, expected 2");
    assert_snapshot!(text(class, |plans| plans[1].lanes[1].tier = Tier::Network), @"plan 1: tier of lane 1 is network, expected local");
    assert_snapshot!(text(class, |plans| plans[2].lanes[0].tier = Tier::Network), @"plan 2: tier of lane 0 is network, expected local");
    let class = FaultClass::Unreachable;
    let network =
        |plans: &mut [Plan]| plans.iter_mut().for_each(|plan| plan.lanes[1].tier = Tier::Network);
    assert_snapshot!(text(class, network), @"rank 1, lane 0, step 2 (signal ready for lane 1 to 0): a local lane cannot signal a network lane of rank 0; expected a signal to lane 0 of rank 0, which relays it");
}

/// A lane without steps has no entry and no exit.
#[test]
fn empty_lanes_are_not_waited_for() {
    let mut plans = Form::Direct.plans(3, 1, false);
    plans.iter_mut().for_each(|plan| plan.lanes.push(Lane::default()));
    assert_eq!(verify(&plans).unwrap(), edited(Form::Direct, &[]).unwrap());
}
