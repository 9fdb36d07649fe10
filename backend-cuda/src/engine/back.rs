//! Own copies that come back over the link.
//!
//! A copy inside the device is a kernel of the driver, and beside compute that fills all
//! multiprocessors it waits for room (docs/perf/cuda-local-copies.md). Where the same bytes are put to
//! a peer anyway, they can be copied back from there by a copy engine: once more over the link, and
//! without any kernel. Which is better is the caller's to know: [`OwnCopy`].

use super::route::Whom;
use super::step::Step;
use crate::sys::CUdeviceptr;

/// How a rank's own bytes get to their place in its own memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum OwnCopy {
    /// By a copy inside the device: the fastest where multiprocessors are free. On all drivers that
    /// were tried it is a kernel.
    #[default]
    Local,
    /// From a peer's memory, where the same bytes were just put: without a kernel, for one shard
    /// more on the link. A copy inside the device where nothing of the kind was put.
    Link,
}

/// What a step of a slice has to do with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    None,
    /// A put to oneself that another step does.
    Spared,
    /// A put to a peer, behind which the bytes come back to this place.
    Returns(CUdeviceptr),
}

/// Marks the steps of a slice, all of them with [`Part::None`] if own copies are local.
///
/// Between two waits, either every put to oneself comes back or none does, and none whose place
/// another one shares: so their order never matters.
pub(super) fn mark(own: OwnCopy, steps: &[Step], parts: &mut Vec<Part>) {
    parts.clear();
    parts.resize(steps.len(), Part::None);
    if own == OwnCopy::Local {
        return;
    }
    let mut begin = 0;
    while begin < steps.len() {
        let length = steps[begin..].iter().position(|step| matches!(step, Step::Wait { .. }));
        let end = length.map_or(steps.len(), |length| begin + length);
        if mark_phase(&steps[begin..end], &mut parts[begin..end]).is_none() {
            parts[begin..end].fill(Part::None);
        }
        begin = end + 1;
    }
}

/// `None` if a put to oneself cannot come back.
fn mark_phase(steps: &[Step], parts: &mut [Part]) -> Option<()> {
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
        // The second one shares its stream with fewer puts.
        let (first, second) = (carriers.next()?, carriers.next());
        let (carrier, _) = second.unwrap_or(first);
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
    use super::*;

    fn own(dst: u64, src: u64, bytes: u64) -> Step {
        Step::Copy { whom: Whom::Oneself, dst, src, bytes, both_on_host: false }
    }

    fn put(peer: usize, src: u64, bytes: u64) -> Step {
        Step::Copy { whom: Whom::Peer(peer), dst: 900, src, bytes, both_on_host: false }
    }

    const WAIT: Step = Step::Wait { flag: 8, value: 1, reset: false };

    fn marked(steps: &[Step]) -> Vec<Part> {
        let mut parts = Vec::new();
        mark(OwnCopy::Link, steps, &mut parts);
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
        mark(OwnCopy::Local, &gather, &mut local);
        assert_eq!(local, [None; 6]);
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
