//! `cargo xtask kernels`: generates the PTX of the CUDA kernels from their source.
//!
//! The PTX is in the tree, so that neither users nor the gate need nvcc. It states an old version and target, so that drivers since
//! CUDA 9 and devices since compute capability 7.0 accept it; newer compilers no longer generate such PTX. The kernels use no
//! instruction that is newer, which the compiler in the driver checks when it loads them.
//!
//! With `--hip`, the same sources are compiled for AMD GPUs, and nothing is written to the tree (docs/ROCM.md).

use std::path::{Path, PathBuf};
use std::process::Command;

use peerlane_rxe_vm::process::{self, Outcome};

use crate::workspace;

/// The directory of the sources and of the PTX, from the root of the workspace.
const DIRECTORY: &str = "backend-cuda/kernels";
/// The names of the kernel files, without the endings `.cu` and `.ptx`.
pub(crate) const NAMES: [&str; 2] = ["reduce", "start"];

/// Writes the PTX that nvcc generates, or that it has generated on another machine into files of
/// the same names in the directory `from`.
pub(crate) fn run(from: Option<&Path>) -> Outcome {
    let metadata = workspace::members()?;
    let root = metadata.workspace_root.as_std_path();
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap_or_default();

    for name in NAMES {
        let output = format!("{name}.ptx");
        let generated = match from {
            Some(directory) => directory.join(output),
            None => {
                generate(root, name, &metadata.target_directory.join(output).into_std_path_buf())?
            }
        };
        let body = body(&std::fs::read_to_string(generated)?);

        let ptx = ptx_path(name);
        std::fs::write(root.join(&ptx), format!("{}\n{body}", header(&source(name, read), &body)))?;
        println!("{ptx}: generated from {}", source_path(name));
    }
    Ok(())
}

/// Calls nvcc, and returns the file that it has written.
fn generate(root: &Path, name: &str, output: &Path) -> Outcome<PathBuf> {
    let mut nvcc = Command::new("nvcc");
    nvcc.args(["-ptx", "-O3", "-arch=compute_75", "-o"]).arg(output);
    process::run(nvcc.arg(root.join(source_path(name))))?;
    Ok(output.to_owned())
}

/// The AMD GPUs for which sources are compiled. The last one has waves of 32 threads.
const HIP_TARGETS: [&str; 3] = ["gfx90a", "gfx942", "gfx1100"];
/// The compilers that can be used, in the order of choice. Older ones do not know all targets.
const HIP_COMPILERS: [&str; 4] = ["clang++-19", "clang++-20", "clang++-21", "clang++"];
/// The device libraries that HIP's headers call for the kernels, as far as a release has them.
/// The compiler is not left to choose, because it wants a library for each target, and the releases
/// of some distributions are older than the targets.
const HIP_LIBRARIES: [&str; 3] = ["hip.bc", "ockl.bc", "oclc_abi_version_500.bc"];

/// Compiles the sources as HIP, and prints what the kernels need of a GPU.
pub(crate) fn compile_hip() -> Outcome {
    let metadata = workspace::members()?;
    let root = metadata.workspace_root.as_std_path();
    let outputs = metadata.target_directory.join("hip").into_std_path_buf();
    std::fs::create_dir_all(&outputs)?;
    let tools = HipTools::find()?;

    for (target, name) in HIP_TARGETS.into_iter().flat_map(|it| NAMES.map(|name| (it, name))) {
        let mut clang = tools.command(target);
        clang.arg("-o").arg(outputs.join(format!("{name}.{target}.co")));
        clang.arg(root.join(source_path(name)));
        let output = clang.output()?;
        let printed = String::from_utf8_lossy(&output.stderr);
        if !output.status.success() {
            let (line, status) = (process::line(&clang), output.status);
            return Err(format!("{line} failed: {status}\n{printed}").into());
        }
        println!("{} for {target}: {}", source_path(name), usage(&printed));
    }
    Ok(())
}

/// The compiler for AMD GPUs, and the files of ROCm that it needs.
struct HipTools {
    compiler: &'static str,
    rocm: PathBuf,
    libraries: Vec<PathBuf>,
}

