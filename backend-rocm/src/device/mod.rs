//! Describes the AMD GPUs that are visible to this process, their links and their contexts.
//!
//! HIP's ordinals count the devices that remain after `ROCR_VISIBLE_DEVICES` and then
//! `HIP_VISIBLE_DEVICES` are applied. The HSA runtime applies only the first, and the two lists may have
//! different orders. A device and its HSA agent are therefore matched by PCI address, and peers name
//! devices by UUID.
//!
//! | file | contents |
//! | --- | --- |
//! | `mod.rs` | devices of HIP, versions of the runtimes, the context of a rank |
//! | `agent.rs` | agents of the HSA runtime and their memory pools |
//! | `link.rs` | links between devices |
//! | `diagnose.rs` | the reason why no GPU is visible |

mod agent;
mod link;

use std::ffi::{CStr, c_char, c_int};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fmt, fs};

use peerlane_hal::SharedQueues;
use peerlane_toolkit::Fault;
use peerlane_toolkit::device::{DeviceContext, shared_queues};

pub use agent::{Agent, AgentKind, agent};
pub(crate) use agent::{MemoryPool, agents, find_agent, memory_pools};
pub(crate) use link::link_between;
pub use link::{DeviceLink, link};

use crate::diagnose;
use crate::error::Error;
use crate::sys::hip::{self, hipDeviceAttribute_t, hipError_t, hipStreamCaptureMode, hipUUID};
use crate::sys::{Hip, Hsa, Version};

const TEXT_BYTES: usize = 256;

const PCI_DEVICES: &str = "/sys/bus/pci/devices";

/// The PCI address of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    /// The PCI domain, also called segment.
    pub domain: u32,
    /// The number of the PCI bus.
    pub bus: u8,
    /// The number of the device on its bus.
    pub device: u8,
    /// The PCI function number, in which partitions of one GPU differ.
    pub function: u8,
}

impl PciAddress {
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (rest, function) = text.rsplit_once('.')?;
        let mut fields = rest.split(':');
        let mut field = || u32::from_str_radix(fields.next()?, 16).ok();
        let (domain, bus, device) = (field()?, field()?, field()?);
        let function = u8::from_str_radix(function, 16).ok()?;
        let (bus, device) = (u8::try_from(bus).ok()?, u8::try_from(device).ok()?);
        (device < 32 && function < 8).then_some(Self { domain, bus, device, function })
    }

    pub(crate) fn from_hsa(domain: u32, bdf: u32) -> Self {
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

/// An AMD GPU, or a partition of one.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Device {
    /// The index of the device among those that are visible to this process.
    pub ordinal: u32,
    /// The product name of the device.
    pub name: String,
    /// The UUID of the device as HIP reports it, which is the same in all processes.
    pub uuid: [u8; 16],
    /// The PCI address of the device.
    pub pci: PciAddress,
    /// The size of the device's memory in bytes.
    pub memory_bytes: u64,
    /// The number of compute units of the device.
    pub compute_units: u32,
    /// The NUMA node that is nearest to the device, or `None` if the system does not report one.
    pub numa_node: Option<u32>,
    /// Whether the device supports virtual memory management (`hipMemCreate`, `hipMemMap`).
    pub virtual_memory: bool,
}

impl Device {
    pub(crate) fn label(&self) -> Arc<str> {
        format!("device {} ({})", self.ordinal, self.name).into()
    }

    /// Returns 16 bytes that identify the device on this host, namely its UUID, or its PCI address if HIP reports no
    /// UUID.
    ///
    /// Several devices of one host may lack a UUID.
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

    /// Formats the UUID of the device as rocminfo and `ROCR_VISIBLE_DEVICES` write it.
    pub fn uuid_text(&self) -> String {
        uuid_text(&self.uuid)
    }
}

