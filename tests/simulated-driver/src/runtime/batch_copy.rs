//! Implements several copies in one call, for every form of the call.
//!
//! The vendor promises no order inside such a call. Here the last copy runs first, which exposes
//! callers that rely on an order.

use std::ffi::{c_int, c_uint};

use super::Api;
use super::code::{INVALID_VALUE, Outcome, STREAM_CAPTURE_UNSUPPORTED};
use super::copy::{Said, copy_on};
use super::handles::{STREAM_PER_THREAD, stream};

/// The valid orders of access to sources.
const ACCESS_ORDERS: std::ops::RangeInclusive<c_int> = 1..=3;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attributes {
    src_access_order: c_int,
    /// Kind and ordinal.
    src_location_hint: [c_int; 2],
    dst_location_hint: [c_int; 2],
    flags: c_uint,
}

/// Exports one form of the call: its name, its API, what its calls enter by, and the name of its
/// argument for the failed copy, if it has one.
macro_rules! batch_copy {
    ($name:ident, $api:ty, $enter:path $(, $failed:ident)?) => {
        #[unsafe(no_mangle)]
        extern "C" fn $name(
            to: *mut u64,
            from: *mut u64,
            bytes: *mut usize,
            count: usize,
            attributes: *mut $crate::runtime::batch_copy::Attributes,
            firsts: *mut usize,
            attributes_count: usize,
            $($failed: *mut usize,)?
            handle: usize,
        ) -> $crate::runtime::code::Status {
            $enter(stringify!($name), || {
                $crate::runtime::batch_copy::run::<$api>(&$crate::runtime::batch_copy::Call {
                    to,
                    from,
                    bytes,
                    count,
                    attributes,
                    firsts,
                    attributes_count,
                    failed: None$(.or(Some($failed)))?,
                    handle,
                })
            })
        }
    };
}

pub(crate) use batch_copy;

/// The arguments of every form.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) to: *const u64,
    pub(crate) from: *const u64,
    pub(crate) bytes: *const usize,
    pub(crate) count: usize,
    pub(crate) attributes: *const Attributes,
    pub(crate) firsts: *const usize,
    pub(crate) attributes_count: usize,
    /// Receives the number of the failed copy, which is unknown here; may be null.
    pub(crate) failed: Option<*mut usize>,
    pub(crate) handle: usize,
}

/// # Safety
/// `array` is null or holds `count` values.
unsafe fn values<'a, T>(array: *const T, count: usize) -> Outcome<&'a [T]> {
    if array.is_null() || count == 0 {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller's.
    Ok(unsafe { std::slice::from_raw_parts(array, count) })
}

pub(crate) fn run<A: Api>(call: &Call) -> Outcome {
    let called = submit::<A>(call);
    if let Some(failed) = call.failed.filter(|failed| called.is_err() && !failed.is_null()) {
        // SAFETY: the caller gives the place of a number.
        unsafe { failed.write(usize::MAX) };
    }
    called
}

fn submit<A: Api>(call: &Call) -> Outcome {
    let &Call { count, attributes_count, handle, .. } = call;
    if handle <= STREAM_PER_THREAD {
        return Err(INVALID_VALUE);
    }
    let queue = stream::<A>(handle)?;
    // SAFETY: the caller gives arrays of these lengths.
    let to = unsafe { values(call.to, count) }?;
    // SAFETY: as above.
    let from = unsafe { values(call.from, count) }?;
    // SAFETY: as above.
    let bytes = unsafe { values(call.bytes, count) }?;
    // SAFETY: as above.
    let attributes = unsafe { values(call.attributes, attributes_count) }?;
    // SAFETY: as above.
    let firsts = unsafe { values(call.firsts, attributes_count) }?;
    let ordered = attributes.iter().all(|one| ACCESS_ORDERS.contains(&one.src_access_order));
    let rising = firsts.is_sorted_by(|one, next| one < next);
    if !ordered || !rising || firsts[0] != 0 || firsts[firsts.len() - 1] >= count {
        return Err(INVALID_VALUE);
    }
    if bytes.contains(&0) {
        return Err(INVALID_VALUE);
    }
    if queue.is_capturing() {
        return Err(STREAM_CAPTURE_UNSUPPORTED);
    }
    (0..count).rev().try_for_each(|index| {
        copy_on(&queue, (to[index], Said::Either), (from[index], Said::Either), bytes[index], false)
    })
}
