//! `cargo xtask test rocm`: the tests of the ROCm backend, and of the bindings below it.
//!
//! The backend runs on AMD GPUs where there are any, on the simulated driver otherwise, or on NVIDIA GPUs
//! by a library that has HIP's symbols over their driver. The bindings are compared with the real
//! libraries and headers of every release that Debian has, which are fetched below `target/rocm`.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use clap::Args;

use super::{CUDA_DEVICE, tests};
use crate::{rocm, workspace};
use peerlane_rxe_vm::process::{self, Outcome, cargo};

/// What the tests of the ROCm backend read: `device` or `simulated`.
const DRIVER: &str = "PEERLANE_TEST_ROCM";
/// What the kernel module amdgpu makes.
const DEVICE: &str = "/dev/kfd";
/// What the loader searches.
const SEARCHED: &str = "LD_LIBRARY_PATH";

/// What is run, and where.
#[derive(Args, Clone, Debug, Default)]
#[group(skip)]
pub(crate) struct Options {
    /// rocm: on NVIDIA GPUs, by HIP's symbols over their driver; simulated ones where there are none.
    #[arg(long, requires = "backend")]
    pub(super) hip_on_cuda: bool,
}

impl Options {
    /// The first option that was given, for backends that have none of them.
    pub(crate) fn given(&self) -> Option<&'static str> {
        self.hip_on_cuda.then_some("--hip-on-cuda")
    }
}

/// On what the tests of the ROCm backend run here.
pub(crate) fn driver() -> &'static str {
    if Path::new(DEVICE).exists() {
        "rocm: tested on the GPUs of this machine"
    } else {
        "rocm: tested on the simulated driver; there is no AMD GPU here"
    }
}

/// Runs the tests.
pub(crate) fn run(require_device: bool, options: &Options) -> Outcome {
    if options.hip_on_cuda {
        return on_cuda(require_device);
    }
    if require_device && !Path::new(DEVICE).exists() {
        return Err(format!("there is no AMD GPU here: {DEVICE} is missing").into());
    }
    println!("{}", driver());
    match rocm::releases() {
        Ok(releases) => {
            let names: Vec<&str> = releases.iter().map(|release| release.name.as_str()).collect();
            println!("rocm: bindings compared with releases {}", names.join(", "));
        }
        Err(error) => println!("note: bindings are not compared with real libraries: {error}"),
    }
    let mut command = cargo(["test", "--no-fail-fast"]);
    for package in ["rocm", "rocm-library", "hip-sys", "hsa-sys", "hip-on-cuda", "simulated-driver"]
    {
        command.args(["--package", &format!("peerlane-{package}")]);
    }
    command.args(["--package", "peerlane-conformance", "--lib", "--test", "rocm*"]);
    if require_device {
        command.env(DRIVER, "device");
    }
    if Path::new(DEVICE).exists() {
        // The waits of one test would hold up the streams of another that share a queue with them.
        command.args(["--", "--test-threads=1"]);
    }
    tests([command])
}

/// The contract and the processes of the backend with HIP's symbols over CUDA's driver. There is no
/// HSA runtime, so engines are streams.
fn on_cuda(require_device: bool) -> Outcome {
    let real = Path::new(CUDA_DEVICE).exists();
    if require_device && !real {
        return Err(format!("there is no NVIDIA GPU here: {CUDA_DEVICE} is missing").into());
    }
    let folder = layer(real)?;
    let below = if real { "the NVIDIA GPUs of this machine" } else { "simulated NVIDIA GPUs" };
    println!("rocm: tested by HIP's symbols over CUDA's, on {below}");
    println!("rocm: other programs: {SEARCHED}={}", folder.display());
    let mut searched = OsString::from(&folder);
    if let Some(before) = std::env::var_os(SEARCHED) {
        searched.push(":");
        searched.push(before);
    }
    let mut command = cargo(["test", "--no-fail-fast", "--package", "peerlane-conformance"]);
    // Not those over SDMA engines, which only the HSA runtime has, real or simulated.
    command.args(["--test", "rocm", "--test", "rocm_processes"]);
    command.env(DRIVER, "device").env(SEARCHED, searched);
    if real {
        command.args(["--", "--test-threads=1"]);
    }
    tests([command])
}

/// A folder with the library that has HIP's symbols, under the name that is looked for first, and, for
/// machines without a GPU, with the simulated driver below it.
fn layer(real: bool) -> Outcome<PathBuf> {
    let target = workspace::members()?.target_directory.into_std_path_buf();
    let mut build = cargo(["build", "--package", "peerlane-hip-on-cuda"]);
    // What is measured is not held up; simulated devices are as the tests build them anyway.
    let built = if real {
        build.arg("--release");
        "release"
    } else {
        build.args(["--package", "peerlane-simulated-driver"]);
        "debug"
    };
    process::run(&mut build)?;
    let folder = target.join(if real { "hip-on-cuda" } else { "hip-on-simulated-cuda" });
    fs::create_dir_all(&folder)?;
    let mut links = vec![("libamdhip64.so.7", "libpeerlane_hip_on_cuda.so")];
    if !real {
        links.push(("libcuda.so.1", "libpeerlane_simulated_driver.so"));
    }
    for (name, library) in links {
        let link = folder.join(name);
        let _ = fs::remove_file(&link);
        symlink(target.join(built).join(library), &link)
            .map_err(|error| format!("{}: {error}", link.display()))?;
    }
    Ok(folder)
}
