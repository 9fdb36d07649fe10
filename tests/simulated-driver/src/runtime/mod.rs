//! What the calls of both vendors' GPU runtimes do. HIP took over the CUDA driver's calls, with
//! their handles, their numbers and their rules of capture, so each is written here once; the faces
//! give them their names, and what a thread has current.
//!
//! | the vendors' word | the device's |
//! | --- | --- |
//! | primary context | session |
//! | stream | queue |
//! | memory operation | word |
//! | legacy IPC handle, fabric handle | name of shared memory |
//! | graph, executable graph | nodes, program |

pub(crate) mod batch_copy;
pub(crate) mod blocks;
pub(crate) mod call;
pub(crate) mod code;
pub(crate) mod copy;
pub(crate) mod event;
mod face;
pub(crate) mod graph;
pub(crate) mod handles;
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

pub(crate) use face::Face;
