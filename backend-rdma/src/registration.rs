//! Registers host and device memory with all NICs of a rank.
//!
//! Device memory is registered as a dma-buf, or by its address with a kernel module for the device.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;

use peerlane_hal::{BackendId, DynError, DynRegion, Generation, Rank, Region, Role};
use peerlane_toolkit::handover::{self, Claim, Handover};
use peerlane_toolkit::mapping::Mapping;
use rustix::fd::OwnedFd;

use crate::error::Error;
use crate::key::{Key, NicKeys};
use crate::nic::Nic;
use crate::options::DeviceMemory;
use crate::sys::{Domain, Mr};

#[derive(Debug)]
pub(crate) struct Registration {
    /// The memory regions, one per NIC, which must be dropped before the memory is freed. Empty for a region
    /// without bytes, which NICs refuse.
    mrs: Vec<Mr>,
    nics: u16,
    _mapping: Option<Mapping>,
    /// The registered device memory; `None` for host memory.
    device_region: Option<DynRegion>,
    pub(crate) base: NonNull<u8>,
    pub(crate) bytes: u64,
    pub(crate) owner: Rank,
    pub(crate) role: Role,
}

// SAFETY: a registration only names memory. The contracts of the ops and of `register` say which thread may
// access which byte.
unsafe impl Send for Registration {}
// SAFETY: as above.
unsafe impl Sync for Registration {}

impl Registration {
    /// Registers host memory with all NICs of a rank.
    ///
    /// # Safety
    /// The memory must stay allocated as long as the registration, which keeps the mapping if there is one.
    pub(crate) unsafe fn new(
        nics: &[Nic],
        base: NonNull<u8>,
        bytes: u64,
        owner: Rank,
        role: Role,
        mapping: Option<Mapping>,
    ) -> Result<Self, Error> {
        let length = usize::try_from(bytes)
            .ok()
            .filter(|length| (base.as_ptr() as usize).checked_add(*length).is_some())
            .ok_or_else(|| {
                Error::argument(format!("a region of {bytes} bytes at {base:p} has no end"))
            })?;
        let with = if length == 0 { &[] } else { nics };
        // SAFETY: the caller keeps the memory allocated.
        let mrs = with.iter().map(|nic| unsafe { nic.domain.register(base, length) });
        let mrs = mrs.collect::<Result<_, _>>()?;
        let nics = nics.len() as u16;
        Ok(Self { mrs, nics, _mapping: mapping, device_region: None, base, bytes, owner, role })
    }

    pub(crate) fn for_device(
        nics: &[Nic],
        region: &DynRegion,
        owner: Rank,
        method: DeviceMemory,
    ) -> Result<Self, Error> {
        let (base, bytes) = (region.base(), region.bytes());
        let with = if bytes == 0 { &[] } else { nics };
        let mrs = with.iter().map(|nic| register_device(&nic.domain, region, method));
        let mrs = mrs.collect::<Result<_, _>>()?;
        let (nics, device_region, role) = (nics.len() as u16, Some(region.clone()), Role::Data);
        Ok(Self { mrs, nics, _mapping: None, device_region, base, bytes, owner, role })
    }

    /// Creates a registration without bytes for tests on machines without NICs; its key names one NIC.
    #[cfg(test)]
    pub(crate) fn without_nics(owner: Rank, role: Role) -> Self {
        let (base, device_region) = (NonNull::dangling(), None);
        Self {
            mrs: Vec::new(),
            nics: 1,
            _mapping: None,
            device_region,
            base,
            bytes: 0,
            owner,
            role,
        }
    }

    pub(crate) fn is_device_memory(&self) -> bool {
        self.device_region.is_some()
    }

    pub(crate) fn device_region(&self) -> Option<&DynRegion> {
        self.device_region.as_ref()
    }

    pub(crate) fn local_keys(&self) -> NicKeys {
        self.keys(Mr::local_key)
    }

    fn keys(&self, key: impl Fn(&Mr) -> u32) -> NicKeys {
        let mut keys = NicKeys::default();
        keys.iter_mut().zip(&self.mrs).for_each(|(slot, mr)| *slot = key(mr));
        keys
    }

    pub(crate) fn key(&self, generation: Generation) -> Key {
        Key {
            generation,
            rank: self.owner,
            role: self.role,
            address: self.base.as_ptr() as u64,
            bytes: self.bytes,
            nics: self.nics,
            remote_keys: self.keys(Mr::remote_key),
        }
    }
}

pub(crate) fn find(key: &Key) -> Option<Arc<Registration>> {
    let found = handover::find::<Registration>(&claim(key))?;
    (found.key(key.generation) == *key).then_some(found)
}

fn claim(key: &Key) -> Claim {
    Claim { backend: BackendId::RDMA, generation: key.generation, owner: key.rank, role: key.role }
}

