//! Calls HIP as its users do: symbols of `libamdhip64.so.7`, results as numbers.

use std::ffi::c_int;
use std::sync::Once;

use super::{Alone, Answer, c_symbol};

/// The address of a symbol in whatever `libamdhip64.so.7` is now.
pub(crate) fn symbol(name: &str) -> *mut std::ffi::c_void {
    c_symbol("libamdhip64.so.7", name)
}

/// Calls a symbol: `hip!(hipInit(0 => u32))`.
macro_rules! hip {
    ($name:ident($($argument:expr => $type:ty),* $(,)?)) => {
        crate::api::call!(crate::api::hip::symbol, $name($($argument => $type),*))
    };
}
pub(crate) use hip;

pub(crate) const NO_CU: c_int = 1024;
pub(crate) const DEVICE_TO_DEVICE: c_int = 3;
pub(crate) const DEFAULT: c_int = 4;

/// Starts ROCm 7.2 on the same machine.
pub(crate) fn start() -> Alone {
    static START: Once = Once::new();
    let driver = super::start();
    START.call_once(|| hip!(hipInit(0 => u32)).expect("the simulated runtime starts"));
    driver
}

pub(crate) fn use_device(device: c_int) {
    hip!(hipSetDevice(device => c_int)).unwrap();
}

pub(crate) fn malloc(bytes: usize) -> Answer<u64> {
    let mut address = u64::MAX;
    hip!(hipMalloc(&mut address => &mut u64, bytes => usize)).map(|()| address)
}

pub(crate) fn malloc_with(bytes: usize, flags: u32) -> Answer<u64> {
    let mut address = 0;
    hip!(hipExtMallocWithFlags(&mut address => &mut u64, bytes => usize, flags => u32))
        .map(|()| address)
}

pub(crate) fn free(address: u64) -> Answer {
    hip!(hipFree(address => u64))
}

pub(crate) fn new_stream() -> usize {
    let mut stream = 0;
    hip!(hipStreamCreateWithFlags(&mut stream => &mut usize, 1 => u32)).unwrap();
    stream
}

pub(crate) fn sync(stream: usize) -> Answer {
    hip!(hipStreamSynchronize(stream => usize))
}

pub(crate) fn query(stream: usize) -> Answer {
    hip!(hipStreamQuery(stream => usize))
}

pub(crate) fn copy(dst: u64, src: u64, bytes: usize, kind: c_int, stream: usize) -> Answer {
    hip!(hipMemcpyAsync(
        dst => u64, src => u64, bytes => usize, kind => c_int, stream => usize,
    ))
}

pub(crate) fn download(src: u64, bytes: usize, stream: usize) -> Answer<Vec<u8>> {
    let mut found = vec![0_u8; bytes];
    copy(found.as_mut_ptr() as u64, src, bytes, 2, stream)?;
    sync(stream)?;
    Ok(found)
}

pub(crate) fn word_at(address: u64) -> u64 {
    let found = download(address, 8, new_stream()).unwrap();
    u64::from_le_bytes(found.try_into().unwrap())
}

pub(crate) fn fill(address: u64, byte: u8, bytes: usize, stream: usize) -> Answer {
    hip!(hipMemsetD8Async(address => u64, byte => u8, bytes => usize, stream => usize))
}

/// New memory of zeros, there when this returns.
pub(crate) fn zeros(bytes: usize) -> u64 {
    let (memory, stream) = (malloc(bytes).unwrap(), new_stream());
    fill(memory, 0, bytes, stream).unwrap();
    sync(stream).unwrap();
    memory
}

pub(crate) fn write_word(stream: usize, address: u64, value: u64) -> Answer {
    hip!(hipStreamWriteValue64(stream => usize, address => u64, value => u64, 0 => u32))
}

/// Waits for at least the value, in the bits of the mask.
pub(crate) fn wait_word(stream: usize, address: u64, value: u64, mask: u64) -> Answer {
    hip!(hipStreamWaitValue64(
        stream => usize, address => u64, value => u64, 0 => u32, mask => u64,
    ))
}

pub(crate) type Handle = [u8; 64];

pub(crate) fn handle_of(address: u64) -> Answer<Handle> {
    let mut handle = [0; 64];
    hip!(hipIpcGetMemHandle(&mut handle => &mut Handle, address => u64)).map(|()| handle)
}

/// By value, as HIP takes it.
#[repr(C)]
pub(crate) struct ByValue(pub(crate) Handle);

pub(crate) fn open(handle: Handle) -> Answer<u64> {
    let mut address = 0;
    hip!(hipIpcOpenMemHandle(&mut address => &mut u64, ByValue(handle) => ByValue, 1 => u32))
        .map(|()| address)
}

pub(crate) fn close(address: u64) -> Answer {
    hip!(hipIpcCloseMemHandle(address => u64))
}

pub(crate) fn pci_id(device: c_int) -> String {
    let mut text = [0_u8; 32];
    hip!(hipDeviceGetPCIBusId(&mut text => &mut [u8; 32], 32 => c_int, device => c_int)).unwrap();
    let end = text.iter().position(|byte| *byte == 0).unwrap();
    String::from_utf8(text[..end].to_vec()).unwrap()
}
