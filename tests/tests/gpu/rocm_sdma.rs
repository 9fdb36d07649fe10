//! Runs whole all-gathers of threads over SDMA engines with every algorithm of one node, on GPUs if
//! there are any.

mod blocking;

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use peerlane_collectives::bootstrap::{Bootstrap as _, in_process};
use peerlane_collectives::group::GroupOptions;
use peerlane_collectives::plan::Algorithm;
use peerlane_hal::ErrorKind;
use peerlane_rocm::{Context, EngineKind, Fabric, Options, Stream};
use peerlane_simulated_driver::Rocm;
use peerlane_test_support::not_covered;
use peerlane_tests::GpuDriver;

use blocking::{make_current, read, write};

/// Settings of the simulated driver are the process's.
static ALONE: Mutex<()> = Mutex::new(());

const ALGORITHMS: [Algorithm; 4] =
    [Algorithm::Direct, Algorithm::Pull, Algorithm::Ring, Algorithm::DoubleRing];

fn block(rank: usize, step: usize, bytes: usize) -> Vec<u8> {
    // Equal bytes are 256 apart, so a period of the pattern is repeated.
    let byte = |index: usize| (index * 3 + rank * 41 + step * 7 + 1) as u8;
    let period: Vec<u8> = (0..256).map(byte).collect();
    let mut block = period.repeat(bytes.div_ceil(256));
    block.truncate(bytes);
    block
}

/// Some starts of one operation, with other bytes each time.
fn gather(devices: u32, ranks: usize, algorithm: Algorithm, bytes: usize, in_place: bool) {
    let ran = in_process::run(ranks, |bootstrap| {
        let me = bootstrap.rank();
        let device = me.0 % devices;
        let options = Options { device, engine: EngineKind::Sdma, ..Options::default() };
        let fabric = Fabric::open_with(me, ranks, options).expect("a fabric");
        let group = GroupOptions::default().timeout(Duration::from_secs(60));
        let mut group = group.open(bootstrap, fabric)?;
        let mut gather = group.all_gather::<u8>(bytes).algorithm(algorithm).chunks(2);
        if in_place {
            gather = gather.in_place();
        }
        let mut gather = gather.prepare()?;
        // The memory that this thread copies to and from is of this device.
        make_current(device);
        for step in 0..3 {
            write(gather.input_memory().unwrap(), &block(me.index(), step, bytes));
            gather.run()?;
            let seen = read(gather.output_memory());
            let wanted =
                (0..ranks).map(|rank| block(rank, step, bytes)).collect::<Vec<_>>().concat();
            assert!(seen == wanted, "{algorithm}, {ranks} ranks, {bytes} bytes, rank {me}");
        }
        drop(gather);
        group.close()
    });
    ran.unwrap_or_else(|error| panic!("{algorithm}, {ranks} ranks, {bytes} bytes: {error}"));
}

/// What moves the blocks of an operation, where that is left open or not.
fn kind_of(devices: u32, bytes: usize, any_engine: bool) -> &'static str {
    let ran = in_process::run(2, |bootstrap| {
        let me = bootstrap.rank();
        let options = Options { device: me.0 % devices, ..Options::default() };
        let fabric = Fabric::open_with(me, 2, options).expect("a fabric");
        let group = GroupOptions::default().timeout(Duration::from_secs(60));
        let mut group = group.open(bootstrap, fabric)?;
        let gather = group.all_gather::<u8>(bytes).algorithm(Algorithm::Direct);
        let gather = if any_engine { gather.any_engine() } else { gather };
        let mut gather = gather.prepare()?;
        gather.run()?;
        let kind = gather.report().lanes[0].kind;
        // SAFETY: the handle is looked at only where streams are taken, which these do not.
        let stream = unsafe { Stream::from_raw(std::ptr::dangling_mut()) };
        if !gather.report().takes_streams() {
            let error = gather.start_on(&stream).expect_err("the host drives it");
            assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
            let text = "sdma engines of the backend rocm cannot run on a stream; use `start`";
            assert_eq!(error.to_string(), text);
            gather.run()?;
        }
        drop(gather);
        group.close()?;
        Ok(kind)
    });
    let kinds = ran.expect("it runs");
    assert_eq!(kinds[0], kinds[1]);
    kinds[0]
}

#[test]
fn an_operation_gets_the_kind_that_is_predicted_to_be_faster() {
    if GpuDriver::load::<Context>() != GpuDriver::Simulated {
        let test = "an_operation_gets_the_kind_that_is_predicted_to_be_faster";
        not_covered(test, "what links carry is set on simulated devices only");
        return;
    }
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let machine = Rocm::release("7.2").install();
    let devices = peerlane_rocm::discover().expect("there are devices").len() as u32;
    const LARGE: usize = 16 << 20;
    assert_eq!(kind_of(devices, LARGE, true), "sdma");
    assert_eq!(kind_of(devices, 1 << 20, true), "streams", "the host costs more than is gained");
    assert_eq!(kind_of(devices, LARGE, false), "streams", "it may be started on streams");
    machine.set("ENGINES_PER_LINK", "1");
    assert_eq!(kind_of(devices, LARGE, true), "streams", "one engine fills a link");
    machine.set("ENGINES_PER_LINK", "2");
}

#[test]
fn every_algorithm_from_1_to_9_ranks() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let driver = GpuDriver::load::<Context>();
    eprintln!("running on: {driver:?}");
    if let Err(why) = peerlane_rocm::runtimes().expect("HIP is there").hsa {
        // Where HIP's symbols are those of another vendor's driver.
        not_covered("every_algorithm_from_1_to_9_ranks", &why.to_string());
        return;
    }
    let simulated = match driver {
        GpuDriver::Simulated => Some(Rocm::release("7.2").install()),
        GpuDriver::Device => None,
    };
    if let Some(machine) = &simulated {
        machine.set("JITTER_US", "100");
    }
    let devices = peerlane_rocm::discover().expect("there are devices").len();
    let devices = u32::try_from(devices).expect("a machine has few devices");
    for ranks in 1..=9 {
        for algorithm in ALGORITHMS {
            for (bytes, in_place) in [(1, false), (4097, true), (70_001, false)] {
                gather(devices, ranks, algorithm, bytes, in_place);
            }
        }
    }
    // By SDMA engines and not by streams.
    assert!(simulated.is_none_or(|machine| machine.counter("sdma_copies", None) > 0));
}
