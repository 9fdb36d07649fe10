//! Computes the addresses and remote keys of puts, gets and signals, and executes those on this
//! rank's own memory.
//!
//! The processor does copies to this rank. A flag of this rank is stored when all earlier ops of
//! the engine are complete.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};

use peerlane_hal::{Op, Rank, Region as _, Ticket};
use peerlane_toolkit::Fault;

use crate::connection::FlagWord;
use crate::error::Error;
use crate::key::NicKeys;
use crate::memory::{Local, Remote};

const WORD_BYTES: u64 = size_of::<u64>() as u64;

/// The maximum number of bytes that one call copies, so that the call does not block for long.
const CALL_BYTES_MAX: usize = 4 << 20;

#[derive(Clone, Copy, Debug)]
pub(super) enum ResolvedOp {
    /// A put or get of zero bytes, which needs no work request.
    Empty,
    /// An op on this rank's own memory, which the processor executes.
    Loopback(LoopbackOp),
    /// An op on a peer's memory, which a NIC executes.
    Peer(Rank, PeerOp),
}

/// An op on memory of this process, which the contract of `submit` keeps allocated.
#[derive(Clone, Copy, Debug)]
pub(super) enum LoopbackOp {
    Copy { dst: *mut u8, src: *const u8, bytes: usize },
    Store { flag: *const AtomicU64, value: u64 },
}

// SAFETY: the pointers name memory that `submit`'s contract makes accessible until the op is
// complete, from any thread that drives the engine.
unsafe impl Send for LoopbackOp {}

#[derive(Clone, Copy, Debug)]
pub(super) enum PeerOp {
    Write(CopySpan),
    Read(CopySpan),
    Signal(FlagSignal),
}

