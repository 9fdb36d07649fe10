//! Holds the address space of this process, and the claim of a process on a device.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};

use super::memory::AddressSpace;
use super::settings::PREFIX;

/// Returns the address space of this process, with every device address.
pub(crate) fn memory() -> &'static AddressSpace {
    static MEMORY: AddressSpace = AddressSpace::new();
    &MEMORY
}

/// Exclusive use of a device by this process. The kernel ends it with the process.
#[derive(Debug)]
pub(crate) struct Claim {
    _name: UnixListener,
}

impl Claim {
    /// Claims the device; `None` if another process has claimed it.
    ///
    /// Processes compete for a device only if their machine has the same name in the environment.
    pub(crate) fn take(device: u32) -> Option<Self> {
        let machine = std::env::var(format!("{PREFIX}MACHINE")).unwrap_or_default();
        let name = format!("simulated-device-{machine}-{device}");
        let address = SocketAddr::from_abstract_name(name).ok()?;
        let name = UnixListener::bind_addr(&address).ok()?;
        Some(Self { _name: name })
    }
}
