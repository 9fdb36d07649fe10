//! Ranks that are processes gather from and into files that they have created and mapped
//! themselves: memfds, files of `/dev/shm`, and huge pages.
//!
//! `cargo xtask test rdma` also runs this program in its virtual machine, which has huge pages.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use peerlane_collectives::bootstrap::environment::Environment;
use peerlane_collectives::bootstrap::tcp::{Hub, TcpBootstrap};
use peerlane_collectives::group::Group;
use peerlane_collectives::plan::Algorithm;
use peerlane_hal::{Deadline, Rank};
use peerlane_host as host;
use peerlane_test_support::not_covered;
use peerlane_tests::processes::{Child, Parent};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::mm::{MapFlags, ProtFlags};

/// The number of elements of a block, which is no multiple of a page.
const LEN: usize = 1501;
/// The pages of an arena, enough for the blocks of three ranks beside an input.
const PAGES: u64 = 16;
const STARTS: u32 = 3;
/// The arenas of huge pages that exist at once: one of each rank.
const HUGE_ARENAS: usize = 3;
/// The folder of the kernel's tmpfs for shared memory.
const SHM: &str = "/dev/shm";

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

/// A file that the rank has created and mapped.
struct Arena {
    file: File,
    base: NonNull<u8>,
    bytes: u64,
    page: u64,
}

impl Arena {
    /// Creates the arena of a rank, a file of this kind.
    fn create(kind: &str) -> Result<Self, String> {
        let memfd = |flags| memfd_create("arena", flags | MemfdFlags::CLOEXEC).map(File::from);
        let file = match kind {
            "memfd" => memfd(MemfdFlags::ALLOW_SEALING),
            "memfd without seals" => memfd(MemfdFlags::empty()),
            "huge" => memfd(MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB),
            "hugetlbfs" => named_file(&huge_folder()?),
            _ => named_file(SHM),
        };
        let file = file.map_err(|error| error.to_string())?;
        let page = match kind {
            "huge" | "hugetlbfs" => rustix::fs::fstatfs(&file).unwrap().f_bsize as u64,
            _ => rustix::param::page_size() as u64,
        };
        let bytes = PAGES * page;
        file.set_len(bytes).map_err(|error| error.to_string())?;

        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes as usize,
                access,
                MapFlags::SHARED,
                &file,
                0,
            )
        };
        let base = base.map_err(|error| error.to_string())?;
        Ok(Self { file, base: NonNull::new(base.cast()).unwrap(), bytes, page })
    }

    fn element(&self, offset: u64, index: usize) -> *mut u32 {
        let begin = offset as usize + index * size_of::<u32>();
        assert!(begin + size_of::<u32>() <= self.bytes as usize, "{begin} is behind the arena");
        self.base.as_ptr().wrapping_add(begin).cast()
    }

    /// Writes the block of a rank at a byte of the arena.
    fn write(&self, offset: u64, rank: u32, step: u32) {
        for index in 0..LEN {
            // SAFETY: inside of the arena, and no operation is open.
            unsafe { self.element(offset, index).write(expected(rank, step, index)) };
        }
    }

    /// Checks the blocks of all ranks from a byte of the arena on.
    fn check(&self, offset: u64, ranks: u32, step: u32) {
        for index in 0..ranks as usize * LEN {
            // SAFETY: inside of the arena, and no operation is open.
            let found = unsafe { self.element(offset, index).read() };
            let rank = (index / LEN) as u32;
            assert_eq!(found, expected(rank, step, index % LEN), "element {index}, step {step}");
        }
    }

    /// Returns how often this process has mapped the file and opened it.
    fn uses(&self) -> (usize, usize) {
        // Files of other devices, such as a library, can have the same inode number.
        let file = self.file.metadata().unwrap();
        let (major, minor) = (rustix::fs::major(file.dev()), rustix::fs::minor(file.dev()));
        let place = format!(" {major:02x}:{minor:02x} {} ", file.ino());
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        let mapped = maps.lines().filter(|line| line.contains(&place)).count();

        let own = fs::read_link(format!("/proc/self/fd/{}", self.file.as_raw_fd())).unwrap();
        let opened = fs::read_dir("/proc/self/fd").unwrap().flatten();
        let opened = opened.filter_map(|entry| fs::metadata(entry.path()).ok());
        let opened = opened.filter(|found| {
            let own = self.file.metadata().unwrap();
            (found.dev(), found.ino()) == (own.dev(), own.ino())
        });
        assert!(mapped > 0, "{}: {maps}", own.display());
        (mapped, opened.count())
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: the range is this mapping, to which nothing refers any more.
        let unmapped =
            unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes as usize) };
        assert_eq!(unmapped, Ok(()));
    }
}

