//! Tests that the program refuses inputs that would need much memory or time, and prints no control characters.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::common::{Ended, command, end};

/// The memory that a command may address, which is more than any refusal needs.
const MEMORY_KIB: u64 = 1536 << 10;

fn file(name: &str, text: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::write(&path, text).unwrap();
    path
}

/// Runs the program in a shell that limits its memory.
fn run_limited(words: &[&str]) -> Ended {
    let program = command("");
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("ulimit -v {MEMORY_KIB}; exec \"$0\" \"$@\"")]);
    shell.arg(program.get_program()).args(words).stdin(Stdio::null());
    end(shell.stdout(Stdio::piped()).stderr(Stdio::piped()))
}

#[test]
fn work_beyond_the_limits_is_refused_before_it_begins() {
    for (words, expected) in [
        (
            "simulate --nodes 1000",
            "8000 ranks with 1 chunk have 512032000 flags, more than 335544320",
        ),
        (
            "simulate --nodes 128 --chunks 65536",
            "1024 ranks with 65536 chunks have 68722624512 flags, more than 335544320",
        ),
        ("simulate --nodes 1048577x1", "the number of ranks exceeds 1048576"),
        ("plan --nodes 1048577x1 --rank 0", "the number of ranks exceeds 1048576"),
        ("plan --nodes 1048576x1 --chunks 2 --rank 0", "expected at most 1048576 for printing"),
        ("explain --nodes 16777216", "the number of ranks exceeds 1048576"),
        (
            "explain --nodes 100000x1 --collective all-to-all-v",
            "all-to-all-v of 100000 ranks, expected at most 4096, because each pair of ranks has a length",
        ),
        (
            "simulate --block-bytes 16G --network-bandwidth 1B/s",
            "takes more than 106 days, the maximum of a simulation",
        ),
    ] {
        let words: Vec<&str> = words.split(' ').collect();
        let ended = run_limited(&words);
        assert!(ended.error(2).contains(expected), "{words:?}: {ended:?}");
        assert!(ended.stdout.is_empty(), "{words:?}: {ended:?}");
    }
}

#[test]
fn a_long_simulation_is_announced() {
    let mut child = command("simulate --nodes 256 --algorithm ring --chunks 1").spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(line, "simulating ring on 2048 ranks in 1 chunk, which can take minutes\n");
}

#[test]
fn more_nics_than_ranks_are_one_for_each_rank() {
    let simulated = |nics| {
        let ended = run_limited(&["simulate", "--nics", nics]);
        assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{nics}");
        ended.stdout
    };
    assert_eq!(simulated("4294967295"), simulated("8"));
    assert_eq!(simulated("2147483648"), simulated("8"));
}

