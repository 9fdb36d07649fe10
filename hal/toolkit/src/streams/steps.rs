//! Turns the ops of a slice into copies and flag operations, and chooses the stream of each copy.
//!
//! Every error of a slice is found before any part of it goes onto a stream.
//!
//! # Streams
//! Stream 0 is the main stream; the others are side streams. The backend sets their number
//! ([`StreamLimits`]); the figures here are those of CUDA. The number of copies in flight must not exceed
//! the number of copy engines: with three engines, six copies at once ran at 60 % of the rate. Puts to
//! peers on two streams were the fastest choice for all sizes from 4 KiB up; a third stream was slower from
//! 64 MiB up (docs/perf/cuda-streams.md). Small puts that go onto their stream in one call take one stream,
//! since the fork and join of another stream take longer than the copies (docs/perf/cuda-submission.md).
//!
//! A copy inside the device is a kernel of the driver with every call and driver that was tried
//! (docs/perf/cuda-local-copies.md). It waits for free multiprocessors, so it has a stream of its own on
//! which nothing else waits for them. It goes in one piece, because each piece would wait again.
//!
//! All puts of one slice to one peer take the same stream, which keeps their order. Slices are joined, so
//! the next slice can choose again.
//!
//! # Self copies
//! Next to a compute kernel that fills all multiprocessors, a copy inside the device waits. If the same
//! bytes are put to a peer anyway, a copy engine can copy them back from there: one more transfer over the
//! link, and no kernel. The caller chooses by [`SelfCopy`].

use crate::Fault;
use crate::device::{CopyKind, DevicePtr, StreamLimits};
use crate::{EngineRegion, PeerRegion, PeerSet, check_elements};
use peerlane_hal::{At, Op, Rank, Reduction, Rows};

use super::resources::BOUNCE_BYTES;

/// A checked op with device addresses, whose memory stays valid under the safety contract of `submit`.
#[derive(Clone, Copy, Debug)]
pub(super) enum Step {
    /// A put or a get, or several with a constant stride, as one copy that may run concurrently with copies to other peers.
    Copy {
        target: Target,
        dst: DevicePtr,
        src: DevicePtr,
        /// The length of one row in bytes.
        bytes: u64,
        rows: Rows,
        regions: Regions,
        copy_kind: CopyKind,
        both_on_host: bool,
    },
    Signal {
        target: Target,
        flag: DevicePtr,
        value: u64,
    },
    Wait {
        flag: DevicePtr,
        /// The flag's address in this process, or `None` if the host cannot access the flag.
        host: Option<u64>,
        value: u64,
        reset: bool,
    },
    Reduce {
        dst: DevicePtr,
        /// The position of the first source among the sources of the slice, and the number of sources.
        srcs: (usize, usize),
        bytes: u64,
        reduction: Reduction,
    },
}

/// The addresses of the handles of the destination and the source region, by which copies between the same regions are told.
type Regions = (usize, usize);

#[derive(Debug)]
pub(super) struct OpResolver {
    peers: PeerSet,
    on_device: Vec<Rank>,
    piece_bytes_max: u64,
    row_pitch_max: u64,
}

impl OpResolver {
    pub(super) fn new(
        rank: Rank,
        peers: &[Rank],
        on_device: Vec<Rank>,
        limits: &StreamLimits,
        row_pitch_max: u64,
    ) -> Self {
        let peers = PeerSet::new(rank, peers.iter().copied());
        Self { peers, on_device, piece_bytes_max: limits.piece_bytes_max, row_pitch_max }
    }

    pub(super) fn ranks(&self) -> usize {
        self.peers.ranks()
    }

    fn is_on_device(&self, peer: usize) -> bool {
        self.on_device.contains(&Rank::at(peer))
    }

    /// Returns whether a region was imported from this rank itself.
    pub(super) fn is_own(&self, region: &impl PeerRegion) -> Result<bool, Fault> {
        Ok(self.target(region)? == Target::Own)
    }

    fn target(&self, region: &impl PeerRegion) -> Result<Target, Fault> {
        let peer = self.peers.peer_of(region)?;
        Ok(if peer == self.peers.rank() { Target::Own } else { Target::Peer(peer.index()) })
    }
}

