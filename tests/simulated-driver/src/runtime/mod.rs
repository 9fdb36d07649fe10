//! Implements the calls of the CUDA driver and of HIP.
//!
//! HIP adopted the CUDA driver's calls, handles, numbers and rules of capture, so each is
//! implemented here once. An [`Api`] holds in what they differ.
//!
//! | vendors' term | term of [`device`](crate::device) |
//! | --- | --- |
//! | primary context | session |
//! | stream | queue |
//! | memory operation | word |
//! | legacy IPC handle, fabric handle | name of shared memory |
//! | graph, executable graph | nodes, program |
//!
//! | file | what it holds |
//! | --- | --- |
//! | `api.rs` | what differs between the APIs |
//! | `call.rs`, `code.rs`, `out.rs`, `handles.rs` | what all calls share: entry, result codes, results, handles |
//! | `start.rs`, `visible.rs`, `pci.rs`, `rocm.rs` | the environment, the visible devices, their PCI addresses, the ROCm release |
//! | `primary.rs` | primary contexts |
//! | `stream.rs`, `event.rs`, `graph.rs` | streams, events, captures and graphs |
//! | `memory.rs`, `share.rs`, `pointer.rs` | allocations, their sharing by IPC, attributes of addresses |
//! | `vmm.rs`, `blocks.rs` | virtual memory management, and the table of its blocks |
//! | `copy.rs`, `batch_copy.rs`, `words.rs`, `kernel.rs` | copies, several copies in one call, memory operations, kernels |

mod api;
pub(crate) mod batch_copy;
pub(crate) mod blocks;
pub(crate) mod call;
pub(crate) mod code;
pub(crate) mod copy;
pub(crate) mod event;
pub(crate) mod graph;
pub(crate) mod handles;
pub(crate) mod kernel;
pub(crate) mod memory;
pub(crate) mod out;
pub(crate) mod pci;
pub(crate) mod pointer;
pub(crate) mod primary;
pub(crate) mod rocm;
pub(crate) mod share;
pub(crate) mod start;
pub(crate) mod stream;
pub(crate) mod visible;
pub(crate) mod vmm;
pub(crate) mod words;

pub(crate) use api::Api;
