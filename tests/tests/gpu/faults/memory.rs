//! Passes memory that does not exist, that belongs to another device, or that is too large.

use std::ptr::NonNull;

use peerlane_collectives::error::Error;
use peerlane_hal::{ErrorKind, Rank};
use peerlane_test_support::not_covered;
use peerlane_tests::processes::Parent;
use peerlane_tests::{Failure, Outcome};

use super::Fault;
use super::processes::{finish, ranks, words};
use crate::support::data::{check, unexpected};
use crate::support::test_rank::TestRank;
use crate::vendor::Context;
use crate::vendor::gpu::Gpu;

const BYTES: usize = 10_000;

pub(crate) fn faults() -> Vec<Fault> {
    let names = [
        ("too_much", 1),
        ("too_much_for_one_rank", 2),
        ("host_memory", 1),
        ("pinned_memory", 1),
        ("freed_memory", 1),
        ("beyond_the_end", 1),
        ("another_device", 1),
    ];
    let faults = names.map(|(name, count)| {
        Fault::new(format!("memory::{name}"), move |driver| {
            let (_hub, mut children) = ranks(driver, "memory", count, |_, player| {
                player.value("CASE", name).variable("PEERLANE_SIM_MEMORY_MIB", "256")
            })?;
            let said = words(&mut children)?;
            check(said.iter().all(|text| text == "done"), || format!("ranks said {said:#?}"))?;
            finish(children)
        })
    });
    faults.into()
}

/// One rank, which meets an error and then gathers as if nothing had been.
pub(crate) fn run_rank(parent: &Parent) -> Outcome {
    let mut test_rank = TestRank::open(parent)?;
    match parent.value::<String>("CASE")?.as_str() {
        "too_much" => too_much(&mut test_rank),
        "too_much_for_one_rank" => too_much_for_one_rank(&mut test_rank),
        "host_memory" => host_memory(&test_rank),
        "pinned_memory" => pinned_memory(&test_rank),
        "freed_memory" => freed_memory(&test_rank),
        "beyond_the_end" => beyond_the_end(&test_rank),
        "another_device" => another_device(&test_rank),
        case => Err(Failure::new(format!("there is no case {case:?}"))),
    }?;
    let mut gather = test_rank.group.all_gather::<u8>(BYTES).prepare().map_err(unexpected)?;
    test_rank.gather_once(&mut gather)?;
    drop(gather);
    test_rank.group.close().map_err(unexpected)?;
    parent.print_line("done");
    Ok(())
}

/// More than the device has.
fn too_much_bytes(test_rank: &TestRank) -> usize {
    let bytes = test_rank
        .group
        .fabric()
        .downcast_ref::<crate::vendor::Fabric>()
        .unwrap()
        .device()
        .memory_bytes
        + (1 << 30);
    usize::try_from(bytes).expect("64 bits")
}

fn too_much(test_rank: &mut TestRank) -> Outcome {
    let bytes = too_much_bytes(test_rank);
    let device = format!("device {} (", test_rank.gpu.ordinal);
    let holds = [bytes.to_string(), device, "are free".to_owned()];
    let refused = test_rank.group.allocate::<u8>(bytes);
    wanted(refused.map(drop).err(), ErrorKind::OutOfMemory, &holds)?;
    let prepared = test_rank.group.all_gather::<u8>(bytes).prepare();
    wanted(prepared.map(drop).err(), ErrorKind::OutOfMemory, &["device 0 (".to_owned()])
}

/// All ranks hear of it, and who it was.
fn too_much_for_one_rank(test_rank: &mut TestRank) -> Outcome {
    // Only the root of a gather allocates the output.
    let block_bytes = too_much_bytes(test_rank).div_ceil(test_rank.ranks);
    let error = test_rank.group.gather::<u8>(Rank(1), block_bytes).prepare().map(drop).err();
    let kind = if test_rank.me == 1 { ErrorKind::OutOfMemory } else { ErrorKind::Aborted };
    let others = ["rank 1 failed (out of memory)".to_owned(), "on device ".to_owned()];
    let device = format!("device {} (", test_rank.gpu.ordinal);
    let own = [(block_bytes * test_rank.ranks).to_string(), device];
    wanted(error, kind, if test_rank.me == 1 { &own } else { &others })
}

fn host_memory(test_rank: &TestRank) -> Outcome {
    let memory = vec![0_u8; BYTES];
    let address = memory.as_ptr() as u64;
    register(test_rank, address, BYTES, &["expected device memory", "host memory"])
}

fn pinned_memory(test_rank: &TestRank) -> Outcome {
    let memory = test_rank.gpu.pinned(BYTES)?;
    let address = memory.address();
    register(test_rank, address, BYTES, &["host"])
}

fn freed_memory(test_rank: &TestRank) -> Outcome {
    let address = test_rank.gpu.memory(BYTES)?.address;
    register(test_rank, address, BYTES, &["freed"])
}

fn beyond_the_end(test_rank: &TestRank) -> Outcome {
    let memory = test_rank.gpu.memory(BYTES)?;
    // Allocations may be larger than asked for, but not by so much.
    let bytes = BYTES + (64 << 20);
    register(test_rank, memory.address, bytes, &[&bytes.to_string()])
}

fn another_device(test_rank: &TestRank) -> Outcome {
    let own = &test_rank.gpu;
    if own.driver.devices::<Context>()? < 2 {
        not_covered("memory of another device", "there is one device");
        return Ok(());
    }
    let other = Gpu::open(own.driver, own.ordinal + 1)?;
    let memory = other.memory(BYTES)?;
    own.make_current()?;
    let refusal = register(test_rank, memory.address, BYTES, &["device 1", "device 0"]);
    // The other context ends with its last user, and leaves itself current on this thread.
    drop((memory, other));
    own.make_current()?;
    refusal
}

/// The address must be refused, in words that name it.
fn register(test_rank: &TestRank, address: u64, bytes: usize, holds: &[&str]) -> Outcome {
    let base = NonNull::new(address as *mut u8).expect("not at 0");
    // SAFETY: it must be refused; and if it is not, nobody uses it.
    let registered = unsafe { test_rank.group.register_at::<u8>(base, bytes) };
    let holds = holds.iter().map(|words| (*words).to_owned());
    let holds: Vec<String> = holds.chain([format!("{address:#x}")]).collect();
    wanted(registered.map(drop).err(), ErrorKind::InvalidArgument, &holds)
}

fn wanted(error: Option<Error>, kind: ErrorKind, holds: &[String]) -> Outcome {
    let seen = error.as_ref().map(Error::kind);
    let text = error.map(|error| error.to_string()).unwrap_or_default();
    let whole = seen == Some(kind) && holds.iter().all(|words| text.contains(words.as_str()));
    check(whole, || format!("{seen:?}: {text:?}, expected {kind:?} and {holds:?}"))
}
