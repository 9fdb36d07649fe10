//! Raw calls, and the only file that will have any: a table of the entry points of
//! `libibverbs.so.1`, looked up when first needed. `ibv_post_send` and `ibv_poll_cq` are no symbols
//! but inline functions over the operations of a context, so they are written here. A missing
//! library or symbol is a value of [`Error`](crate::Error), never a panic.
