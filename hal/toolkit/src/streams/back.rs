//! Own copies that come back over the link.
//!
//! A copy inside the device may be a kernel of the driver, and beside compute that fills all
//! multiprocessors it waits for room (docs/perf/cuda-local-copies.md). Where the same bytes are put to
//! a peer anyway, they can be copied back from there by a copy engine: once more over the link, and
//! without any kernel. Which is better is the caller's to know: [`OwnCopy`].

use super::abilities::Abilities;
use super::route::{Shape, Whom};
use super::step::Step;
use crate::device::DevicePtr;

/// How a rank's own bytes get to their place in its own memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum OwnCopy {
    /// Over the link where that was measured to be faster: small ones where a copy inside the device
    /// is a kernel, which costs the host more than the link takes, and in a graph a branch; else
    /// local.
    #[default]
    Auto,
    /// By a copy inside the device: the fastest where multiprocessors are free. On all drivers of
    /// NVIDIA that were tried it is a kernel.
    Local,
    /// From a peer's memory, where the same bytes were just put: without a kernel, for one shard
    /// more on the link. A copy inside the device where nothing of the kind was put.
    Link,
}

/// Which of the puts of the same bytes brings them back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Carrier {
    /// The first: what follows it in the stream goes on beside the way back.
    First,
    /// The second, which shares its stream with fewer puts where peers are on two.
    Second,
}

impl OwnCopy {
    /// Whether own copies of a slice come back, and who brings them.
    pub(super) fn back(
        self,
        abilities: &Abilities,
        shape: &Shape,
        peer_tracks: usize,
        captured: bool,
    ) -> Option<Carrier> {
        let auto_max = match captured {
            true => abilities.own_link_captured_bytes_max,
            false => abilities.own_link_bytes_max,
        };
        let back = match self {
            Self::Auto => auto_max.is_some_and(|max| shape.own_bytes_max <= max),
            Self::Local => false,
            Self::Link => true,
        };
        let carrier = if peer_tracks > 1 { Carrier::Second } else { Carrier::First };
        back.then_some(carrier)
    }
}

/// What a step of a slice has to do with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    None,
    /// A put to oneself that another step does.
    Spared,
    /// A put to a peer, behind which the bytes come back to this place.
    Returns(DevicePtr),
}

/// Marks the steps of a slice, all of them with [`Part::None`] without a carrier.
///
/// Between two waits, either every put to oneself comes back or none does, and none whose place
/// another one shares: so their order never matters.
pub(super) fn mark(carrier: Option<Carrier>, steps: &[Step], parts: &mut Vec<Part>) {
    parts.clear();
    parts.resize(steps.len(), Part::None);
    let Some(carrier) = carrier else { return };
    let mut begin = 0;
    while begin < steps.len() {
        let length = steps[begin..].iter().position(|step| matches!(step, Step::Wait { .. }));
        let end = length.map_or(steps.len(), |length| begin + length);
        if mark_phase(carrier, &steps[begin..end], &mut parts[begin..end]).is_none() {
            parts[begin..end].fill(Part::None);
        }
        begin = end + 1;
    }
}

