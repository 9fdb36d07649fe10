//! A stand-in for NCCL on the simulated driver, for tests of the program.
//!
//! It has the C symbols that the program looks up, checks their arguments and copies the bytes:
//! through a file and with the host in between, so that it cannot be captured. Its times say
//! nothing about NCCL.
//!
//! | variable | effect |
//! | --- | --- |
//! | `PEERLANE_SIM_NCCL_VERSION` | version that it reports |
//! | `PEERLANE_SIM_NCCL_FOLDER` | folder of its files; default: the temporary folder of the system
//! |
//! | `PEERLANE_SIM_NCCL_REFUSES` | `windows`: no memory can be registered as a window |
//! | `PEERLANE_SIM_NCCL_SPOILS` | `bytes`: one byte of each result is wrong |
//! | `PEERLANE_SIM_NCCL_HANGS` | `collectives`: none ends, and an exit handler aborts the process |

#![allow(
    missing_docs,
    missing_debug_implementations,
    clippy::missing_safety_doc,
    clippy::missing_errors_doc,
    reason = "these are the vendor's functions; its header documents them"
)]

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use libloading::Library;

const SUCCESS: c_int = 0;
const UNHANDLED_CUDA_ERROR: c_int = 1;
const SYSTEM_ERROR: c_int = 2;
const INVALID_ARGUMENT: c_int = 4;
const INVALID_USAGE: c_int = 5;

/// Largest number of bytes of a block.
const SLOT_BYTES: u64 = 1 << 20;
/// Offset of the blocks, after one counter for each rank.
const SLOTS_BEGIN: u64 = 1 << 16;
/// Longest wait for the other ranks.
const PATIENCE: Duration = Duration::from_secs(20);

#[repr(C)]
pub struct UniqueId([u8; 128]);

/// The beginning of `ncclConfig_t`, and the policy.
#[repr(C)]
pub struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    _before_policy: [u8; 44],
    policy: c_int,
}

pub struct Comm {
    file: File,
    path: PathBuf,
    rank: u64,
    ranks: u64,
    passed: AtomicU64,
    driver: Library,
}

