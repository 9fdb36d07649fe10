//! Passes lists, tensors, lengths and windows that do not fit.

use insta::assert_snapshot;
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{BlockLens, Destination};
use peerlane_hal::Rank;
use peerlane_host as host;

use crate::ranks::{Host, LONG, all_said, gather, in_group, on_ranks, open};

/// Prepares, must fail, and gathers afterwards: the group is still good.
fn prepared(prepare: impl Fn(&mut Host) -> Result<(), Error> + Sync) -> String {
    let results = in_group(3, LONG, |mut group| {
        let refused = prepare(&mut group);
        gather(&mut group).expect("the group is still whole");
        group.close().expect("the group closes");
        refused
    });
    all_said(results)
}

fn to(buffer: usize, offset: usize) -> Destination {
    Destination { buffer, offset }
}

#[test]
fn another_number_of_lengths_than_ranks() {
    assert_snapshot!(prepared(|group| group.all_gather::<f32>([1, 2]).prepare().map(drop)), @"all: invalid argument, no rank: block_lens has 2 lengths, expected 3, one for each rank");
    assert_snapshot!(prepared(|group| group.all_gather::<f32>(BlockLens::tensors([&[1, 2, 3][..], &[1]])).prepare().map(drop)), @"all: invalid argument, no rank: block_lens[1] has 1 lengths, expected 3, one for each rank");
    assert_snapshot!(prepared(|group| group.all_gather::<f32>(BlockLens::tensors([0; 0])).prepare().map(drop)), @"all: invalid argument, no rank: tensors is 0, expected at least 1");
}

#[test]
fn lengths_that_no_address_space_holds() {
    let most = usize::MAX / 2;
    assert_snapshot!(prepared(|group| group.all_gather::<f32>([1, most, 2]).prepare().map(drop)), @"all: invalid argument, no rank: block_lens[1] is 9223372036854775807 elements of f32, which exceed the address space");
    assert_snapshot!(prepared(|group| group.all_gather::<u8>([most, most, most]).prepare().map(drop)), @"all: invalid argument, no rank: blocks are too long: rank 2 adds 9223372036854775807 bytes to the 18446744073709551614 bytes of ranks with lower numbers, expected at most 18446744073709551615 bytes in total");
    assert_snapshot!(prepared(|group| group.all_gather::<f32>(BlockLens::tensors([1, most])).prepare().map(drop)), @"all: invalid argument, no rank: block_lens[1] is 9223372036854775807 elements of f32, which exceed the address space");
    assert_snapshot!(prepared(|group| group.all_gather::<u8>(BlockLens::tensors([most / 2, most / 2])).prepare().map(drop)), @"all: invalid argument, no rank: tensors are too long: tensor 1 adds 13835058055282163709 bytes to the 13835058055282163709 bytes of tensors with lower numbers, expected at most 18446744073709551615 bytes in total");
    assert_snapshot!(prepared(|group| group.window::<f64>(most).map(drop)), @"all: invalid argument, no rank: window_len is 9223372036854775807 elements of f64, which exceed the address space");
}

#[test]
fn lengths_that_differ() {
    let text = prepared(|group| {
        let lens = if group.rank() == Rank(1) { [4, 5, 6] } else { [4, 5, 7] };
        group.all_gather::<f32>(&lens).prepare().map(drop)
    });
    assert_snapshot!(text, @"all: mismatch, rank 1: all-gather 1: ranks disagree: block_bytes of rank 2 is 24 on rank 1, 28 on rank 0");
    let text = prepared(|group| {
        let lens = if group.rank() == Rank(2) { [1, 3] } else { [1, 2] };
        group.all_gather::<f32>(BlockLens::tensors(lens)).prepare().map(drop)
    });
    assert_snapshot!(text, @"all: mismatch, rank 2: all-gather 1: ranks disagree: block_bytes of tensor 1 is 12 on rank 2, 8 on rank 0");
    let text = prepared(|group| {
        let lens = if group.rank() == Rank(2) { vec![1] } else { vec![1, 2] };
        group.all_gather::<f32>(BlockLens::tensors(lens)).prepare().map(drop)
    });
    assert_snapshot!(text, @"all: mismatch, rank 2: all-gather 1: ranks disagree: tensors is 1 on rank 2, 2 on rank 0");
}

