//! Tests the order between the streams of one engine, and between the streams of consecutive slices.

use std::time::Duration;

use peerlane_hal::{At, CopyEngine as _, Fabric as _, Op, PeerMemory as _, Rank, Role, Ticket};

use super::world::{OpOf, world};
use crate::backend::{Compute, SignalBy, driver, pattern, ranks, soon};

const RANKS: usize = 4;
const SHARD: u64 = 5000;

/// Puts before a wait start on all streams; those behind it start only after it.
#[test]
fn a_wait_holds_the_puts_of_all_streams() {
    let (driver, _turn) = driver();
    let mut members = world(RANKS, SHARD, None);
    // The puts before the wait have a source of their own, because they may still read it when the other is filled.
    let early: Vec<_> = members.iter().map(|member| member.round(0).0).collect();
    driver.set("JITTER_US", "200");
    for epoch in 1..=10 {
        let seed = |rank: usize| rank as u8 ^ (epoch as u8 * 16);
        let pairs = members.iter_mut().zip(&early);
        let tickets: Vec<Ticket> =
            pairs.map(|(member, early)| member.submit_held(epoch, early)).collect();
        std::thread::sleep(Duration::from_millis(10));
        for member in &mut members {
            let done = member.engine.completed().unwrap();
            assert!(done.0 < epoch, "rank {}: {done:?}", member.me);
            // The put behind the wait copies what the source holds by then.
            member.fill(seed(member.me));
        }
        members.iter().for_each(|member| member.open_gate(epoch));
        for (member, ticket) in members.iter_mut().zip(tickets) {
            member.finish(ticket);
        }
        members.iter().for_each(|member| member.ensure_gathered(seed, "behind the wait"));
    }
    driver.set("JITTER_US", "0");
}

/// The bytes of a put are visible before its flag, for every stream that carried them.
#[test]
fn a_signal_comes_behind_the_puts_of_its_stream() {
    for signal in [None, Some(SignalBy::Copy)] {
        for to in 0..RANKS {
            let (driver, _turn) = driver();
            let mut members = world(RANKS, SHARD, signal);
            members[0].fill(9);
            driver.set("COPY_DELAY_US", "20000");
            let ticket = members[0].put_quarters_and_signal(to, 1);
            members[to].reach(RANKS as u64, 1);
            // The copy to the host takes as long as a quarter.
            let mut seen = vec![0; SHARD as usize];
            // SAFETY: nobody else accesses these bytes of the region now.
            unsafe { members[to].regions.output.download(0, &mut seen) }.unwrap();
            driver.set("COPY_DELAY_US", "0");
            assert!(seen == pattern(9, seen.len()), "{signal:?}, to rank {to}");
            members[0].finish(ticket);
        }
    }
}

/// Makes a chain of local copies, each on another stream than the one before it.
#[test]
fn slices_keep_their_order_across_streams() {
    let (driver, _turn) = driver();
    let mut fabrics = ranks(1).unwrap();
    let fabric = &mut fabrics[0];
    let chain: Vec<_> =
        (0..7).map(|_| fabric.memory().allocate(SHARD, Role::Data).unwrap()).collect();
    let alias: Vec<_> = chain
        .iter()
        .map(|region| {
            let key = fabric.memory().export(region).unwrap();
            fabric.memory().import(Rank(0), &key, soon()).unwrap()
        })
        .collect();
    let mut engine = fabric.engine(Default::default()).unwrap();
    let (first, second) = (Compute::new(0), Compute::new(0));
    let sent = pattern(3, SHARD as usize);
    // SAFETY: nobody else accesses these bytes of the region now.
    unsafe { chain[0].upload(0, &sent) }.unwrap();
    driver.set("COPY_DELAY_US", "10000");
    let streams = [None, Some(&first), Some(&second), None, Some(&second), Some(&first)];
    let mut last = Ticket::NONE;
    for (link, stream) in streams.into_iter().enumerate() {
        if let Some(stream) = stream {
            engine.streams().unwrap().fork(&stream.handle()).unwrap();
        }
        let put: OpOf<'_> = Op::Put {
            dst: At { region: &alias[link + 1], offset: 0 },
            src: At { region: &chain[link], offset: 0 },
            bytes: SHARD,
        };
        // SAFETY: the regions outlive the engine, and only the engine accesses them.
        last = unsafe { engine.submit(&[put]) }.unwrap();
        if let Some(stream) = stream {
            engine.streams().unwrap().join(&stream.handle()).unwrap();
        }
    }
    while engine.completed().unwrap() < last {
        engine.park(Duration::from_millis(1)).unwrap();
    }
    driver.set("COPY_DELAY_US", "0");
    let mut seen = vec![0; SHARD as usize];
    // SAFETY: nobody else accesses these bytes of the region now.
    unsafe { chain[6].download(0, &mut seen) }.unwrap();
    assert!(seen == sent, "a link of the chain was copied before the one in front of it");
    drop(engine);
}
