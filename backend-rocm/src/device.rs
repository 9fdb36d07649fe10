//! Which AMD GPUs this process may use, and what they are.
//!
//! HIP's ordinals count the devices that `HIP_VISIBLE_DEVICES` leaves of those that
//! `ROCR_VISIBLE_DEVICES` leaves; the HSA runtime knows only the second. The two lists may be ordered
//! differently too, so a device and its HSA agent are matched by PCI address, and peers name devices by
//! UUID.

pub(crate) mod absence;
mod agent;
mod context;
mod link;
mod numa;
mod pool;
mod visible;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

pub use agent::{Agent, AgentKind, agent};
pub(crate) use agent::{agents, find as find_agent};
pub use context::Context;
pub(crate) use link::between;
pub use link::{DeviceLink, link};
pub(crate) use pool::{Pool, pools};
pub(crate) use visible::{all as visible_devices, attribute, find};

use crate::error::Error;
use crate::sys::{Hip, Hsa};

/// A release of a runtime.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// Such as 7 of 7.2.
    pub major: u32,
    /// Such as 2 of 7.2.
    pub minor: u32,
    /// The number of the build.
    pub patch: u32,
}

impl Version {
    /// What `hipRuntimeGetVersion` says, such as 70253211.
    pub(crate) fn of_hip(number: i32) -> Self {
        let number = number.unsigned_abs();
        Self { major: number / 10_000_000, minor: number / 100_000 % 100, patch: number % 100_000 }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { major, minor, patch } = self;
        write!(f, "{major}.{minor}.{patch}")
    }
}

/// Where a device sits on the host's bus.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    /// The segment.
    pub domain: u32,
    /// The bus.
    pub bus: u8,
    /// The device on it.
    pub device: u8,
    /// The function, or the part of a divided GPU.
    pub function: u8,
}

impl PciAddress {
    /// What `hipDeviceGetPCIBusId` writes, such as `0000:c1:00.0`.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (rest, function) = text.rsplit_once('.')?;
        let mut parts = rest.split(':');
        let mut part = || u32::from_str_radix(parts.next()?, 16).ok();
        let (domain, bus, device) = (part()?, part()?, part()?);
        let function = u8::from_str_radix(function, 16).ok()?;
        let (bus, device) = (u8::try_from(bus).ok()?, u8::try_from(device).ok()?);
        (device < 32 && function < 8).then_some(Self { domain, bus, device, function })
    }

    /// Of the HSA runtime's two numbers.
    pub(crate) fn of_agent(domain: u32, bdf: u32) -> Self {
        let [function, bus, ..] = bdf.to_le_bytes();
        Self { domain, bus, device: function >> 3, function: function & 7 }
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { domain, bus, device, function } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function:x}")
    }
}

/// An AMD GPU, or a part of one.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Device {
    /// Its number among the devices that this process may use.
    pub ordinal: u32,
    /// The product name.
    pub name: String,
    /// Names the device for all processes.
    pub uuid: [u8; 16],
    /// Where it sits.
    pub pci: PciAddress,
    /// Its memory in bytes.
    pub memory_bytes: u64,
    /// Its compute units.
    pub compute_units: u32,
    /// The NUMA node of the host that is nearest; `None` where the system does not say.
    pub numa_node: Option<u32>,
    /// Whether physical memory and addresses can be had apart (`hipMemCreate`, `hipMemMap`).
    pub virtual_memory: bool,
}

impl Device {
    /// The device in texts, such as `device 2 (AMD Instinct MI300X)`.
    pub(crate) fn label(&self) -> Arc<str> {
        format!("device {} ({})", self.ordinal, self.name).into()
    }

