//! Simulates GPUs in software behind the C symbols of the vendors' drivers, so that tests of GPU
//! code run on machines without a GPU.
//!
//! The libraries are `libcuda.so.1`, and ROCm's `libamdhip64.so` and `libhsa-runtime64.so.1`, on
//! Linux. Code that loads the driver at run time, such as Peerlane's backends or the crate `cudarc`
//! with its feature `dynamic-loading`, runs without a change. It allocates memory, copies and fills
//! it on streams, orders streams by events, captures and launches graphs, waits for and writes words
//! from streams, and shares memory between threads and processes.
//!
//! The crate is a dev-dependency. Cargo builds a shared library and a Rust library from one source.
//! The Rust library finds the shared one, loads it under the driver's names, and injects faults:
//!
//! ```
//! let driver = peerlane_simulated_driver::install();
//! // The second call of the process fails: CUDA_ERROR_OUT_OF_MEMORY.
//! driver.fail("cuMemAlloc_v2", 1, 2);
//! // … what the program does then …
//! assert_eq!(driver.counter("live_allocations", None), 0);
//! ```
//!
//! Call [`install`] before anything loads the vendor's library: a process keeps the first library of
//! a name, and `install` panics if that is another one. A process has one driver, whose settings,
//! counters and faults are those of all its threads, so tests that change them run in processes of
//! their own: [`in_own_process`]. Child processes and programs of other languages load the
//! library through their environment: `LD_LIBRARY_PATH` = [`library_folder`], or a folder of
//! [`without_symbols`]. [`Rocm`] installs ROCm in the same way, with HIP and HSA of one release or of
//! two.
//!
//! # What it does not model
//!
//! - Kernels: only those of Peerlane run, which reduce memory or make a whole start of a collective.
//!   `cuModuleGetFunction` returns 801 (CUDA_ERROR_NOT_SUPPORTED) for another kernel. Tests replace kernels by copies and fills.
//! - Time: copies take no time unless a setting says so, and no measurement means anything.
//! - Managed memory, arrays and textures, memory pools beyond the default one, contexts other than
//!   primary ones and those of `cuCtxCreate_v2`, graphs that are built node by node, and the packet
//!   queues of HSA. The library lacks their symbols, so looking one up fails.
//! - The memory model of a GPU: a store is visible to all once it is made. A race that only a device
//!   shows stays hidden. Kernels of whole starts are an exception: their stores become visible late
//!   and in any order, until a fence.
//! - The staging of copies through the host: copies between devices of one process need peer access.
//!
//! A test that passes here shows that the calls, their order and the handling of their errors are
//! right. It replaces no test on a GPU.
//!
//! # Source
//!
//! | module | what it holds |
//! | --- | --- |
//! | `calls` | the symbols that CUDA and HIP have in common, as a table |
//! | `cuda`, `hip` | the other symbols of each |
//! | `hsa` | the symbols of HSA |
//! | `runtime` | what the calls of CUDA and HIP do |
//! | `device` | the simulated devices: memory, queues, copy engines |
//! | `control` | symbols that no vendor has, for tests |
//! | `harness` | the Rust library for tests |
//!
//! # Configuration
//!
//! Environment variables with the prefix `PEERLANE_SIM_` configure the machine. They are read when the
//! driver starts; most can be changed later by [`Driver::set`], without the prefix.
//!
//! | variable | values | default |
//! | --- | --- | --- |
//! | `DEVICES` | 0 to 16; with 0, `cuInit` returns 100 | 4 |
//! | `COPY_ENGINES` | copies that a device runs at once | 3 |
//! | `MEMORY_MIB`, `GRANULARITY_KIB` | memory of each device, counted for each process; the unit of virtual memory management | 4096, 2048 |
//! | `DRIVER_VERSION` | the version that the driver reports | 13000 |
//! | `COMPUTE_MODE` | `default`, `exclusive`, `prohibited` | `default` |
//! | `P2P`, `P2P_RANK` | `on`, `off`; the performance rank of all pairs | `on`, 0 |
//! | `P2P_ISLAND` | devices in an island; only devices of one island reach each other | 16 |
//! | `VMM`, `POSIX_FD`, `WORDS_64` | `on`, `off` | `on` |
//! | `LEGACY_IPC` | `on`, `off`; `refused`, as in a container that forbids opening handles | `on` |
//! | `DMABUF` | memory for NICs: `on`, `off` | `on` |
//! | `NIC_WRITES` | when writes of NICs are visible: `ordered`, always; `flush`, after a flush; `lost`, never reliably | `flush` |
//! | `FABRIC` | handles for other nodes: `none`; `refused`, reported as supported but not permitted; `works` | `refused` |
//! | `PTX` | whether the driver accepts kernels: `accepted`, `refused` | `accepted` |
//! | `KERNEL_MUTANT`, `KERNEL_HOLD` | a fault of the kernels of whole starts, which tests must find; what these hold back on all devices but the first, while it is set: `stores`, second `halves` of tagged words, `blocks` but the first, or `turns`, in which blocks run one after the other | `none` |
//! | `KERNEL_STARTS` | how many starts these kernels count in addition | 0 |
//! | `BATCH_MAX` | the most memory operations of a batch | 255 |
//! | `BATCH_ORDER` | of the words of a batch: `kept`, `parallel`, writes before waits | `kept` |
//! | `PEER_WRITES` | stream writes to other devices' memory: `allow`, `refuse`, `drop` without an error | `allow` |
//! | `DROP_COPIES` | copies that do nothing but report success: `none`, `peer`, `local`, `all` | `none` |
//! | `CAPTURED_WORDS` | memory operations in a capture: `record`, `refuse`, `drop`, `now` | `record` |
//! | `COPY_DELAY_US`, `COPY_NS_PER_KIB` | duration of a copy | 0 |
//! | `JITTER_US`, `SEED` | largest random delay added to copies, batches and events | 0, 1 |
//! | `PEER_JITTER_US` | largest random delay added to copies to or from other devices' memory | 0 |
//! | `QUEUE_LENGTH`, `PATIENCE_MS` | commands in a stream; how long a call waits for one before 999 | 1024, 120000 |
//! | `JUNK` | the byte in the first 256 KiB of new memory | 165 |
//! | `FAIL` | `CALL:AFTER:CODE` or `CALL:AFTER:CODE:always`, with commas between | |
//! | `MACHINE` | a name; processes in exclusive mode compete for the devices of one machine | |
//!
//! For ROCm only:
//!
//! | variable | values | default |
//! | --- | --- | --- |
//! | `ROCM_VERSION`, `HSA_VERSION` | versions that the libraries report, as `rocm_version.h` encodes them; [`Rocm`] sets both | 70200 |
//! | `KFD` | the kernel's driver: `there`; with `missing` or `denied` there is no device | `there` |
//! | `HIP_ORDER` | ordinals of HIP, by the order of agents: `same`, `reversed` | `same` |
//! | `HIVE`, `XGMI_HOPS`, `XGMI_WEIGHT` | devices in a hive connected by XGMI; hops of a link, and the weight of a hop | 16, 1, 15 |
//! | `NUMA_NODES` | NUMA nodes over which the devices are spread, in order | 2 |
//! | `NO_CU` | copies that ask for an engine: `works`, `drop` without an error, `refuse` | `works` |
//! | `WAIT_MEMORY` | what streams wait on: `any`, `signal` memory only | `any` |
//! | `FREE_WAITS` | freeing memory waits for its device, and destroying a stream waits for its commands, as in HIP: `on`, `off` | `on` |
//! | `SDMA_ENGINES`, `XGMI_ENGINES`, `ENGINES_PER_LINK` | numbered engines that lead to the host, to devices of the hive, and to each one of these | 2, 14, 2 |
//! | `SDMA_QUEUE`, `SIGNALS` | copies that one engine holds; signals of a process; beyond that a call returns 0x1008 | 4096, 65536 |
//! | `FAR_FACTOR` | how many times as long a copy takes on an engine that leads elsewhere | 1 |
//! | `STALL_MIB` | larger copies never end on one engine; 0 for none | 0 |
//!
//! `CUDA_VISIBLE_DEVICES`, `ROCR_VISIBLE_DEVICES` and `HIP_VISIBLE_DEVICES` are honoured.

mod calls;
mod control;
mod cuda;
mod device;
mod harness;
mod hip;
mod hsa;
mod runtime;

pub use device::log::Transfer;
pub use harness::{
    Driver, Other, Rocm, await_arrival, connected, flag_value, folder_of_all, hear, in_own_process,
    install, install_all, install_from, library, library_folder, tell, without_symbols,
};
