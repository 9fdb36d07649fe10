//! Lists the network devices that UCX can use on this machine.

use std::net::IpAddr;

use crate::error::Error;
use crate::options::Options;
use crate::sys::{self, Context};

/// The transports between processes of one host, which are no network.
const OF_HOST: [&str; 5] = ["self", "posix", "sysv", "cma", "knem"];

/// A network device of this machine with a transport of UCX.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// The name of the network device, such as `eth0` or `mlx5_0:1`.
    pub name: String,
    /// The transport of UCX for the device, such as `tcp`.
    pub transport: String,
}

/// Lists the network devices that UCX can use on this machine, with their transports.
///
/// # Errors
/// [`Unavailable`](peerlane_hal::ErrorKind::Unavailable) if libucp is missing or too old, or has no
/// transport.
pub fn discover() -> Result<Vec<Device>, Error> {
    let context = Context::open(&Options::default())?;
    Ok(networks(&context))
}

/// Returns the version of the library libucp, such as `1.13.1`.
///
/// # Errors
/// [`Unavailable`](peerlane_hal::ErrorKind::Unavailable) if the library is missing or too old.
pub fn version() -> Result<String, Error> {
    Ok(sys::version()?)
}

/// Returns the network devices of a context, without the loopback interface.
pub(crate) fn networks(context: &Context) -> Vec<Device> {
    let resources = context.resources().into_iter();
    let is_network = |(transport, device): &(String, String)| {
        !OF_HOST.contains(&transport.as_str()) && device != "lo"
    };
    let devices = resources.filter(is_network);
    devices.map(|(transport, name)| Device { name, transport }).collect()
}

/// Returns the names and addresses of the interfaces among these devices, such as
/// `eth0 10.0.0.2`.
pub(crate) fn addresses(devices: &[Device]) -> Vec<String> {
    let found = interfaces().into_iter();
    let found = found.filter(|(name, _)| devices.iter().any(|device| device.name == *name));
    found.map(|(name, ip)| format!("{name} {ip}")).collect()
}

/// Returns the interfaces of this machine that are up, with their IPv4 and IPv6 addresses.
fn interfaces() -> Vec<(String, IpAddr)> {
    let mut list = std::ptr::null_mut();
    // SAFETY: the pointer is valid for the call.
    if unsafe { libc::getifaddrs(&mut list) } != 0 {
        return Vec::new();
    }

    let (mut found, mut next) = (Vec::new(), list);
    while !next.is_null() {
        // SAFETY: the entry belongs to the list, which is not freed yet.
        let entry = unsafe { &*next };
        // SAFETY: the name ends with a zero and lives as long as the list.
        let name = unsafe { std::ffi::CStr::from_ptr(entry.ifa_name) };
        // SAFETY: the address is null or one of the family that it names.
        if let Some(ip) = unsafe { ip_of(entry.ifa_addr) } {
            found.push((name.to_string_lossy().into_owned(), ip));
        }
        next = entry.ifa_next;
    }
    // SAFETY: the list was made by `getifaddrs` and is freed once.
    unsafe { libc::freeifaddrs(list) };
    found
}

/// Returns the IP address of a socket address, or `None` if it is null or of another family.
///
/// # Safety
/// The pointer is null or of a socket address that is as long as its family demands.
unsafe fn ip_of(address: *const libc::sockaddr) -> Option<IpAddr> {
    if address.is_null() {
        return None;
    }

    // SAFETY: the caller's.
    match i32::from(unsafe { (*address).sa_family }) {
        libc::AF_INET => {
            // SAFETY: the family says which structure it is.
            let address = unsafe { &*address.cast::<libc::sockaddr_in>() };
            Some(IpAddr::from(address.sin_addr.s_addr.to_ne_bytes()))
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let address = unsafe { &*address.cast::<libc::sockaddr_in6>() };
            Some(IpAddr::from(address.sin6_addr.s6_addr))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interfaces_have_addresses() {
        let found = interfaces();
        assert!(found.iter().any(|(name, ip)| name == "lo" && ip.is_loopback()), "{found:?}");
    }
}
