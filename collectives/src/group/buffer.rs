//! Buffers in registered memory, accessible as slices of elements or by address.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use peerlane_hal::{DynRegion, ErrorKind, Region, Space};

use crate::element::{self, Element, Untyped};
use crate::error::Error;

/// The number of bytes that [`store_shared`] and [`load_shared`] copy at once.
const WORD_BYTES: usize = size_of::<u64>();

/// The address range of registered memory on this rank.
///
/// For device memory, a kernel takes its address. The method that returns a range says when the bytes may be read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryRange {
    /// The address of the first byte of the range, in the address space of `space`.
    pub base: NonNull<u8>,
    /// The length of the range in bytes.
    pub bytes: u64,
    /// The kind of processor, host or device, that can load and store the bytes.
    pub space: Space,
}

impl MemoryRange {
    pub(super) fn within(region: &dyn Region, offset: u64, bytes: u64) -> Self {
        let offset = usize::try_from(offset).expect("a region fits the address space");
        let base = NonNull::new(region.base().as_ptr().wrapping_add(offset));
        // A region does not wrap around the address space.
        let base = base.expect("an address inside a region is not null");
        Self { base, bytes, space: region.space() }
    }
}

/// Registered memory of this rank that holds the input or the output of an operation.
pub struct Buffer<T> {
    region: DynRegion,
    elements: PhantomData<T>,
}

impl<T> Buffer<T> {
    pub(super) fn new(region: DynRegion) -> Self {
        Self { region, elements: PhantomData }
    }

    pub(super) fn into_region(self) -> DynRegion {
        self.region
    }

    /// Returns the buffer for an operation whose element type is chosen at run time.
    pub fn into_untyped(self) -> Buffer<Untyped> {
        Buffer::new(self.region)
    }
}

impl<T: Element> Buffer<T> {
    /// Keeps `owner`, such as the allocation of the memory, until this rank no longer uses the memory.
    ///
    /// This is when the buffer, or the operation or window over it, has been dropped and its last start is complete. After an
    /// aborted start it is when the group has been dropped.
    #[must_use]
    pub fn keep_alive(self, owner: impl Send + Sync + 'static) -> Self {
        Self::new(self.region.keep_alive(owner))
    }

    /// Returns the registered region that contains the buffer's elements.
    pub fn region(&self) -> &DynRegion {
        &self.region
    }

    /// Returns the number of elements in the buffer.
    pub fn len(&self) -> usize {
        usize::try_from(self.region.bytes()).unwrap_or(usize::MAX) / T::DTYPE.bytes()
    }

    /// Returns whether the buffer has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the address range of the buffer's elements.
    pub fn memory(&self) -> MemoryRange {
        MemoryRange::within(&self.region, 0, self.region.bytes())
    }

    /// Returns the elements of the buffer as a slice for reading.
    ///
    /// # Errors
    /// If only a device can read them.
    pub fn as_slice(&self) -> Result<&[T], Error> {
        // SAFETY: the buffer is in no operation, so that nobody writes to it.
        element::cast(unsafe { bytes(&self.region, 0..self.region.bytes()) }?)
    }

    /// Returns the elements of the buffer as a slice for writing.
    ///
    /// # Errors
    /// If only a device can write them.
    pub fn as_mut_slice(&mut self) -> Result<&mut [T], Error> {
        // SAFETY: the buffer is in no operation, and borrowed for as long as the slice.
        element::cast_mut(unsafe { bytes_mut(&self.region, 0..self.region.bytes()) }?)
    }
}

impl<T> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").finish_non_exhaustive()
    }
}

/// Borrows bytes of registered memory that the host can read.
///
/// # Safety
/// Nobody writes to them while the slice lives.
///
/// # Panics
/// If they are not all in the region.
pub(super) unsafe fn bytes(region: &dyn Region, range: Range<u64>) -> Result<&[u8], Error> {
    let (base, length) = host_bytes(region, range)?;
    // SAFETY: a host region is readable over its length while it lives; nobody writes, as the
    // caller says.
    Ok(unsafe { std::slice::from_raw_parts(base, length) })
}

/// Borrows bytes of registered memory that the host can write.
///
/// # Safety
/// Nobody else touches them while the slice lives.
///
/// # Panics
/// If they are not all in the region.
#[expect(
    clippy::mut_from_ref,
    reason = "a region only names memory; exclusiveness is the caller's"
)]
pub(super) unsafe fn bytes_mut(region: &dyn Region, range: Range<u64>) -> Result<&mut [u8], Error> {
    let (base, length) = host_bytes(region, range)?;
    // SAFETY: as for `bytes`; nobody else touches them, as the caller says.
    Ok(unsafe { std::slice::from_raw_parts_mut(base, length) })
}

