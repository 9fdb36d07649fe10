//! Calls the driver as its users do: symbols of `libcuda.so.1`, results as numbers.

use std::ffi::{CString, c_int, c_void};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

pub(crate) mod graph;
pub(crate) mod hip;
pub(crate) mod hsa;
pub(crate) mod vmm;

pub(crate) use peerlane_simulated_driver::Driver;
use peerlane_simulated_driver::install_all;

/// `Err` holds the driver's code.
pub(crate) type Answer<T = ()> = Result<T, c_int>;

/// The address of a symbol in whatever `libcuda.so.1` is now.
pub(crate) fn symbol(name: &str) -> *mut c_void {
    c_symbol("libcuda.so.1", name)
}

/// The address of a symbol in whatever this library is now.
pub(crate) fn c_symbol(library: &str, name: &str) -> *mut c_void {
    let text = CString::new(library).expect("no zero");
    // SAFETY: the library was installed before, so that this only finds it.
    let found = unsafe { libc::dlopen(text.as_ptr(), libc::RTLD_NOW) };
    assert!(!found.is_null(), "{library} is not installed");
    let name = CString::new(name).expect("no zero");
    // SAFETY: the library stays loaded.
    unsafe { libc::dlsym(found, name.as_ptr()) }
}

/// Calls what a function such as [`symbol`] finds.
macro_rules! call {
    ($find:path, $name:ident($($argument:expr => $type:ty),* $(,)?)) => {{
        let symbol = $find(stringify!($name));
        assert!(!symbol.is_null(), "there is no {}", stringify!($name));
        // SAFETY: this is the declaration of the function in the vendor's header.
        let call = unsafe {
            std::mem::transmute::<*mut std::ffi::c_void, extern "C" fn($($type),*) -> std::ffi::c_int>(symbol)
        };
        match call($($argument),*) {
            0 => Ok(()),
            code => Err(code),
        }
    }};
}
pub(crate) use call;

/// Calls a symbol: `cuda!(cuInit(0 => u32))`.
macro_rules! cuda {
    ($name:ident($($argument:expr => $type:ty),* $(,)?)) => {
        crate::api::call!(crate::api::symbol, $name($($argument => $type),*))
    };
}
pub(crate) use cuda;

/// The driver, while no other test of this program uses it: settings and counters are of the whole
/// process.
#[must_use]
pub(crate) struct Alone {
    driver: Driver,
    _lock: MutexGuard<'static, ()>,
}

impl std::ops::Deref for Alone {
    type Target = Driver;

    fn deref(&self) -> &Driver {
        &self.driver
    }
}

/// Starts the driver on a machine of six devices with small units of virtual memory. Waits until no other test of
/// this program uses it.
pub(crate) fn start() -> Alone {
    static LOCK: Mutex<()> = Mutex::new(());
    static START: Once = Once::new();
    let lock = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    let driver = Alone { driver: install_all(), _lock: lock };
    START.call_once(|| {
        driver.set("GRANULARITY_KIB", "64");
        driver.set("PATIENCE_MS", "20000");
        driver.set("DEVICES", "6");
        cuda!(cuInit(0 => u32)).expect("the simulated driver starts");
    });
    driver
}

/// Retains the primary context of a device and makes it current here.
pub(crate) fn use_device(device: i32) -> usize {
    let mut context = 0;
    cuda!(cuDevicePrimaryCtxRetain(&mut context => &mut usize, device => c_int)).unwrap();
    cuda!(cuCtxSetCurrent(context => usize)).unwrap();
    context
}

pub(crate) fn alloc(bytes: usize) -> Answer<u64> {
    let mut address = 0;
    cuda!(cuMemAlloc_v2(&mut address => &mut u64, bytes => usize)).map(|()| address)
}

pub(crate) fn free(address: u64) -> Answer {
    cuda!(cuMemFree_v2(address => u64))
}

pub(crate) fn new_stream() -> usize {
    let mut stream = 0;
    cuda!(cuStreamCreate(&mut stream => &mut usize, 1 => u32)).unwrap();
    stream
}

pub(crate) fn sync(stream: usize) -> Answer {
    cuda!(cuStreamSynchronize(stream => usize))
}

pub(crate) fn query(stream: usize) -> Answer {
    cuda!(cuStreamQuery(stream => usize))
}

pub(crate) fn copy(dst: u64, src: u64, bytes: usize, stream: usize) -> Answer {
    cuda!(cuMemcpyDtoDAsync_v2(dst => u64, src => u64, bytes => usize, stream => usize))
}

pub(crate) fn upload(dst: u64, bytes: &[u8], stream: usize) -> Answer {
    cuda!(cuMemcpyHtoDAsync_v2(
        dst => u64, bytes.as_ptr() => *const u8, bytes.len() => usize, stream => usize,
    ))
}

pub(crate) fn download(src: u64, bytes: usize, stream: usize) -> Answer<Vec<u8>> {
    let mut found = vec![0; bytes];
    cuda!(cuMemcpyDtoHAsync_v2(
        found.as_mut_ptr() => *mut u8, src => u64, bytes => usize, stream => usize,
    ))?;
    sync(stream)?;
    Ok(found)
}

pub(crate) fn fill(address: u64, byte: u8, bytes: usize, stream: usize) -> Answer {
    cuda!(cuMemsetD8Async(address => u64, byte => u8, bytes => usize, stream => usize))
}

/// New memory of zeros, there when this returns.
pub(crate) fn zeros(bytes: usize) -> u64 {
    let (memory, stream) = (alloc(bytes).unwrap(), new_stream());
    fill(memory, 0, bytes, stream).unwrap();
    sync(stream).unwrap();
    memory
}

pub(crate) fn write_word(stream: usize, address: u64, value: u64) -> Answer {
    cuda!(cuStreamWriteValue64_v2(stream => usize, address => u64, value => u64, 0 => u32))
}

/// Waits for at least the value.
pub(crate) fn wait_word(stream: usize, address: u64, value: u64) -> Answer {
    cuda!(cuStreamWaitValue64_v2(stream => usize, address => u64, value => u64, 0 => u32))
}

/// One word of a batch.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Word {
    pub(crate) operation: u32,
    pub(crate) address: u64,
    pub(crate) value: u64,
    pub(crate) flags: u32,
    pub(crate) rest: [u64; 2],
}

pub(crate) const WAIT_64: u32 = 4;
pub(crate) const WRITE_64: u32 = 5;

pub(crate) fn word(operation: u32, address: u64, value: u64) -> Word {
    Word { operation, address, value, ..Word::default() }
}

pub(crate) fn batch(stream: usize, words: &[Word]) -> Answer {
    cuda!(cuStreamBatchMemOp_v2(
        stream => usize, words.len() as u32 => u32, words.as_ptr() => *const Word, 0 => u32,
    ))
}

pub(crate) fn new_event() -> usize {
    let mut event = 0;
    cuda!(cuEventCreate(&mut event => &mut usize, 2 => u32)).unwrap();
    event
}

pub(crate) fn record(event: usize, stream: usize) -> Answer {
    cuda!(cuEventRecord(event => usize, stream => usize))
}

pub(crate) fn wait_event(stream: usize, event: usize) -> Answer {
    cuda!(cuStreamWaitEvent(stream => usize, event => usize, 0 => u32))
}
