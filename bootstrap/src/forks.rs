//! Closes the sockets of the bootstrap in forked children.
//!
//! A rank that dies is noticed because its kernel closes its connections. A child that was forked
//! has copies of all descriptors, so without this module it would keep the connections and the port
//! of a dead rank open.

use std::net::Shutdown;
use std::ops::Deref;
use std::os::fd::{AsRawFd, IntoRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, Ordering};

/// Owns a socket that forked children of this process do not keep open.
#[derive(Debug)]
pub(super) struct Uninherited<S> {
    // Dropped first: the number must be off the list before another descriptor can get it.
    _listed: Listed,
    socket: S,
}

impl<S: AsRawFd> Uninherited<S> {
    pub(super) fn new(socket: S) -> Self {
        Self { _listed: Listed::new(socket.as_raw_fd()), socket }
    }
}

impl<S> Deref for Uninherited<S> {
    type Target = S;

    fn deref(&self) -> &S {
        &self.socket
    }
}

/// Stores the number of forks that led to this process, so that an object can detect a fork.
///
/// The threads of an object that was created before the last fork do not exist in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Generation(u32);

impl Generation {
    pub(crate) fn now() -> Self {
        watch_forks();
        Self(FORKS.load(Ordering::Relaxed))
    }

    /// Returns whether this process was forked from the process that created this value.
    pub(crate) fn is_past(self) -> bool {
        self.0 != FORKS.load(Ordering::Relaxed)
    }
}

static FORKS: AtomicU32 = AtomicU32::new(0);

/// The first slot of the linked list of open sockets, which are closed in forked children.
///
/// The list only grows. A fork can happen while another thread changes the list, and the child must
/// not wait for a lock.
static LIST: AtomicPtr<Slot> = AtomicPtr::new(ptr::null_mut());

/// The descriptor of a shut-down socket, which replaces every listed socket in a forked child.
static CLOSED: AtomicI32 = AtomicI32::new(NONE);

const NONE: RawFd = -1;

/// Holds the descriptor of a listed socket, or [`NONE`] if the slot is free.
struct Slot {
    descriptor: AtomicI32,
    next: *const Slot,
}

impl Slot {
    /// Stores `descriptor` in the slot if the slot is free, and returns whether the slot was free.
    fn take(&self, descriptor: RawFd) -> bool {
        let taken =
            self.descriptor.compare_exchange(NONE, descriptor, Ordering::AcqRel, Ordering::Relaxed);
        taken.is_ok()
    }
}

/// Returns all slots of the list that begins at [`LIST`], free or taken.
fn slots() -> impl Iterator<Item = &'static Slot> {
    let mut next: *const Slot = LIST.load(Ordering::Acquire);

    std::iter::from_fn(move || {
        // SAFETY: the pointer is null or points to a slot of the list. Slots are never freed, and a
        // slot does not change once it is in the list, but for its atomic descriptor.
        let slot = unsafe { next.as_ref() }?;
        next = slot.next;
        Some(slot)
    })
}

/// Keeps the descriptor of a socket in [`LIST`] until the value is dropped.
#[derive(Debug)]
struct Listed(&'static AtomicI32);

impl Listed {
    fn new(descriptor: RawFd) -> Self {
        watch_forks();

        // A slot of a closed socket is used again, so the list has as many slots as there were
        // sockets at once.
        if let Some(slot) = slots().find(|slot| slot.take(descriptor)) {
            return Self(&slot.descriptor);
        }

        // The slot is complete before it is in the list, because a fork can happen at any time.
        let descriptor = AtomicI32::new(descriptor);
        let slot = Box::into_raw(Box::new(Slot { descriptor, next: ptr::null() }));
        let mut first = LIST.load(Ordering::Acquire);
        loop {
            // SAFETY: the slot is a box that is not in the list yet, so only this thread has it.
            unsafe { (*slot).next = first };
            match LIST.compare_exchange(first, slot, Ordering::AcqRel, Ordering::Acquire) {
                // SAFETY: slots are never freed, and the descriptor is atomic.
                Ok(_) => return Self(unsafe { &(*slot).descriptor }),
                Err(changed) => first = changed,
            }
        }
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        self.0.store(NONE, Ordering::Release);
    }
}

/// Registers, once per process, the function that runs in every forked child.
///
/// If that fails, the death of a rank is only noticed when its children have ended too.
fn watch_forks() {
    static ONCE: Once = Once::new();

    ONCE.call_once(|| {
        if let Ok((closed, _)) = UnixStream::pair()
            && closed.shutdown(Shutdown::Both).is_ok()
        {
            // Never closed, because a fork can happen as long as the process runs.
            CLOSED.store(closed.into_raw_fd(), Ordering::Relaxed);
        }

        // SAFETY: the handler only does what is permitted in a child of a process with threads: it
        // loads and changes atomic values, reads slots, which are never freed, and calls `dup3`.
        unsafe { libc::pthread_atfork(None, None, Some(enter_child)) };
    });
}

/// Replaces all listed sockets of a forked child by a shut-down socket, right after the fork.
extern "C" fn enter_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);

    let closed = CLOSED.load(Ordering::Relaxed);
    if closed == NONE {
        return;
    }

    for slot in slots() {
        let descriptor = slot.descriptor.load(Ordering::Acquire);
        if descriptor != NONE {
            // The number stays in use, so that the child cannot close another descriptor when it
            // drops the socket.
            //
            // SAFETY: the number is that of a listed socket, because it leaves the list before the
            // socket is closed. The child keeps it as a closed one.
            unsafe { libc::dup3(closed, descriptor, libc::O_CLOEXEC) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn a_forked_child_keeps_no_connection_open() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let kept = Uninherited::new(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
        let (mut other, _) = listener.accept().unwrap();
        let before = Generation::now();

        let (mut told, tell) = std::io::pipe().unwrap();
        // SAFETY: the child only calls functions that are permitted after a fork in a process with
        // threads.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let is_past = u8::from(before.is_past());
            // SAFETY: as above; the byte outlives the call.
            unsafe { libc::write(tell.as_raw_fd(), ptr::from_ref(&is_past).cast(), 1) };
            // SAFETY: as above.
            unsafe { libc::pause() };
        }
        let mut is_past = [0];
        told.read_exact(&mut is_past).unwrap();
        assert_eq!((is_past, before.is_past()), ([1], false));

        // The child lives, but only this process has the connection.
        drop(kept);
        let ended = other.read(&mut [0]);
        // SAFETY: the child is one of this process, which has not waited for it.
        unsafe { libc::kill(child, libc::SIGKILL) };
        // SAFETY: the status is not asked for.
        unsafe { libc::waitpid(child, ptr::null_mut(), 0) };
        assert_eq!(ended.unwrap(), 0);
    }

    #[test]
    fn slots_are_used_again() {
        let before = slots().count();
        for _ in 0..1000 {
            let (one, other) = UnixStream::pair().unwrap();
            drop((Uninherited::new(one), Uninherited::new(other)));
        }

        // Other tests of the process have sockets as well, a few hundred at most.
        let new = slots().count() - before;
        assert!(new < 1000, "2000 sockets have {new} new slots");
    }
}
