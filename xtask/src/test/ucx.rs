//! `cargo xtask test ucx`: runs the tests of UCX between network namespaces, each with an interface
//! of its own.
//!
//! The namespaces are in a user namespace, so that they need no privileges and are gone with the
//! last process. A bridge connects them; the test programs run beside it, and start ranks in the
//! namespaces.

use std::process::{Command, Stdio};

use clap::Args;

use super::programs::{Program, artifacts};
use super::run_programs;
use crate::workspace;
use peerlane_rxe_vm::process::{Outcome, cargo};

/// The test programs, each with its package.
const PROGRAMS: [(&str, &str); 3] = [
    ("peerlane-ucx", "hosts"),
    ("peerlane-tests", "rdma_processes"),
    ("peerlane-tests", "rdma_mixed"),
];
/// The number of namespaces.
const NODES: usize = 3;
/// What begins a process in namespaces of users, networks and mounts.
const UNSHARE: [&str; 2] = ["unshare", "-rnm"];

/// Options of `cargo xtask test ucx`.
#[derive(Args, Debug, Default)]
pub(super) struct Options {
    /// Build the tests with the whole workspace, which `cargo xtask test --all` has built already.
    #[arg(long, hide = true)]
    workspace: bool,
    /// Arguments of every test program, such as the name of a test.
    #[arg(last = true)]
    arguments: Vec<String>,
}

/// Returns why the tests cannot run on this machine, or `None` if they can.
pub(super) fn unavailable() -> Option<String> {
    let succeeds = |program: &str, arguments: &[&str]| {
        let mut command = Command::new(program);
        command.args(arguments).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    };

    let libraries = Command::new("ldconfig").arg("-p").output();
    let libraries = libraries.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    if !libraries.is_ok_and(|libraries| libraries.contains("libucp.so.0")) {
        return Some("there is no libucp.so.0; it comes with the package libucx0".to_owned());
    }
    if !succeeds("ip", &["-V"]) {
        return Some("there is no program ip; it comes with the package iproute2".to_owned());
    }
    let [unshare, option] = UNSHARE;
    let tried = [option, "ip", "link", "add", "br0", "type", "bridge"];
    if !succeeds(unshare, &tried) {
        let tried = tried.join(" ");
        return Some(format!("`{unshare} {tried}` is not permitted, or there are no bridges"));
    }
    None
}

/// Runs the tests.
pub(super) fn run(options: &Options) -> Outcome {
    if let Some(reason) = unavailable() {
        return Err(reason.into());
    }

    let mut command = match options.workspace {
        true => super::workspace_programs(),
        false => cargo(["test", "--package", "peerlane-ucx", "--package", "peerlane-tests"]),
    };
    if !options.workspace {
        command.args(PROGRAMS.iter().flat_map(|(_, program)| ["--test", program]));
    }
    let metadata = workspace::members()?;
    let script_file = metadata.target_directory.join("ucx-namespaces.sh");
    std::fs::write(&script_file, script())?;
    let mut programs = Vec::new();
    for artifact in artifacts(&mut command)? {
        let Some(file) = &artifact.executable else { continue };
        let package = metadata.packages.iter().find(|package| package.id == artifact.package_id);
        let package = package.ok_or("an artifact is of no package")?;
        let name = (package.name.as_str(), artifact.target.name.as_str());
        if !artifact.profile.test || !PROGRAMS.contains(&name) {
            continue;
        }

        let mut command = Command::new(UNSHARE[0]);
        command.arg(UNSHARE[1]).args(["sh", "-eu"]).arg(&script_file).arg(file);
        command.args(&options.arguments);
        let folder = package.manifest_path.parent().ok_or("a package has a folder")?;
        command.current_dir(folder);
        programs.push(Program::of_command(&format!("{} {} over ucx", name.0, name.1), command));
    }
    if programs.len() != PROGRAMS.len() {
        return Err(format!("{} programs were built, expected {PROGRAMS:?}", programs.len()).into());
    }
    // The ranks of one program use all processors.
    run_programs(programs, 1)
}

/// Returns the lines of shell that create the namespaces and run their arguments.
fn script() -> String {
    let mut script = String::from(
        "mount -t tmpfs tmpfs /run\n\
         ip link set lo up\n\
         ip link add br0 type bridge\n\
         ip addr add 10.0.0.254/24 dev br0\n\
         ip link set br0 up\n",
    );
    for node in 0..NODES {
        let address = node + 1;
        script += &format!(
            "ip netns add node{node}\n\
             ip link add port{node} type veth peer name eth0 netns node{node}\n\
             ip link set port{node} master br0 up\n\
             ip -n node{node} link set lo up\n\
             ip -n node{node} addr add 10.0.0.{address}/24 dev eth0\n\
             ip -n node{node} link set eth0 up\n"
        );
    }
    let names = |name: &dyn Fn(usize) -> String| (0..NODES).map(name).collect::<Vec<_>>().join(",");
    let (namespaces, devices) = (names(&|node| format!("node{node}")), names(&|_| "eth0".into()));
    // UCX prints its log to the standard output, where the ranks tell what they do.
    script += "export UCX_LOG_LEVEL=fatal\n";
    script += &format!(
        "export PEERLANE_TEST_UCX_NAMESPACES={namespaces} PEERLANE_TEST_UCX_DEVICES={devices}\n\
         exec \"$@\"\n"
    );
    script
}
