//! What launchers say, and what is wrong with it.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use insta::assert_snapshot;
use peerlane_bootstrap::Secret;
use peerlane_bootstrap::environment::{Environment, HubAddress};
use peerlane_bootstrap::error::Error;
use peerlane_bootstrap::tcp::{Hub, TcpBootstrap};
use peerlane_hal::{Deadline, ErrorKind, Rank};
use peerlane_test_support::LAUNCHER_VARIABLES;

/// Reads an environment given as `NAME=value NAME=value`.
fn read(variables: &str) -> Result<Option<Environment>, Error> {
    Environment::from_lookup(|name| {
        let mut pairs = variables.split(' ').filter_map(|pair| pair.split_once('='));
        pairs.find(|(key, _)| *key == name).map(|(_, value)| value.to_owned())
    })
}

fn place(variables: &str) -> Environment {
    read(variables).unwrap().expect("a launcher is there")
}

fn hub(variables: &str) -> HubAddress {
    place(&format!("RANK=1 WORLD_SIZE=4 {variables}")).hub
}

fn text(variables: &str) -> String {
    let error = read(variables).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    error.to_string()
}

fn rank_zero(address: &str) -> HubAddress {
    HubAddress::RankZero(address.into())
}

#[test]
fn without_a_launcher_there_is_no_place() {
    assert_eq!(read("").unwrap(), None);
    assert_eq!(read("RANK= WORLD_SIZE= MASTER_ADDR= PMIX_RANK=").unwrap(), None);
    // Settings that a profile may set, and variables that single processes have too.
    let settings = "PEERLANE_PORT=77 PEERLANE_SECRET=0123456789abcdef PEERLANE_JOB_ID=a";
    assert_eq!(read(settings).unwrap(), None);
    let single = "JOB_COMPLETION_INDEX=3 SLURM_ARRAY_TASK_ID=3 NODE_RANK=1 WORLD_SIZE=1";
    assert_eq!(read(single).unwrap(), None);
    // A process that has initialised MPI without a launcher.
    assert_eq!(read("PMIX_RANK=0 PMIX_NAMESPACE=x OMPI_APP_CTX_NUM_PROCS=1").unwrap(), None);
}

#[test]
fn torchrun_is_understood() {
    let variables = "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=node0 \
                     MASTER_PORT=29500 TORCHELASTIC_USE_AGENT_STORE=True";
    let expected = Environment {
        rank: Rank(5),
        ranks: 8,
        ranks_variable: Some("WORLD_SIZE"),
        local_rank: Some(1),
        local_ranks: Some(4),
        job: None,
        secret: None,
        allow_unauthenticated: false,
        hub: rank_zero("node0:29501"),
    };
    assert_eq!(place(variables), expected);
}

#[test]
fn open_mpi_is_understood_also_inside_of_slurm() {
    let variables = "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=3 OMPI_COMM_WORLD_LOCAL_RANK=2 \
                     OMPI_COMM_WORLD_LOCAL_SIZE=3 SLURM_PROCID=0 SLURM_NTASKS=1";
    let expected = Environment {
        rank: Rank(2),
        ranks: 3,
        ranks_variable: Some("OMPI_COMM_WORLD_SIZE"),
        local_rank: Some(2),
        local_ranks: Some(3),
        job: None,
        secret: None,
        allow_unauthenticated: false,
        hub: rank_zero("127.0.0.1:29501"),
    };
    assert_eq!(place(variables), expected);
}

#[test]
fn slurm_is_understood() {
    let variables =
        "SLURM_PROCID=7 SLURM_STEP_NUM_TASKS=16 SLURM_NTASKS=16 SLURM_LOCALID=3 MASTER_ADDR=node0";
    let expected = Environment {
        rank: Rank(7),
        ranks: 16,
        ranks_variable: Some("SLURM_STEP_NUM_TASKS"),
        local_rank: Some(3),
        local_ranks: None,
        job: None,
        secret: None,
        allow_unauthenticated: false,
        hub: rank_zero("node0:29501"),
    };
    assert_eq!(place(variables), expected);
    let one_host = place(
        "SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=1 SLURM_STEP_NODELIST=n7",
    );
    assert_eq!(one_host.hub, rank_zero("127.0.0.1:29501"));
}

