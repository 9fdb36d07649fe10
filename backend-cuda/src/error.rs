//! What went wrong, and the vendor's code.
//!
//! What goes here: `CUresult` as a plain integer with the name that the driver gives it. 100, no
//! device, and 3, not initialised, are of kind `Unavailable`; sticky errors of the context are
//! `DeviceLost`.

use std::fmt;

use peerlane_hal::ErrorKind;

/// Why the CUDA backend could not do something.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// This build of Peerlane cannot use NVIDIA GPUs.
    NotBuilt,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotBuilt => f.write_str(
                "this version of Peerlane has no CUDA backend yet and did not look for \
                 NVIDIA GPUs; use the backend host",
            ),
        }
    }
}

impl std::error::Error for Error {}

impl peerlane_hal::Error for Error {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::NotBuilt => ErrorKind::Unavailable,
        }
    }
}
