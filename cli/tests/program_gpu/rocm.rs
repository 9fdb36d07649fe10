//! Tests `peerlane allgather --backend rocm` and `peerlane doctor` on simulated AMD GPUs.

use std::process::Command;

use peerlane_simulated_driver::Rocm;
use serde_json::Value;

use crate::common::{Ended, command, end};

const SMALL: &str = "--max-bytes 4K --iterations 3 --warmup 1 --timeout 20 --json -";

/// Returns the program with the simulated runtimes of a release.
fn simulated(release: &str, words: &str, settings: &[(&str, &str)]) -> Command {
    let mut command = command(words);
    command.env("LD_LIBRARY_PATH", Rocm::release(release).folder());
    for variable in ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"] {
        command.env_remove(variable);
    }
    for (name, value) in settings {
        command.env(format!("PEERLANE_SIM_{name}"), value);
    }
    command
}

fn run(words: &str, settings: &[(&str, &str)]) -> Ended {
    end(&mut simulated("7.2", words, settings))
}

fn check(ended: &Ended, ranks: u64) -> Vec<Value> {
    let rows = ended.rows();
    assert!(!rows.is_empty());
    for row in &rows {
        assert_eq!(row["checked"], true, "{row}");
        assert_eq!(row["backend"], "rocm");
        assert_eq!(row["ranks"], ranks);
    }
    rows
}

#[test]
fn other_collectives_run_on_streams_and_sdma_engines() {
    for (ranks, engine, name) in [
        (1, "auto", "gather"),
        (2, "streams", "scatter"),
        (3, "sdma", "broadcast --algorithm ring"),
        (4, "streams", "all-to-all"),
        (3, "sdma", "all-to-all-v"),
    ] {
        let options = format!("--backend rocm --ranks {ranks} --engine {engine} {SMALL}");
        check(&run(&format!("bench {name} {options}"), &[]), ranks);
    }
}

#[test]
fn ranks_gather_between_gpus_and_check_every_size() {
    for (ranks, place) in [(1, ""), (2, "--in-place"), (4, "--algorithm all")] {
        let line = format!("allgather --backend rocm --ranks {ranks} {place} {SMALL}");
        check(&run(&line, &[]), ranks);
    }
}

/// Returns the kind of engine of lane 0 in each row.
fn kinds(rows: &[Value]) -> Vec<&str> {
    let kinds = rows.iter().map(|row| &row["lanes"][0]["kind"]);
    kinds.map(|kind| kind.as_str().expect("a lane has a kind")).collect()
}

#[test]
fn the_requested_engine_runs_and_is_named() {
    for engine in ["streams", "sdma"] {
        let line = format!("allgather --backend rocm --ranks 3 --engine {engine} {SMALL}");
        let rows = check(&run(&line, &[]), 3);
        assert!(kinds(&rows).iter().all(|kind| *kind == engine), "{rows:?}");
        assert!(rows.iter().all(|row| row["engine"] == format!("rocm {engine}")), "{rows:?}");
        assert!(rows.iter().all(|row| row["fallbacks"] == Value::Array(Vec::new())), "{rows:?}");
    }
}

#[test]
fn without_engine_option_the_engine_is_chosen_for_each_size() {
    let sizes = "--min-bytes 4K --max-bytes 48M --factor 12288 --iterations 2 --warmup 1 --json -";
    let line = format!("allgather --backend rocm --ranks 2 {sizes}");
    assert_eq!(kinds(&check(&run(&line, &[]), 2)), ["streams", "sdma"]);
    // If one engine saturates a link, more engines gain nothing. Graphs use streams.
    let rows = check(&run(&line, &[("ENGINES_PER_LINK", "1")]), 2);
    assert_eq!(kinds(&rows), ["streams", "streams"]);
    let rows = check(&run(&format!("{line} --graph"), &[]), 2);
    assert_eq!(kinds(&rows), ["streams", "streams"]);
}

