//! Simulates devices, independently of any vendor: the modules for CUDA, HIP and HSA translate a
//! vendor's calls.
//!
//! | concept | implementation |
//! | --- | --- |
//! | memory | memfds that other processes map; a device address is an address of this process |
//! | session | one device, opened by this process; a fault breaks it permanently |
//! | queue | a thread that runs one command after the other |
//! | copy engines | a limit of copies that run at once, or numbered engines with a queue each |
//! | signal | a value that engines change and wait for |
//! | word | a memory operation of a queue: a write, or a wait with a comparison |
//! | event, capture, graph | order between queues, recorded and launched |
//!
//! | file | what it holds |
//! | --- | --- |
//! | `machine.rs`, `session.rs`, `settings.rs`, `topology.rs` | the machine, its open devices, its configuration, its links |
//! | `memory/` | address space, allocations and their sharing |
//! | `queue.rs`, `command.rs`, `completion.rs`, `event.rs` | queues, their commands, and waiting for them |
//! | `copy.rs`, `engines.rs`, `sdma.rs`, `words.rs`, `signal.rs`, `reduce.rs` | what commands and engines do |
//! | `start/` | kernels that run whole starts, in a weak memory model |
//! | `capture.rs`, `graph.rs` | captures and graphs |
//! | `fault.rs`, `script.rs`, `jitter.rs` | faults, injected results, random delays |
//! | `counters.rs`, `log.rs` | what tests read |
//! | `sync.rs` | locks and back-off |

pub(crate) mod capture;
pub(crate) mod command;
pub(crate) mod completion;
pub(crate) mod copy;
pub(crate) mod counters;
pub(crate) mod engines;
pub(crate) mod event;
pub(crate) mod fault;
pub(crate) mod graph;
mod jitter;
pub(crate) mod log;
pub(crate) mod machine;
pub(crate) mod memory;
pub(crate) mod queue;
pub(crate) mod reduce;
pub(crate) mod script;
pub(crate) mod sdma;
pub(crate) mod session;
pub(crate) mod settings;
pub(crate) mod signal;
pub(crate) mod start;
pub(crate) mod sync;
pub(crate) mod topology;
pub(crate) mod words;
