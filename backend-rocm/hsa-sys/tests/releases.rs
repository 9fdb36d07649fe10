//! Tests the table and the declarations against the real libraries and headers of several releases.

use std::process::ExitCode;

use c_layout::{Claim, Header};
use hsa_sys::*;
use libtest_mimic::Failed;

#[path = "../../tests/support/bindings.rs"]
mod bindings;
#[path = "../../tests/support/releases.rs"]
mod releases;

use bindings::Bindings;
use releases::Release;

fn main() -> ExitCode {
    Bindings {
        library: "HSA runtime of HIP",
        symbols: Library::SYMBOLS,
        print_table: || {
            let library = Library::load().unwrap();
            bindings::print_table(library.file(), Library::SYMBOLS, |name| library.has(name));
        },
        file: |_| "libhsa-runtime64.so.1.".to_owned(),
        // Debian combines HIP 5.7 with the HSA runtime of 6.1.
        has: |release, since| release.has(since) || since == "6.1",
        print_no_device,
        no_device,
        declarations,
    }
    .run()
}

/// Prints the results of the first calls, in a process with the libraries of a release and no device.
fn print_no_device() {
    let library = Library::load().unwrap();
    // SAFETY: the runtime counts initialisations, and it is not shut down.
    let status = unsafe { (library.init)() };
    println!("init {:#x}", status.0);
    for status in [status, hsa_status_t(0x7777)] {
        let mut text = std::ptr::null();
        // SAFETY: the call stores a static string, or leaves the local unchanged.
        let result = unsafe { (library.status_string)(status, &raw mut text) };
        if result == hsa_status_t::HSA_STATUS_SUCCESS {
            // SAFETY: as above.
            let text = unsafe { std::ffi::CStr::from_ptr(text) }.to_str().unwrap();
            println!("text {}", text.split(':').next().unwrap());
        } else {
            println!("no text: {:#x}", result.0);
        }
    }
}

fn no_device(release: &Release) -> Result<(), Failed> {
    assert_eq!(
        release.run_task("no_device", &[])?,
        "init 0x1008\ntext HSA_STATUS_ERROR_OUT_OF_RESOURCES\nno text: 0x1001\n"
    );
    Ok(())
}

fn declarations(release: &Release) -> (Header<'static>, Vec<Claim>) {
    let header = Header {
        includes: "#include <stdbool.h>\n#include <hsa/hsa.h>\n#include <hsa/hsa_ext_amd.h>",
        arguments: vec!["-I".into(), release.headers().into()],
    };
    let claims = [structures(), constants()].concat();
    (header, claims)
}

fn structures() -> Vec<Claim> {
    [
        c_layout::claims!("hsa_agent_t", hsa_agent_t { handle }),
        c_layout::claims!("hsa_signal_t", hsa_signal_t { handle }),
        c_layout::claims!("hsa_amd_memory_pool_t", hsa_amd_memory_pool_t { handle }),
        c_layout::claims!("hsa_amd_ipc_memory_t", hsa_amd_ipc_memory_t { handle }),
        c_layout::claims!(
            "hsa_amd_memory_pool_link_info_t",
            hsa_amd_memory_pool_link_info_t {
                min_latency,
                max_latency,
                min_bandwidth,
                max_bandwidth,
                atomic_support_32bit,
                atomic_support_64bit,
                coherent_support,
                link_type,
                numa_distance
            }
        ),
        c_layout::claims!(
            "hsa_amd_profiling_async_copy_time_t",
            hsa_amd_profiling_async_copy_time_t { start, end }
        ),
        // Newer structures are longer; the caller passes the size of its own.
        c_layout::claims!(
            "hsa_amd_pointer_info_t",
            hsa_amd_pointer_info_t,
            head {
                size,
                agentBaseAddress,
                hostBaseAddress,
                sizeInBytes,
                userData,
                agentOwner,
                global_flags
            }
        ),
    ]
    .concat()
}

