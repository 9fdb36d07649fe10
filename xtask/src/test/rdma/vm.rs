//! A virtual machine put together: what it is booted from, and the nodes that it stands for.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::console::{Console, End};
use super::emulator::Emulator;
use super::guest::{self, Job, Nodes};
use super::image::Image;
use super::kernel::Kernel;
use super::machine;
use super::programs::Built;
use super::tools::{self, Tools};
use crate::packages;
use crate::process::Outcome;

/// Everything that a boot needs but the programs.
pub(crate) struct Vm {
    emulator: Emulator,
    tools: Tools,
    kernel: Kernel,
    nodes: Nodes,
    folder: PathBuf,
}

/// How a boot went.
pub(crate) struct Booted {
    pub(crate) console: Console,
    pub(crate) end: End,
    pub(crate) image_seconds: f64,
    pub(crate) guest_seconds: f64,
}

/// Why a virtual machine cannot be had here, if so.
pub(crate) fn lacks() -> Option<&'static str> {
    if cfg!(not(all(target_os = "linux", target_arch = "x86_64"))) {
        Some("the virtual machine is for Linux on x86-64")
    } else if packages::available() {
        None
    } else {
        Some("the virtual machine is put together from packages of Debian; apt-get is missing here")
    }
}

impl Vm {
    /// Takes what is missing below the target folder, for these nodes if the kernel can; `stock` takes
    /// the distribution's own kernel.
    pub(crate) fn obtain(target: &Path, nodes: Nodes, stock: bool) -> Outcome<Self> {
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

    /// The nodes that it stands for.
    pub(crate) fn nodes(&self) -> Nodes {
        self.nodes
    }

    /// The version of what runs it.
    pub(crate) fn emulator(&self) -> &str {
        &self.emulator.version
    }

    /// The release of its kernel.
    pub(crate) fn kernel(&self) -> &str {
        &self.kernel.release
    }

    /// Where what the machine needs is kept.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Boots with these programs, runs the jobs, and passes the console on.
    pub(crate) fn boot(&self, jobs: &[Job], built: &Built) -> Outcome<Booted> {
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

    fn assemble(&self, jobs: &[Job], built: &Built) -> Outcome<PathBuf> {
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
        // Of this run alone: another may be under way.
        let file = folder.join(format!("image-{}.cpio", std::process::id()));
        fs::write(&file, image.finish(&guest::script(self.nodes, &kernel.order, jobs)))?;
        Ok(file)
    }
}
