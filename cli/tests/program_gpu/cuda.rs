//! Tests `peerlane allgather --backend cuda` and `peerlane doctor` on simulated GPUs.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::common::{Ended, command, end, has_moved_bytes, ranks_of, signal};

const SMALL: &str = "--max-bytes 4K --iterations 3 --warmup 1 --timeout 20 --json -";

/// Returns the program with the simulated driver and settings of that driver.
fn simulated(words: &str, settings: &[(&str, &str)]) -> Command {
    with_driver(words, &peerlane_simulated_driver::library_folder(), settings)
}

fn with_driver(words: &str, folder: &Path, settings: &[(&str, &str)]) -> Command {
    let mut command = command(words);
    command.env("LD_LIBRARY_PATH", folder).env_remove("CUDA_VISIBLE_DEVICES");
    command.env("PEERLANE_SIM_NCCL_FOLDER", env!("CARGO_TARGET_TMPDIR"));
    for (name, value) in settings {
        command.env(format!("PEERLANE_SIM_{name}"), value);
    }
    command
}

fn run(words: &str, settings: &[(&str, &str)]) -> Ended {
    end(&mut simulated(words, settings))
}

fn number(row: &Value, field: &str) -> f64 {
    row[field].as_f64().unwrap_or_else(|| panic!("{field} of {row} is no number"))
}

fn check(ended: &Ended, ranks: u64) -> Vec<Value> {
    let rows = ended.rows();
    assert!(!rows.is_empty());
    for row in &rows {
        assert_eq!(row["checked"], true, "{row}");
        assert_eq!(row["backend"], "cuda");
        // Short starts are launches.
        let engine = row["engine"].as_str().unwrap_or_default();
        assert!(engine == "cuda" || engine.starts_with("cuda, 1 launch of "), "{row}");
        assert_eq!(row["ranks"], ranks);
        assert!(number(row, "median_us") > 0.0 && number(row, "host_us") > 0.0, "{row}");
        assert!(number(row, "median_us") < 20e6, "{row}");
    }
    rows
}

#[test]
fn other_collectives_run_eagerly_and_captured() {
    // The library's tests run every number of ranks; the program adds its options and rows.
    for (ranks, graph) in [(2, "--graph"), (3, "")] {
        let options = format!("--backend cuda --ranks {ranks} --limit {graph} {SMALL}");
        let root = ranks / 2;

        for algorithm in ["direct", "ring"] {
            let line = format!("bench broadcast --root {root} --algorithm {algorithm} {options}");
            let rows = check(&run(&line, &[]), ranks);
            assert!(rows.iter().all(|row| row["collective"] == format!("broadcast from {root}")));
        }

        for (name, word) in [("gather", "to"), ("scatter", "from")] {
            let line = format!("bench {name} --root {root} {options}");
            let rows = check(&run(&line, &[]), ranks);
            assert!(rows.iter().all(|row| row["collective"] == format!("{name} {word} {root}")));
        }

        for name in ["all-to-all", "all-to-all-v"] {
            let rows = check(&run(&format!("bench {name} --dtype f32 {options}"), &[]), ranks);
            assert!(rows.iter().all(|row| row["collective"] == name));
        }
    }
}

#[test]
fn one_to_four_ranks_gather_between_gpus_and_check_every_size() {
    for (ranks, place) in [(1, ""), (2, "--in-place"), (3, "--outputs 2"), (4, "--outputs 1")] {
        let line = format!("allgather --backend cuda --ranks {ranks} {place} {SMALL}");
        let rows = check(&run(&line, &[]), ranks);
        assert_eq!(rows.len(), 2, "1 KiB and 4 KiB");
        assert!(rows.iter().all(|row| row["captured"] == false));
    }
}

#[test]
fn captured_starts_are_replayed_and_checked() {
    // Two outputs are for copies on streams; a launch needs one.
    let streams = "--engine streams";
    for (options, outputs) in
        [("", 1), (streams, 2), ("--outputs 2", 2), ("--outputs 1", 1), ("--in-place", 1)]
    {
        let line = format!("allgather --backend cuda --ranks 3 --graph {options} {SMALL}");
        let rows = check(&run(&line, &[]), 3);
        assert!(rows.iter().all(|row| row["captured"] == true && row["outputs"] == outputs));
        // A graph contains ten starts, and three were requested.
        assert!(rows.iter().all(|row| row["starts_in_a_row"] == 10), "{rows:?}");
    }
}

