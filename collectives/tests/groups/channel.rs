//! Tests one-sided messages between ranks.

use std::time::Duration;

use peerlane_collectives::bootstrap::{Bootstrap, in_process};
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{Channel, ChannelEvent, CopyRange, Group, Rows, Window};
use peerlane_hal::{ErrorKind, Rank};
use peerlane_host as host;

use crate::support::group::in_group;

const SOON: Duration = Duration::from_secs(20);

fn open(group: &mut Group, len: usize, signals: usize) -> (Window<i32>, Channel<i32>) {
    let window = group.window(len).unwrap();
    let channel = group.channel(&window, signals).unwrap();
    (window, channel)
}

fn contents(channel: &Channel<i32>, len: usize) -> Vec<i32> {
    let mut all = vec![0; len];
    channel.read(0, &mut all).unwrap();
    all
}

#[test]
fn puts_and_gets_move_their_elements_and_no_others() {
    for ranks in 1..=4 {
        in_group(ranks, |group| {
            let (me, ranks) = (group.rank(), group.ranks() as u32);
            let (next, last) = (Rank((me.0 + 1) % ranks), Rank((me.0 + ranks - 1) % ranks));
            let (_window, mut channel) = open(group, 100, 2);
            channel.write(0, &vec![-1; 100])?;
            channel.write(0, &(0..10).map(|i| 100 * me.0 as i32 + i).collect::<Vec<_>>())?;
            group.barrier()?;
            assert_eq!(channel.put_signal(next, 2..7, 50, 1)?.signal_count(), Some(1));
            assert_eq!(channel.wait(last, 1, SOON)?, 1);
            let mut expected = vec![-1; 100];
            for (expected, i) in expected[..10].iter_mut().zip(0..) {
                *expected = 100 * me.0 as i32 + i;
            }
            for i in 2..7 {
                expected[48 + i] = 100 * last.0 as i32 + i as i32;
            }
            assert_eq!(contents(&channel, 100), expected);
            channel.get(next, 5, 90..95)?;
            channel.flush(SOON)?;
            for i in 0..5 {
                expected[90 + i] = 100 * next.0 as i32 + 5 + i as i32;
            }
            assert_eq!(contents(&channel, 100), expected);
            channel.put(next, 0..0, 100)?;
            assert_eq!(channel.signalled(last, 0)?, 0);
            group.barrier()?;
            channel.signal(next, 0)?;
            channel.wait_for(channel.next_signal(last, 0), SOON)?;
            group.barrier()
        });
    }
}

#[test]
fn many_copies_and_rows_arrive_and_touching_ones_are_one() {
    in_group(2, |group| {
        let me = group.rank();
        let peer = Rank(1 - me.0);
        let len = 5000;
        let (_window, mut channel) = open(group, 2 * len, 1);
        let own: Vec<i32> = (0..len as i32).map(|i| i + 10_000 * me.0 as i32).collect();
        let theirs: Vec<i32> = (0..len as i32).map(|i| i + 10_000 * peer.0 as i32).collect();
        channel.write(0, &own)?;
        // In reverse order, more than an engine takes at once.
        let copies: Vec<_> =
            (0..len).rev().map(|i| CopyRange { from: i, to: len + i, len: 1 }).collect();
        channel.puts(peer, &copies)?;
        channel.signal(peer, 0)?;
        channel.wait(peer, 0, SOON)?;
        assert_eq!(contents(&channel, 2 * len)[len..], theirs);
        // All ranks have looked before the rows arrive.
        group.barrier()?;
        channel.write(len, &vec![0; len])?;
        group.barrier()?;
        let (from, to) =
            (Rows { begin: 3, len: 7, stride: 50 }, Rows { begin: len, len: 7, stride: 9 });
        channel.puts(peer, &from.copies(to, 20)?)?;
        channel.signal(peer, 0)?;
        channel.wait(peer, 0, SOON)?;
        let seen = contents(&channel, 2 * len);
        for row in 0..20 {
            assert_eq!(seen[len + 9 * row..][..7], theirs[3 + 50 * row..][..7], "row {row}");
            assert_eq!(seen[len + 9 * row + 7..][..2], [0, 0], "behind row {row}");
        }
        let back = Rows { begin: len + 1000, len: 7, stride: 7 };
        channel.gets(peer, &from.copies(back, 20)?)?;
        channel.flush(SOON)?;
        let seen = contents(&channel, 2 * len);
        assert_eq!(seen[len + 1007..][..7], theirs[53..60]);
        group.barrier()
    });
}

