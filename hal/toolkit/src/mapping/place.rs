//! Which mapping of this process an address belongs to.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::Pages;

/// Bytes of a mapping of this process, as another process finds them. They stay mapped as long as
/// this lives.
#[derive(Clone, Debug)]
pub struct Place {
    pages: Arc<Pages>,
    /// Bytes of the memfd that lie before them.
    pub head: u64,
    /// The first byte of the mapping.
    pub mapping_base: NonNull<u8>,
    /// The bytes of the mapping: whole pages.
    pub mapped_bytes: usize,
}

// SAFETY: a place only names memory; who may touch which byte when is the contract of the ops.
unsafe impl Send for Place {}
// SAFETY: as above.
unsafe impl Sync for Place {}

impl Place {
    /// What another process maps.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.pages.fd.as_fd()
    }
}

/// All mappings by their first byte, each with the bytes of its memfd that lie before it.
static MAPPED: Mutex<BTreeMap<usize, (Weak<Pages>, u64)>> = Mutex::new(BTreeMap::new());

fn mapped() -> MutexGuard<'static, BTreeMap<usize, (Weak<Pages>, u64)>> {
    // Each change is one call, so a panic elsewhere leaves the map whole.
    MAPPED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The mapping that holds all of `base..base + bytes`, if one does.
pub fn find(base: NonNull<u8>, bytes: u64) -> Option<Place> {
    let address = base.as_ptr().addr();
    let (at, pages, head) = {
        let mapped = mapped();
        let (start, (pages, head)) = mapped.range(..=address).next_back()?;
        ((address - start) as u64, pages.upgrade()?, *head)
    };
    // Out of the lock: to drop the last hold on the pages takes it, too.
    let (mapping_base, mapped_bytes) = (pages.base, pages.mapped_bytes);
    let inside = at.checked_add(bytes.max(1)).is_some_and(|end| end <= mapped_bytes as u64);
    inside.then(|| Place { pages, head: head + at, mapping_base, mapped_bytes })
}

/// `head` bytes of the memfd lie before the mapping.
pub(super) fn enter(pages: &Arc<Pages>, head: u64) {
    mapped().insert(pages.base.as_ptr().addr(), (Arc::downgrade(pages), head));
}

pub(super) fn leave(pages: &Pages) {
    mapped().remove(&pages.base.as_ptr().addr());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::Mapping;

    fn at(mapping: &Mapping, offset: usize) -> NonNull<u8> {
        NonNull::new(mapping.base().as_ptr().wrapping_add(offset)).unwrap()
    }

    #[test]
    fn a_span_is_found_in_its_mapping_and_not_beyond() {
        let mapping = Mapping::create(10_000).unwrap();
        let whole = mapping.mapped_bytes() as u64;
        assert_eq!(find(mapping.base(), whole).unwrap().head, 0);
        assert_eq!(find(at(&mapping, 5001), 100).unwrap().head, 5001);
        assert!(find(mapping.base(), whole + 1).is_none());
        assert!(find(at(&mapping, 1), u64::MAX).is_none());
        assert!(find(at(&mapping, 12_287), 1).is_some());
        let heap = Box::new(0_u64);
        assert!(find(NonNull::from(&*heap).cast(), 8).is_none());
        let base = mapping.base();
        let place = find(base, 1).unwrap();
        drop(mapping);
        // SAFETY: the place keeps it mapped, and nobody else knows it.
        unsafe { base.write(1) };
        drop(place);
        assert!(find(base, 1).is_none());
    }

    #[test]
    fn a_part_is_the_same_memory_at_another_address() {
        let mapping = Mapping::create(3 * 4096).unwrap();
        for head in [0_usize, 1, 4095, 4096, 5000, 8192] {
            let place = find(at(&mapping, head), 1000).unwrap();
            let fd = place.fd().try_clone_to_owned().unwrap();
            let (part, begin) = Mapping::import(fd, place.head, 1000).unwrap();
            // SAFETY: inside both mappings, which nobody else knows.
            unsafe { at(&mapping, head + 7).write(head as u8 | 1) };
            // SAFETY: as above.
            assert_eq!(unsafe { at(&part, begin + 7).read() }, head as u8 | 1);
            // A part of a part, with its place in the whole.
            assert_eq!(find(at(&part, begin), 1000).unwrap().head, head as u64);
        }
        let fd = find(mapping.base(), 1).unwrap().fd().try_clone_to_owned().unwrap();
        for (head, bytes) in [(4096, 8193), (u64::MAX, 1), (1, u64::MAX)] {
            let fd = fd.try_clone().unwrap();
            assert!(Mapping::import(fd, head, bytes).is_err(), "{bytes} from {head}");
        }
    }
}