#[test]
fn an_algorithm_that_cannot_be_captured_has_a_row_with_the_reason() {
    let of_two_lanes = ["double-ring", "get-ring"].map(|algorithm| {
        let reason = format!(
            "{algorithm} cannot be captured: a graph contains only one lane of each rank, and rank 0 \
             has another one that a thread cannot drive; use direct or ring, or remove `capturable()`"
        );
        (algorithm, reason)
    });
    // With two ranks, the second lane of a double ring is empty.
    for ranks in [3, 4] {
        let line = format!("allgather --backend cuda --ranks {ranks} --graph {SMALL}");
        let ended = run(&format!("{line} --algorithm all"), &[]);
        let (refused, rows): (Vec<_>, Vec<_>) =
            ended.rows().into_iter().partition(|row| row.get("missing").is_some());
        let measured: Vec<_> =
            rows.iter().map(|row| (row["algorithm"].as_str().unwrap(), &row["captured"])).collect();
        let captured = &Value::Bool(true);
        let algorithms = ["direct", "pull", "ring", "recursive-doubling"];
        // Recursive doubling needs a power of two of ranks.
        let fitting = &algorithms[..if ranks == 4 { 4 } else { 3 }];
        let size: Vec<_> = fitting.iter().map(|&algorithm| (algorithm, captured)).collect();
        assert_eq!(measured, [size.clone(), size].concat(), "1 KiB and 4 KiB");
        assert!(rows.iter().all(|row| row["checked"] == true));
        for (algorithm, reason) in &of_two_lanes {
            let rows: Vec<_> =
                refused.iter().filter(|row| row["algorithm"] == *algorithm).collect();
            let [first, second] = rows[..] else { panic!("{refused:?}") };
            for row in [first, second] {
                assert_eq!(row["missing"], reason.as_str());
                assert_eq!(row["ranks"], ranks);
            }
            assert!(number(first, "total_bytes") < number(second, "total_bytes"));
            let line_of_reason = format!("{algorithm}: n/a, {reason}");
            assert_eq!(ended.stderr.matches(&line_of_reason).count(), 1, "{ended:?}");
            let alone = run(&format!("{line} --algorithm {algorithm}"), &[]);
            assert!(alone.error(1).contains(reason.as_str()), "{alone:?}");
        }
        assert_eq!(refused.len(), 2 * of_two_lanes.len(), "{refused:?}");
    }
}

#[test]
fn odd_sizes_gather_between_gpus() {
    let line = "allgather --backend cuda --ranks 3 --dtype bf16 --min-bytes 1 --factor 7";
    let rows = check(&run(&format!("{line} {SMALL}"), &[]), 3);
    assert!(rows.iter().all(|row| row["dtype"] == "bf16"));
}

#[test]
fn large_outputs_are_compared_in_chunks() {
    let line = "allgather --backend cuda --ranks 2 --min-bytes 65M --max-bytes 65M --iterations 1";
    check(&run(&format!("{line} --warmup 1 --json -"), &[]), 2);
}

#[test]
fn the_limit_is_measured() {
    for copy_engines in ["1", "3"] {
        let line = format!("allgather --backend cuda --ranks 3 --limit {SMALL}");
        for row in check(&run(&line, &[("COPY_ENGINES", copy_engines)]), 3) {
            let share = number(&row, "limit_us") / number(&row, "median_us");
            assert!((number(&row, "limit_share") / share - 1.0).abs() < 1e-9 && share > 0.0);
        }
    }
}

#[test]
fn the_title_names_captured_and_back_to_back_starts() {
    let line = "allgather --ranks 2 --max-bytes 1K --iterations 2 --warmup 1 --graph";
    let ended = run(line, &[]);
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{ended:?}");
    let lines: Vec<_> = ended.stdout.lines().collect();
    let title = "all-gather, 2 ranks, cuda backend, u8, out of place, captured, back to back";
    assert_eq!(lines[..2], [title, "auto selected cuda: 4 GPUs"]);
    assert!(lines[3].contains("host µs"), "{ended:?}");
}

