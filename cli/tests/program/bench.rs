//! Runs `peerlane bench` and the commands that plan, simulate and predict other collectives.

use serde_json::Value;

use crate::common::run;

const SMALL: &str =
    "--min-bytes 1K --max-bytes 4K --iterations 3 --warmup 1 --backend host --json -";

fn check(rows: &[Value], collective: &str, bus_factor: f64) {
    assert_eq!(rows.len(), 2, "1 KiB and 4 KiB");
    for row in rows {
        assert_eq!((&row["checked"], &row["collective"]), (&true.into(), &collective.into()));
        let (algorithm, bus) =
            (row["algbw_gbs"].as_f64().unwrap(), row["busbw_gbs"].as_f64().unwrap());
        assert!((bus - algorithm * bus_factor).abs() < 1e-9, "{row}");
    }
}

#[test]
fn broadcasts_are_measured_and_checked() {
    for ranks in [1, 2, 3, 5] {
        for algorithm in ["direct", "ring", "auto"] {
            let root = ranks - 1;
            let options = format!("--ranks {ranks} --root {root} --algorithm {algorithm} {SMALL}");
            let rows = run(&format!("bench broadcast {options}")).rows();
            check(&rows, &format!("broadcast from {root}"), 1.0);
            let in_place = run(&format!("bench broadcast {options} --in-place")).rows();
            check(&in_place, &format!("broadcast from {root}"), 1.0);
        }
    }
}

#[test]
fn all_to_alls_are_measured_and_checked() {
    for ranks in [1, 2, 3, 5] {
        let rows = run(&format!("bench all-to-all --ranks {ranks} --dtype f32 {SMALL}")).rows();
        check(&rows, "all-to-all", (ranks - 1) as f64 / ranks as f64);
    }
    let line = "bench all-to-all --nodes 2x2 --limit";
    let rows = run(&format!("{line} {SMALL}")).rows();
    check(&rows, "all-to-all", 0.75);
}

#[test]
fn gathers_and_scatters_are_measured_and_checked() {
    for ranks in [1, 2, 3, 5] {
        let (root, bus_factor) = (ranks / 2, (ranks - 1) as f64 / ranks as f64);
        let lens: Vec<_> =
            (0..ranks).map(|rank| (rank % 3 + usize::from(ranks == 1)).to_string()).collect();
        for blocks in [String::new(), format!("--blocks {}", lens.join(":"))] {
            let options =
                format!("--ranks {ranks} --root {root} --algorithm all --limit {blocks} {SMALL}");
            for (name, word) in [("gather", "to"), ("scatter", "from")] {
                let rows = run(&format!("bench {name} {options}")).rows();
                for row in rows.chunks(2) {
                    assert_eq!(
                        (&row[0]["algorithm"], &row[1]["algorithm"]),
                        (&"direct".into(), &"pull".into())
                    );
                }
                for at in 0..2 {
                    let rows: Vec<_> = rows.iter().skip(at).step_by(2).cloned().collect();
                    check(&rows, &format!("{name} {word} {root}"), bus_factor);
                }
            }
        }
    }
}

#[test]
fn reductions_are_measured_and_checked() {
    for ranks in [1, 2, 3, 5] {
        let part = (ranks - 1) as f64 / ranks as f64;
        for dtype in ["u8", "i16", "f16", "bf16", "f32", "f64"] {
            let options = format!("--ranks {ranks} --dtype {dtype} {SMALL}");
            let rows = |line: &str| run(&format!("bench {line} {options}")).rows();
            check(&rows("all-reduce"), "all-reduce", 2.0 * part);
            check(&rows("reduce-scatter"), "reduce-scatter", part);
            let lens: Vec<_> = [1, 70, 0, 9, 4][..ranks].iter().map(usize::to_string).collect();
            let blocks = format!("reduce-scatter --blocks {}", lens.join(":"));
            check(&rows(&blocks), "reduce-scatter", part);
            for scan in ["scan", "exscan"] {
                check(&rows(scan), scan, 1.0);
            }
            let root = ranks - 1;
            let reduced = rows(&format!("reduce --root {root}"));
            check(&reduced, &format!("reduce to {root}"), 1.0);
        }
        let in_place = format!("--ranks {ranks} --dtype i64 --in-place {SMALL}");
        let rows = run(&format!("bench all-reduce {in_place}")).rows();
        check(&rows, "all-reduce", 2.0 * part);
    }
}

