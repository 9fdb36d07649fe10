//! Opens a NIC for a rank, and connects its RDMA queue pairs.
//!
//! The end of a queue pair at the peer is passive: it belongs to the peer's fabric, receives messages into
//! the shared receive queue, answers reads and writes, and never sends.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ibverbs_sys::*;
use peerlane_hal::KeyError;
use peerlane_hal::wire::{Reader, Writer};
use peerlane_toolkit::mapping::Mapping;
use rustix::io::retry_on_intr;
use rustix::rand::{GetRandomFlags, getrandom};

use crate::device::{LinkLayer, OpenPort};
use crate::error::Error;
use crate::options::Options;
use crate::sys::{Cq, Domain, Mr, Qp, Srq};

pub(crate) const MESSAGE_BYTES: usize = 32;

#[derive(Debug)]
pub(crate) struct Nic {
    pub(crate) port: OpenPort,
    pub(crate) domain: Arc<Domain>,
    pub(crate) cq: Arc<Cq>,
    pub(crate) srq: Arc<Srq>,
    buffers: ReceiveBuffers,
    down: AtomicBool,
    /// The number of free receive buffers below which the device sends an event.
    low: u32,
}

#[derive(Debug)]
struct ReceiveBuffers {
    mr: Mr,
    memory: Mapping,
}

impl Nic {
    /// Opens a NIC with `receives` receive buffers, or with as many as the device supports.
    pub(crate) fn open(port: OpenPort, receives: u32) -> Result<Self, Error> {
        if port.limits.max_srq == 0 {
            let name = &port.context.name;
            let text = format!("{name} has no shared receive queues, which this backend needs");
            return Err(Error::unavailable(text));
        }
        let domain = Arc::new(Domain::open(Arc::clone(&port.context))?);
        let receives = receives.min(port.limits.max_srq_wr.max(1).cast_unsigned());
        // The queue has room for every receive buffer and for as many queue pairs.
        let receives = receives.min(port.limits.max_cqe.max(2).cast_unsigned() / 2);
        let cq = Arc::new(Cq::create(&port.context, 2 * receives)?);
        let srq = Arc::new(Srq::create(&domain, receives)?);
        let bytes = receives as usize * MESSAGE_BYTES;
        let memory = Mapping::create(bytes as u64).map_err(Error::mapping)?;
        // SAFETY: the mapping outlives the registration, whose field is declared first.
        let mr = unsafe { domain.register(memory.base(), bytes) }?;
        let low = receives / 2;
        let (buffers, down) = (ReceiveBuffers { mr, memory }, AtomicBool::new(false));
        let nic = Self { port, domain, cq, srq, buffers, down, low };
        for slot in 0..u64::from(receives) {
            nic.post_receive(slot)?;
        }
        nic.request_low_event();
        Ok(nic)
    }

    pub(crate) fn post_receive(&self, slot: u64) -> Result<(), Error> {
        let addr = self.buffers.memory.base().as_ptr() as u64 + slot * MESSAGE_BYTES as u64;
        let mut sge =
            ibv_sge { addr, length: MESSAGE_BYTES as u32, lkey: self.buffers.mr.local_key() };
        let mut request =
            ibv_recv_wr { wr_id: slot, sg_list: &mut sge, num_sge: 1, ..ibv_recv_wr::default() };
        // SAFETY: the buffers stay registered as long as the queue exists.
        unsafe { self.srq.post(&mut request) }
    }

    /// Reads the message in a receive buffer, whose completion must have been polled before.
    pub(crate) fn message(&self, slot: u64) -> [u8; MESSAGE_BYTES] {
        let at = slot as usize * MESSAGE_BYTES;
        let from = self.buffers.memory.base().as_ptr().wrapping_add(at);
        let mut bytes = [0; MESSAGE_BYTES];
        // SAFETY: `post_receive` posted the slot, so it lies inside the mapping. Its completion was taken, so the
        // NIC does not write to it until it is posted again.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), MESSAGE_BYTES) };
        bytes
    }

    pub(crate) fn set_down(&self, down: bool) {
        self.down.store(down, Ordering::Relaxed);
    }

    pub(crate) fn port_warning(&self) -> String {
        let (name, port) = (&self.port.context.name, self.port.number);
        if self.down.load(Ordering::Relaxed) {
            format!("; port {port} of {name} is down")
        } else {
            String::new()
        }
    }

    /// Requests one event for the moment when few receive buffers are left.
    ///
    /// Without the event, peers of a rank that does not poll wait longer. So a device that cannot send it is
    /// no error.
    pub(crate) fn request_low_event(&self) {
        let _ = self.srq.set_limit(self.low);
    }
}

/// The code of the minimum RNR NAK timer (`min_rnr_timer`); 8 means 0.16 ms.
const MIN_RNR_TIMER: u8 = 8;
/// The RNR retry count (`rnr_retry`); 7 means no limit. Deadlines limit the time.
const RNR_RETRIES: u8 = 7;
/// Packet sequence numbers have 24 bits.
const PSN_MASK: u32 = 0xff_ffff;