#[test]
fn auto_selects_the_host_with_one_gpu_or_too_few_gpus() {
    let line = "allgather --max-bytes 1K --iterations 2 --warmup 1";
    let one = run(line, &[("DEVICES", "1")]);
    assert!(one.stdout.contains("auto selected host; cuda: 1 GPU, expected 2 or more"), "{one:?}");
    let two = run(&format!("{line} --ranks 2"), &[("DEVICES", "1")]);
    assert!(two.stdout.contains("auto selected host; cuda: 1 GPU for 2 ranks"), "{two:?}");
    let few = run(&format!("{line} --ranks 3"), &[("DEVICES", "2")]);
    assert!(few.stdout.contains("auto selected host; cuda: 2 GPUs for 3 ranks"), "{few:?}");
    let none = run(&format!("{line} --ranks 2"), &[("DEVICES", "0")]);
    assert!(none.stdout.contains("auto selected host; cuda: "), "{none:?}");
    let all = run("allgather --max-bytes 1K --iterations 2 --json -", &[("DEVICES", "3")]);
    check(&all, 3);
}

#[test]
fn auto_refuses_a_driver_that_does_not_work() {
    let line = "allgather --ranks 2 --max-bytes 1K --iterations 2 --warmup 1";
    let broken = [("FAIL", "cuInit:0:803")];
    let ended = run(line, &broken);
    let error = ended.error(1);
    assert!(error.contains("error: the driver of the backend cuda does not work: "), "{error}");
    assert!(error.contains("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)"), "{error}");
    assert!(error.contains("use host memory with --backend host"), "{error}");
    let ended = run(&format!("{line} --backend host"), &broken);
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{ended:?}");
}

#[test]
fn ranks_share_gpus_on_request() {
    let line = format!("allgather --backend cuda --ranks 2 {SMALL}");
    check(&run(&line, &[("DEVICES", "1")]), 2);
    let line = format!("allgather --backend cuda --ranks 3 --devices 3,1 {SMALL}");
    check(&run(&line, &[]), 3);
}

#[test]
fn impossible_options_are_refused_before_the_run() {
    let ended = run("allgather --backend cuda --devices 0,9", &[]);
    assert!(
        ended.error(2).contains("--devices names GPU 9, but this process sees 4 GPUs"),
        "{ended:?}"
    );
    let ended = run("allgather --backend cuda --devices one", &[]);
    assert!(
        ended.error(2).contains("expected numbers of GPUs separated by commas, such as 0,1,3"),
        "{ended:?}"
    );
    let ended = end(&mut command("allgather --backend host --vs nccl"));
    assert!(ended.error(2).contains("--vs needs GPUs, but the backend is host"), "{ended:?}");
    let ended = run("allgather --backend cuda", &[("DEVICES", "0")]);
    assert!(ended.error(1).contains("peerlane doctor"), "{ended:?}");
    let line = "allgather --backend cuda --ranks 2 --max-bytes 1G";
    let ended = run(line, &[("MEMORY_MIB", "64")]);
    assert!(ended.error(1).contains("of memory on each GPU"), "{ended:?}");
}

#[test]
fn a_missing_or_old_driver_is_named() {
    let folder = peerlane_simulated_driver::without_symbols(&["cuStreamWaitEvent"]);
    let ended = end(&mut with_driver("allgather --backend cuda", &folder, &[]));
    assert!(ended.error(1).contains("cuStreamWaitEvent"), "{ended:?}");
    // The error names the library, or says that the driver of this machine has no device.
    let ended = end(&mut command("allgather --backend cuda"));
    assert!(ended.error(1).contains("peerlane doctor"), "{ended:?}");
}

#[test]
fn gpus_without_peer_access_gather_through_the_host() {
    let line = format!("allgather --backend cuda --ranks 2 {SMALL}");
    let ended = run(&line, &[("P2P", "off")]);
    let rows = ended.rows();
    assert_eq!(rows.len(), 2, "{ended:?}");
    for row in rows {
        assert_eq!(row["engine"], "cuda, through host memory", "{row}");
        assert_eq!(row["checked"], true, "{row}");
    }
    let ended = run(&format!("{line} --strict"), &[("P2P", "off")]);
    assert!(ended.error(1).contains("strict"), "{ended:?}");
}

