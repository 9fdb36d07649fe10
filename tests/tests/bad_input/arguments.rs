//! Passes arguments that are always invalid, on one rank or on all.

use std::time::Duration;

use insta::assert_snapshot;
use peerlane_collectives::bootstrap::Bootstrap;
use peerlane_collectives::bootstrap::environment::Environment;
use peerlane_collectives::bootstrap::in_process;
use peerlane_collectives::bootstrap::tcp::Hub;
use peerlane_collectives::element;
use peerlane_collectives::error::Error;
use peerlane_collectives::group::Operation;
use peerlane_hal::Rank;
use peerlane_host as host;

use crate::ranks::{Host, LONG, all_said, gather, in_group, on_ranks, open, said};

/// Prepares, must fail, and gathers afterwards: the group is still good.
fn prepared(prepare: impl Fn(&mut Host) -> Result<Operation<f32>, Error> + Sync) -> String {
    let results = in_group(2, LONG, |mut group| {
        let refused = prepare(&mut group).map(drop);
        gather(&mut group).expect("the group is still whole");
        group.close().expect("the group closes");
        refused
    });
    all_said(results)
}

fn environment(ranks: &str, rank: &str) -> Result<Option<Environment>, Error> {
    Environment::from_lookup(|name| match name {
        "WORLD_SIZE" => Some(ranks.to_owned()),
        "RANK" => Some(rank.to_owned()),
        _ => None,
    })
}

#[test]
fn no_ranks() {
    let fabric = host::Fabric::open(Rank(0), 0).map_err(Error::from);
    assert_snapshot!(said(fabric), @"invalid argument, no rank: rank 0 is out of range: expected a rank below 0, the number of ranks");
    assert_snapshot!(said(in_process::group(0)), @"invalid argument, no rank: number of ranks is 0, expected at least 1");
    assert_snapshot!(said(Hub::bind("127.0.0.1:0", 0)), @"invalid argument, no rank: number of ranks is 0, expected at least 1");
    assert_snapshot!(said(environment("0", "0")), @"invalid argument, no rank: WORLD_SIZE is 0, expected at least 1, the number of ranks");
}

#[test]
fn a_rank_beyond_the_last() {
    let fabric = host::Fabric::open(Rank(3), 3).map_err(Error::from);
    assert_snapshot!(said(fabric), @"invalid argument, no rank: rank 3 is out of range: expected a rank below 3, the number of ranks");
    assert_snapshot!(said(environment("3", "3")), @"invalid argument, no rank: RANK is 3, expected a number below 3, the value of WORLD_SIZE (ranks count from 0)");
}

