//! Tests `peerlane perf` between two processes with the host backend.

use peerlane_test_support::ReservedPort;
use serde_json::Value;

use crate::common::{end, run};
use crate::launcher::{launch, rank};

const FEW: &str = "--iterations 40 --warmup 2 --json -";

fn number(row: &Value, field: &str) -> f64 {
    row[field].as_f64().unwrap_or_else(|| panic!("{field} of {row} is no number"))
}

#[test]
fn puts_and_gets_have_a_rate_at_every_size() {
    let rows = run(&format!("perf --put --get --bytes 0,1,4097,64K {FEW}")).rows();
    let works: Vec<_> = rows.iter().map(|row| row["work"].as_str().unwrap()).collect();
    assert_eq!(works, ["put", "put", "put", "put", "get", "get", "get", "get"]);
    for row in &rows {
        assert_eq!((&row["checked"], &row["backend"]), (&true.into(), &"host".into()), "{row}");
        let (elapsed, bytes) = (number(row, "elapsed_us"), number(row, "bytes"));
        assert!(
            (number(row, "gbs") / (40.0 * bytes / elapsed / 1e3) - 1.0).abs() < 1e-6
                || bytes == 0.0
        );
        assert!(
            (number(row, "messages_per_second") / (40e6 / elapsed) - 1.0).abs() < 1e-6,
            "{row}"
        );
        assert!(row.get("median_us").is_none(), "{row}");
    }
}

#[test]
fn engines_and_a_small_window_move_the_same_messages() {
    for window in [1, 3] {
        let line = format!("perf --put --get --bytes 5000 --engines 3 --window {window} {FEW}");
        let rows = run(&line).rows();
        assert_eq!(rows.len(), 2);
        for row in rows {
            assert_eq!((&row["engines"], &row["window"]), (&3.into(), &window.into()), "{row}");
            let moved = 120.0 * 5000.0 / number(&row, "elapsed_us") / 1e3;
            assert!((number(&row, "gbs") / moved - 1.0).abs() < 1e-6, "{row}");
        }
    }
}

#[test]
fn signals_have_half_round_trips() {
    for row in run(&format!("perf --signal --bytes 0,8,300K {FEW}")).rows() {
        assert_eq!((&row["work"], &row["engines"]), (&"signal".into(), &1.into()), "{row}");
        let times = ["min_us", "median_us", "p99_us", "max_us"].map(|field| number(&row, field));
        assert!(times.is_sorted() && times[0] > 0.0, "{row}");
        let mean = number(&row, "mean_us");
        assert!((times[0]..=times[3]).contains(&mean) && row.get("gbs").is_none(), "{row}");
    }
}

#[test]
fn tables_go_to_the_standard_output() {
    let ended = run("perf --put --signal --bytes 64 --iterations 5");
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    let lines: Vec<_> = ended.stdout.lines().collect();
    assert_eq!(lines[0], "perf, 2 ranks, host backend");
    assert!(lines[2].contains("GB/s") && lines[4].trim_start().starts_with("put"), "{ended:?}");
    assert!(lines[6].contains("median µs"), "{ended:?}");
    assert_eq!(lines.len(), 9);
}

#[test]
fn two_ranks_of_a_launcher_are_measured_and_rank_0_prints() {
    let ranks = launch(&[&format!("perf --signal {FEW}"); 2].map(String::as_str));
    assert_eq!(ranks[0].rows().len(), 1);
    assert_eq!((ranks[1].code, ranks[1].stdout.as_str()), (Some(0), ""));
    let other = [format!("perf --signal {FEW}"), format!("perf --put {FEW}")];
    for ended in launch(&other.each_ref().map(String::as_str)) {
        assert!(ended.error(1).contains("different values of --put, --get, --signal"), "{ended:?}");
    }
}

#[test]
fn impossible_measurements_are_refused() {
    let ended = end(&mut rank("perf --put", 0, 3, &ReservedPort::new()));
    let expected = "the launcher has started 3 ranks, expected 2 ranks for perf";
    assert!(ended.error(2).contains(expected), "{ended:?}");
    let ended = end(&mut rank("perf --put --timeout 3", 0, 2, &ReservedPort::new()));
    assert!(ended.error(1).contains("rank 1"), "{ended:?}");
    // A machine with NICs reports the unknown name, other machines the missing library or device.
    let ended = run("perf --put --backend rdma --device no-such-card");
    assert!(ended.code != Some(0) && ended.stderr.contains("peerlane doctor"), "{ended:?}");
}
