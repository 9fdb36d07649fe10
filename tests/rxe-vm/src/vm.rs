//! Assembles a virtual machine and boots it.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::console::{Console, End};
use crate::emulator::Emulator;
use crate::guest::{self, Job, Nodes};
use crate::image::Image;
use crate::kernel::Kernel;
use crate::machine;
use crate::packages;
use crate::process::Outcome;
use crate::tools::{self, GuestFile, Tools};

/// A program that a job runs.
#[derive(Debug)]
pub struct Program {
    /// Name of the job.
    pub name: String,
    /// Path of the executable, here and in the guest.
    pub file: PathBuf,
    /// Working directory of the job.
    pub folder: PathBuf,
}

/// The programs and files that a guest gets in addition to its own tools.
#[derive(Debug, Default)]
pub struct Programs {
    /// Test programs.
    pub tests: Vec<Program>,
    /// Programs that the tests start, and libraries that they open.
    pub helpers: Vec<PathBuf>,
    /// Programs that shell commands call by name.
    pub commands: Vec<PathBuf>,
    /// Other files, with their paths in the guest.
    pub files: Vec<GuestFile>,
}

/// A virtual machine that is ready to boot.
#[derive(Debug)]
pub struct Vm {
    emulator: Emulator,
    tools: Tools,
    kernel: Kernel,
    nodes: Nodes,
    folder: PathBuf,
}

/// Result of a boot.
#[derive(Debug)]
pub struct Booted {
    /// Parsed console.
    pub console: Console,
    /// How the emulator ended.
    pub end: End,
    /// Time to assemble the image, in seconds.
    pub image_seconds: f64,
    /// Run time of the guest, in seconds.
    pub guest_seconds: f64,
}

/// Returns the reason if this machine cannot run the virtual machine.
pub fn unavailable() -> Option<&'static str> {
    if cfg!(not(all(target_os = "linux", target_arch = "x86_64"))) {
        Some("the virtual machine is for Linux on x86-64")
    } else if packages::available() {
        None
    } else {
        Some("the virtual machine is put together from packages of Debian; apt-get is missing here")
    }
}

impl Vm {
    /// Fetches missing parts below the target folder. `stock` selects the kernel of the machine's own suite, and the nodes
    /// are reduced to one device if the kernel does not support namespaces.
    ///
    /// # Errors
    /// If a part cannot be fetched.
    pub fn obtain(target: &Path, nodes: Nodes, stock: bool) -> Outcome<Self> {
        let folder = target.join("rdma-vm");
        let emulator = Emulator::obtain(&folder.join("emulator"))?;
        let tools = Tools::obtain(&folder.join("tools"), &tools::NEEDED)?;
        let kept = if stock { "kernel-stock" } else { "kernel" };
        let kernel = Kernel::obtain(&folder.join(kept), stock)?;
        let nodes = if kernel.namespaces() {
            nodes
        } else {
            println!(
                "note: kernel {} has no RDMA device inside a network namespace: one device that \
                 sends to itself stands for all nodes, and the tests of several nodes are skipped; \
                 removing target/rdma-vm looks for a newer kernel",
                kernel.release
            );
            Nodes::Loopback
        };
        Ok(Self { emulator, tools, kernel, nodes, folder })
    }

    /// Returns the nodes that the guest simulates.
    pub fn nodes(&self) -> Nodes {
        self.nodes
    }

    /// Returns the version of QEMU.
    pub fn emulator(&self) -> &str {
        &self.emulator.version
    }

    /// Returns the release of the kernel.
    pub fn kernel(&self) -> &str {
        &self.kernel.release
    }

    /// Returns the folder with the fetched parts.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Boots with these programs, runs the jobs, and copies the console to standard output.
    ///
    /// # Errors
    /// If the guest cannot be assembled or QEMU cannot be started.
    pub fn boot(&self, jobs: &[Job], built: &Programs) -> Outcome<Booted> {
        let begun = Instant::now();
        let image = self.assemble(jobs, built)?;
        let devices = self.nodes.devices().join(", ");
        println!("rdma: QEMU {}, kernel {}, devices {devices}", self.emulator(), self.kernel());
        let assembled = Instant::now();
        let mut booted = machine::boot(&self.emulator, &self.kernel, &image);
        if booted.as_ref().is_ok_and(|(console, _)| console.blames_emulator()) {
            println!("\nnote: the emulator brought the guest's kernel down; once more");
            booted = machine::boot(&self.emulator, &self.kernel, &image);
        }
        fs::remove_file(&image)?;
        let (console, end) = booted?;
        Ok(Booted {
            console,
            end,
            image_seconds: (assembled - begun).as_secs_f64(),
            guest_seconds: assembled.elapsed().as_secs_f64(),
        })
    }

    fn assemble(&self, jobs: &[Job], built: &Programs) -> Outcome<PathBuf> {
        let Self { tools, kernel, folder, .. } = self;
        let mut image = Image::new(tools, kernel)?;
        let tests = built.tests.iter().map(|program| program.file.clone());
        let programs: Vec<PathBuf> = tests.chain(built.helpers.iter().cloned()).collect();
        image.programs(tools, &programs, folder)?;
        for command in &built.commands {
            image.command(tools, command, folder)?;
        }
        image.files(&built.files)?;
        for job in jobs {
            image.folder(Path::new(&job.folder));
        }
        // The name is unique, because several runs can be under way.
        let file = folder.join(format!("image-{}.cpio", std::process::id()));
        fs::write(&file, image.finish(&guest::script(self.nodes, &kernel.order, jobs)))?;
        Ok(file)
    }
}
