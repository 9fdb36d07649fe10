//! Assembles the guest's root file system.
//!
//! Programs and libraries keep their paths of this machine, so paths compiled into a test stay valid.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cpio::Archive;
use crate::guest;
use crate::kernel::Kernel;
use crate::process::{self, Outcome};
use crate::tools::{GuestFile, Tools};

/// Programs that the guest's script and its jobs call.
const PROGRAMS: [&str; 8] =
    ["ip", "tc", "rdma", "ibv_devinfo", "ib_write_bw", "ib_write_lat", "ib_read_bw", "ib_read_lat"];
/// Libraries that are loaded by name at run time.
const LIBRARIES: [&str; 3] = ["libibverbs.so.1", "librdmacm.so.1", "libibverbs/librxe-rdmav34.so"];
/// File that registers the soft RoCE provider with libibverbs.
const PROVIDER: &str = "etc/libibverbs.d/rxe.driver";

/// A root file system under construction.
#[derive(Default)]
pub(crate) struct Image {
    archive: Archive,
    there: BTreeSet<PathBuf>,
}

impl Image {
    /// Creates a root file system with everything but the script and the programs.
    pub(crate) fn new(tools: &Tools, kernel: &Kernel) -> Outcome<Self> {
        let mut image = Self::default();
        image.folder(Path::new("/dev"));
        image.archive.device("/dev/console", 5, 1);
        image.folder(Path::new("/var"));
        image.archive.link("/var/run", "/run");
        let busybox = tools.program("busybox")?;
        image.file(Path::new("/bin/busybox"), &fs::read(&busybox.file)?);

        // The shell of busybox prefers its own `ip` to the one in the path.
        let shell = tools.program("sh")?;
        image.file(Path::new("/bin/sh"), &fs::read(&shell.file)?);

        let mut found = vec![busybox, shell];
        for name in PROGRAMS {
            found.push(tools.program(name)?);
        }
        for name in LIBRARIES {
            found.push(tools.library(name)?);
        }
        image.files(&found)?;
        image.closure(tools, found.into_iter().map(|found| found.file).collect())?;
        let provider = tools.file(PROVIDER)?;
        image.file(&provider.guest_path, &fs::read(&provider.file)?);
        for module in &kernel.order {
            let file = format!("{module}.ko");
            let content = fs::read(kernel.modules.join(&file))?;
            image.file(&Path::new(guest::MODULES).join(&file), &content);
        }
        Ok(image)
    }

    /// Adds programs of this machine without their debug information.
    pub(crate) fn programs(&mut self, tools: &Tools, programs: &[PathBuf], work: &Path) -> Outcome {
        programs.iter().try_for_each(|program| self.stripped(program, program, work))?;
        self.closure(tools, programs.to_vec())
    }

    /// Adds a program to a directory in the guest's path.
    pub(crate) fn command(&mut self, tools: &Tools, program: &Path, work: &Path) -> Outcome {
        let name = program.file_name().ok_or("a program has a name")?;
        self.stripped(program, &Path::new("/usr/local/bin").join(name), work)?;
        self.closure(tools, vec![program.to_owned()])
    }

    /// Adds files unchanged.
    pub(crate) fn files(&mut self, files: &[GuestFile]) -> Outcome {
        for GuestFile { file, guest_path } in files {
            self.file(guest_path, &fs::read(file)?);
        }
        Ok(())
    }

    fn stripped(&mut self, program: &Path, guest_path: &Path, work: &Path) -> Outcome {
        fs::create_dir_all(work)?;
        let stripped = work.join(format!("stripped-{}", std::process::id()));
        let mut strip = Command::new("strip");
        strip.arg("--strip-debug").arg("-o").args([&stripped, program]);
        let file = if process::answers(&mut strip) { &stripped } else { program };
        let content = fs::read(file).map_err(|error| format!("{}: {error}", file.display()))?;
        self.file(guest_path, &content);
        let _ = fs::remove_file(stripped);
        Ok(())
    }

    /// Adds an empty folder and its parents.
    pub(crate) fn folder(&mut self, path: &Path) {
        if path.parent().is_none() || !self.there.insert(path.to_owned()) {
            return;
        }
        if let Some(parent) = path.parent() {
            self.folder(parent);
        }
        self.archive.folder(&path.to_string_lossy());
    }

    /// Returns the archive, with the script as the first process.
    pub(crate) fn finish(mut self, script: &str) -> Vec<u8> {
        self.file(Path::new("/init"), script.as_bytes());
        self.archive.finish()
    }

    fn closure(&mut self, tools: &Tools, programs: Vec<PathBuf>) -> Outcome {
        self.files(&Vec::from_iter(tools.closure(&programs)?))
    }

    fn file(&mut self, guest_path: &Path, content: &[u8]) {
        if let Some(parent) = guest_path.parent() {
            self.folder(parent);
        }
        if self.there.insert(guest_path.to_owned()) {
            self.archive.file(&guest_path.to_string_lossy(), content);
        }
    }
}
