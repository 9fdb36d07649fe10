//! Finds the devices of this machine, and chooses between GPUs and the host.

use std::fmt;
use std::str::FromStr;

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
    /// The backend for the networks of UCX, such as Ethernet, between machines or inside one.
    Ucx,
}

impl Backend {
    /// All backends, whether this build contains them or not.
    pub const ALL: [Self; 5] = [Self::Host, Self::Cuda, Self::Rocm, Self::Rdma, Self::Ucx];

    /// The backends that connect machines, in the order in which they are preferred.
    pub const NETWORKS: [Self; 2] = [Self::Rdma, Self::Ucx];

    /// Returns whether the backend connects machines.
    pub fn is_network(self) -> bool {
        Self::NETWORKS.contains(&self)
    }

    /// Returns the name of the backend, such as `cuda`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Cuda => "cuda",
            Self::Rocm => "rocm",
            Self::Rdma => "rdma",
            Self::Ucx => "ucx",
        }
    }

    /// Returns whether this build contains the backend, which is a feature of the crate.
    pub const fn is_built_in(self) -> bool {
        match self {
            Self::Host => cfg!(feature = "host"),
            Self::Cuda => cfg!(feature = "cuda"),
            Self::Rocm => cfg!(feature = "rocm"),
            Self::Rdma => cfg!(feature = "rdma"),
            Self::Ucx => cfg!(feature = "ucx"),
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

/// A GPU or a network device of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Device {
    /// The number of a GPU in its driver, or the position of a device in the list of its network.
    pub ordinal: u32,
    /// The PCI address of a GPU, such as `0000:1b:00.0`; the name of a network device, such as
    /// `mlx5_0` or `eth0`.
    pub name: String,
    /// The product name of a GPU, such as `NVIDIA H100 80GB HBM3`, if it is known.
    pub product: Option<String>,
}

impl Device {
    /// Creates a description of a GPU or a network device, for example for tests.
    pub fn new(ordinal: u32, name: impl Into<String>) -> Self {
        Self { ordinal, name: name.into(), product: None }
    }
}

/// The reason why a backend has no GPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NoGpus {
    /// This machine has no driver or no GPU of the vendor, or none was looked for.
    Absent(String),
    /// A driver is installed, but it does not work.
    Broken(String),
}

impl fmt::Display for NoGpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Absent(reason) | Self::Broken(reason)) = self;
        f.write_str(reason)
    }
}

/// The reason in a survey of what was left out.
const NOT_LOOKED_FOR: &str = "it was not looked for";

/// The GPUs and network devices of this machine, or for each backend the reason why there are none.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Survey {
    /// The NVIDIA GPUs of this machine, or the reason why there are none.
    pub cuda: Result<Vec<Device>, NoGpus>,
    /// The AMD GPUs of this machine, or the reason why there are none.
    pub rocm: Result<Vec<Device>, NoGpus>,
    /// The RDMA NICs of this machine, or the reason why there are none.
    pub rdma: Result<Vec<Device>, String>,
    /// The network devices that UCX can use on this machine, or the reason why there are none.
    pub ucx: Result<Vec<Device>, String>,
}

impl Survey {
    /// Loads the libraries of all vendors, and lists the devices of this machine that they report.
    pub fn of_machine() -> Self {
        Self {
            rdma: Self::of_network(Backend::Rdma),
            ucx: Self::of_network(Backend::Ucx),
            ..Self::for_request(None)
        }
    }

    /// Lists the GPUs of this machine, and loads no library of a network.
    ///
    /// UCX ends a process that has reached its limit of threads or memory when it loads.
    pub fn of_gpus() -> Self {
        Self::for_request(None)
    }

    /// Lists the GPUs that a rank may use, and no networks.
    pub(super) fn for_request(requested: Option<Backend>) -> Self {
        let gpus = |backend| match requested {
            Some(other) if other != backend => {
                let reason = format!("it was not looked for: the backend is {other}");
                Err(NoGpus::Absent(reason))
            }
            _ => devices(backend),
        };
        Self {
            cuda: gpus(Backend::Cuda),
            rocm: gpus(Backend::Rocm),
            rdma: Err(NOT_LOOKED_FOR.to_owned()),
            ucx: Err(NOT_LOOKED_FOR.to_owned()),
        }
    }

