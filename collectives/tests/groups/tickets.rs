//! Tests how a caller waits for messages and signals of a channel: by polls, for one of several, as
//! a future, and with a descriptor.

use std::time::Duration;

use peerlane_collectives::bootstrap::{Bootstrap, in_process};
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{Channel, ChannelEvent, Group, GroupOptions, Window};
use peerlane_hal::{ErrorKind, Rank};
use peerlane_host as host;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::support::group::in_group;
use crate::waiting::block_on;

const SOON: Duration = Duration::from_secs(20);

/// More elements than an engine of the host copies in one poll.
const LONG: usize = 6 << 20;

fn open(group: &mut Group, len: usize, signals: usize) -> (Window<i32>, Channel<i32>) {
    let window = group.window(len).unwrap();
    let channel = group.channel(&window, signals).unwrap();
    (window, channel)
}

/// Opens a group of each rank, which can be lost, unlike that of `in_group`.
fn with_group<R: Send>(
    ranks: usize,
    run: impl Fn(&mut Group) -> Result<R, Error> + Sync,
) -> Vec<R> {
    let done = in_process::run(ranks, |bootstrap| {
        let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
        run(&mut GroupOptions::default().timeout(SOON).open(bootstrap, fabric)?)
    });
    done.unwrap()
}

#[test]
fn a_source_in_flight_is_not_overwritten() {
    in_group(2, |group| {
        let (_window, mut channel) = open(group, 2 * LONG, 2);
        let peer = Rank(1 - channel.rank().0);

        for round in 0..4 {
            if channel.rank() == Rank(0) {
                channel.write(0, &vec![round; LONG])?;
                let ticket = channel.put_signal(peer, 0..LONG, LONG, 0)?;

                // Elements beside the source are free at once.
                channel.write(LONG, &[7])?;
                assert!(!channel.poll(ticket)?, "the put is too short for this test");

                // The last element is still to be copied when this call begins.
                channel.write(LONG - 1, &[-1])?;
                channel.wait(peer, 1, SOON)?;
            } else {
                channel.wait(peer, 0, SOON)?;
                let mut seen = vec![0; LONG];
                channel.read(LONG, &mut seen)?;
                assert!(seen.iter().all(|element| *element == round), "round {round}");
                channel.signal(peer, 1)?;
            }
        }
        group.close_channel(channel)
    });
}

#[test]
fn a_destination_of_a_get_is_not_written_before_it_has_arrived() {
    in_group(2, |group| {
        let (_window, mut channel) = open(group, 2 * LONG, 1);
        let peer = Rank(1 - channel.rank().0);
        channel.write(0, &vec![1; LONG])?;
        group.barrier()?;

        let ticket = channel.get(peer, 0, LONG..2 * LONG)?;
        channel.write(2 * LONG - 1, &[9])?;
        assert!(channel.poll(ticket)?, "the write has waited for the get");

        let mut seen = [0; 2];
        channel.read(2 * LONG - 2, &mut seen)?;
        assert_eq!(seen, [1, 9]);
        group.barrier()?;
        group.close_channel(channel)
    });
}

#[test]
fn tickets_complete_in_their_order_and_stay_complete() {
    in_group(2, |group| {
        let (_window, mut channel) = open(group, 2 * LONG, 1);
        let peer = Rank(1 - channel.rank().0);

        let long = channel.put(peer, 0..LONG, LONG)?;
        let short = channel.put(peer, 0..1, LONG)?;
        let signal = channel.signal(peer, 0)?;
        assert_eq!((short.signal_count(), signal.signal_count()), (None, Some(1)));
        assert!(!channel.poll(short)?, "the long put comes first");

        channel.wait_for(signal, SOON)?;
        for ticket in [long, short, signal] {
            assert!(channel.poll(ticket)?);
            assert_eq!(channel.wait_any(&[ticket.into()], Duration::ZERO)?, 0);
        }

        channel.wait(peer, 0, SOON)?;
        group.close_channel(channel)
    });
}

