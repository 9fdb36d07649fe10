//! Exports the calls on streams that only HIP has, or that differ from CUDA's.

use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong};

use super::Hip;
use crate::calls::{Address, Graph, GraphExec, Stream, calls};
use crate::device::counters::Counter;
use crate::device::machine;
use crate::device::memory::Kind;
use crate::device::settings::Setting;
use crate::device::words::{Width, Word};
use crate::runtime::batch_copy::batch_copy;
use crate::runtime::code::{INVALID_DEVICE, INVALID_VALUE, NOT_SUPPORTED, Outcome};
use crate::runtime::copy::{self, Said};
use crate::runtime::out::{Out, store, store_if};
use crate::runtime::{Api, graph, handles, stream, words};

calls! {
    [Hip hipDeviceGetStreamPriorityRange](least: Out<'_, c_int>, greatest: Out<'_, c_int>) => {
        Hip::ready()?;
        store_if(least, 1)?;
        store_if(greatest, -1)
    };
    [Hip hipStreamDestroy](handle: Stream) =>
        match Setting::FreeWaits.is_on() {
            true => stream::drain_and_destroy::<Hip>(handle),
            false => stream::destroy::<Hip>(handle),
        };
    [Hip hipStreamGetDevice](handle: Stream, out: Out<'_, c_int>) => {
        let physical = handles::stream::<Hip>(handle)?.session().device();
        store(out, Hip::ordinal(physical).ok_or(INVALID_DEVICE)?)
    };
    [Hip hipStreamGetCaptureInfo](
        handle: Stream,
        status: Out<'_, c_int>,
        id: Out<'_, c_ulonglong>,
    ) => stream::capture_info::<Hip>(handle, status, id);
    [Hip hipGraphInstantiate](
        out: Out<'_, GraphExec>,
        graph: Graph,
        _failed: usize,
        _log: *mut c_char,
        _log_bytes: usize,
    ) => graph::instantiate::<Hip>(out, graph);
}

/// `hipMemcpyDeviceToDeviceNoCU`: copies by engines, not by compute units.
const DEVICE_TO_DEVICE_NO_CU: c_int = 1024;

/// Returns what the kind of a copy says about its destination and its source.
fn said(kind: c_int) -> Outcome<(Said, Said)> {
    match kind {
        // The runtime trusts its table of addresses more than the caller.
        0..=2 | 4 => Ok((Said::Either, Said::Either)),
        3 | DEVICE_TO_DEVICE_NO_CU => Ok((Said::Device, Said::Device)),
        _ => Err(INVALID_VALUE),
    }
}

fn copy(dst: u64, src: u64, bytes: usize, kind: c_int, handle: Stream) -> Outcome {
    let (dst_said, src_said) = said(kind)?;
    if kind == DEVICE_TO_DEVICE_NO_CU {
        let queue = handles::stream::<Hip>(handle)?;
        Counter::NoCuCopies.add(queue.session().device(), 1);
        if Setting::NoCu.is("drop") {
            return Ok(());
        }
        if Setting::NoCu.is("refuse") {
            return Err(NOT_SUPPORTED);
        }
        return copy::copy_by_one_engine::<Hip>(handle, (dst, dst_said), (src, src_said), bytes);
    }
    copy::copy::<Hip>(handle, (dst, dst_said), (src, src_said), bytes)
}

calls! {
    [Hip hipMemcpyAsync](
        dst: Address,
        src: Address,
        bytes: usize,
        kind: c_int,
        handle: Stream,
    ) => copy(dst, src, bytes, kind, handle);
    [Hip hipMemcpy](dst: Address, src: Address, bytes: usize, kind: c_int) => {
        let (dst_said, src_said) = said(kind)?;
        copy::copy_at_once::<Hip>((dst, dst_said), (src, src_said), bytes)
    };
    [Hip hipMemcpyPeerAsync](
        dst: Address,
        dst_device: c_int,
        src: Address,
        src_device: c_int,
        bytes: usize,
        handle: Stream,
    ) => {
        Hip::physical(dst_device)?;
        Hip::physical(src_device)?;
        copy::copy::<Hip>(handle, (dst, Said::Device), (src, Said::Device), bytes)
    };
    [Hip hipMemsetAsync](address: Address, value: c_int, bytes: usize, handle: Stream) =>
        copy::fill::<Hip>(handle, address, value as c_uchar, bytes);
    [Hip hipMemset](address: Address, value: c_int, bytes: usize) =>
        copy::fill_at_once::<Hip>(address, value as c_uchar, bytes);
}

batch_copy!(hipMemcpyBatchAsync, Hip, Hip::enter, failed);

/// Returns a wait for the bits of a mask. If the machine is strict, the word must be in signal
/// memory.
fn wait(address: u64, value: u64, width: Width, flags: c_uint, mask: u64) -> Outcome<Word> {
    let signal = || {
        let range = machine::memory().find(address);
        range.is_some_and(|range| matches!(range.kind, Kind::Signal { .. }))
    };
    if Setting::WaitMemory.is("signal") && !signal() {
        return Err(INVALID_VALUE);
    }
    Ok(Word { mask, ..words::wait(address, value, width, flags)? })
}

calls! {
    [Hip hipStreamWaitValue64](
        handle: Stream,
        address: Address,
        value: u64,
        flags: c_uint,
        mask: u64,
    ) => words::submit::<Hip>(handle, &[wait(address, value, Width::Eight, flags, mask)?]);
    [Hip hipStreamWaitValue32](
        handle: Stream,
        address: Address,
        value: u32,
        flags: c_uint,
        mask: u32,
    ) => words::submit::<Hip>(handle, &[wait(address, value.into(), Width::Four, flags, mask.into())?]);
}
