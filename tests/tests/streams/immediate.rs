//! Tests immediate calls on streams and in graphs.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use peerlane_collectives::collective::Collective;
use peerlane_collectives::element::{DType, Element};
use peerlane_collectives::group::{Group, Input, Output};
use peerlane_hal::{ErrorKind, Rank};
use peerlane_tests::middleware::Stream;

use crate::support::{LONG, in_group, pause};

/// Memory of the caller that only streams access until the test has waited for them.
struct Cells(Arc<[AtomicU64]>);

impl Cells {
    fn new(len: usize) -> Self {
        Self((0..len).map(|_| AtomicU64::new(0)).collect())
    }

    fn address(&self) -> NonNull<u8> {
        NonNull::from(&*self.0).cast()
    }

    fn input(&self) -> Input<'static> {
        // SAFETY: the cells outlive all work of the streams, which alone accesses them until then.
        unsafe { Input::from_address(self.address(), DType::U64, self.0.len()) }
    }

    fn output(&self) -> Output<'static> {
        // SAFETY: as above.
        unsafe { Output::from_address(self.address(), DType::U64, self.0.len()) }
    }

    /// Has the stream store `value` in all cells.
    fn fill(&self, stream: &Stream, value: impl Fn() -> u64 + Send + Sync + 'static) {
        let cells = Arc::clone(&self.0);
        stream.run(move || cells.iter().for_each(|cell| cell.store(value(), Ordering::Relaxed)));
    }

    /// Has the stream compare all cells, and count when they are as expected.
    fn look(
        &self,
        stream: &Stream,
        right: &Arc<AtomicU64>,
        expected: impl Fn(usize) -> u64 + Send + Sync + 'static,
    ) {
        let (cells, right) = (Arc::clone(&self.0), Arc::clone(right));
        stream.run(move || {
            let found = cells.iter().map(|cell| cell.load(Ordering::Relaxed));
            let is_right = found.enumerate().all(|(index, value)| value == expected(index));
            right.fetch_add(u64::from(is_right), Ordering::Relaxed);
        });
    }
}

/// Makes calls with memory of the caller on two streams by turns, without a wait between them.
///
/// Both use the same memory for copies, so a call must wait for the copies of the one before on the
/// other stream. The last element of each block tells the calls apart.
#[test]
fn calls_on_two_streams_share_the_memory_for_copies() {
    const CALLS: usize = 40;
    for ranks in [1, 2, 3] {
        in_group(ranks, LONG, |mut group| {
            let rank = group.rank().0 as u64;
            let streams = [Stream::new(), Stream::new()];
            let right = Arc::new(AtomicU64::new(0));
            let mut kept = Vec::new();
            let root = Rank((ranks - 1) as u32);
            let collectives = [
                Collective::AllGather,
                Collective::Broadcast { root },
                Collective::AllToAll,
                Collective::Gather { root },
                Collective::Scatter { root },
            ];

            for call in 0..CALLS {
                let stream = &streams[call / 3 % 2];
                let collective = collectives[call % 5];
                let len = 1 + call % 7;
                let seed = 1000 * call as u64;
                let blocks = |has_block_of_each| if has_block_of_each { ranks } else { 1 };
                let gives_all = collective.has_output_block_per_provider();
                let from = blocks(collective.has_input_block_per_receiver());
                let (from, to) = (Cells::new(from * len), Cells::new(blocks(gives_all) * len));
                from.fill(stream, move || seed + rank);
                let input = match collective.is_provider(Rank(rank as u32)) {
                    true => from.input(),
                    false => ().into(),
                };
                let is_receiver = collective.is_receiver(Rank(rank as u32));
                let output = if is_receiver { to.output() } else { ().into() };
                group.immediate(collective).run_on(stream, input, output).unwrap();

                let root = u64::from(root.0);
                to.look(stream, &right, move |index| match (is_receiver, gives_all) {
                    (false, _) => 0,
                    (true, true) => seed + (index / len) as u64,
                    (true, false) => seed + root,
                });
                kept.push((from, to));
            }
            streams.iter().for_each(|stream| assert!(stream.is_idle_within(LONG)));
            assert_eq!(right.load(Ordering::Relaxed), CALLS as u64);
            group.close().unwrap();
        });
    }
}

/// The first call waits for a rank whose stream is held up. The second one on another stream must not
/// overwrite what the root still has to send.
#[test]
fn a_call_leaves_the_memory_for_copies_to_the_call_before_it() {
    in_group(2, LONG, |mut group| {
        let root = Rank(0);
        let is_root = group.rank() == root;
        let streams = [Stream::new(), Stream::new()];
        let right = Arc::new(AtomicU64::new(0));
        let arrays = [Cells::new(100), Cells::new(100)];
        if !is_root {
            pause(&streams[0], Duration::from_millis(30));
        }

        for (number, (stream, array)) in streams.iter().zip(&arrays).enumerate() {
            let call = |group: &mut Group| {
                let (input, output) = match is_root {
                    true => (array.input(), Output::from(())),
                    false => (Input::from(()), array.output()),
                };
                let broadcast = group.immediate(Collective::Broadcast { root });
                broadcast.run_on(stream, input, output).unwrap();
            };
            if is_root {
                array.fill(stream, move || 10 + number as u64);
            }
            call(&mut group);
            array.look(stream, &right, move |_| 10 + number as u64);
        }
        streams.iter().for_each(|stream| assert!(stream.is_idle_within(LONG)));
        assert_eq!(right.load(Ordering::Relaxed), 2);
        group.close().unwrap();
    });
}

