//! What a peer needs to import a region: the key of `peerlane_toolkit::regions`, and what is CUDA's own
//! in it.

use peerlane_hal::BackendId;
use peerlane_toolkit::regions::{self, Vendor};

/// CUDA, as a type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cuda {}

impl Vendor for Cuda {
    const BACKEND: BackendId = BackendId::CUDA;
    const ALLOCATOR: &'static str = "cudaMalloc";
    const NO_HANDLE: &'static str = "it is mapped memory without a handle that leaves the process; let its allocator ask for \
         CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR (PyTorch: turn expandable_segments off), or use \
         memory that the fabric allocates";
    const POOL: &'static str = "it is memory of a stream-ordered pool (cudaMallocAsync), which has no handle; use \
         cudaMalloc, or memory that the fabric allocates";
}

/// The bytes that let a peer import a region of device memory.
pub type Key = regions::Key<Cuda>;
