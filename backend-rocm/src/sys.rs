//! Raw calls, and the only file that will have any: two tables of entry points, one of HIP and one
//! of HSA, looked up when first needed: plain integer results, required symbols apart from those
//! that only newer releases have. A missing library or symbol and an unknown error code are values
//! of [`Error`](crate::Error), never a panic.