#[test]
fn one_of_several_events_ends_a_wait_and_none_starves() {
    in_group(4, |group| {
        let (_window, mut channel) = open(group, 2, 2);
        assert_eq!((channel.ranks(), channel.window_len(), channel.signals()), (4, 2, 2));
        if channel.rank() != Rank(0) {
            channel.signal(Rank(0), 1)?;
            channel.signal(Rank(0), 1)?;
            return group.close_channel(channel);
        }

        let mut seen = [0; 4];
        for _ in 0..6 {
            let events = [1, 2, 3].map(|peer| channel.next_signal(Rank(peer), 1));
            seen[1 + channel.wait_any(&events, SOON)?] += 1;
        }
        assert_eq!(seen, [0, 2, 2, 2]);

        // All of these have happened, and take turns.
        let ticket = channel.signal(Rank(0), 0)?;
        channel.wait_for(ticket, SOON)?;
        let again = |peer| ChannelEvent::Signal { peer: Rank(peer), signal: 1, count: 1 };
        let events = [again(1), ticket.into(), again(3)];
        let mut found = [0; 3];
        for _ in 0..6 {
            found[channel.wait_any(&events, Duration::ZERO)?] += 1;
        }
        assert_eq!(found, [2, 2, 2]);
        group.close_channel(channel)
    });
}

#[test]
fn a_wait_for_several_events_names_a_peer_only_if_it_is_the_only_one() {
    in_group(3, |group| {
        let (_window, mut channel) = open(group, 1, 2);
        let short = Duration::from_millis(5);
        let (one, other) = (channel.next_signal(Rank(1), 0), channel.next_signal(Rank(2), 0));

        let error = channel.wait_any(&[one, other], short).unwrap_err();
        assert_eq!((error.kind(), error.peer()), (ErrorKind::Timeout, None), "{error}");
        let text = format!(
            "channel 1: rank {} waits for signal 0 of rank 1 or one of 1 other events, but 5ms have passed",
            channel.rank()
        );
        assert_eq!(error.to_string(), text);

        let same = [one, channel.next_signal(Rank(1), 1)];
        let error = channel.wait_any(&same, short).unwrap_err();
        assert_eq!((error.kind(), error.peer()), (ErrorKind::Timeout, Some(Rank(1))), "{error}");
        group.close_channel(channel)
    });
}

#[test]
fn a_wait_for_several_events_names_the_peer_that_has_left() {
    let errors = with_group(3, |group| {
        let (_window, mut channel) = open(group, 1, 1);
        if channel.rank() != Rank(0) {
            // Rank 2 stays until rank 0 has its error.
            let waited = (channel.rank() == Rank(2)).then(|| channel.wait(Rank(0), 0, SOON));
            return Ok(waited.and_then(Result::err));
        }
        let events = [1, 2].map(|peer| channel.next_signal(Rank(peer), 0));
        Ok(channel.wait_any(&events, SOON).err())
    });
    let error = errors[0].as_ref().expect("rank 1 is lost");
    assert_eq!((error.kind(), error.peer()), (ErrorKind::PeerLost, Some(Rank(1))), "{error}");
}

#[test]
fn bad_events_are_refused() {
    in_group(1, |group| {
        let (_window, mut channel) = open(group, 1, 1);
        let (_other_window, mut other) = open(group, 1, 1);
        let foreign = other.signal(Rank(0), 0)?;

        let text = |result: Result<bool, Error>| {
            let error = result.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            error.to_string()
        };
        insta::assert_snapshot!(
            text(channel.poll(foreign)),
            @"message 1 was not sent on channel 1, expected a ticket of this channel"
        );
        insta::assert_snapshot!(
            text(channel.poll(channel.next_signal(Rank(1), 0))),
            @"channel 1: rank 1 does not exist, expected a rank below 1"
        );
        insta::assert_snapshot!(
            text(channel.wait_any(&[], SOON).map(|_| true)),
            @"channel 1: a wait for no events never ends, expected one"
        );
        assert!(channel.notify(foreign, SOON).is_err());
        Ok(())
    });
}