#[test]
fn srun_places_rank_0_on_the_first_host() {
    for (list, host) in [
        ("node7", "node7"),
        ("node7,node9", "node7"),
        ("node[03-05,7]", "node03"),
        ("node[7,9-11],login1", "node7"),
        ("rack[2-3]node[01-16]-ib,rack9", "rack2node01-ib"),
        ("node[5", "node5"),
    ] {
        let variables = format!("SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST={list}");
        assert_eq!(place(&variables).hub, rank_zero(&format!("{host}:29501")), "{list}");
        let given = format!("{variables} MASTER_ADDR=10.0.0.1 MASTER_PORT=7");
        assert_eq!(place(&given).hub, rank_zero("10.0.0.1:7"));
    }
}

#[test]
fn a_process_in_an_allocation_that_srun_did_not_start_is_no_rank() {
    // A shell of `salloc`, a batch script of one task.
    assert_eq!(read("SLURM_JOB_ID=3 SLURM_NTASKS=4 SLURM_NNODES=2").unwrap(), None);
    assert_eq!(read("SLURM_JOB_ID=3 SLURM_PROCID=0 SLURM_NNODES=1").unwrap(), None);
    assert_eq!(read("SLURM_JOB_ID=3 SLURM_PROCID=0 SLURM_NTASKS=1").unwrap(), None);
    assert_eq!(read("SLURM_JOB_ID=3 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NPROCS=1").unwrap(), None);
    // The shell of an interactive step.
    let step = place("SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 SLURM_NTASKS=4 MASTER_ADDR=node0");
    assert_eq!((step.rank, step.ranks), (Rank(0), 1));
    let old = "SLURM_JOB_ID=3 SLURM_PROCID=0 SLURM_NPROCS=4";
    assert_snapshot!(text(old), @"SLURM_NPROCS is 4, but `srun` did not start this process, because SLURM_STEP_NUM_TASKS is not set; start the program with `srun`, or set RANK=0 and WORLD_SIZE=1 to run one rank");
    // A script sets the address for the programs that it starts.
    let script = "SLURM_JOB_ID=3 SLURM_PROCID=0 SLURM_NTASKS=4 MASTER_ADDR=node0";
    assert_snapshot!(text(script), @"SLURM_NTASKS is 4, but `srun` did not start this process, because SLURM_STEP_NUM_TASKS is not set; start the program with `srun`, or set RANK=0 and WORLD_SIZE=1 to run one rank");
    assert_eq!(place(&format!("{script} RANK=0 WORLD_SIZE=1")).ranks, 1);
}

#[test]
fn mpich_is_understood_also_inside_of_slurm() {
    let variables = "PMI_RANK=5 PMI_SIZE=8 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=4 MASTER_ADDR=node0 \
                     SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_JOB_ID=17 SLURM_STEP_ID=0";
    let expected = Environment {
        rank: Rank(5),
        ranks: 8,
        ranks_variable: Some("PMI_SIZE"),
        local_rank: Some(1),
        local_ranks: Some(4),
        job: Some("17.0".into()),
        secret: None,
        allow_unauthenticated: false,
        hub: rank_zero("node0:29501"),
    };
    assert_eq!(place(variables), expected);
    let one_host = place("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2");
    assert_eq!(one_host.hub, rank_zero("127.0.0.1:29501"));
}

