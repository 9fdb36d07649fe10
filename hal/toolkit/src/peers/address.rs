//! Encodes the address of a rank, which names its host and device and holds the key of its probe
//! flags.

use crate::Fault;
use crate::handover::{Host, read_name, write_name};
use crate::regions::{Key, Vendor};
use peerlane_hal::Rank;
use peerlane_hal::wire::{Reader, Truncated, Writer};
use peerlane_hal::{BackendId, RemoteKey};

const MAGIC: [u8; 4] = *b"PLRA";
const VERSION: u16 = 4;

/// The identity and the names of a rank's device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceId {
    /// The UUID of the device, which is the same in all processes.
    pub uuid: [u8; 16],
    /// Whether the device is a partition of a GPU, such as a MIG instance.
    pub divided: bool,
    /// The identifier that the vendor's tools print, such as `GPU-` and a UUID. Ordinals differ
    /// between processes.
    pub text: String,
    /// The product name of the device.
    pub name: String,
}

impl DeviceId {
    pub(super) fn label(&self) -> String {
        format!("{} ({})", self.text, self.name)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Address<V: Vendor> {
    pub(super) rank: Rank,
    pub(super) host: Host,
    pub(super) device: DeviceId,
    /// The remote key of a small region with one test flag for each rank.
    pub(super) probe: Key<V>,
}

impl<V: Vendor> Address<V> {
    pub(super) fn encode(&self) -> Vec<u8> {
        let key = self.probe.encode();
        let start = Writer::new().bytes(&MAGIC).u16(VERSION).u16(V::BACKEND.0).u32(self.rank.0);
        let start = self.host.write(start).bytes(&self.device.uuid).u16(self.device.divided.into());
        let names = [&self.device.text, &self.device.name];
        let start = names.into_iter().fold(start, |start, name| write_name(start, name));
        // A key of one segment or one handle has about 150 bytes.
        start.u32(key.len() as u32).bytes(&key).finish()
    }

    pub(super) fn decode(peer: Rank, bytes: &[u8]) -> Result<Self, Fault> {
        let malformed = |what: String| Err(Fault::Address { peer, what });
        let short = |truncated: Truncated| Fault::Address { peer, what: truncated.to_string() };
        let mut reader = Reader::new(bytes);
        let magic: [u8; 4] = reader.array("magic").map_err(short)?;
        if magic != MAGIC {
            return malformed(format!(
                "the address starts with the bytes {magic:02x?}, expected {MAGIC:02x?}"
            ));
        }

        let version = reader.u16("version").map_err(short)?;
        if version != VERSION {
            return malformed(format!(
                "the address has version {version}, expected {VERSION}; run the same Peerlane on \
                 all ranks"
            ));
        }

        let backend = BackendId(reader.u16("backend").map_err(short)?);
        if backend != V::BACKEND {
            return malformed(format!(
                "the address was written by the backend {backend}, expected {}",
                V::BACKEND
            ));
        }

        let rank = Rank(reader.u32("rank").map_err(short)?);
        if rank != peer {
            return malformed(format!("the address belongs to rank {rank}, expected rank {peer}"));
        }

        let host = Host::read(&mut reader).map_err(short)?;
        let uuid = reader.array("device").map_err(short)?;
        let divided = match reader.u16("division").map_err(short)? {
            number @ 0..=1 => number == 1,
            number => {
                return malformed(format!(
                    "field `division` is {number}, expected 0 (whole GPU) or 1 (MIG instance)"
                ));
            }
        };

        let mut name = |field| read_name(&mut reader, field).map_err(short);
        let text = name("id of the device")?;
        let device = DeviceId { uuid, divided, text, name: name("name of the device")? };
        let length = reader.u32("length of the key").map_err(short)? as usize;
        let key = reader.bytes("key", length).map_err(short)?;
        if !reader.rest().is_empty() {
            return malformed(format!(
                "the address has {} bytes after its last field, expected none",
                reader.rest().len()
            ));
        }

        match Key::decode(key) {
            Ok(probe) if probe.rank != rank || probe.device != uuid => {
                malformed("its key is of another rank or device".to_owned())
            }
            Ok(probe) => Ok(Self { rank, host, device, probe }),
            Err(error) => malformed(error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::regions::TestVendor;
    use peerlane_hal::{Error as _, ErrorKind};

    type Address = super::Address<TestVendor>;

    fn address() -> Address {
        let probe = Key::test_key(Rank(2), [8; 16]);
        let (text, name) = ("GPU-08".into(), "NVIDIA H200".into());
        let device = DeviceId { uuid: [8; 16], divided: false, text, name };
        Address { rank: Rank(2), host: Host::own().clone(), device, probe }
    }

    #[test]
    fn an_address_survives_encoding() {
        let address = address();
        let decoded = Address::decode(Rank(2), &address.encode()).expect("as it was written");
        assert_eq!(decoded, address);
    }

    #[test]
    fn every_malformed_address_is_refused() {
        let whole = address().encode();
        for length in 0..whole.len() {
            let error = Address::decode(Rank(2), &whole[..length]).expect_err("truncated");
            assert_eq!(error.kind(), ErrorKind::Mismatch);
        }
        for index in 0..whole.len() {
            for value in [0, 1, 0x7f, 0x80, 0xff] {
                let mut changed = whole.clone();
                changed[index] = value;
                let _ = Address::decode(Rank(2), &changed);
            }
        }
        Address::decode(Rank(2), &[&whole[..], &[0]].concat()).expect_err("too long");
        let error = Address::decode(Rank(1), &whole).expect_err("of another rank");
        assert_eq!(
            error.to_string(),
            "invalid address of rank 1: the address belongs to rank 2, expected rank 1"
        );
    }
}
