//! Describes the memory that an immediate call reads and writes.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use peerlane_hal::ErrorKind;

use crate::element::{DType, Element};
use crate::error::Error;
use crate::group::window::{Inner, Window};

/// The input of an [immediate call](super::Immediate).
///
/// A slice becomes one by [`From`], and so do a [part of a window](WindowPart) and `()`, which
/// stands for no input.
#[derive(Clone, Debug)]
pub struct Input<'m> {
    pub(super) memory: Option<Memory>,
    borrowed: PhantomData<&'m [u8]>,
}

/// The output of an [immediate call](super::Immediate).
///
/// A slice becomes one by [`From`], and so do a [part of a window](WindowPart) and `()`, which
/// stands for no output.
#[derive(Debug)]
pub struct Output<'m> {
    pub(super) memory: Option<Memory>,
    borrowed: PhantomData<&'m mut [u8]>,
}

/// Some elements of a window, which an [immediate call](super::Immediate) uses without a copy.
///
/// [`Window::part`] returns one. It keeps the window in use: drop it before the window is
/// [released](crate::group::Group::release).
#[derive(Clone)]
pub struct WindowPart {
    window: Arc<Inner>,
    begin_bytes: u64,
    dtype: DType,
    len: usize,
}

/// Elements in memory of the caller or in a window.
#[derive(Clone, Debug)]
pub(super) struct Memory {
    pub(super) location: Location,
    pub(super) dtype: DType,
    /// The elements of the type in an element of the caller.
    pub(super) unit: usize,
    /// The number of elements of the caller.
    pub(super) len: usize,
}

#[derive(Clone)]
pub(super) enum Location {
    Address(NonNull<u8>),
    /// A window and the byte at which the elements begin.
    Window(Arc<Inner>, u64),
}

impl Location {
    pub(super) fn address(&self) -> NonNull<u8> {
        match self {
            Self::Address(address) => *address,
            Self::Window(window, begin) => window.address(*begin),
        }
    }

    /// Returns the window and the byte in it, unless the elements are in other memory.
    pub(super) fn window(&self) -> Option<(&Arc<Inner>, u64)> {
        match self {
            Self::Address(_) => None,
            Self::Window(window, begin) => Some((window, *begin)),
        }
    }
}

impl fmt::Debug for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => write!(f, "{address:?}"),
            Self::Window(window, begin) => write!(f, "byte {begin} of window {}", window.number),
        }
    }
}

impl Memory {
    fn from_address(address: NonNull<u8>, dtype: DType, len: usize) -> Self {
        Self { location: Location::Address(address), dtype, unit: 1, len }
    }

    fn in_units(self, unit: usize) -> Self {
        let unit = unit.max(1);
        Self { unit, len: self.len / unit, ..self }
    }

    pub(super) fn bytes(&self) -> usize {
        self.len.saturating_mul(self.unit * self.dtype.bytes())
    }

    /// Checks that this output has elements as the input has.
    pub(super) fn check_elements(&self, input: &Self) -> Result<(), Error> {
        if (self.dtype, self.unit) == (input.dtype, input.unit) {
            return Ok(());
        }

        let name = |memory: &Self| match memory.unit {
            1 => memory.dtype.to_string(),
            unit => format!("{unit} {}", memory.dtype),
        };
        let text = format!(
            "output has elements of {}, expected {} as in the input",
            name(self),
            name(input)
        );
        Err(Error::new(ErrorKind::InvalidArgument, text))
    }

    /// Returns `len` elements from element `begin` on, which are all in the memory.
    pub(super) fn part(&self, begin: usize, len: usize) -> Self {
        let bytes = begin * self.unit * self.dtype.bytes();
        let location = match &self.location {
            Location::Address(address) => {
                let address = address.as_ptr().wrapping_add(bytes);
                Location::Address(NonNull::new(address).expect("memory does not wrap around"))
            }
            Location::Window(window, of_memory) => {
                Location::Window(Arc::clone(window), of_memory + bytes as u64)
            }
        };
        Self { location, len, ..*self }
    }
}

impl Input<'_> {
    pub(super) fn new(memory: Option<Memory>) -> Self {
        Self { memory, borrowed: PhantomData }
    }

    /// Describes `len` elements at an address, such as memory of a device.
    ///
    /// # Safety
    /// The memory is one that this rank can read: of the host, or of its device if the group uses
    /// GPUs. It is aligned for its elements. Until the call is complete, on the host or on the
    /// stream, it stays allocated and nobody writes to it. If the call is recorded into a graph,
    /// this holds for every replay.
    pub unsafe fn from_address(address: NonNull<u8>, dtype: DType, len: usize) -> Self {
        Self::new(Some(Memory::from_address(address, dtype, len)))
    }

    /// Makes `unit` elements of the type one element of the call, such as 16 bytes of a complex
    /// number that the library does not know.
    ///
    /// The lengths of blocks then count such elements. The length of the memory is a multiple of
    /// `unit`, or is rounded down.
    #[must_use]
    pub fn in_units(self, unit: usize) -> Self {
        Self::new(self.memory.map(|memory| memory.in_units(unit)))
    }
}

