//! Implements the memory operations of a stream: writes and waits for words, alone or in a batch.

use std::ffi::c_uint;
use std::sync::Arc;

use super::Api;
use super::code::{INVALID_VALUE, NOT_SUPPORTED, Outcome};
use super::handles::stream;
use crate::device::command::Command;
use crate::device::machine::memory;
use crate::device::queue::Queue;
use crate::device::settings::Setting;
use crate::device::words::{Compare, Width, Word};

/// `CU_STREAM_WAIT_VALUE_FLUSH`: waits for remote writes. It has no effect on host memory, and HIP
/// does not have it.
pub(crate) const WAIT_FLUSH: c_uint = 1 << 30;

/// One operation of a batch: the members that writes and waits share, in the layout of both
/// vendors.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct BatchedWord {
    operation: c_uint,
    address: u64,
    value: u64,
    flags: c_uint,
    alias: u64,
    rest: u64,
}

const _: () = assert!(size_of::<BatchedWord>() == 48);

pub(crate) fn wait(address: u64, value: u64, width: Width, flags: c_uint) -> Outcome<Word> {
    let compare = match flags {
        0 => Compare::AtLeast,
        1 => Compare::Equal,
        2 => Compare::And,
        3 => Compare::Nor,
        _ => return Err(INVALID_VALUE),
    };
    Ok(Word { address, value, width, mask: u64::MAX, wait: Some(compare) })
}

/// Returns a write. Without the barrier a write may overtake earlier commands; here it never does.
pub(crate) fn write(address: u64, value: u64, width: Width, flags: c_uint) -> Outcome<Word> {
    if flags > 1 {
        return Err(INVALID_VALUE);
    }
    Ok(Word { address, value, width, mask: u64::MAX, wait: None })
}

/// Checks what the vendors check at the call; other errors occur when the stream reaches the word.
fn check(word: &Word, queue: &Queue) -> Outcome {
    if word.width == Width::Eight && !Setting::LongWords.is_on() {
        return Err(NOT_SUPPORTED);
    }
    let range = memory().find(word.address).ok_or(INVALID_VALUE)?;
    let inside = word.address + word.width.bytes() <= range.end();
    let aligned = word.address.is_multiple_of(word.width.bytes());
    if !inside || !aligned || !range.is_reached_by(queue.session()) {
        return Err(INVALID_VALUE);
    }
    let foreign = word.wait.is_none() && range.is_foreign_to(queue.session());
    if foreign && Setting::PeerWrites.is("refuse") {
        return Err(NOT_SUPPORTED);
    }
    Ok(())
}

/// Submits words to a stream, in this order.
pub(crate) fn submit<A: Api>(handle: usize, words: &[Word]) -> Outcome {
    let queue = stream::<A>(handle)?;
    words.iter().try_for_each(|word| check(word, &queue))?;
    if queue.is_capturing() {
        if Setting::CapturedWords.is("refuse") {
            return Err(NOT_SUPPORTED);
        }
        if Setting::CapturedWords.is("drop") {
            return Ok(());
        }
        if Setting::CapturedWords.is("now") {
            let writes = words.iter().filter(|word| word.wait.is_none());
            for word in writes {
                word.run(queue.session(), memory())?;
            }
            return Ok(());
        }
    }
    Ok(queue.submit(Command::Words(Arc::from(words)))?)
}

/// Submits the `count` operations that `operations` points to, in the vendors' layout.
pub(crate) fn submit_batch<A: Api>(
    handle: usize,
    count: c_uint,
    operations: *const BatchedWord,
    flags: c_uint,
) -> Outcome {
    A::ready()?;
    let fits = count > 0 && u64::from(count) <= Setting::BatchMax.value();
    if !fits || flags != 0 || operations.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller gives an array of this length.
    let operations = unsafe { std::slice::from_raw_parts(operations, count as usize) };
    let words = operations.iter().filter_map(|it| word(it).transpose());
    submit::<A>(handle, &words.collect::<Outcome<Vec<Word>>>()?)
}

/// Converts one operation of a batch by the vendors' numbers; `None` for barriers, which have no
/// effect here.
fn word(operation: &BatchedWord) -> Outcome<Option<Word>> {
    let BatchedWord { operation, address, value, flags, .. } = *operation;
    let short = value & u64::from(u32::MAX);
    match operation {
        1 => wait(address, short, Width::Four, flags & !WAIT_FLUSH).map(Some),
        2 => write(address, short, Width::Four, flags).map(Some),
        4 => wait(address, value, Width::Eight, flags & !WAIT_FLUSH).map(Some),
        5 => write(address, value, Width::Eight, flags).map(Some),
        // Flush of remote writes; memory barrier.
        3 | 6 => Ok(None),
        _ => Err(INVALID_VALUE),
    }
}
