//! Tests the HSA runtime: agents and pools, signals, and copies by numbered engines.

use std::time::{Duration, Instant};

use crate::api::hsa::*;
use peerlane_simulated_driver::Transfer;

const LONG: Duration = Duration::from_secs(20);
const MOMENT: Duration = Duration::from_millis(20);

/// Memory on two GPUs that both reach, and the agents.
fn pair(bytes: usize) -> (u64, u64, u64, u64) {
    pair_of(0, 1, bytes)
}

fn pair_of(from: usize, to: usize, bytes: usize) -> (u64, u64, u64, u64) {
    let (from, to) = (gpus()[from], gpus()[to]);
    let (src, dst) = (allocate(from, bytes), allocate(to, bytes));
    allow(dst, &[from, to]).unwrap();
    (from, src, to, dst)
}

#[test]
fn agents_are_processors_and_then_gpus_at_their_addresses() {
    let _driver = start();
    assert_eq!((cpus().len(), gpus().len()), (2, 6));
    assert_eq!(agents()[..2], cpus()[..]);
    let bdf: Vec<u32> = gpus().iter().map(|gpu| agent_info(*gpu, 0xa006)).collect();
    assert_eq!(bdf[..3], [0x1000, 0x1100, 0x1200]);
    let hip: String = crate::api::hip::pci_id(2);
    assert_eq!(hip, "0000:12:00.0", "the same machine");
    assert_eq!(agent_info::<u64>(gpus()[5], 0xa113), cpus()[1]);
    assert_eq!(agent_info::<u32>(gpus()[0], 0xa10b), 14);
    let mut field = [0_u8; 21];
    hsa!(hsa_agent_get_info(gpus()[1] => u64, 0xa011 => i32, &mut field => &mut [u8; 21])).unwrap();
    assert_eq!(&field, b"GPU-53494d5500000001\0");
    let wrong = hsa!(hsa_agent_get_info(77 => u64, 17 => i32, &mut field => &mut [u8; 21]));
    assert_eq!(wrong, Err(0x1004));
}

#[test]
fn pools_say_their_grain_and_how_far_they_are() {
    let driver = start();
    assert_eq!(pools(cpus()[0]).into_iter().map(flags_of).collect::<Vec<_>>(), [2, 3, 4]);
    let pool = pools(gpus()[1])[0];
    assert_eq!(flags_of(pool), 4);
    let info = |agent: u64, attribute: i32| {
        let mut value = [0_u32; 24];
        hsa!(hsa_amd_agent_memory_pool_get_info(
            agent => u64, pool => u64, attribute => i32, &mut value => &mut [u32; 24],
        ))
        .map(|()| value)
    };
    assert_eq!(info(gpus()[1], 0).unwrap()[0], 1, "one's own");
    assert_eq!(info(gpus()[0], 0).unwrap()[0], 2, "when it is allowed");
    assert_eq!(info(gpus()[0], 1).unwrap()[0], 1);
    let link = info(gpus()[0], 2).unwrap();
    assert_eq!((link[2], link[5], link[6]), (50_000, 4, 15), "XGMI of 50 GB/s and weight 15");
    driver.set("HIVE", "1");
    assert_eq!(info(gpus()[0], 1).unwrap()[0], 2);
    assert_eq!(info(gpus()[0], 2).unwrap()[5], 2, "PCIe");
    driver.set("HIVE", "16");
    driver.set("P2P", "off");
    assert_eq!(info(gpus()[0], 0).unwrap()[0], 0, "never");
    driver.set("P2P", "on");
}

#[test]
fn a_copy_takes_one_off_its_signal() {
    let driver = start();
    let (from, src, to, dst) = pair(4096);
    bytes_at(src, 4096).fill(9);
    let done = new_signal(1);
    copy_on(2, (to, dst), (from, src), 4096, &[], done).unwrap();
    assert_eq!(wait_below(done, 1, LONG), 0);
    assert_eq!(bytes_at(dst, 4096), [9; 4096]);
    let log = driver.log();
    let Transfer { device, engine, source, destination, bytes, far, .. } = log[0];
    assert_eq!(
        (log.len(), device, engine, source, destination, bytes, far),
        (1, 0, 2, 0, 1, 4096, 0)
    );
    assert!(log[0].start_ns <= log[0].end_ns);
}

#[test]
fn a_copy_waits_for_its_signals_and_its_engine_with_it() {
    let _driver = start();
    let (from, src, to, dst) = pair(64);
    let (gate, first, second, aside) = (new_signal(1), new_signal(1), new_signal(1), new_signal(1));
    copy_on(3, (to, dst), (from, src), 64, &[gate], first).unwrap();
    copy_on(3, (to, dst), (from, src), 64, &[], second).unwrap();
    copy_on(2, (to, dst), (from, src), 64, &[], aside).unwrap();
    assert_eq!(wait_below(aside, 1, LONG), 0, "another engine goes on");
    assert_eq!(wait_below(second, 1, MOMENT), 1, "this one stands still");
    store(gate, 0);
    assert_eq!(wait_below(second, 1, LONG), 0);
    assert_eq!(load(first), 0, "in their order");
}

