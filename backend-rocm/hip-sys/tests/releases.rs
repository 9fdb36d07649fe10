//! Tests the table and the declarations against the real libraries and headers of several releases.

use std::process::ExitCode;

use c_layout::{Claim, Header};
use hip_sys::*;
use libtest_mimic::Failed;

#[path = "../../tests/support/bindings.rs"]
mod bindings;
#[path = "../../tests/support/releases.rs"]
mod releases;

use bindings::Bindings;
use releases::Release;

fn main() -> ExitCode {
    Bindings {
        library: "HIP",
        symbols: Library::SYMBOLS,
        print_table: || {
            let library = Library::load().unwrap();
            bindings::print_table(library.file(), Library::SYMBOLS, |name| library.has(name));
        },
        file: |release| format!("libamdhip64.so.{}.", release.name),
        has: Release::has,
        print_no_device,
        no_device,
        declarations,
    }
    .run()
}

/// Prints the results of the first calls, in a process with the libraries of a release and no device.
fn print_no_device() {
    let library = Library::load().unwrap();
    let mut number = 0;
    // SAFETY: the result is stored in a local.
    let code = unsafe { (library.runtime_get_version)(&raw mut number) };
    println!("version {} {}", code.0, number / 100_000);
    // SAFETY: the call takes flags, which must be 0.
    println!("init {}", unsafe { (library.init)(0) }.0);
    for code in [100, 4242] {
        // SAFETY: the call accepts any number.
        let name = unsafe { (library.get_error_name)(hipError_t(code)) };
        // SAFETY: the call returned a static string.
        println!("name {}", unsafe { std::ffi::CStr::from_ptr(name) }.to_str().unwrap());
    }
}

fn no_device(release: &Release) -> Result<(), Failed> {
    let (major, minor) = release.number();
    let printed = release.run_task("no_device", &[])?;
    let rest = "name hipErrorNoDevice\nname hipErrorUnknown\n";
    assert_eq!(printed, format!("version 0 {}\ninit 100\n{rest}", major * 100 + minor));
    Ok(())
}

fn declarations(release: &Release) -> (Header<'static>, Vec<Claim>) {
    let header = Header {
        includes: "#include <hip/hip_runtime_api.h>",
        arguments: vec!["-D__HIP_PLATFORM_AMD__".into(), "-I".into(), release.headers().into()],
    };
    let mut claims = [structures(), constants(), memory_types(release)].concat();
    if release.has("6.4") {
        claims.extend(of_6_4());
    }
    if release.has("7.2") {
        claims.extend(of_7_2());
    }
    (header, claims)
}

fn structures() -> Vec<Claim> {
    [
        c_layout::claims!("hipUUID", hipUUID { bytes }),
        c_layout::claims!("hipIpcMemHandle_t", hipIpcMemHandle_t { reserved }),
        c_layout::claims!(
            "hipPointerAttribute_t",
            hipPointerAttribute_t {
                type_,
                device,
                devicePointer,
                hostPointer,
                isManaged,
                allocationFlags
            }
        ),
        c_layout::claims!("hipMemLocation", hipMemLocation, head { type_ }),
        c_layout::claims!("hipMemAccessDesc", hipMemAccessDesc { location, flags }),
        c_layout::claims!(
            "hipMemAllocationProp",
            hipMemAllocationProp { type_, location, win32HandleMetaData, allocFlags }
        ),
    ]
    .concat()
}

