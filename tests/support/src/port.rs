//! Gives ports to tests whose processes bind them later.

use std::fs;
use std::net::TcpListener;
use std::ops::RangeInclusive;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::process;
use std::sync::atomic::{AtomicU16, Ordering};

/// Reserves a TCP port of this machine for as long as the value lives.
///
/// Nobody listens at the port. No other test gets it meanwhile, and neither does a socket that is bound to port 0, because the
/// port is not an ephemeral one.
#[derive(Debug)]
pub struct ReservedPort {
    number: u16,
    /// A socket whose name holds the number. The names are of the network namespace, as the ports are.
    _claim: UnixListener,
}

/// The ports that tests reserve, except for ephemeral ones.
const PORTS: RangeInclusive<u16> = 10_000..=65_535;

impl ReservedPort {
    /// Reserves a port at which nobody listens.
    ///
    /// # Panics
    /// If there is none.
    pub fn new() -> Self {
        static NEXT: AtomicU16 = AtomicU16::new(0);
        let ephemeral = ephemeral_ports();
        let ports: Vec<u16> = PORTS.filter(|port| !ephemeral.contains(port)).collect();
        assert!(!ports.is_empty(), "all ports of {PORTS:?} are ephemeral");

        // Processes begin at different places, so that few of them try the same ports.
        let first = process::id() as usize * 31 + usize::from(NEXT.fetch_add(1, Ordering::Relaxed));
        let reserve = |turn: usize| Self::reserve(ports[(first + turn) % ports.len()]);
        (0..ports.len()).find_map(reserve).expect("a free port")
    }

    /// Reserves this port; `None` if another test has reserved it or someone listens there.
    fn reserve(number: u16) -> Option<Self> {
        let name = SocketAddr::from_abstract_name(format!("peerlane-test-port-{number}")).ok()?;
        let claim = UnixListener::bind_addr(&name).ok()?;
        TcpListener::bind(("0.0.0.0", number)).ok()?;
        Some(Self { number, _claim: claim })
    }

    /// Returns the number of the port.
    pub fn number(&self) -> u16 {
        self.number
    }

    /// Returns the address of the port on the loopback interface.
    pub fn address(&self) -> std::net::SocketAddr {
        ([127, 0, 0, 1], self.number).into()
    }
}

impl Default for ReservedPort {
    fn default() -> Self {
        Self::new()
    }
}

/// Returns the range of ephemeral ports, which the kernel gives to sockets that are bound to port 0.
fn ephemeral_ports() -> RangeInclusive<u16> {
    let text = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    let mut ends = text.split_whitespace().map_while(|end| end.parse().ok());
    match (ends.next(), ends.next()) {
        (Some(first), Some(last)) => first..=last,
        _ => 32_768..=60_999,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserved_ports_differ_and_are_not_ephemeral() {
        let ports: Vec<_> = (0..100).map(|_| ReservedPort::new()).collect();
        let mut numbers: Vec<_> = ports.iter().map(ReservedPort::number).collect();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), 100);

        let ephemeral = ephemeral_ports();
        for port in &ports {
            assert!(!ephemeral.contains(&port.number()), "{} is in {ephemeral:?}", port.number());
            assert!(ReservedPort::reserve(port.number()).is_none());
            TcpListener::bind(port.address()).expect("nobody listens there");
        }
    }

    #[test]
    fn a_port_is_free_again_after_its_drop() {
        let port = ReservedPort::new();
        let number = port.number();
        drop(port);
        assert_eq!(ReservedPort::reserve(number).map(|again| again.number()), Some(number));
    }

    #[test]
    fn a_port_at_which_someone_listens_is_not_reserved() {
        let port = ReservedPort::new();
        let (number, listener) = (port.number(), TcpListener::bind(port.address()).unwrap());
        drop(port);
        assert!(ReservedPort::reserve(number).is_none());
        drop(listener);
    }
}