    /// Lists the devices of one network on this machine, without a look at other backends.
    ///
    /// # Errors
    /// The reason why there are none.
    pub fn of_network(network: Backend) -> Result<Vec<Device>, String> {
        match network.is_network() {
            true => devices(network).map_err(|reason| reason.to_string()),
            false => Err(format!("the backend {network} does not connect machines")),
        }
    }

    /// Returns the devices of a [network](Backend::NETWORKS), or the reason why there are none;
    /// `None` for other backends.
    pub fn network(&self, network: Backend) -> Option<&Result<Vec<Device>, String>> {
        match network {
            Backend::Rdma => Some(&self.rdma),
            Backend::Ucx => Some(&self.ucx),
            _ => None,
        }
    }

    /// Chooses between GPUs and the host for `local_ranks` ranks of this machine, or for as many as
    /// there are GPUs. Returns the backend and the reasons.
    ///
    /// Every rank needs a GPU of its own. Without a number of ranks, a single GPU is not chosen,
    /// because it has no peer. If there are GPUs but too few, the choice is the host, and the
    /// reasons say so; for [`OpenOptions`](super::OpenOptions) that is an error.
    ///
    /// # Errors
    /// [`Unavailable`](ErrorKind::Unavailable) if a driver is installed but does not work, and no
    /// other backend has a GPU for each rank.
    pub fn choose_local(
        &self,
        local_ranks: Option<usize>,
    ) -> Result<(Backend, Vec<String>), Error> {
        let count = |devices: &Result<Vec<Device>, NoGpus>| {
            devices.as_ref().map(Vec::len).map_err(NoGpus::clone)
        };
        choose(&count(&self.cuda), &count(&self.rocm), local_ranks).map_err(|(backend, reason)| {
            let text = format!("the driver of the backend {backend} does not work: {reason}");
            Error::new(ErrorKind::Unavailable, text)
        })
    }
}

/// The number of GPUs of one backend, or the reason why there are none.
pub(super) type GpuCount = Result<usize, NoGpus>;

/// Chooses as [`Survey::choose_local`]. The error is a backend whose driver does not work, with the
/// reason.
pub(super) fn choose(
    cuda: &GpuCount,
    rocm: &GpuCount,
    local_ranks: Option<usize>,
) -> Result<(Backend, Vec<String>), (Backend, String)> {
    let (mut reasons, mut broken) = (Vec::new(), None);
    for (backend, gpus) in [(Backend::Cuda, cuda), (Backend::Rocm, rocm)] {
        if !backend.is_built_in() {
            continue;
        }
        let reason = match gpus {
            Err(NoGpus::Absent(reason)) => reason.clone(),
            Err(NoGpus::Broken(reason)) => {
                broken.get_or_insert_with(|| (backend, reason.clone()));
                continue;
            }
            // The host is the choice only if no backend has a GPU for each rank.
            Ok(count) => match local_ranks {
                None if *count < GPUS_MIN => {
                    format!("{}, expected {GPUS_MIN} or more", gpus_text(*count))
                }
                Some(ranks) if *count < ranks => format!(
                    "{} for {ranks} ranks; select the backend {backend} explicitly to share GPUs",
                    gpus_text(*count)
                ),
                _ => {
                    let broken = broken.map(|(backend, reason)| format!("{backend}: {reason}"));
                    return Ok((backend, [gpus_text(*count)].into_iter().chain(broken).collect()));
                }
            },
        };
        reasons.push(format!("{backend}: {reason}"));
    }
    broken.map_or(Ok((Backend::Host, reasons)), Err)
}

pub(super) fn gpus_text(count: usize) -> String {
    if count == 1 { "1 GPU".to_owned() } else { format!("{count} GPUs") }
}

