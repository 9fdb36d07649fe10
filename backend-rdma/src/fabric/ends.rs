//! Connects the two ends of a queue pair.
//!
//! The end at the peer is passive: it belongs to the peer's fabric, receives messages into the shared receive queue, answers
//! reads and writes, and never sends.

use ibverbs_sys::*;
use peerlane_hal::KeyError;
use peerlane_hal::wire::{Reader, Writer};

use super::Options;
use crate::device::{LinkLayer, Place};
use crate::error::Error;
use crate::sys::Qp;

/// The minimum RNR NAK timer (`min_rnr_timer`): code 8, which is 0.16 ms.
const NOT_READY_TIMER: u8 = 8;
/// The RNR retry count (`rnr_retry`) 7, which means no limit. Deadlines limit the time.
const NOT_READY_RETRIES: u8 = 7;
/// Packet sequence numbers have 24 bits.
const NUMBER_MASK: u32 = 0xff_ffff;

/// The parameters that one end of a queue pair sends to the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct End {
    pub(crate) pair: u32,
    /// The initial packet sequence number.
    pub(crate) first: u32,
    pub(crate) gid: [u8; 16],
    pub(crate) lid: u16,
    /// The path MTU as a value of `ibv_mtu`.
    pub(crate) mtu: u32,
    /// The number of outstanding reads that this end accepts or requests.
    pub(crate) reads: u32,
}

impl End {
    pub(crate) fn of(qp: &Qp, place: &Place) -> Result<Self, Error> {
        let mut random = [0; 4];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
            .map_err(Error::system("ask for random bytes"))?;
        let reads = place.limits.max_qp_rd_atom.min(place.limits.max_qp_init_rd_atom);
        Ok(Self {
            pair: qp.number(),
            first: u32::from_le_bytes(random) & NUMBER_MASK,
            gid: place.gid.bytes,
            lid: place.lid,
            mtu: place.mtu.0,
            // The field of the verbs has 8 bits; devices have 16 or so.
            reads: reads.clamp(1, 128).cast_unsigned(),
        })
    }

    pub(crate) fn write(&self, writer: Writer) -> Writer {
        writer
            .u32(self.pair)
            .u32(self.first)
            .bytes(&self.gid)
            .u16(self.lid)
            .u32(self.mtu)
            .u32(self.reads)
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self, KeyError> {
        let end = Self {
            pair: reader.u32("number of the queue pair")?,
            first: reader.u32("number of the first packet")?,
            gid: reader.array("address of the port")?,
            lid: reader.u16("local identifier")?,
            mtu: reader.u32("MTU")?,
            reads: reader.u32("reads under way")?,
        };
        let field = |field, seen: u32, wanted| {
            Err(KeyError::Field { field, found: seen.into(), expected: wanted })
        };
        match end {
            Self { mtu: 0 | 6.., .. } => field("MTU", end.mtu, "1 to 5"),
            Self { reads: 0 | 129.., .. } => field("reads under way", end.reads, "1 to 128"),
            _ => Ok(end),
        }
    }
}

/// Moves the queue pair to the state ready to receive.
pub(crate) fn receive_from(
    qp: &Qp,
    place: &Place,
    options: &Options,
    own: &End,
    other: &End,
) -> Result<(), Error> {
    let access = ibv_access_flags::REMOTE_WRITE | ibv_access_flags::REMOTE_READ;
    let attributes = ibv_qp_attr {
        qp_state: ibv_qp_state::INIT,
        port_num: place.port,
        qp_access_flags: access,
        ..ibv_qp_attr::default()
    };
    qp.modify(
        &attributes,
        ibv_qp_attr_mask::STATE
            | ibv_qp_attr_mask::PKEY_INDEX
            | ibv_qp_attr_mask::PORT
            | ibv_qp_attr_mask::ACCESS_FLAGS,
    )?;
    let far = other.gid[..8] != own.gid[..8];
    let route = ibv_global_route {
        dgid: ibv_gid { raw: other.gid },
        sgid_index: u8::try_from(place.gid.index).unwrap_or(u8::MAX),
        hop_limit: 64,
        traffic_class: options.traffic_class,
        ..ibv_global_route::default()
    };
    let attributes = ibv_qp_attr {
        qp_state: ibv_qp_state::RTR,
        path_mtu: ibv_mtu(own.mtu.min(other.mtu)),
        dest_qp_num: other.pair,
        rq_psn: other.first,
        max_dest_rd_atomic: own.reads.min(other.reads) as u8,
        min_rnr_timer: NOT_READY_TIMER,
        ah_attr: ibv_ah_attr {
            grh: route,
            dlid: other.lid,
            sl: options.service_level,
            is_global: u8::from(place.link == LinkLayer::Ethernet || far),
            port_num: place.port,
            ..ibv_ah_attr::default()
        },
        ..ibv_qp_attr::default()
    };
    qp.modify(
        &attributes,
        ibv_qp_attr_mask::STATE
            | ibv_qp_attr_mask::AV
            | ibv_qp_attr_mask::PATH_MTU
            | ibv_qp_attr_mask::DEST_QPN
            | ibv_qp_attr_mask::RQ_PSN
            | ibv_qp_attr_mask::MAX_DEST_RD_ATOMIC
            | ibv_qp_attr_mask::MIN_RNR_TIMER,
    )
}

/// Moves the queue pair to the state ready to send.
pub(crate) fn send_to(qp: &Qp, options: &Options, own: &End, other: &End) -> Result<(), Error> {
    let attributes = ibv_qp_attr {
        qp_state: ibv_qp_state::RTS,
        timeout: options.timeout_exponent,
        retry_cnt: options.retries,
        rnr_retry: NOT_READY_RETRIES,
        sq_psn: own.first,
        max_rd_atomic: own.reads.min(other.reads) as u8,
        ..ibv_qp_attr::default()
    };
    qp.modify(
        &attributes,
        ibv_qp_attr_mask::STATE
            | ibv_qp_attr_mask::TIMEOUT
            | ibv_qp_attr_mask::RETRY_CNT
            | ibv_qp_attr_mask::RNR_RETRY
            | ibv_qp_attr_mask::SQ_PSN
            | ibv_qp_attr_mask::MAX_QP_RD_ATOMIC,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_survives_the_wire_and_impossible_ones_are_refused() {
        let end = End { pair: 17, first: 0xabcdef, gid: [3; 16], lid: 5, mtu: 3, reads: 16 };
        let read = |end: &End| {
            let bytes = end.write(Writer::new()).finish();
            End::read(&mut Reader::new(&bytes))
        };
        assert_eq!(read(&end), Ok(end));
        for wrong in [End { mtu: 0, ..end }, End { mtu: 6, ..end }, End { reads: 0, ..end }] {
            read(&wrong).unwrap_err();
        }
    }
}
