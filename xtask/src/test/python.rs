//! `cargo xtask test python`: checks the Python code, builds the wheel of the package, and tests it
//! as installed.
//!
//! `cargo xtask wheel` builds the wheel alone. The tools are in virtual environments below
//! `target/`, so that nothing is installed.

use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;

use crate::deps::Verdict;
use crate::workspace;
use peerlane_rxe_vm::process::{self, Outcome};

/// Options of `cargo xtask test python`.
#[derive(Args, Debug, Default)]
pub(crate) struct Options {
    /// Also run the tests with PyTorch on the CPU; its packages take 6 GB below target/.
    #[arg(long)]
    torch: bool,
}

/// The packages that the checks need.
const TOOLS: [&str; 5] = ["maturin>=1.9,<2", "ruff>=0.9", "numpy", "pytest", "hypothesis"];
/// The packages that link against an older libc than that of this machine.
const LINKER: [&str; 2] = ["ziglang", "cargo-zigbuild"];
/// The oldest glibc on which a wheel runs: that of RHEL 8 and Debian 10.
const LIBC: &str = "2.28";
/// PyTorch in the version whose FSDP2 the tests were written for.
const TORCH: [&str; 3] = ["torch==2.11.0", "numpy", "pytest"];
const PYTHON: &str = "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))";

/// Runs the checks and tests.
pub(super) fn run(options: &Options) -> Outcome {
    let folders = Folders::new()?;
    let tools = folders.environment("tools", &TOOLS)?;
    let program = workspace::build_program(&folders.root_target, false)?;
    let wheel = folders.check_and_test(&tools, &program)?;
    if options.torch {
        let torch = folders.environment("torch", &TORCH)?;
        folders.test(&torch, &wheel, &["tests/with_torch"])?;
    }
    Ok(())
}

/// Runs the checks and tests for the gate, or says what is missing for them. The program in the
/// wheel is that of all tests, which run at the same time.
pub(crate) fn run_if_possible() -> Outcome<Verdict> {
    if !process::answers(Command::new("python3").args(["-c", PYTHON])) {
        return Ok(Verdict::Skipped("it needs Python 3.11 with venv".into()));
    }
    let folders = Folders::new()?;
    match folders.environment("tools", &TOOLS) {
        Ok(tools) => {
            process::run(super::workspace_programs().arg("--no-run"))?;
            let program = folders.root_target.join("debug/peerlane");
            folders.check_and_test(&tools, &program).map(|_wheel| Verdict::Passed)
        }
        Err(error) => Ok(Verdict::Skipped(format!("its tools cannot be installed: {error}"))),
    }
}

/// Builds an optimised wheel for glibc [`LIBC`], and runs its first example in an empty
/// environment.
pub(crate) fn build_wheel() -> Outcome {
    let folders = Folders::new()?;
    let tools = folders.environment("tools", &TOOLS)?;

    let wheel = match folders.environment("linker", &[&TOOLS[..1], &LINKER].concat()) {
        Ok(linker) => folders.wheel_for_old_systems(&linker)?,
        Err(error) => {
            println!(
                "the wheel needs the glibc of this machine or a newer one, because {LINKER:?} cannot be installed: {error}"
            );
            let program = workspace::build_program(&folders.root_target, true)?;
            folders.wheel(&tools, &program, &["--profile", "release"])?
        }
    };

    folders.run_first_page(&wheel)?;
    println!("{}", wheel.display());
    Ok(())
}

struct Folders {
    package: PathBuf,
    target: PathBuf,
    root_target: PathBuf,
}

impl Folders {
    fn new() -> Outcome<Self> {
        let metadata = workspace::members()?;
        let root_target = metadata.target_directory.into_std_path_buf();
        let package = metadata.workspace_root.join("python").into_std_path_buf();
        Ok(Self { package, target: root_target.join("python"), root_target })
    }

    /// Returns the `bin` of a virtual environment with some packages.
    fn environment(&self, name: &str, packages: &[&str]) -> Outcome<PathBuf> {
        let folder = self.target.join(name);
        let programs = folder.join("bin");
        if !programs.join("pip").exists() {
            process::run(Command::new("python3").args(["-m", "venv"]).arg(&folder))?;
        }
        process::run(Command::new(programs.join("pip")).args(["install", "-q"]).args(packages))?;
        Ok(programs)
    }

