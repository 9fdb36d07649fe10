//! Exports the calls on memory and streams that only CUDA has, or that differ from HIP's.

use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};

use super::Cuda;
use crate::calls::{Address, Block, Stream, calls};
use crate::device::memory::share::name;
use crate::device::settings::Setting;
use crate::device::words::Width;
use crate::runtime::batch_copy::batch_copy;
use crate::runtime::code::INVALID_VALUE;
use crate::runtime::copy::{self, Rows, Said};
use crate::runtime::out::{Out, store};
use crate::runtime::share::Handle;
use crate::runtime::vmm::Properties;
use crate::runtime::{Api, handles, kernel, memory, primary, share, stream, vmm, words};

type Context = usize;

calls! {
    [Cuda cuMemAlloc_v2](address: Out<'_, Address>, bytes: usize) =>
        memory::allocate::<Cuda>(address, bytes);
    [Cuda cuMemFree_v2](address: Address) => memory::free::<Cuda>(address);
    [Cuda cuMemAllocAsync](address: Out<'_, Address>, bytes: usize, handle: Stream) =>
        memory::allocate_async::<Cuda>(address, bytes, handle);
    [Cuda cuMemFreeAsync](address: Address, handle: Stream) =>
        memory::free_async::<Cuda>(address, handle);
    [Cuda cuMemFreeHost](address: *mut c_void) => memory::free_host::<Cuda>(address);
    // Pools are simulated only for `cuMemAllocAsync`; each device has one.
    [Cuda cuDeviceGetDefaultMemPool](pool: Out<'_, usize>, device: c_int) =>
        store(pool, memory::pool_of(Cuda::physical(device)?));
    // NICs are not simulated, so a flush has no effect but its result.
    [Cuda cuFlushGPUDirectRDMAWrites](target: c_int, scope: c_int) => {
        Cuda::current()?;
        let known = target == 0 && matches!(scope, 100 | 200);
        if known && Setting::NicWrites.is("flush") { Ok(()) } else { Err(INVALID_VALUE) }
    };

    // Virtual memory management.
    [Cuda cuMemCreate](
        handle: Out<'_, Block>,
        bytes: usize,
        prop: Option<&Properties>,
        flags: c_ulonglong,
    ) => vmm::create::<Cuda>(handle, bytes, prop, flags);
    [Cuda cuMemImportFromShareableHandle](
        out: Out<'_, Block>,
        shared: *mut c_void,
        kind: c_int,
    ) => vmm::import::<Cuda>(out, shared, kind);

    // Plain allocations shared between processes, by a handle of 64 bytes.
    // The handle names the whole allocation, also for an address inside it.
    [Cuda cuIpcGetMemHandle](out: Out<'_, Handle>, address: Address) => {
        let range = share::shared::<Cuda>(address)?;
        store(out, Handle(name(&range.backing)))
    };
    [Cuda cuIpcOpenMemHandle_v2](address: Out<'_, Address>, handle: Handle, flags: c_uint) =>
        share::open::<Cuda>(address, &handle, flags, 0);
    [Cuda cuIpcCloseMemHandle](address: Address) => share::close::<Cuda>(|base| base == address);

    // Copies and fills.
    [Cuda cuMemcpyAsync](dst: Address, src: Address, bytes: usize, handle: Stream) =>
        copy::copy::<Cuda>(handle, (dst, Said::Either), (src, Said::Either), bytes);
    [Cuda cuMemcpyPeerAsync](
        dst: Address,
        _dst_context: Context,
        src: Address,
        _src_context: Context,
        bytes: usize,
        handle: Stream,
    ) => copy::copy::<Cuda>(handle, (dst, Said::Device), (src, Said::Device), bytes);
    [Cuda cuMemcpy2DAsync_v2](parameters: Option<&Rows>, handle: Stream) => {
        parameters.ok_or(INVALID_VALUE)?.copy::<Cuda>(handle)
    };
    [Cuda cuMemcpyHtoDAsync_v2](
        dst: Address,
        src: *const c_void,
        bytes: usize,
        handle: Stream,
    ) => copy::copy::<Cuda>(handle, (dst, Said::Device), (src as u64, Said::Host), bytes);
    [Cuda cuMemcpyDtoHAsync_v2](dst: *mut c_void, src: Address, bytes: usize, handle: Stream) =>
        copy::copy::<Cuda>(handle, (dst as u64, Said::Host), (src, Said::Device), bytes);
    [Cuda cuMemcpyHtoD_v2](dst: Address, src: *const c_void, bytes: usize) =>
        copy::copy_at_once::<Cuda>((dst, Said::Device), (src as u64, Said::Host), bytes);
    [Cuda cuMemcpyDtoH_v2](dst: *mut c_void, src: Address, bytes: usize) =>
        copy::copy_at_once::<Cuda>((dst as u64, Said::Host), (src, Said::Device), bytes);
    [Cuda cuMemcpyDtoD_v2](dst: Address, src: Address, bytes: usize) =>
        copy::copy_at_once::<Cuda>((dst, Said::Device), (src, Said::Device), bytes);
    [Cuda cuMemsetD8_v2](address: Address, value: c_uchar, bytes: usize) =>
        copy::fill_at_once::<Cuda>(address, value, bytes);
    [Cuda cuMemsetD32Async](address: Address, value: c_uint, count: usize, handle: Stream) =>
        copy::fill_words::<Cuda>(handle, address, value, count);

    // Kernels of reductions.
    [Cuda cuModuleLoadDataEx](
        module: Out<'_, usize>,
        text: *const c_char,
        count: c_uint,
        options: *const c_int,
        values: *const *mut c_void,
    ) => kernel::load::<Cuda>(module, text, (count, options, values));
    [Cuda cuModuleGetFunction](function: Out<'_, usize>, module: usize, name: *const c_char) =>
        kernel::function::<Cuda>(function, module, name);
    [Cuda cuLaunchKernel](
        function: usize,
        blocks: c_uint,
        _blocks_y: c_uint,
        _blocks_z: c_uint,
        threads: c_uint,
        _threads_y: c_uint,
        _threads_z: c_uint,
        _shared_bytes: c_uint,
        handle: Stream,
        parameters: *const *const c_void,
        _extra: *const c_void,
    ) => {
        // SAFETY: the caller gives the parameters of the function, and `kernel::function` hands out
        // only kernels of reductions.
        unsafe { kernel::launch::<Cuda>(function, [blocks, threads], handle, parameters) }
    };

    // Memory operations of a stream.
    [Cuda cuStreamWaitValue64_v2](
        handle: Stream,
        address: Address,
        value: u64,
        flags: c_uint,
    ) => {
        let word = words::wait(address, value, Width::Eight, flags & !words::WAIT_FLUSH)?;
        words::submit::<Cuda>(handle, &[word])
    };
    [Cuda cuStreamWaitValue32_v2](
        handle: Stream,
        address: Address,
        value: u32,
        flags: c_uint,
    ) => {
        let word = words::wait(address, value.into(), Width::Four, flags & !words::WAIT_FLUSH)?;
        words::submit::<Cuda>(handle, &[word])
    };

    // Streams.
    [Cuda cuStreamDestroy_v2](handle: Stream) => stream::destroy::<Cuda>(handle);
    [Cuda cuStreamGetCtx](handle: Stream, out: Out<'_, Context>) => {
        let queue = handles::stream::<Cuda>(handle)?;
        store(out, primary::handle_of(queue.session().device()))
    };
}

batch_copy!(cuMemcpyBatchAsync, Cuda, Cuda::enter, failed);
batch_copy!(cuMemcpyBatchAsync_v2, Cuda, Cuda::enter);