fn constants() -> Vec<Claim> {
    let flags = [
        ("hipStreamNonBlocking", hipStreamNonBlocking),
        ("hipEventDisableTiming", hipEventDisableTiming),
        ("hipEventInterprocess", hipEventInterprocess),
        ("hipDeviceMallocFinegrained", hipDeviceMallocFinegrained),
        ("hipMallocSignalMemory", hipMallocSignalMemory),
        ("hipHostMallocPortable", hipHostMallocPortable),
        ("hipHostMallocMapped", hipHostMallocMapped),
        ("hipHostMallocCoherent", hipHostMallocCoherent),
        ("hipHostRegisterPortable", hipHostRegisterPortable),
        ("hipHostRegisterMapped", hipHostRegisterMapped),
        ("hipStreamWaitValueGte", hipStreamWaitValueGte),
        ("hipStreamWaitValueEq", hipStreamWaitValueEq),
    ];
    let mut claims: Vec<Claim> =
        flags.iter().map(|(name, value)| Claim::of(*name, (*value).into())).collect();
    claims.extend(c_layout::constants! {
        hipError_t {
            hipSuccess, hipErrorInvalidValue, hipErrorOutOfMemory, hipErrorNotInitialized,
            hipErrorInsufficientDriver, hipErrorNoDevice, hipErrorInvalidDevice,
            hipErrorInvalidContext, hipErrorNoBinaryForGpu, hipErrorECCNotCorrectable,
            hipErrorPeerAccessUnsupported, hipErrorInvalidHandle, hipErrorNotFound, hipErrorNotReady,
            hipErrorIllegalAddress, hipErrorPeerAccessAlreadyEnabled, hipErrorLaunchFailure,
            hipErrorNotSupported, hipErrorStreamCaptureUnsupported,
            hipErrorStreamCaptureInvalidated, hipErrorCapturedEvent, hipErrorUnknown,
        }
        hipMemcpyKind {
            hipMemcpyHostToHost, hipMemcpyHostToDevice, hipMemcpyDeviceToHost,
            hipMemcpyDeviceToDevice, hipMemcpyDefault,
        }
        hipDeviceAttribute_t {
            hipDeviceAttributeMultiprocessorCount, hipDeviceAttributeAsyncEngineCount,
            hipDeviceAttributeCanUseStreamWaitValue,
            hipDeviceAttributeVirtualMemoryManagementSupported,
        }
        hipMemAllocationType { hipMemAllocationTypePinned }
        hipMemAllocationHandleType { hipMemHandleTypeNone, hipMemHandleTypePosixFileDescriptor }
        hipMemAccessFlags { hipMemAccessFlagsProtReadWrite }
        hipMemLocationType { hipMemLocationTypeDevice }
        hipMemAllocationGranularity_flags { hipMemAllocationGranularityMinimum }
        hipStreamCaptureMode {
            hipStreamCaptureModeGlobal, hipStreamCaptureModeThreadLocal, hipStreamCaptureModeRelaxed,
        }
        hipStreamCaptureStatus {
            hipStreamCaptureStatusNone, hipStreamCaptureStatusActive,
            hipStreamCaptureStatusInvalidated,
        }
        hipPointer_attribute {
            HIP_POINTER_ATTRIBUTE_MEMORY_TYPE, HIP_POINTER_ATTRIBUTE_BUFFER_ID,
            HIP_POINTER_ATTRIBUTE_DEVICE_ORDINAL, HIP_POINTER_ATTRIBUTE_RANGE_START_ADDR,
            HIP_POINTER_ATTRIBUTE_RANGE_SIZE,
        }
    });
    claims
}

/// Returns the numbers that `memory_types` gives for a release.
fn memory_types(release: &Release) -> Vec<Claim> {
    let (major, minor) = release.number();
    let version = i32::try_from(major * 10_000_000 + minor * 100_000).expect("a small number");
    let types = hip_sys::memory_types(version);
    vec![
        Claim::of("hipMemoryTypeHost", types.host.0.into()),
        Claim::of("hipMemoryTypeDevice", types.device.0.into()),
        Claim::of("hipMemoryTypeManaged", types.managed.0.into()),
    ]
}

fn of_6_4() -> Vec<Claim> {
    let mut claims =
        c_layout::claims!("hipStreamBatchMemOpParams", hipStreamBatchMemOpParams { operation });
    claims.extend(c_layout::constants! {
        hipMemcpyKind { hipMemcpyDeviceToDeviceNoCU }
        hipStreamBatchMemOpType { hipStreamMemOpWaitValue64, hipStreamMemOpWriteValue64 }
    });
    claims
}

fn of_7_2() -> Vec<Claim> {
    let mut claims = c_layout::claims!(
        "hipMemcpyAttributes",
        hipMemcpyAttributes { srcAccessOrder, srcLocHint, dstLocHint, flags }
    );
    claims.extend(c_layout::constants! {
        hipMemRangeHandleType { hipMemRangeHandleTypeDmaBufFd }
        hipMemcpySrcAccessOrder { hipMemcpySrcAccessOrderStream }
    });
    claims
}
