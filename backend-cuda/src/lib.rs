//! The CUDA backend of Peerlane: the copy engines of NVIDIA GPUs, over NVLink or PCI Express inside
//! one host. One rank has one device; ranks are processes, or threads of one.
//!
//! At run time it needs `libcuda.so.1`, which the NVIDIA driver brings, from CUDA 12.0 on. The CUDA
//! toolkit is not needed, neither to build nor to run. Where there is no driver every call says so,
//! with what to install.
//!
//! # How the contract maps to CUDA
//!
//! | the contract | CUDA |
//! | --- | --- |
//! | `Fabric::open` | retain the device's primary context, which the runtime and cudarc use too |
//! | `Fabric::connect` | same host, peer access between the devices, then import a few flags of the peer |
//! | `PeerMemory::allocate` | `cuMemCreate` with a file descriptor, `cuMemMap`; `cuMemAlloc` where there is no such thing |
//! | the same, where two devices do not reach each other | a memfd and `cuMemHostRegister`: bytes and flags go through host memory, and `Fabric::link` says so |
//! | `PeerMemory::register` | look up the allocation, or all segments, that the caller's span covers |
//! | `PeerMemory::export`, `import` | descriptors over a Unix socket and `cuMemMap`, or `cuIpcGetMemHandle` and `cuIpcOpenMemHandle`; between ranks of one process the same addresses, and access for the other device |
//! | `Region::dma_buf`, `flush` | `cuMemGetHandleForAddressRange`; `cuFlushGPUDirectRDMAWrites` where the device does not keep the order of what cards write |
//! | `Op::Put` | `cuMemcpyAsync`, on one of two streams; to oneself on a third, or back from a peer ([`OwnCopy`]) |
//! | `Op::Signal`, `Op::Wait` | neighbours of a slice in one `cuStreamBatchMemOp`; where stream writes to a peer do not work, a copy of 8 bytes |
//! | `completed` | a look at the event of the oldest slice, in a mode that captures of other threads do not mind |
//! | `release` | writes of the awaited values from a stream of its own |
//! | `fork`, `join` | the caller's stream itself carries the flags, so that most starts need no event |
//!
//! # Streams in one process
//!
//! The driver puts streams onto a few channels of the device, 8 unless `CUDA_DEVICE_MAX_CONNECTIONS`
//! says otherwise, and a stream that waits for a peer holds what stands behind it in its channel. An
//! engine has up to three streams beside the caller's. A process with many operations under way at once
//! may need more channels; they make each start somewhat slower.
//!
//! # What is left out
//!
//! - Fabric handles between hosts of one NVLink domain; [`try_handles`] tells whether they would work.
//! - The legacy default stream: nothing is ever put there.

mod device;
mod engine;
mod error;
mod fabric;
#[cfg(feature = "cudarc")]
mod interop;
mod key;
mod memory;
mod sys;

pub use device::{
    Abilities, ComputeMode, Context, Device, DeviceLink, HandleTrials, discover, driver_version,
    link, try_handles,
};
pub use engine::{Engine, OwnCopy, SignalBy, Stream};
pub use error::{CudaResult, Error};
pub use fabric::{Fabric, Options};
#[cfg(feature = "cudarc")]
pub use interop::{RegionView, SliceMemory};
pub use key::{Cuda, Key};
pub use memory::{Local, Memory, Remote};