#[test]
fn copies_by_compute_units_are_reported_and_strict_refuses_them() {
    let one = "--min-bytes 4M --max-bytes 4M --iterations 2 --warmup 1 --timeout 20 --json -";
    let of = |ranks: u32, options: &str, settings: &[_]| {
        let streams = "allgather --backend cuda --engine streams";
        run(&format!("{streams} --ranks {ranks} {options} {one}"), settings)
    };
    let block = 2 << 20;
    for (ranks, options, own_bytes, compute_bytes) in [
        (2, "", block, block),
        (2, "--self-copy local", block, block),
        (2, "--self-copy local --graph", block, block),
        (2, "--self-copy link", block, 0),
        (2, "--self-copy link --graph", block, 0),
        (2, "--beside-compute", block, 0),
        (2, "--beside-compute --graph", block, 0),
        // An option of the fabric goes before the intent.
        (2, "--beside-compute --self-copy local", block, block),
        // Nothing is put to a peer, so nothing can come back.
        (2, "--self-copy link --algorithm pull", block, block),
        (2, "--in-place", 0, 0),
        (1, "--self-copy link", 2 * block, 2 * block),
        (1, "--in-place --graph", 0, 0),
    ] {
        let row = &check(&of(ranks, options, &[]), ranks.into())[0];
        let tier = &row["tiers"][0];
        assert_eq!(
            (&tier["own_bytes"], &tier["compute_bytes"]),
            (&own_bytes.into(), &compute_bytes.into())
        );
        let expected: Vec<Value> = match compute_bytes {
            0 => Vec::new(),
            bytes => vec![
                format!(
                    "compute units copy {bytes} bytes from the rank to itself; run in place, or \
                     set `beside_compute` (--beside-compute) with an algorithm that puts these \
                     bytes to a peer too"
                )
                .into(),
            ],
        };
        assert_eq!(row["fallbacks"], Value::Array(expected.clone()), "{options}");
        let strict = of(ranks, &format!("{options} --strict"), &[]);
        match expected.first() {
            None => drop(check(&strict, ranks.into())),
            Some(fallback) => {
                let text = format!(
                    "strict is set, but the operation needs a fallback: {}",
                    fallback.as_str().unwrap()
                );
                assert!(strict.error(1).contains(&text), "{strict:?}");
            }
        }
    }
    // Small blocks go back over the link.
    let line = format!("allgather --backend cuda --ranks 3 --strict {SMALL}");
    assert!(check(&run(&line, &[]), 3).iter().all(|row| row["tiers"][0]["compute_bytes"] == 0));
    let ended = of(2, "--self-copy link", &[("DEVICES", "1")]);
    let row = &check(&ended, 2)[0];
    assert_eq!(row["tiers"][0]["compute_bytes"], 2 * block, "a put to the same device, and back");
    assert!(ended.stderr.contains("because ranks share a device"), "{ended:?}");
}

#[test]
fn missing_bytes_are_detected() {
    let line = format!("allgather --backend cuda --ranks 2 {SMALL}");
    let ended = run(&line, &[("DROP_COPIES", "local")]);
    assert!(ended.error(1).contains("wrong data in the output of rank"), "{ended:?}");
    assert!(ended.stderr.contains("after an all-gather by peerlane"), "{ended:?}");
    // Between GPUs the backend detects the fault before an all-gather starts.
    let ended = run(&line, &[("DROP_COPIES", "peer")]);
    assert!(ended.error(1).contains("to a peer did not arrive"), "{ended:?}");
}

/// Runs all-gathers on three ranks, and sends `signal` to rank 1 while they run. Returns the errors.
fn lose_rank_1(line: &str, lost_by: rustix::process::Signal) -> String {
    // Large enough for graphs with branches.
    let (bytes, iterations) =
        if line.contains("--graph") { ("6M", 2000) } else { ("64K", 1_000_000) };
    let size = format!("--min-bytes {bytes} --max-bytes {bytes} --iterations {iterations}");
    let line = format!("allgather --backend cuda --ranks 3 {size} {line}");
    let child = simulated(&line, &[]).spawn().unwrap();
    let begun = Instant::now();
    let victim = loop {
        let ranks = ranks_of(child.id());
        if ranks.len() == 3 && ranks.iter().all(|rank| has_moved_bytes(*rank)) {
            break ranks[1];
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "the ranks never ran");
        sleep(Duration::from_millis(20));
    };
    // By then the graphs run.
    sleep(Duration::from_millis(300));
    let lost_at = Instant::now();
    signal(victim, lost_by);
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(!stderr.contains("panicked"), "{stderr}");
    assert!(lost_at.elapsed() < Duration::from_secs(30), "{:?}", lost_at.elapsed());
    stderr
}

