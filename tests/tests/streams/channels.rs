//! Sends messages of a channel on streams, at once and in graphs.

use std::sync::Barrier;
use std::time::Duration;

use insta::assert_snapshot;
use peerlane_collectives::group::{Channel, Group, Window};
use peerlane_hal::{ErrorKind, Rank};
use peerlane_tests::middleware::Stream;

use crate::support::{GRACE, Gate, LONG, SHORT, assert_idle_within, in_group};

const ROUNDS: i32 = 20;

fn ring(group: &Group) -> (Rank, Rank) {
    let (me, ranks) = (group.rank().0, group.ranks() as u32);
    (Rank((me + 1) % ranks), Rank((me + ranks - 1) % ranks))
}

fn open(group: &mut Group, len: usize) -> (Window<i32>, Channel<i32>) {
    let window = group.window(len).unwrap();
    let channel = group.channel(&window, 2).unwrap();
    (window, channel)
}

/// Each rank passes on what it receives: a round needs that of all ranks before it.
#[test]
fn messages_on_a_stream_are_ordered_by_it() {
    for ranks in 2..=4 {
        in_group(ranks, LONG, |mut group| {
            let (next, last) = ring(&group);
            let me = group.rank();
            let (window, mut channel) = open(&mut group, 4);
            let stream = Stream::new();
            if me == Rank(0) {
                channel.write(0, &[1, 2]).unwrap();
            }
            group.barrier().unwrap();
            for round in 0..ROUNDS {
                // Elements 0 and 1 go to 0 and 1 of the next rank, through 2 and 3 of every second one.
                channel
                    .on_stream(&stream, |messages| {
                        if me == Rank(0) {
                            messages.put_signal(next, 0..2, 0, 0)?;
                            messages.wait(last, 0)
                        } else {
                            messages.wait(last, 0)?;
                            messages.get(me, 0, 2..4)?;
                            messages.put(next, 2..4, 0)?;
                            messages.signal(next, 0)
                        }
                    })
                    .unwrap();
                if round % 3 == 0 {
                    assert!(stream.is_idle_within(LONG));
                }
            }
            assert!(stream.is_idle_within(LONG));
            let mut seen = [0; 2];
            channel.read(0, &mut seen).unwrap();
            assert_eq!(seen, [1, 2]);
            assert_eq!(channel.signalled(last, 0).unwrap(), ROUNDS as u64);
            // Host and stream count together.
            channel.signal(next, 1).unwrap();
            channel.wait(last, 1, LONG).unwrap();
            drop((channel, window));
            group.close().unwrap();
        });
    }
}

/// A graph sends the content that the window has when it is replayed.
#[test]
fn messages_are_recorded_and_replayed() {
    for ranks in 1..=3 {
        in_group(ranks, LONG, |mut group| {
            let (next, last) = ring(&group);
            let (window, channel) = open(&mut group, 4);
            // SAFETY: the stream is idle before the channel is dropped.
            let mut channel = unsafe { channel.capturable() };
            let stream = Stream::new();
            stream.begin_capture();
            channel
                .on_stream(&stream, |messages| {
                    messages.put_signal(next, 0..1, 1, 0)?;
                    messages.wait(last, 0)?;
                    // The place may be written again.
                    messages.get(group.rank(), 1, 2..3)?;
                    messages.signal(last, 1)?;
                    messages.wait(next, 1)
                })
                .unwrap();
            let graph = stream.end_capture();
            for round in 0..ROUNDS {
                channel.write(0, &[100 * group.rank().0 as i32 + round]).unwrap();
                graph.replay(&stream);
                assert!(stream.is_idle_within(LONG));
                let mut seen = [0];
                channel.read(2, &mut seen).unwrap();
                assert_eq!(seen, [100 * last.0 as i32 + round]);
                // Eager messages have flags of their own.
                channel.put_signal(next, 0..1, 3, 0).unwrap();
                assert_eq!(channel.wait(last, 0, LONG).unwrap(), round as u64 + 1);
                // The next round overwrites what was put.
                channel.flush(LONG).unwrap();
            }
            drop((graph, channel, window));
            group.close().unwrap();
        });
    }
}