    /// Tells the device from the others of this host: its UUID, or where it has none of its own, as
    /// many of one host may not, its PCI address.
    pub(crate) fn identity(&self) -> [u8; 16] {
        if self.uuid.iter().all(u8::is_ascii_hexdigit) {
            return self.uuid;
        }
        let PciAddress { domain, bus, device, function } = self.pci;
        let mut identity = *b"PCI\0............";
        identity[4..8].copy_from_slice(&domain.to_be_bytes());
        identity[8..].copy_from_slice(&[bus, device, function, 0, 0, 0, 0, 0]);
        identity
    }

    /// The UUID as rocminfo and `ROCR_VISIBLE_DEVICES` write it.
    pub fn uuid_text(&self) -> String {
        uuid_text(&self.uuid)
    }
}

/// HIP stores the 16 digits of the HSA runtime's `GPU-0123456789abcdef` as they are; other bytes are
/// written as digits.
pub(crate) fn uuid_text(uuid: &[u8; 16]) -> String {
    match std::str::from_utf8(uuid) {
        Ok(text) if text.bytes().all(|byte| byte.is_ascii_hexdigit()) => format!("GPU-{text}"),
        _ => {
            let digits: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
            format!("GPU-{digits}")
        }
    }
}

/// The AMD GPUs that this process may use; at least one.
///
/// # Errors
/// Of kind [`Unavailable`](peerlane_hal::ErrorKind::Unavailable): there is no HIP, it is too old or does
/// not start, or there is no device. The text says what to do.
pub fn discover() -> Result<Vec<Device>, Error> {
    visible::all(Hip::load()?)
}

/// The runtimes of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Runtimes {
    /// The release of HIP.
    pub hip: Version,
    /// The file that HIP was loaded from.
    pub hip_file: PathBuf,
    /// The HSA runtime, or why there is none; without it copies run by streams alone.
    pub hsa: Result<HsaRuntime, String>,
}

/// The HSA runtime of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HsaRuntime {
    /// Major and minor version of AMD's part of the interface.
    pub interface: (u16, u16),
    /// The file that it was loaded from.
    pub file: PathBuf,
}

/// Releases, and the minor version of AMD's part of the interface that came with each.
const INTERFACES: [((u32, u32), u16); 3] = [((6, 1), 4), ((6, 4), 7), ((7, 2), 15)];

impl Runtimes {
    /// What tells that the two runtimes are of different releases, in words; `None` where nothing does.
    /// They were not tested together, though HIP found all functions that it needs.
    pub fn mixed(&self) -> Option<String> {
        let HsaRuntime { interface, file } = self.hsa.as_ref().ok()?;
        let Version { major, minor, .. } = self.hip;
        let hsa = match release_of(file) {
            Some(release) if release == (major, minor) => return None,
            Some((major, minor)) => format!("of ROCm {major}.{minor}"),
            // Distributions count in another way; an older interface tells an older release.
            None => {
                let brought = INTERFACES.iter().rev().find(|(of, _)| *of <= (major, minor))?.1;
                if *interface >= (1, brought) {
                    return None;
                }
                let (major, minor) = interface;
                format!("older, with interface {major}.{minor}, wanted 1.{brought}")
            }
        };
        let (hip_file, file) = (self.hip_file.display(), file.display());
        Some(format!(
            "HIP is of ROCm {major}.{minor} ({hip_file}) and the HSA runtime {hsa} ({file})"
        ))
    }
}

/// The release of ROCm that a file of its own packages tells by its name: 6.4 of
/// `libhsa-runtime64.so.1.15.60401`. Distributions count in another way.
fn release_of(file: &std::path::Path) -> Option<(u32, u32)> {
    let name = file.file_name()?.to_str()?;
    let number: u32 = name.rsplit_once('.')?.1.parse().ok()?;
    (number >= 50_000).then_some((number / 10_000, number / 100 % 100))
}