/// Resolves the ops of a slice to `steps`, and the sources of its reductions to `sources`.
pub(super) fn resolve<L: EngineRegion, R: PeerRegion>(
    ops: &[Op<'_, L, R>],
    resolver: &OpResolver,
    steps: &mut Vec<Step>,
    sources: &mut Vec<DevicePtr>,
) -> Result<SliceTotals, Fault> {
    let mut totals = SliceTotals::default();
    steps.clear();
    sources.clear();

    for op in ops {
        match *op {
            Op::Put { dst, src, bytes } => {
                let target = resolver.target(dst.region)?;
                let ends = Ends::of(dst, src);
                copy(target, ends, (bytes, Rows::ONE), resolver, &mut totals, steps);
            }
            Op::Get { dst, src, bytes } => {
                let target = resolver.target(src.region)?;
                let ends = Ends::of(dst, src);
                copy(target, ends, (bytes, Rows::ONE), resolver, &mut totals, steps);
            }
            Op::PutRows { dst, src, bytes, rows } => {
                let target = resolver.target(dst.region)?;
                copy_rows(target, Ends::of(dst, src), (bytes, rows), resolver, &mut totals, steps);
            }
            Op::GetRows { dst, src, bytes, rows } => {
                let target = resolver.target(src.region)?;
                copy_rows(target, Ends::of(dst, src), (bytes, rows), resolver, &mut totals, steps);
            }
            Op::Signal { flag, value } => {
                let target = resolver.target(flag.region)?;
                steps.push(Step::Signal {
                    target,
                    flag: flag.region.flag_address(flag.word),
                    value,
                });
            }
            Op::Wait { flag, value, reset } => {
                totals.waits += 1;
                steps.push(Step::Wait {
                    flag: flag.region.flag_address(flag.word),
                    host: flag.region.host_flag_address(flag.word),
                    value,
                    reset,
                });
            }
            Op::Reduce { bytes: 0, .. } => {}
            Op::Reduce { dst, srcs, bytes, reduction } => {
                totals.reduces = true;

                let first = sources.len();
                sources.extend(srcs.iter().map(|src| src.region.address_at(src.offset)));
                let dst = dst.region.address_at(dst.offset);
                let places = sources[first..].iter().copied().chain([dst, bytes]);
                check_elements(places, reduction)?;

                steps.push(Step::Reduce { dst, srcs: (first, srcs.len()), bytes, reduction });
            }
            #[cfg(not(peerlane_workspace))]
            _ => return Err(Fault::refused_op(op)),
        }
    }

    Ok(totals)
}

/// The two ends of a copy.
#[derive(Clone, Copy)]
struct Ends {
    dst: DevicePtr,
    src: DevicePtr,
    on_host: (bool, bool),
    regions: Regions,
}

impl Ends {
    fn of<D: EngineRegion, S: EngineRegion>(dst: At<'_, D>, src: At<'_, S>) -> Self {
        let regions =
            (std::ptr::from_ref(dst.region).addr(), std::ptr::from_ref(src.region).addr());
        Self {
            dst: dst.region.address_at(dst.offset),
            src: src.region.address_at(src.offset),
            on_host: (dst.region.is_on_host(), src.region.is_on_host()),
            regions,
        }
    }
}

/// Resolves a strided copy to one step if the driver has a call for it, and otherwise to one for each row.
fn copy_rows(
    target: Target,
    ends: Ends,
    (bytes, rows): (u64, Rows),
    resolver: &OpResolver,
    totals: &mut SliceTotals,
    steps: &mut Vec<Step>,
) {
    if bytes == 0 || rows.count == 0 {
        return;
    }
    let pitches = [rows.dst_pitch, rows.src_pitch];
    let on_devices = ends.on_host == (false, false);
    if on_devices && pitches.iter().all(|pitch| *pitch <= resolver.row_pitch_max) {
        // Few rows are a command each.
        totals.more_copies =
            totals.more_copies.saturating_add(rows.count.min(super::ROWS_MIN) as usize);
        copy(target, ends, (bytes, rows), resolver, totals, steps);
        return;
    }
    let more = usize::try_from(rows.count - 1).unwrap_or(usize::MAX);
    totals.more_copies = totals.more_copies.saturating_add(more);
    for (dst, src) in rows.offsets() {
        let (dst, src) = (ends.dst + dst, ends.src + src);
        copy(target, Ends { dst, src, ..ends }, (bytes, Rows::ONE), resolver, totals, steps);
    }
}

fn copy(
    target: Target,
    Ends { dst, src, on_host, regions }: Ends,
    (bytes, rows): (u64, Rows),
    resolver: &OpResolver,
    totals: &mut SliceTotals,
    steps: &mut Vec<Step>,
) {
    if bytes == 0 {
        return;
    }
    totals.copies += 1;
    match target {
        Target::Own => totals.own_bytes_max = totals.own_bytes_max.max(bytes * rows.count),
        Target::Peer(_) => totals.peer_bytes_max = totals.peer_bytes_max.max(bytes * rows.count),
    }
    let both_on_host = on_host == (true, true);
    let pieces = |most: u64| usize::try_from(bytes.div_ceil(most)).unwrap_or(usize::MAX);
    let more = match both_on_host {
        true => pieces(BOUNCE_BYTES).saturating_mul(2),
        false => pieces(resolver.piece_bytes_max) - 1,
    };
    totals.more_copies = totals.more_copies.saturating_add(more);
    let copy_kind = match (on_host, target) {
        ((false, false), Target::Own) => CopyKind::Local,
        ((false, false), Target::Peer(peer)) if resolver.is_on_device(peer) => CopyKind::Local,
        ((false, false), Target::Peer(_)) => CopyKind::Peer,
        _ => CopyKind::Host,
    };
    let next = Step::Copy { target, dst, src, bytes, rows, regions, copy_kind, both_on_host };
    if rows.count > 1
        || !steps.last_mut().is_some_and(|last| last.extend(&next, resolver.row_pitch_max))
    {
        steps.push(next);
    }
}

impl Step {
    /// Adds a copy to or from a peer as a further row if it continues the stride of the rows before, and returns whether it
    /// does.
    ///
    /// The rows of a copy have no order, so none may touch bytes that another one writes.
    fn extend(&mut self, next: &Self, pitch_max: u64) -> bool {
        let Self::Copy { target, dst, src, bytes, rows, regions, copy_kind, .. } = self else {
            return false;
        };
        let Self::Copy {
            target: next_target,
            dst: next_dst,
            src: next_src,
            bytes: next_bytes,
            regions: next_regions,
            ..
        } = *next
        else {
            return false;
        };
        let on_devices = matches!(copy_kind, CopyKind::Local | CopyKind::Peer);
        let alike = (*target, *bytes, *regions) == (next_target, next_bytes, next_regions);
        if !on_devices || !alike || *target == Target::Own {
            return false;
        }
        let before = rows.count - 1;
        let dst_pitch = next_dst.wrapping_sub(*dst + before * rows.dst_pitch);
        let src_pitch = next_src.wrapping_sub(*src + before * rows.src_pitch);
        let pitches = *bytes..=pitch_max;
        let continues =
            rows.count == 1 || (dst_pitch, src_pitch) == (rows.dst_pitch, rows.src_pitch);
        if !continues || !pitches.contains(&dst_pitch) || !pitches.contains(&src_pitch) {
            return false;
        }
        // Spans of mapped regions do not overflow.
        if *dst < next_src + *bytes && *src < next_dst + *bytes {
            return false;
        }
        *rows = Rows { count: rows.count + 1, dst_pitch, src_pitch };
        true
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Target {
    Own,
    Peer(usize),
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SliceTotals {
    pub(super) copies: usize,
    pub(super) waits: usize,
    /// The size in bytes of the largest copy of this rank's block to itself.
    pub(super) own_bytes_max: u64,
    pub(super) peer_bytes_max: u64,
    pub(super) more_copies: usize,
    pub(super) reduces: bool,
}

/// Assigns a stream to each copy; index 0 is the main stream, the others are side streams.
#[derive(Debug)]
pub(super) struct StreamPlan {
    streams: usize,
    peer_streams_max: usize,
    one_stream_bytes_max: u64,
    slice: u64,
    streams_used: usize,
    peer_streams: usize,
    peers_seen: usize,
    stream_of: Vec<(u64, usize)>,
}

impl StreamPlan {
    pub(super) fn new(ranks: usize, limits: &StreamLimits) -> Self {
        let peer_streams_max = limits.peer_streams_max.max(1);
        Self {
            // Including the stream for copies inside the device.
            streams: (peer_streams_max + 1).min(limits.copy_engines.max(1) as usize),
            peer_streams_max,
            one_stream_bytes_max: limits.one_stream_bytes_max,
            slice: 0,
            streams_used: 1,
            peer_streams: 1,
            peers_seen: 0,
            stream_of: vec![(0, 0); ranks],
        }
    }

    pub(super) fn streams(&self) -> usize {
        self.streams
    }

    pub(super) fn sides(&self) -> usize {
        self.streams - 1
    }

    pub(super) fn begin(&mut self, totals: &SliceTotals, sides: usize, together: bool) {
        self.slice += 1;
        self.peers_seen = 0;
        let streams = self.streams.min(1 + sides);
        let one = together && totals.peer_bytes_max <= self.one_stream_bytes_max;
        self.peer_streams = if one { 1 } else { streams.min(self.peer_streams_max) };
        self.streams_used = match totals.copies {
            0 | 1 => 1,
            _ => streams.min(self.peer_streams + 1),
        };
    }

    pub(super) fn peer_streams(&self) -> usize {
        self.peer_streams.min(self.streams_used)
    }

    /// Returns the index of the stream for copies of this rank's block to itself.
    pub(super) fn own_stream_index(&self) -> usize {
        self.streams_used - 1
    }

    /// Returns the index of the stream for a copy to or from `target`. Peers get their streams in rotation, in the
    /// order of submission.
    pub(super) fn stream_index(&mut self, target: Target) -> usize {
        let peer = match target {
            Target::Own => return self.own_stream_index(),
            Target::Peer(peer) => peer,
        };
        let streams = self.peer_streams();
        let (slice, stream_index) = &mut self.stream_of[peer];
        if *slice != self.slice {
            (*slice, *stream_index) = (self.slice, self.peers_seen % streams);
            self.peers_seen += 1;
        }
        *stream_index
    }

    pub(super) fn put_stream_index(&self, target: Target) -> Option<usize> {
        let Target::Peer(peer) = target else { return None };
        let (slice, stream_index) = self.stream_of[peer];
        (slice == self.slice).then_some(stream_index)
    }
}

/// The method by which a rank copies its own block to its own output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum SelfCopy {
    /// Chooses the link for sizes at which it was measured to be faster, and otherwise a copy inside the
    /// device. Small copies go over the link: the launch of a kernel costs the host more than the transfer,
    /// and in a graph it costs a branch.
    #[default]
    Auto,
    /// Copies inside the device, the fastest method while multiprocessors are free. On all NVIDIA drivers
    /// that were tried this is a kernel.
    Local,
    /// Copies back over the link from a peer to which the same bytes were just put. This needs no kernel, but
    /// sends one more shard over the link. If no such put precedes, the copy is made inside the device.
    Link,
}

/// Selects the put to a peer from which a self copy is read back over the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CopyBackFrom {
    /// The first put of the bytes, so that the stream's later puts overlap with the copy back.
    First,
    /// The second put of the bytes, which shares its stream with fewer puts where peers use two streams.
    Second,
}

impl SelfCopy {
    pub(super) fn back(
        self,
        limits: &StreamLimits,
        totals: &SliceTotals,
        peer_streams: usize,
        captured: bool,
    ) -> Option<CopyBackFrom> {
        let auto_max = match captured {
            true => limits.self_copy_link_captured_bytes_max,
            false => limits.self_copy_link_bytes_max,
        };
        let back = match self {
            Self::Auto => auto_max.is_some_and(|max| totals.own_bytes_max <= max),
            Self::Local => false,
            Self::Link => true,
        };
        // A reduction waits for the stream of self copies, and not for those of peers.
        let back = back && !totals.reduces;
        let back_from = if peer_streams > 1 { CopyBackFrom::Second } else { CopyBackFrom::First };
        back.then_some(back_from)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LinkCopy {
    None,
    Replaced,
    /// A put to a peer, after which the bytes are copied back to this address.
    Back(DevicePtr),
}

/// Marks the copies of a slice that take part in self copies over the link. Without `back_from`, all marks
/// are [`LinkCopy::None`].
///
/// Between two waits either all self copies go over the link or none, and none if two destinations overlap.
/// So the order of self copies never matters.
pub(super) fn mark_link_copies(
    back_from: Option<CopyBackFrom>,
    steps: &[Step],
    marks: &mut Vec<LinkCopy>,
) {
    marks.clear();
    marks.resize(steps.len(), LinkCopy::None);
    let Some(back_from) = back_from else { return };
    let mut begin = 0;
    while begin < steps.len() {
        let length = steps[begin..].iter().position(|step| matches!(step, Step::Wait { .. }));
        let end = length.map_or(steps.len(), |length| begin + length);
        if mark_between_waits(back_from, &steps[begin..end], &mut marks[begin..end]).is_none() {
            marks[begin..end].fill(LinkCopy::None);
        }
        begin = end + 1;
    }
}

fn mark_between_waits(
    back_from: CopyBackFrom,
    steps: &[Step],
    marks: &mut [LinkCopy],
) -> Option<()> {
    for (index, step) in steps.iter().enumerate() {
        let Step::Copy { target: Target::Own, dst, src, bytes, rows, .. } = *step else { continue };
        if rows.count > 1 {
            return None;
        }
        let shares_place = |other: &Step| match *other {
            Step::Copy { target: Target::Own, dst: place, bytes: length, .. } => {
                // Spans of mapped regions do not overflow.
                place < dst + bytes && dst < place + length
            }
            _ => false,
        };
        if steps[..index].iter().any(shares_place) {
            return None;
        }
        let same = |(_, step): &(usize, &Step)| {
            matches!(**step, Step::Copy { target: Target::Peer(_), src: from, bytes: length, rows, .. }
                if (from, length, rows.count) == (src, bytes, 1))
        };
        let mut carriers = steps.iter().enumerate().skip(index + 1).filter(same);
        let first = carriers.next()?;
        let (back_from, _) = match back_from {
            CopyBackFrom::First => first,
            CopyBackFrom::Second => carriers.next().unwrap_or(first),
        };
        if marks[back_from] != LinkCopy::None {
            return None;
        }
        marks[index] = LinkCopy::Replaced;
        marks[back_from] = LinkCopy::Back(dst);
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use peerlane_hal::{Role, SharedQueues};

    use super::*;
    use crate::RegionBounds;

    const LIMITS: StreamLimits = StreamLimits {
        copy_engines: 3,
        peer_streams_max: 2,
        one_stream_bytes_max: 512 << 10,
        captured_sides_max: 1,
        piece_bytes_max: u64::MAX,
        self_copy_link_bytes_max: Some(256 << 10),
        self_copy_link_captured_bytes_max: Some(512 << 10),
        shared_queues: SharedQueues { count: 8, variable: "CONNECTIONS" },
    };

    const GATHER: [Target; 4] = [Target::Own, Target::Peer(3), Target::Peer(0), Target::Peer(1)];

    fn routes(copy_engines: u32, order: &[Target]) -> Vec<usize> {
        routes_of(copy_engines, order, 1 << 20, true)
    }

    fn routes_of(copy_engines: u32, order: &[Target], bytes: u64, together: bool) -> Vec<usize> {
        let mut routes = StreamPlan::new(8, &StreamLimits { copy_engines, ..LIMITS });
        let sides = routes.sides();
        let totals =
            SliceTotals { copies: order.len(), peer_bytes_max: bytes, ..SliceTotals::default() };
        routes.begin(&totals, sides, together);
        order.iter().map(|target| routes.stream_index(*target)).collect()
    }

    #[test]
    fn the_own_copy_has_a_stream_and_peers_share_two() {
        assert_eq!(routes(3, &GATHER), [2, 0, 1, 0]);
        let again = [Target::Peer(5), Target::Peer(6), Target::Peer(5), Target::Peer(6)];
        assert_eq!(routes(3, &again), [0, 1, 0, 1]);
        assert_eq!(routes(9, &GATHER), [2, 0, 1, 0]);
    }

    #[test]
    fn small_copies_that_go_together_take_one_stream() {
        assert_eq!(routes_of(3, &GATHER, 512 << 10, true), [1, 0, 0, 0]);
        assert_eq!(routes_of(3, &GATHER, (512 << 10) + 1, true), [2, 0, 1, 0]);
        assert_eq!(routes_of(3, &GATHER, 512 << 10, false), [2, 0, 1, 0]);
        assert_eq!(routes_of(1, &GATHER, 512 << 10, true), [0; 4]);
    }

    #[test]
    fn there_are_no_more_streams_than_copy_engines() {
        assert_eq!(routes(2, &GATHER), [1, 0, 1, 0]);
        assert_eq!(routes(1, &GATHER), [0; 4]);
        assert_eq!(routes(0, &GATHER), [0; 4]);
        let sides =
            |copy_engines| StreamPlan::new(2, &StreamLimits { copy_engines, ..LIMITS }).sides();
        assert_eq!((sides(1), sides(0)), (0, 0));
    }

    #[test]
    fn a_single_put_needs_no_other_stream() {
        assert_eq!(routes(3, &[Target::Peer(1)]), [0]);
        assert_eq!(routes(3, &[Target::Own]), [0]);
    }

    fn copy((target, copy_kind): (Target, CopyKind), dst: u64, src: u64, bytes: u64) -> Step {
        let (rows, regions, both_on_host) = (Rows::ONE, (0, 0), false);
        Step::Copy { target, dst, src, bytes, rows, regions, copy_kind, both_on_host }
    }

    fn own(dst: u64, src: u64, bytes: u64) -> Step {
        copy((Target::Own, CopyKind::Local), dst, src, bytes)
    }

    fn put(peer: usize, src: u64, bytes: u64) -> Step {
        copy((Target::Peer(peer), CopyKind::Peer), 900, src, bytes)
    }

    const WAIT: Step = Step::Wait { flag: 8, host: None, value: 1, reset: false };

    fn marked(steps: &[Step]) -> Vec<LinkCopy> {
        let mut marks = Vec::new();
        mark_link_copies(Some(CopyBackFrom::Second), steps, &mut marks);
        marks
    }

    #[test]
    fn the_second_put_of_the_same_bytes_brings_them_back() {
        use LinkCopy::{Back, None, Replaced};
        let gather = [WAIT, own(100, 0, 10), put(1, 0, 10), put(2, 0, 10), put(3, 0, 10), WAIT];
        assert_eq!(marked(&gather), [None, Replaced, None, Back(100), None, None]);
        assert_eq!(marked(&[own(100, 0, 10), put(1, 0, 10)]), [Replaced, Back(100)]);
        let marks = [own(100, 0, 4), own(104, 4, 6), put(1, 0, 4), put(1, 4, 6)];
        assert_eq!(marked(&marks), [Replaced, Replaced, Back(100), Back(104)]);
        let mut local = Vec::new();
        mark_link_copies(Option::None, &gather, &mut local);
        assert_eq!(local, [None; 6]);
        mark_link_copies(Some(CopyBackFrom::First), &gather, &mut local);
        assert_eq!(local, [None, Replaced, Back(100), None, None, None]);
    }

    #[test]
    fn small_own_copies_come_back_by_themselves() {
        let totals = |bytes| SliceTotals { own_bytes_max: bytes, ..SliceTotals::default() };
        let back = |own: SelfCopy, bytes| own.back(&LIMITS, &totals(bytes), 1, false);
        assert_eq!(back(SelfCopy::Auto, 256 << 10), Some(CopyBackFrom::First));
        assert_eq!(back(SelfCopy::Auto, (256 << 10) + 1), None);
        assert_eq!(back(SelfCopy::Link, u64::MAX), Some(CopyBackFrom::First));
        assert_eq!(back(SelfCopy::Local, 1), None);
        assert_eq!(SelfCopy::Auto.back(&LIMITS, &totals(1), 2, false), Some(CopyBackFrom::Second));
        let captured = |bytes| SelfCopy::Auto.back(&LIMITS, &totals(bytes), 1, true);
        assert_eq!(captured(512 << 10), Some(CopyBackFrom::First));
        assert_eq!(captured((512 << 10) + 1), None);
        let never = StreamLimits { self_copy_link_bytes_max: None, ..LIMITS };
        assert_eq!(SelfCopy::Auto.back(&never, &totals(1), 1, false), None);
    }

    #[test]
    fn what_is_not_put_again_before_the_next_wait_stays_local() {
        assert_eq!(marked(&[own(100, 0, 10), WAIT, put(1, 0, 10)]), [LinkCopy::None; 3]);
        assert_eq!(marked(&[put(1, 0, 10), own(100, 0, 10)]), [LinkCopy::None; 2]);
        assert_eq!(marked(&[own(100, 0, 10), put(1, 0, 9), put(1, 1, 10)]), [LinkCopy::None; 3]);
        // One that stays keeps the others here.
        let mixed = [own(100, 0, 4), own(104, 4, 6), put(1, 0, 4)];
        assert_eq!(marked(&mixed), [LinkCopy::None; 3]);
    }

    #[test]
    fn places_that_overlap_keep_their_order() {
        let overlapping = [own(100, 0, 10), own(105, 50, 10), put(1, 0, 10), put(1, 50, 10)];
        assert_eq!(marked(&overlapping), [LinkCopy::None; 4]);
    }

    struct Bytes(DevicePtr);

    // SAFETY: no engine accesses the region.
    unsafe impl RegionBounds for Bytes {
        fn bytes(&self) -> u64 {
            1 << 20
        }

        fn role(&self) -> Role {
            Role::Data
        }
    }

    // SAFETY: no engine accesses the region.
    unsafe impl EngineRegion for Bytes {
        fn address(&self) -> DevicePtr {
            self.0
        }

        fn host_address(&self) -> Option<u64> {
            None
        }
    }

    // SAFETY: no engine accesses the region.
    unsafe impl PeerRegion for Bytes {
        fn peer(&self) -> Rank {
            Rank(1)
        }
    }

    /// The numbers of rows of the copies to which puts are resolved, each put with its source region, bytes and row.
    fn rows_of(puts: &[(&Bytes, u64, u64)]) -> Vec<u64> {
        let resolver = OpResolver::new(Rank(0), &[Rank(1)], Vec::new(), &LIMITS, 1 << 20);
        let peer = Bytes(8 << 20);
        let put = |(region, bytes, row)| Op::Put {
            dst: At { region: &peer, offset: 100 * row },
            src: At { region, offset: 10 * row },
            bytes,
        };
        let ops: Vec<Op<'_, Bytes, Bytes>> = puts.iter().copied().map(put).collect();
        let mut steps = Vec::new();
        resolve(&ops, &resolver, &mut steps, &mut Vec::new()).unwrap();
        steps
            .iter()
            .map(|step| match step {
                Step::Copy { rows, .. } => rows.count,
                step => panic!("{step:?} is not a copy"),
            })
            .collect()
    }

    #[test]
    fn rows_of_one_copy_are_in_the_same_regions() {
        let (first, second) = (Bytes(1 << 20), Bytes(1 << 20));
        assert_eq!(rows_of(&[(&first, 9, 0), (&first, 9, 1), (&first, 9, 2)]), [3]);
        assert_eq!(rows_of(&[(&first, 9, 0), (&first, 9, 1), (&second, 9, 2)]), [2, 1]);
        // A copy of no bytes is no row, and its regions are not those of the rows before it.
        assert_eq!(rows_of(&[(&first, 9, 0), (&second, 0, 7), (&second, 9, 1)]), [1, 1]);
        assert_eq!(rows_of(&[(&first, 9, 0), (&first, 0, 7), (&first, 9, 1)]), [2]);
    }
}