#[test]
fn a_killed_rank_is_named_and_the_others_end() {
    // The timeout is longer than what the test allows until the end.
    let stderr = lose_rank_1("--timeout 60 --graph", rustix::process::Signal::KILL);
    assert!(stderr.contains("rank 1 was killed by signal 9"), "{stderr}");
    assert!(stderr.contains("rank 1 is lost"), "{stderr}");
    assert!(!stderr.contains("did not complete within"), "{stderr}");
}

#[test]
fn a_stopped_rank_is_named_while_graphs_run() {
    let stderr = lose_rank_1("--timeout 4 --graph", rustix::process::Signal::STOP);
    assert!(stderr.contains("rank 1 does not answer"), "{stderr}");
    assert!(!stderr.contains("did not complete within"), "{stderr}");
}

/// Returns a stand-in for a vendor's library, which cargo builds with the tests of this package.
fn stand_in(name: &str) -> PathBuf {
    let program = std::env::current_exe().unwrap();
    let built = program.ancestors().nth(2).unwrap().join(format!("examples/lib{name}.so"));
    assert!(built.is_file(), "{built:?} is missing; `cargo test -p peerlane-cli` builds it");
    built
}

fn beside_nccl(settings: &[(&str, &str)]) -> Ended {
    let line = "allgather --backend cuda --ranks 2 --vs nccl --max-bytes 4K --iterations 2";
    let mut command = simulated(&format!("{line} --warmup 1 --timeout 20 --json -"), settings);
    end(command.arg("--nccl").arg(stand_in("simulated_nccl")))
}

#[test]
fn nccl_is_timed_on_three_paths_in_turn() {
    let ended = beside_nccl(&[]);
    for row in check(&ended, 2) {
        let paths = row["baselines"].as_array().unwrap();
        let names: Vec<_> = paths.iter().map(|path| path["path"].as_str().unwrap()).collect();
        assert_eq!(names, ["default", "symmetric", "copy engines"]);
        for path in paths {
            let ratio = number(path, "baseline_us") / number(&row, "median_us");
            assert!((number(path, "baseline_ratio") / ratio - 1.0).abs() < 1e-9, "{row}");
            assert!(number(path, "baseline_host_us") > 0.0);
        }
        assert!(row["baselines_version"].as_str().unwrap().starts_with("2.28.9 ("), "{row}");
    }
    assert!(ended.stderr.contains("copy engines µs"), "{ended:?}");
}

#[test]
fn nccl_moves_elements_that_it_lacks_as_bytes() {
    for dtype in ["complex64", "f8e8m0", "i16"] {
        let line = format!("allgather --backend cuda --ranks 2 --vs nccl --dtype {dtype}");
        let line = format!("{line} --max-bytes 4K --iterations 2 --warmup 1 --timeout 20 --json -");
        let mut command = simulated(&line, &[]);
        let ended = end(command.arg("--nccl").arg(stand_in("simulated_nccl")));
        for row in check(&ended, 2) {
            assert_eq!(row["dtype"], dtype);
            assert!(row["baselines"][0]["baseline_us"].is_number(), "{row}");
        }
    }
}

#[test]
fn each_collective_that_copies_is_timed_beside_that_of_nccl() {
    for collective in ["broadcast", "broadcast --in-place", "all-to-all", "gather", "scatter"] {
        let line = format!("bench {collective} --backend cuda --ranks 3 --vs nccl --dtype f32");
        let line =
            format!("{line} --max-bytes 12K --iterations 2 --warmup 1 --timeout 20 --json -");
        let mut command = simulated(&line, &[]);
        let ended = end(command.arg("--nccl").arg(stand_in("simulated_nccl")));
        for row in check(&ended, 3) {
            for path in 0..3 {
                assert!(row["baselines"][path]["baseline_us"].is_number(), "{row}");
            }
        }
    }
}