impl Output<'_> {
    fn new(memory: Option<Memory>) -> Self {
        Self { memory, borrowed: PhantomData }
    }

    /// Describes `len` elements at an address, such as memory of a device.
    ///
    /// # Safety
    /// As [`Input::from_address`], for memory that this rank can also write and that nobody else
    /// reads.
    pub unsafe fn from_address(address: NonNull<u8>, dtype: DType, len: usize) -> Self {
        Self::new(Some(Memory::from_address(address, dtype, len)))
    }

    /// Makes `unit` elements of the type one element of the call, such as 16 bytes of a complex
    /// number that the library does not know.
    ///
    /// The lengths of blocks then count such elements. The length of the memory is a multiple of
    /// `unit`, or is rounded down.
    #[must_use]
    pub fn in_units(self, unit: usize) -> Self {
        Self::new(self.memory.map(|memory| memory.in_units(unit)))
    }
}

fn memory_of<T: Element>(base: NonNull<T>, len: usize) -> Memory {
    Memory::from_address(base.cast(), T::DTYPE, len)
}

impl<'m, T: Element> From<&'m [T]> for Input<'m> {
    fn from(slice: &'m [T]) -> Self {
        Self::new(Some(memory_of(NonNull::from(slice).cast::<T>(), slice.len())))
    }
}

impl<'m, T: Element, const N: usize> From<&'m [T; N]> for Input<'m> {
    fn from(slice: &'m [T; N]) -> Self {
        Self::from(&slice[..])
    }
}

impl<'m, T: Element> From<&'m Vec<T>> for Input<'m> {
    fn from(slice: &'m Vec<T>) -> Self {
        Self::from(&slice[..])
    }
}

impl<'m, T: Element> From<&'m mut [T]> for Output<'m> {
    fn from(slice: &'m mut [T]) -> Self {
        let len = slice.len();
        Self::new(Some(memory_of(NonNull::from(slice).cast::<T>(), len)))
    }
}

impl<'m, T: Element, const N: usize> From<&'m mut [T; N]> for Output<'m> {
    fn from(slice: &'m mut [T; N]) -> Self {
        Self::from(&mut slice[..])
    }
}

impl<'m, T: Element> From<&'m mut Vec<T>> for Output<'m> {
    fn from(slice: &'m mut Vec<T>) -> Self {
        Self::from(&mut slice[..])
    }
}

impl From<()> for Input<'_> {
    fn from((): ()) -> Self {
        Self::new(None)
    }
}

impl From<()> for Output<'_> {
    fn from((): ()) -> Self {
        Self::new(None)
    }
}

impl From<WindowPart> for Input<'_> {
    fn from(part: WindowPart) -> Self {
        Self::new(Some(part.into_memory()))
    }
}

impl From<WindowPart> for Output<'_> {
    fn from(part: WindowPart) -> Self {
        Self::new(Some(part.into_memory()))
    }
}

impl WindowPart {
    fn into_memory(self) -> Memory {
        let Self { window, begin_bytes, dtype, len } = self;
        Memory { location: Location::Window(window, begin_bytes), dtype, unit: 1, len }
    }
}

impl fmt::Debug for WindowPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WindowPart")
            .field("window", &self.window.number)
            .field("begin_bytes", &self.begin_bytes)
            .field("dtype", &self.dtype)
            .field("len", &self.len)
            .finish()
    }
}

impl<T: Element> Window<T> {
    /// Returns some elements of the window as memory of an [immediate call](super::Immediate).
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if they are not all in the window.
    pub fn part(&self, range: Range<usize>) -> Result<WindowPart, Error> {
        let bytes = self.inner.bytes_of(T::DTYPE, &range)?;
        Ok(WindowPart {
            window: Arc::clone(&self.inner),
            begin_bytes: bytes.start,
            dtype: T::DTYPE,
            len: range.len(),
        })
    }

    /// Returns `len` elements of a type that is chosen at run time, from byte `begin_bytes` of the
    /// window on, as memory of an [immediate call](super::Immediate).
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if they are not all in the window, or
    /// `begin_bytes` is no multiple of the size of an element.
    pub fn untyped_part(
        &self,
        dtype: DType,
        begin_bytes: usize,
        len: usize,
    ) -> Result<WindowPart, Error> {
        let size = dtype.bytes();
        if !begin_bytes.is_multiple_of(size) {
            let text = format!(
                "the part begins at byte {begin_bytes} of the window, expected a multiple of {size}, the size of {dtype}"
            );
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }

        let begin = begin_bytes / size;
        let bytes = self.inner.bytes_of(dtype, &(begin..begin.saturating_add(len)))?;
        let window = Arc::clone(&self.inner);
        Ok(WindowPart { window, begin_bytes: bytes.start, dtype, len })
    }
}
