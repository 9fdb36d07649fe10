//! Tests windows: regions that are exchanged once, and used by operations over their ranges.

use std::sync::{Arc, Barrier};
use std::time::Duration;

use peerlane_collectives::bootstrap::{Bootstrap, in_process};
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{GroupOptions, Operation, Window};
use peerlane_collectives::plan::Algorithm;
use peerlane_hal::{ErrorKind, Rank};
use peerlane_host as host;

use crate::support::ranks::{UNTOUCHED, check, fill, in_flat_group, in_group};

fn block_of(begin: usize, lens: &[usize], rank: Rank) -> std::ops::Range<usize> {
    let begin = begin + lens[..rank.index()].iter().sum::<usize>();
    begin..begin + lens[rank.index()]
}

/// Gathers in place over the range that begins at `begin`, and checks that nothing outside of it changes.
fn run(
    gather: &mut Operation<u8>,
    window: &Window<u8>,
    begin: usize,
    lens: &[usize],
    (me, start): (Rank, usize),
) -> Result<(), Error> {
    window.slice_mut(0..window.len())?.fill(UNTOUCHED);
    fill(&mut window.slice_mut(block_of(begin, lens, me))?, me, 0, start);
    gather.run()?;
    for rank in Rank::all(lens.len()) {
        check(&window.slice(block_of(begin, lens, rank))?, rank, 0, start);
    }
    let end = begin + lens.iter().sum::<usize>();
    let outside = [window.slice(0..begin)?, window.slice(end..window.len())?];
    assert!(outside.iter().all(|slice| slice.iter().all(|byte| *byte == UNTOUCHED)));
    Ok(())
}

#[test]
fn operations_over_overlapping_ranges_alternate() {
    for ranks in 1..=6 {
        in_group(ranks, Algorithm::ALL, |group, algorithm| {
            let me = group.rank();
            let window = group.window::<u8>(4000)?;
            let even = vec![65; ranks];
            let uneven: Vec<usize> = (0..ranks).map(|rank| rank * 33).collect();
            let ranges = [(0, &even), (17, &even), (100, &uneven), (50, &uneven)];
            let mut gathers = Vec::new();
            for (index, (begin, lens)) in ranges.into_iter().enumerate() {
                let builder = group.all_gather(lens).output_into(&window, begin);
                let builder = builder.algorithm(algorithm).chunks(1 + index as u32).in_place();
                gathers.push((builder.prepare()?, begin, lens));
            }
            for start in 0..12 {
                let index = start % gathers.len();
                let (gather, begin, lens) = &mut gathers[index];
                run(gather, &window, *begin, lens, (me, start))?;
            }
            Ok(())
        });
    }
}

#[test]
fn the_own_block_may_come_from_a_buffer_or_from_a_window() {
    in_group(3, Algorithm::ALL, |group, algorithm| {
        let me = group.rank();
        let (window, blocks) = (group.window::<u8>(400)?, group.window::<u8>(130)?);
        let mut input = group.allocate(65)?;
        fill(input.as_mut_slice()?, me, 0, 0);
        let mut first = group
            .all_gather(65)
            .output_into(&window, 3)
            .algorithm(algorithm)
            .input(input)
            .prepare()?;
        let builder = group.all_gather(65).output_into(&window, 200).algorithm(algorithm);
        let mut second = builder.input_from(&blocks, 65).prepare()?;
        fill(&mut blocks.slice_mut(65..130)?, me, 0, 1);
        let (one, two) = (first.start()?, second.start()?);
        two.wait()?;
        one.wait()?;
        for rank in Rank::all(3) {
            let index = 65 * rank.index();
            check(&window.slice(3 + index..68 + index)?, rank, 0, 0);
            check(&window.slice(200 + index..265 + index)?, rank, 0, 1);
        }
        fill(first.input_mut()?, me, 0, 2);
        first.run()?;
        check(&window.slice(3..68)?, Rank(0), 0, 2);
        Ok(())
    });
}

#[test]
fn the_callers_own_memory_becomes_a_window() {
    in_flat_group(2, |group| {
        let own = group.rank().0 as f32;
        let mut memory = vec![own; 10];
        // SAFETY: nothing uses the memory until the barrier below, after which no rank has the window.
        let buffer = unsafe { group.register(&mut memory[1..9]) }?;
        let window = group.window_over(buffer)?;
        let mut gather = group.all_gather(2).output_into(&window, 2).in_place().prepare()?;
        gather.run()?;
        assert_eq!(window.slice(0..8)?[..], [own, own, 0.0, 0.0, 1.0, 1.0, own, own]);
        window.slice_mut(0..2)?.fill(7.0);
        drop((gather, window));
        group.barrier()?;
        assert_eq!(memory, [own, 7.0, 7.0, 0.0, 0.0, 1.0, 1.0, own, own, own]);
        Ok(())
    });
}