#[test]
fn an_unavailable_engine_is_named() {
    let ended = run("allgather --backend rocm --engine dma", &[]);
    let text = "engine is \"dma\", expected a kind that all ranks offer: streams or sdma";
    assert!(ended.error(1).contains(text), "{ended:?}");
    let ended = run("allgather --backend host --engine sdma", &[]);
    let text = "engine is \"sdma\", expected a kind that all ranks offer: processor";
    assert!(ended.error(1).contains(text), "{ended:?}");

    // A graph cannot contain copies of SDMA engines.
    let line = format!("allgather --backend rocm --ranks 2 --engine sdma --graph {SMALL}");
    let ended = run(&line, &[]);
    let text = "engine is \"sdma\", whose engines have no streams, expected \"streams\" for an operation \
                that is capturable";
    assert!(format!("{}{}", ended.stdout, ended.stderr).contains(text), "{ended:?}");
}

#[test]
fn copies_by_compute_units_are_reported_and_strict_refuses_them() {
    for (engine, no_cu, share) in [
        ("streams", "works", 0),
        ("streams", "drop", 1),
        ("streams", "refuse", 1),
        ("sdma", "drop", 0),
    ] {
        let line = format!("allgather --backend rocm --ranks 3 --engine {engine} {SMALL}");
        let settings = [("NO_CU", no_cu)];
        for row in check(&run(&line, &settings), 3) {
            let tier = &row["tiers"][0];
            let all = tier["own_bytes"].as_u64().unwrap() + tier["put_bytes"].as_u64().unwrap();
            assert_eq!(tier["compute_bytes"], share * all, "{engine} {no_cu}: {row}");
            assert_eq!(row["fallbacks"].as_array().unwrap().len() as u64, share, "{row}");
        }
        let strict = run(&format!("{line} --strict"), &settings);
        if share == 0 {
            check(&strict, 3);
        } else {
            let text = "the driver has no copies without compute units";
            assert!(strict.error(1).contains(text), "{strict:?}");
        }
    }
}

#[test]
fn captured_starts_are_replayed_and_checked() {
    let line = format!("allgather --backend rocm --ranks 3 --graph {SMALL}");
    let rows = check(&run(&line, &[]), 3);
    assert!(rows.iter().all(|row| row["captured"] == true));
    let rows = run(&format!("{line} --algorithm double-ring,ring"), &[]).rows();
    let missing = |row: &Value| row["missing"].as_str().map(str::to_owned);
    let missing: Vec<_> = rows.iter().map(|row| missing(row).unwrap_or_default()).collect();
    assert!(missing[0].starts_with("double-ring cannot be captured: "), "{rows:?}");
    assert_eq!((missing[1].as_str(), &rows[1]["algorithm"]), ("", &"ring".into()));
}

#[test]
fn the_limit_is_measured() {
    let line = format!("allgather --backend rocm --ranks 3 --limit {SMALL}");
    for row in check(&run(&line, &[]), 3) {
        assert!(row["limit_us"].as_f64().unwrap() > 0.0, "{row}");
    }
}

#[test]
fn options_of_other_gpus_are_refused() {
    let ended = run("allgather --backend rocm --vs nccl", &[]);
    assert_eq!(
        ended.error(2),
        "error: --vs needs NVIDIA GPUs, but the backend is rocm\n help: remove the option\n"
    );
    let ended = run("allgather --backend rocm --devices 9", &[]);
    assert_eq!(
        ended.error(2),
        "error: --devices names GPU 9, but this process sees 4 GPUs\n help: give numbers from 0; \
         HIP_VISIBLE_DEVICES may hide some GPUs\n"
    );
}

#[test]
fn the_doctor_shows_devices_runtimes_and_links() {
    let text = run("doctor", &[]).stdout;
    let section = text.split("\nrocm\n").nth(1).unwrap_or_else(|| panic!("{text}"));
    for expected in ["HIP 7.2.", "HSA runtime, interface ", "GPU", "XGMI between all 4 GPUs"] {
        assert!(section.contains(expected), "{expected}: {text}");
    }
    let json: Value = serde_json::from_str(&run("doctor --json", &[]).stdout).unwrap();
    assert_eq!(
        json["rocm"].as_array().unwrap().iter().filter(|it| it["topic"] == "GPU").count(),
        4
    );
}
