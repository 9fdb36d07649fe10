//! What a device offers that no attribute tells: found out by trying.

use std::fmt;
use std::sync::Arc;

use rustix::io::Errno;

use crate::error::Error;
use crate::sys::{self, Domain};

/// Why a device takes no memory of other devices as dma-bufs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DmabufRefusal {
    /// libibverbs is older than rdma-core 34.
    Library,
    /// The provider, the driver or the kernel cannot.
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

/// Whether the device of this name registers memory of other devices as dma-bufs, and why not.
///
/// # Errors
/// As [`discover`](super::discover), or there is no such device.
pub fn try_dmabuf(name: &str) -> Result<Result<(), DmabufRefusal>, Error> {
    let contexts = sys::open_all(sys::library()?, |_, seen| seen == name)?;
    let Some(context) = contexts.first() else {
        return Err(Error::unavailable(format!("there is no RDMA device {name:?}")));
    };
    let domain = Domain::open(Arc::clone(context))?;
    Ok(judge(context.library.reg_dmabuf_mr.is_some(), domain.refuse_dmabuf()))
}

/// A driver that looks at the file before it refuses is one that knows dma-bufs.
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
