//! A software device behind the C symbols of a vendor's driver, for tests where there is no
//! hardware.
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
//! `LD_LIBRARY_PATH` = [`library_folder`], or a folder of [`without_symbols`].
//!
//! # What the machine is like
//!
//! Environment variables, read when the driver starts; all but the last two can be changed later
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
//! | `VMM`, `POSIX_FD`, `LEGACY_IPC`, `WORDS_64` | `on`, `off` | `on` |
//! | `FABRIC` | handles for other nodes: `none`; `refused`, claimed but not permitted; `works` | `refused` |
//! | `BATCH_MAX` | the most memory operations of a batch | 255 |
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
//! `CUDA_VISIBLE_DEVICES` is honoured.
//!
//! # What it does not do
//!
//! Kernels, managed memory and pools. Copies between devices of one process want peer access, where
//! the vendor would stage them through the host.

mod cuda;
mod device;
mod harness;

pub use harness::{Driver, install, install_from, library, library_folder, without_symbols};
