//! Parses the address of the hub, which users write as a host and a port in several forms.
//!
//! | form | result |
//! | --- | --- |
//! | `10.0.0.1`, `::1`, `[::1]`, `node0`, `node0.example.org` | the host; an IPv6 address in front of a port needs the brackets |
//! | `::ffff:10.0.0.1` | the IPv4 address in it, because the hub listens there |
//! | `fe80::1%eth0`, `[fe80::1%eth0]` | a link-local address, with the interface of this host |
//! | `fe80::1` | an error: every interface has its own network of these addresses |
//! | `0.0.0.0`, `::` | this host: works if all ranks are on one host |
//! | `127.1`, `2130706433` | an error: short forms of IPv4 addresses, which not all resolvers read |
//! | `tcp://node0`, `a b`, a name of more than 253 bytes | an error |
//!
//! Every error of this file is one before the first wait. A name that cannot be resolved is not
//! such an error, because a name service may know it later.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs as _};

use peerlane_hal::ErrorKind;

use crate::error::{Error, quoted};

/// The maximum length of a host name, in bytes (RFC 1035).
const NAME_BYTES_MAX: usize = 253;

/// The maximum length of the text between two dots of a host name, in bytes (RFC 1035).
const LABEL_BYTES_MAX: usize = 63;

/// The maximum length of the name of a network interface in Linux, in bytes.
///
/// It is `IFNAMSIZ` without the terminating zero.
const INTERFACE_BYTES_MAX: usize = 15;

/// Stores the parsed address of the hub, which [`HubAddress`](super::environment::HubAddress) holds
/// as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    host: Host,
    port: u16,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Host {
    Ip(IpAddr),
    /// A link-local IPv6 address, and the name or number of its network interface.
    LinkLocal(Ipv6Addr, String),
    Name(String),
}

impl Address {
    /// Parses a host and a port, such as `10.0.0.1:29501`.
    ///
    /// Errors begin with `source`, which says where `text` is from.
    pub(crate) fn parse(source: &str, text: &str) -> Result<Self, Error> {
        let expected = |what: &str| invalid(source, text, what);
        if let Some((_, rest)) = text.split_once("://") {
            return Err(expected(&format!("a host and a port without a scheme, such as {rest}")));
        }

        // Without brackets, the last colon is the one in front of the port.
        let host_and_port = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            Some((host, port)) => port.strip_prefix(':').map(|port| (host, port)),
            None => text.rsplit_once(':'),
        };
        let (host, port) = match host_and_port {
            Some((host, port)) if !host.is_empty() => (host, port),
            _ => return Err(expected("a host and a port, such as 10.0.0.1:29501")),
        };

        let is_bracketed = text.starts_with('[');
        if !is_bracketed && host.contains(':') {
            // What may be meant: an address and a port, an address alone, or two ports.
            let is_ip = |text: &str| ip_and_interface(text).0.parse::<Ipv6Addr>().is_ok();
            return Err(expected(&if is_ip(host) {
                format!(
                    "[{host}]:{port}, because an IPv6 address in front of a port needs brackets"
                )
            } else if is_ip(text) {
                format!("a host and a port, such as [{text}]:29501")
            } else {
                "one host and one port, such as 10.0.0.1:29501".to_owned()
            }));
        }

        let Ok(port) = port.parse() else {
            return Err(expected(&format!("a port from 1 to {} after the host", u16::MAX)));
        };

