//! Describes the NVIDIA GPUs that are visible to this process, their links and their contexts.
//!
//! Ordinals count the devices that `CUDA_VISIBLE_DEVICES` leaves. Two processes may give one device
//! different ordinals, so peers name devices by UUID.
//!
//! The number of copy engines (`asyncEngineCount`) limits how many copies an engine keeps in flight:
//! with more copies at once the throughput collapses.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use peerlane_hal::{LinkKind, SharedQueues};
use peerlane_toolkit::Fault;
use peerlane_toolkit::device::{DeviceContext, shared_queues};

use crate::error::Error;
use crate::fused::StartKernels;
use crate::reduce::Kernels;
use crate::sys::{self, CUcontext, CUdevice, CUresult, CUuuid, Driver};

const TEXT_BYTES: usize = 256;

/// The compute mode of a device, which says how many processes may use it at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ComputeMode {
    /// Any number of processes may use the device.
    Shared,
    /// One process at a time may use the device.
    ExclusiveProcess,
    /// No process may use the device.
    Prohibited,
    /// A compute mode that this crate does not know, with the driver's number for it.
    Unknown(i32),
}

impl ComputeMode {
    fn from_raw(number: c_int) -> Self {
        match number {
            sys::COMPUTE_MODE_DEFAULT => Self::Shared,
            sys::COMPUTE_MODE_EXCLUSIVE_PROCESS => Self::ExclusiveProcess,
            sys::COMPUTE_MODE_PROHIBITED => Self::Prohibited,
            other => Self::Unknown(other),
        }
    }
}

/// The memory and stream features that the CUDA driver reports for a device.
///
/// A reported feature may still be refused when it is used. [`try_handles`](crate::try_handles) tests those for which this is
/// known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StreamLimits {
    /// Whether the device supports virtual memory management (`cuMemCreate`, `cuMemMap`).
    pub virtual_memory: bool,
    /// Whether memory of `cuMemCreate` can be exported as a file descriptor.
    pub posix_handles: bool,
    /// Whether memory of `cuMemCreate` can be exported to other hosts over NVLink.
    pub fabric_handles: bool,
    /// Whether memory can be exported to a NIC as a dma-buf.
    pub dma_buf: bool,
    /// Whether memory of `cuMemCreate` can be allocated so that a NIC can register it.
    pub rdma_virtual_memory: bool,
    /// Whether streams can write 64-bit words and wait for them.
    pub stream_values_64: bool,
}

/// An NVIDIA GPU, or a MIG instance of one.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Device {
    /// The index of the device among those that are visible to this process.
    pub ordinal: u32,
    /// The product name of the device.
    pub name: String,
    /// The UUID of the device or MIG instance, which is the same in all processes.
    pub uuid: [u8; 16],
    /// The PCI address of the device, such as `0000:3b:00.0`.
    pub pci_bus_id: String,
    /// The size of the device's memory in bytes.
    pub memory_bytes: u64,
    /// The number of copies that the device runs concurrently with kernels.
    pub copy_engines: u32,
    /// The number of multiprocessors of the device.
    pub multiprocessors: u32,
    /// The compute capability of the device, major and minor.
    pub compute_capability: (u32, u32),
    /// The compute mode of the device, which says which processes may use it.
    pub compute_mode: ComputeMode,
    /// Whether the device is a MIG instance. MIG instances have no peer access to each other.
    pub mig: bool,
    /// The memory and stream features that the driver reports for the device.
    pub abilities: StreamLimits,
}

impl Device {
    pub(crate) fn label(&self) -> Arc<str> {
        format!("device {} ({})", self.ordinal, self.name).into()
    }

    /// Formats the UUID of the device as nvidia-smi and `CUDA_VISIBLE_DEVICES` write it.
    pub fn uuid_text(&self) -> String {
        uuid_text(&self.uuid, self.mig)
    }
}

