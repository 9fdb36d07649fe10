//! Describes the backends of vendors to the conformance suite.
//!
//! | file | backend |
//! | --- | --- |
//! | `gpu.rs` | any GPU backend, on GPUs or on the simulated driver |
//! | `cuda.rs`, `rocm.rs` | what `gpu.rs` needs from each vendor |
//! | `rdma.rs` | RDMA |
//! | `staged.rs` | device memory, staged through host memory on a network |

pub(crate) mod cuda;
pub(crate) mod gpu;
pub(crate) mod rdma;
pub(crate) mod rocm;
pub(crate) mod staged;
