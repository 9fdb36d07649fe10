//! Helpers of the tests on the simulated driver: the driver, ranks, and memory of the caller.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hip_sys::{Library, hipError_t};
use peerlane_hal::{
    At, CopyEngine as _, Deadline, Fabric as _, Flag, Op, PeerMemory as _, Rank, Region as _, Role,
};
use peerlane_rocm::{Error, Fabric, Local, Options, Remote};
use peerlane_simulated_driver::{Driver, Rocm};
pub(crate) use peerlane_simulated_driver::{await_arrival, connected, flag_value};

/// Installs the newest release, as most tests use it.
pub(crate) fn driver() -> (Driver, MutexGuard<'static, ()>) {
    driver_of("7.2")
}

/// Installs a release and returns the driver with a lock.
///
/// Settings and counters belong to the process, so tests that use them run one by one.
pub(crate) fn driver_of(release: &str) -> (Driver, MutexGuard<'static, ()>) {
    static LOCK: Mutex<()> = Mutex::new(());
    let lock = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    let driver = Rocm::release(release).install();
    driver.clear();
    driver.reset_counters();
    (driver, lock)
}

/// Returns a deadline that is far enough for a loaded machine.
pub(crate) fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

/// Opens connected ranks of this process, each on the device with its number.
pub(crate) fn ranks(count: usize, strict: bool) -> Result<Vec<Fabric>, Error> {
    let open = |rank: Rank| {
        Fabric::open_with(rank, count, Options { device: rank.0, strict, ..Options::default() })
    };
    connected(count, soon, open)
}

/// Returns bytes that depend on their index and the seed.
pub(crate) fn pattern(seed: u8, length: usize) -> Vec<u8> {
    let period: Vec<u8> = (0..251).map(|byte| byte ^ seed).collect();
    let mut bytes = period.repeat(length.div_ceil(period.len()));
    bytes.truncate(length);
    bytes
}

/// Returns the bytes of a region.
pub(crate) fn contents(region: &Local) -> Vec<u8> {
    let mut seen = vec![0; region.bytes() as usize];
    // SAFETY: nobody else accesses these bytes of the region now.
    unsafe { region.download(0, &mut seen) }.unwrap();
    seen
}

/// Flags of a rank, one of which a peer signals behind what it has put. A completed ticket does not say that it has arrived.
pub(crate) fn arrivals(fabric: &Fabric) -> Local {
    fabric.memory().allocate(8, Role::Flags).unwrap()
}

/// Puts a pattern from rank 0 to a whole region of rank 1. Returns what the region then holds.
pub(crate) fn put_and_read(
    fabrics: &mut [Fabric],
    remote: &Remote,
    region: &Local,
    seed: u8,
) -> Vec<u8> {
    let arrivals = arrivals(&fabrics[1]);
    let key = fabrics[1].memory().export(&arrivals).unwrap();
    let their_arrivals = fabrics[0].memory().import(Rank(1), &key, soon()).unwrap();
    put(&mut fabrics[0], remote, seed, (&their_arrivals, 1));
    await_arrival(&arrivals, 1);
    contents(region)
}

/// Puts a pattern to the whole region of a peer, and then signals its arrival with a value.
pub(crate) fn put(
    fabric: &mut Fabric,
    remote: &Remote,
    seed: u8,
    (arrivals, value): (&Remote, u64),
) {
    let bytes = remote.bytes();
    let mut engine = fabric.engine(Default::default()).unwrap();
    let source = fabric.memory().allocate(bytes, Role::Data).unwrap();
    // SAFETY: nobody else accesses these bytes of the region now.
    unsafe { source.upload(0, &pattern(seed, bytes as usize)) }.unwrap();
    let (dst, src) = (At { region: remote, offset: 0 }, At { region: &source, offset: 0 });
    let flag = Flag { region: arrivals, word: 0 };
    let ops = [Op::Put { dst, src, bytes }, Op::Signal { flag, value }];
    // SAFETY: all regions live until the ticket is complete, and no other code accesses them.
    let ticket = unsafe { engine.submit(&ops) }.unwrap();
    let deadline = soon();
    while engine.completed().unwrap() < ticket {
        assert!(!deadline.has_passed(), "the put is not complete");
        std::thread::yield_now();
    }
}

pub(crate) fn register(
    fabric: &Fabric,
    address: u64,
    bytes: u64,
    role: Role,
) -> Result<Local, Error> {
    let base = NonNull::new(address as *mut u8).expect("no test uses address 0");
    // SAFETY: every test keeps the memory alive longer than the region and its imports.
    unsafe { fabric.memory().register(base, bytes, role) }
}

fn hip() -> &'static Library {
    Library::load().expect("the simulated driver is installed")
}

pub(crate) fn ensure(code: hipError_t, call: &str) {
    assert_eq!(code, hipError_t::hipSuccess, "{call}");
}

/// Memory of the caller on a device.
pub(crate) struct Allocation {
    pub(crate) address: u64,
}

impl Allocation {
    /// Allocates coarse-grained memory, as `hipMalloc` does.
    pub(crate) fn new(device: i32, bytes: usize) -> Self {
        Self::with_flags(device, bytes, hip_sys::hipDeviceMallocDefault)
    }

    /// Allocates memory with `hipExtMallocWithFlags`.
    pub(crate) fn with_flags(device: i32, bytes: usize, flags: u32) -> Self {
        let mut address: *mut c_void = std::ptr::null_mut();
        let hip = hip();
        // SAFETY: the number is that of a device.
        ensure(unsafe { (hip.set_device)(device) }, "hipSetDevice");
        // SAFETY: the result is stored in a local.
        let code = unsafe { (hip.ext_malloc_with_flags)(&raw mut address, bytes, flags) };
        ensure(code, "hipExtMallocWithFlags");
        Self { address: address as u64 }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: the memory was allocated by `with_flags` and is freed once.
        ensure(unsafe { (hip().free)(self.address as *mut c_void) }, "hipFree");
    }
}
