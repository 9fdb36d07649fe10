//! What a peer needs to import a region: the key of `peerlane_toolkit::regions`, and what is ROCm's own
//! in it.
//!
//! It names the device by its UUID, which the HSA runtime makes of the serial number of the chip, and the
//! memory by the owner's process and a generation.

use peerlane_hal::BackendId;
use peerlane_toolkit::regions::{self, Vendor};

/// ROCm, as a type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rocm {}

impl Vendor for Rocm {
    const BACKEND: BackendId = BackendId::ROCM;
    const ALLOCATOR: &'static str = "hipMalloc";
    const NO_HANDLE: &'static str = "it is mapped memory without a handle that leaves the process; let its allocator ask for \
         hipMemHandleTypePosixFileDescriptor (PyTorch: turn expandable_segments off), or use memory \
         that the fabric allocates";
    const POOL: &'static str = "it is mapped memory whose handle this release of HIP cannot give out again, or memory of a \
         stream-ordered pool (hipMallocAsync); use hipMalloc (PyTorch: turn expandable_segments off), \
         or memory that the fabric allocates";
}

/// The bytes that let a peer import a region of device memory.
pub type Key = regions::Key<Rocm>;
