//! The machine as this process sees it, and the claim of a process on a device.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};

use super::memory::AddressSpace;
use super::settings::PREFIX;

/// Every device address of this process.
pub(crate) fn memory() -> &'static AddressSpace {
    static MEMORY: AddressSpace = AddressSpace::new();
    &MEMORY
}

/// That this process has a device for itself. The kernel ends it with the process.
#[derive(Debug)]
pub(crate) struct Claim {
    _name: UnixListener,
}

impl Claim {
    /// Takes the device; `None` if another process has it.
    ///
    /// Machines with different names in the environment are different machines.
    pub(crate) fn take(device: u32) -> Option<Self> {
        let machine = std::env::var(format!("{PREFIX}MACHINE")).unwrap_or_default();
        let name = format!("simulated-device-{machine}-{device}");
        let address = SocketAddr::from_abstract_name(name).ok()?;
        let name = UnixListener::bind_addr(&address).ok()?;
        Some(Self { _name: name })
    }
}