#[test]
fn no_bytes_change_no_signal() {
    let _driver = start();
    let (from, src, to, dst) = pair(64);
    let done = new_signal(1);
    copy((to, dst), (from, src), 0, &[], done).unwrap();
    assert_eq!(wait_below(done, 1, MOMENT), 1);
}

#[test]
fn memory_that_was_not_allowed_is_an_error_of_the_signal() {
    let _driver = start();
    let gpus = gpus();
    let (src, dst, done) = (allocate(gpus[2], 64), allocate(gpus[3], 64), new_signal(1));
    copy((gpus[3], dst), (gpus[2], src), 64, &[], done).unwrap();
    assert_eq!(wait_below(done, 0, LONG), -1);
    allow(dst, &[gpus[2]]).unwrap();
    store(done, 1);
    copy((gpus[3], dst), (gpus[2], src), 64, &[], done).unwrap();
    assert_eq!(wait_below(done, 1, LONG), 0);
}

#[test]
fn arguments_are_checked() {
    let driver = start();
    let (from, src, to, dst) = pair(64);
    let done = new_signal(1);
    assert_eq!(copy((to, 0), (from, src), 64, &[], done), Err(0x1001));
    assert_eq!(copy((to, dst), (from, src), 64, &[], 0), Err(0x1006));
    assert_eq!(copy((5, dst), (from, src), 64, &[], done), Err(0x1004));
    assert_eq!(copy_on(16, (to, dst), (from, src), 64, &[], done), Err(0x1001), "there are 16");
    assert_eq!(load(done), 1);
    driver.set("SIGNALS", "1");
    assert_eq!(signal_with(0, 0), Err(0x1008));
    driver.set("SIGNALS", "65536");
    assert_eq!(hsa!(hsa_signal_destroy(done => u64)), Ok(()));
    assert_eq!(hsa!(hsa_signal_destroy(done => u64)), Err(0x1006));
}

#[test]
fn links_have_engines_of_their_own() {
    let driver = start();
    let gpus = gpus();
    assert_eq!(preferred(gpus[1], gpus[0]), 0b1100);
    assert_eq!(preferred(gpus[2], gpus[0]), 0b11_0000);
    assert_eq!(preferred(gpus[0], gpus[1]), 0b1100);
    assert_eq!(preferred(gpus[0], gpus[0]), 0, "no preference");
    assert_eq!(preferred(cpus()[0], gpus[0]), 0b11);
    driver.set("HIVE", "1");
    assert_eq!(preferred(gpus[1], gpus[0]), 0b11, "over PCIe");
    driver.set("HIVE", "16");
    driver.set("ENGINES_PER_LINK", "3");
    assert_eq!(preferred(gpus[1], gpus[0]), 0b1_1100);
    driver.set("ENGINES_PER_LINK", "2");
}

#[test]
fn engines_that_do_something_are_not_idle() {
    let driver = start();
    let (from, src, to, dst) = pair(64);
    let (gate, done) = (new_signal(1), new_signal(2));
    assert_eq!(idle(to, from), Ok(0xfffc));
    copy_on(2, (to, dst), (from, src), 64, &[gate], done).unwrap();
    assert_eq!(idle(to, from), Ok(0xfff8));
    driver.set("XGMI_ENGINES", "1");
    assert_eq!(idle(to, from), Err(0x1008));
    driver.set("XGMI_ENGINES", "14");
    copy_on(9, (to, dst), (from, src), 64, &[gate], done).unwrap();
    store(gate, 0);
    assert_eq!(wait_below(done, 1, LONG), 0);
    let far: Vec<u64> = driver.log().iter().map(|transfer| transfer.far).collect();
    assert_eq!(far.iter().sum::<u64>(), 1, "engine 9 leads elsewhere");
}

#[test]
fn an_engine_holds_so_many_copies() {
    let driver = start();
    let (from, src, to, dst) = pair(64);
    let (gate, done) = (new_signal(1), new_signal(3));
    driver.set("SDMA_QUEUE", "3");
    copy_on(5, (to, dst), (from, src), 64, &[gate], done).unwrap();
    copy_on(5, (to, dst), (from, src), 64, &[], done).unwrap();
    copy_on(5, (to, dst), (from, src), 64, &[], done).unwrap();
    assert_eq!(copy_on(5, (to, dst), (from, src), 64, &[], done), Err(0x1008));
    driver.set("SDMA_QUEUE", "4096");
    store(gate, 0);
    assert_eq!(wait_below(done, 1, LONG), 0);
}