    /// Runs everything that needs no PyTorch, and returns the wheel.
    fn check_and_test(&self, tools: &Path, program: &Path) -> Outcome<PathBuf> {
        for arguments in [["format", "--check"], ["check", "--quiet"]] {
            let mut ruff = Command::new(tools.join("ruff"));
            process::run(ruff.args(arguments).arg("--no-cache").current_dir(&self.package))?;
        }

        let wheel = self.wheel(tools, program, &["--profile", "dev"])?;
        self.run_first_page(&wheel)?;
        self.test(tools, &wheel, &["tests"])?;
        Ok(wheel)
    }

    /// Builds the wheel with the program `peerlane` in it, and returns its file.
    fn wheel(&self, tools: &Path, program: &Path, options: &[&str]) -> Outcome<PathBuf> {
        let packaged = self.package.join("peerlane/bin/peerlane");
        std::fs::create_dir_all(packaged.parent().expect("it is in a folder"))?;
        std::fs::copy(program, &packaged)?;
        process::run(Command::new("strip").arg(&packaged))?;

        let wheels = self.target.join("wheels");
        if wheels.exists() {
            std::fs::remove_dir_all(&wheels)?;
        }

        let mut maturin = with_programs_of(tools, Command::new(tools.join("maturin")))?;
        maturin.args(["build", "--locked", "--strip", "--out"]).arg(&wheels).args(options);
        maturin.arg("--interpreter").arg(tools.join("python")).current_dir(&self.package);
        process::run(maturin.env("CARGO_TARGET_DIR", &self.root_target))?;

        let wheel = std::fs::read_dir(&wheels)?.next().ok_or("maturin has built no wheel")??;
        Ok(wheel.path())
    }

    /// Builds an optimised wheel that needs [`LIBC`], and returns its file.
    fn wheel_for_old_systems(&self, linker: &Path) -> Outcome<PathBuf> {
        let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
        let with_libc = format!("{target}.{LIBC}");

        let mut build = process::cargo(["zigbuild", "--release", "--package", "peerlane-cli"]);
        build.args(["--target", &with_libc]);
        process::run(&mut with_programs_of(linker, build)?)?;

        let program = self.root_target.join(&target).join("release/peerlane");
        let tag = format!("manylinux_{}", LIBC.replace('.', "_"));
        let options =
            ["--profile", "release", "--zig", "--compatibility", &tag, "--target", &target];
        self.wheel(linker, &program, &options)
    }

    /// Installs the wheel into an empty environment, and runs the first program of its page in the
    /// book.
    fn run_first_page(&self, wheel: &Path) -> Outcome {
        let folder = self.target.join("empty");
        if folder.exists() {
            std::fs::remove_dir_all(&folder)?;
        }
        let wheel = wheel.to_str().ok_or("the path of the wheel is not UTF-8")?;
        let programs = self.environment("empty", &[wheel])?;

        let page = std::fs::read_to_string(self.package.join("../docs/book/uses/python.md"))?;
        let program = page.split("```python\n").nth(1).and_then(|rest| rest.split("```").next());
        let file = folder.join("first.py");
        std::fs::write(&file, program.ok_or("the page has no program")?)?;

        let printed = process::output(Command::new(programs.join("python")).arg(file))?;
        match printed.trim() {
            "[0.0, 1.0, 2.0, 3.0]" => Ok(()),
            other => Err(format!("the first program of the page printed {other}").into()),
        }
    }

    fn test(&self, environment: &Path, wheel: &Path, tests: &[&str]) -> Outcome {
        let mut pip = Command::new(environment.join("pip"));
        process::run(pip.args(["install", "-q", "--force-reinstall", "--no-deps"]).arg(wheel))?;
        // The folder of the package is no place for modules, so that the tests import the installed
        // wheel.
        let mut pytest = Command::new(environment.join("pytest"));
        // Every rank is a process that imports NumPy, half of whose import starts threads for
        // products that no test computes.
        pytest.env("OPENBLAS_NUM_THREADS", "1");
        process::run(pytest.args(tests).current_dir(&self.package))
    }
}

/// Returns a command that finds the programs of an environment first.
fn with_programs_of(programs: &Path, mut command: Command) -> Outcome<Command> {
    let others = std::env::var_os("PATH").unwrap_or_default();
    let all = [programs.to_owned()].into_iter().chain(std::env::split_paths(&others));
    command.env("PATH", std::env::join_paths(all)?);
    Ok(command)
}
