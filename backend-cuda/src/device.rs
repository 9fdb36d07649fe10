//! Which NVIDIA GPUs this machine has.
//!
//! What goes here: `cuInit`, `cuDeviceGetCount`; the number of copy engines (`asyncEngineCount`)
//! bounds how many copies an engine keeps in flight, because more at once collapse.

use crate::error::Error;

/// An NVIDIA GPU; there is no value of it yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Device {}

/// The NVIDIA GPUs of this machine.
///
/// # Errors
/// Always [`Error::NotBuilt`], of kind [`Unavailable`](peerlane_hal::ErrorKind::Unavailable): this
/// build did not look.
pub fn discover() -> Result<Vec<Device>, Error> {
    Err(Error::NotBuilt)
}

#[cfg(test)]
mod tests {
    use peerlane_hal::{Error as _, ErrorKind};

    use super::*;

    #[test]
    fn discovery_says_that_the_backend_is_not_built() {
        let error = discover().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert_eq!(
            error.to_string(),
            "this version of Peerlane has no CUDA backend yet and did not look for \
             NVIDIA GPUs; use the backend host"
        );
    }
}
