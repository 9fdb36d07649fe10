//! `cargo xtask package`: packages the crates that are published, and builds and checks them as a
//! user does.
//!
//! The user is a package in an empty folder that has only the packaged crates. It runs the example
//! of the README with default features, checks all features together with the crate `cudarc` and a
//! test on the simulated driver, and checks the program.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use cargo_metadata::Metadata;

use crate::workspace;
use peerlane_rxe_vm::process::{self, Outcome, cargo};

const README: &str = include_str!("../../README.md");
/// A test of the user that runs without a GPU.
const GPU_TEST: &str = r#"//! Gathers on simulated GPUs.

use peerlane::bootstrap::{Bootstrap, in_process};
use peerlane::{Group, cuda};

#[test]
fn gathers_on_simulated_gpus() {
    let driver = peerlane_simulated_driver::install();
    in_process::run(2, |bootstrap| {
        let rank = bootstrap.rank();
        let mut group = Group::open(bootstrap, cuda::Fabric::open(rank, 2, rank.0)?)?;
        group.all_gather::<f32>(3).prepare()?.run()?;
        group.close()
    })
    .unwrap();
    assert_eq!(driver.counter("live_allocations", None), 0);
}
"#;

pub(crate) fn run() -> Outcome {
    let metadata = workspace::members()?;
    let published = published(&metadata);
    let mut command = cargo(["package", "--no-verify", "--allow-dirty", "--quiet"]);
    for name in published.keys() {
        command.args(["--package", name]);
    }
    process::run(&mut command)?;

    // The same folder each time, because cargo builds a package of another folder anew; outside of
    // this workspace, whose profiles would count otherwise.
    let root = metadata.workspace_root.as_str().replace('/', "-");
    let folder = std::env::temp_dir().join(format!("peerlane-package{root}"));
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    let built = build(&metadata, &published, &folder);
    fs::remove_dir_all(&folder)?;
    built
}

/// Returns the names and versions of the crates that are published.
fn published(metadata: &Metadata) -> BTreeMap<String, String> {
    let packages = metadata.workspace_packages().into_iter();
    let published = packages.filter(|package| package.publish.as_ref() != Some(&Vec::new()));
    published.map(|package| (package.name.to_string(), package.version.to_string())).collect()
}

fn build(metadata: &Metadata, published: &BTreeMap<String, String>, folder: &Path) -> Outcome {
    let mut patches = "[patch.crates-io]\n".to_owned();
    let mut unpacked = BTreeMap::new();
    fs::create_dir_all(folder.join("user/src"))?;
    fs::create_dir_all(folder.join("user/tests"))?;
    for (name, version) in published {
        let archive = metadata.target_directory.join(format!("package/{name}-{version}.crate"));
        let mut unpack = Command::new("tar");
        process::run(unpack.arg("-xzf").arg(&archive).arg("-C").arg(folder))?;
        let place = folder.join(format!("{name}-{version}"));
        writeln!(patches, "{name} = {{ path = {place:?} }}")?;
        unpacked.insert(name.as_str(), place);
    }
    let config = folder.join("packages.toml");
    fs::write(&config, &patches)?;
    let in_folder = |path: PathBuf, command: &str| {
        let mut command = cargo([command]);
        command.current_dir(path).arg("--config").arg(&config);
        // The versions of this workspace in its target folder, so that no dependency is compiled
        // again.
        command.env("CARGO_TARGET_DIR", &metadata.target_directory);
        command.env("CARGO_PROFILE_DEV_DEBUG", "false").env_remove("CUDARC_CUDA_VERSION");
        command
    };

    let user = folder.join("user");
    let version = &published["peerlane"];
    fs::write(user.join("Cargo.toml"), manifest(version))?;
    fs::write(user.join("src/main.rs"), program()?)?;
    fs::write(user.join("tests/gpu.rs"), GPU_TEST)?;
    fs::copy(metadata.workspace_root.join("Cargo.lock"), user.join("Cargo.lock"))?;
    process::run(&mut in_folder(user.clone(), "run"))?;
    // The test is not built: cargo would write the shared library of the driver in place of that of
    // this workspace.
    process::run(in_folder(user, "check").args(["--all-features", "--all-targets"]))?;
    process::run(&mut in_folder(unpacked["peerlane-cli"].clone(), "check"))
}

fn manifest(version: &str) -> String {
    format!(
        r#"[package]
name = "user"
edition = "2024"

[features]
all = ["dep:cudarc", "peerlane/cuda", "peerlane/cudarc", "peerlane/rocm", "peerlane/rdma", "peerlane/ucx", "peerlane/half"]

[dependencies]
peerlane = "{version}"
cudarc = {{ version = "0.19", optional = true, default-features = false, features = ["std", "driver", "dynamic-loading", "cuda-12080"] }}

[dev-dependencies]
peerlane-simulated-driver = "{version}"

[[test]]
name = "gpu"
required-features = ["all"]
"#
    )
}

/// Returns the example of the README that runs without a launcher, and a function that needs all
/// features.
fn program() -> Outcome<String> {
    let mut blocks = README.split("```rust\n").skip(1).filter_map(|rest| rest.split("```").next());
    let example = blocks.find(|block| block.contains("in_process::run"));
    let example = example.ok_or("README.md has no example with in_process::run")?;

    Ok(format!(
        "{example}
#[cfg(feature = \"all\")]
pub fn registered(
    group: &Group,
    slice: cudarc::driver::CudaSlice<f32>,
) -> Result<peerlane::Buffer<f32>, Error> {{
    use peerlane::RegisterSlice as _;
    // SAFETY: nothing else uses the slice.
    unsafe {{ group.register_slice(slice) }}
}}
"
    ))
}
