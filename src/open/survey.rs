//! Finds the devices of this machine, and chooses between GPUs and the host.

use std::fmt;
use std::str::FromStr;

use cfg_if::cfg_if;
use peerlane_hal::ErrorKind;

use crate::Error;

/// The minimum number of GPUs for choosing them automatically; a single one has no peer.
const GPUS_MIN: usize = 2;

/// A backend of Peerlane, selected by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Backend {
    /// The backend for threads or processes of one machine, over shared memory.
    Host,
    /// The backend for NVIDIA GPUs of one machine.
    Cuda,
    /// The backend for AMD GPUs of one machine.
    Rocm,
    /// The backend for RDMA NICs, between machines or inside one.
    Rdma,
}

impl Backend {
    /// All backends, whether this build contains them or not.
    pub const ALL: [Self; 4] = [Self::Host, Self::Cuda, Self::Rocm, Self::Rdma];

    /// Returns the name of the backend, such as `cuda`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Cuda => "cuda",
            Self::Rocm => "rocm",
            Self::Rdma => "rdma",
        }
    }

    /// Returns whether this build contains the backend, which is a feature of the crate.
    pub const fn is_built_in(self) -> bool {
        match self {
            Self::Host => cfg!(feature = "host"),
            Self::Cuda => cfg!(feature = "cuda"),
            Self::Rocm => cfg!(feature = "rocm"),
            Self::Rdma => cfg!(feature = "rdma"),
        }
    }

    pub(super) fn check_built_in(self) -> Result<(), Error> {
        if self.is_built_in() {
            return Ok(());
        }
        let text = format!(
            "this program was built without the backend {self}; enable the feature `{self}` of the crate `peerlane` and build it again"
        );
        Err(Error::new(ErrorKind::Unavailable, text))
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Backend {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        Self::ALL.into_iter().find(|backend| backend.name() == text).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            let text = format!("unknown backend {text:?}, expected one of {names}");
            Error::new(ErrorKind::InvalidArgument, text)
        })
    }
}

/// A GPU or NIC of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Device {
    /// The number of a GPU in its driver, or the position of a NIC in the list of NICs.
    pub ordinal: u32,
    /// The PCI address of a GPU, such as `0000:1b:00.0`; the name of a NIC, such as `mlx5_0`.
    pub name: String,
}

impl Device {
    /// Creates a description of a GPU or NIC, for example for tests.
    pub fn new(ordinal: u32, name: impl Into<String>) -> Self {
        Self { ordinal, name: name.into() }
    }
}

/// The GPUs and NICs of this machine, or for each backend the reason why there are none.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Survey {
    /// The NVIDIA GPUs of this machine, or the reason why there are none.
    pub cuda: Result<Vec<Device>, String>,
    /// The AMD GPUs of this machine, or the reason why there are none.
    pub rocm: Result<Vec<Device>, String>,
    /// The RDMA NICs of this machine, or the reason why there are none.
    pub rdma: Result<Vec<Device>, String>,
}

impl Survey {
    /// Loads the libraries of all vendors, and lists the devices of this machine that they report.
    pub fn of_machine() -> Self {
        Self { cuda: cuda_devices(), rocm: rocm_devices(), rdma: rdma_devices() }
    }

    pub(super) fn for_request(requested: Option<Backend>) -> Self {
        let skipped =
            |backend| move || Err(format!("it was not looked for: the backend is {backend}"));
        let look = |backend, devices: fn() -> Result<Vec<Device>, String>| match requested {
            Some(other) if other != backend => skipped(other)(),
            _ => devices(),
        };
        Self {
            cuda: look(Backend::Cuda, cuda_devices),
            rocm: look(Backend::Rocm, rocm_devices),
            rdma: rdma_devices(),
        }
    }

    /// Chooses between GPUs and the host for `local_ranks` ranks of this machine, or for as many as there are
    /// GPUs. Returns the backend and the reasons.
    ///
    /// Every rank needs a GPU of its own. A single GPU is chosen only if there are ranks on other machines.
    pub fn choose_local(
        &self,
        local_ranks: Option<usize>,
        several_hosts: bool,
    ) -> (Backend, Vec<String>) {
        let mut reasons = Vec::new();
        for (backend, devices) in [(Backend::Cuda, &self.cuda), (Backend::Rocm, &self.rocm)] {
            if !backend.is_built_in() {
                continue;
            }
            let reason = match devices {
                Err(reason) => reason.clone(),
                Ok(devices) => {
                    let gpus = match devices.len() {
                        1 => "1 GPU".to_owned(),
                        count => format!("{count} GPUs"),
                    };
                    let too_many = local_ranks.filter(|ranks| *ranks > devices.len());
                    if devices.len() < GPUS_MIN && !several_hosts {
                        format!("{gpus}, expected {GPUS_MIN} or more")
                    } else if let Some(ranks) = too_many {
                        format!(
                            "{gpus} for {ranks} ranks; select the backend {backend} explicitly to share GPUs"
                        )
                    } else {
                        return (backend, vec![gpus]);
                    }
                }
            };
            reasons.push(format!("{backend}: {reason}"));
        }
        (Backend::Host, reasons)
    }
}

fn cuda_devices() -> Result<Vec<Device>, String> {
    cfg_if! {
        if #[cfg(feature = "cuda")] {
            let devices = peerlane_cuda::discover().map_err(|error| error.to_string())?;
            let device = |device: peerlane_cuda::Device| {
                Device::new(device.ordinal, device.pci_bus_id)
            };
            Ok(devices.into_iter().map(device).collect())
        } else {
            not_built_in(Backend::Cuda)
        }
    }
}

fn rocm_devices() -> Result<Vec<Device>, String> {
    cfg_if! {
        if #[cfg(feature = "rocm")] {
            let devices = peerlane_rocm::discover().map_err(|error| error.to_string())?;
            let device = |device: peerlane_rocm::Device| {
                Device::new(device.ordinal, device.pci.to_string())
            };
            Ok(devices.into_iter().map(device).collect())
        } else {
            not_built_in(Backend::Rocm)
        }
    }
}

fn rdma_devices() -> Result<Vec<Device>, String> {
    cfg_if! {
        if #[cfg(feature = "rdma")] {
            let devices = peerlane_rdma::discover().map_err(|error| error.to_string())?;
            if devices.is_empty() {
                return Err("this machine has no RDMA device; run `peerlane doctor` for details".to_owned());
            }
            let device = |(ordinal, device): (u32, peerlane_rdma::Device)| {
                Device::new(ordinal, device.name)
            };
            Ok((0..).zip(devices).map(device).collect())
        } else {
            not_built_in(Backend::Rdma)
        }
    }
}

#[cfg(not(all(feature = "cuda", feature = "rocm", feature = "rdma")))]
fn not_built_in(backend: Backend) -> Result<Vec<Device>, String> {
    Err(format!("this program was built without the feature `{backend}` of the crate `peerlane`"))
}