#[test]
fn files_beyond_the_limits_are_refused() {
    let buffer =
        |number| format!("{{\"name\":\"{number}\",\"bytes\":1,\"first_use\":0,\"last_use\":0}}");
    let buffers: Vec<String> = (0..100_000).map(buffer).collect();
    let buffers = file("many-buffers.json", &format!("[{}]", buffers.join(",")));
    let headers = file("many-headers.txt", &"all-gather direct: rank 0\n".repeat(200_000));
    let header = "all-gather direct: rank 0 of 1, 1 chunk, in place\n";
    let lanes: String = (0..100_000).map(|lane| format!("lane {lane}\n")).collect();
    let lanes = file("many-lanes.txt", &(header.to_owned() + &lanes));
    let puts = format!("{header}lane 0\n{}", "put 0.0 input to 0\n".repeat(2_200_000));
    let puts = file("many-puts.txt", &puts);
    let point = "{\"algorithm\":\"direct\",\"outputs\":1,\"chunks\":65536,\"block_bytes\":1,\"measured_us\":1.0,\"predicted_us\":1.0,\"fitted\":true}";
    let check = |topology: &str, points: usize| {
        format!(
            "{{\"machine\":\"m\",\"backend\":\"host\",\"topology\":\"{topology}\",\"points\":[{}],\"choices\":[],\"good_share\":1.0,\"worst_choice\":0.0}}",
            vec![point; points].join(",")
        )
    };
    let points = file("many-points.json", &check("1x2", 5000));
    let ranks = file("many-ranks.json", &check("1x1048576", 1));
    let chunks = file("many-chunks.json", &check("1x1024", 1));
    for (words, path, code, expected) in [
        ("plan-buffers", &buffers, 1, "number of call sites is 100000, expected at most 65536"),
        ("plan --check", &headers, 1, "invalid plan, line 1 "),
        ("plan --check", &lanes, 1, "the plan has 100000 lanes, expected at most 64"),
        (
            "plan --check",
            &puts,
            2,
            "the plans make 2200000 copies of cells, more than the 2097152 that are verified",
        ),
        (
            "calibrate --out /dev/null --from",
            &points,
            2,
            "5000 points of 2 ranks, expected at most 4096",
        ),
        ("calibrate --out /dev/null --from", &ranks, 2, "1 points of 1048576 ranks, expected"),
        (
            "calibrate --out /dev/null --from",
            &chunks,
            2,
            "the plans of all points copy 68719476736 cells, expected at most 4194304",
        ),
    ] {
        let mut words: Vec<&str> = words.split(' ').collect();
        words.push(path.to_str().unwrap());
        let ended = run_limited(&words);
        assert!(ended.error(code).contains(expected), "{words:?}: {ended:?}");
        assert!(ended.stderr.len() < 1000, "{words:?}: {ended:?}");
        fs::remove_file(path).unwrap();
    }
}

#[test]
fn control_characters_are_escaped_wherever_they_come_from() {
    let name = "a\u{1b}[31m\u{9b}\u{202e}b";
    let escaped = r"a\u{1b}[31m\u{9b}\u{202e}b";
    let buffers =
        serde_json::json!([{"name": name, "bytes": 1, "first_use": 0, "last_use": 0}]).to_string();
    let buffers = file("names.json", &buffers);
    let buffers = buffers.to_str().unwrap();
    let nowhere = format!("/proc/none/{name}.svg");
    let is_control = |c: char| c != '\n' && (c.is_control() || c == '\u{202e}');
    for words in [
        vec!["plan", "--check", name],
        vec!["plan", "--nodes", name],
        vec!["plan", "--rank", name],
        vec![name],
        vec!["man", name],
        vec!["simulate", "--calibration", name],
        vec!["plan", "--svg", &nowhere],
        vec!["plan-buffers", buffers],
    ] {
        let ended = end(command("").args(&words));
        let printed = ended.stdout.clone() + &ended.stderr;
        assert!(printed.contains(escaped), "{words:?}: {ended:?}");
        assert!(!printed.contains(is_control), "{words:?}: {ended:?}");
    }
    let ended = end(command("allgather --ranks 1")
        .env("PEERLANE_PORT", name)
        .env("RANK", "0")
        .env("WORLD_SIZE", "1"));
    assert!(ended.error(1).contains(escaped), "{ended:?}");
    assert!(!ended.stderr.contains(is_control), "{ended:?}");

    let json = end(command("plan-buffers --json").arg(buffers)).stdout;
    assert!(!json.contains(is_control), "{json}");
    let value: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(value["buffers"][0]["name"], name);
}

#[test]
fn long_values_are_cut_in_errors() {
    let long = "x".repeat(100_000);
    let list = "1,".repeat(50_000);
    let ratio = vec!["1"; 50_000].join(":");
    for words in [
        ["plan", "--nodes", &long],
        ["plan", "--rank", &long],
        ["plan", "--check", &long],
        ["explain", "--block-bytes", &list],
        ["allgather", "--blocks", &ratio],
        ["allgather", "--seed", &long],
        ["simulate", "--svg", &long],
    ] {
        let ended = end(command("").args(words));
        assert!(matches!(ended.code, Some(1 | 2)), "{ended:?}");
        assert!((10..5000).contains(&ended.stderr.len()), "{}: {}", words[1], ended.stderr.len());
    }
}
