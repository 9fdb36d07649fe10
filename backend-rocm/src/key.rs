//! Defines the remote key of ROCm memory and the vendor's texts for error messages.
//!
//! A key names the device by its UUID, which the HSA runtime derives from the serial number of the chip,
//! and the memory by the owner's process and a generation.

use peerlane_hal::BackendId;
use peerlane_toolkit::regions::{self, Vendor};

/// The ROCm vendor, which names the backend in remote keys and messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rocm {}

impl Vendor for Rocm {
    const BACKEND: BackendId = BackendId::ROCM;
    const ALLOCATOR: &'static str = "hipMalloc";
    const NO_HANDLE: &'static str = "the memory was mapped without an exportable handle; let its \
                                     allocator request hipMemHandleTypePosixFileDescriptor \
                                     (PyTorch: turn expandable_segments off), or use memory that \
                                     the fabric allocates";
    const POOL: &'static str = "the memory was mapped, and this release of HIP cannot return its \
                                handle, or the memory comes from a stream-ordered pool \
                                (hipMallocAsync); use hipMalloc (PyTorch: turn expandable_segments \
                                off), or memory that the fabric allocates";
}

/// The remote key with which a peer imports a region of ROCm memory.
pub type Key = regions::Key<Rocm>;