pub(crate) fn uuid_text(uuid: &[u8; 16], mig: bool) -> String {
    let mut text = String::from(if mig { "MIG-" } else { "GPU-" });
    for (index, byte) in uuid.iter().enumerate() {
        if matches!(index, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

/// Lists the NVIDIA GPUs that are visible to this process.
///
/// # Errors
/// Returns [`Error::Absent`] if there is no driver or no device, and [`Error::Unavailable`] if the driver is too old or does
/// not start. The text says what to do.
pub fn discover() -> Result<Vec<Device>, Error> {
    let driver = Driver::load()?;
    let query = |ordinal| query_device(driver, ordinal).map(|(_, device)| device);
    (0..device_count(driver)?).map(query).collect()
}

/// Returns the CUDA version that the driver supports, such as `(13, 0)`.
///
/// # Errors
/// Fails like [`discover`].
pub fn driver_version() -> Result<(u32, u32), Error> {
    let driver = Driver::load()?;
    let mut version = 0;
    // SAFETY: the result is stored in a local.
    let code = unsafe { (driver.driver_get_version)(&raw mut version) };
    check(driver, "cuDriverGetVersion", code)?;
    let version = version.unsigned_abs();
    Ok((version / 1000, version % 1000 / 10))
}

/// Returns the number of hardware queues that the streams of this process share on each device. The variable
/// `CUDA_DEVICE_MAX_CONNECTIONS` sets it: 8 by default, at most 32 ([CUDA environment
/// variables](https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/environment-variables.html)).
pub fn connections() -> SharedQueues {
    shared_queues("CUDA_DEVICE_MAX_CONNECTIONS", 8, 32)
}

pub(crate) fn find_device(
    driver: &Driver,
    uuid: &[u8; 16],
) -> Result<Option<(CUdevice, Device)>, Error> {
    for ordinal in 0..device_count(driver)? {
        let (device, info) = query_device(driver, ordinal)?;
        if info.uuid == *uuid {
            return Ok(Some((device, info)));
        }
    }
    Ok(None)
}

fn device_count(driver: &Driver) -> Result<u32, Error> {
    let mut count = 0;
    // SAFETY: the result is stored in a local.
    let code = unsafe { (driver.device_get_count)(&raw mut count) };
    check(driver, "cuDeviceGetCount", code)?;
    if count < 1 {
        // `cuInit` normally reports this; some drivers start and count 0 devices.
        return Err(Error::init_failed(driver, sys::CUDA_ERROR_NO_DEVICE));
    }
    Ok(count.unsigned_abs())
}

fn query_device(driver: &Driver, ordinal: u32) -> Result<(CUdevice, Device), Error> {
    let count = device_count(driver)?;
    let Some(number) = c_int::try_from(ordinal).ok().filter(|_| ordinal < count) else {
        let visible = match std::env::var("CUDA_VISIBLE_DEVICES") {
            Ok(list) => format!("CUDA_VISIBLE_DEVICES is {list:?}"),
            Err(_) => "CUDA_VISIBLE_DEVICES is not set".to_owned(),
        };
        return Err(Fault::Argument(format!(
            "device {ordinal} does not exist: expected a number below {count}, the number of \
             visible GPUs; {visible}"
        ))
        .into());
    };
    let mut device = 0;
    // SAFETY: the result is stored in a local.
    let code = unsafe { (driver.device_get)(&raw mut device, number) };
    check(driver, "cuDeviceGet", code)?;
    Ok((device, describe(driver, device, ordinal)?))
}

fn describe(driver: &Driver, device: CUdevice, ordinal: u32) -> Result<Device, Error> {
    let attribute = |number| device_attribute(driver, device, number);
    let count = |number| attribute(number).map(|count: c_int| u32::try_from(count).unwrap_or(0));
    let flag = |number| device_flag(driver, device, number);
    let name = query_text(driver, "cuDeviceGetName", |text, bytes| {
        // SAFETY: the driver writes at most `bytes` bytes to `text`, terminated by a zero.
        unsafe { (driver.device_get_name)(text, bytes, device) }
    })?;
    let pci_bus_id = query_text(driver, "cuDeviceGetPCIBusId", |text, bytes| {
        // SAFETY: as above.
        unsafe { (driver.device_get_pci_bus_id)(text, bytes, device) }
    })?;
    let mut uuid = CUuuid::default();
    // SAFETY: the result is stored in a local.
    let code = unsafe { (driver.device_get_uuid)(&raw mut uuid, device) };
    check(driver, "cuDeviceGetUuid_v2", code)?;
    let mut memory = 0;
    // SAFETY: as above.
    let code = unsafe { (driver.device_total_mem)(&raw mut memory, device) };
    check(driver, "cuDeviceTotalMem_v2", code)?;
    let virtual_memory = flag(sys::ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
    Ok(Device {
        ordinal,
        // The driver API offers no better indication of a MIG instance.
        mig: name.contains("MIG "),
        name,
        uuid: uuid.bytes,
        pci_bus_id: pci_bus_id.to_ascii_lowercase(),
        memory_bytes: memory as u64,
        copy_engines: count(sys::ATTRIBUTE_ASYNC_ENGINE_COUNT)?,
        multiprocessors: count(sys::ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        compute_capability: (
            count(sys::ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            count(sys::ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        compute_mode: ComputeMode::from_raw(attribute(sys::ATTRIBUTE_COMPUTE_MODE)?),
        abilities: StreamLimits {
            virtual_memory,
            posix_handles: virtual_memory
                && flag(sys::ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED),
            fabric_handles: virtual_memory && flag(sys::ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED),
            dma_buf: flag(sys::ATTRIBUTE_DMA_BUF_SUPPORTED),
            rdma_virtual_memory: flag(sys::ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED),
            stream_values_64: flag(sys::ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS),
        },
    })
}

pub(crate) fn device_attribute(
    driver: &Driver,
    device: CUdevice,
    number: c_int,
) -> Result<c_int, Error> {
    let mut value = 0;
    // SAFETY: the result is stored in a local.
    let code = unsafe { (driver.device_get_attribute)(&raw mut value, number, device) };
    check(driver, "cuDeviceGetAttribute", code)?;
    Ok(value)
}

/// Reads a boolean device attribute, or returns false if the driver does not know the attribute.
fn device_flag(driver: &Driver, device: CUdevice, number: c_int) -> bool {
    device_attribute(driver, device, number).is_ok_and(|value| value != 0)
}

fn query_text(
    driver: &Driver,
    call: &'static str,
    query: impl FnOnce(*mut c_char, c_int) -> CUresult,
) -> Result<String, Error> {
    let mut text = [0_u8; TEXT_BYTES];
    check(driver, call, query(text.as_mut_ptr().cast(), TEXT_BYTES as c_int))?;
    let text = CStr::from_bytes_until_nul(&text).unwrap_or_default();
    Ok(text.to_string_lossy().into_owned())
}

fn check(driver: &Driver, call: &'static str, code: CUresult) -> Result<(), Error> {
    if code == sys::CUDA_SUCCESS { Ok(()) } else { Err(Error::driver(driver, call, None, code)) }
}

/// The properties of the link from one GPU to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceLink {
    /// Whether the first device can read and write memory of the second.
    pub peer_access: bool,
    /// The type of the link, which has no meaning if the devices lack peer access.
    pub kind: LinkKind,
    /// The performance rank that the driver gives to the link, where a smaller number is faster. `None` if the driver
    /// does not report it.
    pub performance_rank: Option<i32>,
}

/// Returns the properties of the link from one visible device to another, both given by ordinal.
///
/// # Errors
/// Fails like [`discover`], and with
/// [`InvalidArgument`](peerlane_hal::ErrorKind::InvalidArgument) for an ordinal that is too large.
pub fn link(from: u32, to: u32) -> Result<DeviceLink, Error> {
    let driver = Driver::load()?;
    let (from, _) = query_device(driver, from)?;
    let (to, _) = query_device(driver, to)?;
    link_between(driver, from, to)
}

pub(crate) fn link_between(
    driver: &Driver,
    from: CUdevice,
    to: CUdevice,
) -> Result<DeviceLink, Error> {
    if from == to {
        let (peer_access, performance_rank) = (true, None);
        return Ok(DeviceLink { peer_access, kind: LinkKind::Local, performance_rank });
    }
    let mut can = 0;
    // SAFETY: both devices are of this driver; the result is stored in a local.
    let code = unsafe { (driver.device_can_access_peer)(&raw mut can, from, to) };
    check(driver, "cuDeviceCanAccessPeer", code)?;
    let attribute = |number: c_int| {
        let mut value = 0;
        // SAFETY: as above.
        let code = unsafe { (driver.device_get_p2p_attribute)(&raw mut value, number, from, to) };
        (code == sys::CUDA_SUCCESS).then_some(value)
    };
    // The driver API does not report the type of the link. Native atomics on a peer's memory work over
    // NVLink and not over PCI Express, so they distinguish the two.
    let atomics = attribute(sys::P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED) == Some(1);
    Ok(DeviceLink {
        peer_access: can != 0,
        kind: if atomics { LinkKind::NvLink } else { LinkKind::Pcie },
        performance_rank: attribute(sys::P2P_ATTRIBUTE_PERFORMANCE_RANK),
    })
}

/// The primary CUDA context of a device, which is retained until this value is dropped.
///
/// The CUDA runtime, PyTorch and cudarc use the primary context too, so their pointers and streams are
/// valid here. It is made current for each call, and the previous one is restored afterwards, so that the
/// caller's thread keeps its own.
#[derive(Debug)]
pub struct Context {
    pub(crate) driver: &'static Driver,
    pub(crate) device: CUdevice,
    pub(crate) info: Device,
    raw: CUcontext,
    is_second: bool,
    label: Arc<str>,
    pub(crate) kernels: OnceLock<Kernels>,
    pub(crate) starts: StartKernels,
}

/// The second CUDA context of each device, shared by all engines because a context takes half a GiB of device memory.
static SECOND_CONTEXTS: Mutex<BTreeMap<CUdevice, Weak<Context>>> = Mutex::new(BTreeMap::new());

// SAFETY: a context may be current on several threads at once (cuCtxSetCurrent), and the handle is never
// dereferenced here.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    pub(crate) fn open(ordinal: u32) -> Result<Arc<Self>, Error> {
        let driver = Driver::load()?;
        let (device, info) = query_device(driver, ordinal)?;
        let label = info.label();
        let mut raw = std::ptr::null_mut();
        // SAFETY: `query_device` returned the device; the result is stored in a local.
        let code = unsafe { (driver.primary_ctx_retain)(&raw mut raw, device) };
        if code != sys::CUDA_SUCCESS {
            return Err(Error::driver(driver, "cuDevicePrimaryCtxRetain", Some(&label), code));
        }
        let (kernels, starts) = (OnceLock::new(), StartKernels::default());
        let is_second = false;
        Ok(Arc::new(Self { driver, device, info, raw, is_second, label, kernels, starts }))
    }

    pub(crate) fn second(&self) -> Result<Option<Arc<Self>>, Error> {
        let Driver { ctx_create, ctx_destroy, ctx_pop_current, .. } = self.driver;
        let (Some(create), Some(_), Some(pop)) = (ctx_create, ctx_destroy, ctx_pop_current) else {
            return Ok(None);
        };
        let mut contexts = SECOND_CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(context) = contexts.get(&self.device).and_then(Weak::upgrade) {
            return Ok(Some(context));
        }
        let mut raw = std::ptr::null_mut();
        // SAFETY: the device exists; the result is stored in a local.
        let code = unsafe { create(&raw mut raw, 0, self.device) };
        self.check("cuCtxCreate_v2", code)?;
        let mut popped = std::ptr::null_mut();
        // SAFETY: the call above has made the new context current; the result is stored in a local.
        let code = unsafe { pop(&raw mut popped) };
        self.check("cuCtxPopCurrent_v2", code)?;
        let (driver, device, label) = (self.driver, self.device, Arc::clone(&self.label));
        let (info, is_second) = (self.info.clone(), true);
        let (kernels, starts) = (OnceLock::new(), StartKernels::default());
        let context = Self { driver, device, info, raw, is_second, label, kernels, starts };
        let context = Arc::new(context);
        contexts.insert(device, Arc::downgrade(&context));
        Ok(Some(context))
    }

    pub(crate) fn raw(&self) -> CUcontext {
        self.raw
    }

    pub(crate) fn label(&self) -> &Arc<str> {
        &self.label
    }

    pub(crate) fn check(&self, call: &'static str, code: CUresult) -> Result<(), Error> {
        if code == sys::CUDA_SUCCESS { Ok(()) } else { Err(self.driver_error(call, code)) }
    }

    #[cold]
    fn driver_error(&self, call: &'static str, code: CUresult) -> Error {
        Error::driver(self.driver, call, Some(&self.label), code)
    }

    pub(crate) fn require<F: Copy>(
        &self,
        symbol: &'static str,
        entry: Option<F>,
    ) -> Result<F, Error> {
        entry.ok_or_else(|| Error::symbol_missing(sys::LIBRARY, symbol))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if !self.is_second {
            // SAFETY: `open` retained it once. A failure means that the context is already destroyed.
            let _ = unsafe { (self.driver.primary_ctx_release)(self.device) };
        } else if let Some(destroy) = self.driver.ctx_destroy {
            // SAFETY: `second` created it, and its streams are destroyed.
            let _ = unsafe { destroy(self.raw) };
        }
    }
}

/// The CUDA context that was current on a thread before another context was made current. It is
/// only restored, never dereferenced.
#[derive(Clone, Copy, Debug)]
pub struct Current(CUcontext);

// SAFETY: `cuCtxSetCurrent` sets the context of the thread, and the id is the address of the context, which `self` retains. The
// driver is never unloaded. `Error::Fault` has the kind of its fault, and `kind` maps no result of the driver to `QueueFull`.
unsafe impl DeviceContext for Context {
    type Error = Error;
    type Library = &'static Driver;
    type Current = Current;
    type CaptureMode = c_int;

    fn library(&self) -> &'static Driver {
        self.driver
    }

    fn label(&self) -> &Arc<str> {
        &self.label
    }

    fn device(&self) -> i32 {
        self.device
    }

    fn id(&self) -> usize {
        self.raw as usize
    }

    fn make_current(&self) -> Result<Option<Current>, Error> {
        let mut before = std::ptr::null_mut();
        // SAFETY: the result is stored in a local.
        let code = unsafe { (self.driver.ctx_get_current)(&raw mut before) };
        self.check("cuCtxGetCurrent", code)?;
        if before == self.raw {
            return Ok(None);
        }
        // SAFETY: `self` retains the context.
        let code = unsafe { (self.driver.ctx_set_current)(self.raw) };
        self.check("cuCtxSetCurrent", code)?;
        Ok(Some(Current(before)))
    }

    fn put_back(&self, Current(before): Current) {
        // SAFETY: it was current before. A failure means that its owner has destroyed it since, and there is
        // nothing to restore.
        let _ = unsafe { (self.driver.ctx_set_current)(before) };
    }

    fn relax_captures(&self) -> Result<c_int, Error> {
        let mut mode = sys::STREAM_CAPTURE_MODE_RELAXED;
        if let Some(exchange) = self.driver.thread_exchange_stream_capture_mode {
            // SAFETY: the call swaps the mode of this thread with the one in the local.
            let code = unsafe { exchange(&raw mut mode) };
            self.check("cuThreadExchangeStreamCaptureMode", code)?;
        }
        Ok(mode)
    }

    fn put_back_captures(&self, mut before: c_int) {
        if let Some(exchange) = self.driver.thread_exchange_stream_capture_mode {
            // SAFETY: the call swaps back the mode that `relax_captures` returned.
            let _ = unsafe { exchange(&raw mut before) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuid_format_is_that_of_nvidia_smi() {
        let uuid: [u8; 16] = std::array::from_fn(|index| index as u8 * 0x11);
        assert_eq!(uuid_text(&uuid, false), "GPU-00112233-4455-6677-8899-aabbccddeeff");
        assert_eq!(&uuid_text(&uuid, true)[..4], "MIG-");
    }
}
