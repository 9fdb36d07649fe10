//! The ROCm backend of Peerlane: the SDMA engines of AMD GPUs, over XGMI or PCI Express inside one
//! host.
//!
//! **Not built yet.** The crate holds the files that every backend has, each with what goes into
//! it, and [`discover`], which says so. [`Memory`], [`Key`], [`Engine`] and [`Fabric`] have no
//! values, so no program can believe that it moves bytes with them.
//!
//! At run time the backend will need `libamdhip64.so` and `libhsa-runtime64.so.1`, which ROCm
//! brings. Neither is needed to build.
//!
//! # How the contract will map to ROCm
//!
//! | the contract | ROCm |
//! | --- | --- |
//! | `Fabric::open` | `hipSetDevice` and the agent of the same PCI address; probe each ability once by doing it, comparing bytes |
//! | `Fabric::connect` | `hipDeviceEnablePeerAccess` between ranks of one process; a Unix socket for file descriptors between processes |
//! | `PeerMemory::allocate` | `hipMalloc`; flags in signal memory (`hipExtMallocWithFlags`) |
//! | `PeerMemory::register` | the allocation's base and the caller's offset into it (`hipMemGetAddressRange`) |
//! | `PeerMemory::export`, `import` | `hipIpcGetMemHandle` and `hipIpcOpenMemHandle`; dma-buf where ROCm exports it |
//! | `Op::Put` | `hsa_amd_memory_async_copy_on_engine`, chained by signals; `hipMemcpyDtoDAsync` where it is missing |
//! | `Op::Signal`, `Op::Wait` | `hipStreamWriteValue64` and `hipStreamWaitValue64`, each by itself: batched ones ran in parallel |
//! | `completed` | the value of the last completion signal, read from host memory |
//! | `release` | the host writes the awaited values into the flags and the dependency signals |
//! | `fork`, `join` | `hipEventRecord` and `hipStreamWaitEvent` |

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
