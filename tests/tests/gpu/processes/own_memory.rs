//! Gathers with inputs and outputs in memory that the caller allocated.

use std::fs::File;
use std::ptr::NonNull;

use peerlane_collectives::group::Buffer;
use peerlane_tests::Outcome;
use rustix::fs::{MemfdFlags, memfd_create};

use super::Case;
use crate::support::data::{POISON, same, unexpected};
use crate::support::test_rank::TestRank;
use crate::vendor::memory::DeviceMemory;
use crate::vendor::segments::Segments;

const BLOCK_BYTES: usize = 10_001;
/// Around the spans that are registered.
const MARGIN_BYTES: usize = 64;
const STARTS: usize = 3;

pub(crate) fn cases() -> Vec<Case> {
    let mut cases: Vec<Case> = Vec::new();
    for again in [false, true] {
        let name = if again { "the same memory again" } else { "inside allocations" };
        cases.push(Case::new(name, allocations));
    }
    cases.push(Case::new("in place inside an allocation", in_place));
    cases.push(Case::new("both in one allocation", one_allocation));
    cases.push(Case::new("over several segments", segments));
    cases.push(Case::new("files of the host", files_of_host));
    cases
}

/// Memory at odd places, which differ from rank to rank.
fn allocations(test_rank: &mut TestRank) -> Outcome {
    let total = BLOCK_BYTES * test_rank.ranks;
    let input = test_rank.gpu.memory(BLOCK_BYTES + MARGIN_BYTES)?;
    let output = test_rank.gpu.memory(total + MARGIN_BYTES)?;
    let (input_at, output_at) = (7 + test_rank.me, 33 + 2 * test_rank.me);
    let buffers = [
        buffer(test_rank, input.address + input_at as u64, BLOCK_BYTES)?,
        buffer(test_rank, output.address + output_at as u64, total)?,
    ];
    gather(test_rank, buffers, BLOCK_BYTES)?;
    margins_are_whole(test_rank, &input, &[(input_at, BLOCK_BYTES)])?;
    margins_are_whole(test_rank, &output, &[(output_at, total)])
}

fn in_place(test_rank: &mut TestRank) -> Outcome {
    let total = BLOCK_BYTES * test_rank.ranks;
    let output = test_rank.gpu.memory(total + MARGIN_BYTES)?;
    let output_at = 1 + test_rank.me;
    let buffer = buffer(test_rank, output.address + output_at as u64, total)?;
    let builder = test_rank.group.all_gather::<u8>(BLOCK_BYTES).in_place().output(buffer);
    let mut gather = builder.prepare().map_err(unexpected)?;
    (0..STARTS).try_for_each(|_| test_rank.gather_once(&mut gather))?;
    drop(gather);
    test_rank.group.barrier().map_err(unexpected)?;
    margins_are_whole(test_rank, &output, &[(output_at, total)])
}

fn one_allocation(test_rank: &mut TestRank) -> Outcome {
    let total = BLOCK_BYTES * test_rank.ranks;
    let memory = test_rank.gpu.memory(BLOCK_BYTES + total + MARGIN_BYTES)?;
    let (input_at, output_at) = (3, 3 + BLOCK_BYTES + 1 + test_rank.me);
    let buffers = [
        buffer(test_rank, memory.address + input_at as u64, BLOCK_BYTES)?,
        buffer(test_rank, memory.address + output_at as u64, total)?,
    ];
    gather(test_rank, buffers, BLOCK_BYTES)?;
    margins_are_whole(test_rank, &memory, &[(input_at, BLOCK_BYTES), (output_at, total)])
}

/// Spans that begin and end inside of segments, over their borders.
fn segments(test_rank: &mut TestRank) -> Outcome {
    let input = Segments::new(&test_rank.gpu, 2);
    let output = Segments::new(&test_rank.gpu, 3);
    let (input, output) = match (input, output) {
        (Ok(input), Ok(output)) => (input, output),
        // All ranks have the same driver, and skip together.
        (Err(failure), _) | (_, Err(failure)) => {
            eprintln!("not covered: memory of several segments: {failure}");
            return Ok(());
        }
    };
    let unit = output.segment_bytes;
    let block_bytes = (unit + 2000) / test_rank.ranks;
    let input_at = input.address + (unit - 100) as u64;
    let input_bytes = block_bytes.min(unit);
    let block_bytes = input_bytes;
    let total = block_bytes * test_rank.ranks;
    let buffers = [
        buffer(test_rank, input_at, block_bytes)?,
        buffer(test_rank, output.address + (unit - 777) as u64, total)?,
    ];
    gather(test_rank, buffers, block_bytes)
}

/// Parts of memfds, which the driver pins.
fn files_of_host(test_rank: &mut TestRank) -> Outcome {
    let register = |bytes: usize| {
        let page = rustix::param::page_size() as u64;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(memfd_create("arena", flags).expect("a memfd"));
        file.set_len(page + bytes as u64).expect("a longer memfd");
        // SAFETY: nobody else has the file, which keeps its pages.
        let buffer = unsafe { test_rank.group.register_descriptor(&file, page, bytes) };
        buffer.map_err(unexpected)
    };
    let buffers = [register(BLOCK_BYTES)?, register(BLOCK_BYTES * test_rank.ranks)?];
    gather(test_rank, buffers, BLOCK_BYTES)
}

/// Registered memory of the caller's.
pub(super) fn buffer(test_rank: &TestRank, address: u64, bytes: usize) -> Outcome<Buffer<u8>> {
    let base = NonNull::new(address as *mut u8).expect("the driver allocates nothing at 0");
    // SAFETY: whoever calls keeps the memory until all ranks have passed the barrier of `gather`.
    let buffer = unsafe { test_rank.group.register_at(base, bytes) };
    buffer.map_err(unexpected)
}

fn gather(test_rank: &mut TestRank, buffers: [Buffer<u8>; 2], block_bytes: usize) -> Outcome {
    let [input, output] = buffers;
    let builder = test_rank.group.all_gather::<u8>(block_bytes).input(input).output(output);
    let mut gather = builder.prepare().map_err(unexpected)?;
    let gathered = (0..STARTS).try_for_each(|_| test_rank.gather_once(&mut gather));
    drop(gather);
    // Behind it no peer holds an import any more.
    test_rank.group.barrier().map_err(unexpected)?;
    gathered
}

/// Fails if anything outside of the spans was written to.
pub(super) fn margins_are_whole(
    test_rank: &TestRank,
    memory: &DeviceMemory,
    spans: &[(usize, usize)],
) -> Outcome {
    let seen = test_rank.gpu.pinned(memory.bytes)?;
    test_rank.stream.copy_out(&seen, 0, memory.address, memory.bytes)?;
    test_rank.stream.finish()?;
    let mut begin = 0;
    let ends = spans.iter().copied().chain([(memory.bytes, 0)]);
    for (at, bytes) in ends {
        let margin = seen.read(begin, at - begin);
        same(format_args!("the margin at {begin}"), &margin, &vec![POISON; margin.len()])?;
        begin = at + bytes;
    }
    Ok(())
}