#[test]
fn a_channel_is_refused_on_all_ranks_while_one_holds_a_slice_of_its_window() {
    let texts = in_group(2, |group| {
        let window = group.window::<u8>(64)?;
        let slice = (group.rank().0 == 1).then(|| window.slice(0..4)).transpose()?;
        let error = group.channel(&window, 1).expect_err("a slice is borrowed");

        // The window is as free as before: rank 0 can borrow it, and a channel can be opened without the slice.
        if group.rank().0 == 0 {
            window.slice_mut(0..64)?.fill(1);
        }
        drop(slice);
        let channel = group.channel(&window, 1)?;
        group.close_channel(channel)?;
        Ok(error.to_string())
    });
    let refusal = "bytes 0 to 4 of window 1 are in use: the host borrows them as a slice; drop that slice first";
    assert_eq!(texts[1], refusal);
    assert_eq!(texts[0], format!("channel 1: rank 1 failed (invalid argument): {refusal}"));
}

#[test]
fn a_window_stays_closed_to_slices_until_all_ranks_have_closed_its_channel() {
    in_group(2, |group| {
        let window = group.window::<u8>(64)?;
        let mut channel = group.channel(&window, 1)?;
        assert!(window.slice(0..4).is_err());
        if group.rank().0 == 0 {
            drop(channel);
            let text = said(window.slice(0..4));
            assert!(text.contains("channel 1 was dropped on this rank"), "{text}");
            group.barrier()?;
        } else {
            // The channel of this rank goes on.
            channel.write(0, &[7; 4])?;
            channel.put(Rank(0), 0..4, 0)?;
            channel.flush(SOON)?;
            group.barrier()?;
            std::mem::forget(channel);
            assert!(window.slice(0..4).is_err());
        }

        let window = group.window::<u8>(64)?;
        let mut channel = group.channel(&window, 1)?;
        let other = group.channel(&window, 2)?;
        channel.write(0, &[group.rank().0 as u8 + 1; 4])?;
        // The last message of each rank is on its way when the channel is closed.
        channel.put(Rank(1 - group.rank().0), 0..4, 60)?;
        group.close_channel(channel)?;
        assert!(window.slice(0..4).is_err());
        group.close_channel(other)?;
        assert_eq!(window.slice(60..64)?[..], [2 - group.rank().0 as u8; 4]);
        window.slice_mut(0..64)?.fill(0);
        group.barrier()
    });
}

#[test]
fn closing_a_channel_names_the_rank_that_does_not() {
    let texts = in_group(2, |group| {
        let window = group.window::<u8>(64)?;
        let (first, second) = (group.channel(&window, 1)?, group.channel(&window, 1)?);
        let mine = if group.rank().0 == 0 { first } else { second };
        let error = group.close_channel(mine).expect_err("another channel");
        // The calls are compared, so nobody waits for the timeout.
        assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
        Ok(error.to_string())
    });
    for text in texts {
        assert!(text.contains("close channel 1") && text.contains("close channel 2"), "{text}");
    }
}

#[test]
fn copies_of_the_host_run_beside_puts_of_a_peer() {
    // Values of peers are whole words, so each aligned word that is read is one that was put, or the one before.
    const ROUNDS: u64 = 2000;
    in_group(2, |group| {
        let window = group.window::<u64>(128)?;
        let mut channel = group.channel(&window, 1)?;
        let peer = Rank(1 - group.rank().0);
        group.barrier()?;
        let mut seen = [0; 64];
        for round in 1..=ROUNDS {
            channel.write(0, &[round; 64])?;
            channel.put(peer, 0..64, 64)?;
            channel.read(64, &mut seen)?;
            assert!(seen.iter().all(|word| *word <= ROUNDS), "{seen:?}");
            channel.flush(SOON)?;
        }
        group.close_channel(channel)?;
        assert_eq!(window.slice(64..128)?[..], [ROUNDS; 64]);
        Ok(())
    });
}