#[test]
fn every_launcher_gives_a_place() {
    for (variables, rank, ranks, variable, local) in [
        ("RANK=1 WORLD_SIZE=4", 1, 4, "WORLD_SIZE", (None, None)),
        (
            "MV2_COMM_WORLD_RANK=1 MV2_COMM_WORLD_SIZE=2 MV2_COMM_WORLD_LOCAL_RANK=1 MV2_COMM_WORLD_LOCAL_SIZE=2",
            1,
            2,
            "MV2_COMM_WORLD_SIZE",
            (Some(1), Some(2)),
        ),
        (
            "PMI_RANK=5 PMI_SIZE=8 PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=4",
            5,
            8,
            "PMI_SIZE",
            (Some(1), Some(4)),
        ),
        // PALS gives no size, but PMI does.
        (
            "PALS_RANKID=5 PALS_LOCAL_RANKID=1 PALS_LOCAL_SIZE=4 PMI_RANK=5 PMI_SIZE=8",
            5,
            8,
            "PMI_SIZE",
            (None, None),
        ),
        (
            "JSM_NAMESPACE_RANK=1 JSM_NAMESPACE_SIZE=2 JSM_NAMESPACE_LOCAL_RANK=1 JSM_NAMESPACE_LOCAL_SIZE=2 PMIX_RANK=1",
            1,
            2,
            "JSM_NAMESPACE_SIZE",
            (Some(1), Some(2)),
        ),
        ("FLUX_TASK_RANK=1 FLUX_JOB_SIZE=2", 1, 2, "FLUX_JOB_SIZE", (None, None)),
        // Flux sets the variables of PMI too.
        (
            "PMI_RANK=3 PMI_SIZE=4 FLUX_TASK_RANK=3 FLUX_JOB_SIZE=4 FLUX_TASK_LOCAL_ID=1",
            3,
            4,
            "PMI_SIZE",
            (Some(1), None),
        ),
        // Of a `mpiexec` inside one task of Flux.
        (
            "PMI_RANK=1 PMI_SIZE=4 FLUX_TASK_RANK=0 FLUX_JOB_SIZE=1 FLUX_TASK_LOCAL_ID=0",
            1,
            4,
            "PMI_SIZE",
            (None, None),
        ),
        // A set of variables precedes a part of another one.
        (
            "PMI_RANK=2 SLURM_PROCID=2 SLURM_STEP_NUM_TASKS=4",
            2,
            4,
            "SLURM_STEP_NUM_TASKS",
            (None, None),
        ),
        (
            "PMIX_RANK=2 SLURM_PROCID=2 SLURM_STEP_NUM_TASKS=4 SLURM_LOCALID=0",
            2,
            4,
            "SLURM_STEP_NUM_TASKS",
            (Some(0), None),
        ),
        (
            "PMI_RANK=0 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 SLURM_NTASKS=1",
            0,
            1,
            "SLURM_STEP_NUM_TASKS",
            (None, None),
        ),
        // A profile sets `WORLD_SIZE`.
        ("WORLD_SIZE=1 PMI_RANK=2 PMI_SIZE=4", 2, 4, "PMI_SIZE", (None, None)),
        // The documented way to run one rank.
        (
            "RANK=0 WORLD_SIZE=1 SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=4",
            0,
            1,
            "WORLD_SIZE",
            (None, None),
        ),
    ] {
        let found = place(&format!("{variables} MASTER_ADDR=node0"));
        assert_eq!((found.rank, found.ranks), (Rank(rank), ranks), "{variables}");
        assert_eq!(found.ranks_variable, Some(variable), "{variables}");
        assert_eq!((found.local_rank, found.local_ranks), local, "{variables}");
    }
}

#[test]
fn a_launcher_with_the_same_place_says_where_rank_0_is() {
    // By hand in a step of `srun`.
    let slurm = "SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=node[7-8]";
    let by_hand = place(&format!("RANK=1 WORLD_SIZE=2 {slurm}"));
    assert_eq!(by_hand.hub, rank_zero("node7:29501"));
    let one_host = "PMI_RANK=1 PMI_SIZE=2 FLUX_TASK_RANK=1 FLUX_JOB_SIZE=2 FLUX_JOB_NNODES=1";
    assert_eq!(place(one_host).hub, rank_zero("127.0.0.1:29501"));
    // Ranks in another order.
    let error = text(&format!("RANK=0 WORLD_SIZE=2 {slurm}"));
    assert!(error.starts_with("MASTER_ADDR is not set"), "{error}");
}

