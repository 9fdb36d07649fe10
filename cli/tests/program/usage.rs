//! Tests the error texts for wrong command lines and for machines that lack something.

use crate::common::{Ended, command, end, run};

#[test]
fn files_without_end_and_sizes_beyond_memory_are_errors() {
    for words in ["plan --check /dev/zero", "simulate --calibration /dev/zero"] {
        let Ended { code, stderr, .. } = end(&mut command(words));
        assert_eq!(code, Some(2), "{stderr}");
        let expected = "error: /dev/zero has more than 256 MiB, expected a text file";
        assert!(stderr.contains(expected), "{words}: {stderr}");
    }
    let Ended { code, stderr, .. } = end(&mut command("perf --put --bytes 18446744073709551615"));
    assert_eq!(code, Some(1), "{stderr}");
    assert!(stderr.contains("needs more memory than can be addressed"), "{stderr}");
    assert!(!stderr.contains("panicked"), "{stderr}");
}

#[test]
fn wrong_options_are_usage_errors_with_the_valid_values() {
    for (line, expected) in [
        ("allgather --ranks 0", "expected a number of ranks from 1 to 4096"),
        ("allgather --max-bytes 1KB", "unknown suffix KB"),
        (
            "allgather --min-bytes 2K --max-bytes 1K",
            "--max-bytes 1 KiB is less than --min-bytes 2 KiB",
        ),
        ("allgather --algorithm spiral", "unknown algorithm; expected auto, all or direct, pull, "),
        ("allgather --timeout 0", "expected a number of seconds above 0"),
        ("allgather --chunks 0", "expected a number of chunks from 1 to 65536"),
        ("allgather --chunks 2 --chunk-bytes 64K", "cannot be used with"),
        ("allgather --chunk-bytes 0", "--chunk-bytes <SIZE>': expected at least 1 byte"),
        ("allgather --ranks 2 --chunk-bytes 1 --max-bytes 1M", "--chunk-bytes 1 B makes"),
        (
            "allgather --ranks 4 --nodes 2+1",
            "--nodes: 2+1 has 3 ranks on 2 nodes, expected 4 ranks",
        ),
        (
            "allgather --ranks 2 --nodes 3",
            "--nodes: 3 nodes for 2 ranks, expected at most one node for each rank",
        ),
        ("allgather --nodes 0", "the number of nodes is 0, expected at least 1"),
        (
            "allgather --nodes 2 --network-bandwidth 2",
            "expected a number above 0 with a unit, such as 2GB/s",
        ),
        (
            "allgather --nodes 2 --network-delay 20",
            "expected a time with a unit, at most 10s, such as 20us",
        ),
        ("allgather --network-delay 20us", "--nodes <NODES>"),
        (
            "allgather --ranks 4 --blocks 1:2:3",
            "--blocks 1:2:3 has 3 numbers, expected 4, one for each rank",
        ),
        ("allgather --blocks 0:0", "such as 1:2:3:4"),
        ("allgather --list --tensors 2", "cannot be used with"),
        ("allgather --list --outputs 2", "--list and --outputs 2 cannot be used together"),
        ("allgather --tensors 0", "0 is not in 1..=1024"),
        ("allgather --trace lanes.svg", "expected a file name that ends in .json"),
        (
            "allgather --calibration Cargo.toml",
            "Cargo.toml is not a file of `peerlane calibrate --out`",
        ),
        ("allgather --plot sizes.png", "expected a file name that ends in .svg"),
        ("allgather --backend tpu", "[possible values: auto, host, cuda, rocm, rdma, ucx]"),
        ("allgather --network mpi", "[possible values: auto, same, rdma, ucx]"),
        ("allgather --backend host --port 0", "0 is not in 1..=255"),
        ("perf", "<--put|--get|--signal>"),
        ("perf --put --backend cuda", "[possible values: host, rdma, ucx]"),
        ("perf --put --window 0", "0 is not in 1..=4096"),
        ("perf --put --bytes 64KB", "unknown suffix KB"),
        ("perf --put --device rxe0", "--device selects a network device"),
        ("allreduce", "unrecognized subcommand 'allreduce'"),
        (
            "plan --ranks 4 --rank 4",
            "--rank 4 does not exist, expected a rank below 4, the number of ranks",
        ),
        ("plan --ranks 2 --block-bytes 1,2,3", "--block-bytes has 3 sizes, expected 1 or 2"),
        ("plan --ranks 4096", "lower --ranks, --nodes or --chunks"),
        (
            "plan --nodes 2048x8 --chunks 65 --rank 0",
            "16384 ranks with 65 chunks have 1064960 cells",
        ),
        ("plan --ranks 3 --nodes 1+1", "--nodes: 2x1 has 2 ranks on 2 nodes, expected 3 ranks"),
        (
            "plan --ranks 3 --nodes 4",
            "--nodes: 4 nodes for 3 ranks, expected at most one node for each rank",
        ),
        ("plan --nodes 2y4", "\"2y4\" is not a number; expected a form such as 2x4"),
        ("plan --nodes 0,2", "names node 2 but not node 1"),
        ("plan --algorithm spiral", "unknown algorithm; expected auto or direct, pull, "),
        ("plan --ranks 2 --chunks 65537", "chunks is 65537, expected 1 to 65536"),
        ("plan --in-place --outputs 2", "outputs is 2, expected 1 to 1 in place"),
        (
            "plan --inboxes 2 --algorithm ring",
            "inboxes is 2, expected 1 in an all-gather by the algorithm ring",
        ),
        (
            "explain --nodes 1x4 --inboxes 2",
            "inboxes is 2, expected 1 in an all-gather by the algorithm direct",
        ),
        ("explain --nodes 2y4", "invalid topology \"2y4\""),
        ("explain --nodes 1x2 --block-bytes 1,2,3", "--block-bytes has 3 sizes, expected 1 or 2"),
        ("explain --chunks 65537", "chunks is 65537, expected 1 to 65536"),
        (
            "explain --calibration Cargo.toml",
            "Cargo.toml is not a file of `peerlane calibrate --out`",
        ),
        (
            "calibrate --out links.json --algorithms auto",
            "unknown algorithm \"auto\", expected direct",
        ),
        ("calibrate --out links.json --algorithms spiral", "unknown algorithm"),
        ("plan --tiers --check plans.txt", "cannot be used with"),
    ] {
        let ended = run(line);
        assert!(ended.error(2).contains(expected), "{line}: {ended:?}");
    }
}

