//! The error of a failed release, which gives the window back.

use std::fmt;

use super::Window;
use crate::error::Error;

/// Returns the window whose release has failed, with the reason.
///
/// The release can be tried again once the reason is gone. The group keeps the memory too: if this value is dropped, or turned into
/// an [`Error`] by `?`, the memory stays in use until the group is dropped.
///
/// ```
/// # use peerlane::bootstrap::{Bootstrap, in_process};
/// # use peerlane::{Group, host};
/// # in_process::run(2, |bootstrap| {
/// # let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
/// # let mut group = Group::open(bootstrap, fabric)?;
/// let window = group.window::<f32>(100)?;
/// let channel = group.channel(&window, 1)?;
/// let failed = group.release(window).unwrap_err();
/// drop(channel);
/// group.release(failed.window)?;
/// # group.close()
/// # }).unwrap();
/// ```
pub struct Unreleased<T> {
    /// The window, which this rank still has.
    pub window: Window<T>,
    /// Why the release has failed.
    pub error: Error,
}

impl<T> fmt::Debug for Unreleased<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { window, error } = self;
        f.debug_struct("Unreleased").field("window", window).field("error", error).finish()
    }
}

impl<T> fmt::Display for Unreleased<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "window {} was not released", self.window.inner.number)
    }
}

impl<T> std::error::Error for Unreleased<T> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}

impl<T> From<Unreleased<T>> for Error {
    fn from(unreleased: Unreleased<T>) -> Self {
        unreleased.error
    }
}