impl Handover for Registration {
    /// Returns `None`, because a NIC accesses the memory without file descriptors.
    fn descriptors(&self) -> Option<u32> {
        None
    }

    fn descriptor(&self, _index: u32) -> Result<OwnedFd, DynError> {
        Err(DynError::new(Error::argument("memory registered for RDMA is accessed by the NIC")))
    }
}

/// The directory in which the kernel lists peer-memory modules, which let a NIC access device memory.
const PEER_MEMORY_MODULES: &str = "/sys/kernel/mm/memory_peers";
/// The directory of NVIDIA's peer-memory module, which newer kernels do not list in [`PEER_MEMORY_MODULES`].
const NVIDIA_PEER_MEMORY: &str = "/sys/module/nvidia_peermem";

/// Registers device memory with a NIC; tests use a fake implementation.
trait Registrar {
    type Mr;

    fn device(&self) -> Arc<str>;

    /// Returns whether a kernel module is loaded that lets NICs access device memory by its address.
    fn has_peer_memory(&self) -> bool;

    /// Registers a range of a dma-buf; work requests address its first byte as `address`.
    fn by_dma_buf(
        &self,
        fd: BorrowedFd<'_>,
        offset: u64,
        bytes: usize,
        address: u64,
    ) -> Result<Self::Mr, Error>;

    fn by_address(&self, region: &dyn Region, bytes: usize) -> Result<Self::Mr, Error>;
}

impl Registrar for Arc<Domain> {
    type Mr = Mr;

    fn device(&self) -> Arc<str> {
        Arc::clone(&self.context.name)
    }

    fn has_peer_memory(&self) -> bool {
        let listed = std::fs::read_dir(PEER_MEMORY_MODULES)
            .is_ok_and(|mut modules| modules.next().is_some());
        listed || Path::new(NVIDIA_PEER_MEMORY).exists()
    }

    fn by_dma_buf(
        &self,
        fd: BorrowedFd<'_>,
        offset: u64,
        bytes: usize,
        address: u64,
    ) -> Result<Mr, Error> {
        // SAFETY: the dma-buf keeps the memory allocated. The contract of `adopt` says that the region exists
        // as long as it is accessed.
        unsafe { self.register_dma_buf(fd, offset, bytes, address) }
    }

    fn by_address(&self, region: &dyn Region, bytes: usize) -> Result<Mr, Error> {
        // SAFETY: the registration keeps the region, so the memory stays allocated.
        unsafe { self.register(region.base(), bytes) }
    }
}

