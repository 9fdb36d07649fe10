//! Raw calls, and the only file that will have any: a table of the driver's entry points, looked up
//! in `libcuda.so.1` when first needed: plain integer results, required symbols apart from optional
//! ones. A missing library or symbol and an error code newer than this crate are values of
//! [`Error`](crate::Error), never a panic.