fn said<T>(result: Result<T, Error>) -> String {
    let error = result.err().expect("an error");
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    error.to_string()
}

#[test]
fn bad_messages_are_refused() {
    let texts = in_group(2, |group| {
        let (window, mut channel) = open(group, 10, 2);
        let mut texts = vec![
            said(channel.put(Rank(2), 0..1, 0)),
            said(channel.put(Rank(1), 5..11, 0)),
            said(channel.put(Rank(1), 0..2, 9)),
            said(channel.get(Rank(1), 9, 0..2)),
            said(channel.signal(Rank(1), 2)),
            said(channel.wait(Rank(5), 0, SOON)),
            said(channel.write(8, &[1, 2, 3])),
        ];
        texts.push(said(channel.put(group.rank(), 0..4, 3)));
        let copy = |from, to, len| CopyRange { from, to, len };
        texts.push(said(channel.puts(Rank(1), &[copy(0, 5, 3), copy(0, 1, 1), copy(3, 7, 2)])));
        let row = |len| Rows { begin: 0, len, stride: 5 };
        texts.push(said(row(2).copies(row(3), 1)));
        texts.push(said(window.slice(0..1).map(drop)));
        let failed = group.release(window).unwrap_err();
        texts.push(failed.error.to_string());
        drop(channel);
        let window = group.window::<i32>(1)?;
        texts.push(said(group.channel(&window, 0)));
        Ok(texts.join("\n"))
    });
    insta::assert_snapshot!(texts[0], @r"
    channel 1: rank 2 does not exist, expected a rank below 2
    the range is 5..11, expected a range within 0..10, the elements of the window
    the range is 9..11, expected a range within 0..10, the elements of the window
    the range is 9..11, expected a range within 0..10, the elements of the window
    channel 1: signal 2 does not exist, expected a number below 2
    channel 1: rank 5 does not exist, expected a rank below 2
    the range is 8..11, expected a range within 0..10, the elements of the window
    channel 1: elements 0 to 4 of rank 0 are copied to elements 3 to 7 of the same window, expected ranges that do not overlap
    two copies write the same elements: one writes elements 5 to 8, another one elements 7 to 9
    rows of 2 elements are copied to rows of 3, expected equal lengths
    bytes 0 to 40 of window 1 are in use: channel 1 can write them at any time; use its `write` and `read`, or end it with `Group::close_channel` first
    window 1 is still used by an operation or a channel; drop these before the window is released
    signals is 0, expected at least 1
    ");
}

#[test]
fn ranks_that_open_different_channels_are_named() {
    in_group(2, |group| {
        let windows = [group.window::<i32>(4)?, group.window::<i32>(4)?];
        let signals = 1 + group.rank().index();
        let error = group.channel(&windows[0], signals).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch);
        insta::allow_duplicates! {
            insta::assert_snapshot!(error.to_string(), @"channel 1: ranks disagree: signals is 2 on rank 1, 1 on rank 0");
        }
        let error = group.channel(&windows[group.rank().index()], 1).unwrap_err();
        insta::allow_duplicates! {
            insta::assert_snapshot!(error.to_string(), @"channel 1: ranks disagree: window is 2 on rank 1, 1 on rank 0");
        }
        Ok(())
    });
}

