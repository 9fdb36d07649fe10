//! A software device behind the C symbols of the vendors' drivers, for tests where there is no
//! hardware: `libcuda.so.1`, and `libamdhip64.so` and `libhsa-runtime64.so.1` of ROCm.
//!
//! The package builds a shared library and a Rust library from one source. A backend loads the
//! shared library in place of the vendor's; it needs nothing else and cannot tell. Ranks may be
//! threads or processes: memory travels between processes as it does with the vendor. The Rust
//! library is for tests: it finds the shared library, puts it where a backend looks, and controls
//! what goes wrong.
//!
//! ```no_run
//! let driver = peerlane_simulated_driver::install();
//! driver.fail("cuMemCreate", 0, 2);
//! // … the next allocation of this process fails: out of memory.
//! assert_eq!(driver.counter("live_allocations", None), 0);
//! ```
//!
//! Other programs get it through their environment:
//! `LD_LIBRARY_PATH` = [`library_folder`], or a folder of [`without_symbols`]. [`Rocm`] installs ROCm
//! in the same way, of one release or of two.
//!
//! # What the machine is like
//!
//! Environment variables, read when the driver starts; most can be changed later
//! by [`Driver::set`], without their common beginning `PEERLANE_SIM_`.
//!
//! | variable | values | default |
//! | --- | --- | --- |
//! | `DEVICES` | 0 to 16; none makes `cuInit` answer 100 | 4 |
//! | `COPY_ENGINES` | how many copies a device runs at once | 3 |
//! | `MEMORY_MIB`, `GRANULARITY_KIB` | of each device, as each process counts it; the unit of virtual memory management | 4096, 2048 |
//! | `DRIVER_VERSION` | as the driver says it | 13000 |
//! | `COMPUTE_MODE` | `default`, `exclusive`, `prohibited` | `default` |
//! | `P2P`, `P2P_RANK` | `on`, `off`; the performance rank of all pairs | `on`, 0 |
//! | `P2P_ISLAND` | devices in an island, which reach each other only | 16 |
//! | `VMM`, `POSIX_FD`, `WORDS_64` | `on`, `off` | `on` |
//! | `LEGACY_IPC` | `on`, `off`; `refused`, where a container lets nobody open a handle | `on` |
//! | `DMABUF` | memory for network cards: `on`, `off` | `on` |
//! | `CARD_WRITES` | what cards have written is seen: `ordered`, by itself; after a `flush`; never for sure, `lost` | `flush` |
//! | `FABRIC` | handles for other nodes: `none`; `refused`, claimed but not permitted; `works` | `refused` |
//! | `BATCH_MAX` | the most memory operations of a batch | 255 |
//! | `BATCH_ORDER` | of the words of a batch: `kept`, `parallel`, writes before waits | `kept` |
//! | `PEER_WRITES` | stream writes to memory of others: `allow`, `refuse`, `drop` without a word | `allow` |
//! | `DROP_COPIES` | copies that do nothing and say that all is well: `none`, `peer`, `local`, `all` | `none` |
//! | `CAPTURED_WORDS` | memory operations in a capture: `record`, `refuse`, `drop`, `now` | `record` |
//! | `COPY_DELAY_US`, `COPY_NS_PER_KIB` | what a copy takes | 0 |
//! | `JITTER_US`, `SEED` | the most that is added at random to copies, batches and events | 0, 1 |
//! | `PEER_JITTER_US` | the same, of copies to or from memory of others alone | 0 |
//! | `QUEUE_LENGTH`, `PATIENCE_MS` | commands in a stream; how long a call waits for one before 999 | 1024, 120000 |
//! | `JUNK` | the byte that new memory up to 16 MiB holds | 165 |
//! | `FAIL` | `CALL:AFTER:CODE` or `CALL:AFTER:CODE:always`, with commas between | |
//! | `MACHINE` | a name; processes in exclusive mode fight for devices of one machine | |
//!
//! Of ROCm alone:
//!
//! | variable | values | default |
//! | --- | --- | --- |
//! | `ROCM_VERSION`, `HSA_VERSION` | what the libraries say, as `rocm_version.h` counts; [`Rocm`] sets both | 70200 |
//! | `KFD` | the kernel's driver: `there`; `missing` or `denied`, which both make no device | `there` |
//! | `HIP_ORDER` | ordinals of HIP, by the order of agents: `same`, `reversed` | `same` |
//! | `HIVE`, `XGMI_HOPS`, `XGMI_WEIGHT` | devices in a hive, which XGMI joins; its hops, and the weight of one | 16, 1, 15 |
//! | `NUMA_NODES` | processors that devices are near to, in their order | 2 |
//! | `NO_CU` | copies that ask for an engine: `works`, `drop` without a word, `refuse` | `works` |
//! | `WAIT_MEMORY` | what streams wait on: `any`, `signal` memory only | `any` |
//! | `FREE_WAITS` | giving memory back waits for its device, and a stream for what it holds, as HIP does: `on`, `off` | `on` |
//! | `SDMA_ENGINES`, `XGMI_ENGINES`, `ENGINES_PER_LINK` | numbered engines that lead to the host, to devices of the hive, and to each one of these | 2, 14, 2 |
//! | `SDMA_QUEUE`, `SIGNALS` | copies that one engine holds; signals of a process; 0x1008 beyond | 4096, 65536 |
//! | `FAR_FACTOR` | how many times as long a copy takes on an engine that leads elsewhere | 1 |
//! | `STALL_MIB` | larger copies never end on one engine; 0 for none | 0 |
//!
//! `CUDA_VISIBLE_DEVICES`, `ROCR_VISIBLE_DEVICES` and `HIP_VISIBLE_DEVICES` are honoured.
//!
//! # What it does not do
//!
//! Kernels, managed memory and pools; queues of packets. Copies between devices of one process want peer access, where
//! the vendor would stage them through the host.

mod control;
mod cuda;
mod device;
mod harness;
mod hip;
mod hsa;
mod runtime;

pub use device::log::Transfer;
pub use harness::{
    Driver, Other, Rocm, folder_of_all, hear, install, install_from, library, library_folder, tell,
    without_symbols,
};