/// Nothing is recorded by a channel that is not made for it, and the channel goes on.
#[test]
fn a_channel_that_is_not_capturable_refuses_a_stream_that_captures() {
    in_group(2, LONG, |mut group| {
        let (next, last) = ring(&group);
        let (window, mut channel) = open(&mut group, 2);
        let stream = Stream::new();
        stream.begin_capture();
        let refused = channel.on_stream(&stream, |messages| messages.put_signal(next, 0..1, 1, 0));
        assert!(stream.end_capture().is_empty());
        let error = refused.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        let text = "channel 1: the stream captures a graph, but the channel is not capturable; open it with `capturable()`";
        assert_eq!(error.to_string(), text);
        // The refusal changes nothing.
        channel
            .on_stream(&stream, |messages| {
                messages.put_signal(next, 0..1, 1, 0)?;
                messages.wait(last, 0)
            })
            .unwrap();
        assert!(stream.is_idle_within(LONG));
        drop((channel, window));
        group.close().unwrap();
    });
}

/// A stream that waits for a signal that nobody gives goes on, and the group ends with the name of the rank.
#[test]
fn a_wait_on_a_stream_has_a_deadline() {
    let done = Gate::default();
    let texts = in_group(3, SHORT, |mut group| {
        let (_window, mut channel) = open(&mut group, 1);
        let stream = Stream::new();
        if group.rank() == Rank(0) {
            channel.on_stream(&stream, |messages| messages.wait(Rank(2), 1)).unwrap();
            assert_idle_within(&stream, SHORT + GRACE);
            done.open();
        } else {
            done.wait();
        }
        let error = channel.signal(Rank(0), 0).unwrap_err();
        assert_eq!((error.kind(), error.peer()), (ErrorKind::Timeout, Some(Rank(2))), "{error}");
        assert_eq!(channel.check().unwrap_err().to_string(), error.to_string());
        error.to_string()
    });
    assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
    assert_snapshot!(texts[0], @"channel 1 did not finish within 1.5s: a stream of rank 0 waited for signal 1 of rank 2; rank 2 is alive but late");
}

/// The same in a graph.
#[test]
fn a_wait_in_a_graph_has_a_deadline() {
    let done = Gate::default();
    in_group(2, SHORT, |mut group| {
        let (_window, channel) = open(&mut group, 1);
        // SAFETY: the group has ended the replay before the channel is dropped.
        let mut channel = unsafe { channel.capturable() };
        let stream = Stream::new();
        stream.begin_capture();
        let peer = Rank(1 - group.rank().0);
        channel
            .on_stream(&stream, |messages| {
                messages.signal(peer, 0)?;
                messages.wait(peer, 0)
            })
            .unwrap();
        let graph = stream.end_capture();
        if group.rank() == Rank(0) {
            graph.replay(&stream);
            assert_idle_within(&stream, SHORT + GRACE);
            let error = channel.check().unwrap_err();
            assert_eq!(
                (error.kind(), error.peer()),
                (ErrorKind::Timeout, Some(Rank(1))),
                "{error}"
            );
            done.open();
        } else {
            done.wait();
        }
    });
}

/// A rank that is lost ends the waits of streams long before the timeout.
#[test]
fn a_lost_peer_ends_the_waits_of_streams() {
    let enqueued = Barrier::new(2);
    in_group(2, Duration::from_secs(60), |mut group| {
        let (_window, mut channel) = open(&mut group, 1);
        let stream = Stream::new();
        if group.rank() == Rank(1) {
            enqueued.wait();
            return;
        }
        channel.on_stream(&stream, |messages| messages.wait(Rank(1), 0)).unwrap();
        enqueued.wait();
        assert_idle_within(&stream, GRACE);
        let error = channel.check().unwrap_err();
        assert_eq!((error.kind(), error.peer()), (ErrorKind::PeerLost, Some(Rank(1))), "{error}");
    });
}