/// Registers device memory, which must not be empty, with the first of the allowed methods that works.
///
/// # Errors
/// Returns why each method fails.
fn register_device<R: Registrar>(
    registrar: &R,
    region: &dyn Region,
    method: DeviceMemory,
) -> Result<R::Mr, Error> {
    let refused = |reasons: Vec<String>| {
        let (bytes, device) = (region.bytes(), registrar.device());
        Err(Error::DeviceMemory { bytes, device, reasons: reasons.join("; ") })
    };
    let mut reasons = Vec::new();
    let Ok(bytes) = usize::try_from(region.bytes()) else {
        return refused(vec!["it is longer than the address space".to_owned()]);
    };
    if matches!(method, DeviceMemory::Any | DeviceMemory::DmaBuf) {
        let registered = region.dma_buf().and_then(|buffer| {
            let address = region.base().as_ptr() as u64;
            let mr = registrar.by_dma_buf(buffer.fd.as_fd(), buffer.offset, bytes, address);
            mr.map_err(|error| error.to_string())
        });
        match registered {
            Ok(mr) => return Ok(mr),
            Err(reason) => reasons.push(format!("by dma-buf: {reason}")),
        }
    }
    if matches!(method, DeviceMemory::Any | DeviceMemory::PeerMemory) {
        // Without such a module the NIC would use the address as one of the host.
        let registered = match registrar.has_peer_memory() {
            true => registrar.by_address(region, bytes).map_err(|error| error.to_string()),
            false => Err(format!(
                "no kernel module gives NICs access to devices: {PEER_MEMORY_MODULES} has none, and \
                 nvidia_peermem is not loaded"
            )),
        };
        match registered {
            Ok(mr) => return Ok(mr),
            Err(reason) => reasons.push(format!("by address: {reason}")),
        }
    }
    if reasons.is_empty() {
        reasons.push("device_memory is Refused".to_owned());
    }
    refused(reasons)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::sync::atomic::AtomicU64;

    use peerlane_hal::{DmaBuf, Error as _, ErrorKind, Flush, Space};
    use rustix::fs::{MemfdFlags, memfd_create};
    use rustix::io::Errno;

    use super::*;

    #[derive(Default)]
    struct FakeRegistrar {
        dma_buf: Option<Errno>,
        address: Option<Errno>,
        modules: bool,
        calls: RefCell<Vec<String>>,
    }

    impl FakeRegistrar {
        fn result(&self, call: &'static str, errno: Option<Errno>) -> Result<&'static str, Error> {
            let device = self.device();
            errno.map_or(Ok(call), |errno| Err(Error::Verbs { call, device, errno }))
        }
    }

    impl Registrar for FakeRegistrar {
        type Mr = &'static str;

        fn device(&self) -> Arc<str> {
            "mlx5_0".into()
        }

        fn has_peer_memory(&self) -> bool {
            self.modules
        }

        fn by_dma_buf(
            &self,
            _: BorrowedFd<'_>,
            offset: u64,
            bytes: usize,
            address: u64,
        ) -> Result<&'static str, Error> {
            self.calls.borrow_mut().push(format!("{bytes} bytes at {offset} as {address:#x}"));
            self.result("ibv_reg_dmabuf_mr", self.dma_buf)
        }

        fn by_address(&self, region: &dyn Region, bytes: usize) -> Result<&'static str, Error> {
            self.calls.borrow_mut().push(format!("{bytes} bytes at {:p}", region.base()));
            self.result("ibv_reg_mr", self.address)
        }
    }

    /// Simulated device memory of 5000 bytes at an odd offset of its allocation.
    struct Memory {
        exported: bool,
    }

    // SAFETY: the region keeps its memory allocated until it is dropped.
    unsafe impl Region for Memory {
        unsafe fn allow_reuse(&self) {}

        fn base(&self) -> NonNull<u8> {
            NonNull::new(0x7_0000_1234 as *mut u8).unwrap()
        }

        fn bytes(&self) -> u64 {
            5000
        }

        fn space(&self) -> Space {
            Space::Device
        }

        fn flags(&self) -> Option<&[AtomicU64]> {
            None
        }

        fn flag_value(&self, _word: u64) -> Option<u64> {
            None
        }

        fn flush(&self) -> Option<Arc<dyn Flush>> {
            None
        }

        fn dma_buf(&self) -> Result<DmaBuf, String> {
            if !self.exported {
                return Err("the driver exports none".to_owned());
            }
            let fd: OwnedFd = memfd_create("dma-buf", MemfdFlags::CLOEXEC).unwrap();
            Ok(DmaBuf { fd, offset: 0x1234 })
        }
    }

    const EXPORTED: Memory = Memory { exported: true };

    #[test]
    fn a_dma_buf_is_registered_with_its_offset_and_under_the_address_of_the_device() {
        let fake = FakeRegistrar { modules: true, ..FakeRegistrar::default() };
        assert_eq!(
            register_device(&fake, &EXPORTED, DeviceMemory::Any).unwrap(),
            "ibv_reg_dmabuf_mr"
        );
        assert_eq!(fake.calls.take(), ["5000 bytes at 4660 as 0x700001234"]);
    }

    #[test]
    fn memory_without_a_dma_buf_is_registered_by_address_if_a_module_is_loaded() {
        let fake = FakeRegistrar { modules: true, ..FakeRegistrar::default() };
        let memory = Memory { exported: false };
        assert_eq!(register_device(&fake, &memory, DeviceMemory::Any).unwrap(), "ibv_reg_mr");
        let fake = FakeRegistrar {
            modules: true,
            dma_buf: Some(Errno::OPNOTSUPP),
            ..FakeRegistrar::default()
        };
        assert_eq!(register_device(&fake, &EXPORTED, DeviceMemory::Any).unwrap(), "ibv_reg_mr");
        assert_eq!(fake.calls.take().len(), 2);
    }

    #[test]
    fn every_method_that_does_not_work_is_named() {
        let text = |fake: &FakeRegistrar, memory: &Memory, method| {
            let error = register_device(fake, memory, method).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unavailable);
            error.to_string()
        };
        let fake = FakeRegistrar { dma_buf: Some(Errno::OPNOTSUPP), ..FakeRegistrar::default() };
        assert_eq!(
            text(&fake, &EXPORTED, DeviceMemory::Any),
            "cannot register 5000 bytes of device memory with the NIC mlx5_0: by dma-buf: ibv_reg_dmabuf_mr on \
             mlx5_0: Operation not supported (os error 95); by address: no kernel module gives NICs \
             access to devices: /sys/kernel/mm/memory_peers has none, and nvidia_peermem is not loaded"
        );
        let fake = FakeRegistrar {
            modules: true,
            address: Some(Errno::FAULT),
            ..FakeRegistrar::default()
        };
        assert_eq!(
            text(&fake, &Memory { exported: false }, DeviceMemory::PeerMemory),
            "cannot register 5000 bytes of device memory with the NIC mlx5_0: by address: ibv_reg_mr on mlx5_0: \
             Bad address (os error 14)"
        );
        assert_eq!(
            text(&fake, &EXPORTED, DeviceMemory::Refused),
            "cannot register 5000 bytes of device memory with the NIC mlx5_0: device_memory is Refused"
        );
    }
}