#[test]
fn no_time_to_open() {
    let results = on_ranks(2, |bootstrap| open(bootstrap, Duration::ZERO).map(drop));
    assert_snapshot!(all_said(results), @"all: invalid argument, no rank: timeout is 0 s, expected more than 0 s");
    let results = on_ranks(3, |bootstrap| {
        let timeout = if bootstrap.rank() == Rank(1) { Duration::ZERO } else { LONG };
        open(bootstrap, timeout).map(drop)
    });
    assert_snapshot!(all_said(results), @r"
    rank 0: peer lost, rank 1: rank 1 is lost: its bootstrap was dropped before the rank left the group
    rank 1: invalid argument, no rank: timeout is 0 s, expected more than 0 s
    rank 2: peer lost, rank 1: rank 1 is lost: its bootstrap was dropped before the rank left the group
    ");
}

#[test]
fn no_time_to_finish() {
    let text = prepared(|group| {
        let timeout = if group.rank() == Rank(1) { Duration::ZERO } else { LONG };
        group.all_gather(4).timeout(timeout).prepare()
    });
    assert_snapshot!(text, @r"
    rank 0: aborted, rank 1: all-gather 1: rank 1 failed (invalid argument): timeout is 0 s, expected more than 0 s
    rank 1: invalid argument, no rank: timeout is 0 s, expected more than 0 s
    ");
}

#[test]
fn no_chunks() {
    assert_snapshot!(prepared(|group| group.all_gather(4).chunks(0).prepare()), @"all: invalid argument, no rank: chunks is 0, expected at least 1");
}

#[test]
fn no_outputs_or_too_many() {
    assert_snapshot!(prepared(|group| group.all_gather(4).outputs(0).prepare()), @"all: invalid argument, no rank: outputs is 0, expected 1 to 2 out of place");
    assert_snapshot!(prepared(|group| group.all_gather(4).outputs(3).prepare()), @"all: invalid argument, no rank: outputs is 3, expected 1 to 2 out of place");
    assert_snapshot!(prepared(|group| group.all_gather(4).outputs(2).in_place().prepare()), @"all: invalid argument, no rank: outputs is 2, expected 1 to 1 in place");
}

#[test]
fn a_block_that_no_address_space_holds() {
    assert_snapshot!(prepared(|group| group.all_gather(usize::MAX / 2).prepare()), @"all: invalid argument, no rank: block_len is 9223372036854775807 elements of f32, which exceed the address space");
    let half = isize::MAX as usize / 4;
    let text = prepared(|group| group.all_gather(half).prepare());
    assert_snapshot!(text, @"all: out of memory, no rank: cannot add 18446744073709551615 bytes for data to the heap, which has 0 bytes, 0 of them in use by 0 operations: cannot allocate memory of the heap: cannot allocate 18446744073709551615 bytes of host memory: SOME bytes are available on this machine; use smaller buffers or fewer ranks");
}

#[test]
fn a_buffer_that_no_address_space_holds() {
    let results = in_group(1, LONG, |group| group.allocate::<f64>(usize::MAX / 4).map(drop));
    assert_snapshot!(all_said(results), @"all: invalid argument, no rank: len is 4611686018427387903 elements of f64, which exceed the address space");
}

#[test]
fn blocks_of_different_sizes_are_found_before_memory_is_allocated() {
    let text = prepared(|group| {
        let block_len = if group.rank() == Rank(1) { 1 << 45 } else { 4 };
        group.all_gather(block_len).prepare()
    });
    assert_snapshot!(text, @"all: mismatch, rank 1: all-gather 1: ranks disagree: block_bytes is 140737488355328 on rank 1, 16 on rank 0");
}

#[test]
fn more_memory_than_the_machine_has() {
    let results = in_group(2, LONG, |group| group.allocate::<u8>(1 << 50).map(drop));
    assert_snapshot!(all_said(results), @"all: out of memory, no rank: cannot allocate a buffer: cannot allocate 1125899906842624 bytes of host memory: SOME bytes are available on this machine; use smaller buffers or fewer ranks");
}

#[test]
fn buffers_of_a_wrong_size() {
    let text = prepared(|group| {
        let input = group.allocate(if group.rank() == Rank(0) { 5 } else { 4 })?;
        group.all_gather(4).input(input).prepare()
    });
    assert_snapshot!(text, @r"
    rank 0: invalid argument, no rank: the input has 20 bytes, expected 16 bytes
    rank 1: aborted, rank 0: all-gather 1: rank 0 failed (invalid argument): the input has 20 bytes, expected 16 bytes
    ");
    let text = prepared(|group| {
        let output = group.allocate(4)?;
        group.all_gather(4).output(output).prepare()
    });
    assert_snapshot!(text, @"all: invalid argument, no rank: the output has 16 bytes, expected 32 bytes");
}

#[test]
fn an_input_in_place() {
    let text = prepared(|group| {
        let input = group.allocate(4)?;
        group.all_gather(4).in_place().input(input).prepare()
    });
    assert_snapshot!(text, @"all: invalid argument, no rank: an input buffer is given, expected none: in place, the input is the rank's block of the output");
}

#[test]
fn slices_that_are_misaligned_or_of_an_odd_length() {
    let words = [0_u64; 2];
    let bytes: &[u8] = bytemuck::cast_slice(&words);
    assert_snapshot!(said(element::cast::<f64>(&bytes[4..12])), @"invalid argument, no rank: misaligned slice of f64: it begins 4 bytes after an aligned address, expected a multiple of 8 bytes");
    assert_snapshot!(said(element::cast::<half::bf16>(&bytes[1..3])), @"invalid argument, no rank: misaligned slice of bf16: it begins 1 bytes after an aligned address, expected a multiple of 2 bytes");
    assert_snapshot!(said(element::cast::<i32>(&bytes[..7])), @"invalid argument, no rank: the slice has 7 bytes, expected a multiple of the element size, 4 bytes (i32)");
}
