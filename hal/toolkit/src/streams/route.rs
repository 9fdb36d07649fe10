//! Which stream a put takes.
//!
//! How many streams there are is the backend's to say (`Abilities`); the figures here are those of CUDA.
//! Copies that are in flight at once must not be more than copy engines: with three engines, six
//! copies at once ran at 60 % of the rate. Puts to peers on two streams were the best of those that
//! were tried, for all sizes from 4 KiB up; a third one was worse from 64 MiB up
//! (docs/perf/cuda-streams.md). Small ones that go onto their stream in one call take one stream: to
//! begin and join another one takes longer than they do (docs/perf/cuda-submission.md).
//!
//! A copy inside the device is a kernel of the driver, whichever call asks for it, on all drivers that
//! were tried (docs/perf/cuda-local-copies.md). It waits for room on the multiprocessors, so it has
//! a stream of its own, where nothing else waits for that; and it goes in one piece, because each
//! piece would wait anew.
//!
//! The puts of one slice to one peer take one stream, so that their order is that of the stream;
//! between slices everything is joined, so that the next slice is free to choose.

use super::abilities::Abilities;

/// Whose memory a put or a signal goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Whom {
    Oneself,
    /// The rank as an index.
    Peer(usize),
}

/// What a slice is to do.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Shape {
    pub(super) copies: usize,
    pub(super) waits: usize,
    /// The largest copy inside the device, and the largest of the others.
    pub(super) own_bytes_max: u64,
    pub(super) peer_bytes_max: u64,
    /// Copies beyond one a put.
    pub(super) more_copies: usize,
}

/// The tracks of a slice: 0 is the main stream, the others stand beside it.
#[derive(Debug)]
pub(super) struct Routes {
    tracks: usize,
    peer_tracks_max: usize,
    one_track_bytes_max: u64,
    /// The slice that is being routed, and how many tracks it uses.
    slice: u64,
    spread: usize,
    peer_tracks: usize,
    /// The peers that have a track in this slice.
    seen: usize,
    /// For each rank, the slice that gave it a track, and the track.
    of: Vec<(u64, usize)>,
}

impl Routes {
    /// Room for ranks below `ranks`.
    pub(super) fn new(ranks: usize, abilities: &Abilities) -> Self {
        let peer_tracks_max = abilities.peer_streams_max.max(1);
        Self {
            // With the one for copies inside the device.
            tracks: (peer_tracks_max + 1).min(abilities.copy_engines.max(1) as usize),
            peer_tracks_max,
            one_track_bytes_max: abilities.one_stream_bytes_max,
            slice: 0,
            spread: 1,
            peer_tracks: 1,
            seen: 0,
            of: vec![(0, 0); ranks],
        }
    }

    /// All tracks.
    pub(super) fn tracks(&self) -> usize {
        self.tracks
    }

    /// Streams beside the main one.
    pub(super) fn sides(&self) -> usize {
        self.tracks - 1
    }

    /// Begins a slice, with `sides` streams beside the main one to be had; `together` says that copies
    /// on one stream go there in one call.
    pub(super) fn begin(&mut self, shape: &Shape, sides: usize, together: bool) {
        self.slice += 1;
        self.seen = 0;
        let tracks = self.tracks.min(1 + sides);
        let one = together && shape.peer_bytes_max <= self.one_track_bytes_max;
        self.peer_tracks = if one { 1 } else { tracks.min(self.peer_tracks_max) };
        self.spread = match shape.copies {
            0 | 1 => 1,
            _ => tracks.min(self.peer_tracks + 1),
        };
    }

    /// Streams that copies to peers are spread over.
    pub(super) fn peer_tracks(&self) -> usize {
        self.peer_tracks.min(self.spread)
    }

    /// The track of a put. Peers take theirs by turns, in the order in which the slice names them.
    pub(super) fn track(&mut self, whom: Whom) -> usize {
        let peer = match whom {
            Whom::Oneself => return self.spread - 1,
            Whom::Peer(peer) => peer,
        };
        let tracks = self.peer_tracks();
        let (slice, track) = &mut self.of[peer];
        if *slice != self.slice {
            (*slice, *track) = (self.slice, self.seen % tracks);
            self.seen += 1;
        }
        *track
    }

    /// The track of the puts to a peer, if the slice had any.
    pub(super) fn put_track(&self, whom: Whom) -> Option<usize> {
        let Whom::Peer(peer) = whom else { return None };
        let (slice, track) = self.of[peer];
        (slice == self.slice).then_some(track)
    }
}

#[cfg(test)]
mod tests {
    use super::super::abilities::tests::ABILITIES;
    use super::*;

    const GATHER: [Whom; 4] = [Whom::Oneself, Whom::Peer(3), Whom::Peer(0), Whom::Peer(1)];

    fn routes(copy_engines: u32, order: &[Whom]) -> Vec<usize> {
        routes_of(copy_engines, order, 1 << 20, true)
    }

    fn routes_of(copy_engines: u32, order: &[Whom], bytes: u64, together: bool) -> Vec<usize> {
        let mut routes = Routes::new(8, &Abilities { copy_engines, ..ABILITIES });
        let sides = routes.sides();
        let shape = Shape { copies: order.len(), peer_bytes_max: bytes, ..Shape::default() };
        routes.begin(&shape, sides, together);
        order.iter().map(|whom| routes.track(*whom)).collect()
    }

    #[test]
    fn the_own_copy_has_a_stream_and_peers_share_two() {
        assert_eq!(routes(3, &GATHER), [2, 0, 1, 0]);
        let again = [Whom::Peer(5), Whom::Peer(6), Whom::Peer(5), Whom::Peer(6)];
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
        let sides = |copy_engines| Routes::new(2, &Abilities { copy_engines, ..ABILITIES }).sides();
        assert_eq!((sides(1), sides(0)), (0, 0));
    }

    #[test]
    fn a_single_put_needs_no_other_stream() {
        assert_eq!(routes(3, &[Whom::Peer(1)]), [0]);
        assert_eq!(routes(3, &[Whom::Oneself]), [0]);
    }
}
