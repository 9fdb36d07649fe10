//! The software device. It knows no vendor: the faces beside it turn the calls of a vendor's
//! driver into what is here.
//!
//! | the device | here |
//! | --- | --- |
//! | memory | memfds that other processes map; an address is an address of this process |
//! | a session | one device as this process has it open; a fault breaks it for good |
//! | a queue | a thread that does one command after the other |
//! | copy engines | a limited number of copies that run at once; or numbered engines, each a queue of its own |
//! | signals | values that engines change and wait for |
//! | words | memory operations of a queue: write, and wait with a comparison |
//! | events, captures, graphs | order between queues, recorded and replayed |

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
pub(crate) mod script;
pub(crate) mod sdma;
pub(crate) mod session;
pub(crate) mod settings;
pub(crate) mod signal;
pub(crate) mod sync;
pub(crate) mod topology;
pub(crate) mod words;