#[test]
fn equal_lengths_can_be_given_as_a_list() {
    let text = prepared(|group| match group.rank() {
        Rank(1) => group.all_gather::<f32>([4, 4, 4]).prepare().map(drop),
        _ => group.all_gather::<f32>(4).prepare().map(drop),
    });
    assert_snapshot!(text, @"all: ok");
}

#[test]
fn outputs_of_different_forms() {
    let text = prepared(|group| {
        let destinations = [to(0, 0), to(0, 4), to(0, 8)];
        let rank = group.rank();
        let builder = group.all_gather::<f32>(4);
        let builder = match rank {
            Rank(1) => builder.destinations(&destinations),
            _ => builder,
        };
        builder.prepare().map(drop)
    });
    assert_snapshot!(text, @"all: mismatch, rank 1: all-gather 1: ranks disagree: output is a list of destinations on rank 1, buffers on rank 0");
}

#[test]
fn outputs_of_a_list_that_overlap() {
    let text = prepared(|group| {
        let far = if group.rank() == Rank(1) { 9 } else { 10 };
        let destinations = [to(0, far), to(1, 0), to(0, 0)];
        group.all_gather::<f32>(&[4, 5, 10]).destinations(&destinations).prepare().map(drop)
    });
    assert_snapshot!(text, @r"
    rank 0: aborted, rank 1: all-gather 1: rank 1 failed (invalid argument): outputs of rank 1 overlap: block 2 is bytes 0 to 40 of buffer 0, and block 0 is bytes 36 to 52 of buffer 0
    rank 1: invalid argument, no rank: outputs of rank 1 overlap: block 2 is bytes 0 to 40 of buffer 0, and block 0 is bytes 36 to 52 of buffer 0
    rank 2: aborted, rank 1: all-gather 1: rank 1 failed (invalid argument): outputs of rank 1 overlap: block 2 is bytes 0 to 40 of buffer 0, and block 0 is bytes 36 to 52 of buffer 0
    ");
}

#[test]
fn destinations_that_do_not_fit() {
    let list = |destinations: &[Destination]| {
        prepared(|group| {
            group.all_gather::<f32>(&[1, 1, 1]).destinations(destinations).prepare().map(drop)
        })
    };
    assert_snapshot!(list(&[to(0, 0), to(0, 1)]), @"all: invalid argument, no rank: destinations has 2 entries, expected 3, one for each rank");
    assert_snapshot!(list(&[to(0, 0), to(0, 1), to(0, usize::MAX / 4)]), @"all: invalid argument, no rank: destinations[2].offset is 4611686018427387903 elements of f32, which exceed the address space");
    assert_snapshot!(list(&[to(0, 0), to(1 << 30, 1), to(0, 2)]), @"all: invalid argument, no rank: destinations[1].buffer is 1073741824, expected a number below 1048576");
    assert_snapshot!(list(&[to(0, 0), to(1 << 40, 1), to(0, 2)]), @"all: invalid argument, no rank: destinations[1].buffer is 1099511627776, expected a number below 1048576");
}

#[test]
fn buffers_of_a_list_that_are_too_small_or_too_few() {
    let text = prepared(|group| {
        let short = if group.rank() == Rank(2) { 7 } else { 8 };
        let outputs = vec![group.allocate(2)?, group.allocate(short)?];
        let destinations = [to(1, 0), to(0, 0), to(1, 6)];
        let builder = group.all_gather::<f32>(&[2, 2, 2]).destinations(&destinations);
        builder.output_buffers(outputs).prepare().map(drop)
    });
    assert_snapshot!(text, @r"
    rank 0: aborted, rank 2: all-gather 1: rank 2 failed (invalid argument): output 1 has 28 bytes, expected at least 32 bytes
    rank 1: aborted, rank 2: all-gather 1: rank 2 failed (invalid argument): output 1 has 28 bytes, expected at least 32 bytes
    rank 2: invalid argument, no rank: output 1 has 28 bytes, expected at least 32 bytes
    ");
    let text = prepared(|group| {
        let outputs = vec![group.allocate(2)?];
        let destinations = [to(1, 0), to(0, 0), to(1, 6)];
        let builder = group.all_gather::<f32>(&[2, 2, 2]).destinations(&destinations);
        builder.output_buffers(outputs).prepare().map(drop)
    });
    assert_snapshot!(text, @"all: invalid argument, no rank: destinations name output buffer 1, expected a number below 1, the number of output buffers");
}

#[test]
fn buffers_of_tensors_that_do_not_fit() {
    let text = prepared(|group| {
        let inputs = vec![group.allocate(1)?, group.allocate(2)?];
        let builder = group.all_gather::<f32>(BlockLens::tensors([1, 2, 3]));
        builder.input_buffers(inputs).prepare().map(drop)
    });
    assert_snapshot!(text, @"all: invalid argument, no rank: 2 input buffers are given, expected 1, or 3, one for each tensor");
    let text = prepared(|group| {
        let outputs = vec![group.allocate(3)?, group.allocate(5)?];
        let builder = group.all_gather::<f32>(BlockLens::tensors([1, 2]));
        builder.output_buffers(outputs).prepare().map(drop)
    });
    assert_snapshot!(text, @"all: invalid argument, no rank: output 1 has 20 bytes, expected 24 bytes");
    let text = prepared(|group| {
        let outputs = vec![group.allocate(3)?, group.allocate(3)?];
        group.all_gather::<f32>(1).output_buffers(outputs).prepare().map(drop)
    });
    assert_snapshot!(text, @"all: invalid argument, no rank: 2 output buffers are given, expected 1");
}

#[test]
fn places_that_cannot_take_turns() {
    let destinations = [to(0, 0), to(0, 1), to(0, 2)];
    let text = prepared(|group| {
        let builder = group.all_gather::<f32>(&[1, 1, 1]).destinations(&destinations);
        builder.outputs(2).prepare().map(drop)
    });
    assert_snapshot!(text, @"all: invalid argument, no rank: outputs is 2, expected 1 in an operation with given output buffers");
}

#[test]
fn windows_that_differ() {
    let text = prepared(|group| {
        let len = if group.rank() == Rank(1) { 5 } else { 6 };
        group.window::<f32>(len).map(drop)
    });
    assert_snapshot!(text, @"all: mismatch, rank 1: window 1: ranks disagree: window_bytes is 20 on rank 1, 24 on rank 0");
    let text = prepared(|group| match group.rank() {
        Rank(1) => group.window::<i32>(6).map(drop),
        _ => group.window::<f32>(6).map(drop),
    });
    assert_snapshot!(text, @"all: mismatch, rank 1: window 1: ranks disagree: dtype is i32 on rank 1, f32 on rank 0");
    let text = prepared(|group| {
        let (one, two) = (group.window::<f32>(6)?, group.window::<f32>(6)?);
        let window = if group.rank() == Rank(2) { one } else { two };
        group.all_gather(2).output_into(&window, 0).in_place().prepare().map(drop)
    });
    assert_snapshot!(text, @"all: mismatch, rank 2: all-gather 1: ranks disagree: window is 1 on rank 2, 2 on rank 0");
    let text = prepared(|group| {
        let window = group.window::<f32>(7)?;
        let begin = usize::from(group.rank() == Rank(2));
        group.all_gather(2).output_into(&window, begin).in_place().prepare().map(drop)
    });
    assert_snapshot!(text, @"all: mismatch, rank 2: all-gather 1: ranks disagree: begin in the window is 1 on rank 2, 0 on rank 0");
}

#[test]
fn ranges_that_do_not_fit() {
    let into = |begin| {
        prepared(|group| {
            let window = group.window::<f32>(6)?;
            group.all_gather(2).output_into(&window, begin).in_place().prepare().map(drop)
        })
    };
    assert_snapshot!(into(1), @"all: invalid argument, no rank: the range is 1..7, expected a range within 0..6, the elements of the window");
    assert_snapshot!(into(usize::MAX), @"all: invalid argument, no rank: the range is 18446744073709551615..18446744073709551615, expected a range within 0..6, the elements of the window");
    let text = prepared(|group| {
        let window = group.window::<f32>(6)?;
        let lens = [1, usize::MAX, 2];
        group.all_gather(lens).output_into(&window, 5).in_place().prepare().map(drop)
    });
    assert_snapshot!(text, @"all: invalid argument, no rank: block_lens[1] is 18446744073709551615 elements of f32, which exceed the address space");
}

#[test]
fn inputs_of_a_window_that_do_not_fit() {
    let text = prepared(|group| {
        let window = group.window::<f32>(12)?;
        let begin = if group.rank() == Rank(1) { 5 } else { 6 };
        let builder = group.all_gather(2).output_into(&window, 0).input_from(&window, begin);
        builder.prepare().map(drop)
    });
    assert_snapshot!(text, @r"
    rank 0: aborted, rank 1: all-gather 1: rank 1 failed (invalid argument): input and output overlap: the input is bytes 20 to 28 of window 1, the output is bytes 0 to 24 of the same window; run in place, or use another input
    rank 1: invalid argument, no rank: input and output overlap: the input is bytes 20 to 28 of window 1, the output is bytes 0 to 24 of the same window; run in place, or use another input
    rank 2: aborted, rank 1: all-gather 1: rank 1 failed (invalid argument): input and output overlap: the input is bytes 20 to 28 of window 1, the output is bytes 0 to 24 of the same window; run in place, or use another input
    ");
    let text = prepared(|group| {
        let window = group.window::<f32>(12)?;
        let builder = group.all_gather(2).output_into(&window, 0).input_from(&window, 11);
        builder.prepare().map(drop)
    });
    assert_snapshot!(text, @"all: invalid argument, no rank: the range is 11..13, expected a range within 0..12, the elements of the window");
    let text = prepared(|group| {
        let window = group.window::<f32>(12)?;
        let builder = group.all_gather(2).output_into(&window, 0).input_from(&window, 6);
        builder.in_place().prepare().map(drop)
    });
    assert_snapshot!(text, @"all: invalid argument, no rank: an input buffer is given, expected none: in place, the input is the rank's block of the output");
    let text = prepared(|group| {
        let (window, input) = (group.window::<f32>(12)?, group.allocate(2)?);
        let builder = group.all_gather(2).output_into(&window, 0).input_from(&window, 6);
        builder.input(input).prepare().map(drop)
    });
    assert_snapshot!(text, @"all: invalid argument, no rank: the input is given as a buffer and as a range of a window, expected one of them");
    let text = prepared(|group| {
        let (window, output) = (group.window::<f32>(12)?, group.allocate(6)?);
        group.all_gather(2).output_into(&window, 0).output(output).prepare().map(drop)
    });
    assert_snapshot!(text, @"all: invalid argument, no rank: the output is given as a buffer and as a range of a window, expected one of them");
}

#[test]
fn a_window_of_another_group() {
    let results = on_ranks(1, |bootstrap| {
        let mut group = open(bootstrap, LONG)?;
        let alone = peerlane_collectives::bootstrap::in_process::group(1)?.remove(0);
        let mut other =
            peerlane_collectives::group::Group::open(alone, host::Fabric::open(Rank(0), 1)?)?;
        let window = other.window::<f32>(4)?;
        let refused = group.all_gather(4).output_into(&window, 0).in_place().prepare().map(drop);
        other.close()?;
        group.close()?;
        refused
    });
    assert_snapshot!(all_said(results), @"all: invalid argument, no rank: the window belongs to another group; open it with this group");
}
