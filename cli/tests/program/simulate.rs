//! Tests `peerlane simulate`.

use std::fs;
use std::path::PathBuf;

use serde_json::Value;

use crate::common::run;

/// Returns the path of a file of a test.
fn file(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name)
}

fn json(words: &str) -> Value {
    let ended = run(&format!("simulate {words} --json"));
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    serde_json::from_str(&ended.stdout).unwrap()
}

#[test]
fn a_table_and_the_critical_path_are_printed() {
    let words = "--nodes 2 --ranks-per-node 2 --algorithm hierarchical --chunks 1 --path 6";
    let ended = run(&format!("simulate {words}"));
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    insta::assert_snapshot!(ended.stdout, @"
    4 ranks on 2 nodes, blocks of 1 MiB

     algorithm      chunks     µs   predicted µs   GB/s   local   used   network   used   local incast   network incast
    ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────
     hierarchical        1   51.4           52.1   81.6   8 MiB   10 %     4 MiB   42 %              1                1

    critical path of hierarchical, 11 steps
              10.0 µs  +      10.0  rank 1 lane 0: signal go lane 1 to 1
              12.0 µs  +       2.0  rank 1 lane 1: wait go lane 1
              12.0 µs  +       0.0  rank 1 lane 1: signal ready for lane 1 to 3
      … 5 steps …
              44.6 µs  +       0.0  rank 1 lane 0: signal arrived 3.0 to 0
              51.1 µs  +       6.5  rank 0 lane 0: wait arrived 3.0
              51.4 µs  +       0.3  rank 0 lane 0: wait sent lane 1
    ");
    assert_eq!(run(&format!("simulate {words}")).stdout, ended.stdout);
}

#[test]
fn all_algorithms_are_compared() {
    let document = json("--nodes 3+1+2 --algorithm all --block-bytes 64K --chunks 2");
    let runs = document["runs"].as_array().unwrap();
    assert_eq!(document["ranks"], 6);
    assert_eq!(runs.len(), 6);
    for run in runs {
        // Every block goes to every other rank, over either tier.
        let bytes = |class: usize| run["link_classes"][class]["bytes"].as_u64().unwrap();
        assert_eq!(bytes(1) + bytes(2), 6 * 5 * 65536, "{run}");
        assert_eq!(bytes(0), 6 * 65536, "{run}");
        assert!(run["microseconds"].as_f64() >= run["first_rank_microseconds"].as_f64());
        assert!(run["microseconds"].as_f64() > Some(0.0));
    }
}

#[test]
fn link_options_and_late_ranks_change_the_time() {
    let time = |words: &str| {
        let document = json(&format!("--nodes 2x2 --block-bytes 64M --algorithm direct {words}"));
        document["runs"][0]["microseconds"].as_f64().unwrap()
    };
    let plain = time("");
    assert!(time("--network-bandwidth 12GB/s") > 3.0 * plain);
    assert!(time("--network-bandwidth 480GB/s") < plain / 3.0);
    assert!(time("--nics 1") > 1.8 * plain);
    assert_eq!(time("--nics 2"), plain);
    assert!(time("--delay 3:1s") > 1e6);
    assert!(time("--one-fabric") < plain);
    let links = file("links.json");
    let mut figures = json("")["links"].clone();
    figures["start_seconds"] = 1.0.into();
    fs::write(&links, figures.to_string()).unwrap();
    assert!(time(&format!("--calibration {}", links.display())) > 1e6);
}

#[test]
fn a_chart_and_a_trace_are_written() {
    let (svg, trace) = (file("lanes.svg"), file("lanes.json"));
    let (svg_text, trace_text) = (svg.display(), trace.display());
    let ended =
        run(&format!("simulate --nodes 2x4 --show 3 --svg {svg_text} --trace {trace_text}"));
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    let picture = fs::read_to_string(svg).unwrap();
    assert!(picture.contains("rank 2 lane 1") && !picture.contains("rank 3"), "{picture}");
    let trace: Value = serde_json::from_str(&fs::read_to_string(trace).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let slices: Vec<_> = events.iter().filter(|event| event["ph"] == "X").collect();
    assert!(slices.iter().any(|slice| slice["pid"] == 2 && slice["dur"].as_f64() > Some(0.0)));
    assert!(slices.iter().all(|slice| slice["pid"].as_u64() < Some(3)));
}

#[test]
fn a_plot_shows_the_duration_by_cause() {
    let plot = file("causes.svg");
    let words = format!("simulate --nodes 2x4 --block-bytes 4M --plot {}", plot.display());
    let ended = run(&words);
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    assert_eq!(ended.stdout, run("simulate --nodes 2x4 --block-bytes 4M").stdout);
    let picture = fs::read_to_string(plot).unwrap();
    for text in ["Bandwidth", "Duration by cause", "network", "flags", "32 KiB", "32 MiB"] {
        assert!(picture.contains(text), "{text} is missing");
    }
}

#[test]
fn impossible_simulations_are_refused() {
    for (words, expected) in [
        ("--nodes 0", "the number of nodes is 0, expected at least 1"),
        ("--nodes 2x4 --ranks-per-node 2", "remove --ranks-per-node 2"),
        ("--nodes 100000 --ranks-per-node 4096", "409600000 ranks, expected at most 1048576"),
        ("--block-bytes 1,2,3", "--block-bytes has 3 sizes, expected 1 or 16"),
        ("--algorithm spiral", "unknown algorithm"),
        ("--chunks 70000", "chunks is 70000, expected 1 to 65536"),
        ("--in-place --outputs 2", "outputs is 2, expected 1 to 1 in place"),
        (
            "--delay 16:3us",
            "--delay 16:3µs names rank 16, expected a rank below 16, the number of ranks",
        ),
        ("--delay 3", "expected a rank and a time of at most 10s"),
        ("--network-bandwidth 0GB/s", "expected a number above 0 with a unit"),
        ("--nics 0", "node.nics is 0"),
        ("--svg lanes.png", "expected a file name that ends in .svg"),
        ("--plot causes.png", "expected a file name that ends in .svg"),
        ("--trace lanes.svg", "expected a file name that ends in .json"),
        ("--nodes 16384 --ranks-per-node 8", "the maximum of a simulation"),
    ] {
        let ended = run(&format!("simulate {words}"));
        assert!(ended.error(2).contains(expected), "{words}: {ended:?}");
        assert!(ended.stdout.is_empty(), "{words}: {ended:?}");
    }
    let ended = run("simulate --calibration /proc/none");
    assert!(ended.error(1).contains("cannot read /proc/none"), "{ended:?}");
    let links = file("no-links.json");
    fs::write(&links, "{}").unwrap();
    let ended = run(&format!("simulate --calibration {}", links.display()));
    assert!(ended.error(2).contains("is not a file of links"), "{ended:?}");
}
