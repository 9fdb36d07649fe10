//! Registers device memory as a dma-buf, or by its address with a kernel module for the device.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::Arc;

use peerlane_hal::Region;

use crate::error::Error;
use crate::fabric::DeviceMemory;
use crate::sys::{Domain, Mr};

/// The directory in which the kernel lists peer-memory modules, which let a NIC access device memory.
const CLIENTS: &str = "/sys/kernel/mm/memory_peers";
/// The directory of NVIDIA's peer-memory module, which newer kernels do not list in [`CLIENTS`].
const NVIDIA_CLIENT: &str = "/sys/module/nvidia_peermem";

/// Registers device memory: a NIC, or a fake in tests.
pub(super) trait Registrar {
    type Mr;

    fn place(&self) -> Arc<str>;

    /// Returns whether a kernel module for device addresses is loaded.
    fn has_clients(&self) -> bool;

    /// Registers a range of a dma-buf, which requests address from `address` on.
    fn by_dma_buf(
        &self,
        fd: BorrowedFd<'_>,
        offset: u64,
        bytes: usize,
        address: u64,
    ) -> Result<Self::Mr, Error>;

    /// Registers memory by its address.
    fn by_address(&self, region: &dyn Region, bytes: usize) -> Result<Self::Mr, Error>;
}

impl Registrar for Arc<Domain> {
    type Mr = Mr;

    fn place(&self) -> Arc<str> {
        Arc::clone(&self.context.name)
    }

    fn has_clients(&self) -> bool {
        let listed = std::fs::read_dir(CLIENTS).is_ok_and(|mut clients| clients.next().is_some());
        listed || Path::new(NVIDIA_CLIENT).exists()
    }

    fn by_dma_buf(
        &self,
        fd: BorrowedFd<'_>,
        offset: u64,
        bytes: usize,
        address: u64,
    ) -> Result<Mr, Error> {
        // SAFETY: the dma-buf holds the memory by itself; that the region lives as long as it is
        // reached is the contract of `adopt`.
        unsafe { self.register_dma_buf(fd, offset, bytes, address) }
    }

    fn by_address(&self, region: &dyn Region, bytes: usize) -> Result<Mr, Error> {
        // SAFETY: the region lives as long as the registration, which keeps it.
        unsafe { self.register(region.base(), bytes) }
    }
}

/// Registers a region of device memory with the first of these methods that works. The region must not be empty.
///
/// # Errors
/// Returns why each method fails.
pub(super) fn register<R: Registrar>(
    registrar: &R,
    region: &dyn Region,
    ways: DeviceMemory,
) -> Result<R::Mr, Error> {
    let refused = |reasons: Vec<String>| {
        let (bytes, place) = (region.bytes(), registrar.place());
        Err(Error::OfDevice { bytes, place, reasons: reasons.join("; ") })
    };
    let mut reasons = Vec::new();
    let Ok(bytes) = usize::try_from(region.bytes()) else {
        return refused(vec!["it is longer than the address space".to_owned()]);
    };
    if matches!(ways, DeviceMemory::Any | DeviceMemory::DmaBuf) {
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
    if matches!(ways, DeviceMemory::Any | DeviceMemory::PeerMemory) {
        // Without such a module the card would take the address for one of the host.
        let registered = match registrar.has_clients() {
            true => registrar.by_address(region, bytes).map_err(|error| error.to_string()),
            false => Err(format!(
                "no kernel module gives cards access to devices: {CLIENTS} has none, and \
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
    use std::os::fd::OwnedFd;
    use std::ptr::NonNull;
    use std::sync::atomic::AtomicU64;

    use peerlane_hal::{DmaBuf, Error as _, ErrorKind, Flush, Space};
    use rustix::fs::{MemfdFlags, memfd_create};
    use rustix::io::Errno;

    use super::*;

    /// A fake NIC that records how it was called.
    #[derive(Default)]
    struct Double {
        dma_buf: Option<Errno>,
        address: Option<Errno>,
        clients: bool,
        asked: RefCell<Vec<String>>,
    }

    impl Double {
        fn answer(&self, call: &'static str, errno: Option<Errno>) -> Result<&'static str, Error> {
            let place = self.place();
            errno.map_or(Ok(call), |errno| Err(Error::Verbs { call, place, errno }))
        }
    }

    impl Registrar for Double {
        type Mr = &'static str;

        fn place(&self) -> Arc<str> {
            "mlx5_0".into()
        }

        fn has_clients(&self) -> bool {
            self.clients
        }

        fn by_dma_buf(
            &self,
            _: BorrowedFd<'_>,
            offset: u64,
            bytes: usize,
            address: u64,
        ) -> Result<&'static str, Error> {
            self.asked.borrow_mut().push(format!("{bytes} bytes at {offset} as {address:#x}"));
            self.answer("ibv_reg_dmabuf_mr", self.dma_buf)
        }

        fn by_address(&self, region: &dyn Region, bytes: usize) -> Result<&'static str, Error> {
            self.asked.borrow_mut().push(format!("{bytes} bytes at {:p}", region.base()));
            self.answer("ibv_reg_mr", self.address)
        }
    }

    /// Device memory: 5000 bytes at an odd offset of its allocation.
    struct Memory {
        exported: bool,
    }

    impl Region for Memory {
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
        let card = Double { clients: true, ..Double::default() };
        assert_eq!(register(&card, &EXPORTED, DeviceMemory::Any).unwrap(), "ibv_reg_dmabuf_mr");
        assert_eq!(card.asked.take(), ["5000 bytes at 4660 as 0x700001234"]);
    }

    #[test]
    fn what_is_no_dma_buf_goes_by_address_where_a_module_knows_it() {
        let card = Double { clients: true, ..Double::default() };
        let memory = Memory { exported: false };
        assert_eq!(register(&card, &memory, DeviceMemory::Any).unwrap(), "ibv_reg_mr");
        let card = Double { clients: true, dma_buf: Some(Errno::OPNOTSUPP), ..Double::default() };
        assert_eq!(register(&card, &EXPORTED, DeviceMemory::Any).unwrap(), "ibv_reg_mr");
        assert_eq!(card.asked.take().len(), 2);
    }

    #[test]
    fn every_way_that_does_not_work_is_named() {
        let text = |card: &Double, memory: &Memory, ways| {
            let error = register(card, memory, ways).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unavailable);
            error.to_string()
        };
        let card = Double { dma_buf: Some(Errno::OPNOTSUPP), ..Double::default() };
        assert_eq!(
            text(&card, &EXPORTED, DeviceMemory::Any),
            "cannot register 5000 bytes of a device with mlx5_0: by dma-buf: ibv_reg_dmabuf_mr on \
             mlx5_0: Operation not supported (os error 95); by address: no kernel module gives cards \
             access to devices: /sys/kernel/mm/memory_peers has none, and nvidia_peermem is not loaded"
        );
        let card = Double { clients: true, address: Some(Errno::FAULT), ..Double::default() };
        assert_eq!(
            text(&card, &Memory { exported: false }, DeviceMemory::PeerMemory),
            "cannot register 5000 bytes of a device with mlx5_0: by address: ibv_reg_mr on mlx5_0: \
             Bad address (os error 14)"
        );
        assert_eq!(
            text(&card, &EXPORTED, DeviceMemory::Refused),
            "cannot register 5000 bytes of a device with mlx5_0: device_memory is Refused"
        );
    }
}
