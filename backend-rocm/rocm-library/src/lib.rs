//! Finds and opens the libraries of ROCm, for [`hip-sys`] and [`hsa-sys`].
//!
//! [`Wanted::open`] asks the loader for each soname that a release of ROCm has had, the newest first,
//! and then looks into `$ROCM_PATH/lib` and `/opt/rocm/lib`, because ROCm's own packages do not tell
//! the loader where they are. [`table!`] declares a table of functions over what was opened: required
//! ones apart from those that only newer releases have. A missing library or function is a
//! [`LoadError`] that names the file, never a panic.
//!
//! [`hip-sys`]: https://docs.rs/peerlane-hip-sys
//! [`hsa-sys`]: https://docs.rs/peerlane-hsa-sys

mod open;
mod table;

pub use open::{LoadError, Opened, Wanted};
pub use table::Symbol;
