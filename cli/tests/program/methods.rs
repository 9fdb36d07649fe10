//! Tests `peerlane allgather` with every algorithm, virtual nodes, predictions, explanations and
//! traces, on the host and on simulated GPUs.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;

use crate::common::{Ended, command, end};

const SMALL: &str = "--min-bytes 9000 --max-bytes 9000 --iterations 2 --warmup 1 --timeout 20";
const BACKENDS: [&str; 2] = ["host", "cuda"];

/// Returns the program with a backend; GPUs are simulated.
pub(crate) fn on(backend: &str, words: &str) -> Command {
    let mut command = command(&format!("allgather --backend {backend} {words}"));
    command.env("LD_LIBRARY_PATH", peerlane_simulated_driver::library_folder());
    command.env_remove("CUDA_VISIBLE_DEVICES");
    command
}

fn run(backend: &str, words: &str) -> Ended {
    end(&mut on(backend, &format!("{words} {SMALL}")))
}

fn names(rows: &[Value]) -> Vec<&str> {
    rows.iter().map(|row| row["algorithm"].as_str().unwrap()).collect()
}

fn file(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name)
}

#[test]
fn all_algorithms_have_a_row_each_and_are_checked() {
    for backend in BACKENDS {
        let flat = run(backend, "--ranks 3 --algorithm all --chunks 2 --json -").rows();
        assert_eq!(names(&flat), ["direct", "pull", "ring", "double-ring", "get-ring"]);
        let nodes = run(backend, "--nodes 2+1 --ranks 3 --algorithm all --json -").rows();
        let expected =
            ["direct", "pull", "ring", "double-ring", "hierarchical", "hierarchical-ring"];
        assert_eq!(names(&nodes), expected);
        for row in flat.iter().chain(&nodes) {
            assert_eq!(row["checked"], true, "{row}");
            assert_eq!(row["ranks"], 3, "{row}");
        }
        assert!(flat.iter().all(|row| row["chunks"] == 2 && row["nodes"] == "1x3"));
        assert!(nodes.iter().all(|row| row["nodes"] == "2+1"), "{nodes:?}");
    }
}

#[test]
fn virtual_nodes_have_a_network_of_their_own() {
    for backend in BACKENDS {
        let slow = "--network-bandwidth 100MB/s --network-delay 200us";
        let words =
            format!("--nodes 2x2 --algorithm hierarchical --chunk-bytes 1K {slow} --json -");
        let rows = run(backend, &words).rows();
        let [row] = &rows[..] else { panic!("{rows:?}") };
        assert_eq!((&row["checked"], &row["chunks"]), (&true.into(), &3.into()), "{row}");
        let tiers: Vec<_> = row["lanes"].as_array().unwrap().iter().map(|it| &it["tier"]).collect();
        assert_eq!(tiers, ["local", "network"]);
        let network = row["tiers"].as_array().unwrap().iter().find(|it| it["tier"] == "network");
        assert_eq!(network.unwrap()["put_bytes"], 2250, "{row}");
        // Two flags in sequence, 200 µs each; simulated GPUs are slower.
        assert!(row["median_us"].as_f64().unwrap() >= 200.0, "{row}");
    }
}

#[test]
fn one_node_has_no_network() {
    let rows = run("host", "--ranks 2 --nodes 1 --algorithm hierarchical --json -").rows();
    assert_eq!(rows[0]["lanes"].as_array().unwrap().len(), 1, "{rows:?}");
}

#[test]
fn rows_have_the_predicted_time_on_request() {
    for backend in BACKENDS {
        let rows = run(backend, "--ranks 2 --algorithm ring --predict --json -").rows();
        let number = |field: &str| rows[0][field].as_f64().unwrap();
        let ratio = number("predicted_us") / number("median_us");
        assert!((number("predicted_ratio") / ratio - 1.0).abs() < 1e-9 && ratio > 0.0);
        let rows = run(backend, "--ranks 2 --json -").rows();
        assert_eq!(rows[0]["predicted_us"], Value::Null);
    }
}

#[test]
fn a_choice_is_explained_below_the_table() {
    let ended = run("host", "--nodes 2x2 --explain");
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{ended:?}");
    let title = "all-gather, 4 ranks on nodes 2x2, host backend, u8, out of place";
    assert!(ended.stdout.starts_with(title), "{ended:?}");
    assert!(
        ended.stdout.contains("rank 0: lane 0 local on host by processor, waits queued"),
        "{ended:?}"
    );
    assert!(ended.stdout.contains("4 ranks on 2 nodes, blocks of "), "{ended:?}");
    assert!(ended.stdout.contains("predicted: "), "{ended:?}");
}

#[test]
fn one_start_of_all_ranks_is_traced() {
    for backend in BACKENDS {
        let path = file(&format!("{backend}-start.json"));
        let words = format!("--nodes 2x2 --algorithm hierarchical --chunks 2 {SMALL} --trace");
        let ended = end(on(backend, &words).arg(&path));
        assert_eq!(ended.code, Some(0), "{ended:?}");
        let trace: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let steps = events.iter().filter(|event| event["ph"] == "X" || event["ph"] == "i");
        let puts = steps.filter(|event| event["name"].as_str().unwrap().starts_with("put "));
        let by: BTreeSet<_> = puts.map(|put| put["pid"].as_u64().unwrap()).collect();
        assert_eq!(by.into_iter().collect::<Vec<_>>(), [0, 1, 2, 3]);
        let names = events.iter().filter_map(|event| event["name"].as_str());
        let network = names.filter(|name| name.contains("(network)")).count();
        assert!(network >= 8, "{network} steps on the network");
    }
}

#[test]
fn a_calibration_is_used_and_its_key_is_compared() {
    let path = file("methods-links.json");
    let words = "calibrate --backend host --ranks 2 --min-bytes 4K --max-bytes 16K --rounds 1";
    let ended = end(command(words).arg("--out").arg(&path));
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let with = |words: &str| {
        let words = format!("{words} {SMALL} --json - --calibration");
        end(on("host", &words).arg(&path))
    };
    assert!(with("--ranks 2").rows()[0]["predicted_us"].as_f64().unwrap() > 0.0);
    // Virtual nodes are the same ranks.
    assert!(with("--ranks 2 --nodes 2").rows()[0]["predicted_us"].as_f64().unwrap() > 0.0);
    let ended = with("--ranks 3");
    assert!(ended.error(2).contains("topology is \"1x2\", expected \"1x3\""), "{ended:?}");
}