/// The parameters that each end of a queue pair sends to the other end to connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QpAddress {
    pub(crate) qp_num: u32,
    pub(crate) psn: u32,
    pub(crate) gid: [u8; 16],
    pub(crate) lid: u16,
    /// The path MTU as a value of `ibv_mtu`.
    pub(crate) mtu: u32,
    pub(crate) reads: u32,
}

impl QpAddress {
    pub(crate) fn new(qp: &Qp, port: &OpenPort) -> Result<Self, Error> {
        let mut random = [0; 4];
        retry_on_intr(|| getrandom(&mut random, GetRandomFlags::empty()))
            .map_err(Error::system("ask for random bytes"))?;
        let reads = port.limits.max_qp_rd_atom.min(port.limits.max_qp_init_rd_atom);
        Ok(Self {
            qp_num: qp.number(),
            psn: u32::from_le_bytes(random) & PSN_MASK,
            gid: port.gid.bytes,
            lid: port.lid,
            mtu: port.mtu.0,
            // The field of `ibv_qp_attr` has 8 bits; devices support 16 or so.
            reads: reads.clamp(1, 128).cast_unsigned(),
        })
    }

    pub(crate) fn write(&self, writer: Writer) -> Writer {
        writer
            .u32(self.qp_num)
            .u32(self.psn)
            .bytes(&self.gid)
            .u16(self.lid)
            .u32(self.mtu)
            .u32(self.reads)
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self, KeyError> {
        let address = Self {
            qp_num: reader.u32("number of the queue pair")?,
            psn: reader.u32("first packet sequence number")?,
            gid: reader.array("address of the port")?,
            lid: reader.u16("local identifier")?,
            mtu: reader.u32("MTU")?,
            reads: reader.u32("outstanding reads")?,
        };
        let field = |field, found: u32, expected| {
            Err(KeyError::Field { field, found: found.into(), expected })
        };
        match address {
            Self { mtu: 0 | 6.., .. } => field("MTU", address.mtu, "1 to 5"),
            Self { reads: 0 | 129.., .. } => field("outstanding reads", address.reads, "1 to 128"),
            _ => Ok(address),
        }
    }
}

pub(crate) fn move_to_rtr(
    qp: &Qp,
    port: &OpenPort,
    options: &Options,
    local: &QpAddress,
    remote: &QpAddress,
) -> Result<(), Error> {
    let access = ibv_access_flags::REMOTE_WRITE | ibv_access_flags::REMOTE_READ;
    let attributes = ibv_qp_attr {
        qp_state: ibv_qp_state::INIT,
        port_num: port.number,
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
    let far = remote.gid[..8] != local.gid[..8];
    let route = ibv_global_route {
        dgid: ibv_gid { raw: remote.gid },
        sgid_index: u8::try_from(port.gid.index).unwrap_or(u8::MAX),
        hop_limit: 64,
        traffic_class: options.traffic_class,
        ..ibv_global_route::default()
    };
    let attributes = ibv_qp_attr {
        qp_state: ibv_qp_state::RTR,
        path_mtu: ibv_mtu(local.mtu.min(remote.mtu)),
        dest_qp_num: remote.qp_num,
        rq_psn: remote.psn,
        max_dest_rd_atomic: local.reads.min(remote.reads) as u8,
        min_rnr_timer: MIN_RNR_TIMER,
        ah_attr: ibv_ah_attr {
            grh: route,
            dlid: remote.lid,
            sl: options.service_level,
            is_global: u8::from(port.link == LinkLayer::Ethernet || far),
            port_num: port.number,
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

pub(crate) fn move_to_rts(
    qp: &Qp,
    options: &Options,
    local: &QpAddress,
    remote: &QpAddress,
) -> Result<(), Error> {
    let attributes = ibv_qp_attr {
        qp_state: ibv_qp_state::RTS,
        timeout: options.timeout_exponent,
        retry_cnt: options.retries,
        rnr_retry: RNR_RETRIES,
        sq_psn: local.psn,
        max_rd_atomic: local.reads.min(remote.reads) as u8,
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
    fn a_queue_pair_address_survives_the_wire_and_impossible_ones_are_refused() {
        let address =
            QpAddress { qp_num: 17, psn: 0xabcdef, gid: [3; 16], lid: 5, mtu: 3, reads: 16 };
        let read = |address: &QpAddress| {
            let bytes = address.write(Writer::new()).finish();
            QpAddress::read(&mut Reader::new(&bytes))
        };
        assert_eq!(read(&address), Ok(address));
        for wrong in [
            QpAddress { mtu: 0, ..address },
            QpAddress { mtu: 6, ..address },
            QpAddress { reads: 0, ..address },
        ] {
            read(&wrong).unwrap_err();
        }
    }
}
