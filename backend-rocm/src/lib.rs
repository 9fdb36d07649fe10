//! The ROCm backend of Peerlane, which copies between AMD GPUs of one host over XGMI or PCI Express.
//!
//! One rank has one device; ranks are processes or threads.
//!
//! At run time the crate needs `libamdhip64.so` of ROCm 5.7 or newer. Some features also need the HSA
//! runtime, `libhsa-runtime64.so.1`, which HIP brings. ROCm is not needed to build. Without it every call
//! returns an error that says what to install.
//!
//! **The crate has never run on an AMD GPU.** It is tested on the simulated driver, and on the real libraries
//! without a device.
//!
//! # How the contract maps to ROCm
//!
//! | contract | ROCm |
//! | --- | --- |
//! | `Fabric::open` | makes the device current on the thread during each call (`hipSetDevice`) and restores the previous one |
//! | `Fabric::connect` | checks that both run on one host and have peer access in both directions, then imports a few flags of the peer |
//! | `PeerMemory::allocate` | `hipMemCreate` with a file descriptor if a test of it succeeds, else `hipMalloc`; flags in fine-grained memory of `hipExtMallocWithFlags` |
//! | `PeerMemory::allocate` without peer access | a memfd and `hipHostRegister`: bytes and flags are staged in host memory, and `Fabric::link` reports it |
//! | `PeerMemory::register` | looks up the allocation, or all segments, that the caller's span covers (`hipMemGetAddressRange`) |
//! | `PeerMemory::export`, `import` | descriptors over a Unix socket and `hipMemMap`, or `hipIpcGetMemHandle` and `hipIpcOpenMemHandle`; between ranks of one process the same addresses with access for the other device |
//! | `Region::dma_buf`, `flush` | `hsa_amd_portable_export_dmabuf`, else `hipMemGetHandleForAddressRange`; a store to the register that flushes the host data path |
//! | `Op::Put` | `hipMemcpyAsync` without compute units, if a test shows that it copies |
//! | `Op::Signal`, `Op::Wait` | `hipStreamWriteValue64` and `hipStreamWaitValue64`, adjacent ones in one `hipStreamBatchMemOp` if a test shows that their order is kept |
//! | `completed` | queries the event of the oldest slice |
//! | `release` | writes the awaited values from a dedicated stream |
//! | `fork`, `join` | the signals and waits run on the caller's stream itself, so most starts need no event |
//!
//! # SDMA engines
//!
//! The table above describes streams, which are the default. With [`EngineKind::Sdma`] copies go to SDMA
//! engines that are selected one by one (`hsa_amd_memory_async_copy_on_engine`). Large copies use all engines
//! of a link, and none uses compute units. SDMA engines can only wait for a signal to become 0, so the rank
//! polls its flags, which then lie on the host, and drives the engine. Such a fabric supports neither streams
//! nor graphs. [`Engine::sdma_engines`] reports the engines for each peer. Ranks with different kinds of
//! engines can be in one group.
//!
//! # Streams in one process
//!
//! HIP maps streams to a few hardware queues: 4, unless `GPU_MAX_HW_QUEUES` says otherwise. A stream that
//! waits for a peer blocks later work in its queue. An engine over streams has up to seven besides the
//! caller's, one for each link. A process that runs many operations at once may need more queues, or SDMA
//! engines, which block nothing. Release is not affected: its stream has another priority, and each priority
//! has its own queues.
//!
//! # Limitations
//!
//! - IPC handles of the HSA runtime are not used. HIP does not know memory that is attached by them, and a
//!   stream would treat it as host memory.
//! - Handles of memory that the caller has mapped are not used with HIP older than 7.15. There the query
//!   crashed for other memory, and returned a reference that was not counted. Ranks can put from such memory,
//!   but other processes cannot put into it.
//! - The default streams are never used.
//!
//! [`Memory`] describes which memory is coherent.

// The files of this module:
//
// | file | contents |
// | --- | --- |
// | `device/` | visible devices, their links, agents of the HSA runtime |
// | `memory.rs`, `key.rs` | registration, export and import of memory; remote keys |
// | `engine/` | engines over streams of HIP, and over SDMA engines of the HSA runtime |
// | `fabric.rs` | peer access and options |
// | `error.rs` | errors and result codes |
// | `sys.rs` | function tables of the runtimes |

mod device;
mod diagnose;
mod engine;
mod error;
mod fabric;
mod key;
mod load;
mod memory;
mod sys;

pub use device::{
    Agent, AgentKind, Context, Device, DeviceLink, HsaRuntime, PciAddress, Runtimes, agent,
    discover, hardware_queues, link, runtimes,
};
pub use engine::{Engine, EngineKind, SdmaEngines, SelfCopy, SignalBy, Stream};
pub use error::Error;
pub use fabric::{Fabric, Options};
pub use key::{Key, Rocm};
pub use memory::{Local, Memory, Remote};
pub use sys::{RocmResult, Version};
