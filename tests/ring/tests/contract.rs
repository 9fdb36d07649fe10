//! Runs the contract suite. `cargo test --test contract -- --list` lists the checks.

use std::process::ExitCode;
use std::ptr::NonNull;
use std::sync::Arc;

use peerlane_conformance::{Harness, OwnMemory, Suite};
use peerlane_hal::{ErrorKind, Rank};
use peerlane_ring::model::{Address, Descriptor, Device};
use peerlane_ring::{Engine, Error, Fabric, Local, WINDOW};

struct Backend;

impl Harness for Backend {
    type Fabric = Fabric;

    fn name(&self) -> &str {
        "ring"
    }

    fn open(&self, rank: Rank, ranks: usize) -> Result<Fabric, Error> {
        Fabric::open(rank, ranks)
    }

    fn write(&self, region: &Local, offset: u64, bytes: &[u8]) {
        let Address { device, address } = region.address_at(offset);
        device.write(address, bytes).expect("a check writes inside a region");
    }

    fn read(&self, region: &Local, offset: u64, bytes: &mut [u8]) {
        let Address { device, address } = region.address_at(offset);
        device.read(address, bytes).expect("a check reads inside a region");
    }

    fn own_memory(&self, rank: Rank, bytes: u64) -> Option<Arc<dyn OwnMemory>> {
        let device = Device::open(rank.0).ok()?;
        let address = device.allocate(bytes).ok()?;
        let memory = VendorMemory { device, address, bytes };
        device.write(address, &vec![0; bytes as usize]).ok()?;
        Some(Arc::new(memory))
    }

    /// Stops the ring by a copy of length 0, which the device refuses.
    fn break_engine(&self, engine: &mut Engine) -> Option<ErrorKind> {
        let device = Device::open(0).ok()?;
        let at = Address { device, address: 0 };
        let ring = engine.ring();
        let index = ring.completed();
        ring.write(index, Descriptor::Copy { dst: at, src: at, bytes: 0 });
        ring.doorbell(index.wrapping_add(1));
        while ring.error().is_none() {
            std::thread::yield_now();
        }
        Some(ErrorKind::Other)
    }
}

/// Memory of a device that a program allocated by the vendor's calls.
struct VendorMemory {
    device: Device,
    address: u64,
    bytes: u64,
}

// SAFETY: the value owns the allocation, which is so long and is freed when the value is dropped.
unsafe impl OwnMemory for VendorMemory {
    fn base(&self) -> NonNull<u8> {
        let base = std::ptr::without_provenance_mut((WINDOW + self.address) as usize);
        NonNull::new(base).expect("the window does not begin at 0")
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for VendorMemory {
    fn drop(&mut self) {
        self.device.free(self.address);
    }
}

fn main() -> ExitCode {
    Suite::new().with(Backend).run()
}
