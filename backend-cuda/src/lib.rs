//! The CUDA backend of Peerlane, which copies between NVIDIA GPUs of one host over NVLink or PCI Express.
//!
//! The copies run on the copy engines of the GPUs. One rank has one device; ranks are processes or
//! threads.
//!
//! At run time the crate needs `libcuda.so.1` of CUDA 12.0 or newer, which comes with the NVIDIA driver.
//! The CUDA toolkit is needed neither to build nor to run. Without a driver every call returns an error
//! that says what to install.
//!
//! # How the contract maps to CUDA
//!
//! | contract | CUDA |
//! | --- | --- |
//! | `Fabric::open` | retains the device's primary context, which the runtime and cudarc use too |
//! | `Fabric::connect` | checks that both run on one host and have peer access, then imports a few flags of the peer |
//! | `PeerMemory::allocate` | `cuMemCreate` with a file descriptor, `cuMemMap`; `cuMemAlloc` if the device has no descriptors |
//! | `PeerMemory::allocate` without peer access | a memfd and `cuMemHostRegister`: bytes and flags are staged in host memory, and `Fabric::link` reports it |
//! | `PeerMemory::register` | looks up the allocation, or all segments, that the caller's span covers |
//! | `PeerMemory::export`, `import` | descriptors over a Unix socket and `cuMemMap`, or `cuIpcGetMemHandle` and `cuIpcOpenMemHandle`; between ranks of one process the same addresses with access for the other device |
//! | `Region::dma_buf`, `flush` | `cuMemGetHandleForAddressRange`; `cuFlushGPUDirectRDMAWrites` if the device does not keep the order of writes of NICs |
//! | `Op::Put` | `cuMemcpyAsync`, on one of two streams; the self copy on a third, or back from a peer ([`SelfCopy`]) |
//! | `Op::Signal`, `Op::Wait` | adjacent ops of a slice in one `cuStreamBatchMemOp`; a copy of 8 bytes if stream writes to a peer do not work |
//! | `Op::Reduce` | a kernel of `kernels/reduce.cu` by `cuLaunchKernel`, which the driver has compiled when reductions were prepared |
//! | `completed` | queries the event of the oldest slice, in a mode that captures of other threads tolerate |
//! | `release` | writes the awaited values from a dedicated stream, or from one of a second context if that is stuck |
//! | `fork`, `join` | the signals and waits run on the caller's stream itself, so most starts need no event |
//!
//! # Streams in one process
//!
//! The driver maps streams to a few hardware queues of the device: 8, unless `CUDA_DEVICE_MAX_CONNECTIONS` says
//! otherwise. A stream that waits for a peer blocks later work in its queue. An engine has up to three
//! streams besides the caller's. Operations that all ranks start in the same order complete with any number of
//! queues. Operations that ranks start in different orders complete only if each of them has a queue. More
//! queues make each start somewhat slower.
//!
//! # Limitations
//!
//! - Fabric handles between hosts of one NVLink domain are not used; [`try_handles`] reports whether they
//!   would work.
//! - The legacy default stream is never used.

// The files of this module:
//
// | file | contents |
// | --- | --- |
// | `device.rs` | visible devices, their links and contexts |
// | `memory.rs`, `key.rs` | registration, export and import of memory; remote keys |
// | `engine.rs` | streams, events, copies, memory operations and graphs |
// | `fabric.rs` | peer access and options |
// | `error.rs` | errors and result codes |
// | `interop.rs` | conversions from and to cudarc |
// | `sys.rs`, `cuda_h.rs` | entry points of the driver; types and constants of cuda.h |

mod cuda_h;
mod device;
mod engine;
mod error;
mod fabric;
mod fused;
#[cfg(feature = "cudarc")]
mod interop;
mod key;
mod load;
mod memory;
mod reduce;
mod sys;

pub use device::{
    ComputeMode, Context, Device, DeviceLink, StreamLimits, connections, discover, driver_version,
    link,
};
pub use engine::{Engine, SelfCopy, SignalBy, Stream};
pub use error::{CudaResult, Error};
pub use fabric::{Fabric, Options};
#[cfg(feature = "cudarc")]
pub use interop::{RegionView, SliceMemory, slice_base};
pub use key::{Cuda, Key};
pub use memory::{HandleTrials, Local, Memory, Remote, try_handles};