#[test]
fn notifications_are_futures() {
    in_group(2, |group| {
        let (_window, mut channel) = open(group, 2 * LONG, 1);
        let peer = Rank(1 - channel.rank().0);
        for count in 1..=20 {
            let put = channel.put_signal(peer, 0..LONG, LONG, 0)?;
            let signal = channel.next_signal(peer, 0);
            let (put, given) = (channel.notify(put, SOON)?, channel.notify(signal, SOON)?);

            // The progress thread moves the put while this thread sleeps.
            block_on(async {
                given.await?;
                put.await
            })?;
            assert_eq!(
                channel.next_signal(peer, 0),
                ChannelEvent::Signal { peer, signal: 0, count: count + 1 }
            );
        }
        group.close_channel(channel)
    });
}

#[test]
fn notifications_have_descriptors() {
    in_group(2, |group| {
        let (_window, mut channel) = open(group, 1, 1);
        let peer = Rank(1 - channel.rank().0);
        let mut notification = channel.notify(channel.next_signal(peer, 0), SOON)?;
        let is_readable = |notification: &mut peerlane_collectives::group::Notification, limit| {
            let descriptor = notification.descriptor()?;
            let limit = Timespec { tv_sec: limit, tv_nsec: 0 };
            let ready = poll(&mut [PollFd::new(&descriptor, PollFlags::IN)], Some(&limit));
            Ok::<_, Error>(ready.unwrap() == 1)
        };

        assert!(!notification.poll()? && !is_readable(&mut notification, 0)?);
        group.barrier()?;
        channel.signal(peer, 0)?;
        assert!(is_readable(&mut notification, 20)?);
        assert!(notification.poll()?);
        assert!(is_readable(&mut notification, 0)?);
        group.close_channel(channel)
    });
}

#[test]
fn notifications_end_with_their_deadline_their_channel_and_their_group() {
    let errors = with_group(2, |group| {
        let (_window, channel) = open(group, 1, 1);
        let (_other_window, other) = open(group, 1, 1);
        if group.rank() == Rank(1) {
            // Rank 0 says when this rank may be lost.
            group.barrier()?;
            return Ok(None);
        }

        let signal = channel.next_signal(Rank(1), 0);
        let error = block_on(channel.notify(signal, Duration::from_millis(5))?).unwrap_err();
        assert_eq!((error.kind(), error.peer()), (ErrorKind::Timeout, Some(Rank(1))), "{error}");
        insta::assert_snapshot!(
            error.to_string(),
            @"channel 1: rank 0 awaits signal 0 of rank 1, but 5ms have passed"
        );

        let of_dropped = other.notify(other.next_signal(Rank(1), 0), SOON)?;
        drop(other);
        let error = block_on(of_dropped).unwrap_err();
        insta::assert_snapshot!(
            error.to_string(),
            @"channel 2: the channel was dropped while signal 0 of rank 1 was awaited"
        );

        let lost = channel.notify(signal, SOON)?;
        group.barrier()?;
        Ok(block_on(lost).err())
    });
    let error = errors[0].as_ref().expect("rank 1 is lost");
    assert_eq!((error.kind(), error.peer()), (ErrorKind::PeerLost, Some(Rank(1))), "{error}");
}

/// A thread that waits on a channel for long keeps nobody from a notification of it.
#[test]
fn a_notification_is_told_while_another_thread_waits_on_the_channel() {
    in_group(2, |group| {
        let (_window, mut channel) = open(group, 1, 2);
        let (_other_window, mut other) = open(group, 1, 1);
        let peer = Rank(1 - channel.rank().0);

        if channel.rank() == Rank(1) {
            // Rank 0 sleeps in its wait by then.
            std::thread::sleep(Duration::from_millis(50));
            channel.signal(peer, 0)?;
            other.wait(peer, 0, SOON)?;
            channel.signal(peer, 1)?;
        } else {
            let awaited = channel.notify(channel.next_signal(peer, 0), SOON)?;
            std::thread::scope(|scope| {
                let told = scope.spawn(|| {
                    block_on(awaited)?;
                    other.signal(peer, 0)
                });
                // This wait ends when the other thread was told.
                channel.wait(peer, 1, SOON)?;
                told.join().unwrap().map(drop)
            })?;
        }
        group.close_channel(channel)?;
        group.close_channel(other)
    });
}
