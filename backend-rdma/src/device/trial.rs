//! Probes device features that no attribute reports.

use std::fmt;
use std::sync::Arc;

use rustix::io::Errno;

use crate::error::Error;
use crate::sys::{self, Domain};

/// The reason why a device cannot register dma-bufs of other devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DmabufRefusal {
    /// libibverbs is older than rdma-core 34, which added dma-bufs.
    Library,
    /// The provider, the driver or the kernel does not support it.
    Driver(Errno),
}

impl fmt::Display for DmabufRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Library => f.write_str("libibverbs is older than rdma-core 34"),
            Self::Driver(errno) => write!(f, "its driver refuses dma-bufs: {errno}"),
        }
    }
}

/// Returns whether the device of this name can register dma-bufs of other devices, and why not.
///
/// # Errors
/// As [`discover`](super::discover), or if there is no such device.
pub fn try_dmabuf(name: &str) -> Result<Result<(), DmabufRefusal>, Error> {
    let contexts = sys::open_all(sys::library()?, |_, seen| seen == name)?;
    let Some(context) = contexts.first() else {
        return Err(Error::unavailable(format!("there is no RDMA device {name:?}")));
    };
    let domain = Domain::open(Arc::clone(context))?;
    Ok(judge(context.library.reg_dmabuf_mr.is_some(), domain.refuse_dmabuf()))
}

/// Decides by the error of a registration with an invalid file: a driver that checks the file supports dma-bufs.
fn judge(library: bool, answer: Option<Errno>) -> Result<(), DmabufRefusal> {
    match answer {
        _ if !library => Err(DmabufRefusal::Library),
        None | Some(Errno::BADF) => Ok(()),
        Some(errno) => Err(DmabufRefusal::Driver(errno)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_that_looks_at_the_file_takes_dma_bufs() {
        assert_eq!(judge(true, Some(Errno::BADF)), Ok(()));
        let text = |library, errno| judge(library, Some(errno)).unwrap_err().to_string();
        assert_eq!(
            text(true, Errno::OPNOTSUPP),
            "its driver refuses dma-bufs: Operation not supported (os error 95)"
        );
        assert_eq!(text(false, Errno::BADF), "libibverbs is older than rdma-core 34");
    }
}