/// Formats the UUID of a GPU as rocminfo does.
///
/// HIP stores the 16 digits of the HSA runtime's `GPU-0123456789abcdef` unchanged. Other bytes are written
/// as hexadecimal digits.
pub(crate) fn uuid_text(uuid: &[u8; 16]) -> String {
    match std::str::from_utf8(uuid) {
        Ok(text) if text.bytes().all(|byte| byte.is_ascii_hexdigit()) => format!("GPU-{text}"),
        _ => {
            let digits: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
            format!("GPU-{digits}")
        }
    }
}

/// Returns the number of hardware queues that the streams of this process share on each device. The variable
/// `GPU_MAX_HW_QUEUES` sets it: 4 by default ([HIP environment
/// variables](https://rocm.docs.amd.com/projects/HIP/en/latest/reference/env_variables.html)).
pub fn hardware_queues() -> SharedQueues {
    shared_queues("GPU_MAX_HW_QUEUES", 4, u32::MAX)
}

/// Lists the AMD GPUs that are visible to this process.
///
/// # Errors
/// Returns [`Error::Absent`] if there is no HIP or no device, and [`Error::Unavailable`] if HIP is too old or does not start,
/// or if this process may not use the kernel driver. The text says what to do.
pub fn discover() -> Result<Vec<Device>, Error> {
    visible_devices(Hip::load()?)
}

/// The ROCm runtimes that this process has loaded, HIP and perhaps the HSA runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Runtimes {
    /// The version of the HIP runtime.
    pub hip: Version,
    /// The file from which HIP was loaded.
    pub hip_file: PathBuf,
    /// The loaded HSA runtime, or the reason why it could not be loaded. Without it only streams copy.
    pub hsa: Result<HsaRuntime, String>,
}

/// The version and the file of the HSA runtime that this process has loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HsaRuntime {
    /// The major and minor version of AMD's extensions to HSA.
    pub interface: (u16, u16),
    /// The file from which the HSA runtime was loaded.
    pub file: PathBuf,
}

/// The ROCm releases that introduced a new version of AMD's HSA extensions, with its minor version.
const INTERFACES: [((u32, u32), u16); 3] = [((6, 1), 4), ((6, 4), 7), ((7, 2), 15)];

impl Runtimes {
    /// Describes a version mismatch between HIP and the HSA runtime, or returns `None` if there is none.
    ///
    /// Such a pair was not tested together by AMD, even if HIP found every function that it needs.
    pub fn mismatch(&self) -> Option<String> {
        let HsaRuntime { interface, file } = self.hsa.as_ref().ok()?;
        let Version { major, minor, .. } = self.hip;
        let hsa = match release_of(file) {
            Some(release) if release == (major, minor) => return None,
            Some((major, minor)) => format!("is from ROCm {major}.{minor}"),
            // Distributions number the file differently. An older interface shows an older release.
            None => {
                let expected =
                    INTERFACES.iter().rev().find(|(since, _)| *since <= (major, minor))?.1;
                if *interface >= (1, expected) {
                    return None;
                }
                let (major, minor) = interface;
                format!("has the interface {major}.{minor}, expected 1.{expected} or newer")
            }
        };
        let (hip_file, file) = (self.hip_file.display(), file.display());
        Some(format!(
            "HIP ({hip_file}) is from ROCm {major}.{minor}, but the HSA runtime ({file}) {hsa}"
        ))
    }
}

/// Returns the ROCm release that a library's file name contains in AMD's packages.
///
/// For `libhsa-runtime64.so.1.15.60401` it is 6.4. Distributions number the file differently.
fn release_of(file: &Path) -> Option<(u32, u32)> {
    let name = file.file_name()?.to_str()?;
    let number: u32 = name.rsplit_once('.')?.1.parse().ok()?;
    (number >= 50_000).then_some((number / 10_000, number / 100 % 100))
}

/// Returns the versions and files of the ROCm runtimes that this process has loaded.
///
/// # Errors
/// Fails like [`discover`].
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

pub(crate) fn visible_devices(hip: &Hip) -> Result<Vec<Device>, Error> {
    (0..device_count(hip)?).map(|ordinal| query_device(hip, ordinal)).collect()
}

