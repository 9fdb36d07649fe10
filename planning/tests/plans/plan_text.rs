//! Tests the text and JSON forms of plans.

use fastrand::Rng;
use insta::assert_snapshot;
use peerlane_hal::{Error as _, ErrorKind, Rank};
use peerlane_planning::collective::Collective;
use peerlane_planning::plan::{
    Algorithm, Cell, Flag, FlagOrder, Lane, LaneId, ParseError, Plan, Source, Step, Tier,
};

use crate::support::plans::Form;

/// Returns a plan of random steps, which need not be correct.
fn random_plan(rng: &mut Rng) -> Plan {
    let lanes = (0..rng.usize(0..4)).map(|_| Lane {
        tier: *rng.choice(Tier::ALL).unwrap(),
        steps: (0..rng.usize(0..12)).map(|_| random_step(rng)).collect(),
    });
    let lanes = lanes.collect();
    let number = |rng: &mut Rng| if rng.bool() { rng.u32(..4) } else { rng.u32(..) };
    Plan {
        collective: rng.choice(Collective::ALL).unwrap().with_root(Rank(number(rng))),
        algorithm: *rng.choice(Algorithm::ALL).unwrap(),
        rank: Rank(number(rng)),
        ranks: number(rng),
        chunks: number(rng),
        in_place: rng.bool(),
        outputs: if rng.bool() { 1 } else { number(rng) },
        inboxes: if rng.bool() { 1 } else { number(rng) },
        flags: *rng.choice(FlagOrder::ALL).unwrap(),
        lanes,
    }
}

fn random_step(rng: &mut Rng) -> Step {
    let mut number = || rng.u32(..7);
    let (peer, lane) = (Rank(number()), LaneId(number()));
    let cell = Cell { block: Rank(number()), chunk: number() };
    let flag = match number() {
        0 => Flag::Ready { from: Rank(number()), lane },
        1 => Flag::Arrived { cell, lane },
        2 => Flag::Taken { by: Rank(number()), lane },
        3 => Flag::Go { lane },
        4 => Flag::Free { from: Rank(number()), lane },
        5 => Flag::Contributed { cell, lane },
        _ => Flag::Sent { lane },
    };
    let from = if number() < 2 { Source::Input } else { Source::Output };
    match number() {
        0 => Step::Put { peer, cell, from },
        1 => Step::Get { peer, cell, from },
        2 => Step::Signal { peer, flag },
        3 => Step::Reduce { cell, from: peer },
        _ => Step::Wait { flag },
    }
}

fn fault(text: &str) -> ParseError {
    let fault = text.parse::<Plan>().unwrap_err();
    assert_eq!(fault.kind(), ErrorKind::InvalidArgument);
    fault
}

#[test]
fn every_plan_reads_back_as_it_was() {
    for seed in 0..3000 {
        let plan = random_plan(&mut Rng::with_seed(seed));
        let text = plan.to_string();
        assert_eq!(text.parse().as_ref(), Ok(&plan), "seed {seed}:\n{text}");
        let json = serde_json::to_string(&plan).unwrap();
        assert_eq!(serde_json::from_str::<Plan>(&json).unwrap(), plan, "seed {seed}: {json}");
    }
}

#[test]
fn correct_plans_read_back_as_they_were() {
    for form in Form::ALL {
        for ranks in 1..=9 {
            for plan in form.plans(ranks, 2, ranks % 2 == 0) {
                assert_eq!(plan.to_string().parse(), Ok(plan), "{form:?}, {ranks} ranks");
            }
        }
    }
}

#[test]
fn different_plans_have_different_texts() {
    for seed in 0..3000 {
        let mut rng = Rng::with_seed(seed);
        let (one, other) = (random_step(&mut rng), random_step(&mut rng));
        let text = |step| {
            let mut plan = Form::Direct.plans(2, 1, false).swap_remove(1);
            plan.lanes[0].steps = vec![step];
            plan.to_string()
        };
        assert_eq!(one == other, text(one) == text(other), "seed {seed}: {one:?}, {other:?}");
    }
}

