//! `cargo xtask test rocm`: runs the tests of the ROCm backend and of its bindings.
//!
//! The backend runs on AMD GPUs if there are any, else on the simulated driver, or on NVIDIA GPUs through a library
//! that has HIP's symbols over their driver. The bindings are compared with the libraries and headers of every
//! release in Debian, which are fetched below `target/rocm`.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

use clap::Args;

use super::{CUDA, Gpu, at_once, programs, run_programs};
use crate::{rocm, workspace};
use peerlane_rxe_vm::process::{self, Outcome, cargo};

/// The packages include the bindings and the library that runs them on CUDA.
pub(super) const ROCM: Gpu = Gpu {
    backend: "rocm",
    vendor: "AMD",
    device: "/dev/kfd",
    driver: "PEERLANE_TEST_ROCM",
    packages: &["rocm", "rocm-library", "hip-sys", "hsa-sys", "hip-on-cuda", "simulated-driver"],
    programs: &["simulated", "sdma", "releases", "layer", "backend", "driver", "rocm*"],
};
/// The variable with the folders that the loader searches.
const SEARCHED: &str = "LD_LIBRARY_PATH";

/// Options of `cargo xtask test rocm`.
#[derive(Args, Debug)]
pub(super) struct Options {
    /// Fail if there is no GPU; without it, a simulated driver replaces a missing GPU.
    #[arg(long)]
    require_device: bool,
    /// Run on NVIDIA GPUs, with HIP's symbols over their driver; simulated ones if there are none.
    #[arg(long)]
    hip_on_cuda: bool,
}

/// Runs the tests.
pub(super) fn run(options: &Options) -> Outcome {
    let require_device = options.require_device;
    if options.hip_on_cuda {
        return on_cuda(require_device);
    }
    ROCM.check(require_device)?;
    match rocm::releases() {
        Ok(releases) => {
            let names: Vec<&str> = releases.iter().map(|release| release.name.as_str()).collect();
            println!("rocm: bindings compared with releases {}", names.join(", "));
        }
        Err(error) => println!("note: bindings are not compared with real libraries: {error}"),
    }
    ROCM.test(require_device)
}

/// Runs the contract and the processes with HIP's symbols over CUDA's driver. Engines are streams, because there is
/// no HSA runtime.
fn on_cuda(require_device: bool) -> Outcome {
    CUDA.check(require_device)?;
    let real = CUDA.exists();
    let folder = layer(real)?;
    let below = if real { "the NVIDIA GPUs of this machine" } else { "simulated NVIDIA GPUs" };
    println!("rocm: tested by HIP's symbols over CUDA's, on {below}");
    println!("rocm: other programs: {SEARCHED}={}", folder.display());
    let mut searched = OsString::from(&folder);
    if let Some(before) = std::env::var_os(SEARCHED) {
        searched.push(":");
        searched.push(before);
    }
    let mut command = cargo(["test", "--package", "peerlane-tests"]);
    // Not those over SDMA engines, which need a real or simulated HSA runtime.
    command.args(["--test", "rocm", "--test", "rocm_ranks"]);
    command.env(ROCM.driver, "device").env(SEARCHED, searched);
    // Faults are described in the terms of AMD's runtime.
    command.args(["--", "--skip", "::faults::"]);
    run_programs(programs([command])?, if real { 1 } else { at_once() })
}

/// Returns a folder with the library that has HIP's symbols, under the name that the backend looks for first.
/// On machines without a GPU the folder also has the simulated driver.
fn layer(real: bool) -> Outcome<PathBuf> {
    let target = workspace::members()?.target_directory.into_std_path_buf();
    // Optimised for measurements on real GPUs; otherwise as the tests build it.
    let (profile, built, folder) = match real {
        true => ("release", "release", "hip-on-cuda"),
        false => ("dev", "debug", "hip-on-simulated-cuda"),
    };
    let mut libraries = vec![("libamdhip64.so.7", "hip-on-cuda")];
    if !real {
        libraries.push(("libcuda.so.1", "simulated-driver"));
    }
    let mut build = cargo(["build", "--profile", profile]);
    build.args(libraries.iter().map(|(_, package)| format!("--package=peerlane-{package}")));
    process::run(&mut build)?;
    let folder = target.join(folder);
    fs::create_dir_all(&folder)?;
    for (name, package) in libraries {
        let library = format!("libpeerlane_{}.so", package.replace('-', "_"));
        let link = folder.join(name);
        let _ = fs::remove_file(&link);
        symlink(target.join(built).join(library), &link)
            .map_err(|error| format!("{}: {error}", link.display()))?;
    }
    Ok(folder)
}
