//! Which RDMA network cards this machine has.
//!
//! What goes here: `ibv_get_device_list`; a null list with errno 38 means that the kernel has no
//! RDMA, which is no error but no device.

use crate::error::Error;

/// An RDMA network card; there is no value of it yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Device {}

/// The RDMA network cards of this machine.
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
            "this version of Peerlane has no RDMA backend yet and did not look for \
             RDMA network cards; use the backend host"
        );
    }
}
