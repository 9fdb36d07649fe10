//! Identifies the host and network namespace of a process, to decide whether it can hand memory to
//! another process.

use std::os::unix::fs::MetadataExt as _;
use std::sync::OnceLock;

use crate::Fault;
use crate::limits::SystemError;
use peerlane_hal::Rank;
use peerlane_hal::wire::{Reader, Truncated, Writer};

const NAME_BYTES_MAX: usize = 255;
/// The file with the identifier of the running kernel's boot, which all containers of a host share.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
const HOST_NAME: &str = "/proc/sys/kernel/hostname";
const NETWORK_NAMESPACE: &str = "/proc/self/ns/net";

static OWN: OnceLock<Host> = OnceLock::new();

/// The host and the network namespace of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// The random identifier of the kernel's boot; hosts on which it cannot be read have zero and
    /// count as one host.
    boot: [u8; 16],
    /// The inode number of the network namespace, which scopes the names of abstract sockets. It is
    /// zero where it cannot be read.
    network: u64,
    name: String,
}

impl Host {
    /// Returns the host and network namespace of this process, read at the first call.
    pub fn own() -> &'static Self {
        OWN.get_or_init(|| {
            let unknown = || Self { boot: [0; 16], network: 0, name: String::new() };
            Self::find().unwrap_or_else(|_| unknown())
        })
    }

    /// Reads the host of this process ahead of use, because a process without descriptors would
    /// look like one of another host.
    pub(super) fn load_own() -> Result<(), SystemError> {
        if OWN.get().is_none() {
            let host = Self::find()?;
            OWN.get_or_init(|| host);
        }
        Ok(())
    }

    fn find() -> Result<Self, SystemError> {
        let boot = readable(BOOT_ID, std::fs::read_to_string(BOOT_ID))?;
        let boot = boot.and_then(|text| parse_uuid(text.trim())).unwrap_or_default();
        let network = readable(NETWORK_NAMESPACE, std::fs::metadata(NETWORK_NAMESPACE))?;
        let network = network.map_or(0, |metadata| metadata.ino());
        let name = readable(HOST_NAME, std::fs::read_to_string(HOST_NAME))?.unwrap_or_default();
        Ok(Self { boot, network, name: name.trim().to_owned() })
    }

    /// Checks that this process can request memory from the process of rank `peer`.
    ///
    /// # Errors
    /// Returns [`Fault::Mismatch`] if the peer is on another host or in another network namespace.
    pub fn check_reaches(&self, rank: Rank, peer: Rank, other: &Self) -> Result<(), Fault> {
        let Self { boot, network, name } = self;
        if other.boot != *boot {
            return Err(Fault::Mismatch(format!(
                "cannot connect to rank {peer}: it runs on host {}, but rank {rank} on host {name}; \
                 memory can be shared only inside one host, use the backend rdma or ucx between hosts",
                other.name
            )));
        }

        if other.network != *network && other.network != 0 && *network != 0 {
            return Err(Fault::Mismatch(format!(
                "cannot connect to rank {peer}: it runs on host {} in the network namespace {}, but \
                 rank {rank} on host {name} in the network namespace {network}; memory can be shared \
                 only inside one network namespace: run all ranks of a host in one (docker: \
                 --network=host), or use the backend rdma or ucx between namespaces",
                other.name, other.network
            )));
        }
        Ok(())
    }

    /// Returns the name of the host, or an empty text if it is unknown.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Appends the host and network namespace to the address of a rank.
    #[must_use]
    pub fn write(&self, writer: Writer) -> Writer {
        write_name(writer.bytes(&self.boot).u64(self.network), &self.name)
    }

    /// Decodes the host and network namespace from the address of a rank.
    ///
    /// # Errors
    /// If the address ends before.
    pub fn read(reader: &mut Reader<'_>) -> Result<Self, Truncated> {
        let (boot, network) = (reader.array("boot id")?, reader.u64("network namespace")?);
        Ok(Self { boot, network, name: read_name(reader, "name of the host")? })
    }
}

/// Returns what was read of a file, or `None` if it cannot be read on this host.
fn readable<T>(file: &str, read: std::io::Result<T>) -> Result<Option<T>, SystemError> {
    read.map(Some).or_else(|error| {
        let error = SystemError::of_io(format!("cannot read {file}"), &error);
        if error.is_exhausted() { Err(error) } else { Ok(None) }
    })
}

fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let digits: Vec<u8> = text.bytes().filter(|byte| *byte != b'-').collect();
    let pairs = digits.chunks_exact(2).map(|pair| {
        let pair = std::str::from_utf8(pair).ok()?;
        u8::from_str_radix(pair, 16).ok()
    });
    let bytes: Vec<u8> = pairs.collect::<Option<_>>()?;
    bytes.try_into().ok().filter(|_| digits.len() == 32)
}

pub(crate) fn write_name(writer: Writer, name: &str) -> Writer {
    let bytes = &name.as_bytes()[..name.len().min(NAME_BYTES_MAX)];
    writer.u16(bytes.len() as u16).bytes(bytes)
}

pub(crate) fn read_name(reader: &mut Reader<'_>, field: &'static str) -> Result<String, Truncated> {
    let length = usize::from(reader.u16(field)?);
    Ok(String::from_utf8_lossy(reader.bytes(field, length)?).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(boot: u8, network: u64, name: &str) -> Host {
        Host { boot: [boot; 16], network, name: name.to_owned() }
    }

    #[test]
    fn another_host_and_another_network_namespace_are_named() {
        let own = host(7, 11, "node-3");
        let text = |other: &Host| {
            own.check_reaches(Rank(0), Rank(2), other).map_err(|fault| fault.to_string())
        };
        assert_eq!(text(&own), Ok(()));
        // A container has a name of its own. A namespace that is not known counts as the same.
        assert_eq!(text(&host(7, 11, "pod-1")), Ok(()));
        assert_eq!(text(&host(7, 0, "pod-1")), Ok(()));
        assert_eq!(
            text(&host(8, 11, "node-4")).unwrap_err(),
            "cannot connect to rank 2: it runs on host node-4, but rank 0 on host node-3; memory can \
             be shared only inside one host, use the backend rdma or ucx between hosts"
        );
        assert_eq!(
            text(&host(7, 12, "pod-1")).unwrap_err(),
            "cannot connect to rank 2: it runs on host pod-1 in the network namespace 12, but rank 0 \
             on host node-3 in the network namespace 11; memory can be shared only inside one network \
             namespace: run all ranks of a host in one (docker: --network=host), or use the backend \
             rdma or ucx between namespaces"
        );
    }

    #[test]
    fn a_host_survives_encoding() {
        let host = Host::own();
        assert!(host.network != 0 && host.boot != [0; 16], "{host:?}");
        let bytes = host.write(Writer::new()).finish();
        assert_eq!(Host::read(&mut Reader::new(&bytes)).as_ref(), Ok(host));
        for length in 0..bytes.len() {
            assert!(Host::read(&mut Reader::new(&bytes[..length])).is_err());
        }
    }

    #[test]
    fn a_boot_id_is_a_uuid() {
        assert_eq!(parse_uuid("00112233-4455-6677-8899-aabbccddeeff").unwrap()[15], 0xff);
        assert_eq!(parse_uuid("00112233"), None);
        assert_eq!(parse_uuid("zz112233-4455-6677-8899-aabbccddeeff"), None);
    }
}
