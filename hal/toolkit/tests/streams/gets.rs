//! Tests gets, which use the streams of puts and keep their order.

use peerlane_hal::Ticket;

use super::world::{Member, world};
use crate::backend::{SignalBy, driver, pattern};

const RANKS: usize = 4;
const SHARD: u64 = 70_001;

/// Writes every rank's shard to its place in the rank's output.
pub(crate) fn offer(members: &[Member], seed: impl Fn(usize) -> u8) {
    for member in members {
        let bytes = pattern(seed(member.me), SHARD as usize);
        // SAFETY: nobody else accesses these bytes of the region now.
        unsafe { member.regions.output.upload(member.me as u64 * SHARD, &bytes) }.unwrap();
    }
}

#[test]
fn everybody_gets_from_everybody() {
    for signal in [None, Some(SignalBy::Copy)] {
        let (driver, _turn) = driver();
        let mut members = world(RANKS, SHARD, signal);
        driver.set("JITTER_US", "300");
        for epoch in 1..=8 {
            let seed = |rank: usize| (rank as u8 * 16) ^ epoch as u8;
            offer(&members, seed);
            let tickets: Vec<Ticket> =
                members.iter_mut().map(|member| member.pull_from_all(epoch)).collect();
            for (member, ticket) in members.iter_mut().zip(tickets) {
                member.finish(ticket);
            }
            let what = format!("{signal:?}, epoch {epoch}");
            members.iter().for_each(|member| member.ensure_gathered(seed, &what));
        }
        driver.set("JITTER_US", "0");
    }
}

/// A signal after a get says that the source may change, for every stream that carried the get.
#[test]
fn a_signal_comes_behind_the_gets_of_its_stream() {
    for signal in [None, Some(SignalBy::Copy)] {
        for from in 1..RANKS {
            let (driver, _turn) = driver();
            let mut members = world(RANKS, SHARD, signal);
            offer(&members, |rank| rank as u8 + 1);
            driver.set("COPY_DELAY_US", "20000");
            let ticket = members[0].pull_from_all(1);
            members[from].reach(RANKS as u64, 1);
            driver.set("COPY_DELAY_US", "0");
            offer(&members[from..=from], |_| 99);
            members[0].finish(ticket);
            let mut seen = vec![0; SHARD as usize];
            // SAFETY: nobody else accesses these bytes of the region now.
            unsafe { members[0].regions.output.download(from as u64 * SHARD, &mut seen) }.unwrap();
            let wanted = pattern(from as u8 + 1, seen.len());
            assert!(seen == wanted, "{signal:?}, from rank {from}");
        }
    }
}
