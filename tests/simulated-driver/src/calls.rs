//! Exports the C symbols that CUDA and HIP have in common, from one table.
//!
//! A row holds a call's names, its arguments and its body. The body sees the API of the symbol as
//! `A`. Calls that only one vendor has, or that differ in more than their names, are in the same form
//! in [`cuda`](crate::cuda) and [`hip`](crate::hip).
//!
//! The types have the layout of both vendors. Handles are integers: they are looked up, never
//! followed.
//!
//! | type | CUDA | HIP |
//! | --- | --- | --- |
//! | `Address` | `CUdeviceptr` | `hipDeviceptr_t` |
//! | `Stream`, `Event` | `CUstream`, `CUevent` | `hipStream_t`, `hipEvent_t` |
//! | `Graph`, `GraphExec` | `CUgraph`, `CUgraphExec` | `hipGraph_t`, `hipGraphExec_t` |
//! | `Block` | `CUmemGenericAllocationHandle` | `hipMemGenericAllocationHandle_t` |
//! | `Handle` | `CUipcMemHandle` | `hipIpcMemHandle_t` |
//! | `Properties`, `Access` | `CUmemAllocationProp`, `CUmemAccessDesc` | `hipMemAllocationProp`, `hipMemAccessDesc` |
//! | `BatchedWord` | `CUstreamBatchMemOpParams` | `hipStreamBatchMemOpParams` |
//! | `c_int` for a device | `CUdevice` | `hipDevice_t` |
//! | `Status` | `CUresult` | `hipError_t` |

#![allow(non_snake_case, reason = "the vendors' names of the symbols")]

use std::ffi::{c_int, c_uchar, c_uint, c_ulonglong, c_void};

use crate::cuda::Cuda;
use crate::device::memory::capacity;
use crate::device::settings::{Setting, reaches};
use crate::device::words::Width;
use crate::hip::Hip;
use crate::runtime::code::{INVALID_DEVICE, INVALID_VALUE, UNKNOWN};
use crate::runtime::copy::{self, Said};
use crate::runtime::out::{Out, store, store_if};
use crate::runtime::vmm::{Access, Properties};
use crate::runtime::words::BatchedWord;
use crate::runtime::{Api, event, graph, memory, pointer, stream, vmm, words};

pub(crate) type Address = u64;
pub(crate) type Stream = usize;
pub(crate) type Event = usize;
pub(crate) type Graph = usize;
pub(crate) type GraphExec = usize;
pub(crate) type Block = u64;

/// Exports calls: `[API symbol, ...](arguments) => body;`.
macro_rules! calls {
    ($([$($api:ident $name:ident),+] $arguments:tt => $body:expr;)*) => {
        $($($crate::calls::export! { $api $name $arguments $body })+)*
    };
}
pub(crate) use calls;

/// Exports one call under one name.
macro_rules! export {
    ($api:ident $name:ident $arguments:tt $body:expr) => {
        #[unsafe(no_mangle)]
        extern "C" fn $name $arguments -> $crate::runtime::code::Status {
            type A = $api;
            <A as $crate::runtime::Api>::enter(stringify!($name), || $body)
        }
    };
}
pub(crate) use export;

