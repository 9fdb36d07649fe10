//! Raw bindings to libibverbs, the user-space library of Linux RDMA, which is loaded when first needed.
//!
//! Nothing of rdma-core is needed to build. [`Library::load`] opens `libibverbs.so.1`; a missing
//! library or symbol is a [`LoadError`], never a panic. Functions keep their names without the prefix:
//! `ibv_open_device` is [`Library::open_device`], to be called as `(library.open_device)(..)`.
//!
//! What posts and polls is no symbol but goes through the operations of a context, as the inline
//! functions of `verbs.h` do: [`post_send`], [`post_srq_recv`], [`poll_cq`], [`req_notify_cq`].
//!
//! The types are those of `verbs.h` by hand, with the names of the header; a test compares sizes and
//! offsets with a C compiler where the headers are installed. Enumerations are newtypes over an
//! integer, because a library may be newer than this crate and an unknown value of a Rust `enum` would
//! be undefined behaviour.
//!
//! Left out: the extended completion queues (soft RoCE's advances twice a poll in some versions), work
//! queues, flows, memory windows and multicast.

mod calls;
mod objects;
mod table;
mod values;

pub use calls::{poll_cq, post_recv, post_send, post_srq_recv, query_gid_entry, req_notify_cq};
pub use objects::*;
pub use table::{LIBRARY, Library, LoadError};
pub use values::*;
