//! Tests which backend a group gets if drivers are missing or do not work, or if ranks see different GPUs.

use peerlane::open::{Backend, OpenOptions};
use peerlane_simulated_driver::{Other, tell};
use peerlane_test_support::ReservedPort;

const BACKEND: &str = "PEERLANE_TEST_BACKEND";

/// Runs as one rank: opens a group, and reports the selection or the error.
#[test]
#[ignore = "started by the other tests of this program"]
fn opener() {
    let mut options = OpenOptions::default();
    if let Ok(backend) = std::env::var(BACKEND) {
        options = options.backend(backend.parse::<Backend>().unwrap());
    }
    let text = match options.from_env() {
        Ok(group) => {
            let text = group.selection().to_string();
            group.close().unwrap();
            text
        }
        Err(error) => {
            let rank = error.peer().map_or("no rank".to_owned(), |rank| format!("rank {rank}"));
            format!("{}, {rank}: {error}", error.kind())
        }
    };
    tell(text.as_bytes());
}

type Variables<'a> = &'a [(&'a str, &'a str)];

const ALL: Variables = &[];
const NONE: Variables = &[("CUDA_VISIBLE_DEVICES", "")];
const BROKEN: Variables = &[("PEERLANE_SIM_FAIL", "cuInit:0:803")];

/// Opens a group of ranks with the simulated driver, each with these variables, and returns what each reports.
fn open(ranks: &[Variables]) -> Vec<String> {
    let folder = peerlane_simulated_driver::library_folder();
    let folder = folder.to_str().expect("the path is valid UTF-8");
    let reserved = ReservedPort::new();
    let port = reserved.number().to_string();
    let count = ranks.len().to_string();
    let start = |(rank, variables): (usize, &Variables)| {
        let rank = rank.to_string();
        let launcher = [
            ("LD_LIBRARY_PATH", folder),
            ("CUDA_VISIBLE_DEVICES", "0,1,2,3"),
            ("HIP_VISIBLE_DEVICES", ""),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", &port),
            ("WORLD_SIZE", &count),
            ("RANK", &rank),
        ];
        Other::start("opener", &[&launcher[..], variables].concat())
    };
    let others: Vec<Other> = ranks.iter().enumerate().map(start).collect();
    let finish = |mut other: Other| {
        let text = other.hear_text();
        other.end();
        text
    };
    others.into_iter().map(finish).collect()
}

fn check(reports: &[String], begins: &str, holds: &[&str]) {
    for report in reports {
        assert!(report.starts_with(begins), "{begins}: {reports:#?}");
        assert!(holds.iter().all(|text| report.contains(text)), "{holds:?}: {reports:#?}");
    }
}

#[test]
fn each_rank_gets_a_gpu() {
    assert_eq!(open(&[ALL; 2]), ["cuda, GPU 0 (4 GPUs)", "cuda, GPU 1 (4 GPUs)"]);
    let one = [("PEERLANE_SIM_DEVICES", "1")];
    assert_eq!(open(&[&one]), ["cuda, GPU 0 (1 GPU)"]);
    // Each rank sees only its own, as under `srun --gpus-per-task=1`.
    let own = ["2", "0", "3"].map(|gpu| [("CUDA_VISIBLE_DEVICES", gpu)]);
    let own: Vec<Variables> = own.iter().map(|own| &own[..]).collect();
    assert_eq!(open(&own), ["cuda, GPU 0 (3 GPUs)"; 3]);
}

#[test]
fn a_machine_without_a_driver_or_device_uses_host_memory() {
    let reports = open(&[NONE; 2]);
    check(&reports, "host (cuda: ", &["sees no NVIDIA GPU; CUDA_VISIBLE_DEVICES is \"\""]);
    // The stub library of the CUDA toolkit.
    let stub = [("PEERLANE_SIM_FAIL", "cuInit:0:34")];
    check(&open(&[&stub[..]; 2]), "host (cuda: ", &["stub library"]);
}

#[test]
fn a_driver_that_does_not_work_is_an_error_on_all_ranks() {
    let holds = [
        "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        "repair the driver, or set `OpenOptions::backend` to `Backend::Host`",
    ];
    let begins = |rank| {
        format!(
            "unavailable, rank {rank}: cannot select a backend: the driver of the backend cuda does not work on rank {rank} ("
        )
    };
    check(&open(&[BROKEN; 2]), &begins(0), &holds);
    check(&open(&[ALL, BROKEN, ALL]), &begins(1), &holds);
    // Rank 0 sees no GPU, which alone would be no error.
    check(&open(&[NONE, BROKEN]), &begins(1), &holds);
}

#[test]
fn a_library_that_cannot_be_loaded_is_an_error() {
    let folder = peerlane_simulated_driver::library_folder().with_file_name("no-library");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("libcuda.so.1"), "no library").unwrap();
    let variables = [("LD_LIBRARY_PATH", folder.to_str().unwrap())];
    let holds = ["on rank 1 (", "cannot load libcuda.so.1: ", "file too short"];
    check(&open(&[ALL, &variables]), "unavailable, rank 1: cannot select a backend: ", &holds);
}

#[test]
fn host_memory_is_used_on_request() {
    let host = (BACKEND, "host");
    let reports = open(&[&[host], &[host, BROKEN[0]], &[host, NONE[0]]]);
    assert_eq!(reports, ["host"; 3]);
}

#[test]
fn a_requested_backend_that_one_rank_lacks_is_an_error_on_all_ranks() {
    let cuda = (BACKEND, "cuda");
    let reports = open(&[&[cuda], &[cuda, BROKEN[0]]]);
    check(&reports, "unavailable, rank 1: cannot open the backend cuda on rank 1 (", &["803"]);
}

#[test]
fn gpus_on_some_ranks_only_are_an_error() {
    let reports = open(&[ALL, ALL, NONE]);
    let holds = [
        "rank 2 (",
        "sees no GPU of the backend cuda, but rank 0 sees 4 GPUs: ",
        "CUDA_VISIBLE_DEVICES is \"\"",
        "`Backend::Host`",
    ];
    check(&reports, "unavailable, rank 2: cannot select a backend: ", &holds);
}

#[test]
fn fewer_gpus_than_ranks_are_an_error_unless_they_are_shared_on_request() {
    let one = ("CUDA_VISIBLE_DEVICES", "1");
    let reports = open(&[&[one], &[one]]);
    let holds = ["sees 1 GPU of the backend cuda for 2 ranks; start one rank per GPU, or set \
         `OpenOptions::backend` to `Backend::Cuda` if ranks share GPUs"];
    check(&reports, "unavailable, rank 0: cannot select a backend: rank 0 (", &holds);
    let cuda = (BACKEND, "cuda");
    assert_eq!(open(&[&[cuda, one], &[cuda, one]]), ["cuda, GPU 0"; 2]);
}