#[test]
fn recorded_calls_are_replayed_beside_calls_that_run_at_once() {
    in_group(3, LONG, |mut group| {
        let rank = u64::from(group.rank().0);
        let (stream, right) = (Stream::new(), Arc::new(AtomicU64::new(0)));
        let turn = Arc::new(AtomicU64::new(0));
        let (from, to) = (Cells::new(2), Cells::new(6));
        let call = |group: &mut Group| {
            let now = Arc::clone(&turn);
            from.fill(&stream, move || now.fetch_add(1, Ordering::Relaxed) / 2 * 10 + rank);
            let call = group.immediate(Collective::AllGather);
            // SAFETY: the stream is idle before the group is closed.
            let call = unsafe { call.capturable() };
            call.run_on(&stream, from.input(), to.output()).unwrap();
            let now = Arc::clone(&turn);
            to.look(&stream, &right, move |index| {
                (now.load(Ordering::Relaxed) / 2 - 1) * 10 + index as u64 / 2
            });
        };

        stream.begin_capture();
        call(&mut group);
        call(&mut group);
        let graph = stream.end_capture();
        for _ in 0..3 {
            graph.replay(&stream);
            call(&mut group);
        }
        assert!(stream.is_idle_within(LONG));
        assert_eq!(right.load(Ordering::Relaxed), 9);

        let counts = group.stats().immediate;
        assert_eq!((counts.calls, counts.operations), (5, 2));
        group.close().unwrap();
    });
}

#[test]
fn a_call_on_the_host_follows_those_on_streams() {
    in_group(2, LONG, |mut group| {
        let rank = group.rank().0;
        let window = group.window::<u32>(4).unwrap();
        let stream = Stream::new();
        pause(&stream, Duration::from_millis(30));
        let (own, all) = (window.part(0..2).unwrap(), window.part(0..4).unwrap());
        let broadcast = group.immediate(Collective::Broadcast { root: Rank(0) });
        broadcast.run_in_place_on(&stream, own).unwrap();

        // Nobody has waited for the stream, whose start uses the same window.
        group.immediate(Collective::AllGather).run_in_place(all).unwrap();
        let mut output = [0_u32; 4];
        group.immediate(Collective::AllGather).run(&[rank, 7], &mut output).unwrap();
        assert_eq!(output, [0, 7, 1, 7]);
        group.close().unwrap();
    });
}

#[test]
fn a_window_is_used_on_a_stream_without_a_copy() {
    in_group(2, LONG, |mut group| {
        let rank = group.rank().0;
        let window = group.window::<u32>(10).unwrap();
        let stream = Stream::new();
        for turn in 0..5 {
            window.slice_mut(0..2).unwrap().fill(10 * turn + rank);
            let (from, to) = (window.part(0..2).unwrap(), window.part(4..8).unwrap());
            group.immediate(Collective::AllGather).run_on(&stream, from, to).unwrap();
            group.finish_immediate().unwrap();
            let expected = [0, 0, 1, 1].map(|of_rank| 10 * turn + of_rank);
            assert_eq!(window.slice(4..8).unwrap()[..], expected);
        }
        let counts = group.stats().immediate;
        assert_eq!((counts.hits, counts.copied, counts.copy_bytes), (4, 0, 0));
        group.close().unwrap();
    });
}

#[test]
fn other_lengths_on_one_rank_are_an_error_on_all_before_anything_is_enqueued() {
    in_group(3, LONG, |mut group| {
        let rank = group.rank().0;
        let window = group.window::<u8>(100).unwrap();
        let stream = Stream::new();
        let call = |group: &mut Group, len: usize| {
            let (from, to) = (window.part(0..len).unwrap(), window.part(20..20 + 3 * len).unwrap());
            group.immediate(Collective::AllGather).run_on(&stream, from, to)
        };
        call(&mut group, 3).unwrap();

        let error = call(&mut group, if rank == 1 { 4 } else { 5 }).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch);
        assert!(error.to_string().contains("the elements of a block"), "{error}");
        assert!(error.to_string().contains("rank 1"), "{error}");

        // Nothing has moved, and the group goes on.
        call(&mut group, 3).unwrap();
        call(&mut group, 5).unwrap();
        assert!(stream.is_idle_within(LONG));
        group.close().unwrap();
    });
}

#[test]
fn a_call_is_recorded_only_with_the_promise_for_it() {
    in_group(1, LONG, |mut group| {
        let window = group.window::<u8>(1).unwrap();
        let stream = Stream::new();
        stream.begin_capture();
        let part = window.part(0..1).unwrap();
        let call = group.immediate(Collective::AllReduce).run_in_place_on(&stream, part);
        assert!(stream.end_capture().is_empty());
        assert!(call.unwrap_err().to_string().contains("the call is not capturable"));
        assert_eq!(u8::DTYPE, DType::U8);
        group.close().unwrap();
    });
}
