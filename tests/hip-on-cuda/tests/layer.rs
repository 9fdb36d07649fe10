//! Runs the calls of the ROCm backend, in their smallest form, through this library over the
//! simulated driver.

use std::ffi::{CStr, c_void};
use std::ptr::null_mut;

use hip_sys::*;
use support::{done, hip};

mod support;

/// Memory of the current device, filled with a byte.
fn filled(hip: &Library, bytes: usize, value: u8) -> *mut c_void {
    let mut memory = null_mut();
    // SAFETY: the result is stored in a local.
    done(unsafe { (hip.malloc)(&raw mut memory, bytes) });
    // SAFETY: the allocation is that long.
    done(unsafe { (hip.memset_d8_async)(memory, value, bytes, null_mut()) });
    // SAFETY: the default stream.
    done(unsafe { (hip.stream_synchronize)(null_mut()) });
    memory
}

fn read<const N: usize>(hip: &Library, from: *mut c_void) -> [u8; N] {
    let mut bytes = [0; N];
    let kind = hipMemcpyKind::hipMemcpyDeviceToHost;
    // SAFETY: both are that long.
    done(unsafe { (hip.memcpy)(bytes.as_mut_ptr().cast(), from, N, kind) });
    bytes
}

fn stream(hip: &Library) -> hipStream_t {
    let mut stream = null_mut();
    // SAFETY: the result is stored in a local.
    done(unsafe { (hip.stream_create_with_flags)(&raw mut stream, hipStreamNonBlocking) });
    stream
}

fn device(hip: &Library, device: i32) {
    // SAFETY: any number may be asked for.
    done(unsafe { (hip.set_device)(device) });
}

#[test]
fn the_table_is_whole_but_for_what_7_2_added() {
    let lacking: Vec<&str> =
        Library::SYMBOLS.iter().map(|it| it.name).filter(|name| !hip().has(name)).collect();
    assert_eq!(lacking, ["hipMemcpyBatchAsync", "hipMemGetHandleForAddressRange"]);
}

#[test]
fn devices_and_results_have_names() {
    let hip = hip();
    let (mut count, mut version) = (0, 0);
    // SAFETY: it takes flags, which must be 0.
    done(unsafe { (hip.init)(0) });
    // SAFETY: the result is stored in a local.
    done(unsafe { (hip.get_device_count)(&raw mut count) });
    // SAFETY: as above.
    done(unsafe { (hip.runtime_get_version)(&raw mut version) });
    assert_eq!((count, version), (4, 70_200_000));
    // SAFETY: any number may be asked for.
    let refused = unsafe { (hip.set_device)(99) };
    assert_eq!(refused, hipError_t::hipErrorInvalidDevice);
    // SAFETY: it takes nothing.
    assert_eq!(unsafe { (hip.get_last_error)() }, refused);
    for (code, name) in [(101, c"hipErrorInvalidDevice"), (4242, c"hipErrorUnknown")] {
        // SAFETY: any number may be asked for.
        let text = unsafe { (hip.get_error_name)(hipError_t(code)) };
        // SAFETY: a static string.
        assert_eq!(unsafe { CStr::from_ptr(text) }, name);
    }
}

#[test]
fn bytes_go_to_a_peer_behind_an_event() {
    let hip = hip();
    device(hip, 1);
    let to = filled(hip, 64, 0);
    device(hip, 0);
    // SAFETY: any number may be asked for; it may be on already.
    let enabled = unsafe { (hip.device_enable_peer_access)(1, 0) };
    assert!(
        [hipError_t::hipSuccess, hipError_t::hipErrorPeerAccessAlreadyEnabled].contains(&enabled)
    );
    let from = filled(hip, 64, 7);
    let (one, other) = (stream(hip), stream(hip));
    let mut event = null_mut();
    // SAFETY: the result is stored in a local.
    done(unsafe { (hip.event_create_with_flags)(&raw mut event, hipEventDisableTiming) });
    // SAFETY: both spans are that long, and live until the end of the test.
    done(unsafe { (hip.memcpy_peer_async)(to, 1, from, 0, 64, one) });
    // SAFETY: both live.
    done(unsafe { (hip.event_record)(event, one) });
    // SAFETY: both live.
    done(unsafe { (hip.stream_wait_event)(other, event, 0) });
    // SAFETY: it lives.
    done(unsafe { (hip.stream_synchronize)(other) });
    assert_eq!(read(hip, to), [7; 64]);

    let mut owner = -1;
    // SAFETY: the stream lives; the result is stored in a local.
    done(unsafe { (hip.stream_get_device)(one, &raw mut owner) });
    assert_eq!(owner, 0);
}

#[test]
fn a_stream_waits_for_a_word_that_another_writes() {
    let hip = hip();
    device(hip, 0);
    let word = filled(hip, 8, 0);
    let (waits, writes) = (stream(hip), stream(hip));
    let wait = hip.stream_wait_value_64;
    // SAFETY: the word lives until the end of the test.
    done(unsafe { wait(waits, word, 5, hipStreamWaitValueGte, u64::MAX) });
    // SAFETY: the stream lives.
    assert_eq!(unsafe { (hip.stream_query)(waits) }, hipError_t::hipErrorNotReady);
    // SAFETY: as above.
    done(unsafe { (hip.stream_write_value_64)(writes, word, 6, 0) });
    // SAFETY: it lives.
    done(unsafe { (hip.stream_synchronize)(waits) });
    assert_eq!(read(hip, word), 6_u64.to_le_bytes());
    // SAFETY: it is refused.
    let masked = unsafe { wait(waits, word, 5, hipStreamWaitValueGte, 1) };
    assert_eq!(masked, hipError_t::hipErrorInvalidValue);
}