#[test]
fn the_text_is_readable() {
    let plan = Form::PutLane.plans(2, 2, false).swap_remove(0);
    assert_snapshot!(plan, @r"
    all-gather direct: rank 0 of 2, 2 chunks, out of place
    lane 0
      signal ready for lane 1 to 1
      put 0.0 input to 0
      put 0.1 input to 0
      wait arrived 1.0
      wait arrived 1.1
    lane 1
      wait ready for lane 1 from 1
      put 0.0 input to 1
      signal arrived 0.0 to 1
      put 0.1 input to 1
      signal arrived 0.1 to 1
    ");
}

#[test]
fn the_json_is_readable() {
    let mut plan = Form::PutLane.plans(2, 1, true).swap_remove(1);
    plan.lanes[1].steps.push(Step::Wait { flag: Flag::Go { lane: LaneId(2) } });
    assert_snapshot!(serde_json::to_string(&plan).unwrap(), @r#"{"collective":"all-gather","algorithm":"direct","rank":1,"ranks":2,"chunks":1,"in_place":true,"outputs":1,"inboxes":1,"flags":"prompt","lanes":[{"tier":"local","steps":[{"signal":{"peer":0,"flag":{"ready":{"from":1,"lane":1}}}},{"wait":{"flag":{"arrived":{"cell":{"block":0,"chunk":0},"lane":0}}}}]},{"tier":"local","steps":[{"wait":{"flag":{"ready":{"from":0,"lane":1}}}},{"put":{"peer":0,"cell":{"block":1,"chunk":0},"from":"input"}},{"signal":{"peer":0,"flag":{"arrived":{"cell":{"block":1,"chunk":0},"lane":0}}}},{"wait":{"flag":{"go":{"lane":2}}}}]}]}"#);
}

#[test]
fn indentation_and_blank_lines_are_ignored() {
    let plan = Form::Direct.plans(3, 2, false).swap_remove(2);
    let text = plan.to_string().replace("  ", "\t").replace('\n', " \r\n\n");
    assert_eq!(text.parse(), Ok(plan));
}

#[test]
fn faults_in_the_header_are_named() {
    assert_snapshot!(fault(""), @r#"invalid plan, line 1 "": expected all-gather, broadcast, all-to-all, gather, scatter, reduce-scatter, all-reduce, reduce, scan or exscan, found the end of the line"#);
    assert_snapshot!(fault("\n\nall-gather spiral: rank"), @r#"invalid plan, line 3 "all-gather spiral: rank": expected direct, pull, ring, double-ring, hierarchical, hierarchical-ring, recursive-doubling, scatter-all-gather or get-ring, found "spiral""#);
    assert_snapshot!(fault("all-gather direct rank 0 of 2"), @r#"invalid plan, line 1 "all-gather direct rank 0 of 2": expected ":", found "rank""#);
    assert_snapshot!(fault("all-gather direct: rank -1 of 2"), @r#"invalid plan, line 1 "all-gather direct: rank -1 of 2": expected the number of a rank, found "-1""#);
    assert_snapshot!(fault("all-gather direct: rank 0 of 4294967296"), @r#"invalid plan, line 1 "all-gather direct: rank 0 of 4294967296": expected the number of ranks, found "4294967296""#);
    assert_snapshot!(fault("all-gather direct: rank 0 of 2, 2 chunk, in place"), @r#"invalid plan, line 1 "all-gather direct: rank 0 of 2, 2 chunk, in place": expected "chunks", found "chunk""#);
    assert_snapshot!(fault("all-gather direct: rank 0 of 2, 1 chunk, somewhere"), @r#"invalid plan, line 1 "all-gather direct: rank 0 of 2, 1 chunk, somewhere": expected in place or out of place, found "somewhere""#);
    assert_snapshot!(fault("all-gather direct: rank 0 of 2, 1 chunk, in place now"), @r#"invalid plan, line 1 "all-gather direct: rank 0 of 2, 1 chunk, in place now": expected the end of the line, found "now""#);
    let turn =
        |end: &str| fault(&format!("reduce-scatter direct: rank 0 of 2, 1 chunk, in place, {end}"));
    assert_snapshot!(turn("two"), @r#"invalid plan, line 1 "reduce-scatter direct: rank 0 of 2, 1 chunk, in place, two": expected the number of outputs or inboxes, or flags, found "two""#);
    assert_snapshot!(turn("2 windows in turn"), @r#"invalid plan, line 1 "reduce-scatter direct: rank 0 of 2, 1 chunk, in place, 2 windows in turn": expected outputs or inboxes, found "windows""#);
    assert_snapshot!(turn("2 outputs in turn, 2 outputs in turn"), @r#"invalid plan, line 1 "reduce-scatter direct: rank 0 of 2, 1 chunk, in place, 2 outputs in turn, 2 outp"…: expected inboxes, found "outputs""#);
    assert_snapshot!(turn("2 inboxes in turn, 2 outputs in turn"), @r#"invalid plan, line 1 "reduce-scatter direct: rank 0 of 2, 1 chunk, in place, 2 inboxes in turn, 2 outp"…: expected "flags", found "2""#);
    assert_snapshot!(turn("flags batched, 2 inboxes in turn"), @r#"invalid plan, line 1 "reduce-scatter direct: rank 0 of 2, 1 chunk, in place, flags batched, 2 inboxes "…: expected the end of the line, found ",""#);
}

/// Plans of earlier versions state no number of inboxes.
#[test]
fn json_without_inboxes_has_one() {
    let plan =
        Form::Goal(Collective::AllReduce, Algorithm::Direct).plans(2, 1, false).swap_remove(0);
    let json = serde_json::to_string(&plan).unwrap();
    let earlier = json.replace("\"inboxes\":1,", "");
    assert_ne!(earlier, json);
    assert_eq!(serde_json::from_str::<Plan>(&earlier).unwrap(), plan);
}

#[test]
fn faults_in_steps_are_named() {
    let step = |step: &str| {
        fault(&format!("all-gather direct: rank 0 of 2, 1 chunk, in place\nlane 0\n\n  {step}"))
    };
    assert_snapshot!(step("copy 0.0"), @r#"invalid plan, line 4 "copy 0.0": expected put, get, reduce, signal, wait or lane, found "copy""#);
    assert_snapshot!(step("get 0.0 input to 1"), @r#"invalid plan, line 4 "get 0.0 input to 1": expected "of", found "to""#);
    assert_snapshot!(step("put 0 input to 1"), @r#"invalid plan, line 4 "put 0 input to 1": expected a cell such as 2.0, block and chunk, found "0""#);
    assert_snapshot!(step("put 0.+1 input to 1"), @r#"invalid plan, line 4 "put 0.+1 input to 1": expected a cell such as 2.0, block and chunk, found "0.+1""#);
    assert_snapshot!(step("put 0.0 to 1"), @r#"invalid plan, line 4 "put 0.0 to 1": expected input or output, found "to""#);
    assert_snapshot!(step("put 0.0 input"), @r#"invalid plan, line 4 "put 0.0 input": expected "to", found the end of the line"#);
    assert_snapshot!(step("signal done to 1"), @r#"invalid plan, line 4 "signal done to 1": expected ready, free, arrived, contributed, taken, go or sent, found "done""#);
    assert_snapshot!(step("signal ready 1"), @r#"invalid plan, line 4 "signal ready 1": expected "to", found "1""#);
    assert_snapshot!(step("wait ready"), @r#"invalid plan, line 4 "wait ready": expected "from", found the end of the line"#);
    assert_snapshot!(step("wait go 1"), @r#"invalid plan, line 4 "wait go 1": expected "lane", found "1""#);
    assert_snapshot!(step("wait arrived 1.0 twice"), @r#"invalid plan, line 4 "wait arrived 1.0 twice": expected the end of the line, found "twice""#);
    assert_snapshot!(step("wait arrived 1.0 for 1"), @r#"invalid plan, line 4 "wait arrived 1.0 for 1": expected "lane", found "1""#);
    assert_snapshot!(step("lane 1 remote"), @r#"invalid plan, line 4 "lane 1 remote": expected network, found "remote""#);
    assert_snapshot!(step("lane 2"), @r#"invalid plan, line 4 "lane 2": expected "1", found "2""#);
}

#[test]
fn a_step_outside_a_lane_is_a_fault() {
    let text = "all-gather direct: rank 0 of 2, 1 chunk, in place\nwait arrived 1.0";
    assert_snapshot!(fault(text), @r#"invalid plan, line 2 "wait arrived 1.0": expected lane 0, found "wait""#);
}

#[test]
fn broken_texts_never_panic() {
    let text = Form::PutLane.plans(3, 2, false)[1].to_string();
    let (mut parsed, mut refused) = (0, 0);
    for seed in 0..3000 {
        let mut rng = Rng::with_seed(seed);
        let mut broken: Vec<char> = text.chars().collect();
        for _ in 0..rng.usize(1..4) {
            let at = rng.usize(..broken.len());
            broken[at] = *rng.choice(&['0', '9', ' ', '\n', ':', ',', '.', 'x', 'ü']).unwrap();
        }
        let broken: String = broken.into_iter().collect();
        match broken.parse::<Plan>() {
            Ok(plan) => {
                parsed += 1;
                assert_eq!(plan.to_string().parse(), Ok(plan), "seed {seed}:\n{broken}");
            }
            Err(error) => {
                refused += 1;
                let error = error.to_string();
                assert!(error.starts_with("invalid plan, line "), "seed {seed}: {error}");
            }
        }
    }
    assert!(parsed > 0 && refused > 0, "{parsed} were parsed, {refused} refused");
}

#[test]
fn json_of_other_shapes_is_refused() {
    let json = serde_json::to_string(&Form::Direct.plans(2, 1, true)[0]).unwrap();
    let refused = |broken: String| serde_json::from_str::<Plan>(&broken).is_err();
    assert!(!refused(json.clone()));
    assert!(refused(json.replace("\"chunks\"", "\"pieces\"")));
    assert!(refused(json.replace("\"put\"", "\"copy\"")));
    let error = |broken: String| serde_json::from_str::<Plan>(&broken).unwrap_err().to_string();
    assert_snapshot!(error(json.replace("\"all-gather\"", "\"all-sum\"")), @"unknown variant `all-sum`, expected one of `all-gather`, `broadcast`, `all-to-all`, `gather`, `scatter`, `reduce-scatter`, `all-reduce`, `reduce`, `scan`, `exscan` at line 1 column 23");
    assert_snapshot!(error(json.replace("\"collective\":\"all-gather\",", "")), @"missing field `collective` at line 1 column 467");
    assert!(refused(json.replace("\"chunk\":0", "\"chunk\":-1")));
    assert!(refused(json.replace("\"in_place\":true", "\"in_place\":true,\"more\":1")));
}