fn constants() -> Vec<Claim> {
    let mut claims = c_layout::constants! {
        hsa_status_t {
            HSA_STATUS_SUCCESS, HSA_STATUS_INFO_BREAK, HSA_STATUS_ERROR,
            HSA_STATUS_ERROR_INVALID_ARGUMENT, HSA_STATUS_ERROR_OUT_OF_RESOURCES,
            HSA_STATUS_ERROR_NOT_INITIALIZED, HSA_STATUS_ERROR_EXCEPTION, HSA_STATUS_ERROR_FATAL,
        }
        hsa_device_type_t { HSA_DEVICE_TYPE_CPU, HSA_DEVICE_TYPE_GPU }
        hsa_agent_info_t {
            HSA_AGENT_INFO_NAME, HSA_AGENT_INFO_NODE, HSA_AGENT_INFO_DEVICE,
        }
        hsa_amd_agent_info_s {
            HSA_AMD_AGENT_INFO_BDFID, HSA_AMD_AGENT_INFO_DOMAIN, HSA_AMD_AGENT_INFO_UUID,
            HSA_AMD_AGENT_INFO_DRIVER_NODE_ID, HSA_AMD_AGENT_INFO_PRODUCT_NAME,
            HSA_AMD_AGENT_INFO_NUM_SDMA_ENG, HSA_AMD_AGENT_INFO_NUM_SDMA_XGMI_ENG,
            HSA_AMD_AGENT_INFO_NEAREST_CPU,
        }
        hsa_system_info_t {
            HSA_AMD_SYSTEM_INFO_EXT_VERSION_MAJOR, HSA_AMD_SYSTEM_INFO_EXT_VERSION_MINOR,
        }
        hsa_signal_condition_t {
            HSA_SIGNAL_CONDITION_EQ, HSA_SIGNAL_CONDITION_LT, HSA_SIGNAL_CONDITION_GTE,
        }
        hsa_wait_state_t { HSA_WAIT_STATE_BLOCKED, HSA_WAIT_STATE_ACTIVE }
        hsa_amd_segment_t { HSA_AMD_SEGMENT_GLOBAL }
        hsa_amd_memory_pool_global_flag_s {
            HSA_AMD_MEMORY_POOL_GLOBAL_FLAG_KERNARG_INIT,
            HSA_AMD_MEMORY_POOL_GLOBAL_FLAG_FINE_GRAINED,
            HSA_AMD_MEMORY_POOL_GLOBAL_FLAG_COARSE_GRAINED,
        }
        hsa_amd_memory_pool_info_t {
            HSA_AMD_MEMORY_POOL_INFO_SEGMENT, HSA_AMD_MEMORY_POOL_INFO_GLOBAL_FLAGS,
            HSA_AMD_MEMORY_POOL_INFO_SIZE, HSA_AMD_MEMORY_POOL_INFO_RUNTIME_ALLOC_ALLOWED,
            HSA_AMD_MEMORY_POOL_INFO_RUNTIME_ALLOC_GRANULE,
        }
        hsa_amd_agent_memory_pool_info_t {
            HSA_AMD_AGENT_MEMORY_POOL_INFO_ACCESS, HSA_AMD_AGENT_MEMORY_POOL_INFO_NUM_LINK_HOPS,
            HSA_AMD_AGENT_MEMORY_POOL_INFO_LINK_INFO,
        }
        hsa_amd_link_info_type_t {
            HSA_AMD_LINK_INFO_TYPE_HYPERTRANSPORT, HSA_AMD_LINK_INFO_TYPE_PCIE,
            HSA_AMD_LINK_INFO_TYPE_XGMI,
        }
        hsa_amd_sdma_engine_id { HSA_AMD_SDMA_ENGINE_0, HSA_AMD_SDMA_ENGINE_15 }
    };
    claims.extend([
        Claim::of(
            "HSA_STATUS_ERROR_INVALID_MEMORY_POOL",
            HSA_STATUS_ERROR_INVALID_MEMORY_POOL.0.into(),
        ),
        Claim::of("HSA_STATUS_ERROR_MEMORY_FAULT", HSA_STATUS_ERROR_MEMORY_FAULT.0.into()),
    ]);
    claims
}
