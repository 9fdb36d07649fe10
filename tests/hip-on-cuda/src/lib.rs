//! HIP's symbols over the driver of NVIDIA GPUs: a library that takes the place of `libamdhip64.so`, so
//! that the ROCm backend's streams, copies, IPC and memory run on real devices where there is no AMD GPU.
//!
//! It is for tests and never shipped. `cargo xtask test rocm --hip-on-cuda` builds it, puts it where the
//! loader looks first, and runs the tests of the ROCm backend with it.
//!
//! Every function of `hip-sys`'s table is here, with the type that the table has for it, except
//! `hipMemcpyBatchAsync` and `hipMemGetHandleForAddressRange`. HIP's functions map one to one to the
//! driver's; what differs:
//!
//! | HIP | here |
//! | --- | --- |
//! | the current device of a thread | the primary context of that device, made current where it is not |
//! | the version | 7.2.0 |
//! | results | CUDA's numbers, which are HIP's but for a refusal of permission, which is "not supported" |
//! | `hipMemcpyDeviceToDeviceNoCU` | any copy; the driver of NVIDIA chooses |
//! | signal memory | ordinary memory |
//! | XGMI | NVLink, told by atomics between two devices |
//!
//! What it cannot show: SDMA engines, HSA signals, and what AMD's runtime does otherwise than its
//! documentation.

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
