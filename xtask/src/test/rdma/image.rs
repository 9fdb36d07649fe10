//! The guest's root file system.
//!
//! Programs and libraries lie where they lie on this machine, so paths that are compiled into a
//! test still lead to its programs.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::cpio::Archive;
use super::guest;
use super::kernel::Kernel;
use super::tools::{Found, Tools};
use crate::process::{self, Outcome};

/// What the guest's script and its jobs call.
const PROGRAMS: [&str; 8] =
    ["ip", "tc", "rdma", "ibv_devinfo", "ib_write_bw", "ib_write_lat", "ib_read_bw", "ib_read_lat"];
/// What is opened by name at run time.
const LIBRARIES: [&str; 3] = ["libibverbs.so.1", "librdmacm.so.1", "libibverbs/librxe-rdmav34.so"];
/// What tells libibverbs which providers there are.
const PROVIDER: &str = "etc/libibverbs.d/rxe.driver";

/// Files in their places, and the folders above them.
#[derive(Default)]
pub(super) struct Image {
    archive: Archive,
    there: BTreeSet<PathBuf>,
}

impl Image {
    /// A root file system with everything but the script.
    pub(super) fn new(tools: &Tools, kernel: &Kernel) -> Outcome<Self> {
        let mut image = Self::default();
        image.folder(Path::new("/dev"));
        image.archive.device("/dev/console", 5, 1);
        image.folder(Path::new("/var"));
        image.archive.link("/var/run", "/run");
        let busybox = tools.program("busybox")?;
        image.file(Path::new("/bin/busybox"), &fs::read(&busybox.file)?);

        // The shell of busybox prefers its own `ip` to the one on the path.
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
        image.file(&provider.place, &fs::read(&provider.file)?);
        for module in &kernel.order {
            let file = format!("{module}.ko");
            let content = fs::read(kernel.modules.join(&file))?;
            image.file(&Path::new(guest::MODULES).join(&file), &content);
        }
        Ok(image)
    }

    /// Adds programs of this machine, without what only a debugger reads.
    pub(super) fn programs(&mut self, tools: &Tools, programs: &[PathBuf], work: &Path) -> Outcome {
        programs.iter().try_for_each(|program| self.stripped(program, program, work))?;
        self.closure(tools, programs.to_vec())
    }

    /// Adds a program where the guest's shell finds it by its name.
    pub(super) fn command(&mut self, tools: &Tools, program: &Path, work: &Path) -> Outcome {
        let name = program.file_name().ok_or("a program has a name")?;
        self.stripped(program, &Path::new("/usr/local/bin").join(name), work)?;
        self.closure(tools, vec![program.to_owned()])
    }

    /// Adds files as they are.
    pub(super) fn files(&mut self, files: &[Found]) -> Outcome {
        for Found { file, place } in files {
            self.file(place, &fs::read(file)?);
        }
        Ok(())
    }

    fn stripped(&mut self, program: &Path, place: &Path, work: &Path) -> Outcome {
        fs::create_dir_all(work)?;
        let stripped = work.join(format!("stripped-{}", std::process::id()));
        let mut strip = Command::new("strip");
        strip.arg("--strip-debug").arg("-o").args([&stripped, program]);
        let file = if process::answers(&mut strip) { &stripped } else { program };
        let content = fs::read(file).map_err(|error| format!("{}: {error}", file.display()))?;
        self.file(place, &content);
        let _ = fs::remove_file(stripped);
        Ok(())
    }

    /// Adds an empty folder, and those above it.
    pub(super) fn folder(&mut self, path: &Path) {
        if path.parent().is_none() || !self.there.insert(path.to_owned()) {
            return;
        }
        if let Some(parent) = path.parent() {
            self.folder(parent);
        }
        self.archive.folder(&path.to_string_lossy());
    }

    /// The whole, with this script as the first process.
    pub(super) fn finish(mut self, script: &str) -> Vec<u8> {
        self.file(Path::new("/init"), script.as_bytes());
        self.archive.finish()
    }

    fn closure(&mut self, tools: &Tools, programs: Vec<PathBuf>) -> Outcome {
        self.files(&Vec::from_iter(tools.closure(&programs)?))
    }

    fn file(&mut self, place: &Path, content: &[u8]) {
        if let Some(parent) = place.parent() {
            self.folder(parent);
        }
        if self.there.insert(place.to_owned()) {
            self.archive.file(&place.to_string_lossy(), content);
        }
    }
}
