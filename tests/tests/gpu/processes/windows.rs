//! Gathers over windows: in the group's memory and in the caller's, on streams and in graphs.

use peerlane_collectives::group::{Operation, Window};
use peerlane_tests::Outcome;

use super::Case;
use super::captured::{self, replayed};
use super::own_memory::{buffer, margins_are_whole};
use super::streams::{Book, start_once};
use crate::support::data::unexpected;
use crate::support::test_rank::{CaptureMode, TestRank};

const BLOCK_BYTES: usize = captured::BLOCK_BYTES;
/// Bytes of the window before the gathered range, and after it.
const MARGIN_BYTES: usize = 33;
const STARTS: usize = 4;

pub(crate) fn cases() -> Vec<Case> {
    let uses: [(&str, Use); 2] = [("starts on a stream", on_stream), ("replays", in_graph)];
    let forms = [("in place", true), ("from a second window", false)];
    let cases = uses.into_iter().flat_map(|(what, run)| {
        forms.into_iter().flat_map(move |(form, in_place)| {
            let of_group = move |test_rank: &mut TestRank| {
                let bytes = window_bytes(test_rank);
                let window = test_rank.group.window(bytes).map_err(unexpected)?;
                gather(test_rank, &window, in_place, run)
            };
            let of_caller = move |test_rank: &mut TestRank| own_memory(test_rank, in_place, run);
            [
                Case::new(format_args!("{what}, {form}, the group's memory"), of_group),
                Case::new(format_args!("{what}, {form}, the caller's memory"), of_caller),
            ]
        })
    });
    cases.collect()
}

/// What is done with a gather over a window.
type Use = fn(&mut TestRank, &mut Operation<u8>) -> Outcome;

fn window_bytes(test_rank: &TestRank) -> usize {
    BLOCK_BYTES * test_rank.ranks + 2 * MARGIN_BYTES
}

/// Makes a window of memory that begins inside an allocation, and checks that nothing outside of the range was written.
fn own_memory(test_rank: &mut TestRank, in_place: bool, run: Use) -> Outcome {
    let bytes = window_bytes(test_rank);
    let memory = test_rank.gpu.memory(bytes + 1)?;
    let buffer = buffer(test_rank, memory.address + 1, bytes)?;
    let window = test_rank.group.window_over(buffer).map_err(unexpected)?;
    let base = window.memory(0..bytes).map_err(unexpected)?.base;
    assert_eq!(base.as_ptr() as u64, memory.address + 1, "the window is the caller's memory");
    gather(test_rank, &window, in_place, run)?;
    drop(window);
    // After the barrier no peer has an import of the memory.
    test_rank.group.barrier().map_err(unexpected)?;
    margins_are_whole(test_rank, &memory, &[(1 + MARGIN_BYTES, bytes - 2 * MARGIN_BYTES)])
}

fn gather(test_rank: &mut TestRank, window: &Window<u8>, in_place: bool, run: Use) -> Outcome {
    let len = (window.len() - 2 * MARGIN_BYTES) / test_rank.ranks;
    let blocks = test_rank.group.window::<u8>(BLOCK_BYTES + 1).map_err(unexpected)?;
    let builder = test_rank.group.all_gather(len).output_into(window, MARGIN_BYTES);
    // SAFETY: `run` finishes the stream and drops the graph, and the host borrows nothing.
    let builder = unsafe { builder.capturable() };
    let builder = if in_place { builder.in_place() } else { builder.input_from(&blocks, 1) };
    let mut gather = builder.prepare().map_err(unexpected)?;
    run(test_rank, &mut gather)
}

fn on_stream(test_rank: &mut TestRank, gather: &mut Operation<u8>) -> Outcome {
    let (stream, mut book) = (test_rank.gpu.stream()?, Book::new(test_rank, BLOCK_BYTES, STARTS)?);
    for _ in 0..STARTS {
        start_once(test_rank, &stream, gather, &mut book)?;
    }
    stream.finish()?;
    book.check()
}

/// Replays a graph of two starts with other data each time, between starts that run at once.
fn in_graph(test_rank: &mut TestRank, gather: &mut Operation<u8>) -> Outcome {
    replayed(test_rank, gather, 2, STARTS, CaptureMode::ThreadLocal)
}
