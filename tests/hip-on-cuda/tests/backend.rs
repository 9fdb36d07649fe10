//! Runs the ROCm backend with this library in place of HIP, and without an HSA runtime.

use std::ffi::c_void;
use std::time::Duration;

use hip_sys::{hipMemcpyKind, hipStreamNonBlocking};
use peerlane::Algorithm;
use peerlane::bootstrap::{Bootstrap, in_process};
use peerlane::group::MemoryRange;
use peerlane::{Error, Group, Rank, rocm};
use support::{done, hip};

mod support;

const RANKS: usize = 4;
const BLOCK: usize = 70_001;

fn byte(rank: usize, step: u8) -> u8 {
    (rank as u8 + 1) * 16 + step
}

fn write(to: MemoryRange, value: u8) {
    let bytes = vec![value; to.bytes as usize];
    let kind = hipMemcpyKind::hipMemcpyHostToDevice;
    let (to, from) = (to.base.as_ptr().cast::<c_void>(), bytes.as_ptr().cast());
    // SAFETY: both are that long, and no start is under way.
    done(unsafe { (hip().memcpy)(to, from, bytes.len(), kind) });
}

fn read(from: MemoryRange) -> Vec<u8> {
    let mut bytes = vec![0; from.bytes as usize];
    let kind = hipMemcpyKind::hipMemcpyDeviceToHost;
    let (to, from) = (bytes.as_mut_ptr().cast(), from.base.as_ptr().cast::<c_void>());
    // SAFETY: as above.
    done(unsafe { (hip().memcpy)(to, from, bytes.len(), kind) });
    bytes
}

fn gather(algorithm: Algorithm) -> Result<(), Error> {
    hip();
    in_process::run(RANKS, |bootstrap| {
        let (rank, ranks) = (bootstrap.rank(), bootstrap.ranks());
        let fabric = rocm::Fabric::open(rank, ranks, rank.0)?;
        let mut group = Group::open(bootstrap, fabric)?;
        let gather = group.all_gather::<u8>(BLOCK).algorithm(algorithm);
        let mut gather = gather.timeout(Duration::from_secs(60)).prepare()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: any device may be chosen.
        done(unsafe { (hip().set_device)(rank.0 as i32) });
        let create = hip().stream_create_with_flags;
        // SAFETY: the result is stored in a local.
        done(unsafe { create(&raw mut raw, hipStreamNonBlocking) });
        // SAFETY: the stream lives as long as the process.
        let stream = unsafe { rocm::Stream::from_raw(raw.cast()) };
        for step in 0..3 {
            write(gather.input_memory().unwrap(), byte(rank.index(), step));
            drop(gather.start_on(&stream)?);
            // SAFETY: the stream lives.
            done(unsafe { (hip().stream_synchronize)(raw) });
            for peer in Rank::all(ranks) {
                let block = read(gather.output_memory_of(peer)?);
                assert_eq!(block.len(), BLOCK);
                assert!(block.iter().all(|seen| *seen == byte(peer.index(), step)));
            }
        }
        drop(gather);
        group.close()
    })
    .map(drop)
}

#[test]
fn a_gather_is_whole_without_an_hsa_runtime() {
    gather(Algorithm::Direct).unwrap();
    gather(Algorithm::Ring).unwrap();
    let runtimes = rocm::runtimes().unwrap();
    assert_eq!(runtimes.hip.to_string(), "7.2.0");
    assert!(runtimes.hsa.unwrap_err().contains("cannot find libhsa-runtime64.so"));
}

#[test]
fn devices_are_those_of_the_driver_below() {
    hip();
    let devices = rocm::discover().unwrap();
    assert_eq!(devices.len(), 4);
    assert_eq!(devices[3].ordinal, 3);
}
