//! Remote keys of CUDA: the key of `peerlane_toolkit::regions` with CUDA's names and messages.

use peerlane_hal::BackendId;
use peerlane_toolkit::regions::{self, Vendor};

/// Identifies the backend CUDA in keys and messages.
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

/// The remote key of a region: the bytes with which a peer imports it.
pub type Key = regions::Key<Cuda>;
