//! How signals are posted: in the last write before them, or alone behind their companions.

use ibverbs_sys::{ibv_send_flags, ibv_send_wr, ibv_sge, ibv_wr_opcode};

use super::super::chain::Chain;
use super::super::opening::Opened;
use super::super::strand::{Posting, Strand};
use super::{Announcement, Pair, Queued, Work, target};
use crate::error::Error;
use crate::fabric::{Immediate, SignalBy};

impl Pair {
    /// Merges the signal that follows a write in the same slice into the write; returns the signal's op.
    pub(super) fn fuse(&mut self, head: Queued, request: &mut ibv_send_wr) -> Option<Queued> {
        let next = self.pending.get(1).copied();
        let next = next.filter(|next| next.ticket == head.ticket && !head.asked)?;
        let Work::Signal(announcement) = next.work else { return None };
        request.imm_data = self.numbers.immediate(&announcement, 0)?;
        request.opcode = ibv_wr_opcode::RDMA_WRITE_WITH_IMM;
        self.pending.remove(1);
        Some(next)
    }

    /// Posts a signal, after the markers on the other rails; returns whether it was posted.
    pub(super) fn announce(
        &mut self,
        head: Queued,
        announcement: Announcement,
        chains: &mut [Chain],
    ) -> Result<bool, Error> {
        let Some(Opened { strands, signal, .. }) = &mut self.opened else { return Ok(false) };
        let (signal, (first, others)) = match strands.split_first_mut() {
            Some(split) => (*signal, split),
            None => return Ok(false),
        };
        // A fence does not order two queue pairs, and a flag that the NIC writes is not held for markers.
        let must_wait = |strand: &Strand| {
            strand.is_reading() || signal == SignalBy::Write && !strand.is_drained()
        };
        let has_room = |strand: &Strand| !strand.is_ahead || strand.has_room();
        if others.iter().any(must_wait) || !first.has_room() || !others.iter().all(has_room) {
            return Ok(false);
        }
        let mut companions = 0;
        let to = target(announcement.address, announcement.key);
        for (at, (strand, chain)) in others.iter_mut().zip(&mut chains[1..]).enumerate() {
            if !std::mem::take(&mut strand.is_ahead) || signal == SignalBy::Write {
                continue;
            }
            companions |= 1 << at;
            let mut request = ibv_send_wr {
                opcode: ibv_wr_opcode::RDMA_WRITE_WITH_IMM,
                imm_data: Immediate::Companion.encode(),
                ..Default::default()
            };
            request.wr = to;
            strand.count(&mut request, Posting { order: head.order, bytes: 0, asked: true });
            chain.push(&strand.qp, request, None)?;
        }
        let (mut request, place) = self.signal(&announcement, signal, companions);
        let Some(Opened { strands, .. }) = &mut self.opened else { return Ok(false) };
        let posting = Posting { order: head.order, bytes: 0, asked: head.asked };
        strands[0].count(&mut request, posting);
        chains[0].push(&strands[0].qp, request, place)?;
        self.pending.pop_front();
        Ok(true)
    }

    /// Builds the request of a signal that no write carries.
    fn signal(
        &mut self,
        announcement: &Announcement,
        signal: SignalBy,
        companions: u32,
    ) -> (ibv_send_wr, Option<ibv_sge>) {
        let &Announcement { value, address, key, .. } = announcement;
        let mut request = ibv_send_wr { wr: target(address, key), ..Default::default() };
        if signal == SignalBy::Write {
            request.opcode = ibv_wr_opcode::RDMA_WRITE;
            let place = self.message(&value.to_ne_bytes(), &mut request);
            return (request, place);
        }
        if let Some(immediate) = self.numbers.immediate(announcement, companions) {
            request.opcode = ibv_wr_opcode::RDMA_WRITE_WITH_IMM;
            request.imm_data = immediate;
            return (request, None);
        }
        let message = self.numbers.message(announcement, companions);
        request.opcode = ibv_wr_opcode::SEND;
        let place = self.message(&message, &mut request);
        (request, place)
    }

    /// Copies a message into a buffer that stays valid until the request completes.
    fn message(&mut self, bytes: &[u8], request: &mut ibv_send_wr) -> Option<ibv_sge> {
        let Opened { strands, messages, .. } = self.opened.as_ref()?;
        let (addr, lkey) = messages.keep(strands[0].slot(), bytes);
        if bytes.len() <= strands[0].qp.inline_bytes as usize {
            request.send_flags |= ibv_send_flags::INLINE;
        }
        Some(ibv_sge { addr, length: bytes.len() as u32, lkey })
    }
}