fn expected(rank: u32, step: u32, index: usize) -> u32 {
    (rank + 1) * 1_000_000 + step * 10_000 + index as u32
}

/// Creates a file that has a name until the arena has been registered.
fn named_file(folder: &str) -> rustix::io::Result<File> {
    let path = file_path(folder);
    let created = File::options().read(true).write(true).create_new(true).open(path);
    created.map_err(|error| rustix::io::Errno::from_io_error(&error).unwrap())
}

fn file_path(folder: &str) -> String {
    format!("{folder}/arena-of-a-test-{}", std::process::id())
}

/// Removes the name of the file of this process, if it has one.
fn remove_name() {
    for folder in [SHM.to_owned()].into_iter().chain(huge_folder()) {
        let _ = fs::remove_file(file_path(&folder));
    }
}

/// Returns the folder where a hugetlbfs is mounted.
fn huge_folder() -> Result<String, String> {
    let mounts = fs::read_to_string("/proc/mounts").unwrap();
    let mut fields = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let found = fields.find(|fields| fields[2] == "hugetlbfs");
    found.map(|fields| fields[1].to_owned()).ok_or_else(|| "no hugetlbfs is mounted".to_owned())
}

/// Runs one rank: gathers between buffers, then over a window, and takes the arena back.
#[test]
#[ignore = "started by the other tests of this program"]
fn rank() {
    let parent = Parent::find().expect("started by a test");
    // The harness has begun a line.
    parent.print_line("");
    let (me, ranks): (u32, u32) = (parent.value("RANK").unwrap(), parent.value("RANKS").unwrap());
    let (kind, hub): (String, String) =
        (parent.value("KIND").unwrap(), parent.value("HUB").unwrap());
    let environment = Environment::at_hub(hub, Rank(me), ranks as usize);
    let bootstrap = TcpBootstrap::join(&environment, soon()).unwrap();
    let fabric = host::Fabric::open(Rank(me), ranks as usize).unwrap();
    let mut group = Group::open(bootstrap, fabric).unwrap();

    let arena = Arena::create(&kind).unwrap();
    if parent.value::<String>("CASE").unwrap() == "shortened" {
        parent.print_line(shortened(&mut group, &arena));
        return;
    }
    for algorithm in [Algorithm::Direct, Algorithm::Pull, Algorithm::Ring] {
        gather_between_buffers(&mut group, &arena, algorithm);
    }
    gather_in_window(&mut group, &arena);

    // The arena is the caller's again, which can shorten it if nothing has sealed it.
    assert_eq!(arena.uses(), (1, 1));
    let shortened = arena.file.set_len(0);
    assert_eq!(shortened.is_err(), ["memfd", "huge"].contains(&kind.as_str()), "{shortened:?}");
    group.barrier().unwrap();
    group.close().unwrap();
    parent.print_line("done");
}

/// Gathers from a buffer of the arena's first page into one that begins at its fifth page.
fn gather_between_buffers(group: &mut Group, arena: &Arena, algorithm: Algorithm) {
    let (me, ranks) = (group.rank().0, group.ranks() as u32);
    let place = 4 * arena.page;
    // SAFETY: the file keeps its length until the barrier below, and its bytes are accessed only
    // between starts.
    let input = unsafe { group.register_descriptor::<u32>(&arena.file, 0, LEN) }.unwrap();
    let all = ranks as usize * LEN;
    // SAFETY: as above.
    let output = unsafe { group.register_descriptor::<u32>(&arena.file, place, all) }.unwrap();
    remove_name();

    let builder = group.all_gather(LEN).algorithm(algorithm).input(input).output(output);
    let mut gather = builder.prepare().unwrap();
    for step in 0..STARTS {
        arena.write(0, me, step);
        gather.run().unwrap();
        arena.check(place, ranks, step);
        group.barrier().unwrap();
    }
    drop(gather);
    group.barrier().unwrap();
}

/// Gathers over a window of all pages but the first, and releases it.
fn gather_in_window(group: &mut Group, arena: &Arena) {
    let (me, ranks) = (group.rank().0, group.ranks() as u32);
    let (begin, place) = (arena.page, 2 * LEN);
    let len = (arena.bytes - begin) as usize / size_of::<u32>();
    // SAFETY: the file keeps its length until the window has been released, and its bytes are
    // accessed only between starts.
    let buffer = unsafe { group.register_descriptor::<u32>(&arena.file, begin, len) }.unwrap();
    let window = group.window_over(buffer).unwrap();
    let builder = group.all_gather(LEN).input_from(&window, 1).output_into(&window, place);
    let mut gather = builder.prepare().unwrap();
    let byte = |element: usize| begin + (element * size_of::<u32>()) as u64;
    for step in 0..STARTS {
        arena.write(byte(1), me, step);
        gather.run().unwrap();
        arena.check(byte(place), ranks, step);
        assert_eq!(window.slice(place..place + 1).unwrap()[0], expected(0, step, 0));
        group.barrier().unwrap();
    }
    drop(gather);
    group.release(window).unwrap();
}

