//! Slices of a window's memory that the host reads or writes.

use std::fmt;
use std::ops::{Deref, DerefMut, Range};

use super::{Extent, Inner, WindowUse};
use crate::element::{self, Element};
use crate::error::Error;
use crate::group::buffer;

/// A slice of a window that the host reads; no operation can write its elements until it is dropped.
pub struct WindowSlice<'w, T> {
    elements: &'w [T],
    _borrowed: WindowUse,
}

/// A slice of a window that the host writes; no operation can use its elements until it is dropped.
pub struct WindowSliceMut<'w, T> {
    elements: &'w mut [T],
    _borrowed: WindowUse,
}

fn enter(inner: &Inner, bytes: &Range<u64>, writes: bool) -> Result<WindowUse, Error> {
    inner.runtime.life.check()?;
    let extent = Extent { window: inner.number, bytes: bytes.clone(), writes };
    let borrowed = inner.users.borrow(extent)?;

    // Checked again, because an operation may leave the table when the group ends, although peers still write to the window.
    inner.runtime.life.check()?;
    Ok(borrowed)
}

impl<'w, T: Element> WindowSlice<'w, T> {
    pub(super) fn borrow(inner: &'w Inner, bytes: Range<u64>) -> Result<Self, Error> {
        let borrowed = enter(inner, &bytes, false)?;
        // SAFETY: rules 1 and 2 of `Window`: `borrowed` excludes the open starts and the channels that write these bytes,
        // and keeps others away until it is dropped.
        let bytes = unsafe { buffer::bytes(inner.region(), bytes) }?;
        Ok(Self { elements: element::cast(bytes)?, _borrowed: borrowed })
    }
}

impl<'w, T: Element> WindowSliceMut<'w, T> {
    pub(super) fn borrow(inner: &'w Inner, bytes: Range<u64>) -> Result<Self, Error> {
        let borrowed = enter(inner, &bytes, true)?;
        // SAFETY: rules 1 and 2 of `Window`: `borrowed` excludes all open starts, channels and other slices that use these
        // bytes, and keeps others away until it is dropped.
        let bytes = unsafe { buffer::bytes_mut(inner.region(), bytes) }?;
        Ok(Self { elements: element::cast_mut(bytes)?, _borrowed: borrowed })
    }
}

impl<T> Deref for WindowSlice<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        self.elements
    }
}

impl<T> Deref for WindowSliceMut<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        self.elements
    }
}

impl<T> DerefMut for WindowSliceMut<'_, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        self.elements
    }
}

impl<T: fmt::Debug> fmt::Debug for WindowSlice<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.elements.fmt(f)
    }
}

impl<T: fmt::Debug> fmt::Debug for WindowSliceMut<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.elements.fmt(f)
    }
}
