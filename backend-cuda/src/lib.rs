//! The CUDA backend of Peerlane: the copy engines of NVIDIA GPUs, over NVLink or PCI Express inside
//! one host.
//!
//! **Not built yet.** The crate holds the files that every backend has, each with what goes into
//! it, and [`discover`], which says so. [`Memory`], [`Key`], [`Engine`] and [`Fabric`] have no
//! values, so no program can believe that it moves bytes with them.
//!
//! At run time the backend will need `libcuda.so.1`, which the NVIDIA driver brings. The CUDA
//! toolkit is not needed, neither to build nor to run.
//!
//! # How the contract will map to CUDA
//!
//! | the contract | CUDA |
//! | --- | --- |
//! | `Fabric::open` | retain the device's primary context; probe each ability once by doing it |
//! | `Fabric::connect` | `cuCtxEnablePeerAccess` between ranks of one process; a Unix socket for file descriptors between processes |
//! | `PeerMemory::allocate` | `cuMemCreate`, exportable as a file descriptor, mapped with `cuMemMap` |
//! | `PeerMemory::register` | the allocation's base and the caller's offset into it (`cuMemGetAddressRange`) |
//! | `PeerMemory::export`, `import` | `cuMemExportToShareableHandle` and its counterpart, or `cuIpcGetMemHandle` for foreign allocations |
//! | `Op::Put` | `cuMemcpyDtoDAsync` on the engine's stream |
//! | `Op::Signal`, `Op::Wait` | neighbours of a slice in one `cuStreamBatchMemOp`; where stream writes to a peer are refused, a copy of 8 bytes from a ring of words |
//! | `completed` | a ticket word that the stream writes into host memory, never a stream query, so that it is legal while any stream captures |
//! | `release` | the host writes the awaited values into the flags |
//! | `fork`, `join` | `cuEventRecord` and `cuStreamWaitEvent` |

mod device;
mod engine;
mod error;
mod fabric;
mod key;
mod memory;
mod sys;

pub use device::{Device, discover};
pub use engine::Engine;
pub use error::Error;
pub use fabric::Fabric;
pub use key::Key;
pub use memory::{Local, Memory, Remote};