#[test]
fn one_of_several_processes_is_never_a_group_of_one() {
    let help =
        "set RANK and WORLD_SIZE on every rank (RANK=0 and WORLD_SIZE=1 run one rank), or unset";
    for (variables, expected, name) in [
        (
            "SLURM_PROCID=2",
            "SLURM_PROCID=2 is set, but SLURM_STEP_NUM_TASKS is not",
            "SLURM_PROCID",
        ),
        (
            "SLURM_PROCID=1 SLURM_NPROCS=4 SLURM_LOCALID=1",
            "SLURM_PROCID=1 is set, but SLURM_STEP_NUM_TASKS is not",
            "SLURM_PROCID",
        ),
        (
            "SLURM_LOCALID=1",
            "SLURM_LOCALID=1 is set, but SLURM_PROCID and SLURM_STEP_NUM_TASKS are not",
            "SLURM_LOCALID",
        ),
        (
            "SLURM_STEP_NUM_TASKS=4",
            "SLURM_STEP_NUM_TASKS=4 is set, but SLURM_PROCID is not",
            "SLURM_STEP_NUM_TASKS",
        ),
        (
            "RANK= WORLD_SIZE= SLURM_PROCID=3",
            "SLURM_PROCID=3 is set, but SLURM_STEP_NUM_TASKS is not",
            "SLURM_PROCID",
        ),
        ("LOCAL_RANK=2", "LOCAL_RANK=2 is set, but RANK and WORLD_SIZE are not", "LOCAL_RANK"),
        ("LOCAL_RANK=0", "LOCAL_RANK=0 is set, but RANK and WORLD_SIZE are not", "LOCAL_RANK"),
        (
            "LOCAL_RANK=0 LOCAL_WORLD_SIZE=4",
            "LOCAL_RANK=0 is set, but RANK and WORLD_SIZE are not",
            "LOCAL_RANK",
        ),
        ("RANK=1", "RANK=1 is set, but WORLD_SIZE is not", "RANK"),
        ("RANK=0", "RANK=0 is set, but WORLD_SIZE is not", "RANK"),
        ("WORLD_SIZE=4", "WORLD_SIZE=4 is set, but RANK is not", "WORLD_SIZE"),
        (
            "MASTER_ADDR=127.0.0.1 MASTER_PORT=29600",
            "MASTER_ADDR=127.0.0.1 is set, but RANK and WORLD_SIZE are not",
            "MASTER_ADDR",
        ),
        (
            "MASTER_PORT=29600",
            "MASTER_PORT=29600 is set, but RANK and WORLD_SIZE are not",
            "MASTER_PORT",
        ),
        (
            "WORLD_SIZE=1 MASTER_ADDR=node0",
            "MASTER_ADDR=node0 is set, but RANK is not",
            "MASTER_ADDR",
        ),
        ("GROUP_RANK=1", "GROUP_RANK=1 is set, but RANK and WORLD_SIZE are not", "GROUP_RANK"),
        (
            "GROUP_RANK=1 LOCAL_RANK=1 MASTER_ADDR=127.0.0.1",
            "LOCAL_RANK=1 is set, but RANK and WORLD_SIZE are not",
            "LOCAL_RANK",
        ),
        (
            "PEERLANE_HUB=127.0.0.1:29999",
            "PEERLANE_HUB=127.0.0.1:29999 is set, but RANK and WORLD_SIZE are not",
            "PEERLANE_HUB",
        ),
        ("PMI_SIZE=4 SLURM_PROCID=2", "PMI_SIZE=4 is set, but PMI_RANK is not", "PMI_SIZE"),
        (
            "PMIX_RANK=2",
            "PMIX_RANK=2 is set, but PMIx sets no variable with the number of ranks",
            "PMIX_RANK",
        ),
        (
            "PMIX_RANK=2 PMIX_NAMESPACE=x SLURM_PROCID=2 SLURM_NTASKS=4",
            "PMIX_RANK=2 is set, but PMIx sets no variable with the number of ranks",
            "PMIX_RANK",
        ),
        (
            "PALS_RANKID=2",
            "PALS_RANKID=2 is set, but PALS sets no variable with the number of ranks",
            "PALS_RANKID",
        ),
        (
            "OMPI_COMM_WORLD_RANK=1",
            "OMPI_COMM_WORLD_RANK=1 is set, but OMPI_COMM_WORLD_SIZE is not",
            "OMPI_COMM_WORLD_RANK",
        ),
        (
            "OMPI_COMM_WORLD_LOCAL_RANK=1",
            "OMPI_COMM_WORLD_LOCAL_RANK=1 is set, but OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE are not",
            "OMPI_COMM_WORLD_LOCAL_RANK",
        ),
        (
            "MPI_LOCALRANKID=0",
            "MPI_LOCALRANKID=0 is set, but PMI_RANK and PMI_SIZE are not",
            "MPI_LOCALRANKID",
        ),
    ] {
        assert_eq!(text(variables), format!("{expected}; {help} {name}"), "{variables}");
    }
}