#[test]
fn memory_leaves_as_a_descriptor_and_comes_back() {
    let hip = hip();
    device(hip, 0);
    let fd_kind = hipMemAllocationHandleType::hipMemHandleTypePosixFileDescriptor;
    let properties = hipMemAllocationProp {
        type_: hipMemAllocationType::hipMemAllocationTypePinned,
        location: hipMemLocation { type_: hipMemLocationType::hipMemLocationTypeDevice, id: 0 },
        __bindgen_anon_1: hipMemAllocationProp__bindgen_ty_1 { requestedHandleTypes: fd_kind },
        ..hipMemAllocationProp::default()
    };
    let mut bytes = 0;
    let least = hipMemAllocationGranularity_flags::hipMemAllocationGranularityMinimum;
    let ask = hip.mem_get_allocation_granularity;
    // SAFETY: the properties and the result are locals.
    done(unsafe { ask(&raw mut bytes, &raw const properties, least) });
    let mut handle = null_mut();
    // SAFETY: as above.
    done(unsafe { (hip.mem_create)(&raw mut handle, bytes, &raw const properties, 0) });
    let mut fd = -1_i32;
    let export = hip.mem_export_to_shareable_handle;
    // SAFETY: the result is as wide as a descriptor.
    done(unsafe { export((&raw mut fd).cast(), handle, fd_kind, 0) });
    let mut imported = null_mut();
    let import = hip.mem_import_from_shareable_handle;
    // SAFETY: the descriptor is open, and given by its number.
    done(unsafe { import(&raw mut imported, fd as usize as *mut c_void, fd_kind) });

    let mapped = [handle, imported].map(|handle| {
        let mut place = null_mut();
        // SAFETY: the result is stored in a local.
        done(unsafe { (hip.mem_address_reserve)(&raw mut place, bytes, 0, null_mut(), 0) });
        // SAFETY: the span is reserved, and the handle is held.
        done(unsafe { (hip.mem_map)(place, bytes, 0, handle, 0) });
        let access = hipMemAccessDesc {
            location: properties.location,
            flags: hipMemAccessFlags::hipMemAccessFlagsProtReadWrite,
        };
        // SAFETY: the span is one mapping.
        done(unsafe { (hip.mem_set_access)(place, bytes, &raw const access, 1) });
        place
    });
    // SAFETY: the mapping is that long.
    done(unsafe { (hip.memset_d8_async)(mapped[0], 9, bytes, null_mut()) });
    // SAFETY: the default stream.
    done(unsafe { (hip.stream_synchronize)(null_mut()) });
    assert_eq!(read(hip, mapped[1]), [9; 32]);
    let mut found = hipMemAllocationProp::default();
    let ask = hip.mem_get_allocation_properties_from_handle;
    // SAFETY: the handle is held; the result is stored in a local.
    done(unsafe { ask(&raw mut found, imported) });
    assert_eq!(found.location, properties.location);
}

#[test]
fn a_copy_is_recorded_and_replayed() {
    let hip = hip();
    device(hip, 0);
    let (from, to) = (filled(hip, 16, 3), filled(hip, 16, 0));
    let recorder = stream(hip);
    let mode = hipStreamCaptureMode::hipStreamCaptureModeThreadLocal;
    // SAFETY: the stream lives.
    done(unsafe { (hip.stream_begin_capture)(recorder, mode) });
    let kind = hipMemcpyKind::hipMemcpyDeviceToDeviceNoCU;
    // SAFETY: both spans live until the end of the test.
    done(unsafe { (hip.memcpy_async)(to, from, 16, kind, recorder) });
    let (mut graph, mut exec) = (null_mut(), null_mut());
    // SAFETY: the result is stored in a local.
    done(unsafe { (hip.stream_end_capture)(recorder, &raw mut graph) });
    assert_eq!(read(hip, to), [0; 16]);
    // SAFETY: as above.
    done(unsafe { (hip.graph_instantiate_with_flags)(&raw mut exec, graph, 0) });
    // SAFETY: both live.
    done(unsafe { (hip.graph_launch)(exec, recorder) });
    // SAFETY: it lives.
    done(unsafe { (hip.stream_synchronize)(recorder) });
    assert_eq!(read(hip, to), [3; 16]);
}

#[test]
fn an_address_tells_its_allocation() {
    let hip = hip();
    device(hip, 2);
    let memory = filled(hip, 4096, 1);
    let inside = memory.wrapping_byte_add(100);
    let (mut base, mut bytes) = (null_mut(), 0);
    // SAFETY: the results are stored in locals.
    done(unsafe { (hip.mem_get_address_range)(&raw mut base, &raw mut bytes, inside) });
    assert_eq!((base, bytes), (memory, 4096));
    let mut found = hipPointerAttribute_t::default();
    // SAFETY: the result is stored in a local.
    done(unsafe { (hip.pointer_get_attributes)(&raw mut found, inside) });
    assert_eq!((found.type_, found.device), (hipMemoryType::hipMemoryTypeDevice, 2));
    let mut handle = hipIpcMemHandle_t::default();
    // SAFETY: the result is stored in a local.
    done(unsafe { (hip.ipc_get_mem_handle)(&raw mut handle, memory) });
}
