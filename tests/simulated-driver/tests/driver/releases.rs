//! Tests other installations and machines of ROCm: releases, hidden devices, no kernel driver, and
//! two processes that share memory and signals.

use std::time::{Duration, Instant};

use peerlane_simulated_driver::{Other, Rocm, hear, in_own_process, tell};

use crate::api::hsa::{agents, gpus, hsa, new_signal};
use crate::api::{Answer, c_symbol, hip, hsa as runtime};

const LONG: Duration = Duration::from_secs(20);

/// What the other process tells.
fn ask(role: &str, variables: &[(&str, &str)]) -> String {
    let mut other = Other::start(&format!("releases::{role}"), variables);
    let told = other.hear_text();
    other.end();
    told
}

/// Tells how both runtimes started, and the buses of their devices.
#[test]
#[ignore = "started by the other tests of this file"]
fn look() {
    let _driver = Rocm::release("7.2").install();
    let hip: Answer = hip::hip!(hipInit(0 => u32));
    let hip = hip.map(|()| {
        let mut count = 0;
        hip::hip!(hipGetDeviceCount(&mut count => &mut i32)).unwrap();
        let bus = |device| hip::pci_id(device)[5..7].to_owned();
        (0..count).map(bus).collect::<Vec<_>>().join(" ")
    });
    let hsa: Answer = hsa!(hsa_init());
    let hsa = hsa.map(|()| {
        let bus = |gpu: u64| format!("{:02x}", runtime::agent_info::<u32>(gpu, 0xa006) >> 8);
        let gpus: Vec<String> = gpus().into_iter().map(bus).collect();
        format!("{} of {} agents", gpus.join(" "), agents().len())
    });
    tell(format!("{hip:?}, {hsa:?}").as_bytes());
}

