//! The ROCm backend of Peerlane: the copy engines of AMD GPUs, over XGMI or PCI Express inside one host.
//! One rank has one device; ranks are processes, or threads of one.
//!
//! At run time it needs `libamdhip64.so` of ROCm 5.7 or newer; what asks for the HSA runtime takes the
//! `libhsa-runtime64.so.1` that HIP brings. Neither is needed to build. Where there is none every call
//! says so, with what to install.
//!
//! **No line of it has run on a GPU of AMD's yet.** It runs on the simulated driver, and on the real
//! libraries where there is no device.
//!
//! # How the contract maps to ROCm
//!
//! | the contract | ROCm |
//! | --- | --- |
//! | `Fabric::open` | the device that is current on a thread during a call (`hipSetDevice`) and put back |
//! | `Fabric::connect` | same host, peer access between the devices in both directions, then import a few flags of the peer |
//! | `PeerMemory::allocate` | `hipMemCreate` with a file descriptor, where a trial of it succeeds, else `hipMalloc`; flags in fine-grained memory of `hipExtMallocWithFlags` |
//! | the same, where two devices do not reach each other | a memfd and `hipHostRegister`: bytes and flags go through host memory, and `Fabric::link` says so |
//! | `PeerMemory::register` | look up the allocation, or all segments, that the caller's span covers (`hipMemGetAddressRange`) |
//! | `PeerMemory::export`, `import` | descriptors over a Unix socket and `hipMemMap`, or `hipIpcGetMemHandle` and `hipIpcOpenMemHandle`; between ranks of one process the same addresses, and access for the other device |
//! | `Region::dma_buf`, `flush` | `hsa_amd_portable_export_dmabuf`, else `hipMemGetHandleForAddressRange`; a store to the register that flushes the host data path |
//! | `Op::Put` | `hipMemcpyAsync` without compute units, where a trial shows that it copies |
//! | `Op::Signal`, `Op::Wait` | `hipStreamWriteValue64` and `hipStreamWaitValue64`, neighbours in one `hipStreamBatchMemOp` only where a trial shows that their order is kept |
//! | `completed` | a look at the event of the oldest slice |
//! | `release` | writes of the awaited values from a stream of its own |
//! | `fork`, `join` | the caller's stream itself carries the flags, so that most starts need no event |
//!
//! # Engines of two kinds
//!
//! The table is of streams, which are the rule. With [`EngineKind::Sdma`] copies go to SDMA engines that are
//! chosen one by one (`hsa_amd_memory_async_copy_on_engine`), large ones to all engines of a link, none to
//! compute units. These engines wait for signals to become 0 and for nothing else, so the rank polls its
//! flags, which then lie on the host, and drives the engine; such a fabric takes no streams and no graphs.
//! [`Engine::sdma_ways`] says which engines copy to whom. Ranks of both kinds gather with one another.
//!
//! Which memory may hold what, and what makes it visible, stands with [`Memory`].
//!
//! # Streams in one process
//!
//! HIP puts streams onto a few queues of the hardware, 4 unless `GPU_MAX_HW_QUEUES` says otherwise, and a
//! stream that waits for a peer holds what stands behind it in its queue. An engine of streams has up to
//! seven beside the caller's, one for each link. A process with many operations under way at once may need
//! more queues, or engines over SDMA engines, which hold nothing up. Release is safe from it: its stream is
//! of another priority, and those have queues of their own.
//!
//! # What is left out
//!
//! - IPC handles of the HSA runtime: HIP does not know memory that is attached by them, and a stream would
//!   take it for memory of the host.
//! - Handles of memory that the caller has mapped, with a HIP before 7.15: to ask for one crashed for other
//!   memory, and gave out a reference that was not counted. Such memory can be put from, and not be
//!   received into by another process.
//! - The default streams: nothing is ever put there.

mod device;
mod engine;
mod error;
mod fabric;
mod key;
mod memory;
mod sys;

pub use device::{
    Agent, AgentKind, Context, Device, DeviceLink, HsaRuntime, PciAddress, Runtimes, Version,
    agent, discover, link, runtimes,
};
pub use engine::{Engine, EngineKind, OwnCopy, SdmaWay, SignalBy, Stream};
pub use error::{Error, RocmResult};
pub use fabric::{Fabric, Options};
pub use key::{Key, Rocm};
pub use memory::{Local, Memory, Remote};
