//! `peerlane allgather --backend rocm` and `peerlane doctor` on simulated AMD GPUs.

use std::process::Command;

use peerlane_simulated_driver::Rocm;
use serde_json::Value;

use crate::common::{Ended, command, end};

const SMALL: &str = "--max-bytes 4K --iterations 3 --warmup 1 --timeout 20 --json -";

/// The program with the simulated runtimes of a release in place of the real ones.
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
fn ranks_gather_between_gpus_and_check_every_size() {
    for (ranks, place) in [(1, ""), (2, "--in-place"), (4, "--algorithm all")] {
        let line = format!("allgather --backend rocm --ranks {ranks} {place} {SMALL}");
        check(&run(&line, &[]), ranks);
    }
}

#[test]
fn captured_starts_are_replayed_and_checked() {
    let rows = check(&run(&format!("allgather --backend rocm --ranks 3 --graph {SMALL}"), &[]), 3);
    assert!(rows.iter().all(|row| row["captured"] == true));
}

#[test]
fn the_limit_is_measured_beside() {
    let line = format!("allgather --backend rocm --ranks 3 --limit {SMALL}");
    for row in check(&run(&line, &[]), 3) {
        assert!(row["limit_us"].as_f64().unwrap() > 0.0, "{row}");
    }
}

#[test]
fn what_is_for_other_gpus_is_refused() {
    let ended = run("allgather --backend rocm --vs nccl", &[]);
    assert_eq!(
        ended.error(2),
        "error: --vs needs GPUs of NVIDIA's, the backend is rocm\n help: leave it out\n"
    );
    let ended = run("allgather --backend rocm --devices 9", &[]);
    assert_eq!(
        ended.error(2),
        "error: --devices names GPU 9, this process sees 4\n help: they are numbered from 0; \
         HIP_VISIBLE_DEVICES may hide some\n"
    );
}

#[test]
fn the_doctor_shows_devices_runtimes_and_links() {
    let text = run("doctor", &[]).stdout;
    let section = text.split("\nrocm\n").nth(1).unwrap_or_else(|| panic!("{text}"));
    for wanted in ["HIP 7.2.", "HSA runtime, interface ", "GPU", "XGMI between all 4 GPUs"] {
        assert!(section.contains(wanted), "{wanted}: {text}");
    }
    let json: Value = serde_json::from_str(&run("doctor --json", &[]).stdout).unwrap();
    assert_eq!(
        json["rocm"].as_array().unwrap().iter().filter(|it| it["topic"] == "GPU").count(),
        4
    );
}