#[test]
fn a_released_window_gives_its_memory_back() {
    in_flat_group(3, |group| {
        let me = group.rank();
        let mut memory = vec![me.0 as f32; 6];
        for round in 0..3 {
            // SAFETY: the memory is not used before the window is released.
            let buffer = unsafe { group.register(&mut memory) }?;
            let window = group.window_over(buffer)?;
            let mut gather = group.all_gather(2).output_into(&window, 0).in_place().prepare()?;
            window.slice_mut(2 * me.index()..2 * me.index() + 2)?.fill(me.0 as f32);
            gather.run()?;
            drop(gather);
            group.release(window)?;
            assert_eq!(memory, [0.0, 0.0, 1.0, 1.0, 2.0, 2.0], "round {round}");
            memory = vec![9.0; 6];
        }
        Ok(())
    });
}

#[test]
fn a_window_that_a_rank_still_uses_is_not_released() {
    in_flat_group(2, |group| {
        let window = group.window::<i32>(4)?;
        let gather = group.all_gather(2).output_into(&window, 0).in_place().prepare()?;
        let me = group.rank();
        let kept = (me == Rank(1)).then_some(gather);
        let failed = group.release(window).unwrap_err();
        assert_eq!(failed.to_string(), "window 1 was not released");
        let own = "window 1 is still used by an operation or a channel; drop these before the window is \
                   released";
        let (kind, text) = match me {
            Rank(1) => (ErrorKind::InvalidArgument, own.to_owned()),
            _ => (
                ErrorKind::Aborted,
                format!("release window 1: rank 1 failed (invalid argument): {own}"),
            ),
        };
        assert_eq!((failed.error.kind(), failed.error.to_string()), (kind, text));

        // The failed release has changed nothing: the window is usable, and is released once nobody uses it.
        let mut again = group.all_gather(2).output_into(&failed.window, 0).in_place().prepare()?;
        let begin = 2 * me.index();
        failed.window.slice_mut(begin..begin + 2)?.fill(me.0 as i32);
        again.run()?;
        assert_eq!(failed.window.slice(0..4)?[..], [0, 0, 1, 1]);
        drop((kept, again));
        Ok(group.release(failed.window)?)
    });
}

#[test]
fn a_window_that_is_dropped_after_a_failed_release_keeps_its_memory() {
    in_flat_group(2, |group| {
        let owner = Arc::new(());
        let buffer = group.allocate::<u8>(8)?.keep_alive(Arc::clone(&owner));
        let window = group.window_over(buffer)?;
        let channel = group.channel(&window, 1)?;
        let kept = (group.rank() == Rank(0)).then_some(channel);

        // The channel of rank 0 can still write to the memory of rank 1.
        let error = Error::from(group.release(window).unwrap_err());
        assert!(error.to_string().contains("is still used"), "{error}");
        assert_eq!(Arc::strong_count(&owner), 2);
        group.barrier()?;
        drop(kept);
        Ok(())
    });
}

#[test]
fn ranks_that_read_inputs_need_them_in_one_window() {
    in_flat_group(2, |group| {
        let me = group.rank();
        let windows = [group.window::<i32>(4)?, group.window::<i32>(4)?];
        let error = group
            .all_gather::<i32>(2)
            .algorithm(Algorithm::Pull)
            .input_from(&windows[me.index()], 0)
            .prepare()
            .unwrap_err();
        assert_eq!((error.kind(), error.peer()), (ErrorKind::Mismatch, Some(Rank(1))));
        assert_eq!(
            error.to_string(),
            "all-gather 1: ranks disagree: the input is in window 2 on rank 1, in window 1 on rank \
             0; pull reads the inputs of all ranks"
        );
        let mut direct = group
            .all_gather::<i32>(2)
            .algorithm(Algorithm::Direct)
            .input_from(&windows[me.index()], 0)
            .prepare()?;
        windows[me.index()].slice_mut(0..2)?.fill(me.0 as i32 + 1);
        direct.run()?;
        assert_eq!(direct.output()?, [1, 1, 2, 2]);
        Ok(())
    });
}

fn refused<T>(result: Result<T, Error>) -> String {
    let error = result.err().expect("the call is refused");
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    error.to_string()
}

#[test]
fn a_start_is_refused_on_all_ranks_alike_until_the_one_before_was_waited_for() {
    in_flat_group(3, |group| {
        let window = group.window::<u8>(100)?;
        let mut first = group.all_gather(20).output_into(&window, 0).in_place().prepare()?;
        let mut second = group.all_gather(20).output_into(&window, 30).in_place().prepare()?;
        let text = "all-gather 1 uses them in a start that this rank has not waited for";

        // After the barrier the start is complete on all ranks, but they do not know it.
        let started = first.start()?;
        group.barrier()?;
        assert!(refused(second.start().map(drop)).contains(text));
        assert!(refused(window.slice(0..1).map(drop)).contains(text));
        // A handle that is dropped leaves it to the next call of the operation to wait.
        drop(started);
        assert!(refused(second.start().map(drop)).contains(text));
        first.run()?;
        second.run()?;

        let mut started = second.start()?;
        while !started.poll()? {}
        first.run()
    });
}

