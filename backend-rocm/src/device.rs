//! Which AMD GPUs this machine has.
//!
//! What goes here: `hipInit` and `hipGetDeviceCount`, `hsa_init` and `hsa_iterate_agents`; the two
//! lists are matched by PCI address, because their orders may differ.

use crate::error::Error;

/// An AMD GPU; there is no value of it yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Device {}

/// The AMD GPUs of this machine.
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
            "this version of Peerlane has no ROCm backend yet and did not look for \
             AMD GPUs; use the backend host"
        );
    }
}
