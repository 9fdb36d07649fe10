//! Raw bindings to ROCr, the HSA runtime of AMD GPUs, which is loaded on first use.
//!
//! ROCm is not needed to build. [`Library::load`] loads `libhsa-runtime64.so.1`. A missing library or function
//! is a [`LoadError`] that names the file, never a panic. Functions have their names without the prefix
//! `hsa_`: `hsa_amd_memory_async_copy` is [`Library::amd_memory_async_copy`], called as
//! `(library.amd_memory_async_copy)(..)`. Functions that only newer releases have are an `Option`;
//! [`Library::lacks`] creates the error for a missing one.
//!
//! Constants and types, also those of the functions, are generated from the headers of ROCr 7.2 by
//! `cargo xtask bindgen` and checked in. Enumerations are newtypes over an integer, because a library may be
//! newer than this crate, and an unknown value of a Rust `enum` would be undefined behaviour. AMD's attributes
//! have a type of their own: [`Library::agent_get_info`] takes
//! `hsa_agent_info_t(hsa_amd_agent_info_s::HSA_AMD_AGENT_INFO_BDFID.0)`.
//!
//! HIP brings the HSA runtime that it was built with. A program that also uses [`hip-sys`] must load HIP
//! first, so that both use the same runtime.
//!
//! [`hip-sys`]: https://docs.rs/peerlane-hip-sys

mod header;
mod table;

pub use header::*;
pub use rocm_library::{LoadError, Symbol};
pub use table::{LIBRARY, Library};
