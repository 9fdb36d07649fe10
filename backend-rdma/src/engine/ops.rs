//! Computes the addresses and remote keys of puts, gets and signals.

use peerlane_hal::{Op, Rank, Region as _};
use peerlane_toolkit::{Fault, LoopbackOp};

use crate::connection::FlagWord;
use crate::error::Error;
use crate::key::NicKeys;
use crate::memory::{Local, Remote};

const WORD_BYTES: u64 = size_of::<u64>() as u64;

#[derive(Clone, Copy, Debug)]
pub(super) enum ResolvedOp {
    /// A put or get of zero bytes, which needs no work request.
    Empty,
    /// An op on this rank's own memory, which the processor executes.
    Loopback(LoopbackOp),
    /// An op on a peer's memory, which a NIC executes.
    Peer(Rank, PeerOp),
}

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