calls! {
    // Devices.
    [Cuda cuDeviceGetCount, Hip hipGetDeviceCount](count: Out<'_, c_int>) =>
        store(count, c_int::try_from(A::visible()?.len()).map_err(|_| UNKNOWN)?);
    [Cuda cuDeviceGet, Hip hipDeviceGet](device: Out<'_, c_int>, ordinal: c_int) =>
        A::physical(ordinal).and_then(|_| store(device, ordinal));
    [Cuda cuDeviceGetAttribute, Hip hipDeviceGetAttribute]
    (value: Out<'_, c_int>, attribute: c_int, device: c_int) => {
        let number = A::attribute(A::physical(device)?, attribute)?;
        store(value, c_int::try_from(number).map_err(|_| UNKNOWN)?)
    };
    [Cuda cuDeviceCanAccessPeer, Hip hipDeviceCanAccessPeer]
    (can: Out<'_, c_int>, device: c_int, peer: c_int) => {
        let (device, peer) = (A::physical(device)?, A::physical(peer)?);
        store(can, c_int::from(device != peer && reaches(device, peer)))
    };
    [Cuda cuDeviceGetP2PAttribute, Hip hipDeviceGetP2PAttribute]
    (value: Out<'_, c_int>, attribute: c_int, from: c_int, to: c_int) => {
        let (from, to) = (A::physical(from)?, A::physical(to)?);
        if from == to {
            return Err(INVALID_DEVICE);
        }
        let number = match attribute.wrapping_sub(A::P2P_PERFORMANCE_RANK) {
            0 => Setting::PeerRank.value(),
            1 | 2 => u64::from(reaches(from, to)),
            3 => 0,
            _ => return Err(INVALID_VALUE),
        };
        store(value, c_int::try_from(number).map_err(|_| UNKNOWN)?)
    };

    // Streams.
    [Cuda cuStreamCreate, Hip hipStreamCreateWithFlags](out: Out<'_, Stream>, flags: c_uint) =>
        stream::create::<A>(out, flags);
    // Priorities have no effect here; real copy engines ignore them too.
    [Cuda cuStreamCreateWithPriority, Hip hipStreamCreateWithPriority]
    (out: Out<'_, Stream>, flags: c_uint, _priority: c_int) => stream::create::<A>(out, flags);
    [Cuda cuStreamQuery, Hip hipStreamQuery](handle: Stream) => stream::query::<A>(handle);
    [Cuda cuStreamSynchronize, Hip hipStreamSynchronize](handle: Stream) =>
        stream::synchronize::<A>(handle);
    [Cuda cuStreamWaitEvent, Hip hipStreamWaitEvent]
    (handle: Stream, event: Event, flags: c_uint) =>
        stream::wait_event::<A>(handle, event, flags);
    [Cuda cuStreamGetFlags, Hip hipStreamGetFlags](handle: Stream, out: Out<'_, c_uint>) =>
        stream::flags::<A>(handle, out);
    [Cuda cuStreamIsCapturing, Hip hipStreamIsCapturing](handle: Stream, out: Out<'_, c_int>) =>
        stream::is_capturing::<A>(handle, out);
    // The graph under capture and its nodes have no handles here; the call stores 0 for them.
    [Cuda cuStreamGetCaptureInfo_v2, Hip hipStreamGetCaptureInfo_v2](
        handle: Stream,
        status: Out<'_, c_int>,
        id: Out<'_, c_ulonglong>,
        graph: Out<'_, Graph>,
        dependencies: Out<'_, usize>,
        dependencies_count: Out<'_, usize>,
    ) => {
        stream::capture_info::<A>(handle, status, id)?;
        [graph, dependencies, dependencies_count].into_iter().try_for_each(|out| store_if(out, 0))
    };
    [Cuda cuThreadExchangeStreamCaptureMode, Hip hipThreadExchangeStreamCaptureMode]
    (number: Option<&mut c_int>) => stream::exchange(number);
    [Cuda cuLaunchHostFunc, Hip hipLaunchHostFunc]
    (handle: Stream, function: stream::HostFunction, data: *mut c_void) =>
        stream::call_host::<A>(handle, function, data);
    [Cuda cuCtxSynchronize, Hip hipDeviceSynchronize]() => stream::synchronize_all::<A>();

    // Events.
    [Cuda cuEventCreate, Hip hipEventCreateWithFlags](out: Out<'_, Event>, flags: c_uint) =>
        event::create::<A>(out, flags, A::EVENT_FLAGS);
    [Cuda cuEventDestroy_v2, Hip hipEventDestroy](event: Event) => event::destroy::<A>(event);
    [Cuda cuEventRecord, Hip hipEventRecord](event: Event, handle: Stream) =>
        event::record::<A>(event, handle);
    [Cuda cuEventQuery, Hip hipEventQuery](event: Event) => event::query::<A>(event);
    [Cuda cuEventSynchronize, Hip hipEventSynchronize](event: Event) =>
        event::synchronize::<A>(event);
    [Cuda cuEventElapsedTime, Cuda cuEventElapsedTime_v2, Hip hipEventElapsedTime]
    (out: Out<'_, f32>, start: Event, end: Event) => event::elapsed::<A>(out, start, end);

    // Captures and graphs.
    [Cuda cuStreamBeginCapture_v2, Hip hipStreamBeginCapture](handle: Stream, mode: c_int) =>
        graph::begin::<A>(handle, mode);
    [Cuda cuStreamEndCapture, Hip hipStreamEndCapture](handle: Stream, out: Out<'_, Graph>) =>
        graph::end::<A>(handle, out);
    [Cuda cuGraphInstantiateWithFlags, Hip hipGraphInstantiateWithFlags]
    (out: Out<'_, GraphExec>, graph: Graph, _flags: c_ulonglong) =>
        graph::instantiate::<A>(out, graph);
    [Cuda cuGraphLaunch, Hip hipGraphLaunch](program: GraphExec, handle: Stream) =>
        graph::launch::<A>(program, handle);
    [Cuda cuGraphUpload, Hip hipGraphUpload](program: GraphExec, handle: Stream) =>
        graph::upload::<A>(program, handle);
    [Cuda cuGraphGetNodes, Hip hipGraphGetNodes]
    (graph: Graph, _nodes: usize, count: Out<'_, usize>) => graph::count_nodes(graph, count);
    [Cuda cuGraphExecDestroy, Hip hipGraphExecDestroy](program: GraphExec) =>
        graph::destroy_program(program);
    [Cuda cuGraphDestroy, Hip hipGraphDestroy](graph: Graph) => graph::destroy(graph);

    // Memory.
    [Cuda cuMemGetInfo_v2, Hip hipMemGetInfo](free: Out<'_, usize>, total: Out<'_, usize>) =>
        memory::info::<A>(free, total);
    [Cuda cuMemHostAlloc, Hip hipHostMalloc]
    (address: Out<'_, *mut c_void>, bytes: usize, flags: c_uint) =>
        memory::allocate_host::<A>(address, bytes, flags, A::HOST_FLAGS);
    [Cuda cuMemHostRegister_v2, Hip hipHostRegister]
    (address: *mut c_void, bytes: usize, flags: c_uint) =>
        memory::register::<A>(address, bytes, flags, A::REGISTER_FLAGS);
    [Cuda cuMemHostUnregister, Hip hipHostUnregister](address: *mut c_void) =>
        memory::unregister::<A>(address);
    [Cuda cuMemHostGetDevicePointer_v2, Hip hipHostGetDevicePointer]
    (out: Out<'_, Address>, address: *mut c_void, flags: c_uint) =>
        memory::device_pointer::<A>(out, address, flags);
    [Cuda cuMemGetAddressRange_v2, Hip hipMemGetAddressRange]
    (base: Out<'_, Address>, bytes: Out<'_, usize>, address: Address) =>
        memory::range::<A>(base, bytes, address);
    [Cuda cuDeviceTotalMem_v2, Hip hipDeviceTotalMem](bytes: Out<'_, usize>, device: c_int) => {
        let (total, _) = capacity(A::physical(device)?);
        store(bytes, usize::try_from(total).map_err(|_| UNKNOWN)?)
    };

    // Virtual memory management.
    [Cuda cuMemGetAllocationGranularity, Hip hipMemGetAllocationGranularity]
    (out: Out<'_, usize>, prop: Option<&Properties>, option: c_int) =>
        vmm::granularity_of::<A>(out, prop, option);
    [Cuda cuMemRelease, Hip hipMemRelease](handle: Block) => vmm::release::<A>(handle);
    [Cuda cuMemAddressReserve, Hip hipMemAddressReserve](
        address: Out<'_, Address>,
        bytes: usize,
        alignment: usize,
        _hint: Address,
        flags: c_ulonglong,
    ) => vmm::reserve::<A>(address, bytes, alignment, flags);
    [Cuda cuMemAddressFree, Hip hipMemAddressFree](address: Address, bytes: usize) =>
        vmm::free::<A>(address, bytes);
    [Cuda cuMemMap, Hip hipMemMap]
    (address: Address, bytes: usize, offset: usize, handle: Block, flags: c_ulonglong) =>
        vmm::map::<A>(address, bytes, offset, handle, flags);
    [Cuda cuMemUnmap, Hip hipMemUnmap](address: Address, bytes: usize) =>
        vmm::unmap::<A>(address, bytes);
    [Cuda cuMemSetAccess, Hip hipMemSetAccess]
    (address: Address, bytes: usize, descriptions: *const Access, count: usize) =>
        vmm::set_access::<A>(address, bytes, descriptions, count);
    [Cuda cuMemExportToShareableHandle, Hip hipMemExportToShareableHandle]
    (out: *mut c_void, handle: Block, kind: c_int, flags: c_ulonglong) =>
        vmm::export::<A>(out, handle, kind, flags);
    [Cuda cuMemRetainAllocationHandle, Hip hipMemRetainAllocationHandle]
    (out: Out<'_, Block>, address: *mut c_void) => vmm::retain::<A>(out, address);
    [Cuda cuMemGetAllocationPropertiesFromHandle, Hip hipMemGetAllocationPropertiesFromHandle]
    (out: Out<'_, Properties>, handle: Block) => vmm::properties::<A>(out, handle);
    [Cuda cuMemGetHandleForAddressRange, Hip hipMemGetHandleForAddressRange]
    (out: *mut c_void, address: Address, bytes: usize, kind: c_int, flags: c_ulonglong) =>
        vmm::export_range::<A>(out, address, bytes, kind, flags);

    // Attributes of addresses.
    [Cuda cuPointerGetAttribute, Hip hipPointerGetAttribute]
    (out: *mut c_void, attribute: c_int, address: Address) =>
        pointer::attribute::<A>(out, attribute, address);

    // Copies and fills.
    [Cuda cuMemcpyDtoDAsync_v2, Hip hipMemcpyDtoDAsync]
    (dst: Address, src: Address, bytes: usize, handle: Stream) =>
        copy::copy::<A>(handle, (dst, Said::Device), (src, Said::Device), bytes);
    [Cuda cuMemsetD8Async, Hip hipMemsetD8Async]
    (address: Address, value: c_uchar, bytes: usize, handle: Stream) =>
        copy::fill::<A>(handle, address, value, bytes);

    // Memory operations of a stream.
    [Cuda cuStreamBatchMemOp_v2, Hip hipStreamBatchMemOp]
    (handle: Stream, count: c_uint, operations: *const BatchedWord, flags: c_uint) =>
        words::submit_batch::<A>(handle, count, operations, flags);
    [Cuda cuStreamWriteValue64_v2, Hip hipStreamWriteValue64]
    (handle: Stream, address: Address, value: u64, flags: c_uint) =>
        words::submit::<A>(handle, &[words::write(address, value, Width::Eight, flags)?]);
    [Cuda cuStreamWriteValue32_v2, Hip hipStreamWriteValue32]
    (handle: Stream, address: Address, value: u32, flags: c_uint) =>
        words::submit::<A>(handle, &[words::write(address, value.into(), Width::Four, flags)?]);
}