#[test]
fn ordinals_need_not_follow_agents() {
    assert_eq!(ask("look", &[]), r#"Ok("10 11 12 13"), Ok("10 11 12 13 of 6 agents")"#);
    let reversed = [("PEERLANE_SIM_HIP_ORDER", "reversed")];
    assert_eq!(ask("look", &reversed), r#"Ok("13 12 11 10"), Ok("10 11 12 13 of 6 agents")"#);
}

#[test]
fn hidden_devices_are_not_there() {
    let lower = ("ROCR_VISIBLE_DEVICES", "3,1");
    assert_eq!(ask("look", &[lower]), r#"Ok("13 11"), Ok("13 11 of 4 agents")"#);
    let upper = ("HIP_VISIBLE_DEVICES", "1");
    assert_eq!(ask("look", &[lower, upper]), r#"Ok("11"), Ok("13 11 of 4 agents")"#);
    let name = ("ROCR_VISIBLE_DEVICES", "GPU-53494d5500000002");
    assert_eq!(ask("look", &[name]), r#"Ok("12"), Ok("12 of 3 agents")"#);
    let other = ("CUDA_VISIBLE_DEVICES", "2");
    assert_eq!(ask("look", &[other]), r#"Ok("12"), Ok("10 11 12 13 of 6 agents")"#);
    let none = ("HIP_VISIBLE_DEVICES", "");
    assert_eq!(ask("look", &[none]), r#"Err(100), Ok("10 11 12 13 of 6 agents")"#);
}

#[test]
fn without_the_driver_of_the_kernel_there_is_no_device() {
    for state in ["missing", "denied"] {
        assert_eq!(ask("look", &[("PEERLANE_SIM_KFD", state)]), "Err(100), Err(4104)");
    }
    assert_eq!(ask("look", &[("PEERLANE_SIM_DEVICES", "0")]), r#"Err(100), Ok(" of 2 agents")"#);
}

/// Tells what a library of one release has, by its own name.
#[test]
#[ignore = "started by the other tests of this file"]
fn release() {
    let told = std::env::var("RELEASE").unwrap();
    let (hip, hsa) = told.split_once('/').unwrap();
    let some = |release: &'static str| Some(release).filter(|release| !release.is_empty());
    let (hip, hsa) = (some(hip.to_owned().leak()), some(hsa.to_owned().leak()));
    let _driver = Rocm::release("7.2").hip(hip).hsa(hsa).install();
    let mut lines = Vec::new();
    if let Some(hip) = hip {
        let library = format!("libamdhip64.so.{}", &hip[..1]);
        let has = |name| !c_symbol(&library, name).is_null();
        let mut version = 0;
        let ask = c_symbol(&library, "hipRuntimeGetVersion");
        // SAFETY: this is the declaration of the function in hip_runtime_api.h.
        let ask = unsafe {
            std::mem::transmute::<*mut std::ffi::c_void, extern "C" fn(&mut i32) -> i32>(ask)
        };
        assert_eq!(ask(&mut version), 0);
        let range = has("hipMemGetHandleForAddressRange");
        lines.push(format!("HIP {version} {} {range}", has("hipStreamBatchMemOp")));
    }
    if hsa.is_some() {
        hsa!(hsa_init()).unwrap();
        let has = |name| !runtime::symbol(name).is_null();
        let mut build: *const std::ffi::c_char = std::ptr::null();
        hsa!(hsa_system_get_info(0x200 => i32, &mut build => &mut *const std::ffi::c_char))
            .unwrap();
        // SAFETY: the answer is text of the library.
        let build = unsafe { std::ffi::CStr::from_ptr(build) }.to_string_lossy();
        let engine = has("hsa_amd_memory_async_copy_on_engine");
        let preferred = has("hsa_amd_memory_get_preferred_copy_engine");
        lines.push(format!("HSA {build} {engine} {preferred}"));
    }
    tell(lines.join(", ").as_bytes());
}

fn told_of(releases: &str) -> String {
    ask("release", &[("RELEASE", releases)])
}

#[test]
fn releases_have_their_symbols_names_and_versions() {
    assert_eq!(told_of("5.7/5.7"), "HIP 50743482 false false, HSA 1.11.0-simulated false false");
    assert_eq!(told_of("6.1/6.1"), "HIP 60143482 false false, HSA 1.13.0-simulated true false");
    assert_eq!(told_of("6.4/6.4"), "HIP 60443482 true false, HSA 1.15.0-simulated true false");
    assert_eq!(told_of("7.2/7.2"), "HIP 70243482 true true, HSA 1.18.0-simulated true true");
}

#[test]
fn two_releases_may_be_mixed() {
    assert_eq!(told_of("7.2/5.7"), "HIP 70243482 true true, HSA 1.11.0-simulated false false");
}

#[test]
fn either_library_may_be_missing() {
    assert_eq!(told_of("6.4/"), "HIP 60443482 true false");
    assert_eq!(told_of("/6.4"), "HSA 1.15.0-simulated true false");
}

/// Owns memory, and names it in the middle; a line ends it.
#[test]
#[ignore = "started by the other tests of this file"]
fn owner() {
    let _driver = hip::start();
    hip::use_device(2);
    let memory = hip::zeros(4096);
    hip::fill(memory + 256, 6, 8, hip::new_stream()).unwrap();
    hip::hip!(hipDeviceSynchronize()).unwrap();
    tell(&hip::handle_of(memory + 256).unwrap());
    hear();
    assert_eq!(hip::word_at(memory + 264), 0x0707_0707_0707_0707);
}

#[test]
fn memory_opens_at_the_offset_that_was_named() {
    in_own_process(|| {
        let driver = hip::start();
        hip::use_device(0);
        let mut other = Other::start("releases::owner", &[]);
        let name: hip::Handle = other.hear().try_into().unwrap();
        let opened = hip::open(name).unwrap();
        assert_eq!(hip::open(name), Ok(opened), "open twice at one address");
        assert_eq!(hip::word_at(opened), 0x0606_0606_0606_0606);
        let stream = hip::new_stream();
        hip::fill(opened + 8, 7, 8, stream).unwrap();
        hip::sync(stream).unwrap();
        hip::close(opened).unwrap();
        hip::close(opened).unwrap();
        assert_eq!(driver.counter("open_imports", None), 0);
        other.tell(b"look");
        other.end();
    });
}

#[test]
fn opening_may_be_refused() {
    let driver = hip::start();
    hip::use_device(0);
    let mut other = Other::start("releases::owner", &[]);
    let name: hip::Handle = other.hear().try_into().unwrap();
    driver.set("LEGACY_IPC", "refused");
    assert_eq!(hip::open(name), Err(17));
    hsa!(hsa_init()).unwrap();
    let mut short = [0; 32];
    short.copy_from_slice(&name[..32]);
    let mut address = 0;
    let attached = hsa!(hsa_amd_ipc_memory_attach(
        &short => &[u8; 32], 4096 => usize, 0 => u32, 0 => usize, &mut address => &mut u64,
    ));
    assert_eq!(attached, Err(0x1000));
    driver.set("LEGACY_IPC", "off");
    assert_eq!(hip::handle_of(hip::zeros(64)), Err(801));
    driver.set("LEGACY_IPC", "on");
    other.kill();
}

/// Waits for a signal of the parent, and copies into its memory behind another.
#[test]
#[ignore = "started by the other tests of this file"]
fn waiter() {
    let _driver = runtime::start();
    let names: [runtime::Name; 3] = std::array::from_fn(|_| hear().unwrap().try_into().unwrap());
    let mut memory = 0;
    hsa!(hsa_amd_ipc_memory_attach(
        &names[0] => &runtime::Name, 4096 => usize, 0 => u32, 0 => usize,
        &mut memory => &mut u64,
    ))
    .unwrap();
    let attach = |name: &runtime::Name| {
        let mut signal = 0;
        hsa!(hsa_amd_ipc_signal_attach(name => &runtime::Name, &mut signal => &mut u64)).unwrap();
        signal
    };
    let (go, done) = (attach(&names[1]), attach(&names[2]));
    let own = runtime::allocate(gpus()[1], 4096);
    runtime::bytes_at(own, 4096).fill(4);
    runtime::copy((gpus()[0], memory), (gpus()[1], own), 4096, &[go], done).unwrap();
    tell(b"told");
    hear();
}

#[test]
fn signals_reach_the_other_process() {
    let _driver = runtime::start();
    let gpu = gpus()[0];
    let memory = runtime::allocate(gpu, 4096);
    let mut name: runtime::Name = [0; 32];
    hsa!(hsa_amd_ipc_memory_create(
        memory => u64, 4096 => usize, &mut name => &mut runtime::Name,
    ))
    .unwrap();
    let inside = hsa!(hsa_amd_ipc_memory_create(
        memory + 64 => u64, 64 => usize, &mut name => &mut runtime::Name,
    ));
    assert_eq!(inside, Err(0x1001), "whole allocations only");
    let named = |signal: u64| {
        let mut name: runtime::Name = [0; 32];
        hsa!(hsa_amd_ipc_signal_create(signal => u64, &mut name => &mut runtime::Name))
            .map(|()| name)
    };
    assert_eq!(named(new_signal(1)), Err(0x1001), "made for one process");
    let go = runtime::signal_with(1, runtime::IPC).unwrap();
    let done = runtime::signal_with(1, runtime::IPC).unwrap();
    let mut other = Other::start("releases::waiter", &[]);
    for name in [name, named(go).unwrap(), named(done).unwrap()] {
        other.tell(&name);
    }
    assert_eq!(other.hear_text(), "told");
    assert_eq!(runtime::wait_below(done, 1, Duration::from_millis(30)), 1);
    runtime::store(go, 0);
    assert_eq!(runtime::wait_below(done, 1, LONG), 0);
    assert_eq!(runtime::bytes_at(memory, 4096), [4; 4096]);
    other.tell(b"end");
    other.end();
}

/// Tells whether a batch that waits for 1 and then resets to 0 comes to its end.
#[test]
#[ignore = "started by the other tests of this file"]
fn batch() {
    let driver = hip::start();
    hip::use_device(0);
    let (flag, stream) = (hip::zeros(64), hip::new_stream());
    hip::write_word(stream, flag, 1).unwrap();
    let words = [
        crate::api::word(crate::api::WAIT_64, flag, 1),
        crate::api::word(crate::api::WRITE_64, flag, 0),
    ];
    hip::hip!(hipStreamBatchMemOp(
        stream => usize, 2 => u32, &words => &[crate::api::Word; 2], 0 => u32,
    ))
    .unwrap();
    let begin = Instant::now();
    while hip::query(stream).is_err() && begin.elapsed() < Duration::from_secs(2) {
        std::thread::sleep(Duration::from_millis(1));
    }
    tell(if hip::query(stream).is_ok() { b"ended" } else { b"waits" });
    drop(driver);
    std::process::exit(0);
}

#[test]
fn a_batch_may_run_in_parallel() {
    assert_eq!(ask("batch", &[]), "ended");
    assert_eq!(ask("batch", &[("PEERLANE_SIM_BATCH_ORDER", "parallel")]), "waits");
}

/// Tells what becomes of a descriptor that is given by its number, and by a pointer.
#[test]
#[ignore = "started by the other tests of this file"]
fn pointer() {
    let driver = hip::start();
    hip::use_device(0);
    let mut address = 0;
    let properties = [1_i32, 1, 1, 0, 0, 0, 0, 0];
    hip::hip!(hipMemCreate(
        &mut address => &mut u64, 65536 => usize, &properties => &[i32; 8], 0 => u64,
    ))
    .unwrap();
    let mut fd = -1;
    hip::hip!(hipMemExportToShareableHandle(
        &mut fd => &mut i32, address => u64, 1 => i32, 0 => u64,
    ))
    .unwrap();
    let import = |shared: usize| {
        let mut handle = 0_u64;
        hip::hip!(hipMemImportFromShareableHandle(
            &mut handle => &mut u64, shared => usize, 1 => i32,
        ))
        .is_ok()
    };
    let by_pointer = import(std::ptr::from_ref(&fd) as usize);
    let by_number = import(fd as usize);
    tell(format!("number {by_number}, pointer {by_pointer}").as_bytes());
    drop(driver);
}

#[test]
fn older_releases_import_by_a_pointer() {
    assert_eq!(ask("pointer", &[]), "number true, pointer false");
    let old = [("PEERLANE_SIM_ROCM_VERSION", "60400")];
    assert_eq!(ask("pointer", &old), "number true, pointer true");
}
