//! Tests `peerlane allgather` as a rank of a launcher.

use std::net::TcpListener;
use std::process::{Command, Stdio};

use peerlane_test_support::{ReservedPort, not_covered};

use crate::common::{Ended, command, end};

const SMALL: &str = "allgather --max-bytes 4K --iterations 3 --warmup 1 --json -";

pub(crate) fn rank(line: &str, rank: usize, ranks: usize, port: &ReservedPort) -> Command {
    let mut command = command(line);
    command.envs([("RANK", rank), ("WORLD_SIZE", ranks)].map(|(name, n)| (name, n.to_string())));
    command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.number().to_string());
    command
}

/// Starts one process for each line, as ranks in order, and waits for all of them.
pub(crate) fn launch(lines: &[&str]) -> Vec<Ended> {
    let port = ReservedPort::new();
    std::thread::scope(|scope| {
        let start = |(number, line): (usize, &&str)| {
            let mut command = rank(line, number, lines.len(), &port);
            scope.spawn(move || end(&mut command))
        };
        let ranks: Vec<_> = lines.iter().enumerate().map(start).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn ranks_of_a_launcher_join_and_rank_0_prints() {
    let ranks = launch(&[SMALL; 3]);
    assert_eq!(ranks[0].rows().len(), 2);
    assert!(ranks[0].rows().iter().all(|row| row["checked"] == true && row["ranks"] == 3));
    for rank in &ranks[1..] {
        assert_eq!((rank.code, rank.stdout.as_str(), rank.stderr.as_str()), (Some(0), "", ""));
    }
}

/// Starts four ranks with a launcher of a package; `None` if it is not installed.
fn with_mpirun(launcher: &str, options: &str) -> Option<Ended> {
    let mut command = Command::new(launcher);
    // The ranks find each other by the variables of the launcher alone, besides the port.
    let port = ReservedPort::new();
    let own = self::command(SMALL);
    command.args(options.split_whitespace()).args(["-n", "4"]).arg(own.get_program());
    for (name, value) in own.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.args(own.get_args()).env("PEERLANE_PORT", port.number().to_string());
    if Command::new(launcher).arg("--version").output().is_err() {
        let what = format!("ranks_of_{}_join", launcher.replace('.', "_"));
        not_covered(&what, &format!("{launcher} is not installed"));
        return None;
    }
    Some(end(&mut command))
}

/// Ranks of a launcher find each other by its variables alone.
fn joined_by(launcher: &str, options: &str) {
    let Some(ended) = with_mpirun(launcher, options) else { return };
    assert_eq!(ended.code, Some(0), "{launcher}: {ended:?}");
    let rows = ended.rows();
    assert!(rows.len() == 2 && rows.iter().all(|row| row["ranks"] == 4), "{launcher}: {ended:?}");
}

#[test]
fn ranks_of_mpirun_openmpi_join() {
    // It refuses to run as root and to start more ranks than processors without these options.
    joined_by("mpirun.openmpi", "--allow-run-as-root --oversubscribe");
}

#[test]
fn ranks_of_mpirun_mpich_join() {
    joined_by("mpirun.mpich", "");
}

#[test]
fn ranks_with_different_options_are_named() {
    let other = format!("{SMALL} --dtype f32");
    for ended in launch(&[SMALL, &other]) {
        let error = ended.error(1);
        assert!(error.contains("ranks have different values of --dtype"), "{error}");
        assert!(error.contains("start all ranks with the same program"), "{error}");
    }
}

#[test]
fn a_number_of_ranks_that_the_launcher_has_not_started_is_a_usage_error() {
    let ended = end(&mut rank(&format!("{SMALL} --ranks 3"), 0, 2, &ReservedPort::new()));
    assert!(
        ended.error(2).contains("--ranks is 3, but the launcher has started 2 ranks"),
        "{ended:?}"
    );
}

#[test]
fn a_missing_rank_is_named() {
    let ended = end(&mut rank(&format!("{SMALL} --timeout 3"), 0, 2, &ReservedPort::new()));
    assert!(ended.error(1).contains("rank 1"), "{ended:?}");
    let ended = end(&mut rank(&format!("{SMALL} --timeout 3"), 1, 2, &ReservedPort::new()));
    assert!(ended.error(1).contains("rank 0"), "{ended:?}");
}

#[test]
fn a_port_in_use_is_named_with_its_variable() {
    let port = ReservedPort::new();
    let _taken = TcpListener::bind(port.address()).unwrap();
    let ended = end(&mut rank(&format!("{SMALL} --timeout 2"), 0, 2, &port));
    let error = ended.error(1);
    assert!(error.contains("in use") && error.contains("MASTER_PORT"), "{error}");
    assert!(error.contains(&port.number().to_string()), "{error}");
}

#[test]
fn an_incomplete_environment_is_named() {
    let mut command = command(SMALL);
    let ended = end(command.env("RANK", "0").stdout(Stdio::piped()));
    assert!(ended.error(1).contains("WORLD_SIZE"), "{ended:?}");
}
