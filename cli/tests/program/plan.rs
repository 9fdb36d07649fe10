//! Tests `peerlane plan` and `peerlane doctor`.

use std::fs;
use std::path::PathBuf;

use serde_json::Value;

use crate::common::{Ended, command, end, run};

/// Writes a file of a test.
fn file(name: &str, text: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::write(&path, text).unwrap();
    path
}

fn check(name: &str, text: &str) -> Ended {
    end(command("plan --check").arg(file(name, text)))
}

#[test]
fn printed_plans_are_verified_and_can_be_checked_again() {
    for options in [
        "",
        "--ranks 1",
        "--ranks 5 --chunks 3",
        "--nodes 2+2+3 --in-place",
        "--nodes 0,1,0,1 --tiers --algorithm ring",
        "--nodes 2 --ranks 5 --algorithm hierarchical --tiers --chunks 2",
        "--nodes 3x2 --algorithm hierarchical-ring --tiers --outputs 2",
        "--algorithm pull --in-place",
        "--algorithm double-ring --flags batched",
        "--ranks 3 --outputs 2 --flags batched",
        "--collective reduce-scatter --nodes 2x2 --tiers",
        "--collective all-reduce --ranks 3 --in-place",
        "--collective reduce --root 1 --ranks 4 --outputs 2",
        "--collective reduce-scatter --ranks 3 --inboxes 2",
        "--collective all-reduce --nodes 2x2 --tiers --in-place --inboxes 2 --flags batched",
    ] {
        let text = run(&format!("plan {options}"));
        assert_eq!((text.code, text.stderr.as_str()), (Some(0), ""));
        let verdict = check("plans.txt", &text.stdout);
        assert_eq!(verdict.code, Some(0), "{options}: {verdict:?}");
        assert!(verdict.stdout.contains("verified ("), "{verdict:?}");
        let json = run(&format!("plan {options} --json"));
        assert_eq!(check("plans.json", &json.stdout).stdout, verdict.stdout);
    }
}

#[test]
fn json_holds_the_verdict_the_plans_and_the_layout() {
    let ended = run("plan --nodes 1+2 --chunks 2 --block-bytes 100,1K,0 --rank 2 --json");
    let json: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(json["node_of_rank"], serde_json::json!([0, 1, 1]));
    assert!(json["verdict"].as_str().unwrap().starts_with("verified ("));
    assert_eq!(json["plans"].as_array().unwrap().len(), 1);
    assert_eq!(json["plans"][0]["rank"], 2);
    assert_eq!(json["layout"]["total_bytes"], 1124);
    assert_eq!(json["layout"]["cells"].as_array().unwrap().len(), 6);
}

#[test]
fn a_plan_without_one_step_has_a_fault() {
    let text = run("plan --ranks 3").stdout;
    let lines: Vec<_> = text.lines().collect();
    let steps = lines.iter().enumerate().filter(|(_, line)| line.starts_with("  "));
    let mut broken = 0;
    for (index, step) in steps {
        let mut lines = lines.clone();
        lines.remove(index);
        let ended = check("broken.txt", &lines.join("\n"));
        assert!(
            ended.error(1).contains("the verifier rejected the plans: "),
            "without {step}: {ended:?}"
        );
        broken += 1;
    }
    assert!(broken > 10);
}

#[test]
fn one_plan_of_many_ranks_is_printed_without_verification() {
    let ended = run("plan --nodes 2048x8 --algorithm hierarchical --tiers --rank 16383");
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    assert!(ended.stdout.starts_with("# 16384 ranks on 2048 nodes\n# not verified: "));
    assert!(ended.stdout.contains("all-gather hierarchical: rank 16383 of 16384, 1 chunk"));
}

#[test]
fn a_file_without_plans_is_refused_with_its_line() {
    let ended = check("words.txt", "all-gather direct: rank 0 of 1, 1 chunk, in place\nlane one\n");
    assert!(ended.error(1).contains("line 2"), "{ended:?}");
    let ended = check("nothing.txt", "# nothing\n");
    assert!(
        ended.error(1).contains("contains no plan, expected the plan of every rank"),
        "{ended:?}"
    );
    let ended = check("list.json", "{\"plans\": 3}");
    assert!(ended.error(1).contains("expected a list of plans"), "{ended:?}");
    let ended = run("plan --check /proc/none");
    assert!(ended.error(1).contains("cannot read /proc/none"), "{ended:?}");
}

#[test]
fn a_closed_stdout_is_not_an_error() {
    let mut child = command("plan --ranks 64").spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(output.stderr.is_empty());
}

#[test]
fn the_doctor_names_every_backend() {
    let ended = run("doctor");
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    for word in ["memory", "processors", "host", "cuda", "rocm", "rdma", "ucx", "ready: host"] {
        assert!(ended.stdout.contains(word), "{word}: {ended:?}");
    }
    let json: Value = serde_json::from_str(&run("doctor --json").stdout).unwrap();
    let backends = json["backends"].as_array().unwrap();
    assert_eq!(backends[0]["state"], "ok");
    let has_advice = |backend: &Value| backend["state"] == "ok" || backend["advice"].is_string();
    assert!(backends.iter().all(has_advice), "{backends:?}");
}
