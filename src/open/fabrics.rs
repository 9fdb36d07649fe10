//! Opens the fabric of a backend such as CUDA or RDMA.

use peerlane_collectives::bootstrap::Bootstrap;
use peerlane_hal::{DynFabric, Rank};

use super::Backend;
use crate::{Error, Group, GroupOptions};

/// The options with which fabrics of each backend are opened.
///
/// ```
/// use peerlane::open::{Backend, FabricOptions};
/// use peerlane::{Rank, hal::Fabric};
///
/// # #[cfg(feature = "host")] {
/// let options = FabricOptions::default();
/// let fabric = options.open(Backend::Host, Rank(0), 1)?;
/// assert_eq!(fabric.rank(), Rank(0));
/// # }
/// # Ok::<(), peerlane::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct FabricOptions {
    /// Options of the fabrics of the host backend.
    #[cfg(feature = "host")]
    pub host: peerlane_host::Options,
    /// Options of CUDA fabrics, with the GPU of this rank.
    #[cfg(feature = "cuda")]
    pub cuda: peerlane_cuda::Options,
    /// Options of ROCm fabrics, with the GPU of this rank.
    #[cfg(feature = "rocm")]
    pub rocm: peerlane_rocm::Options,
    /// Options of RDMA fabrics, with the NICs of this rank.
    #[cfg(feature = "rdma")]
    pub rdma: peerlane_rdma::Options,
    /// Options of UCX fabrics, with the network devices of this rank.
    #[cfg(feature = "ucx")]
    pub ucx: peerlane_ucx::Options,
}

impl FabricOptions {
    /// Opens a fabric of `backend` as `rank` of `ranks`.
    ///
    /// # Errors
    /// Returns [`Unavailable`](peerlane_hal::ErrorKind::Unavailable) if the backend was not built in, and the
    /// error of the backend.
    pub fn open(&self, backend: Backend, rank: Rank, ranks: usize) -> Result<DynFabric, Error> {
        match backend {
            #[cfg(feature = "host")]
            Backend::Host => {
                let fabric = peerlane_host::Fabric::open_with(rank, ranks, self.host)?;
                Ok(DynFabric::new(fabric))
            }
            #[cfg(feature = "cuda")]
            Backend::Cuda => {
                let fabric = peerlane_cuda::Fabric::open_with(rank, ranks, self.cuda.clone())?;
                Ok(DynFabric::new(fabric))
            }
            #[cfg(feature = "rocm")]
            Backend::Rocm => {
                let fabric = peerlane_rocm::Fabric::open_with(rank, ranks, self.rocm.clone())?;
                Ok(DynFabric::new(fabric))
            }
            #[cfg(feature = "rdma")]
            Backend::Rdma => {
                let fabric = peerlane_rdma::Fabric::open_with(rank, ranks, self.rdma.clone())?;
                Ok(DynFabric::new(fabric))
            }
            #[cfg(feature = "ucx")]
            Backend::Ucx => {
                let fabric = peerlane_ucx::Fabric::open_with(rank, ranks, self.ucx.clone())?;
                Ok(DynFabric::new(fabric))
            }
            #[allow(unreachable_patterns, reason = "with all features, every backend is built in")]
            backend => {
                let _ = (rank, ranks);
                backend.check_built_in()?;
                unreachable!("a backend that is built in has an arm")
            }
        }
    }

    /// Opens a second fabric of this rank, for use at the same time as `first`. Two host fabrics of a rank
    /// share its doorbell, so that signals over either wake the rank.
    pub(super) fn open_second(
        &self,
        first: &DynFabric,
        backend: Backend,
        rank: Rank,
        ranks: usize,
    ) -> Result<DynFabric, Error> {
        #[cfg(feature = "host")]
        if let (Backend::Host, Some(first)) =
            (backend, first.downcast_ref::<peerlane_host::Fabric>())
        {
            return Ok(DynFabric::new(first.second(self.host)?));
        }
        let _ = first;
        self.open(backend, rank, ranks)
    }

    pub(super) fn set_device(&mut self, ordinal: u32) {
        #[cfg(feature = "cuda")]
        {
            self.cuda.device = ordinal;
        }
        #[cfg(feature = "rocm")]
        {
            self.rocm.device = ordinal;
        }
        let _ = ordinal;
    }

    pub(super) fn set_strict(&mut self) {
        #[cfg(feature = "cuda")]
        {
            self.cuda.strict = true;
        }
        #[cfg(feature = "rocm")]
        {
            self.rocm.strict = true;
        }
    }

    /// Lets the NICs of ranks on one machine exchange addresses over the loopback interface. This process may
    /// not be part of the network of the NIC, for instance in a container.
    pub(super) fn stay_on_machine(&mut self) {
        #[cfg(feature = "rdma")]
        {
            use std::net::{IpAddr, Ipv4Addr};
            self.rdma.service_ip.get_or_insert(IpAddr::V4(Ipv4Addr::LOCALHOST));
        }
    }
}

/// The fabrics of a rank before they become a group, so that the caller can put layers around them.
///
/// ```
/// use peerlane::bootstrap::in_process;
/// use peerlane::open::{Backend, OpenOptions};
///
/// # #[cfg(feature = "host")]
/// in_process::run(2, |bootstrap| {
///     let fabrics = OpenOptions::default().backend(Backend::Host).open_fabrics(&bootstrap)?;
///     let group = fabrics.into_group(bootstrap)?;
///     println!("{}", group.selection());
///     group.close()
/// })?;
/// # Ok::<(), peerlane::Error>(())
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub struct Fabrics {
    /// The fabric inside a node, or between all ranks if there is no network.
    pub local: DynFabric,
    /// The fabric between nodes; `None` if the local fabric connects all ranks.
    pub network: Option<DynFabric>,
    /// The options of the group, with the topology that was chosen; a caller can set others before
    /// [`into_group`](Self::into_group).
    pub group: GroupOptions,
}

impl Fabrics {
    /// Opens a group on these fabrics, over the bootstrap connection with which they were opened. Collective.
    ///
    /// # Errors
    /// As [`GroupOptions::open`].
    pub fn into_group(self, bootstrap: impl Bootstrap + 'static) -> Result<Group, Error> {
        match self.network {
            None => self.group.open(bootstrap, self.local),
            Some(network) => self.group.open_tiers(bootstrap, self.local, network),
        }
    }
}