#[derive(Clone, Copy, Debug)]
pub(super) struct CopySpan {
    pub(super) local: u64,
    pub(super) local_keys: NicKeys,
    pub(super) remote: u64,
    pub(super) remote_keys: NicKeys,
    pub(super) bytes: u64,
    /// Whether the local range is device memory, which the processor cannot read.
    pub(super) is_device_memory: bool,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct FlagSignal {
    pub(super) flag: FlagWord,
    pub(super) value: u64,
    pub(super) address: u64,
    pub(super) key: u32,
}

/// Returns where an op is executed, with its addresses and remote keys.
pub(super) fn resolve(op: &Op<'_, Local, Remote>) -> Result<ResolvedOp, Error> {
    match *op {
        Op::Put { dst, src, bytes } => {
            copy((src.region, src.offset), (dst.region, dst.offset), bytes, Direction::Put)
        }
        Op::Get { dst, src, bytes } => {
            copy((dst.region, dst.offset), (src.region, src.offset), bytes, Direction::Get)
        }
        Op::Signal { flag, value } => {
            let (key, offset) = (&flag.region.key, flag.word * WORD_BYTES);
            Ok(match &flag.region.alias {
                // The flag is in this rank's own memory, which needs no NIC.
                Some(alias) => {
                    let flag = alias.base.as_ptr().wrapping_add(offset as usize).cast();
                    ResolvedOp::Loopback(LoopbackOp::Store { flag, value })
                }
                None => {
                    let word = FlagWord { generation: key.generation.0, word: flag.word };
                    let (address, remote_key) = (key.address + offset, key.remote_keys[0]);
                    let signal = FlagSignal { flag: word, value, address, key: remote_key };
                    ResolvedOp::Peer(key.rank, PeerOp::Signal(signal))
                }
            })
        }
        Op::PutRows { .. } | Op::GetRows { .. } | Op::Wait { .. } | Op::Reduce { .. } => {
            Err(Fault::refused_op(op).into())
        }
        #[cfg(not(peerlane_workspace))]
        _ => Err(Fault::refused_op(op).into()),
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Put,
    Get,
}

fn copy(
    (local_region, local_offset): (&Local, u64),
    (remote_region, remote_offset): (&Remote, u64),
    bytes: u64,
    direction: Direction,
) -> Result<ResolvedOp, Error> {
    if bytes == 0 {
        return Ok(ResolvedOp::Empty);
    }

    // The ranges lie inside regions, which fit the address space.
    let local = local_region.base().as_ptr().wrapping_add(local_offset as usize);
    let is_device_memory = local_region.registration().is_device_memory();

    if let Some(alias) = &remote_region.alias {
        if is_device_memory || alias.is_device_memory() {
            let text = "a self copy is of device memory; use the fabric of the device for it";
            return Err(Error::argument(text.to_owned()));
        }

        let aliased = alias.base.as_ptr().wrapping_add(remote_offset as usize);
        let (dst, src) =
            if direction == Direction::Put { (aliased, local) } else { (local, aliased) };
        return Ok(ResolvedOp::Loopback(LoopbackOp::Copy { dst, src, bytes: bytes as usize }));
    }

    let span = CopySpan {
        local: local as u64,
        local_keys: local_region.registration().local_keys(),
        remote: remote_region.key.address + remote_offset,
        remote_keys: remote_region.key.remote_keys,
        bytes,
        is_device_memory,
    };
    let op = if direction == Direction::Put { PeerOp::Write(span) } else { PeerOp::Read(span) };
    Ok(ResolvedOp::Peer(remote_region.key.rank, op))
}

#[derive(Debug, Default)]
pub(super) struct Loopback(VecDeque<Queued>);

#[derive(Clone, Copy, Debug)]
struct Queued {
    ticket: Ticket,
    order: u64,
    op: LoopbackOp,
}

#[derive(Debug, Default)]
pub(super) struct LoopbackProgress {
    pub(super) tickets: Vec<Ticket>,
    /// Whether a flag was stored, so that sleeping threads must be woken.
    pub(super) stored: bool,
}

impl Loopback {
    pub(super) fn push(&mut self, ticket: Ticket, order: u64, op: LoopbackOp) {
        self.0.push_back(Queued { ticket, order, op });
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    pub(super) fn is_copying(&self) -> bool {
        matches!(self.0.front(), Some(Queued { op: LoopbackOp::Copy { .. }, .. }))
    }

    /// Executes queued ops in their order.
    ///
    /// A flag is stored only after all earlier ops of the engine are complete.
    pub(super) fn run(
        &mut self,
        progress: &mut LoopbackProgress,
        is_complete: impl Fn(u64) -> bool,
    ) {
        let mut budget = CALL_BYTES_MAX;

        while let Some(head) = self.0.front_mut() {
            match &mut head.op {
                LoopbackOp::Copy { dst, src, bytes } => {
                    let now = (*bytes).min(budget);
                    // SAFETY: the op was checked against its regions, which `submit`'s contract
                    // keeps alive and free of races. Source and destination may be one region, and
                    // `copy` allows overlap.
                    unsafe { std::ptr::copy(*src, *dst, now) };
                    (*dst, *src) = (dst.wrapping_add(now), src.wrapping_add(now));
                    *bytes -= now;
                    budget -= now;

                    if *bytes > 0 {
                        return;
                    }
                }
                LoopbackOp::Store { flag, value } => {
                    if !is_complete(head.order) {
                        return;
                    }
                    // SAFETY: as above; words of a region of flags are aligned.
                    unsafe { &**flag }.store(*value, Ordering::Release);
                    progress.stored = true;
                }
            }

            progress.tickets.push(head.ticket);
            self.0.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_waits_for_earlier_ops_and_holds_later_ones() {
        let (flag, source) = (AtomicU64::new(0), [7_u8; 4]);
        let mut target = [0_u8; 4];
        let mut loopback = Loopback::default();
        loopback.push(Ticket(1), 1, LoopbackOp::Store { flag: &flag, value: 5 });
        let (dst, src) = (target.as_mut_ptr(), source.as_ptr());
        loopback.push(Ticket(2), 2, LoopbackOp::Copy { dst, src, bytes: source.len() });
        let mut progress = LoopbackProgress::default();
        loopback.run(&mut progress, |_| false);
        assert_eq!((progress.tickets.len(), flag.load(Ordering::Relaxed)), (0, 0));
        loopback.run(&mut progress, |order| order <= 1);
        assert_eq!(progress.tickets, [Ticket(1), Ticket(2)]);
        assert!(progress.stored && flag.load(Ordering::Relaxed) == 5);
        assert_eq!(target, source);
    }
}