#[test]
fn a_copy_that_is_too_large_stops_its_engine() {
    let driver = start();
    // Of a device that nothing else uses, because its engine is lost.
    let (from, src, to, dst) = pair_of(4, 1, 2 << 20);
    driver.set("STALL_MIB", "1");
    let (stuck, behind, aside) = (new_signal(1), new_signal(1), new_signal(1));
    copy_on(6, (to, dst), (from, src), (1 << 20) + 8, &[], stuck).unwrap();
    copy_on(6, (to, dst), (from, src), 64, &[], behind).unwrap();
    copy_on(7, (to, dst), (from, src), 1 << 20, &[], aside).unwrap();
    assert_eq!(wait_below(aside, 1, LONG), 0, "so much is no matter");
    let begin = Instant::now();
    while driver.counter("stalled_copies", None) == 0 {
        assert!(begin.elapsed() < LONG, "the copy did not stall");
        std::thread::yield_now();
    }
    assert_eq!(wait_below(behind, 1, MOMENT), 1);
    driver.set("STALL_MIB", "0");
}

#[test]
fn a_broken_device_makes_signals_negative() {
    let driver = start();
    let gpus = gpus();
    let (src, dst) = (allocate(gpus[5], 64), allocate(gpus[5], 64));
    let (gate, done) = (new_signal(1), new_signal(1));
    copy((gpus[5], dst), (gpus[5], src), 64, &[gate], done).unwrap();
    driver.break_device(5, 719);
    assert_eq!(wait_below(done, 0, LONG), -1);
}

#[test]
fn hip_and_hsa_share_memory_and_addresses() {
    let driver = start();
    crate::api::hip::use_device(1);
    let memory = crate::api::hip::zeros(4096);
    let gpus = gpus();
    let own = allocate(gpus[0], 4096);
    bytes_at(own, 4096).fill(3);
    allow(memory, &[gpus[0]]).unwrap();
    let done = new_signal(1);
    copy((gpus[1], memory), (gpus[0], own), 4096, &[], done).unwrap();
    assert_eq!(wait_below(done, 1, LONG), 0);
    assert_eq!(
        crate::api::hip::download(memory, 4, crate::api::hip::new_stream()).unwrap(),
        [3; 4]
    );
    assert_eq!(driver.log()[0].engine, 2, "the first engine of the link");

    let info_of = |address: u64| {
        let mut info = [0_u64; 7];
        info[0] = 56;
        hsa!(hsa_amd_pointer_info(
            address => u64, &mut info => &mut [u64; 7], 0 => usize, 0 => usize, 0 => usize,
        ))
        .unwrap();
        info
    };
    let info = info_of(memory + 7);
    assert_eq!(info[..2], [56 | 1 << 32, memory]);
    assert_eq!((info[3], info[5], info[6] as u32), (4096, gpus[1], 4));
    let fine = crate::api::hip::malloc_with(64, 1).unwrap();
    assert_eq!(info_of(fine)[6] as u32, 2, "fine-grained");
}

#[test]
fn memory_of_the_host_is_locked_before_engines_reach_it() {
    let _driver = start();
    let gpu = gpus()[0];
    let (own, done) = (allocate(gpu, 64), new_signal(1));
    bytes_at(own, 64).fill(5);
    let host = Box::leak(Box::new([0_u64; 512]));
    let address = host.as_mut_ptr() as u64;
    copy((cpus()[0], address), (gpu, own), 64, &[], done).unwrap();
    assert_eq!(wait_below(done, 0, LONG), -1);
    let mut locked = 0;
    hsa!(hsa_amd_memory_lock(
        address => u64, 4096 => usize, 0 => usize, 0 => i32, &mut locked => &mut u64,
    ))
    .unwrap();
    store(done, 1);
    copy((cpus()[0], locked), (gpu, own), 64, &[], done).unwrap();
    assert_eq!(wait_below(done, 1, LONG), 0);
    assert_eq!(bytes_at(address, 64), [5; 64]);
    hsa!(hsa_amd_memory_unlock(address => u64)).unwrap();
}

#[test]
fn a_descriptor_leads_to_the_same_memory() {
    let _driver = start();
    let gpu = gpus()[0];
    let memory = allocate(gpu, 8192);
    let (mut fd, mut offset) = (-1, 0);
    hsa!(hsa_amd_portable_export_dmabuf(
        memory + 4096 => u64, 64 => usize, &mut fd => &mut i32, &mut offset => &mut u64,
    ))
    .unwrap();
    assert_eq!(offset, 4096);
    let (mut bytes, mut mapped) = (0, 0);
    hsa!(hsa_amd_interop_map_buffer(
        1 => u32, &gpu => &u64, fd => i32, 0 => u32, &mut bytes => &mut usize,
        &mut mapped => &mut u64, 0 => usize, 0 => usize,
    ))
    .unwrap();
    hsa!(hsa_amd_portable_close_dmabuf(fd => i32)).unwrap();
    bytes_at(memory + 4096, 8).fill(8);
    assert_eq!((bytes, &*bytes_at(mapped + 4096, 8)), (8192, &[8; 8][..]));
    hsa!(hsa_amd_interop_unmap_buffer(mapped => u64)).unwrap();
}