/// A wait for a signal that nobody gives ends, names the peer, and the channel goes on.
#[test]
fn a_wait_has_a_deadline() {
    in_group(3, |group| {
        let (_window, mut channel) = open(group, 1, 1);
        if group.rank() == Rank(0) {
            let error = channel.wait(Rank(2), 0, Duration::from_millis(30)).unwrap_err();
            assert_eq!((error.kind(), error.peer()), (ErrorKind::Timeout, Some(Rank(2))));
            insta::assert_snapshot!(error.to_string(), @"channel 1: rank 0 waits for signal 0 of rank 2, but 30ms have passed: it was given 0 times, expected 1");
        }
        group.barrier()?;
        if group.rank() == Rank(2) {
            channel.signal(Rank(0), 0)?;
        } else if group.rank() == Rank(0) {
            assert_eq!(channel.wait(Rank(2), 0, SOON)?, 1);
        }
        group.barrier()
    });
}

/// A rank that waits for a peer that is lost gets the reason why the group has ended.
#[test]
fn a_wait_ends_when_the_peer_is_lost() {
    let errors = in_process::run(2, |bootstrap| {
        let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
        let mut group = Group::open(bootstrap, fabric)?;
        let (_window, mut channel) = open(&mut group, 1, 1);
        if group.rank() == Rank(1) {
            return Ok(None);
        }
        Ok(channel.wait(Rank(1), 0, SOON).err())
    });
    let error = errors.unwrap().remove(0).expect("the peer is lost");
    assert_eq!((error.kind(), error.peer()), (ErrorKind::PeerLost, Some(Rank(1))), "{error}");
}

/// A long put that nobody flushes arrives while its sender waits for something else.
#[test]
fn messages_go_on_while_the_group_waits() {
    const LEN: usize = 4 << 20;
    in_group(2, |group| {
        let (_window, mut channel) = open(group, 2 * LEN, 1);
        let me = group.rank();
        channel.write(0, &vec![1 + me.0 as i32; LEN])?;
        for count in 1..=2 {
            if me == Rank(0) {
                channel.put_signal(Rank(1), 0..LEN, LEN, 0)?;
                group.barrier()?;
                let _ = group.all_gather::<u8>(1).prepare()?;
            } else {
                channel.wait_for(ChannelEvent::Signal { peer: Rank(0), signal: 0, count }, SOON)?;
                group.barrier()?;
                let _ = group.all_gather::<u8>(1).prepare()?;
            }
        }
        if me == Rank(1) {
            let mut seen = vec![0; LEN];
            channel.read(LEN, &mut seen)?;
            assert!(seen.iter().all(|element| *element == 1));
        }
        group.barrier()
    });
}

/// Signals keep their meaning when flags are used again.
#[test]
fn channels_come_and_go() {
    in_group(3, |group| {
        let (me, ranks) = (group.rank().0, group.ranks() as u32);
        let (next, last) = (Rank((me + 1) % ranks), Rank((me + ranks - 1) % ranks));
        let window = group.window::<i32>(2)?;
        for round in 0..50 {
            let mut one = group.channel(&window, 1)?;
            let mut two = group.channel(&window, 3)?;
            for count in 1..=1 + round % 4 {
                one.write(0, &[round as i32])?;
                one.put_signal(next, 0..1, 1, 0)?;
                assert_eq!(one.wait(last, 0, SOON)?, count);
                let mut seen = [0];
                one.read(1, &mut seen)?;
                assert_eq!(seen, [round as i32]);
                two.signal(last, 2)?;
                two.wait(next, 2, SOON)?;
            }
        }
        Ok(())
    });
}

#[test]
fn unfinished_messages_are_counted() {
    // More than an engine of the host moves at once.
    const LONG: usize = 6 << 20;
    in_group(2, |group| {
        let peer = Rank(1 - group.rank().0);
        let (window, mut channel) = open(group, 2 * LONG, 1);
        assert_eq!(channel.unfinished()?, 0);
        channel.put(peer, 0..LONG, LONG)?;
        for _ in 0..10 {
            channel.put(peer, 0..1, LONG)?;
        }
        channel.put_signal(peer, 0..1, LONG, 0)?;
        assert_eq!(channel.unfinished()?, 13);
        channel.wait(peer, 0, SOON)?;
        while channel.unfinished()? > 0 {}
        channel.flush(SOON)?;
        group.barrier()?;
        drop((channel, window));
        Ok(())
    });
}