#[test]
fn missing_backends_are_refused_with_advice() {
    for backend in ["cuda", "rocm", "rdma"] {
        let ended = run(&format!("allgather --backend {backend}"));
        assert!(ended.error(1).contains("peerlane doctor"), "{ended:?}");
        assert!(ended.stdout.is_empty());
    }
}

#[test]
fn too_little_memory_is_refused_before_the_run() {
    let ended = run("allgather --ranks 4 --min-bytes 1K --max-bytes 1048576G --factor 1024");
    let error = ended.error(1);
    assert!(error.contains("the largest size needs"), "{error}");
    assert!(error.contains("lower --max-bytes"), "{error}");
}

#[test]
fn files_that_cannot_be_written_are_named() {
    let ended = run("allgather --ranks 1 --max-bytes 1K --json /proc/none/rows.json");
    assert!(ended.error(1).contains("cannot create /proc/none/rows.json"), "{ended:?}");
}

#[test]
fn completions_and_manual_pages_name_the_options() {
    for shell in ["bash", "zsh", "fish"] {
        let ended = run(&format!("completions {shell}"));
        assert_eq!(ended.code, Some(0));
        assert!(ended.stdout.contains("min-bytes") && ended.stdout.contains("plan-buffers"));
    }
    assert!(run("man").stdout.contains("peerlane\\-plan\\-buffers"));
    assert!(run("man allgather").stdout.contains("\\-\\-min\\-bytes"));
    let ended = run("man nothing");
    let error = ended.error(2);
    assert!(error.contains("unknown command \"nothing\", expected one of allgather, "), "{error}");
}

#[test]
fn the_short_options_of_nccl_tests_are_understood() {
    let ended = run("allgather -g 2 -b 1K -e 2.5K -f 2 -n 3 -w 1 --json -");
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let rows: Vec<serde_json::Value> =
        ended.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let sizes: Vec<_> = rows.iter().map(|row| row["total_bytes"].as_u64().unwrap()).collect();
    assert_eq!(sizes, [1024, 2048]);
    assert!(rows.iter().all(|row| row["ranks"] == 2 && row["iterations"] == 3));
    assert!(rows.iter().all(|row| row["host"].is_string() && row["unix_time"].is_u64()));
}

#[test]
fn the_help_names_every_option() {
    let ended = run("allgather --help-all");
    assert_eq!(ended.code, Some(0));
    let lines = ended.stdout.lines().map(str::trim_start);
    let options: Vec<_> =
        lines.filter(|line| line.starts_with('-') && !line.starts_with("- ")).collect();
    insta::assert_snapshot!(options.join("\n"), @"
    --backend <BACKEND>
    -g, --ranks <N>
    --devices <N,N,…>
    --device <NAME,…>
    --port <N>
    --gid-index <N>
    --queue-pairs <N>
    --algorithm <NAME,…>
    --chunks <N>
    --chunk-bytes <SIZE>
    --calibration <FILE>
    --predict
    --explain
    --nodes <NODES>
    --network <BACKEND>
    --network-bandwidth <RATE>
    --network-delay <TIME>
    --local-bandwidth <RATE>
    --blocks <N:N:…>
    --list
    --tensors <N>
    -b, --min-bytes <SIZE>
    -e, --max-bytes <SIZE>
    -f, --factor <FACTOR>
    -n, --iterations <N>
    -w, --warmup <N>
    --in-place
    --outputs <N>
    --self-copy <HOW>
    --reduce-blocks <N>
    --fused-blocks <N>
    --engine <KIND>
    --form <FORM>
    --transfer <HOW>
    --beside-compute
    --strict
    --dtype <DTYPE>
    --limit
    --graph
    --vs <LIBRARY>
    --nccl <PATH>
    --overlap <COMPUTE>
    --cublas <PATH>
    --plot <FILE.svg>
    --trace <FILE.json>
    --bind <HOW>
    --timeout <SECONDS>
    --seed <NUMBER>
    --json <FILE>
    -h, --help
    --help-all
    ");
}

#[test]
fn the_help_of_every_command_fits_one_screen() {
    let commands = [
        "allgather",
        "bench",
        "perf",
        "plan",
        "plan-buffers",
        "simulate",
        "explain",
        "calibrate",
        "doctor",
    ];
    for command in commands.into_iter().chain(["completions", "man"]) {
        let [short, help] = ["-h", "--help"].map(|option| run(&format!("{command} {option}")));
        assert_eq!(short.stdout, help.stdout, "{command}");
        assert!(help.stdout.lines().count() <= 30, "{command}:\n{}", help.stdout);
    }
}