#[test]
fn a_part_of_a_launcher_that_does_not_fit_the_next_is_an_error() {
    let step = "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1";
    assert_snapshot!(text(&format!("PMIX_RANK=2 {step}")), @"PMIX_RANK=2 does not fit SLURM_PROCID=0 and SLURM_STEP_NUM_TASKS=1; set RANK and WORLD_SIZE on every rank (RANK=0 and WORLD_SIZE=1 run one rank), or unset PMIX_RANK");
    assert_snapshot!(text(&format!("WORLD_SIZE=4 {step}")), @"WORLD_SIZE=4 does not fit SLURM_PROCID=0 and SLURM_STEP_NUM_TASKS=1; set RANK and WORLD_SIZE on every rank (RANK=0 and WORLD_SIZE=1 run one rank), or unset WORLD_SIZE");
    assert_snapshot!(text(&format!("LOCAL_RANK=1 {step}")), @"LOCAL_RANK=1 does not fit SLURM_PROCID=0 and SLURM_STEP_NUM_TASKS=1; set RANK and WORLD_SIZE on every rank (RANK=0 and WORLD_SIZE=1 run one rank), or unset LOCAL_RANK");
    // These say nothing about the number of ranks.
    assert_eq!(place(&format!("MASTER_ADDR=node0 LOCAL_RANK=0 {step}")).ranks, 1);
}

#[test]
fn the_job_is_that_of_the_launcher() {
    let job = |variables: &str| place(&format!("MASTER_ADDR=node0 {variables}")).job;
    let torchrun = "RANK=0 WORLD_SIZE=2";
    assert_eq!(job(torchrun), None);
    assert_eq!(job(&format!("{torchrun} TORCHELASTIC_RUN_ID=none")), None);
    assert_eq!(job(&format!("{torchrun} TORCHELASTIC_RUN_ID=a1")), Some("a1".into()));
    let given = format!("{torchrun} TORCHELASTIC_RUN_ID=a1 PEERLANE_JOB_ID=b2");
    assert_eq!(job(&given), Some("b2".into()));
    let slurm = "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2 SLURM_JOB_ID=17";
    assert_eq!(job(slurm), None);
    assert_eq!(job(&format!("{slurm} SLURM_STEP_ID=3")), Some("17.3".into()));
    let mpi = "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2";
    assert_eq!(job(&format!("{mpi} PMIX_NAMESPACE=prterun@1")), Some("prterun@1".into()));
    assert_eq!(job(&format!("{mpi} OMPI_MCA_ess_base_jobid=42")), Some("42".into()));
    let long = text(&format!("{torchrun} PEERLANE_JOB_ID={} MASTER_ADDR=n", "x".repeat(257)));
    assert_snapshot!(long, @"PEERLANE_JOB_ID has 257 bytes, expected at most 256");
}

