//! Connects fabrics of two namespaces of one host: of two network namespaces, which cannot hand each other memory, and of two
//! process namespaces, which can.

use std::process::{Command, Stdio};
use std::time::Duration;

use peerlane_hal::{Deadline, ErrorKind, Fabric, PeerMemory as _, Rank, RemoteKey as _, Role};
use peerlane_host as host;
use peerlane_test_support::not_covered;
use peerlane_tests::processes::{Child, Parent, hex, unhex};

/// Starts a program in a network namespace of its own.
const UNSHARE: [&str; 2] = ["unshare", "-rn"];

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

/// Returns the error of a connection to a rank that is alive in another network namespace.
fn refusal(fabric: &mut host::Fabric, peer: Rank, address: &[u8]) -> String {
    let error = fabric.connect(peer, address, soon()).unwrap_err();
    assert_eq!(peerlane_hal::Error::kind(&error), ErrorKind::Mismatch, "{error}");
    error.to_string()
}

#[test]
#[ignore = "started by the other test of this program"]
fn rank_of_another_namespace() {
    let parent = Parent::find().expect("started by a test");
    let mut fabric = host::Fabric::open(Rank(1), 2).unwrap();
    // The harness has begun a line.
    parent.print_line("");
    parent.print_line(format_args!("address {}", hex(&fabric.address())));
    let address = unhex(&parent.read_line().unwrap());
    parent.print_line(format_args!("refusal {}", refusal(&mut fabric, Rank(0), &address)));
    // The fabric stays open until the parent has connected.
    parent.read_line().ok();
}

#[test]
fn a_rank_in_another_network_namespace_is_not_called_lost() {
    let [unshare, option] = UNSHARE;
    let tried = Command::new(unshare).args([option, "true"]).stderr(Stdio::null()).status();
    if !tried.as_ref().is_ok_and(std::process::ExitStatus::success) {
        not_covered(
            "a_rank_in_another_network_namespace_is_not_called_lost",
            &format!("`unshare -rn true` is not permitted: {tried:?}"),
        );
        return;
    }
    let mut fabric = host::Fabric::open(Rank(0), 2).unwrap();
    let mut command = Command::new(unshare);
    command.arg(option).arg(std::env::current_exe().unwrap());
    let test = "rank_of_another_namespace";
    command.args(["--ignored", "--exact", test, "--nocapture", "--test-threads=1"]);
    command.env("PEERLANE_TEST_ROLE", test);
    let mut child = Child::spawn(test, command).unwrap();
    let next = |child: &mut Child, word: &str| loop {
        let line = child.read_line(soon()).unwrap();
        if let Some(rest) = line.strip_prefix(word) {
            return rest.trim().to_owned();
        }
    };
    let address = unhex(&next(&mut child, "address"));
    let own = refusal(&mut fabric, Rank(1), &address);
    child.send_line(hex(&fabric.address())).unwrap();
    let others = next(&mut child, "refusal");
    for (text, peer, rank) in [(own, 1, 0), (others, 0, 1)] {
        for words in [
            format!("cannot connect to rank {peer}: it runs on host "),
            format!("but rank {rank} on host "),
            "in the network namespace ".to_owned(),
            "run all ranks of a host in one (docker: --network=host), or use the backend rdma"
                .into(),
        ] {
            assert!(text.contains(&words), "{words}: {text}");
        }
    }
    child.send_line("end").unwrap();
}

/// Starts a program in a process namespace of its own.
const UNSHARE_PROCESSES: [&str; 2] = ["unshare", "-rpf"];

/// Imports the memory of the other rank, whose address and key it has sent as a line.
fn import(fabric: &mut host::Fabric, peer: Rank, line: &str) {
    let (address, key) = line.split_once(' ').unwrap();
    fabric.connect(peer, &unhex(address), soon()).unwrap();
    let key = host::Key::decode(&unhex(key)).unwrap();
    fabric.memory().import(peer, &key, soon()).unwrap();
}

/// Allocates memory, and returns the line with which the other rank imports it.
fn export(fabric: &host::Fabric) -> (host::Local, String) {
    let region = fabric.memory().allocate(4096, Role::Data).unwrap();
    let key = fabric.memory().export(&region).unwrap();
    (region, format!("{} {}", hex(&fabric.address()), hex(&key.encode())))
}

#[test]
#[ignore = "started by the other test of this program"]
fn rank_of_another_process_namespace() {
    let parent = Parent::find().expect("started by a test");
    let mut fabric = host::Fabric::open(Rank(1), 2).unwrap();
    let (_region, line) = export(&fabric);
    // The harness has begun a line.
    parent.print_line("");
    parent.print_line(format_args!("memory {line}"));
    import(&mut fabric, Rank(0), &parent.read_line().unwrap());
    parent.print_line("imported");
    // The region stays until the parent has imported it.
    parent.read_line().ok();
}

/// The system does not tell the number of a process of another process namespace, only its user.
#[test]
fn ranks_of_two_process_namespaces_import_memory_of_each_other() {
    let [unshare, options] = UNSHARE_PROCESSES;
    let tried = Command::new(unshare).args([options, "true"]).stderr(Stdio::null()).status();
    if !tried.as_ref().is_ok_and(std::process::ExitStatus::success) {
        not_covered(
            "ranks_of_two_process_namespaces_import_memory_of_each_other",
            &format!("`unshare -rpf true` is not permitted: {tried:?}"),
        );
        return;
    }
    let mut fabric = host::Fabric::open(Rank(0), 2).unwrap();
    let (_region, own) = export(&fabric);
    let mut command = Command::new(unshare);
    command.arg(options).arg(std::env::current_exe().unwrap());
    let test = "rank_of_another_process_namespace";
    command.args(["--ignored", "--exact", test, "--nocapture", "--test-threads=1"]);
    command.env("PEERLANE_TEST_ROLE", test);
    let mut child = Child::spawn(test, command).unwrap();
    let memory = loop {
        let line = child.read_line(soon()).unwrap();
        if let Some(rest) = line.strip_prefix("memory ") {
            break rest.trim().to_owned();
        }
    };
    child.send_line(own).unwrap();
    while child.read_line(soon()).unwrap() != "imported" {}
    import(&mut fabric, Rank(1), &memory);
    child.send_line("end").unwrap();
}