#[test]
fn an_unavailable_nccl_path_has_a_reason() {
    let ended = beside_nccl(&[("NCCL_REFUSES", "windows")]);
    for row in check(&ended, 2) {
        assert!(row["baselines"][0]["baseline_us"].is_number(), "{row}");
        for path in [1, 2] {
            let why = row["baselines"][path]["missing"].as_str().unwrap();
            assert!(why.contains("ncclCommWindowRegister failed: invalid usage"), "{row}");
        }
    }
    assert!(ended.stderr.contains("NCCL copy engines: n/a, NCCL 2.28.9"), "{ended:?}");
}

#[test]
fn wrong_bytes_of_nccl_are_detected() {
    let ended = beside_nccl(&[("NCCL_SPOILS", "bytes")]);
    assert!(ended.error(1).contains("after an all-gather by NCCL: block"), "{ended:?}");
}

#[test]
fn an_nccl_that_hangs_ends_the_program_without_its_exit_handlers() {
    let line = "allgather --backend cuda --ranks 2 --vs nccl --max-bytes 1K --timeout 3 --json -";
    let mut command = simulated(line, &[("NCCL_HANGS", "collectives")]);
    let ended = end(command.arg("--nccl").arg(stand_in("simulated_nccl")));
    let said = ended.error(1);
    assert!(said.contains("did not complete within 3s"), "{said}");
    assert!(!said.contains("signal"), "{said}");
}

#[test]
fn an_nccl_that_is_missing_or_too_old_is_named() {
    let ended = beside_nccl(&[("NCCL_VERSION", "22705")]);
    assert!(ended.error(1).contains("is 2.27.5, expected NCCL 2.28"), "{ended:?}");
    for line in ["--vs nccl --nccl /proc/none.so", "--overlap gemm --cublas /proc/none.so"] {
        let ended = run(&format!("allgather --backend cuda --ranks 2 {line}"), &[]);
        assert!(ended.error(1).contains("cannot load /proc/none.so"), "{ended:?}");
        assert!(ended.stdout.is_empty());
    }
}

#[test]
fn all_gathers_and_compute_are_timed_together() {
    let line = "allgather --backend cuda --ranks 2 --vs nccl --overlap gemm --max-bytes 1K";
    let mut command = simulated(&format!("{line} --iterations 2 --warmup 1 --json -"), &[]);
    command.arg("--nccl").arg(stand_in("simulated_nccl"));
    let ended = end(command.arg("--cublas").arg(stand_in("simulated_cublas")));
    for row in check(&ended, 2) {
        let overlaps = row["overlap"].as_array().unwrap();
        let names: Vec<_> =
            overlaps.iter().map(|overlap| overlap["path"].as_str().unwrap()).collect();
        let nccl = ["NCCL", "NCCL with symmetric windows", "NCCL on copy engines"];
        assert_eq!((names[0], &names[1..]), ("peerlane", &nccl[..]));
        for overlap in overlaps {
            for what in ["compute", "gather"] {
                let (alone, together) = (format!("{what}_alone_us"), format!("{what}_us"));
                let ratio = number(overlap, &together) / number(overlap, &alone);
                let said = number(overlap, &format!("{what}_ratio"));
                assert!((said / ratio - 1.0).abs() < 1e-2 && said > 0.0, "{overlap}");
            }
            assert!(overlap["overlapped"].is_boolean(), "{overlap}");
        }
    }
    assert!(ended.stderr.contains("GEMM alone µs"), "{ended:?}");
}

/// Runs products beside a collective with the stand-in for cuBLAS, and checks what all rows have.
fn beside_products(line: &str, settings: &[(&str, &str)]) -> Vec<Value> {
    let line = format!("bench {line} --rounds 2 --iterations 2 --warmup 1 --timeout 20 --json -");
    let mut command = simulated(&line, settings);
    let ended = end(command.arg("--cublas").arg(stand_in("simulated_cublas")));
    let rows = ended.rows();

    let alone = number(&rows[0], "median_us");
    for row in &rows {
        assert_eq!((&row["backend"], &row["dtype"]), (&"cuda".into(), &"bf16".into()), "{row}");
        let ratio = number(row, "median_us") / alone;
        assert!(ratio > 0.0 && (number(row, "ratio") / ratio - 1.0).abs() < 1e-2, "{row}");
        assert_eq!(row["checked"], row["method"] == "blocks", "{row}");
    }
    for words in ["median µs", "of matmul", "sequence"] {
        assert!(ended.stderr.contains(words), "{words}: {ended:?}");
    }
    rows
}