/// Prepares an operation whose output on rank 0 was shortened, and returns the error.
fn shortened(group: &mut Group, arena: &Arena) -> String {
    let all = group.ranks() * LEN;
    // SAFETY: nothing accesses the memory, because the operation is refused.
    let output = unsafe { group.register_descriptor::<u32>(&arena.file, 0, all) }.unwrap();
    remove_name();
    if group.rank() == Rank(0) {
        arena.file.set_len(0).unwrap();
    }
    let prepared = group.all_gather(LEN).algorithm(Algorithm::Direct).output(output).prepare();
    prepared.err().map_or_else(|| "prepared".to_owned(), |error| error.to_string())
}

/// Starts the ranks of a case, and returns the line that each prints at its end.
fn run_ranks(ranks: u32, kind: &str, case: &str, ends: &str) -> Vec<String> {
    let hub = Hub::bind("127.0.0.1:0", ranks as usize).unwrap();
    let start = |rank: u32| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--ignored", "--exact", "rank", "--nocapture", "--test-threads=1"]);
        command.env("PEERLANE_TEST_ROLE", "rank");
        for (name, value) in [
            ("RANK", rank.to_string()),
            ("RANKS", ranks.to_string()),
            ("HUB", hub.address().to_string()),
            ("KIND", kind.to_owned()),
            ("CASE", case.to_owned()),
        ] {
            command.env(format!("PEERLANE_TEST_{name}"), value);
        }
        Child::spawn(&format!("rank {rank}, {kind}"), command).unwrap()
    };
    let mut children: Vec<Child> = (0..ranks).map(start).collect();
    let end = |child: &mut Child| {
        loop {
            let line = child.read_line(soon()).unwrap();
            if line.contains(ends) {
                return line;
            }
        }
    };
    children.iter_mut().map(end).collect()
}

fn gather(kind: &str) {
    for ranks in [2, 3] {
        assert_eq!(run_ranks(ranks, kind, "gather", "done"), vec!["done"; ranks as usize]);
    }
}

#[test]
fn memfds_are_inputs_outputs_and_windows() {
    gather("memfd");
    gather("memfd without seals");
}

#[test]
fn files_of_shared_memory_are_inputs_outputs_and_windows() {
    if !Path::new(SHM).is_dir() {
        not_covered("files_of_shared_memory_are_inputs_outputs_and_windows", "no /dev/shm");
        return;
    }
    gather("shm");
}

/// Gathers in arenas of huge pages, or says why there are none.
///
/// One test at a time, because what another one holds is missing between the look and the gather.
fn gather_in_huge_pages(test: &str, kind: &str) {
    static ONE_BY_ONE: Mutex<()> = Mutex::new(());
    let _turn = ONE_BY_ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let create = || {
        let created = Arena::create(kind);
        remove_name();
        created
    };
    let arenas: Vec<_> = (0..HUGE_ARENAS).map(|_| create()).collect();
    match arenas.into_iter().find_map(Result::err) {
        None => gather(kind),
        Some(error) => {
            let pages = HUGE_ARENAS as u64 * PAGES;
            not_covered(test, &format!("the machine has no {pages} huge pages: {error}"));
        }
    }
}

#[test]
fn files_of_huge_pages_are_inputs_outputs_and_windows() {
    gather_in_huge_pages("files_of_huge_pages_are_inputs_outputs_and_windows", "huge");
}

#[test]
fn files_of_huge_pages_can_be_of_a_mounted_file_system() {
    gather_in_huge_pages("files_of_huge_pages_can_be_of_a_mounted_file_system", "hugetlbfs");
}

#[test]
fn a_file_that_was_shortened_is_refused() {
    let lines = run_ranks(2, "memfd without seals", "shortened", "cannot import");
    let expected = format!(
        "cannot import the output of rank 0: connection to rank 0 lost: the peer sent a file of \
         0 bytes, expected at least {} bytes, which its owner has promised to keep",
        2 * LEN * size_of::<u32>()
    );
    assert!(lines[1].contains(&expected), "{lines:?}");
}