/// `None` if a put to oneself cannot come back.
fn mark_phase(carrier: Carrier, steps: &[Step], parts: &mut [Part]) -> Option<()> {
    for (index, step) in steps.iter().enumerate() {
        let Step::Copy { whom: Whom::Oneself, dst, src, bytes, .. } = *step else { continue };
        let shares_place = |other: &Step| match *other {
            Step::Copy { whom: Whom::Oneself, dst: place, bytes: length, .. } => {
                // Spans of mapped regions do not overflow.
                place < dst + bytes && dst < place + length
            }
            _ => false,
        };
        if steps[..index].iter().any(shares_place) {
            return None;
        }
        let same = |(_, step): &(usize, &Step)| {
            matches!(**step, Step::Copy { whom: Whom::Peer(_), src: from, bytes: length, .. }
                if (from, length) == (src, bytes))
        };
        let mut carriers = steps.iter().enumerate().skip(index + 1).filter(same);
        let first = carriers.next()?;
        let (carrier, _) = match carrier {
            Carrier::First => first,
            Carrier::Second => carriers.next().unwrap_or(first),
        };
        if parts[carrier] != Part::None {
            return None;
        }
        parts[index] = Part::Spared;
        parts[carrier] = Part::Returns(dst);
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::super::abilities::tests::ABILITIES;
    use super::*;
    use crate::device::Between;

    fn own(dst: u64, src: u64, bytes: u64) -> Step {
        let between = Between::Own;
        Step::Copy { whom: Whom::Oneself, dst, src, bytes, between, both_on_host: false }
    }

    fn put(peer: usize, src: u64, bytes: u64) -> Step {
        let (whom, between) = (Whom::Peer(peer), Between::Peers);
        Step::Copy { whom, dst: 900, src, bytes, between, both_on_host: false }
    }

    const WAIT: Step = Step::Wait { flag: 8, host: None, value: 1, reset: false };

    fn marked(steps: &[Step]) -> Vec<Part> {
        let mut parts = Vec::new();
        mark(Some(Carrier::Second), steps, &mut parts);
        parts
    }

    #[test]
    fn the_second_put_of_the_same_bytes_brings_them_back() {
        use Part::{None, Returns, Spared};
        let gather = [WAIT, own(100, 0, 10), put(1, 0, 10), put(2, 0, 10), put(3, 0, 10), WAIT];
        assert_eq!(marked(&gather), [None, Spared, None, Returns(100), None, None]);
        assert_eq!(marked(&[own(100, 0, 10), put(1, 0, 10)]), [Spared, Returns(100)]);
        let parts = [own(100, 0, 4), own(104, 4, 6), put(1, 0, 4), put(1, 4, 6)];
        assert_eq!(marked(&parts), [Spared, Spared, Returns(100), Returns(104)]);
        let mut local = Vec::new();
        mark(Option::None, &gather, &mut local);
        assert_eq!(local, [None; 6]);
        mark(Some(Carrier::First), &gather, &mut local);
        assert_eq!(local, [None, Spared, Returns(100), None, None, None]);
    }

    #[test]
    fn small_own_copies_come_back_by_themselves() {
        let shape = |bytes| Shape { own_bytes_max: bytes, ..Shape::default() };
        let back = |own: OwnCopy, bytes| own.back(&ABILITIES, &shape(bytes), 1, false);
        assert_eq!(back(OwnCopy::Auto, 256 << 10), Some(Carrier::First));
        assert_eq!(back(OwnCopy::Auto, (256 << 10) + 1), None);
        assert_eq!(back(OwnCopy::Link, u64::MAX), Some(Carrier::First));
        assert_eq!(back(OwnCopy::Local, 1), None);
        assert_eq!(OwnCopy::Auto.back(&ABILITIES, &shape(1), 2, false), Some(Carrier::Second));
        let captured = |bytes| OwnCopy::Auto.back(&ABILITIES, &shape(bytes), 1, true);
        assert_eq!(captured(512 << 10), Some(Carrier::First));
        assert_eq!(captured((512 << 10) + 1), None);
        let never = Abilities { own_link_bytes_max: None, ..ABILITIES };
        assert_eq!(OwnCopy::Auto.back(&never, &shape(1), 1, false), None);
    }

    #[test]
    fn what_is_not_put_again_before_the_next_wait_stays_local() {
        assert_eq!(marked(&[own(100, 0, 10), WAIT, put(1, 0, 10)]), [Part::None; 3]);
        assert_eq!(marked(&[put(1, 0, 10), own(100, 0, 10)]), [Part::None; 2]);
        assert_eq!(marked(&[own(100, 0, 10), put(1, 0, 9), put(1, 1, 10)]), [Part::None; 3]);
        // One that stays keeps the others here.
        let mixed = [own(100, 0, 4), own(104, 4, 6), put(1, 0, 4)];
        assert_eq!(marked(&mixed), [Part::None; 3]);
    }

    #[test]
    fn places_that_overlap_keep_their_order() {
        let overlapping = [own(100, 0, 10), own(105, 50, 10), put(1, 0, 10), put(1, 50, 10)];
        assert_eq!(marked(&overlapping), [Part::None; 4]);
    }
}
