//! Ops with their places resolved: everything that can be wrong with a slice is found before
//! anything of it goes onto a stream.

use peerlane_hal::{Flag, Op, Rank, Region, Role};

use super::bounce::BUFFER_BYTES;
use super::route::{Shape, Whom};
use crate::error::Error;
use crate::memory::{Local, Remote};
use crate::sys::CUdeviceptr;

const WORD_BYTES: u64 = size_of::<u64>() as u64;

/// An op that is in order; `submit`'s contract keeps what it names alive.
#[derive(Clone, Copy, Debug)]
pub(super) enum Step {
    /// A put, or a get: one copy from address to address, beside the others of the same peer.
    Copy {
        whom: Whom,
        dst: CUdeviceptr,
        src: CUdeviceptr,
        bytes: u64,
        both_on_host: bool,
    },
    Signal {
        whom: Whom,
        flag: CUdeviceptr,
        value: u64,
    },
    Wait {
        flag: CUdeviceptr,
        value: u64,
        reset: bool,
    },
}

/// Who can be reached.
#[derive(Debug)]
pub(super) struct Reach {
    rank: Rank,
    /// By rank.
    connected: Vec<bool>,
}

impl Reach {
    pub(super) fn new(rank: Rank, peers: &[Rank]) -> Self {
        let ranks = peers.iter().map(|peer| peer.index() + 1).max().unwrap_or(0);
        let mut connected = vec![false; ranks];
        for peer in peers {
            connected[peer.index()] = true;
        }
        Self { rank, connected }
    }

    /// Larger than every rank that can be reached.
    pub(super) fn ranks(&self) -> usize {
        self.connected.len()
    }

    fn whom(&self, region: &Remote) -> Result<Whom, Error> {
        let peer = region.peer();
        if peer == self.rank {
            return Ok(Whom::Oneself);
        }
        match self.connected.get(peer.index()) {
            Some(true) => Ok(Whom::Peer(peer.index())),
            _ => Err(Error::Argument(format!(
                "an op names memory of rank {peer}, which was not connected when this engine of \
                 rank {} was made",
                self.rank
            ))),
        }
    }
}

/// Resolves a slice into `steps`.
pub(super) fn resolve(
    ops: &[Op<'_, Local, Remote>],
    reach: &Reach,
    steps: &mut Vec<Step>,
) -> Result<Shape, Error> {
    let mut shape = Shape::default();
    steps.clear();
    for op in ops {
        match *op {
            Op::Put { dst, src, bytes } => {
                let whom = reach.whom(dst.region)?;
                let to = within("put destination", dst.offset, bytes, dst.region.bytes())?;
                let from = within("put source", src.offset, bytes, src.region.bytes())?;
                let places = (dst.region.address() + to, src.region.address() + from);
                let both_on_host = dst.region.is_pinned() && src.region.is_pinned();
                copy(whom, places, (bytes, both_on_host), &mut shape, steps);
            }
            Op::Get { dst, src, bytes } => {
                let whom = reach.whom(src.region)?;
                let to = within("get destination", dst.offset, bytes, dst.region.bytes())?;
                let from = within("get source", src.offset, bytes, src.region.bytes())?;
                let places = (dst.region.address() + to, src.region.address() + from);
                let both_on_host = dst.region.is_pinned() && src.region.is_pinned();
                copy(whom, places, (bytes, both_on_host), &mut shape, steps);
            }
            Op::Signal { flag, value } => {
                let whom = reach.whom(flag.region)?;
                let Flag { region, word } = flag;
                check_role("signalled flag", region.role())?;
                let at = word_within("signalled flag", word, region.bytes())?;
                steps.push(Step::Signal { whom, flag: region.address() + at, value });
            }
            Op::Wait { flag: Flag { region, word }, value, reset } => {
                check_role("awaited flag", region.role())?;
                let at = word_within("awaited flag", word, region.bytes())?;
                shape.waits += 1;
                steps.push(Step::Wait { flag: region.address() + at, value, reset });
            }
        }
    }
    Ok(shape)
}

/// Adds a copy; one of no bytes vanishes.
fn copy(
    whom: Whom,
    (dst, src): (CUdeviceptr, CUdeviceptr),
    (bytes, both_on_host): (u64, bool),
    shape: &mut Shape,
    steps: &mut Vec<Step>,
) {
    if bytes == 0 {
        return;
    }
    shape.copies += 1;
    match whom {
        Whom::Oneself => shape.own_bytes_max = shape.own_bytes_max.max(bytes),
        Whom::Peer(_) => shape.peer_bytes_max = shape.peer_bytes_max.max(bytes),
    }
    if both_on_host {
        let pieces = usize::try_from(bytes.div_ceil(BUFFER_BYTES));
        let copies = pieces.unwrap_or(usize::MAX).saturating_mul(2);
        shape.more_copies = shape.more_copies.saturating_add(copies);
    }
    steps.push(Step::Copy { whom, dst, src, bytes, both_on_host });
}

/// The offset, if `bytes` from it lie inside a region of `region_bytes`.
fn within(what: &str, offset: u64, bytes: u64, region_bytes: u64) -> Result<u64, Error> {
    match offset.checked_add(bytes) {
        Some(end) if end <= region_bytes => Ok(offset),
        _ => Err(Error::Argument(format!(
            "{what} spans {bytes} bytes from offset {offset}, the region has {region_bytes}"
        ))),
    }
}

fn word_within(what: &str, word: u64, region_bytes: u64) -> Result<u64, Error> {
    // Saturated, the end overflows and is refused.
    within(what, word.saturating_mul(WORD_BYTES), WORD_BYTES, region_bytes)
}

/// Only regions of flags are known to be aligned.
fn check_role(what: &str, role: Role) -> Result<(), Error> {
    match role {
        Role::Flags => Ok(()),
        Role::Data => Err(Error::Argument(format!(
            "the {what} lies in a region registered as Data, wanted Flags"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_and_words_stay_inside() {
        assert_eq!(within("span", 8, 8, 16).expect("inside"), 8);
        assert_eq!(within("span", 16, 0, 16).expect("nothing at the end"), 16);
        let error = within("put source", 9, 8, 16).expect_err("one too many").to_string();
        assert_eq!(error, "put source spans 8 bytes from offset 9, the region has 16");
        within("span", u64::MAX, 1, 16).expect_err("overflow");
        assert_eq!(word_within("flag", 1, 16).expect("the last one"), 8);
        for word in [2, u64::MAX / 8 + 1, u64::MAX] {
            word_within("flag", word, 16).expect_err("outside");
        }
    }
}