type Code = Result<(), c_int>;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> c_int {
    let said = std::env::var("PEERLANE_SIM_NCCL_VERSION").ok().and_then(|said| said.parse().ok());
    // SAFETY: the caller passes a valid pointer for the version.
    unsafe { version.write(said.unwrap_or(22809)) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetUniqueId(id: *mut UniqueId) -> c_int {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("peerlane-nccl-{}-{number}", std::process::id());
    let mut bytes = [0; 128];
    bytes[..name.len()].copy_from_slice(name.as_bytes());
    // SAFETY: the caller passes a valid pointer for the id.
    unsafe { id.write(UniqueId(bytes)) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankConfig(
    comm: *mut *mut Comm,
    ranks: c_int,
    id: UniqueId,
    rank: c_int,
    config: *mut Config,
) -> c_int {
    // SAFETY: the caller passes an initialised config.
    let Config { size, magic, version, policy, .. } = unsafe { config.read() };
    let known = size == 80 && magic == 0xcafe_beef && version == 22800 && (0..=2).contains(&policy);
    if !known || !(0..ranks).contains(&rank) {
        return INVALID_ARGUMENT;
    }
    let join = || {
        let name = std::str::from_utf8(&id.0).ok()?.trim_end_matches('\0');
        let path = folder().join(name);
        let mut options = File::options();
        options.create(true).truncate(false).read(true).write(true);
        let file = options.open(&path).ok()?;
        // SAFETY: the simulated driver is made to be loaded, and is already loaded.
        let driver = unsafe { Library::new("libcuda.so.1") }.ok()?;
        let (rank, ranks) = (u64::from(rank.unsigned_abs()), u64::from(ranks.unsigned_abs()));
        Some(Comm { file, path, rank, ranks, passed: AtomicU64::new(0), driver })
    };
    let Some(joined) = join() else { return SYSTEM_ERROR };
    let code = joined.barrier();
    // SAFETY: the caller passes a valid pointer for the communicator.
    unsafe { comm.write(Box::into_raw(Box::new(joined))) };
    result(code)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommDestroy(comm: *mut Comm) -> c_int {
    // SAFETY: the caller passes a communicator of `ncclCommInitRankConfig`.
    let comm = unsafe { Box::from_raw(comm) };
    // All ranks except the first fail to remove the file.
    let _ = std::fs::remove_file(&comm.path);
    SUCCESS
}

/// Exports collectives that only copy. In each, a rank sends a number of blocks and receives some
/// blocks of some ranks, each given by a rank and the index of the block in its input.
macro_rules! copies {
    ($($name:ident($($root:ident)?) = |$comm:ident| ($sent:expr, $received:expr);)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            input: u64,
            output: u64,
            count: usize,
            data_type: c_int,
            $($root: c_int,)?
            comm: *mut Comm,
            stream: *mut c_void,
        ) -> c_int {
            // SAFETY: the caller passes a communicator of `ncclCommInitRankConfig`.
            let $comm = unsafe { &*comm };
            $(let $root = u64::from($root.unsigned_abs());)?
            let (sent, received): (u64, Vec<(u64, u64)>) = ($sent, $received);
            if data_type != 1 || count as u64 * sent > SLOT_BYTES {
                return INVALID_ARGUMENT;
            }
            result($comm.exchange((input, output), (count, sent), &received, stream))
        }
    )*};
}

copies! {
    ncclAllGather() = |comm| (1, (0..comm.ranks).map(|rank| (rank, 0)).collect());
    ncclAlltoAll() = |comm| (comm.ranks, (0..comm.ranks).map(|rank| (rank, comm.rank)).collect());
    ncclBroadcast(root) = |comm| (u64::from(comm.rank == root), vec![(root, 0)]);
    ncclGather(root) = |comm| (1, match comm.rank == root {
        true => (0..comm.ranks).map(|rank| (rank, 0)).collect(),
        false => Vec::new(),
    });
    ncclScatter(root) = |comm| (
        if comm.rank == root { comm.ranks } else { 0 }, vec![(root, comm.rank)]
    );
}

/// Exports calls that this library refuses: it has no arithmetic.
macro_rules! refused {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() -> c_int {
            INVALID_USAGE
        }
    )*};
}

refused! { ncclAllReduce ncclReduceScatter ncclReduce }

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclMemAlloc(address: *mut u64, bytes: usize) -> c_int {
    // SAFETY: as in `ncclCommInitRankConfig`.
    let Ok(driver) = (unsafe { Library::new("libcuda.so.1") }) else { return SYSTEM_ERROR };
    let call = |allocate: unsafe extern "C" fn(*mut u64, usize) -> c_int| {
        // SAFETY: the caller passes a valid pointer for the address.
        unsafe { allocate(address, bytes) }
    };
    result(cuda(&driver, "cuMemAlloc_v2", call))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclMemFree(address: u64) -> c_int {
    // SAFETY: as in `ncclCommInitRankConfig`.
    let Ok(driver) = (unsafe { Library::new("libcuda.so.1") }) else { return SYSTEM_ERROR };
    let call = |free: unsafe extern "C" fn(u64) -> c_int| {
        // SAFETY: the caller passes an address of `ncclMemAlloc`.
        unsafe { free(address) }
    };
    result(cuda(&driver, "cuMemFree_v2", call))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommWindowRegister(
    _comm: *mut Comm,
    address: u64,
    bytes: usize,
    window: *mut u64,
    flags: c_int,
) -> c_int {
    if std::env::var("PEERLANE_SIM_NCCL_REFUSES").is_ok_and(|what| what == "windows") {
        return INVALID_USAGE;
    }
    if address == 0 || bytes == 0 || flags != 1 {
        return INVALID_ARGUMENT;
    }
    // SAFETY: the caller passes a valid pointer for the window.
    unsafe { window.write(address) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommWindowDeregister(_comm: *mut Comm, window: u64) -> c_int {
    if window == 0 { INVALID_ARGUMENT } else { SUCCESS }
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(code: c_int) -> *const c_char {
    match code {
        UNHANDLED_CUDA_ERROR => c"unhandled cuda error",
        SYSTEM_ERROR => c"unhandled system error",
        INVALID_ARGUMENT => c"invalid argument",
        INVALID_USAGE => c"invalid usage",
        _ => c"unknown result code",
    }
    .as_ptr()
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLastError(_comm: *mut Comm) -> *const c_char {
    c"".as_ptr()
}

impl Comm {
    fn exchange(
        &self,
        (input, output): (u64, u64),
        (count, sent): (usize, u64),
        received: &[(u64, u64)],
        stream: *mut c_void,
    ) -> Code {
        if std::env::var("PEERLANE_SIM_NCCL_HANGS").is_ok_and(|what| what == "collectives") {
            hang();
        }
        let synchronize = |synchronize: unsafe extern "C" fn(*mut c_void) -> c_int| {
            // SAFETY: the caller passes a stream of the current context.
            unsafe { synchronize(stream) }
        };
        cuda(&self.driver, "cuStreamSynchronize", synchronize)?;

        let bytes = count * sent as usize;
        let mut blocks = vec![0_u8; bytes];
        let download = |copy: unsafe extern "C" fn(*mut u8, u64, usize) -> c_int| {
            // SAFETY: `blocks` has as many bytes as the caller's input.
            unsafe { copy(blocks.as_mut_ptr(), input, bytes) }
        };
        if bytes > 0 {
            cuda(&self.driver, "cuMemcpyDtoH_v2", download)?;
        }
        let spoils = std::env::var("PEERLANE_SIM_NCCL_SPOILS").is_ok_and(|what| what == "bytes");
        if let Some(byte) = blocks.get_mut(count / 2).filter(|_| spoils) {
            *byte ^= 1;
        }
        let io = |_| SYSTEM_ERROR;
        self.file.write_all_at(&blocks, SLOTS_BEGIN + self.rank * SLOT_BYTES).map_err(io)?;
        self.barrier()?;

        let mut block = vec![0_u8; count];
        for ((rank, index), to) in received.iter().zip((output..).step_by(count.max(1))) {
            let from = SLOTS_BEGIN + rank * SLOT_BYTES + index * count as u64;
            self.file.read_exact_at(&mut block, from).map_err(io)?;
            let upload = |copy: unsafe extern "C" fn(u64, *const u8, usize) -> c_int| {
                // SAFETY: the caller's output has room for all blocks that this rank receives.
                unsafe { copy(to, block.as_ptr(), count) }
            };
            cuda(&self.driver, "cuMemcpyHtoD_v2", upload)?;
        }
        self.barrier()
    }

    /// Waits until all ranks have counted this barrier; each rank counts in its own word.
    fn barrier(&self) -> Code {
        let passed = self.passed.fetch_add(1, Ordering::Relaxed) + 1;
        let io = |_| SYSTEM_ERROR;
        self.file.write_all_at(&passed.to_ne_bytes(), self.rank * 8).map_err(io)?;
        let begun = Instant::now();
        for rank in 0..self.ranks {
            let mut word = [0; 8];
            loop {
                // A word that was never written is after the end of the file.
                let read = self.file.read_exact_at(&mut word, rank * 8);
                if read.is_ok() && u64::from_ne_bytes(word) >= passed {
                    break;
                }
                if begun.elapsed() > PATIENCE {
                    return Err(SYSTEM_ERROR);
                }
                sleep(Duration::from_micros(20));
            }
        }
        Ok(())
    }
}

/// Calls a function of the driver.
fn cuda<F: Copy>(driver: &Library, symbol: &str, call: impl FnOnce(F) -> c_int) -> Code {
    // SAFETY: every caller gives the type of this symbol.
    let function = unsafe { driver.get::<F>(symbol.as_bytes()) }.map_err(|_| SYSTEM_ERROR)?;
    match call(*function) {
        0 => Ok(()),
        _ => Err(UNHANDLED_CUDA_ERROR),
    }
}

unsafe extern "C" {
    fn atexit(handler: extern "C" fn()) -> c_int;
}

fn hang() -> ! {
    extern "C" fn fall() {
        std::process::abort();
    }
    // SAFETY: the handler has no arguments and may be called at any time.
    unsafe { atexit(fall) };
    loop {
        sleep(PATIENCE);
    }
}

fn folder() -> PathBuf {
    std::env::var_os("PEERLANE_SIM_NCCL_FOLDER").map_or_else(std::env::temp_dir, PathBuf::from)
}

fn result(code: Code) -> c_int {
    code.err().unwrap_or(SUCCESS)
}