impl HipTools {
    /// Finds ROCm in `$ROCM_PATH` or where Debian's packages install it.
    fn find() -> Outcome<Self> {
        let rocm = PathBuf::from(std::env::var_os("ROCM_PATH").unwrap_or_else(|| "/usr".into()));
        let answers = |name: &&str| process::answers(Command::new(name).arg("--version"));
        let compiler = HIP_COMPILERS.into_iter().find(answers);
        let linker = |compiler: &str| {
            let path = process::output(Command::new(compiler).arg("-print-prog-name=lld"));
            path.is_ok_and(|path| Path::new(path.trim()).is_absolute())
        };

        let folders = ["amdgcn/bitcode", "lib/x86_64-linux-gnu/amdgcn/bitcode"];
        let of_folders = folders.iter().flat_map(|folder| HIP_LIBRARIES.map(|it| (folder, it)));
        let paths = of_folders.map(|(folder, name)| rocm.join(folder).join(name));
        let libraries: Vec<_> = paths.filter(|path| path.exists()).collect();
        let needs = [
            (compiler.is_some(), "clang"),
            (compiler.is_some_and(linker), "lld of the same version"),
            (rocm.join("include/hip/hip_runtime.h").exists(), "HIP's headers"),
            (!libraries.is_empty(), "ROCm's device libraries"),
        ];
        let missing: Vec<_> = needs.iter().filter(|(there, _)| !there).map(|it| it.1).collect();
        match compiler {
            Some(compiler) if missing.is_empty() => Ok(Self { compiler, rocm, libraries }),
            _ => Err(format!(
                "the kernels cannot be compiled as HIP without {} (ROCm is searched in {}). On \
                 Debian: apt-get install clang-19 lld-19 libamdhip64-dev rocm-device-libs",
                missing.join(", "),
                rocm.display()
            )
            .into()),
        }
    }

    /// Returns a command that compiles a source for a target.
    fn command(&self, target: &str) -> Command {
        let mut clang = Command::new(self.compiler);
        clang.args(["-x", "hip", "-std=c++17", "-O3", "-Wall", "-Werror"]);
        // The kernels load vectors of elements as vectors of 16 bytes.
        clang.arg("-fno-strict-aliasing");
        clang.args(["--offload-device-only", "--no-gpu-bundle-output", "-nogpulib"]);
        clang.arg(format!("--offload-arch={target}"));
        clang.arg(format!("--rocm-path={}", self.rocm.display()));
        for library in &self.libraries {
            clang.args(["-Xclang", "-mlink-builtin-bitcode", "-Xclang"]).arg(library);
        }
        clang.arg("-Rpass-analysis=kernel-resource-usage");
        clang
    }
}

/// Returns what the kernels need, from the remarks that the compiler prints for each of them.
fn usage(remarks: &str) -> String {
    let values = |wanted: &str| -> Vec<&str> {
        let lines =
            remarks.lines().filter_map(|line| line.split_once("remark:")?.1.split_once(':'));
        let named = lines.filter(|(name, _)| name.trim().trim_start_matches("Total") == wanted);
        named.filter_map(|(_, rest)| rest.split_whitespace().next()).collect()
    };
    let most = |name: &str| -> u32 {
        // Each kernel has a line of its own.
        values(name).iter().filter_map(|value| value.parse().ok()).max().unwrap_or(0)
    };
    format!(
        "{} kernels with at most {} SGPRs, {} VGPRs and {} bytes of scratch",
        values("Function Name").len(),
        most("SGPRs"),
        most("VGPRs"),
        most("ScratchSize [bytes/lane]")
    )
}

/// Returns the path of the source of this name from the root of the workspace.
fn source_path(name: &str) -> String {
    format!("{DIRECTORY}/{name}.cu")
}

/// Returns the path of the PTX of this name from the root of the workspace.
pub(crate) fn ptx_path(name: &str) -> String {
    format!("{DIRECTORY}/{name}.ptx")
}

/// Returns a source with the headers of [`DIRECTORY`] behind it that it or one of them includes,
/// since a change of a header changes the PTX as well. `read` returns the text of a file.
pub(crate) fn source(name: &str, read: impl Fn(&str) -> String) -> String {
    let mut paths = vec![source_path(name)];
    let mut text = String::new();
    let mut next = 0;

    // Headers are read after the files that include them, each once.
    while let Some(path) = paths.get(next) {
        let file = read(path);
        let headers = file.lines().filter_map(|line| {
            let header = line.strip_prefix("#include \"")?.strip_suffix('"')?;
            Some(format!("{DIRECTORY}/{header}"))
        });

        for header in headers {
            if !paths.contains(&header) {
                paths.push(header);
            }
        }
        text += &file;
        next += 1;
    }
    text
}

