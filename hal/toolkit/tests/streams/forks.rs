//! Tests the order between the caller's streams and the engine, without a host that waits.

use std::time::Duration;

use peerlane_hal::{CaptureState, CopyEngine as _, Error as _, ErrorKind, Ticket};

use super::world::{PLAIN, ensure_gathered, world};
use crate::backend::{Compute, SignalBy, Stream, driver};

const RANKS: usize = 3;
const SHARD: u64 = 100_003;

fn seed(rank: usize, epoch: u64) -> u8 {
    (rank as u8 * 32) ^ epoch as u8
}

/// Starts alternate between two streams of the caller and none, without pauses. Each follows the writes of
/// its stream, and the reads of its stream follow it. The engine keeps its own order across the streams.
#[test]
fn starts_are_ordered_with_the_callers_streams() {
    const EPOCHS: u64 = 12;
    for signal in [None, Some(SignalBy::Copy)] {
        let (driver, _turn) = driver();
        let mut members = world(RANKS, SHARD, signal);
        driver.set("JITTER_US", "300");
        let streams: Vec<[Compute; 2]> =
            (0..RANKS).map(|rank| [Compute::new(rank), Compute::new(rank)]).collect();
        let mut rounds = Vec::new();
        for epoch in 1..=EPOCHS {
            for (rank, member) in members.iter_mut().enumerate() {
                let (sent, received) = member.round(seed(rank, epoch));
                let (stream, other) = match epoch % 3 {
                    1 => (&streams[rank][0], &streams[rank][1]),
                    _ => (&streams[rank][1], &streams[rank][0]),
                };
                // The caller orders its own streams.
                stream.wait_for(other);
                stream.copy(&member.regions.source, &sent);
                if epoch % 3 == 0 {
                    // Without a stream, only the host orders the start.
                    stream.finish();
                } else {
                    member.engine.streams().unwrap().fork(&stream.handle()).unwrap();
                }
                rounds.push((rank, epoch, sent, received, stream.clone()));
                member.submit(epoch, PLAIN);
                if epoch % 3 != 0 {
                    member.engine.streams().unwrap().join(&stream.handle()).unwrap();
                }
            }
            if epoch % 3 == 0 {
                members.iter_mut().for_each(|member| member.finish(Ticket(epoch)));
            }
            for (rank, of, _, received, stream) in &rounds[rounds.len() - RANKS..] {
                assert_eq!(*of, epoch);
                stream.copy(received, &members[*rank].regions.output);
            }
        }
        streams.iter().flatten().for_each(Compute::finish);
        driver.set("JITTER_US", "0");
        for (rank, epoch, _, received, _) in &rounds {
            let what = format!("{signal:?}, rank {rank}, epoch {epoch}");
            ensure_gathered(received, |rank| seed(rank, *epoch), SHARD, &what);
        }
    }
}

/// The work of another stream than the forked one follows the engine's work after the join.
#[test]
fn a_start_can_be_joined_to_another_stream() {
    let (driver, _turn) = driver();
    let mut members = world(2, SHARD, None);
    driver.set("COPY_DELAY_US", "3000");
    let (from, into) = ([0, 1].map(Compute::new), [0, 1].map(Compute::new));
    let mut rounds = Vec::new();
    for (rank, member) in members.iter_mut().enumerate() {
        let (sent, received) = member.round(seed(rank, 1));
        from[rank].copy(&member.regions.source, &sent);
        member.engine.streams().unwrap().fork(&from[rank].handle()).unwrap();
        rounds.push((sent, received));
    }
    for member in &mut members {
        member.submit(1, PLAIN);
    }
    for (rank, member) in members.iter_mut().enumerate() {
        member.engine.streams().unwrap().join(&into[rank].handle()).unwrap();
        into[rank].copy(&rounds[rank].1, &member.regions.output);
    }
    into.iter().for_each(Compute::finish);
    driver.set("COPY_DELAY_US", "0");
    for (_, received) in &rounds {
        ensure_gathered(received, |rank| seed(rank, 1), SHARD, "another stream");
    }
}

#[test]
fn streams_that_are_not_of_this_device_are_refused() {
    let (_driver, _turn) = driver();
    let mut members = world(2, 64, None);
    let engine = &mut members[0].engine;
    for handle in [0_usize, 1, 2] {
        // SAFETY: default streams live as long as their contexts.
        let stream = unsafe { Stream::from_raw(handle as *mut _) };
        let answers = [
            engine.streams().unwrap().fork(&stream),
            engine.streams().unwrap().join(&stream),
            engine.streams().unwrap().capture_state(&stream).map(drop),
        ];
        for answer in answers {
            let error = answer.expect_err("a default stream");
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
            assert!(error.to_string().contains("default stream"), "{error}");
        }
    }
    let foreign = Compute::new(1);
    let error =
        engine.streams().unwrap().fork(&foreign.handle()).expect_err("a stream of another device");
    assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
    let own = Compute::new(0);
    let state = engine.streams().unwrap().capture_state(&own.handle()).unwrap();
    assert_eq!(state, CaptureState::None);
    // None of these calls poisoned the engine or forked it.
    let ticket = members[0].wait_for(0, 0);
    members[0].finish(ticket);
    own.finish();
    members[0].engine.park(Duration::ZERO).unwrap();
}
