//! Memory operations of a stream: words that it writes and waits for, alone or in a batch.

use std::ffi::c_uint;
use std::sync::Arc;

use super::call::enter;
use super::code::{CUresult, INVALID_VALUE, NOT_SUPPORTED, Outcome};
use super::handles::stream;
use super::types::{CUdeviceptr, CUstream, CUstreamBatchMemOpParams};
use crate::device::command::Command;
use crate::device::machine::memory;
use crate::device::queue::Queue;
use crate::device::settings::Setting;
use crate::device::words::{Compare, Width, Word};

/// `CU_STREAM_WAIT_VALUE_FLUSH`: arrival of remote writes; nothing to do in host memory.
const WAIT_FLUSH: c_uint = 1 << 30;

fn wait(address: CUdeviceptr, value: u64, width: Width, flags: c_uint) -> Outcome<Word> {
    let compare = match flags & !WAIT_FLUSH {
        0 => Compare::AtLeast,
        1 => Compare::Equal,
        2 => Compare::And,
        3 => Compare::Nor,
        _ => return Err(INVALID_VALUE),
    };
    Ok(Word { address, value, width, wait: Some(compare) })
}

/// Without the barrier a write may go ahead of what is before it; here it never does.
fn write(address: CUdeviceptr, value: u64, width: Width, flags: c_uint) -> Outcome<Word> {
    if flags > 1 {
        return Err(INVALID_VALUE);
    }
    Ok(Word { address, value, width, wait: None })
}

/// Checks what the vendor checks at the call; the rest is found when the word is reached.
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

fn submit(queue: &Queue, words: Vec<Word>) -> Outcome {
    words.iter().try_for_each(|word| check(word, queue))?;
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

#[unsafe(no_mangle)]
extern "C" fn cuStreamBatchMemOp_v2(
    handle: CUstream,
    count: c_uint,
    operations: *const CUstreamBatchMemOpParams,
    flags: c_uint,
) -> CUresult {
    enter("cuStreamBatchMemOp_v2", || {
        let queue = stream(handle)?;
        let fits = count > 0 && u64::from(count) <= Setting::BatchMax.value();
        if !fits || flags != 0 || operations.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller gives an array of this length.
        let operations = unsafe { std::slice::from_raw_parts(operations, count as usize) };
        let words = operations.iter().filter_map(|it| word(it).transpose());
        submit(&queue, words.collect::<Outcome<_>>()?)
    })
}

/// One operation of a batch, by the numbers of cuda.h; barriers do nothing.
fn word(operation: &CUstreamBatchMemOpParams) -> Outcome<Option<Word>> {
    let CUstreamBatchMemOpParams { operation, address, value, flags, .. } = *operation;
    let short = value & u64::from(u32::MAX);
    match operation {
        1 => wait(address, short, Width::Four, flags).map(Some),
        2 => write(address, short, Width::Four, flags).map(Some),
        4 => wait(address, value, Width::Eight, flags).map(Some),
        5 => write(address, value, Width::Eight, flags).map(Some),
        // Flush of remote writes; memory barrier.
        3 | 6 => Ok(None),
        _ => Err(INVALID_VALUE),
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWriteValue64_v2(
    handle: CUstream,
    address: CUdeviceptr,
    value: u64,
    flags: c_uint,
) -> CUresult {
    enter("cuStreamWriteValue64_v2", || {
        submit(&*stream(handle)?, vec![write(address, value, Width::Eight, flags)?])
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitValue64_v2(
    handle: CUstream,
    address: CUdeviceptr,
    value: u64,
    flags: c_uint,
) -> CUresult {
    enter("cuStreamWaitValue64_v2", || {
        submit(&*stream(handle)?, vec![wait(address, value, Width::Eight, flags)?])
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWriteValue32_v2(
    handle: CUstream,
    address: CUdeviceptr,
    value: u32,
    flags: c_uint,
) -> CUresult {
    enter("cuStreamWriteValue32_v2", || {
        submit(&*stream(handle)?, vec![write(address, value.into(), Width::Four, flags)?])
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitValue32_v2(
    handle: CUstream,
    address: CUdeviceptr,
    value: u32,
    flags: c_uint,
) -> CUresult {
    enter("cuStreamWaitValue32_v2", || {
        submit(&*stream(handle)?, vec![wait(address, value.into(), Width::Four, flags)?])
    })
}