#[test]
fn the_host_and_operations_do_not_use_the_same_bytes_at_once() {
    let checked = Barrier::new(2);
    in_flat_group(2, |group| {
        let window = group.window::<u8>(100)?;
        let mut first = group.all_gather(20).output_into(&window, 0).in_place().prepare()?;
        let mut second = group.all_gather(15).output_into(&window, 30).in_place().prepare()?;
        if group.rank() == Rank(1) {
            // The start of rank 0 is open until this barrier.
            checked.wait();
            first.run()?;
            return second.run();
        }
        let slice = window.slice(35..36)?;
        assert_eq!(
            refused(first.start().map(drop)),
            "bytes 35 to 36 of window 1 are in use: the host borrows them as a slice; drop that \
             slice first"
        );
        assert!(refused(window.slice_mut(0..100).map(drop)).contains("the host borrows them"));
        drop(slice);
        let started = first.start()?;
        assert_eq!(
            refused(second.start().map(drop)),
            "bytes 0 to 40 of window 1 are in use: all-gather 1 uses them in a start that this \
             rank has not waited for; wait for it first"
        );
        assert!(
            refused(window.slice(0..1).map(drop)).contains("all-gather 1 uses them in a start")
        );
        window.slice(40..100)?;
        checked.wait();
        started.wait()?;
        second.run()?;
        assert_eq!(
            refused(second.output().map(drop)),
            "the output is a range of a window; use `Window::slice` to access it"
        );
        assert_eq!(
            refused(window.slice(90..101).map(drop)),
            "the range is 90..101, expected a range within 0..100, the elements of the window"
        );
        Ok(())
    });
}

#[test]
fn operations_keep_their_window_alive() {
    in_flat_group(2, |group| {
        let window = group.window::<u8>(10)?;
        let mut gather = group.all_gather(5).output_into(&window, 0).in_place().prepare()?;
        drop(window);
        gather.run()
    });
}

#[test]
fn a_window_of_an_aborted_group_cannot_be_read() {
    let results = in_process::run(2, |bootstrap| {
        let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
        let timeout = Duration::from_millis(200);
        let mut group = GroupOptions::default().open(bootstrap, fabric)?;
        let window = group.window::<u8>(8)?;
        let gather = group.all_gather(4).output_into(&window, 0).in_place();
        let mut gather = gather.timeout(timeout).prepare()?;
        if group.rank() == Rank(0) {
            let error = gather.run().unwrap_err();
            assert_eq!((error.kind(), error.peer()), (ErrorKind::Timeout, Some(Rank(1))));
        }
        while group.abort_record().is_none() {
            std::thread::yield_now();
        }
        let errors = [window.slice(0..1).map(drop), window.slice_mut(0..1).map(drop)];
        Ok(errors.map(|error| error.unwrap_err().kind()))
    });
    assert_eq!(results.unwrap(), [[ErrorKind::Timeout; 2]; 2]);
}

#[test]
fn an_operation_that_a_panic_drops_during_a_start_keeps_its_bytes() {
    let refused = in_process::run(2, |bootstrap| {
        let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
        let mut group =
            GroupOptions::default().timeout(Duration::from_secs(20)).open(bootstrap, fabric)?;
        let window = group.window::<u8>(300)?;
        let mut gather = group.all_gather::<u8>(50).output_into(&window, 0).in_place().prepare()?;
        if group.rank().0 == 0 {
            group.close()?;
            return Ok(Vec::new());
        }

        // Rank 0 may begin the start at any time, and writes to the window then.
        let dropped = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
            std::mem::forget(gather.start());
            std::panic::resume_unwind(Box::new("a panic of the caller"));
        }));
        assert!(dropped.is_err());
        let refused = [window.slice(0..100).err(), window.slice_mut(90..300).err()];
        assert!(window.slice(100..300).is_ok());
        group.close()?;
        Ok::<_, Error>(refused.into_iter().flatten().map(|error| error.to_string()).collect())
    });
    let text = "bytes 0 to 100 of window 1 are in use: all-gather 1 was dropped during a start, in which peers still use them; \
                only the end of the group ends it";
    assert_eq!(refused.unwrap()[1], [text, text]);
}

#[test]
fn a_resizable_start_is_refused_while_a_slice_of_its_window_is_held() {
    in_flat_group(2, |group| {
        let window = group.window::<i32>(4000)?;
        let builder = group.all_gather::<i32>(1000).output_into(&window, 0);
        let mut gather = builder.in_place().resizable().prepare()?;
        let (me, len) = (group.rank().0, 1);
        gather.resize(len)?;
        if me == 1 {
            // Rank 0 could have resized to 1000 elements by mistake, and would write to this slice.
            let mut slice = window.slice_mut(100..200)?;
            slice.fill(7);
            let error = gather.run().expect_err("a slice is held");
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
            assert!(error.to_string().contains("resizable"), "{error}");
            assert!(slice.iter().all(|element| *element == 7));
        }
        window.slice_mut(me as usize..me as usize + 1)?.fill(me as i32 + 3);
        gather.run()?;
        assert_eq!(window.slice(0..2)?[..], [3, 4]);
        Ok(())
    });
}
