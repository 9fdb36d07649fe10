//! Holds values of the process, of which a forked child gets its own.

use std::sync::atomic::{AtomicPtr, Ordering};
use std::{fmt, process, ptr};

/// Holds a value of this process, which is created when it is first needed and never dropped.
///
/// A child that was forked from the process does not see the value of its parent: a thread of the
/// parent may have held a lock in it, and threads that the value describes do not exist in the
/// child. The child creates a value of its own.
///
/// ```
/// use std::sync::Mutex;
///
/// use peerlane_toolkit::PerProcess;
///
/// static NAMES: PerProcess<Mutex<Vec<String>>> = PerProcess::new();
///
/// NAMES.value_or_create(Mutex::default).lock().unwrap().push("one".to_owned());
/// assert_eq!(NAMES.value_or_create(Mutex::default).lock().unwrap().len(), 1);
/// ```
pub struct PerProcess<T>(AtomicPtr<Owned<T>>);

struct Owned<T> {
    process: u32,
    value: T,
}

impl<T: Send + Sync + 'static> PerProcess<T> {
    /// Creates a place without a value.
    #[must_use]
    pub const fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// Returns the value of this process, which `create` creates if there is none.
    ///
    /// Several threads may call `create` at the same time; one of the values counts.
    pub fn value_or_create(&self, create: impl Fn() -> T) -> &'static T {
        let process = process::id();
        loop {
            let known = self.0.load(Ordering::Acquire);
            // SAFETY: what is stored below is never freed, and other threads only read it.
            if let Some(owned) = unsafe { known.as_ref() }
                && owned.process == process
            {
                return &owned.value;
            }

            let own = Box::into_raw(Box::new(Owned { process, value: create() }));
            let stored = self.0.compare_exchange(known, own, Ordering::AcqRel, Ordering::Acquire);
            if stored.is_err() {
                // SAFETY: no other thread has seen the pointer.
                drop(unsafe { Box::from_raw(own) });
            }
        }
    }
}

impl<T: Send + Sync + 'static> Default for PerProcess<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> fmt::Debug for PerProcess<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PerProcess").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn a_forked_child_gets_its_own_value_while_a_lock_of_the_parent_is_held() {
        static VALUE: PerProcess<Mutex<u32>> = PerProcess::new();
        let mut held = VALUE.value_or_create(Mutex::default).lock().unwrap();
        *held += 1;

        // SAFETY: the child takes a lock of its own, and ends without destructors of the process.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let is_new = VALUE.value_or_create(Mutex::default).try_lock().is_ok_and(|it| *it == 0);
            // SAFETY: it ends the process at once.
            unsafe { libc::_exit(i32::from(!is_new)) };
        }

        let mut status = 1;
        // SAFETY: the child belongs to this test, and the status outlives the call.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        drop(held);
        assert_eq!(*VALUE.value_or_create(Mutex::default).lock().unwrap(), 1);
    }
}
