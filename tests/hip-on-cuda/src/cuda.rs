//! Declares the called functions of the CUDA driver, as cuda.h does.

#![allow(non_camel_case_types, reason = "cuda.h's own names")]

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use libloading::Library;

/// 0, or why not; no `enum`, because the driver may be newer than this.
pub(crate) type CUresult = c_int;
pub(crate) type CUdevice = c_int;
pub(crate) type CUdeviceptr = u64;
pub(crate) type CUcontext = *mut c_void;
type CUstream = *mut c_void;
type CUevent = *mut c_void;
type CUgraph = *mut c_void;
type CUgraphExec = *mut c_void;
type CUhandle = u64;

macro_rules! table {
    ($($name:ident $(as $symbol:literal)? ($($argument:ty),*);)*) => {
        /// The driver.
        pub(crate) struct Cuda {
            $(pub(crate) $name: unsafe extern "C" fn($($argument),*) -> CUresult,)*
            /// Never closed, because the driver has threads of its own.
            _library: Library,
        }

        impl Cuda {
            fn load(library: Library) -> Option<Self> {
                $(
                    let name = [$($symbol,)? stringify!($name)][0];
                    // SAFETY: the type is the declaration of this symbol in cuda.h.
                    let $name = unsafe {
                        library.get::<unsafe extern "C" fn($($argument),*) -> CUresult>(name)
                    };
                    let Ok($name) = $name.map(|it| *it) else {
                        eprintln!("hip-on-cuda: libcuda.so.1 has no {name}");
                        return None;
                    };
                )*
                Some(Self { $($name,)* _library: library })
            }
        }
    };
}

table! {
    cuInit(c_uint);
    cuGetErrorString(CUresult, *mut *const c_char);
    cuDeviceGetCount(*mut c_int);
    cuDeviceGetName(*mut c_char, c_int, CUdevice);
    cuDeviceGetUuid as "cuDeviceGetUuid_v2" (*mut c_void, CUdevice);
    cuDeviceTotalMem as "cuDeviceTotalMem_v2" (*mut usize, CUdevice);
    cuDeviceGetAttribute(*mut c_int, c_int, CUdevice);
    cuDeviceGetPCIBusId(*mut c_char, c_int, CUdevice);
    cuDeviceCanAccessPeer(*mut c_int, CUdevice, CUdevice);
    cuDeviceGetP2PAttribute(*mut c_int, c_int, CUdevice, CUdevice);
    cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice);
    cuCtxGetCurrent(*mut CUcontext);
    cuCtxSetCurrent(CUcontext);
    cuCtxEnablePeerAccess(CUcontext, c_uint);
    cuCtxGetStreamPriorityRange(*mut c_int, *mut c_int);
    cuMemAlloc as "cuMemAlloc_v2" (*mut CUdeviceptr, usize);
    cuMemFree as "cuMemFree_v2" (CUdeviceptr);
    cuMemGetInfo as "cuMemGetInfo_v2" (*mut usize, *mut usize);
    cuMemGetAddressRange as "cuMemGetAddressRange_v2" (*mut CUdeviceptr, *mut usize, CUdeviceptr);
    cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
    cuMemFreeHost(*mut c_void);
    cuMemHostRegister as "cuMemHostRegister_v2" (*mut c_void, usize, c_uint);
    cuMemHostUnregister(*mut c_void);
    cuMemHostGetDevicePointer as "cuMemHostGetDevicePointer_v2" (*mut CUdeviceptr, *mut c_void, c_uint);
    cuPointerGetAttribute(*mut c_void, c_int, CUdeviceptr);
    cuMemsetD8Async(CUdeviceptr, u8, usize, CUstream);
    cuMemcpyAsync(CUdeviceptr, CUdeviceptr, usize, CUstream);
    cuIpcGetMemHandle(*mut [c_char; 64], CUdeviceptr);
    cuIpcOpenMemHandle as "cuIpcOpenMemHandle_v2" (*mut CUdeviceptr, [c_char; 64], c_uint);
    cuIpcCloseMemHandle(CUdeviceptr);
    cuMemCreate(*mut CUhandle, usize, *const c_void, u64);
    cuMemRelease(CUhandle);
    cuMemAddressReserve(*mut CUdeviceptr, usize, usize, CUdeviceptr, u64);
    cuMemAddressFree(CUdeviceptr, usize);
    cuMemMap(CUdeviceptr, usize, usize, CUhandle, u64);
    cuMemUnmap(CUdeviceptr, usize);
    cuMemSetAccess(CUdeviceptr, usize, *const c_void, usize);
    cuMemGetAllocationGranularity(*mut usize, *const c_void, c_uint);
    cuMemExportToShareableHandle(*mut c_void, CUhandle, c_uint, u64);
    cuMemImportFromShareableHandle(*mut CUhandle, *mut c_void, c_uint);
    cuMemRetainAllocationHandle(*mut CUhandle, *mut c_void);
    cuMemGetAllocationPropertiesFromHandle(*mut c_void, CUhandle);
    cuStreamCreate(*mut CUstream, c_uint);
    cuStreamCreateWithPriority(*mut CUstream, c_uint, c_int);
    cuStreamDestroy as "cuStreamDestroy_v2" (CUstream);
    cuStreamSynchronize(CUstream);
    cuStreamQuery(CUstream);
    cuStreamWaitEvent(CUstream, CUevent, c_uint);
    cuStreamGetCtx(CUstream, *mut CUcontext);
    cuStreamIsCapturing(CUstream, *mut c_uint);
    cuStreamGetCaptureInfo as "cuStreamGetCaptureInfo_v2" (CUstream, *mut c_uint, *mut u64, *mut CUgraph, *mut *const c_void, *mut usize);
    cuStreamBeginCapture as "cuStreamBeginCapture_v2" (CUstream, c_uint);
    cuStreamEndCapture(CUstream, *mut CUgraph);
    cuThreadExchangeStreamCaptureMode(*mut c_uint);
    cuStreamBatchMemOp as "cuStreamBatchMemOp_v2" (CUstream, c_uint, *mut c_void, c_uint);
    cuEventCreate(*mut CUevent, c_uint);
    cuEventDestroy as "cuEventDestroy_v2" (CUevent);
    cuEventRecord(CUevent, CUstream);
    cuEventQuery(CUevent);
    cuEventSynchronize(CUevent);
    cuEventElapsedTime(*mut f32, CUevent, CUevent);
    cuGraphInstantiate as "cuGraphInstantiateWithFlags" (*mut CUgraphExec, CUgraph, u64);
    cuGraphLaunch(CUgraphExec, CUstream);
    cuGraphExecDestroy(CUgraphExec);
    cuGraphDestroy(CUgraph);
}

/// The driver, loaded and started once; `None` where there is none, or it does not start.
pub(crate) fn cuda() -> Option<&'static Cuda> {
    static CUDA: OnceLock<Option<Cuda>> = OnceLock::new();
    let load = || {
        // SAFETY: loading the vendor's driver runs its initialisers, which every CUDA program does.
        let library = unsafe { Library::new("libcuda.so.1") }.ok()?;
        let cuda = Cuda::load(library)?;
        // SAFETY: `cuInit` takes flags, which must be 0.
        (unsafe { (cuda.cuInit)(0) } == 0).then_some(cuda)
    };
    CUDA.get_or_init(load).as_ref()
}
