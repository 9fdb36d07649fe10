//! Defines the remote key of CUDA memory and the vendor's texts for error messages.

use peerlane_hal::BackendId;
use peerlane_toolkit::regions::{self, Vendor};

/// The CUDA vendor, which names the backend in remote keys and messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cuda {}

impl Vendor for Cuda {
    const BACKEND: BackendId = BackendId::CUDA;
    const ALLOCATOR: &'static str = "cudaMalloc";
    const NO_HANDLE: &'static str = "the memory was mapped without an exportable handle; let its \
                                     allocator request CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR \
                                     (PyTorch: turn expandable_segments off), or use memory that \
                                     the fabric allocates";
    const POOL: &'static str = "the memory comes from a stream-ordered pool (cudaMallocAsync), \
                                which has no exportable handle; use cudaMalloc, or memory that the \
                                fabric allocates";
}

/// The remote key with which a peer imports a region of CUDA memory.
pub type Key = regions::Key<Cuda>;
