//! Implements HIP's symbols with the CUDA driver. The library takes the place of `libamdhip64.so`,
//! so that the ROCm backend's streams, copies, IPC and memory run on NVIDIA GPUs if there is no AMD
//! GPU.
//!
//! It is for tests and never shipped. `cargo xtask test rocm --hip-on-cuda` builds it, puts it
//! where the loader searches first, and runs the tests of the ROCm backend with it.

// Not linted below: each function keeps HIP's contract, which its header states.
#![allow(non_snake_case, reason = "the names of HIP and of cuda.h")]
#![allow(clippy::missing_safety_doc, missing_docs, reason = "HIP's documentation is that of these")]

mod calls;
mod cuda;
mod device;
mod event;
mod graph;
mod memory;
mod result;
mod stream;
mod virtual_memory;
mod words;
