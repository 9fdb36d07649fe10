//! Installs Open MPI in the guest and starts its ranks on both nodes.

use std::path::{Path, PathBuf};
use std::process::Command;

use peerlane_rxe_vm::Programs;
use peerlane_rxe_vm::process::{self, Outcome};
use peerlane_rxe_vm::{GuestFile, Tools};

/// Packages, and the file of each that is needed.
const NEEDED: [(&str, &str); 2] = [
    ("openmpi-bin", "orted"),
    ("libopenmpi-dev", "usr/lib/x86_64-linux-gnu/openmpi/include/mpi.h"),
];
/// Folders of plugins, texts and settings, which Open MPI opens by name.
const FOLDERS: [&str; 4] = [
    "usr/lib/x86_64-linux-gnu/openmpi/lib/openmpi3",
    "usr/lib/x86_64-linux-gnu/pmix2/lib",
    "usr/share/openmpi",
    "etc/openmpi",
];
/// Plugins whose libraries the guest needs. Open MPI skips other plugins without theirs.
const PLUGINS: [&str; 3] = ["mca_pmix_ext3x.so", "mca_btl_tcp.so", "libpmix.so.2"];
/// The script that starts a program on another node, in place of `ssh`.
const AGENT: &str = "/usr/local/bin/to-node";

/// Adds Open MPI to the files of the guest. `folder` keeps packages, and `work` compiled programs.
pub(super) fn add(root: &Path, folder: &Path, work: &Path, built: &mut Programs) -> Outcome {
    let tools = Tools::obtain(&folder.join("openmpi"), &NEEDED)?;
    std::fs::create_dir_all(work)?;
    let program = work.join("mpi_collective");
    let include = tools.file("usr/lib/x86_64-linux-gnu/openmpi/include/mpi.h")?.file;
    // Not `libmpi.so`: the link of an unpacked package may point to an installed library.
    let library = tools.file("usr/lib/x86_64-linux-gnu/libmpi.so.40")?.file;
    let folder_of = |file: &Path| file.parent().map(Path::to_owned).unwrap_or_default();
    let mut compiler = Command::new("cc");
    compiler.args(["-O2", "-Wall", "-Wextra", "-I"]).arg(folder_of(&include));
    compiler.arg(root.join("xtask/peers/mpi_collective.c"));
    let rpath = format!("-Wl,-rpath-link,{}", folder_of(&library).display());
    compiler.arg(library).args([&rpath, "-o"]).arg(&program);
    process::run(&mut compiler)?;

    let mut files = Vec::new();
    for folder in FOLDERS {
        files.extend(tools.below(folder)?);
    }
    let mut programs: Vec<PathBuf> = vec![program.clone()];
    for name in ["orterun", "orted"] {
        let launcher = tools.program(name)?;
        programs.push(launcher.file.clone());
        files.push(launcher);
    }
    let is_needed =
        |file: &&GuestFile| PLUGINS.iter().any(|plugin| file.guest_path.ends_with(plugin));
    programs.extend(files.iter().filter(is_needed).map(|it| it.file.clone()));
    files.extend(tools.closure(&programs)?);
    let agent = work.join("to-node");
    std::fs::write(&agent, AGENT_SCRIPT)?;
    files.push(GuestFile { file: agent, guest_path: AGENT.into() });
    files.push(GuestFile { file: program, guest_path: "/usr/local/bin/mpi_collective".into() });
    built.files.extend(files);
    Ok(())
}

/// Returns the shell line that times totals on 2 ranks per node: shared memory inside, TCP between.
pub(super) fn line(min_bytes: u64, max_bytes: u64, factor: u64, iterations: u32) -> String {
    // There are four ranks on two processors, so a waiting rank must yield.
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
        "mpi_collective all-gather {min_bytes} {max_bytes} {factor} {iterations} {}",
        iterations / 5 + 1
    );
    format!(
        "{AGENT} 10.0.0.1 orterun --allow-run-as-root --mca plm_rsh_agent {AGENT}{settings} \
         --bind-to none --oversubscribe --host 10.0.0.1:2,10.0.0.2:2 -n 4 {program}"
    )
}

/// Host 10.0.0.(N + 1) is node N. Each node has its own name and its own temporary files.
const AGENT_SCRIPT: &str = r#"#!/bin/sh
node=node$((${1##*.} - 1))
shift
export TMPDIR=/tmp/$node
mkdir -p $TMPDIR
exec ip netns exec $node unshare -u sh -c "hostname $node; $*"
"#;