/// Returns the method of each row, and the numbers of streams and chunks of blocks.
fn methods(rows: &[Value]) -> Vec<(&str, Option<u64>, Option<u64>)> {
    let method = |row| {
        let row: &Value = row;
        let streams = row["streams"].as_u64();
        (row["method"].as_str().unwrap(), streams, streams.and(row["chunks"].as_u64()))
    };
    rows.iter().map(method).collect()
}

#[test]
fn gathered_rows_are_multiplied_when_they_arrive() {
    let shape = "--rows 48 --inner 64 --columns 16";
    for ranks in [2, 3, 4] {
        let line = format!("all-gather-matmul --ranks {ranks} {shape} --chunks 1,2,5");
        let rows = beside_products(&line, &[]);
        let blocks = |chunks| [1, 2].map(|streams| ("blocks", Some(streams), Some(chunks)));
        let alone = [("matmul", None, None), ("sequence", None, None)];
        assert_eq!(methods(&rows), [alone, blocks(1), blocks(2)].concat(), "{ranks} ranks");
        assert!(rows.iter().all(|row| row["ranks"] == ranks && row["inner"] == 64));
    }
    // Memory that was never written differs between the products.
    beside_products(&format!("all-gather-matmul {shape} --streams 4"), &[("JUNK", "90")]);
}

#[test]
fn products_depart_when_they_are_written_and_are_added() {
    let shape = "--rows 24 --inner 32 --columns 64";
    for ranks in [2, 3, 4] {
        let line = format!("matmul-reduce-scatter --ranks {ranks} {shape} --streams 1,3");
        let rows = beside_products(&format!("{line} --chunks 2"), &[]);
        let blocks = [1, 3].map(|streams| ("blocks", Some(streams), Some(2)));
        let alone = [("matmul", None, None), ("sequence", None, None)];
        assert_eq!(methods(&rows), [alone, blocks].concat(), "{ranks} ranks");
        assert!(rows.iter().all(|row| row["work"] == "matmul-reduce-scatter"));
    }
}

#[test]
fn chunks_that_cut_rows_unevenly_are_named_below_the_title() {
    let line = "bench all-gather-matmul --ranks 2 --rows 8 --inner 32 --columns 8 --chunks 1,3";
    let mut command = simulated(&format!("{line} --rounds 1 --iterations 1"), &[]);
    let ended = end(command.arg("--cublas").arg(stand_in("simulated_cublas")));
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let lines: Vec<_> = ended.stdout.lines().collect();
    let title = "all-gather-matmul, 2 ranks, cuda backend, bf16, 8 × 32 by 32 × 8 on each rank";
    assert_eq!(lines[..2], [title, "auto selected cuda: 4 GPUs"]);
    assert!(lines[2].starts_with("chunks 3: not measured, "), "{ended:?}");

    let ended = run("bench all-gather-matmul --ranks 3 --rows 8", &[]);
    let expected = "--rows is 8, expected a multiple of 3, the number of ranks";
    assert!(ended.error(2).contains(expected), "{ended:?}");
    let ended = run("bench matmul-reduce-scatter --ranks 2 --cublas /proc/none.so", &[]);
    assert!(ended.error(1).contains("cannot load /proc/none.so"), "{ended:?}");
}

#[test]
fn the_doctor_shows_gpus_links_and_missing_capabilities() {
    let ended = run("doctor", &[]);
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    for words in [
        "ready: host, cuda",
        "CUDA 13.0",
        "8 hardware queues for the streams of a process (CUDA_DEVICE_MAX_CONNECTIONS is not set)",
        "3: Simulated GPU, 4 GiB, 3 copy engines",
        "NVLink between all 4 GPUs",
        "0: file descriptor, legacy IPC; fabric off: ",
        "NOT_PERMITTED",
        "NCCL",
    ] {
        assert!(ended.stdout.contains(words), "{words}: {ended:?}");
    }
    let ended = run("doctor", &[("P2P", "off"), ("DEVICES", "2"), ("WORDS_64", "off")]);
    for words in ["none between all 2 GPUs", "64-bit stream memory operations", "nvidia-smi topo"] {
        assert!(ended.stdout.contains(words), "{words}: {ended:?}");
    }
    let json: Value = serde_json::from_str(&run("doctor --json", &[]).stdout).unwrap();
    assert!(json["cuda"].as_array().unwrap().len() >= 8, "{json}");
}
