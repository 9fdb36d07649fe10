//! Open MPI in the guest: its files, the program that is timed, and how it starts ranks on both nodes.

use std::path::{Path, PathBuf};
use std::process::Command;

use peerlane_rxe_vm::Programs;
use peerlane_rxe_vm::process::{self, Outcome};
use peerlane_rxe_vm::{GuestFile, Tools};

const NEEDED: [(&str, &str); 2] = [
    ("openmpi-bin", "orted"),
    ("libopenmpi-dev", "usr/lib/x86_64-linux-gnu/openmpi/include/mpi.h"),
];
/// Plugins, texts and settings, which it opens by name.
const FOLDERS: [&str; 4] = [
    "usr/lib/x86_64-linux-gnu/openmpi/lib/openmpi3",
    "usr/lib/x86_64-linux-gnu/pmix2/lib",
    "usr/share/openmpi",
    "etc/openmpi",
];
/// Plugins whose own libraries the guest needs; what others lack only keeps them from being used.
const PLUGINS: [&str; 3] = ["mca_pmix_ext3x.so", "mca_btl_tcp.so", "libpmix.so.2"];
/// Starts a program on another node as `ssh` would on another host.
const AGENT: &str = "/usr/local/bin/to-node";

/// Puts everything into what the guest gets; `folder` keeps packages, `work` what is compiled.
pub(super) fn add(root: &Path, folder: &Path, work: &Path, built: &mut Programs) -> Outcome {
    let tools = Tools::obtain(&folder.join("openmpi"), &NEEDED)?;
    std::fs::create_dir_all(work)?;
    let program = work.join("openmpi_allgather");
    let include = tools.file("usr/lib/x86_64-linux-gnu/openmpi/include/mpi.h")?.file;
    // Not the link that is for building: of packages it may point to a library that is installed.
    let library = tools.file("usr/lib/x86_64-linux-gnu/libmpi.so.40")?.file;
    let folder_of = |file: &Path| file.parent().map(Path::to_owned).unwrap_or_default();
    let mut compiler = Command::new("cc");
    compiler.args(["-O2", "-Wall", "-Wextra", "-I"]).arg(folder_of(&include));
    compiler.arg(root.join("xtask/peers/openmpi_allgather.c"));
    let beside = format!("-Wl,-rpath-link,{}", folder_of(&library).display());
    compiler.arg(library).args([&beside, "-o"]).arg(&program);
    process::run(&mut compiler)?;

    let mut files = Vec::new();
    for folder in FOLDERS {
        files.extend(tools.below(folder)?);
    }
    let mut programs: Vec<PathBuf> = vec![program.clone()];
    for name in ["orterun", "orted"] {
        let found = tools.program(name)?;
        programs.push(found.file.clone());
        files.push(found);
    }
    let is_needed =
        |found: &&GuestFile| PLUGINS.iter().any(|plugin| found.guest_path.ends_with(plugin));
    programs.extend(files.iter().filter(is_needed).map(|found| found.file.clone()));
    files.extend(tools.closure(&programs)?);
    let agent = work.join("to-node");
    std::fs::write(&agent, AGENT_SCRIPT)?;
    files.push(GuestFile { file: agent, guest_path: AGENT.into() });
    files.push(GuestFile { file: program, guest_path: "/usr/local/bin/openmpi_allgather".into() });
    built.files.extend(files);
    Ok(())
}

/// Times totals on 2 ranks of each of both nodes: shared memory inside, TCP between.
pub(super) fn line(min_bytes: u64, max_bytes: u64, factor: u64, iterations: u32) -> String {
    // Four ranks on two processors: whoever waits must yield.
    let settings = [
        "pml ob1",
        "btl self,vader,tcp",
        "btl_tcp_if_include eth0",
        "oob_tcp_if_include eth0",
        "mpi_yield_when_idle 1",
        "mca_base_component_show_load_errors 0",
    ];
    let settings: String = settings.iter().map(|setting| format!(" --mca {setting}")).collect();
    let program = format!(
        "openmpi_allgather {min_bytes} {max_bytes} {factor} {iterations} {}",
        iterations / 5 + 1
    );
    format!(
        "{AGENT} 10.0.0.1 orterun --allow-run-as-root --mca plm_rsh_agent {AGENT}{settings} \
         --bind-to none --oversubscribe --host 10.0.0.1:2,10.0.0.2:2 -n 4 {program}"
    )
}

/// Host 10.0.0.(N + 1) is node N. Each node has a name of its own and keeps its files apart.
const AGENT_SCRIPT: &str = r#"#!/bin/sh
node=node$((${1##*.} - 1))
shift
export TMPDIR=/tmp/$node
mkdir -p $TMPDIR
exec ip netns exec $node unshare -u sh -c "hostname $node; $*"
"#;
