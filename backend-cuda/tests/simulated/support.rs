//! Helpers of the tests: the simulated driver, and memory that a caller allocates.

use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cudarc::driver::{CudaContext, result, sys};
use peerlane_cuda::{Error, Fabric, Local, Remote};
use peerlane_hal::{Deadline, Fabric as _, Flag, Op, PeerMemory as _, Rank, Role};
use peerlane_simulated_driver::Driver;
pub(crate) use peerlane_simulated_driver::{await_arrival, connected, flag_value};

/// Installs the simulated driver and serialises the tests, which share its settings and counters.
pub(crate) fn driver() -> (Driver, MutexGuard<'static, ()>) {
    static ONE_BY_ONE: Mutex<()> = Mutex::new(());
    let turn = ONE_BY_ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let driver = peerlane_simulated_driver::install();
    driver.clear();
    driver.reset_counters();
    (driver, turn)
}

pub(crate) fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

/// Flags of a rank, one of which a peer signals behind what it has put. A completed ticket does not say that it has arrived.
pub(crate) fn arrivals(fabric: &Fabric) -> Local {
    fabric.memory().allocate(8, Role::Flags).unwrap()
}

/// Returns the signal that tells the owner of the flags that everything before it has arrived.
pub(crate) fn announce(arrivals: &Remote, value: u64) -> Op<'_, Local, Remote> {
    Op::Signal { flag: Flag { region: arrivals, word: 0 }, value }
}

/// Opens and connects `count` ranks in this process, each on the device with its number.
pub(crate) fn ranks(count: usize) -> Result<Vec<Fabric>, Error> {
    let open = |rank: Rank| Fabric::open(rank, count, rank.0);
    connected(count, soon, open)
}

/// Returns bytes in which every position differs from its neighbours.
pub(crate) fn pattern(seed: u8, length: usize) -> Vec<u8> {
    let period: Vec<u8> = (0..251).map(|byte| byte ^ seed).collect();
    let mut bytes = period.repeat(length.div_ceil(period.len()));
    bytes.truncate(length);
    bytes
}

pub(crate) fn pointer(address: u64) -> NonNull<u8> {
    NonNull::new(address as *mut u8).expect("no test uses address 0")
}

/// Memory of `cuMemAlloc`.
pub(crate) struct Allocation {
    context: Arc<CudaContext>,
    pub(crate) address: u64,
}

impl Allocation {
    pub(crate) fn new(device: usize, bytes: usize) -> Self {
        let context = CudaContext::new(device).expect("a device");
        // SAFETY: the context is current since its creation.
        let address = unsafe { result::malloc_sync(bytes) }.expect("memory");
        Self { context, address }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.context.bind_to_thread().expect("the context lives");
        // SAFETY: allocated in `new`; tests drop its registrations first.
        unsafe { result::free_sync(self.address) }.expect("freed once");
    }
}

/// Memory of `cuMemMap`: adjacent segments, as an allocator with expandable segments creates them.
pub(crate) struct Segments {
    context: Arc<CudaContext>,
    pub(crate) address: u64,
    pub(crate) segment_bytes: u64,
    handles: Vec<u64>,
}

impl Segments {
    pub(crate) fn new(device: usize, count: u64, exportable: bool) -> Self {
        let context = CudaContext::new(device).expect("a device");
        let ok = sys::CUresult::CUDA_SUCCESS;
        let location = sys::CUmemLocation {
            type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
            id: context.cu_device(),
        };
        use sys::CUmemAllocationHandleType as Handle;
        let properties = sys::CUmemAllocationProp {
            type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: match exportable {
                true => Handle::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                false => Handle::CU_MEM_HANDLE_TYPE_NONE,
            },
            location,
            win32HandleMetaData: std::ptr::null_mut(),
            allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: 0,
                usage: 0,
                reserved: [0; 4],
            },
        };
        let segment_bytes = 2 << 20;
        let whole = (count * segment_bytes) as usize;
        let mut address = 0;
        // SAFETY: the result is stored in a local.
        let code = unsafe { sys::cuMemAddressReserve(&raw mut address, whole, 0, 0, 0) };
        assert_eq!(code, ok);
        let mut handles = Vec::new();
        for index in 0..count {
            let (mut handle, bytes) = (0, segment_bytes as usize);
            // SAFETY: both are locals.
            let code =
                unsafe { sys::cuMemCreate(&raw mut handle, bytes, &raw const properties, 0) };
            assert_eq!(code, ok);
            let at = address + index * segment_bytes;
            // SAFETY: inside the reservation, where nothing is mapped yet.
            let code = unsafe { sys::cuMemMap(at, bytes, 0, handle, 0) };
            assert_eq!(code, ok);
            handles.push(handle);
        }
        let flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let access = sys::CUmemAccessDesc { location, flags };
        // SAFETY: all of it is mapped.
        let code = unsafe { sys::cuMemSetAccess(address, whole, &raw const access, 1) };
        assert_eq!(code, ok);
        Self { context, address, segment_bytes, handles }
    }
}

impl Drop for Segments {
    fn drop(&mut self) {
        self.context.bind_to_thread().expect("the context lives");
        let bytes = self.segment_bytes as usize;
        for (index, handle) in self.handles.iter().enumerate() {
            // SAFETY: mapped in `new`; tests drop its registrations first.
            unsafe { sys::cuMemUnmap(self.address + (index * bytes) as u64, bytes) };
            // SAFETY: created above.
            unsafe { sys::cuMemRelease(*handle) };
        }
        // SAFETY: reserved above, and nothing is mapped there now.
        unsafe { sys::cuMemAddressFree(self.address, bytes * self.handles.len()) };
    }
}