        let host = Host::parse(host, is_bracketed).map_err(|what| expected(&what))?;
        Ok(Self { host, port })
    }

    /// Parses a host without a port, such as the value of `MASTER_ADDR`, and combines it with
    /// `port`.
    pub(crate) fn parse_host(source: &str, text: &str, port: u16) -> Result<Self, Error> {
        let expected = |what: &str| invalid(source, text, what);
        if let Some((_, rest)) = text.split_once("://") {
            return Err(expected(&format!("a host without a scheme, such as {rest}")));
        }

        let bracketed = text.strip_prefix('[').and_then(|rest| rest.split_once(']'));
        let (host, own_port) = match bracketed {
            Some((host, "")) => (host, None),
            Some((host, rest)) => (host, Some(rest.trim_start_matches(':'))),
            // More than one colon is an IPv6 address.
            None => match text.split_once(':') {
                Some((host, port)) if !host.is_empty() && !port.contains(':') => (host, Some(port)),
                _ => (text, None),
            },
        };

        if let Some(port) = own_port {
            let what = format!("a host without a port, such as {host}; set MASTER_PORT to {port}");
            return Err(expected(&what));
        }

        let host = Host::parse(host, bracketed.is_some()).map_err(|what| expected(&what))?;
        Ok(Self { host, port })
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Returns whether the address is a loopback address, which only processes of the same host can
    /// reach.
    ///
    /// Only the literal loopback addresses and `localhost` count. A host may resolve its own name
    /// to a loopback address, but other hosts do not, so no other name counts.
    pub(crate) fn is_loopback(&self) -> bool {
        match &self.host {
            Host::Ip(ip) => ip.is_loopback(),
            Host::LinkLocal(..) => false,
            Host::Name(name) => name.eq_ignore_ascii_case("localhost"),
        }
    }

    /// Returns whether the host is an unspecified IP address, such as `0.0.0.0`.
    ///
    /// It means every address of the host that uses it.
    pub(crate) fn is_unspecified(&self) -> bool {
        matches!(self.host, Host::Ip(ip) if ip.is_unspecified())
    }

    /// Returns the socket address, or `None` if only the system's resolver can determine it.
    pub(crate) fn literal(&self) -> Option<SocketAddr> {
        match self.host {
            Host::Ip(ip) => Some(SocketAddr::new(ip, self.port)),
            _ => None,
        }
    }

    /// Resolves the host, and returns its socket addresses.
    ///
    /// The system's resolver can block for long.
    ///
    /// # Errors
    /// That of the resolver, for example for an unknown name, or for an interface that this host
    /// does not have.
    pub(crate) fn resolve(&self) -> io::Result<Vec<SocketAddr>> {
        let host = match &self.host {
            Host::Ip(ip) => return Ok(vec![SocketAddr::new(*ip, self.port)]),
            Host::LinkLocal(ip, interface) => format!("{ip}%{interface}"),
            Host::Name(name) => name.clone(),
        };

        // The resolver also finds the number of an interface.
        let resolved = (host.as_str(), self.port).to_socket_addrs();
        match (&self.host, resolved) {
            (Host::LinkLocal(_, interface), Err(error)) => {
                let text = format!("this host has no network interface {interface} ({error})");
                Err(io::Error::new(error.kind(), text))
            }
            (_, resolved) => resolved.map(Iterator::collect),
        }
    }

    /// Opens a listening socket at the first resolved address of the host that can be bound.
    pub(crate) fn listen(&self) -> io::Result<TcpListener> {
        TcpListener::bind(self.resolve()?.as_slice())
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let port = self.port;
        match &self.host {
            Host::Ip(ip) => write!(f, "{}", SocketAddr::new(*ip, port)),
            Host::LinkLocal(ip, interface) => write!(f, "[{ip}%{interface}]:{port}"),
            Host::Name(name) => write!(f, "{name}:{port}"),
        }
    }
}

impl Host {
    /// Parses a host after its brackets, if any, were removed.
    ///
    /// The error says what was expected.
    fn parse(text: &str, is_bracketed: bool) -> Result<Self, String> {
        let (ip_text, interface) = ip_and_interface(text);
        match (ip_text.parse::<IpAddr>(), interface) {
            (Ok(IpAddr::V4(_)), _) if is_bracketed => {
                Err(format!("an IPv6 address in the brackets, or {text} without them"))
            }
            (Ok(IpAddr::V6(ip)), _) if ip.is_unicast_link_local() => {
                let interface = interface.unwrap_or_default();
                if is_interface(interface) {
                    return Ok(Self::LinkLocal(ip, interface.to_owned()));
                }

                Err(format!(
                    "the interface of this host after the link-local address, such as {ip}%eth0"
                ))
            }
            // The hub of an IPv4 address in IPv6 form listens at the IPv4 address.
            (Ok(ip), None) => Ok(Self::Ip(ip.to_canonical())),
            (Ok(ip), Some(_)) => {
                Err(format!("{ip}: only link-local addresses have an interface after %"))
            }
            // A host name has no colons.
            (Err(_), _) if is_bracketed || text.matches(':').count() > 1 => {
                Err("an IPv6 address, such as ::1".to_owned())
            }
            (Err(_), _) => Self::parse_name(text),
        }
    }

    /// Parses the name of a host, and rejects short forms of IPv4 addresses, such as `127.1`.
    fn parse_name(text: &str) -> Result<Self, String> {
        let is_allowed = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
        if let Some(letter) = text.chars().find(|letter| !is_allowed(*letter)) {
            return Err(format!(
                "a host name of letters, digits, `-`, `_` and `.`, but it contains {letter:?}"
            ));
        }

        if text.len() > NAME_BYTES_MAX {
            return Err(format!(
                "a host name of at most {NAME_BYTES_MAX} bytes, but it has {}",
                text.len()
            ));
        }

        // A dot at the end marks a full name.
        let labels = || text.strip_suffix('.').unwrap_or(text).split('.');
        if labels().any(|label| label.is_empty() || label.len() > LABEL_BYTES_MAX) {
            return Err(format!("a host name with 1 to {LABEL_BYTES_MAX} bytes between its dots"));
        }

        // Not all resolvers read text such as `127.1` as the same address.
        if labels().all(is_number) {
            return Err("all four numbers of an IPv4 address, such as 127.0.0.1".to_owned());
        }

        Ok(Self::Name(text.to_owned()))
    }
}

