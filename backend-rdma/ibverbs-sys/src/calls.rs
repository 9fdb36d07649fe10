//! Implements the inline functions of `verbs.h`, which call the provider through function pointers in the
//! context. As in the header, an error is an `errno` value that is returned; the variable `errno` is not set.

use std::ffi::c_int;

use crate::objects::*;
use crate::table::Library;

const EOPNOTSUPP: c_int = 95;

/// Returns the table of provider functions in an open `ibv_context`.
///
/// # Safety
/// The context is open for as long as the result is used.
#[inline]
unsafe fn operations<'a>(context: *mut ibv_context) -> &'a ibv_context_ops {
    // SAFETY: the caller's; nobody changes the operations of an open context.
    unsafe { &(*context).ops }
}

/// Posts a chain of work requests to a send queue. On an error, `bad` points to the first request that was
/// not posted.
///
/// # Safety
/// The queue pair is alive; the chain and what it points to are valid for the call, and the memory that
/// it names is registered until the requests complete.
#[inline]
pub unsafe fn post_send(
    qp: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: the queue pair is alive, and its context as long as it is.
    let context = unsafe { (*qp).context };
    // SAFETY: as above.
    let post = unsafe { operations(context) }.post_send;
    // SAFETY: the caller's.
    post.map_or(EOPNOTSUPP, |post| unsafe { post(qp, wr, bad) })
}

/// Posts a chain of work requests to the receive queue of a queue pair.
///
/// # Safety
/// As [`post_send`].
#[inline]
pub unsafe fn post_recv(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the queue pair is alive, and its context as long as it is.
    let context = unsafe { (*qp).context };
    // SAFETY: as above.
    let post = unsafe { operations(context) }.post_recv;
    // SAFETY: the caller's.
    post.map_or(EOPNOTSUPP, |post| unsafe { post(qp, wr, bad) })
}

/// Posts a chain of work requests to a shared receive queue.
///
/// # Safety
/// As [`post_send`].
#[inline]
pub unsafe fn post_srq_recv(
    srq: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the queue is alive, and its context as long as it is.
    let context = unsafe { (*srq).context };
    // SAFETY: as above.
    let post = unsafe { operations(context) }.post_srq_recv;
    // SAFETY: the caller's.
    post.map_or(EOPNOTSUPP, |post| unsafe { post(srq, wr, bad) })
}

/// Polls a completion queue and returns the number of completions taken, at most `count`, or a negative error
/// code.
///
/// # Safety
/// The queue is alive, and `wc` has room for `count`.
#[inline]
pub unsafe fn poll_cq(cq: *mut ibv_cq, count: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: the queue is alive, and its context as long as it is.
    let context = unsafe { (*cq).context };
    // SAFETY: as above.
    let poll = unsafe { operations(context) }.poll_cq;
    // SAFETY: the caller's.
    poll.map_or(-EOPNOTSUPP, |poll| unsafe { poll(cq, count, wc) })
}

/// Requests an event when the next completion enters the completion queue.
///
/// # Safety
/// The queue is alive.
#[inline]
pub unsafe fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: the queue is alive, and its context as long as it is.
    let context = unsafe { (*cq).context };
    // SAFETY: as above.
    let ask = unsafe { operations(context) }.req_notify_cq;
    // SAFETY: the caller's.
    ask.map_or(EOPNOTSUPP, |ask| unsafe { ask(cq, solicited_only) })
}

/// Reads one entry of a port's GID table, with the entry's type. Returns `None` if the library has no
/// `ibv_query_gid_ex`, otherwise the result of that function: 0, or an `errno` such as `ENODATA` (61) for an
/// empty entry.
///
/// # Safety
/// The context is alive and has the port.
pub unsafe fn query_gid_entry(
    library: &Library,
    context: *mut ibv_context,
    port: u32,
    index: u32,
    entry: &mut ibv_gid_entry,
) -> Option<c_int> {
    let query = library.query_gid_ex?;
    // SAFETY: the caller's; the entry is as long as it says.
    Some(unsafe { query(context, port, index, entry, 0, size_of::<ibv_gid_entry>()) })
}
