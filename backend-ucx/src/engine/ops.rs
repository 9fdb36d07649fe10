//! Finds out where an op runs, with its addresses and the numbers of its regions.

use std::sync::Arc;

use peerlane_hal::{At, Op};
use peerlane_toolkit::{Fault, LoopbackOp};

use crate::error::Error;
use crate::memory::{Local, Remote};
use crate::network::{Address, FlagStore, RegionByte};

/// Where an op runs.
#[derive(Debug)]
pub(super) enum ResolvedOp {
    /// A copy of no bytes.
    Empty,
    /// An op on memory of this rank, which the processor runs.
    Loopback(LoopbackOp),
    /// An op with a peer, which needs messages.
    Peer(Arc<Address>, PeerOp),
}

/// An op with a peer.
#[derive(Clone, Copy, Debug)]
pub(super) enum PeerOp {
    Put { to: RegionByte, from: *const u8, bytes: u64 },
    Get { from: RegionByte, to: *mut u8, bytes: u64 },
    Signal(FlagStore),
}

// SAFETY: the pointers name memory that the contract of `submit` keeps accessible until the op is
// complete, from any thread that drives the engine.
unsafe impl Send for PeerOp {}

pub(super) fn resolve(op: &Op<'_, Local, Remote>) -> Result<ResolvedOp, Error> {
    Ok(match *op {
        Op::Put { bytes: 0, .. } | Op::Get { bytes: 0, .. } => ResolvedOp::Empty,
        Op::Put { dst, src, bytes } => {
            let from = address(src).cast_const();
            match alias(dst) {
                Some(dst) => copy(dst, from, bytes),
                None => peer(dst.region, PeerOp::Put { to: region_byte(dst), from, bytes }),
            }
        }
        Op::Get { dst, src, bytes } => match alias(src) {
            Some(src) => copy(address(dst), src, bytes),
            None => {
                peer(src.region, PeerOp::Get { from: region_byte(src), to: address(dst), bytes })
            }
        },
        Op::Signal { flag, value } => match &flag.region.alias {
            Some(alias) => {
                // The check of the slice has found the flag in its region.
                let flag = alias.flag(flag.word).ok_or_else(|| Fault::refused_op(op))?;
                ResolvedOp::Loopback(LoopbackOp::Store { flag, value })
            }
            None => {
                let (region, word) = (flag.region.key.generation.0, flag.word);
                peer(flag.region, PeerOp::Signal(FlagStore { region, word, value }))
            }
        },
        Op::PutRows { .. } | Op::GetRows { .. } | Op::Wait { .. } | Op::Reduce { .. } => {
            return Err(Fault::refused_op(op).into());
        }
        #[cfg(not(peerlane_workspace))]
        _ => return Err(Fault::refused_op(op).into()),
    })
}

fn peer(region: &Remote, op: PeerOp) -> ResolvedOp {
    ResolvedOp::Peer(Arc::clone(&region.owner), op)
}

fn copy(dst: *mut u8, src: *const u8, bytes: u64) -> ResolvedOp {
    ResolvedOp::Loopback(LoopbackOp::Copy { dst, src, bytes: bytes as usize })
}

fn region_byte(at: At<'_, Remote>) -> RegionByte {
    RegionByte { region: at.region.key.generation.0, offset: at.offset }
}

/// Returns the address in this rank's own memory, or `None` for memory of a peer.
fn alias(at: At<'_, Remote>) -> Option<*mut u8> {
    at.region.alias.as_ref().map(|alias| alias.address_at(at.offset))
}

fn address(at: At<'_, Local>) -> *mut u8 {
    at.region.registration().address_at(at.offset)
}