#[test]
fn all_to_alls_of_other_lengths_are_measured_and_checked() {
    for ranks in [1, 2, 3, 5] {
        let rows =
            run(&format!("bench all-to-all-v --ranks {ranks} --dtype f32 --limit {SMALL}")).rows();
        check(&rows, "all-to-all-v", (ranks - 1) as f64 / ranks as f64);
    }
    let rows = run(&format!("bench all-to-all-v --nodes 2x2 --blocks 3:0:1:9 {SMALL}")).rows();
    check(&rows, "all-to-all-v", 0.75);
}

#[test]
fn an_all_gather_has_the_same_rows_by_either_command() {
    let rows = run(&format!("bench all-gather --ranks 3 {SMALL}")).rows();
    check(&rows, "all-gather", 2.0 / 3.0);
    check(&run(&format!("allgather --ranks 3 {SMALL}")).rows(), "all-gather", 2.0 / 3.0);
}

#[test]
fn every_algorithm_that_suits_runs() {
    let rows = run(&format!("bench broadcast --nodes 2+1 --algorithm all --limit {SMALL}")).rows();
    let names: Vec<_> = rows.iter().map(|row| row["algorithm"].as_str().unwrap()).collect();
    assert_eq!(names, ["direct", "pull", "ring", "direct", "pull", "ring"]);
}