#[test]
fn the_secret_is_a_text_or_a_file_of_its_owner() {
    let torchrun = "RANK=0 WORLD_SIZE=2 MASTER_ADDR=node0";
    let read = |variables: &str| place(&format!("{torchrun} {variables}"));
    let refused = |variables: &str| text(&format!("{torchrun} {variables}"));
    let secret = Some(Secret::new("0123456789abcdef").unwrap());
    let found = read("PEERLANE_SECRET=0123456789abcdef");
    assert_eq!(found.secret, secret);
    assert!(!format!("{found:?}").contains("0123456789abcdef"), "{found:?}");
    assert_snapshot!(refused("PEERLANE_SECRET=0123456789abcde"), @"PEERLANE_SECRET has 15 bytes, expected 16 to 4096; create one with `openssl rand -hex 32`");
    assert_snapshot!(refused(&format!("PEERLANE_SECRET={}", "x".repeat(4097))), @"PEERLANE_SECRET has 4097 bytes, expected 16 to 4096; create one with `openssl rand -hex 32`");
    assert_snapshot!(refused(&format!("PEERLANE_SECRET={}", "\u{fffd}".repeat(9))), @"PEERLANE_SECRET is not UTF-8");

    let directory = std::env::temp_dir().join(format!("peerlane-secret-{}", std::process::id()));
    fs::create_dir_all(&directory).unwrap();
    let path = directory.join("secret");
    let variable = format!("PEERLANE_SECRET_FILE={}", path.display());
    let masked = |text: String| text.replace(&*directory.to_string_lossy(), "DIRECTORY");
    let write = |text: &str, mode: u32| {
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
    };
    assert_snapshot!(masked(refused(&variable)), @"the secret in the file DIRECTORY/secret (PEERLANE_SECRET_FILE) cannot be read: No such file or directory (os error 2)");
    let text = refused(&format!("PEERLANE_SECRET_FILE={}", directory.display()));
    assert_snapshot!(masked(text), @"the secret in the file DIRECTORY (PEERLANE_SECRET_FILE) is not in a regular file");
    write("0123456789abcdef\n", 0o600);
    assert_eq!(read(&variable).secret, secret);
    assert_eq!(Some(Secret::read(&path).unwrap()), secret);
    assert_snapshot!(refused(&format!("{variable} PEERLANE_SECRET=0123456789abcdef")), @"both PEERLANE_SECRET and PEERLANE_SECRET_FILE are set, expected at most one of them");
    for mode in [0o640, 0o604] {
        write("0123456789abcdef\n", mode);
        assert!(refused(&variable).contains("can be accessed by other users"));
    }
    assert_snapshot!(masked(refused(&variable)), @"the secret in the file DIRECTORY/secret (PEERLANE_SECRET_FILE) can be accessed by other users (mode 0604), expected mode 0600; run `chmod 600 DIRECTORY/secret`");
    write("\n", 0o600);
    assert_snapshot!(masked(refused(&variable)), @"the secret in the file DIRECTORY/secret (PEERLANE_SECRET_FILE) has 0 bytes, expected 16 to 4096; create one with `openssl rand -hex 32`");
    write(&"x".repeat(1 << 20), 0o600);
    assert_snapshot!(masked(refused(&variable)), @"the secret in the file DIRECTORY/secret (PEERLANE_SECRET_FILE) has more than 4096 bytes");
    fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn without_a_secret_the_hub_stays_on_its_host() {
    // torchrun sets `MASTER_ADDR` to the name of the host also if all ranks are on it.
    let one_host = "RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=node0";
    assert_eq!(place(one_host).hub, rank_zero("127.0.0.1:29501"));
    for address in ["localhost", "127.0.0.2", "::1"] {
        let hub =
            place(&format!("RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR={address}")).hub;
        let address = if address == "::1" { "[::1]" } else { address };
        assert_eq!(hub, rank_zero(&format!("{address}:29501")));
    }
    for open in ["PEERLANE_SECRET=0123456789abcdef", "PEERLANE_ALLOW_UNAUTHENTICATED=1"] {
        assert_eq!(place(&format!("{one_host} {open}")).hub, rank_zero("node0:29501"));
    }

    // The same error on every rank, from the variables alone.
    let join = |variables: &str| {
        let deadline = Deadline::after(Duration::from_secs(60));
        let error = TcpBootstrap::join(&place(variables), deadline).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        error.to_string()
    };
    let text = join("RANK=0 WORLD_SIZE=4 MASTER_ADDR=node0");
    assert_eq!(join("RANK=1 WORLD_SIZE=4 MASTER_ADDR=node0"), text);
    assert_snapshot!(text, @"the hub's address node0:29501 (MASTER_ADDR) can be reached from other hosts, but there is no secret; set PEERLANE_SECRET or PEERLANE_SECRET_FILE to the same secret on all ranks (`openssl rand -hex 32` creates one), or set PEERLANE_ALLOW_UNAUTHENTICATED=1 if only this job can reach the network");
    assert_snapshot!(join("RANK=0 WORLD_SIZE=4 PEERLANE_HUB=10.0.0.1:77"), @"the hub's address 10.0.0.1:77 (PEERLANE_HUB) can be reached from other hosts, but there is no secret; set PEERLANE_SECRET or PEERLANE_SECRET_FILE to the same secret on all ranks (`openssl rand -hex 32` creates one), or set PEERLANE_ALLOW_UNAUTHENTICATED=1 if only this job can reach the network");
    assert_snapshot!(Hub::bind("0.0.0.0:0", 2).unwrap_err(), @"the hub cannot listen at 0.0.0.0:0 without a secret, because other hosts can reach this address; set PEERLANE_SECRET or PEERLANE_SECRET_FILE to the same secret on all ranks (`openssl rand -hex 32` creates one), or set PEERLANE_ALLOW_UNAUTHENTICATED=1 if only this job can reach the network");
}

#[test]
fn the_hub_is_where_the_variables_say() {
    assert_eq!(hub("MASTER_ADDR=node0"), rank_zero("node0:29501"));
    assert_eq!(hub("MASTER_ADDR=node0 MASTER_PORT=1234"), rank_zero("node0:1234"));
    assert_eq!(hub("MASTER_ADDR=fd00::1 MASTER_PORT=1234"), rank_zero("[fd00::1]:1234"));
    assert_eq!(hub("MASTER_ADDR=[::1] MASTER_PORT=1234"), rank_zero("[::1]:1234"));
    assert_eq!(hub("MASTER_ADDR=fe80::1%eth0"), rank_zero("[fe80::1%eth0]:29501"));
    assert_eq!(hub("MASTER_ADDR=::ffff:127.0.0.1"), rank_zero("127.0.0.1:29501"));
    assert_eq!(hub("LOCAL_WORLD_SIZE=4"), rank_zero("127.0.0.1:29501"));
    let agent = "MASTER_ADDR=node0 MASTER_PORT=1234 TORCHELASTIC_USE_AGENT_STORE=False";
    assert_eq!(hub(agent), rank_zero("node0:1234"));
    let own =
        "MASTER_ADDR=node0 MASTER_PORT=1234 PEERLANE_PORT=77 TORCHELASTIC_USE_AGENT_STORE=True";
    assert_eq!(hub(own), rank_zero("node0:77"));
    let external = "MASTER_ADDR=node0 MASTER_PORT=1234 PEERLANE_HUB=[::1]:99";
    assert_eq!(hub(external), HubAddress::External("[::1]:99".into()));
    assert_eq!(place("RANK=0 WORLD_SIZE=1").hub, rank_zero("127.0.0.1:29501"));
}

#[test]
fn says_which_variable_is_wrong_and_why() {
    assert_snapshot!(text("RANK=3"), @"RANK=3 is set, but WORLD_SIZE is not; set RANK and WORLD_SIZE on every rank (RANK=0 and WORLD_SIZE=1 run one rank), or unset RANK");
    assert_snapshot!(text("OMPI_COMM_WORLD_SIZE=3"), @"OMPI_COMM_WORLD_SIZE=3 is set, but OMPI_COMM_WORLD_RANK is not; set RANK and WORLD_SIZE on every rank (RANK=0 and WORLD_SIZE=1 run one rank), or unset OMPI_COMM_WORLD_SIZE");
    assert_snapshot!(text("RANK=0 WORLD_SIZE=0"), @"WORLD_SIZE is 0, expected at least 1, the number of ranks");
    assert_snapshot!(text("RANK=4 WORLD_SIZE=4"), @"RANK is 4, expected a number below 4, the value of WORLD_SIZE (ranks count from 0)");
    assert_snapshot!(text("RANK=0 WORLD_SIZE=four"), @r#"WORLD_SIZE is "four", expected a number from 0 to 4294967295"#);
    assert_snapshot!(text("SLURM_PROCID=-1 SLURM_STEP_NUM_TASKS=2"), @r#"SLURM_PROCID is "-1", expected a number from 0 to 4294967295"#);
    assert_snapshot!(text("RANK=0 WORLD_SIZE=4 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2"), @"LOCAL_RANK is 2, expected a number below 2, the value of LOCAL_WORLD_SIZE (ranks count from 0)");
    assert_snapshot!(text("RANK=0 WORLD_SIZE=4"), @"MASTER_ADDR is not set; set it on every rank to the name or address of the host of rank 0");
    assert_snapshot!(text("RANK=0 WORLD_SIZE=1 MASTER_PORT=70000"), @r#"MASTER_PORT is "70000", expected a port from 1 to 65535"#);
    assert_snapshot!(text("RANK=0 WORLD_SIZE=1 PEERLANE_PORT=0"), @r#"PEERLANE_PORT is "0", expected a port from 1 to 65535"#);
    assert_snapshot!(text("RANK=0 WORLD_SIZE=1 PEERLANE_HUB=node0"), @r#"PEERLANE_HUB is "node0", expected a host and a port, such as 10.0.0.1:29501"#);
    for port in ["0", "-1", "65536", "99999", "abc", "29500.0", "٣"] {
        let error = text(&format!("RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={port}"));
        assert_eq!(error, format!("MASTER_PORT is {port:?}, expected a port from 1 to 65535"));
    }
    assert_snapshot!(text("RANK=0 WORLD_SIZE=1 PEERLANE_HUB=[::1]:0"), @r#"PEERLANE_HUB is "[::1]:0", expected a port from 1 to 65535 after the host"#);
    assert_snapshot!(text("RANK=0 WORLD_SIZE=1 PEERLANE_HUB=::1:29500"), @r#"PEERLANE_HUB is "::1:29500", expected [::1]:29500, because an IPv6 address in front of a port needs brackets"#);
    assert_snapshot!(text("RANK=0 WORLD_SIZE=2 MASTER_ADDR=10.0.0.1:29500"), @r#"MASTER_ADDR is "10.0.0.1:29500", expected a host without a port, such as 10.0.0.1; set MASTER_PORT to 29500"#);
    assert_snapshot!(text("RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=tcp://node0"), @r#"MASTER_ADDR is "tcp://node0", expected a host without a scheme, such as node0"#);
    assert_snapshot!(text("RANK=0 WORLD_SIZE=2 MASTER_ADDR=fe80::1"), @r#"MASTER_ADDR is "fe80::1", expected the interface of this host after the link-local address, such as fe80::1%eth0"#);
    assert_snapshot!(text("SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=no/de"), @r#"SLURM_STEP_NODELIST is "no/de", expected a host name of letters, digits, `-`, `_` and `.`, but it contains '/'"#);
    assert_snapshot!(text("RANK=0 WORLD_SIZE=1 PEERLANE_ALLOW_UNAUTHENTICATED=yes"), @r#"PEERLANE_ALLOW_UNAUTHENTICATED is "yes", expected 1 or 0"#);
    let last = "RANK=0 WORLD_SIZE=1 MASTER_PORT=65535 TORCHELASTIC_USE_AGENT_STORE=True";
    assert_snapshot!(text(last), @"MASTER_PORT is 65535, which torchrun uses itself, and no port follows it; set PEERLANE_PORT to a free port, the same on every rank");
}

#[test]
fn random_variables_never_panic() {
    let names = LAUNCHER_VARIABLES;
    let long = "x".repeat(100_000);
    let values = [
        "0",
        "1",
        "-1",
        "65535",
        "65536",
        "4294967295",
        "4294967296",
        "18446744073709551616",
        "1e309",
        "NaN",
        "",
        "é",
        "a\u{1b}[31m\0",
        "[::1]:1",
        "fe80::1%eth0",
        "node[1-4294967296]",
        "node[18446744073709551616",
        "a,b,[c",
        "/dev/zero",
        "/",
        "True",
        &long,
    ];
    let mut errors = 0;
    for seed in 0..3000 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let set: Vec<(&str, &str)> = (0..rng.usize(1..8))
            .map(|_| (names[rng.usize(..names.len())], values[rng.usize(..values.len())]))
            .collect();
        let lookup = |name: &str| {
            set.iter().find(|(set, _)| *set == name).map(|(_, value)| (*value).to_owned())
        };
        let Err(error) = Environment::from_lookup(lookup) else { continue };
        let text = error.to_string();
        assert!(text.len() < 1000, "seed {seed}: {text}");
        assert!(!text.contains(char::is_control), "seed {seed}: {text:?}");
        errors += 1;
    }
    assert!(errors > 1000, "{errors} errors");
}
