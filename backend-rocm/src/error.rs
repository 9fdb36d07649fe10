//! What went wrong, and the vendor's code.
//!
//! What goes here: `hipError_t` and `hsa_status_t` as plain integers with their names. HIP's 100
//! and 101 and HSA's 0x1008 mean that there is no device and are of kind `Unavailable`.

use std::fmt;

use peerlane_hal::ErrorKind;

/// Why the ROCm backend could not do something.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// This build of Peerlane cannot use AMD GPUs.
    NotBuilt,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotBuilt => f.write_str(
                "this version of Peerlane has no ROCm backend yet and did not look for \
                 AMD GPUs; use the backend host",
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