/// Returns the devices of this machine that a backend reports, or the reason why it has none.
fn devices(backend: Backend) -> Result<Vec<Device>, NoGpus> {
    if !backend.is_built_in() {
        let reason = format!(
            "this program was built without the feature `{backend}` of the crate `peerlane`"
        );
        return Err(NoGpus::Absent(reason));
    }

    match backend {
        #[cfg(feature = "cuda")]
        Backend::Cuda => cuda_devices(),
        #[cfg(feature = "rocm")]
        Backend::Rocm => rocm_devices(),
        #[cfg(feature = "rdma")]
        Backend::Rdma => {
            network_devices(backend, peerlane_rdma::discover(), |device| device.name, "rdma-core")
        }
        #[cfg(feature = "ucx")]
        Backend::Ucx => network_devices(
            backend,
            peerlane_ucx::discover(),
            |device| device.name,
            "libucx0 (Debian, Ubuntu) or ucx (Fedora, RHEL)",
        ),
        // Only the host is left here: it has no devices besides its memory.
        _ => Ok(Vec::new()),
    }
}

#[cfg(feature = "cuda")]
fn cuda_devices() -> Result<Vec<Device>, NoGpus> {
    let devices = peerlane_cuda::discover().map_err(|error| match error {
        peerlane_cuda::Error::Absent { text, .. } => NoGpus::Absent(text),
        error => NoGpus::Broken(error.to_string()),
    })?;
    let device = |device: peerlane_cuda::Device| {
        let product = Some(device.name);
        Device { product, ..Device::new(device.ordinal, device.pci_bus_id) }
    };
    Ok(devices.into_iter().map(device).collect())
}

#[cfg(feature = "rocm")]
fn rocm_devices() -> Result<Vec<Device>, NoGpus> {
    let devices = peerlane_rocm::discover().map_err(|error| match error {
        peerlane_rocm::Error::Absent { text, .. } => NoGpus::Absent(text),
        error => NoGpus::Broken(error.to_string()),
    })?;
    let device = |device: peerlane_rocm::Device| {
        let product = Some(device.name);
        Device { product, ..Device::new(device.ordinal, device.pci.to_string()) }
    };
    Ok(devices.into_iter().map(device).collect())
}

/// Describes the devices that a network has discovered. Its error says what to install; a machine
/// without devices may lack `packages`.
#[allow(dead_code, reason = "a build may have no network")]
fn network_devices<D>(
    network: Backend,
    discovered: Result<Vec<D>, impl fmt::Display>,
    name: fn(D) -> String,
    packages: &str,
) -> Result<Vec<Device>, NoGpus> {
    let devices = discovered.map_err(|error| NoGpus::Absent(error.to_string()))?;
    let mut names: Vec<_> = devices.into_iter().map(name).collect();
    // A device with several transports is listed once for each.
    names.dedup();
    if names.is_empty() {
        let text =
            format!("this machine has no {network} device; install {packages} if it has one");
        return Err(NoGpus::Absent(text));
    }

    let device = |(ordinal, name)| Device::new(ordinal, name);
    Ok((0..).zip(names).map(device).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_has_each_device_once_or_a_reason() {
        let devices = |discovered: Result<Vec<&str>, &str>| {
            let devices = network_devices(Backend::Ucx, discovered, str::to_owned, "libucx0");
            let names = |devices: Vec<Device>| devices.into_iter().map(|device| device.name);
            devices.map(|devices| names(devices).collect::<Vec<_>>().join(", "))
        };
        let absent = |text: &str| Err(NoGpus::Absent(text.to_owned()));
        assert_eq!(devices(Ok(vec!["eth0", "eth0", "lo"])), Ok("eth0, lo".to_owned()));
        assert_eq!(devices(Err("cannot load it")), absent("cannot load it"));
        assert_eq!(
            devices(Ok(Vec::new())),
            absent("this machine has no ucx device; install libucx0 if it has one")
        );
    }

    #[test]
    fn a_survey_has_every_network() {
        let survey = Survey::for_request(Some(Backend::Host));
        for backend in Backend::ALL {
            assert_eq!(survey.network(backend).is_some(), backend.is_network(), "{backend}");
            assert!(backend.is_network() || Survey::of_network(backend).is_err(), "{backend}");
        }
    }
}