/// Splits a text such as `fe80::1%eth0` into the IP address and the network interface, if any.
fn ip_and_interface(text: &str) -> (&str, Option<&str>) {
    match text.split_once('%') {
        Some((ip, interface)) => (ip, Some(interface)),
        None => (text, None),
    }
}

fn is_interface(text: &str) -> bool {
    let is_forbidden = |letter: char| letter.is_whitespace() || "/:%[]".contains(letter);

    (1..=INTERFACE_BYTES_MAX).contains(&text.len()) && !text.contains(is_forbidden)
}

/// Returns whether `text` is a number that resolvers read as a part of an IPv4 address.
fn is_number(text: &str) -> bool {
    let hex = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X"));

    match hex {
        Some(hex) => hex.chars().all(|digit| digit.is_ascii_hexdigit()),
        None => text.chars().all(|digit| digit.is_ascii_digit()),
    }
}

/// Returns the error for the malformed address `text`, which is from `source`, such as a variable.
fn invalid(source: &str, text: &str, expected: &str) -> Error {
    let text = format!("{source} is {}, expected {expected}", quoted(text));
    Error::new(ErrorKind::InvalidArgument, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(parsed: Result<Address, Error>) -> String {
        let error = parsed.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        error.to_string()
    }

    #[test]
    fn hosts_are_parsed() {
        let full_name = format!("{}.", "a.".repeat(125) + "bc");
        for (text, address, is_loopback) in [
            ("::1", "[::1]:7", true),
            ("[::1]", "[::1]:7", true),
            ("0:0:0:0:0:0:0:1", "[::1]:7", true),
            ("::ffff:127.0.0.1", "127.0.0.1:7", true),
            ("[::ffff:10.0.0.1]", "10.0.0.1:7", false),
            ("127.0.0.2", "127.0.0.2:7", true),
            ("10.0.0.1", "10.0.0.1:7", false),
            ("0.0.0.0", "0.0.0.0:7", false),
            ("::", "[::]:7", false),
            ("[::]", "[::]:7", false),
            ("fe80::1%lo", "[fe80::1%lo]:7", false),
            ("[fe80::1%lo]", "[fe80::1%lo]:7", false),
            ("fe80::1%2", "[fe80::1%2]:7", false),
            ("localhost", "localhost:7", true),
            ("LOCALHOST", "LOCALHOST:7", true),
            ("node0", "node0:7", false),
            ("rack2_node-01.example.org.", "rack2_node-01.example.org.:7", false),
            ("nosuch.invalid", "nosuch.invalid:7", false),
            ("node.5", "node.5:7", false),
            (&full_name, &format!("{full_name}:7"), false),
        ] {
            let parsed = Address::parse_host("MASTER_ADDR", text, 7).unwrap();
            assert_eq!(parsed.to_string(), address, "{text}");
            assert_eq!(parsed.is_loopback(), is_loopback, "{text}");
            // What is passed on as text is the same address.
            assert_eq!(Address::parse("the text", address).unwrap(), parsed, "{text}");
        }
    }

    #[test]
    fn other_hosts_are_refused_with_the_form_to_use() {
        let long_name = "a.".repeat(127);
        let long_label = "x".repeat(64);
        let long_text = "x".repeat(300);
        let letters = "a host name of letters, digits, `-`, `_` and `.`, but it contains";
        let numbers = "all four numbers of an IPv4 address, such as 127.0.0.1";
        let dots = "a host name with 1 to 63 bytes between its dots";
        let interface = |ip: &str| {
            format!("the interface of this host after the link-local address, such as {ip}%eth0")
        };
        for (text, expected) in [
            (
                "127.0.0.1:29500",
                "a host without a port, such as 127.0.0.1; set MASTER_PORT to 29500",
            ),
            ("[::1]:29500", "a host without a port, such as ::1; set MASTER_PORT to 29500"),
            ("node0:x", "a host without a port, such as node0; set MASTER_PORT to x"),
            ("tcp://127.0.0.1", "a host without a scheme, such as 127.0.0.1"),
            ("a b", &format!("{letters} ' '")),
            ("node0/1", &format!("{letters} '/'")),
            ("nöde", &format!("{letters} 'ö'")),
            (":29500", &format!("{letters} ':'")),
            ("[::1", "an IPv6 address, such as ::1"),
            ("::1:29500", "an IPv6 address, such as ::1"),
            ("[node0]", "an IPv6 address, such as ::1"),
            ("[127.0.0.1]", "an IPv6 address in the brackets, or 127.0.0.1 without them"),
            ("fe80::1", &interface("fe80::1")),
            ("[fe80::1]", &interface("fe80::1")),
            ("fe80::1%", &interface("fe80::1")),
            ("fe80::1%a b", &interface("fe80::1")),
            ("fe80::1%0123456789abcdef", &interface("fe80::1")),
            ("::1%lo", "::1: only link-local addresses have an interface after %"),
            ("node0%lo", &format!("{letters} '%'")),
            ("127.1", numbers),
            ("2130706433", numbers),
            ("0x7f.1", numbers),
            ("127.0.0.256", numbers),
            ("010.0.0.1", numbers),
            ("a..b", dots),
            (".a", dots),
            (".", dots),
            (&long_label, dots),
        ] {
            let error = refused(Address::parse_host("MASTER_ADDR", text, 7));
            assert_eq!(error, format!("MASTER_ADDR is {text:?}, expected {expected}"), "{text}");
        }
        for (text, bytes) in [(&long_name, 254), (&long_text, 300)] {
            let error = refused(Address::parse_host("MASTER_ADDR", text, 7));
            let expected = format!("a host name of at most 253 bytes, but it has {bytes}");
            assert_eq!(error, format!("MASTER_ADDR is {:?}…, expected {expected}", &text[..80]));
        }
    }

    #[test]
    fn hosts_with_ports_are_parsed() {
        for (text, port) in [
            ("10.0.0.1:29501", 29501),
            ("node0:65535", 65535),
            ("[::1]:0", 0),
            ("[fe80::1%eth0]:1", 1),
        ] {
            let parsed = Address::parse("PEERLANE_HUB", text).unwrap();
            assert_eq!((parsed.to_string().as_str(), parsed.port()), (text, port));
        }
        let mapped = Address::parse("PEERLANE_HUB", "[::ffff:10.0.0.1]:9").unwrap();
        assert_eq!(mapped.to_string(), "10.0.0.1:9");
    }

    #[test]
    fn other_hosts_with_ports_are_refused_with_the_form_to_use() {
        let both = "a host and a port, such as 10.0.0.1:29501";
        let port = "a port from 1 to 65535 after the host";
        let brackets = "because an IPv6 address in front of a port needs brackets";
        for (text, expected) in [
            ("", both),
            ("localhost", both),
            (":29500", both),
            ("[::1]", both),
            ("[::1]29500", both),
            ("::1:29500", &format!("[::1]:29500, {brackets}")),
            ("fe80::1%lo:29500", &format!("[fe80::1%lo]:29500, {brackets}")),
            ("fe80::1", "a host and a port, such as [fe80::1]:29501"),
            ("127.0.0.1:29500:1", "one host and one port, such as 10.0.0.1:29501"),
            ("tcp://node0:29500", "a host and a port without a scheme, such as node0:29500"),
            ("node0:", port),
            ("node0:-1", port),
            ("node0:65536", port),
            ("node0:29500.0", port),
            ("node0:٣", port),
            ("a b:1", "a host name of letters, digits, `-`, `_` and `.`, but it contains ' '"),
        ] {
            let error = refused(Address::parse("PEERLANE_HUB", text));
            assert_eq!(error, format!("PEERLANE_HUB is {text:?}, expected {expected}"), "{text}");
        }
    }

    #[test]
    fn link_local_addresses_are_resolved_with_their_interface() {
        let resolve = |text: &str| Address::parse("the text", text).unwrap().resolve();
        let Ok(resolved) = resolve("[fe80::1%lo]:7") else {
            // Without IPv6 there are no such addresses.
            assert!(TcpListener::bind("[::1]:0").is_err());
            return;
        };
        let [SocketAddr::V6(resolved)] = resolved[..] else { panic!("{resolved:?}") };
        assert_ne!(resolved.scope_id(), 0);
        assert_eq!(
            resolve(&format!("[fe80::1%{}]:7", resolved.scope_id())).unwrap(),
            [resolved.into()]
        );

        let error = resolve("[fe80::1%nosuch0]:7").unwrap_err().to_string();
        assert!(error.starts_with("this host has no network interface nosuch0"), "{error}");
    }
}
