//! Raw bindings to HIP, the runtime of AMD GPUs, which is loaded on first use.
//!
//! ROCm is not needed to build. [`Library::load`] loads `libamdhip64.so` of soname 7, 6 or 5. A missing
//! library or function is a [`LoadError`] that names the file, never a panic. Functions have their names
//! without the prefix, in snake case: `hipMemcpyAsync` is [`Library::memcpy_async`], called as
//! `(library.memcpy_async)(..)`. Functions that only newer releases have are an `Option`;
//! [`Library::lacks`] creates the error for a missing one.
//!
//! Constants and types, also those of the functions, are generated from the header of HIP 7.2 by
//! `cargo xtask bindgen` and checked in. Enumerations are newtypes over an integer, because a library may be
//! newer than this crate, and an unknown value of a Rust `enum` would be undefined behaviour.
//!
//! # What differs between releases
//! - `hipMemoryType`: before 6.0 `Host` was 0 and `Device` 1. Compare the `type_` of
//!   [`hipPointerAttribute_t`] only with [`memory_types`] of the library's version.
//! - `hipMemcpyDeviceToDeviceNoCU` exists since 6.0; older releases reject it.
//! - `hipDeviceAttribute_t`: numbers named `Unused…` had a meaning before 6.0.
//! - `hipMemImportFromShareableHandle` takes a file descriptor in two ways: [`imports_by_pointer`].
//! - `hipMemAllocationProp` had another order of its fields before 5.7, which is not supported.
//!
//! HIP brings the HSA runtime that it was built with. A program that also uses [`hsa-sys`] must load HIP
//! first, so that both use the same runtime.
//!
//! [`hsa-sys`]: https://docs.rs/peerlane-hsa-sys

mod header;
mod table;
mod version;

pub use header::*;
pub use rocm_library::{LoadError, Symbol};
pub use table::{LIBRARY, Library};
pub use version::{MemoryTypes, imports_by_pointer, memory_types};
