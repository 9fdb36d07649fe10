//! Waits for single blocks of a start, and lets single blocks depart, on the host and on streams.

use std::ffi::c_void;
use std::ptr;

use peerlane::{BlockChunk, Error};
use peerlane_bindings::{AnyOperation, block_part};

use crate::operation::{OperationHandle, wait_into, with, with_stream};
use crate::status::{Failure, Status, call};
use crate::window::write;

/// The chunk that stands for all chunks of a block: `PEERLANE_ALL_CHUNKS`.
const ALL_CHUNKS: u32 = u32::MAX;

/// One chunk of a block: of the rank that it comes from in an arrival, and of the rank that it is
/// for in a departure.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Chunk {
    /// The rank that the block comes from or goes to.
    pub block: u32,
    /// The number of the chunk in its block, from 0.
    pub chunk: u32,
}

/// Starts the operation behind the work that a stream holds now, and beside what is enqueued later.
/// Collective.
///
/// The operation has `arrivals` or `departures`. Other streams wait for blocks by
/// `peerlane_operation_wait_block_on`, and blocks depart by `peerlane_operation_depart_on`. Then
/// `peerlane_operation_finish` has the later work of this stream follow the whole start.
///
/// `*output` is the device address of the output of this start; it may be NULL. While the stream is
/// captured, the start is recorded instead.
///
/// # Safety
/// `stream` is a stream of the device of this rank, but no default stream, and lives until the
/// operation has been started on another one or has been destroyed. `output` is NULL or points to
/// an address.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_operation_start_beside(
    operation: *mut OperationHandle,
    stream: *mut c_void,
    output: *mut *mut c_void,
) -> Status {
    call(|| {
        // SAFETY: this function has the same contract for the stream.
        let memory = unsafe { with_stream(operation, stream, AnyOperation::start_beside) }?;

        // SAFETY: the contract of this function says that `output` is NULL or points to an address.
        unsafe { write(&memory, output, ptr::null_mut()) };
        Ok(())
    })
}

/// Has later work on a stream follow the arrival of a block of the start beside a stream.
///
/// `block` is the rank that the block comes from, and `chunk` a chunk of it or
/// `PEERLANE_ALL_CHUNKS`. Several streams can wait for one block. If the group ends, the wait
/// passes, and the block is undefined; `peerlane_operation_check` tells.
///
/// # Safety
/// `stream` is a stream of the device of this rank, but no default stream, and lives until the
/// start is finished.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_operation_wait_block_on(
    operation: *mut OperationHandle,
    block: u32,
    chunk: u32,
    stream: *mut c_void,
) -> Status {
    let part = block_part(block, number_of(chunk));
    call(|| {
        // SAFETY: this function has the same contract for the stream.
        unsafe { with_stream(operation, stream, |it, stream| it.wait_block_on(part, stream)) }
    })
}

/// Lets the start beside a stream read a block of the input behind the work that `stream` holds
/// now.
///
/// `block` is the rank that the block is for, or this rank if all ranks get the same block, and
/// `chunk` a chunk of it or `PEERLANE_ALL_CHUNKS`.
///
/// # Safety
/// `stream` is a stream of the device of this rank, but no default stream, and lives until the
/// start is finished.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_operation_depart_on(
    operation: *mut OperationHandle,
    block: u32,
    chunk: u32,
    stream: *mut c_void,
) -> Status {
    let part = block_part(block, number_of(chunk));
    call(|| {
        // SAFETY: this function has the same contract for the stream.
        unsafe { with_stream(operation, stream, |it, stream| it.depart_on(part, stream)) }
    })
}

/// Finishes the start beside a stream: the later work of that stream follows the whole start, and
/// what the streams that waited for blocks hold now.
#[unsafe(no_mangle)]
pub extern "C" fn peerlane_operation_finish(operation: *mut OperationHandle) -> Status {
    call(|| with(operation, |operation| operation.finish()))
}

/// Waits on the host until a block of the open start has arrived, at most `limit_ms` milliseconds:
/// 0 does not wait, and a negative number waits up to the timeout of the operation.
///
/// `block` and `chunk` are those of `peerlane_operation_wait_block_on`. `*has_arrived` is whether
/// the block is there; it may be NULL if `limit_ms` is negative.
///
/// # Safety
/// `has_arrived` is NULL or points to a bool.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_operation_wait_block(
    operation: *mut OperationHandle,
    block: u32,
    chunk: u32,
    limit_ms: i64,
    has_arrived: *mut bool,
) -> Status {
    let part = block_part(block, number_of(chunk));
    let wait = |limit| with(operation, |operation| operation.wait_block(part, limit));
    // SAFETY: this function has the same contract for `has_arrived`.
    call(|| unsafe { wait_into(limit_ms, has_arrived, wait) })
}

/// Lets the open start of the host read a block of the input, which must not change any more.
///
/// `block` and `chunk` are those of `peerlane_operation_depart_on`.
#[unsafe(no_mangle)]
pub extern "C" fn peerlane_operation_depart(
    operation: *mut OperationHandle,
    block: u32,
    chunk: u32,
) -> Status {
    let part = block_part(block, number_of(chunk));
    call(|| with(operation, |operation| operation.depart(part)))
}

/// Writes the chunks of the output in the order in which they arrive, and their number to `*count`.
///
/// `chunks` has room for `*count` chunks before the call, or is NULL; no more are written. Without
/// `arrivals` there are none.
///
/// # Safety
/// `count` is NULL or points to a number, and `chunks` is NULL or has room for as many chunks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_operation_arrivals(
    operation: *mut OperationHandle,
    chunks: *mut Chunk,
    count: *mut usize,
) -> Status {
    // SAFETY: this function has the same contract.
    call(|| unsafe { order_into(operation, chunks, count, AnyOperation::arrivals) })
}

/// Writes the chunks of the input in the order in which starts read them, as
/// `peerlane_operation_arrivals`.
///
/// # Safety
/// `count` is NULL or points to a number, and `chunks` is NULL or has room for as many chunks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peerlane_operation_departures(
    operation: *mut OperationHandle,
    chunks: *mut Chunk,
    count: *mut usize,
) -> Status {
    // SAFETY: this function has the same contract.
    call(|| unsafe { order_into(operation, chunks, count, AnyOperation::departures) })
}

/// Writes an order of chunks to a list of a C program.
///
/// # Safety
/// `count` is NULL or valid for reads and writes, and `chunks` is NULL or valid for writes of as
/// many chunks.
unsafe fn order_into(
    operation: *mut OperationHandle,
    chunks: *mut Chunk,
    count: *mut usize,
    order: impl FnOnce(&mut AnyOperation) -> Result<&[BlockChunk], Error>,
) -> Result<(), Failure> {
    // SAFETY: the contract of this function says that it is NULL or valid.
    let count = unsafe { count.as_mut() };
    let count = count.ok_or_else(|| {
        Failure::argument("count is NULL, expected where to write the number of chunks")
    })?;

    let order = with(operation, |operation| order(operation).map(<[_]>::to_vec))?;
    let room = if chunks.is_null() { 0 } else { *count };
    for (index, BlockChunk { block, chunk }) in order.iter().take(room).enumerate() {
        let chunk = Chunk { block: block.0, chunk: *chunk };
        // SAFETY: the contract of this function says that there is room for `*count` chunks.
        unsafe { chunks.wrapping_add(index).write(chunk) };
    }
    *count = order.len();
    Ok(())
}

/// Returns the number of a chunk, or `None` for all chunks of the block.
fn number_of(chunk: u32) -> Option<u32> {
    (chunk != ALL_CHUNKS).then_some(chunk)
}
