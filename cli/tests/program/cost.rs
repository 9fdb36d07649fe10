//! Tests `peerlane explain` and `peerlane calibrate`.

use std::path::PathBuf;

use serde_json::Value;

use crate::common::{command, end, run};

#[test]
fn a_choice_is_explained() {
    let ended = run("explain --nodes 2x4 --block-bytes 64M");
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    insta::assert_snapshot!(ended.stdout, @"
    8 ranks on 2 nodes, blocks of 64 MiB, 512 MiB in all: hierarchical, chunks 8
      hierarchical       chunks 8     1.49 ms  chosen
      hierarchical-ring  chunks 8     1.49 ms  as fast, but less simple
      direct             chunks 1     5.61 ms  3.76 times as long
      pull               chunks 1     5.61 ms  3.76 times as long
      double-ring        chunks 8     5.62 ms  3.77 times as long
      recursive-doubling chunks 8     6.14 ms  4.12 times as long
      ring               chunks 8     9.84 ms  6.60 times as long
      get-ring           not used: a network connects the nodes
    predicted: 1.49 ms
          10 µs  start
         3.2 µs  ready  of 4 peers
        1.47 ms  puts between nodes  8 × 8 MiB at 48 GB/s, the last spread in 66.7 µs; inside 516 µs own, 534 µs passed on at the same time
         6.5 µs  last arrival
      self copies: 512 MiB in all, at most 64 MiB of one rank
      local: 3 GiB in all, at most 384 MiB of one rank
      network: 512 MiB in all, at most 64 MiB of one rank
      memory of one rank: 576 MiB
    ");
}

#[test]
fn a_choice_is_one_json_object() {
    let ended = run("explain --nodes 3+1+2 --block-bytes 1K,2K,3K,0,1,7 --outputs 2 --json");
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    let choice: Value = serde_json::from_str(&ended.stdout).unwrap();
    let terms = choice["cost"]["terms"].as_array().unwrap();
    let sum: u64 = terms.iter().map(|term| term["picoseconds"].as_u64().unwrap()).sum();
    assert_eq!(choice["cost"]["picoseconds"].as_u64().unwrap(), sum);
    assert_eq!(choice["algorithm"], choice["candidates"][0]["algorithm"]);
}

#[test]
fn a_calibration_is_written_and_used() {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let (out, check) = (folder.join("calibrated.json"), folder.join("check.json"));
    let words =
        "calibrate --backend host --ranks 2 --max-bytes 4K --rounds 1 --algorithms direct,ring";
    let ended = end(command(words).arg("--out").arg(&out).arg("--check").arg(&check));
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stdout.starts_with("host, 1x2, "), "{ended:?}");

    let calibration: Value = serde_json::from_slice(&std::fs::read(&out).unwrap()).unwrap();
    assert_eq!(calibration["key"]["backend"], "host");
    // Two algorithms with one output and with two, at 1 KiB and 4 KiB.
    let [engine] = &calibration["engines"].as_array().unwrap()[..] else { panic!("{calibration}") };
    assert_eq!(engine["links"]["engine"], "processor");
    assert_eq!(engine["samples"].as_array().unwrap().len(), 8);
    let check: Value = serde_json::from_slice(&std::fs::read(&check).unwrap()).unwrap();
    assert_eq!(check["points"].as_array().unwrap().len(), 12);

    // Measured samples can be fitted again, and give the same links.
    let again = folder.join("links-again.json");
    let mut refit = command("calibrate");
    let ended = end(refit.arg("--from").arg(folder.join("check.json")).arg("--out").arg(&again));
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let again: Value = serde_json::from_slice(&std::fs::read(&again).unwrap()).unwrap();
    assert_eq!(again["engines"][0]["samples"].as_array().unwrap().len(), 8);
    assert_eq!(again["engines"][0]["links"]["engine"], "processor");
    assert_eq!(again["key"], calibration["key"]);
    let ended = end(command("calibrate --out links.json --from").arg(&out));
    assert!(
        ended.error(2).contains("is not a file of `peerlane calibrate --check`: "),
        "{ended:?}"
    );

    let ended = end(command("explain --nodes 1x2 --block-bytes 1K --calibration").arg(&out));
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stdout.starts_with("2 ranks on 1 node, blocks of 1 KiB"), "{ended:?}");
    assert!(ended.stdout.contains(", by processor\n"), "{ended:?}");

    let words = "--engine sdma --calibration";
    for program in ["explain --nodes 1x2", "simulate --nodes 1 --ranks-per-node 2"] {
        let ended = end(command(&format!("{program} {words}")).arg(&out));
        let text = "--engine is \"sdma\", expected a kind of the calibration: processor";
        assert!(ended.error(2).contains(text), "{ended:?}");
    }

    // Files of older versions had links for one kind of engines only.
    let mut older = calibration["engines"][0].clone();
    older["key"] = calibration["key"].clone();
    let file = folder.join("links-older.json");
    std::fs::write(&file, older.to_string()).unwrap();
    let ended = end(command("allgather --backend host --ranks 2 --calibration").arg(&file));
    assert!(ended.error(2).contains("it is a calibration of an older version"), "{ended:?}");
}

#[test]
fn the_forms_of_an_all_reduce_are_compared() {
    let ended = run("explain --collective all-reduce --block-bytes 1K");
    assert!(ended.stdout.contains("direct, chunks 1, whole\n"), "{ended:?}");
    let ended = run("explain --collective all-reduce --block-bytes 64M");
    let lines: Vec<_> = ended.stdout.lines().collect();
    assert!(lines[0].ends_with(": direct, chunks 1, in parts"), "{ended:?}");
    assert!(lines[1].starts_with("  direct             chunks 1   in parts "), "{ended:?}");
    assert!(lines[2].starts_with("  direct             chunks 1   whole "), "{ended:?}");
    let ended = run("explain --collective all-reduce --block-bytes 1K --in-place");
    assert!(!ended.stdout.contains("whole"), "{ended:?}");

    // A form that is named is explained, planned and simulated.
    let ended = run("explain --collective all-reduce --block-bytes 64M --form whole");
    assert!(ended.stdout.contains("direct, chunks 1, whole\n"), "{ended:?}");
    let ended = run("plan --collective all-reduce --ranks 3 --algorithm direct --form whole");
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let time = |form: &str| {
        let line =
            format!("simulate --collective all-reduce --block-bytes 1K --json --form {form}");
        let ended = run(&line);
        assert_eq!(ended.code, Some(0), "{ended:?}");
        let report: Value = serde_json::from_str(&ended.stdout).unwrap();
        report["runs"][0]["microseconds"].as_f64().unwrap()
    };
    assert!(time("whole") < time("in-parts"));
    let ended = run("explain --form whole");
    assert!(
        ended.error(2).contains("--form is whole, but only an all-reduce has forms"),
        "{ended:?}"
    );
}