#[test]
fn other_collectives_are_planned_simulated_and_predicted() {
    let of = "--collective broadcast --root 1";
    let plan = run(&format!("plan --ranks 3 --algorithm ring --rank 0 {of}"));
    insta::assert_snapshot!(plan.stdout, @r"
    # 3 ranks on 1 node
    # verified (ranks: 3, chunks: 1, starts: 2, steps: 11, flags: 4): every byte of every output arrives exactly once; no byte is read before it has arrived; no deadlock; every flag has one writer and one reader and ends where it began; no start passes on the flags of the one before; nothing is overwritten while a rank may still read it

    broadcast from 1 ring: rank 0 of 3, 1 chunk, out of place
    lane 0
      signal ready to 2
      wait arrived 1.0
    ");
    let simulated = run(&format!("simulate --nodes 2 --ranks-per-node 4 --algorithm all {of}"));
    assert!(simulated.stdout.contains("direct") && simulated.stdout.contains("ring"));
    assert_eq!(simulated.code, Some(0), "{}", simulated.stderr);
    let explained = run(&format!("explain --nodes 1x4 --block-bytes 64M {of}"));
    insta::assert_snapshot!(explained.stdout, @r"
    4 ranks on 1 node, blocks of 0 B to 64 MiB, 64 MiB in all: ring, chunks 4
      ring               chunks 4      308 µs  chosen
      scatter-all-gather chunks 6      269 µs  as fast, but less simple
      get-ring           chunks 4      320 µs  as fast, but less simple
      pull               chunks 1      537 µs  1.74 times as long
      direct             chunks 1      539 µs  1.75 times as long
    predicted: 308 µs
          10 µs  start
         6.8 µs  ready  of the next rank
         155 µs  first chunk  4 × 16 MiB at 392 GB/s over 3 hops
         136 µs  other chunks  behind it
      self copies: 64 MiB in all, at most 64 MiB of one rank
      local: 192 MiB in all, at most 64 MiB of one rank
      memory of one rank: 128 MiB
    ");
    let explained = run("explain --nodes 1x4 --collective all-to-all");
    assert_eq!(explained.code, Some(0), "{}", explained.stderr);
    let plan = run("plan --ranks 2 --collective all-to-all --block-bytes 64");
    insta::assert_snapshot!(plan.stdout, @r"
    # 2 ranks on 1 node
    # verified (ranks: 2, chunks: 1, starts: 2, steps: 12, flags: 4): every byte of every output arrives exactly once; no byte is read before it has arrived; no deadlock; every flag has one writer and one reader and ends where it began; no start passes on the flags of the one before; nothing is overwritten while a rank may still read it

    all-to-all direct: rank 0 of 2, 1 chunk, out of place
    lane 0
      signal ready to 1
      put 0.0 input to 0
      wait ready from 1
      put 0.0 input to 1
      signal arrived 0.0 to 1
      wait arrived 1.0

    all-to-all direct: rank 1 of 2, 1 chunk, out of place
    lane 0
      signal ready to 0
      put 1.0 input to 1
      wait ready from 0
      put 1.0 input to 0
      signal arrived 1.0 to 0
      wait arrived 0.0

    # output of rank 0: 128 bytes
    #  cell  input offset  output offset         bytes
    #   0.0             0              0            64
    #   1.0             0             64            64

    # output of rank 1: 128 bytes
    #  cell  input offset  output offset         bytes
    #   0.0            64              0            64
    #   1.0            64             64            64
    ");
}

#[test]
fn what_a_collective_lacks_is_refused() {
    let refused = |line: &str| {
        let ended = run(line);
        assert_eq!(ended.code, Some(2), "{line}: {}", ended.stderr);
        ended.stderr
    };
    insta::assert_snapshot!(refused("bench broadcast --ranks 3 --root 3"), @"error: --root is 3, expected a rank below 3");
    insta::assert_snapshot!(refused("bench broadcast --tensors 2"), @r"
    error: --tensors is supported only for an all-gather, but the collective is broadcast
     help: remove the option
    ");
    insta::assert_snapshot!(refused("bench all-to-all --in-place"), @r"
    error: --in-place is not supported for an all-to-all, which keeps its input
     help: remove the option
    ");
    insta::assert_snapshot!(refused("bench reduce-scatter --in-place"), @r"
    error: --in-place is not supported for a reduce-scatter, which keeps its input
     help: remove the option
    ");
    insta::assert_snapshot!(refused("bench all-reduce --in-place --graph"), @r"
    error: --graph and --in-place cannot be used together for all-reduce
     help: a graph holds several starts, and each would add to the sum of the one before: remove one of the two options
    ");
    insta::assert_snapshot!(refused("bench all-reduce --vs nccl --dtype u16"), @r"
    error: --dtype u16 is not supported by NCCL
     help: use another type, or remove --vs
    ");
    insta::assert_snapshot!(refused("bench all-to-all --algorithm ring"), @r"
    error: --algorithm ring does not support all-to-all
     help: use auto, all, direct or pull
    ");
    insta::assert_snapshot!(refused("plan --root 1"), @r"
    error: --root is 1, but the collective is an all-gather, which has no root
     help: remove the option, or use a collective with a root: broadcast, gather, scatter, reduce
    ");
    insta::assert_snapshot!(refused("plan --collective broadcast --algorithm double-ring"), @"error: algorithm double-ring does not support broadcast, expected direct or pull or ring or scatter-all-gather or get-ring");
}

#[test]
fn products_beside_a_collective_need_nvidia_gpus() {
    let refused = |line: &str| {
        let ended = run(line);
        assert_eq!(ended.code, Some(2), "{line}: {}", ended.stderr);
        ended.stderr
    };
    insta::assert_snapshot!(refused("bench all-gather-matmul --backend host"), @"
    error: `bench all-gather-matmul` multiplies with cuBLAS on NVIDIA GPUs, but the backend is host
     help: use --backend cuda on a machine with NVIDIA GPUs; `peerlane bench all-gather` measures the collective alone on every backend
    ");
    let auto = refused("bench matmul-reduce-scatter");
    let expected = "on NVIDIA GPUs, but the backend is host (auto selected host; cuda: ";
    assert!(auto.contains(expected), "{auto}");

    for (options, expected) in [
        ("--streams 5", "5 is not in 1..=4"),
        ("--chunks 0", "0 is not in 1..=64"),
        ("--rows 0", "0 is not in 1..=1048576"),
        ("--dtype f32", "unexpected argument '--dtype' found"),
    ] {
        let error = refused(&format!("bench all-gather-matmul {options}"));
        assert!(error.contains(expected), "{options}: {error}");
    }
    let unknown = refused("bench");
    assert!(unknown.contains("<COLLECTIVE>"), "{unknown}");
}

#[test]
fn the_help_of_products_beside_a_collective_fits_one_screen() {
    for command in ["all-gather-matmul", "matmul-reduce-scatter"] {
        let [short, help] =
            ["-h", "--help"].map(|option| run(&format!("bench {command} {option}")));
        assert_eq!(short.stdout, help.stdout, "{command}");
        assert!(help.stdout.lines().count() <= 30, "{command}:\n{}", help.stdout);
        let all = run(&format!("bench {command} --help-all")).stdout;
        assert!(all.contains("bit by bit") && all.contains("--cublas <PATH>"), "{all}");
        assert!(run("bench --help").stdout.contains(command));
        let page = run(&format!("man bench-{command}"));
        assert!(page.stdout.contains("\\-\\-columns"), "{page:?}");
    }
}
