//! Tests `peerlane allgather` with ranks as processes.

use std::path::Path;

use serde_json::Value;

use crate::common::{command, end, run};

const SMALL: &str = "--max-bytes 4K --iterations 3 --warmup 1 --json -";

fn number(row: &Value, field: &str) -> u64 {
    row[field].as_u64().unwrap_or_else(|| panic!("{field} of {row} is no whole number"))
}

fn check(rows: &[Value], ranks: u64) {
    assert!(!rows.is_empty());
    for row in rows {
        assert_eq!(row["checked"], true, "{row}");
        assert_eq!((&row["backend"], &row["algorithm"]), (&"host".into(), &"direct".into()));
        assert_eq!(number(row, "ranks"), ranks);
        assert_eq!(number(row, "total_bytes"), ranks * number(row, "block_bytes"));
        let median = row["median_us"].as_f64().unwrap();
        assert!(median > 0.0 && row["p99_us"].as_f64().unwrap() >= median, "{row}");
        let bandwidth = number(row, "total_bytes") as f64 / 1000.0 / median;
        let (algorithm, bus) =
            (row["algbw_gbs"].as_f64().unwrap(), row["busbw_gbs"].as_f64().unwrap());
        assert!((algorithm / bandwidth - 1.0).abs() < 1e-9, "{row}");
        assert!((bus - algorithm * (ranks - 1) as f64 / ranks as f64).abs() < 1e-9, "{row}");
    }
}

#[test]
fn one_to_five_ranks_gather_and_check_every_size() {
    for ranks in 1..=5 {
        let rows = run(&format!("allgather --ranks {ranks} {SMALL}")).rows();
        check(&rows, ranks);
        assert_eq!(rows.len(), 2, "1 KiB and 4 KiB");
    }
}

#[test]
fn odd_sizes_are_rounded_up_to_whole_blocks() {
    let line = "allgather --ranks 3 --dtype f64 --min-bytes 1 --factor 7 --backend host";
    let rows = run(&format!("{line} --algorithm direct {SMALL}")).rows();
    check(&rows, 3);
    let totals: Vec<_> = rows.iter().map(|row| number(row, "total_bytes")).collect();
    assert_eq!(totals, [24, 72, 360, 2424]);
}

#[test]
fn every_type_gathers_in_place_and_out_of_place() {
    for dtype in ["u8", "i32", "i64", "f8e4m3", "f8e8m0", "f16", "bf16", "f32", "f64", "complex64"]
    {
        for place in ["", "--in-place"] {
            let rows = run(&format!("allgather --ranks 2 --dtype {dtype} {place} {SMALL}")).rows();
            check(&rows, 2);
            assert!(rows.iter().all(|row| row["dtype"] == dtype));
            assert!(rows.iter().all(|row| row["in_place"] == !place.is_empty()));
        }
    }
}

#[test]
fn the_limit_is_measured() {
    for place in ["", "--in-place"] {
        let rows = run(&format!("allgather --ranks 2 --limit {place} {SMALL}")).rows();
        check(&rows, 2);
        for row in rows {
            let share = row["limit_us"].as_f64().unwrap() / row["median_us"].as_f64().unwrap();
            assert!((row["limit_share"].as_f64().unwrap() / share - 1.0).abs() < 1e-9, "{row}");
            assert!(share > 0.0);
        }
    }
}

#[test]
fn a_run_prints_only_the_table_to_stdout() {
    let line = "allgather --backend host --ranks 2 --max-bytes 4K --iterations 2 --warmup 1";
    let ended = run(line);
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    let lines: Vec<_> = ended.stdout.lines().collect();
    assert_eq!(lines[0], "all-gather, 2 ranks, host backend, u8, out of place");
    assert!(lines[2].contains("busbw GB/s"), "{ended:?}");
    assert!(lines[4].trim_start().starts_with("1 KiB"), "{ended:?}");
    assert_eq!(lines.len(), 6);
}

#[test]
fn json_and_a_plot_are_written_to_files() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (json, plot) = (folder.join("rows.json"), folder.join("rows.svg"));
    let mut command = command("allgather --ranks 2 --max-bytes 4K --iterations 2 --warmup 1");
    let ended = end(command.arg("--json").arg(&json).arg("--plot").arg(&plot));
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stdout.contains("4 KiB"));
    assert_eq!(std::fs::read_to_string(json).unwrap().lines().count(), 2);
    assert!(std::fs::read_to_string(plot).unwrap().starts_with("<svg"));
}

#[test]
fn ranks_that_outnumber_the_cores_make_progress() {
    let rows = run("allgather --ranks 9 --min-bytes 64K --max-bytes 64K --iterations 5 --json -");
    check(&rows.rows(), 9);
}

#[test]
fn auto_prints_its_choice_and_the_reason() {
    let ended = run("allgather --ranks 2 --max-bytes 1K --iterations 2 --warmup 1");
    let lines: Vec<_> = ended.stdout.lines().collect();
    assert_eq!(lines[0], "all-gather, 2 ranks, host backend, u8, out of place");
    assert!(lines[1].starts_with("auto selected host; cuda: "), "{ended:?}");
}
