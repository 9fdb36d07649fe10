//! Identifies the thread on whose behalf calls are made.

use std::cell::Cell;

/// Identifies the thread on whose behalf calls are made.
///
/// A program that makes each call on a thread of its own, and waits for it, passes the identity of
/// the thread that waits. The calls then count as those of one thread when ranks compare the orders
/// of their calls, and the groups that they open share the threads that look after them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller(usize);

thread_local!(static CALLER: Cell<usize> = const { Cell::new(0) });

impl Caller {
    /// Returns the identity of this thread, or the one that it has [taken over](Self::take_over).
    pub fn current() -> Self {
        CALLER.with(|caller| match caller.get() {
            // Live threads have different addresses.
            0 => Self(std::ptr::from_ref(caller).addr()),
            entered => Self(entered),
        })
    }

    /// Returns the identity as an address, which is not 0.
    pub(super) fn address(self) -> usize {
        self.0
    }

    /// Makes the calls of this thread count as those of another one, until this thread ends.
    pub fn take_over(self) {
        CALLER.set(self.0);
    }
}
