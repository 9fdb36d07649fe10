//! Boots a small virtual machine with soft RoCE devices and runs commands in it.
//!
//! The tests of the RDMA backend run there on real libibverbs and a real kernel driver, without RDMA hardware
//! and without root. The emulator, the kernel and the guest's programs are Debian packages that are unpacked
//! below `target/`; nothing is installed.
//!
//! | file | holds |
//! | --- | --- |
//! | `vm` | a virtual machine: its parts, and a boot |
//! | `machine` | the QEMU process |
//! | `console` | the guest's console: marks, test totals, the verdict on a boot |
//! | `guest` | the guest's nodes, its jobs and the script that runs them |
//! | `image`, `cpio` | the guest's root file system |
//! | `kernel`, `modules` | a kernel with soft RoCE and its modules |
//! | `emulator` | a QEMU that is new enough |
//! | `tools` | programs and libraries of this machine or of unpacked packages |
//! | `packages` | Debian packages, downloaded and unpacked |
//! | `process` | child processes and their errors |
//! | `perftest` | jobs that run perftest programs between two nodes |

mod console;
mod cpio;
mod emulator;
mod guest;
mod image;
mod kernel;
mod machine;
mod modules;
pub mod packages;
pub mod perftest;
pub mod process;
mod tools;
mod vm;

pub use console::{Console, End, Ended, Status, Totals};
pub use guest::{Job, Nodes, quoted};
pub use tools::{GuestFile, Tools};
pub use vm::{Booted, Program, Programs, Vm, unavailable};