/// Returns why the PTX in the tree is not that of the [`source`], or `None` if it is.
pub(crate) fn stale(source: &str, ptx: &str) -> Option<&'static str> {
    let (first, body) = ptx.split_once('\n').unwrap_or_default();
    (first != header(source, body))
        .then_some("the first line does not name the hashes of this source and of this PTX")
}

fn header(source: &str, body: &str) -> String {
    let (source, body) = (hash(source), hash(body));
    format!("// Generated by `cargo xtask kernels`: source {source:016x}, PTX {body:016x}")
}

/// Returns PTX without comments and indentation, for the oldest version and target.
fn body(generated: &str) -> String {
    let lines = generated.lines().filter_map(|line| {
        let line = line.split("//").next().unwrap_or_default().trim();
        Some(match line.split_whitespace().next()? {
            ".version" => ".version 6.0\n".to_owned(),
            ".target" => ".target sm_70\n".to_owned(),
            _ => line.split_whitespace().collect::<Vec<_>>().join(" ") + "\n",
        })
    });
    lines.collect()
}

/// Returns the 64-bit FNV-1a hash of a text.
fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ptx_is_shortened_and_its_hashes_are_compared() {
        let generated = "//\n.version 9.0\n.target sm_75\n\n\tadd.s32 \t%r1, %r2, 1; // one\n";
        let body = body(generated);
        assert_eq!(body, ".version 6.0\n.target sm_70\nadd.s32 %r1, %r2, 1;\n");
        let ptx = format!("{}\n{body}", header("source", &body));
        assert_eq!(stale("source", &ptx), None);
        assert!(stale("other source", &ptx).is_some());
        assert!(stale("source", &ptx.replace("%r1", "%r3")).is_some());
        assert!(stale("source", "").is_some());
    }
    #[test]
    fn headers_of_the_directory_belong_to_a_source() {
        let read = |path: &str| match path {
            "backend-cuda/kernels/reduce.cu" => "#include <cmath>\n#include \"a.cuh\"\n".to_owned(),
            "backend-cuda/kernels/a.cuh" => "int a;\n".to_owned(),
            _ => unreachable!("{path} is not included"),
        };
        assert_eq!(source("reduce", read), "#include <cmath>\n#include \"a.cuh\"\nint a;\n");
    }
    #[test]
    fn headers_of_headers_belong_to_a_source_once() {
        let read = |path: &str| match path.rsplit('/').next() {
            Some("start.cu") => "#include \"a.cuh\"\n#include \"b.cuh\"\n".to_owned(),
            Some("a.cuh") => "#include \"b.cuh\"\nint a;\n".to_owned(),
            Some("b.cuh") => "int b;\n".to_owned(),
            _ => unreachable!("{path} is not included"),
        };
        let expected =
            "#include \"a.cuh\"\n#include \"b.cuh\"\n#include \"b.cuh\"\nint a;\nint b;\n";
        assert_eq!(source("start", read), expected);
    }
    #[test]
    fn remarks_say_what_kernels_need() {
        let kernel = |name: &str, sgprs: &str, vgprs: u32, scratch: u32| {
            format!(
                "start.cu:1:1: remark: Function Name: {name} [-Rpass]\n\
                 start.cu:1:1: remark:     {sgprs}: 100 [-Rpass]\n\
                 start.cu:1:1: remark:     VGPRs: {vgprs} [-Rpass]\n\
                 start.cu:1:1: remark:     VGPRs Spill: 200 [-Rpass]\n\
                 start.cu:1:1: remark:     ScratchSize [bytes/lane]: {scratch} [-Rpass]\n"
            )
        };
        let remarks = kernel("a", "SGPRs", 64, 16) + &kernel("b", "TotalSGPRs", 70, 0);
        let expected = "2 kernels with at most 100 SGPRs, 70 VGPRs and 16 bytes of scratch";
        assert_eq!(usage(&remarks), expected);
    }
}