pub(crate) fn find_device(hip: &Hip, identity: &[u8; 16]) -> Result<Option<Device>, Error> {
    Ok(visible_devices(hip)?.into_iter().find(|device| device.identity() == *identity))
}

fn device_count(hip: &Hip) -> Result<u32, Error> {
    let mut count = 0;
    // SAFETY: the result is stored in a local.
    let code = unsafe { (hip.calls.get_device_count)(&raw mut count) };
    check(hip, "hipGetDeviceCount", code)?;
    if count < 1 {
        // `hipInit` normally reports this; some runtimes start and count 0 devices.
        return Err(Error::hip_init_failed(hip, hipError_t::hipErrorNoDevice));
    }
    Ok(count.unsigned_abs())
}

fn query_device(hip: &Hip, ordinal: u32) -> Result<Device, Error> {
    let count = device_count(hip)?;
    let Some(number) = c_int::try_from(ordinal).ok().filter(|_| ordinal < count) else {
        let visible = diagnose::visibility(|name| std::env::var(name).ok());
        return Err(Error::Fault(Fault::Argument(format!(
            "device {ordinal} does not exist: expected a number below {count}, the number of \
             visible GPUs; {visible}"
        ))));
    };
    describe(hip, number, ordinal)
}

fn describe(hip: &Hip, device: c_int, ordinal: u32) -> Result<Device, Error> {
    let calls = hip.calls;
    let name = query_text(hip, "hipDeviceGetName", |text, bytes| {
        // SAFETY: HIP writes at most `bytes` bytes to `text`, terminated by a zero.
        unsafe { (calls.device_get_name)(text, bytes, device) }
    })?;
    let address = query_text(hip, "hipDeviceGetPCIBusId", |text, bytes| {
        // SAFETY: as above.
        unsafe { (calls.device_get_pci_bus_id)(text, bytes, device) }
    })?;
    let pci = PciAddress::parse(&address).ok_or_else(|| {
        Error::Fault(Fault::Mismatch(format!(
            "hipDeviceGetPCIBusId of {} returned \"{address}\" for device {ordinal} ({name}), \
             expected a PCI address such as 0000:c1:00.0",
            calls.file().display()
        )))
    })?;
    let mut uuid = hipUUID::default();
    // SAFETY: the result is stored in a local.
    let code = unsafe { (calls.device_get_uuid)(&raw mut uuid, device) };
    check(hip, "hipDeviceGetUuid", code)?;
    let mut memory = 0;
    // SAFETY: as above.
    let code = unsafe { (calls.device_total_mem)(&raw mut memory, device) };
    check(hip, "hipDeviceTotalMem", code)?;
    let units = hipDeviceAttribute_t::hipDeviceAttributeMultiprocessorCount;
    let virtual_memory = hipDeviceAttribute_t::hipDeviceAttributeVirtualMemoryManagementSupported;
    Ok(Device {
        ordinal,
        name,
        uuid: uuid.bytes.map(|byte| byte.to_ne_bytes()[0]),
        pci,
        memory_bytes: memory as u64,
        numa_node: numa_node(PCI_DEVICES, pci),
        compute_units: u32::try_from(attribute(hip, device, units)?).unwrap_or(0),
        // A runtime that does not know the attribute does not have the feature.
        virtual_memory: attribute(hip, device, virtual_memory).is_ok_and(|value| value != 0),
    })
}

pub(crate) fn attribute(
    hip: &Hip,
    device: c_int,
    attribute: hipDeviceAttribute_t,
) -> Result<c_int, Error> {
    let mut value = 0;
    // SAFETY: the result is stored in a local.
    let code = unsafe { (hip.calls.device_get_attribute)(&raw mut value, attribute, device) };
    check(hip, "hipDeviceGetAttribute", code)?;
    Ok(value)
}

fn query_text(
    hip: &Hip,
    call: &'static str,
    query: impl FnOnce(*mut c_char, c_int) -> hipError_t,
) -> Result<String, Error> {
    let mut text = [0_u8; TEXT_BYTES];
    check(hip, call, query(text.as_mut_ptr().cast(), TEXT_BYTES as c_int))?;
    let text = CStr::from_bytes_until_nul(&text).unwrap_or_default();
    Ok(text.to_string_lossy().into_owned())
}

