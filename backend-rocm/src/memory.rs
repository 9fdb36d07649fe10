//! Registration, export and import of device memory: `peerlane_toolkit::regions` over the calls of HIP,
//! which stand here.
//!
//! | memory | how it leaves the process |
//! | --- | --- |
//! | that Peerlane allocates for data | physical memory with a descriptor, mapped by each importer, where a trial of it succeeds; else `hipMalloc` |
//! | that Peerlane allocates for flags | fine-grained memory of `hipExtMallocWithFlags`, by its IPC handle |
//! | of `hipMalloc` | its IPC handle; the caller's offset travels beside it |
//! | that the caller mapped, such as expandable segments | a descriptor for every segment, from the release of HIP on that gives its handles out again |
//! | that Peerlane allocates, where a peer's device does not reach this one | host memory with a descriptor, mapped by each importer and registered with its runtime |
//! | of the host, that another fabric has allocated; of the host as flags | the descriptor that it was allocated with; the caller's own not at all |
//!
//! Ranks of one process share addresses: an import there only lets the importer's device reach them.

mod calls;
mod cards;
mod ipc;
mod pointers;
mod segments;

use peerlane_toolkit::regions;

use crate::device::Context;

/// Registers memory of this rank's device and imports that of its peers.
///
/// # Fine and coarse grain
/// Memory of `hipMalloc` is coarse-grained: a device may keep it in caches that writes of others do not
/// invalidate, and looks anew between kernels and after a synchronisation. Fine-grained memory is coherent
/// at any time, and is cached less or not at all ([coherence control]). So
///
/// | what lies there | may be coarse-grained | what makes it visible |
/// | --- | --- | --- |
/// | flags | no: a stream polls them while a peer writes | nothing is needed |
/// | data that a stream reads behind its wait for a flag | yes | what follows the wait begins with an acquire |
/// | data that a kernel reads while they are written | no, and nothing here promises it | |
///
/// Flags that the fabric allocates are fine-grained. The caller's become flags unless the HSA runtime says
/// that they are coarse-grained; without that runtime the caller must see to it.
///
/// `hipStreamWaitValue64` formally wants signal memory (`hipMallocSignalMemory`). That comes as words of 8
/// bytes, each an allocation of its own, and holds no array of flags; for other memory the runtime polls by
/// a kernel.
///
/// [coherence control]: https://rocm.docs.amd.com/projects/HIP/en/latest/how-to/hip_runtime_api/memory_management/coherence_control.html
pub type Memory = regions::Memory<Context>;

/// Registered memory of this rank.
pub type Local = regions::Local<Context>;

/// Imported memory of a peer.
pub type Remote = regions::Remote<Context>;