/// Which runtimes this process uses.
///
/// # Errors
/// As [`discover`].
pub fn runtimes() -> Result<Runtimes, Error> {
    let hip = Hip::load()?;
    let hsa = Hsa::load().map_err(|error| error.to_string());
    Ok(Runtimes {
        hip: hip.version,
        hip_file: hip.calls.file().to_owned(),
        hsa: hsa
            .map(|hsa| HsaRuntime { interface: hsa.interface, file: hsa.calls.file().to_owned() }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_read_from_its_number() {
        let version = Version::of_hip(70_253_211);
        assert_eq!(version, Version { major: 7, minor: 2, patch: 53_211 });
        assert_eq!(version.to_string(), "7.2.53211");
        assert_eq!(Version::of_hip(50_731_921).to_string(), "5.7.31921");
        assert!(Version::of_hip(60_443_484) < version);
    }

    #[test]
    fn addresses_of_both_runtimes_are_one() {
        let address = PciAddress::parse("0001:C1:1f.5").unwrap();
        assert_eq!(address.to_string(), "0001:c1:1f.5");
        assert_eq!(PciAddress::of_agent(1, 0xc1fd), address);
        for wrong in ["", "c1:00.0", "0000:c1:00", "0000:1c1:00.0", "0000:c1:20.0", "0000:c1:00.8"]
        {
            assert_eq!(PciAddress::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_uuid_is_written_as_rocminfo_does() {
        assert_eq!(uuid_text(b"a1b2c3d4e5f60718"), "GPU-a1b2c3d4e5f60718");
        assert_eq!(uuid_text(&[0xab; 16]), format!("GPU-{}", "ab".repeat(16)));
    }

    #[test]
    fn a_device_without_a_uuid_of_its_own_is_told_by_its_place() {
        let device = |uuid: &[u8; 16], address| Device {
            ordinal: 0,
            name: "AMD Radeon".into(),
            uuid: *uuid,
            pci: PciAddress::parse(address).unwrap(),
            memory_bytes: 0,
            numa_node: None,
            compute_units: 0,
            virtual_memory: false,
        };
        let named = device(b"a1b2c3d4e5f60718", "0000:c1:00.0");
        assert_eq!(named.identity(), named.uuid);
        let none = b"XX\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
        let places = ["0000:c1:00.0", "0000:c1:00.1", "0001:c1:00.0"];
        let identities = places.map(|address| device(none, address).identity());
        assert!(identities[0] != identities[1] && identities[0] != identities[2]);
        assert_eq!(identities[0], device(none, places[0]).identity());
    }

    #[test]
    fn runtimes_of_two_releases_are_noticed() {
        let runtimes = |interface: u16, file: &str| Runtimes {
            hip: Version { major: 6, minor: 4, patch: 43_484 },
            hip_file: "/opt/rocm-6.4.1/lib/libamdhip64.so.6.4.60401".into(),
            hsa: Ok(HsaRuntime { interface: (1, interface), file: file.into() }),
        };
        assert_eq!(runtimes(7, "/opt/rocm-6.4.1/lib/libhsa-runtime64.so.1.15.60401").mixed(), None);
        // A newer one has all that the older one had.
        for interface in [7, 15] {
            let file = "/usr/lib/x86_64-linux-gnu/libhsa-runtime64.so.1.15.0";
            assert_eq!(runtimes(interface, file).mixed(), None);
        }
        assert_eq!(
            runtimes(4, "/usr/lib/libhsa-runtime64.so.1.13.0").mixed().unwrap(),
            "HIP is of ROCm 6.4 (/opt/rocm-6.4.1/lib/libamdhip64.so.6.4.60401) and the HSA runtime \
             older, with interface 1.4, wanted 1.7 (/usr/lib/libhsa-runtime64.so.1.13.0)"
        );
        assert_eq!(
            runtimes(4, "/opt/rocm-6.1.2/lib/libhsa-runtime64.so.1.13.60102").mixed().unwrap(),
            "HIP is of ROCm 6.4 (/opt/rocm-6.4.1/lib/libamdhip64.so.6.4.60401) and the HSA runtime of \
             ROCm 6.1 (/opt/rocm-6.1.2/lib/libhsa-runtime64.so.1.13.60102)"
        );
    }
}
