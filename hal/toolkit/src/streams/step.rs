//! Ops with their places resolved: everything that can be wrong with a slice is found before
//! anything of it goes onto a stream.

use peerlane_hal::{Flag, Op, Rank};

use super::abilities::Abilities;
use super::bounce::BUFFER_BYTES;
use super::route::{Shape, Whom};
use crate::device::{Between, DevicePtr, Fault};
use crate::places::{self, PeerPlace, Place, flag_within, within};

/// An op that is in order; `submit`'s contract keeps what it names alive.
#[derive(Clone, Copy, Debug)]
pub(super) enum Step {
    /// A put, or a get: one copy from address to address, beside the others of the same peer.
    Copy {
        whom: Whom,
        dst: DevicePtr,
        src: DevicePtr,
        bytes: u64,
        between: Between,
        both_on_host: bool,
    },
    Signal {
        whom: Whom,
        flag: DevicePtr,
        value: u64,
    },
    Wait {
        flag: DevicePtr,
        /// Where the host finds it, if it does.
        host: Option<u64>,
        value: u64,
        reset: bool,
    },
}

/// Who can be reached, and how much of it at once.
#[derive(Debug)]
pub(super) struct Reach {
    peers: places::Reach,
    piece_bytes_max: u64,
}

impl Reach {
    pub(super) fn new(rank: Rank, peers: &[Rank], abilities: &Abilities) -> Self {
        let peers = places::Reach::new(rank, peers.iter().copied());
        Self { peers, piece_bytes_max: abilities.piece_bytes_max }
    }

    /// Larger than every rank that can be reached.
    pub(super) fn ranks(&self) -> usize {
        self.peers.ranks()
    }

    fn whom(&self, region: &impl PeerPlace) -> Result<Whom, Fault> {
        let peer = self.peers.peer_of(region)?;
        Ok(if peer == self.peers.rank() { Whom::Oneself } else { Whom::Peer(peer.index()) })
    }
}

/// Resolves a slice into `steps`.
pub(super) fn resolve<L: Place, R: PeerPlace>(
    ops: &[Op<'_, L, R>],
    reach: &Reach,
    steps: &mut Vec<Step>,
) -> Result<Shape, Fault> {
    let mut shape = Shape::default();
    steps.clear();
    for op in ops {
        match *op {
            Op::Put { dst, src, bytes } => {
                let whom = reach.whom(dst.region)?;
                let to = within("put destination", dst.offset, bytes, dst.region.bytes())?;
                let from = within("put source", src.offset, bytes, src.region.bytes())?;
                let places = (dst.region.address() + to, src.region.address() + from);
                let on_host = (dst.region.is_on_host(), src.region.is_on_host());
                copy(whom, places, bytes, on_host, reach, &mut shape, steps);
            }
            Op::Get { dst, src, bytes } => {
                let whom = reach.whom(src.region)?;
                let to = within("get destination", dst.offset, bytes, dst.region.bytes())?;
                let from = within("get source", src.offset, bytes, src.region.bytes())?;
                let places = (dst.region.address() + to, src.region.address() + from);
                let on_host = (dst.region.is_on_host(), src.region.is_on_host());
                copy(whom, places, bytes, on_host, reach, &mut shape, steps);
            }
            Op::Signal { flag, value } => {
                let whom = reach.whom(flag.region)?;
                let Flag { region, word } = flag;
                let at = flag_within("signalled flag", word, region)?;
                steps.push(Step::Signal { whom, flag: region.address() + at, value });
            }
            Op::Wait { flag: Flag { region, word }, value, reset } => {
                let at = flag_within("awaited flag", word, region)?;
                shape.waits += 1;
                let host = region.host_address().map(|base| base + at);
                steps.push(Step::Wait { flag: region.address() + at, host, value, reset });
            }
        }
    }
    Ok(shape)
}

/// Adds a copy; one of no bytes vanishes.
fn copy(
    whom: Whom,
    (dst, src): (DevicePtr, DevicePtr),
    bytes: u64,
    on_host: (bool, bool),
    reach: &Reach,
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
    let both_on_host = on_host == (true, true);
    let pieces = |most: u64| usize::try_from(bytes.div_ceil(most)).unwrap_or(usize::MAX);
    let more = match both_on_host {
        true => pieces(BUFFER_BYTES).saturating_mul(2),
        false => pieces(reach.piece_bytes_max) - 1,
    };
    shape.more_copies = shape.more_copies.saturating_add(more);
    let between = match (on_host, whom) {
        ((false, false), Whom::Oneself) => Between::Own,
        ((false, false), Whom::Peer(_)) => Between::Peers,
        _ => Between::Host,
    };
    steps.push(Step::Copy { whom, dst, src, bytes, between, both_on_host });
}