fn check(hip: &Hip, call: &'static str, code: hipError_t) -> Result<(), Error> {
    if code == hipError_t::hipSuccess { Ok(()) } else { Err(Error::hip(hip, call, None, code)) }
}

/// Returns the NUMA node of a PCI device, or `None` if the system has only one node.
fn numa_node(devices: impl AsRef<Path>, address: PciAddress) -> Option<u32> {
    let file = devices.as_ref().join(address.to_string()).join("numa_node");
    // A system without NUMA nodes reports -1.
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

/// The device of a rank, which is made current for every call of HIP.
///
/// HIP has no contexts of its own: a thread has a current device with its primary context, which the
/// whole process shares. The device is made current for each call, and the device that was current before
/// is restored, so that threads of the caller keep theirs.
#[derive(Debug)]
pub struct Context {
    pub(crate) hip: &'static Hip,
    pub(crate) info: Device,
    number: c_int,
    label: Arc<str>,
}

impl Context {
    pub(crate) fn open(ordinal: u32) -> Result<Arc<Self>, Error> {
        let hip = Hip::load()?;
        let info = query_device(hip, ordinal)?;
        // `query_device` has rejected ordinals that are not numbers of a device.
        let number = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        let label = info.label();
        Ok(Arc::new(Self { hip, info, number, label }))
    }

    pub(crate) fn check(&self, call: &'static str, code: hipError_t) -> Result<(), Error> {
        if code == hipError_t::hipSuccess { Ok(()) } else { Err(self.call_failed(call, code)) }
    }

    #[cold]
    pub(crate) fn call_failed(&self, call: &'static str, code: hipError_t) -> Error {
        self.forget_error();
        Error::hip(self.hip, call, Some(&self.label), code)
    }

    /// Resets HIP's last error of this thread, so that a failed call of this crate does not look like an error of the
    /// caller's kernels.
    ///
    /// HIP keeps the last error of a thread until it is read.
    pub(crate) fn forget_error(&self) {
        // SAFETY: the call only resets the last error of the thread.
        let _ = unsafe { (self.hip.calls.get_last_error)() };
    }
}

// SAFETY: `hipSetDevice` sets the device of the thread, and the id is the number of the device, of which HIP has one primary
// context. The library is never unloaded. `Error::Fault` has the kind of its fault, and `kind` maps no result of the runtime to
// `QueueFull`.
unsafe impl DeviceContext for Context {
    type Error = Error;
    type Library = &'static hip::Library;
    type Current = c_int;
    type CaptureMode = hipStreamCaptureMode;

    fn library(&self) -> &'static hip::Library {
        self.hip.calls
    }

    fn label(&self) -> &Arc<str> {
        &self.label
    }

    fn device(&self) -> i32 {
        self.number
    }

    fn id(&self) -> usize {
        self.number.unsigned_abs() as usize
    }

    fn make_current(&self) -> Result<Option<c_int>, Error> {
        let mut before = 0;
        // SAFETY: the result is stored in a local.
        let code = unsafe { (self.hip.calls.get_device)(&raw mut before) };
        self.check("hipGetDevice", code)?;
        if before == self.number {
            return Ok(None);
        }
        // SAFETY: the number is that of a device, and HIP checks it.
        let code = unsafe { (self.hip.calls.set_device)(self.number) };
        self.check("hipSetDevice", code)?;
        Ok(Some(before))
    }

    fn put_back(&self, before: c_int) {
        // SAFETY: the device was current before.
        let _ = unsafe { (self.hip.calls.set_device)(before) };
    }

    fn relax_captures(&self) -> Result<hipStreamCaptureMode, Error> {
        let mut mode = hipStreamCaptureMode::hipStreamCaptureModeRelaxed;
        // SAFETY: the call swaps the mode of this thread with the one in the local.
        let code = unsafe { (self.hip.calls.thread_exchange_stream_capture_mode)(&raw mut mode) };
        self.check("hipThreadExchangeStreamCaptureMode", code)?;
        Ok(mode)
    }

    fn put_back_captures(&self, mut before: hipStreamCaptureMode) {
        // SAFETY: the call restores the mode that it returned before.
        let _ = unsafe { (self.hip.calls.thread_exchange_stream_capture_mode)(&raw mut before) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_number_is_decoded() {
        let version = Version::from_hip(70_253_211);
        assert_eq!(version, Version { major: 7, minor: 2, patch: 53_211 });
        assert_eq!(version.to_string(), "7.2.53211");
        assert_eq!(Version::from_hip(50_731_921).to_string(), "5.7.31921");
        assert!(Version::from_hip(60_443_484) < version);
    }

    #[test]
    fn both_runtimes_give_the_same_pci_address() {
        let address = PciAddress::parse("0001:C1:1f.5").unwrap();
        assert_eq!(address.to_string(), "0001:c1:1f.5");
        assert_eq!(PciAddress::from_hsa(1, 0xc1fd), address);
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
    fn a_device_without_a_uuid_is_identified_by_its_pci_address() {
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
        let addresses = ["0000:c1:00.0", "0000:c1:00.1", "0001:c1:00.0"];
        let identities = addresses.map(|address| device(none, address).identity());
        assert!(identities[0] != identities[1] && identities[0] != identities[2]);
        assert_eq!(identities[0], device(none, addresses[0]).identity());
    }

    #[test]
    fn runtimes_of_two_releases_are_reported() {
        let runtimes = |interface: u16, file: &str| Runtimes {
            hip: Version { major: 6, minor: 4, patch: 43_484 },
            hip_file: "/opt/rocm-6.4.1/lib/libamdhip64.so.6.4.60401".into(),
            hsa: Ok(HsaRuntime { interface: (1, interface), file: file.into() }),
        };
        assert_eq!(
            runtimes(7, "/opt/rocm-6.4.1/lib/libhsa-runtime64.so.1.15.60401").mismatch(),
            None
        );
        // A newer interface contains the older one.
        for interface in [7, 15] {
            let file = "/usr/lib/x86_64-linux-gnu/libhsa-runtime64.so.1.15.0";
            assert_eq!(runtimes(interface, file).mismatch(), None);
        }
        assert_eq!(
            runtimes(4, "/usr/lib/libhsa-runtime64.so.1.13.0").mismatch().unwrap(),
            "HIP (/opt/rocm-6.4.1/lib/libamdhip64.so.6.4.60401) is from ROCm 6.4, but the HSA \
             runtime (/usr/lib/libhsa-runtime64.so.1.13.0) has the interface 1.4, expected 1.7 or \
             newer"
        );
        assert_eq!(
            runtimes(4, "/opt/rocm-6.1.2/lib/libhsa-runtime64.so.1.13.60102").mismatch().unwrap(),
            "HIP (/opt/rocm-6.4.1/lib/libamdhip64.so.6.4.60401) is from ROCm 6.4, but the HSA \
             runtime (/opt/rocm-6.1.2/lib/libhsa-runtime64.so.1.13.60102) is from ROCm 6.1"
        );
    }

    #[test]
    fn the_numa_node_is_read_if_there_is_one() {
        let root = std::env::temp_dir().join(format!("peerlane-rocm-numa-{}", std::process::id()));
        let address = PciAddress { domain: 0, bus: 0xc1, device: 0, function: 0 };
        assert_eq!(numa_node(&root, address), None);
        let device = root.join("0000:c1:00.0");
        fs::create_dir_all(&device).unwrap();
        for (text, expected) in [("1\n", Some(1)), ("-1\n", None), ("", None)] {
            fs::write(device.join("numa_node"), text).unwrap();
            assert_eq!(numa_node(&root, address), expected);
        }
        fs::remove_dir_all(&root).unwrap();
    }
}