/// Copies bytes to memory that peers may read or write meanwhile.
///
/// Each aligned word of 8 bytes, and each byte before the first and after the last one, is stored once by an atomic store, so the
/// copy is no data race.
///
/// # Safety
/// `to` is valid for writes of the length of `from`, nothing borrows these bytes, and `from` is elsewhere.
pub(super) unsafe fn store_shared(from: &[u8], to: *mut u8) {
    let (first, words) = words_within(to, from.len());
    let (head, rest) = from.split_at(first);
    let (body, tail) = rest.split_at(words * WORD_BYTES);

    for (index, byte) in (0..).zip(head).chain((first + body.len()..).zip(tail)) {
        let place = to.wrapping_add(index);
        // SAFETY: the caller's range holds the byte, and nothing borrows it.
        unsafe { AtomicU8::from_ptr(place) }.store(*byte, Ordering::Relaxed);
    }
    for (index, word) in body.chunks_exact(WORD_BYTES).enumerate() {
        let place = to.wrapping_add(first + index * WORD_BYTES).cast();
        let word = u64::from_ne_bytes(word.try_into().expect("a chunk is a word"));
        // SAFETY: the word is aligned (`words_within`) and in the caller's range, and nothing borrows it.
        unsafe { AtomicU64::from_ptr(place) }.store(word, Ordering::Relaxed);
    }
}

/// Copies bytes from memory that peers may write meanwhile, with the loads that correspond to the stores of [`store_shared`].
///
/// # Safety
/// `from` is valid for reads and writes of the length of `to`, nothing borrows these bytes for writing, and `to` is elsewhere.
pub(super) unsafe fn load_shared(from: *mut u8, to: &mut [u8]) {
    let (first, words) = words_within(from, to.len());
    let (head, rest) = to.split_at_mut(first);
    let (body, tail) = rest.split_at_mut(words * WORD_BYTES);
    let behind = first + body.len();

    for (index, byte) in (0..).zip(head).chain((behind..).zip(tail)) {
        let place = from.wrapping_add(index);
        // SAFETY: the caller's range holds the byte, and nothing borrows it for writing.
        *byte = unsafe { AtomicU8::from_ptr(place) }.load(Ordering::Relaxed);
    }
    for (index, word) in body.chunks_exact_mut(WORD_BYTES).enumerate() {
        let place = from.wrapping_add(first + index * WORD_BYTES).cast();
        // SAFETY: the word is aligned (`words_within`) and in the caller's range, and nothing borrows it for writing.
        let value = unsafe { AtomicU64::from_ptr(place) }.load(Ordering::Relaxed);
        word.copy_from_slice(&value.to_ne_bytes());
    }
}

/// Returns the number of bytes before the first aligned word of a range of memory, and the number of whole words from there.
fn words_within(base: *mut u8, bytes: usize) -> (usize, usize) {
    let first = base.align_offset(WORD_BYTES).min(bytes);
    (first, (bytes - first) / WORD_BYTES)
}

pub(super) fn host_bytes(
    region: &dyn Region,
    range: Range<u64>,
) -> Result<(*mut u8, usize), Error> {
    let Range { start, end } = range;
    assert!(start <= end && end <= region.bytes(), "bytes {start} to {end} are not in the region");
    if region.space() != Space::Host {
        let text = "the buffer is device memory, which the host cannot access; read and write it \
                    on the device";
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    let index = |at| usize::try_from(at).expect("a host region fits the address space");
    Ok((region.base().as_ptr().wrapping_add(index(start)), index(end - start)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_copies_move_exactly_their_bytes_at_any_offset_and_length() {
        const AROUND: u8 = 0xee;
        for offset in 0..17 {
            for length in 0..40 {
                let given: Vec<u8> = (1..=length).collect();
                let mut words = [u64::from_ne_bytes([AROUND; 8]); 8];
                let base = words.as_mut_ptr().cast::<u8>().wrapping_add(offset);

                // SAFETY: 16 + 39 bytes are within the 64 of the words, which nothing borrows.
                unsafe { store_shared(&given, base) };
                let mut loaded = vec![0; given.len()];
                // SAFETY: as above, 55 of 64 bytes that nothing borrows.
                unsafe { load_shared(base, &mut loaded) };
                assert_eq!(loaded, given, "offset {offset}");

                let bytes: &[u8] = bytemuck::cast_slice(&words);
                let mut expected = [AROUND; 64];
                expected[offset..][..given.len()].copy_from_slice(&given);
                assert_eq!(bytes, expected, "offset {offset}, length {length}");
            }
        }
    }
}
