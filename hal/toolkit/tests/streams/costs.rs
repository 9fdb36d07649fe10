//! Measures the cost of a start: calls of the driver, and copies in flight. The expected figures of each
//! vendor are in its backend.

use peerlane_hal::Ticket;

use super::world::{GatherOptions, Member, PLAIN, world};
use crate::backend::{SignalBy, driver};

/// Returns how often one start of one rank makes each of the calls `may`, with four ranks. It makes none of
/// the calls `never`: they wait, or are not legal in a capture, or allocate.
pub(crate) fn calls<const N: usize>(
    may: [&str; N],
    never: &[&str],
    shard: u64,
    options: GatherOptions,
    signal: Option<SignalBy>,
) -> [u64; N] {
    const STARTS: u64 = 5;
    let (driver, _turn) = driver();
    let mut members = world(4, shard, signal);
    members.iter().for_each(|member| member.fill(member.me as u8));
    let count = |names: &[&str]| -> Vec<u64> { names.iter().map(|it| driver.calls(it)).collect() };
    let start = |members: &mut [Member], epoch| {
        for member in members {
            member.submit(epoch, options);
        }
    };
    let finish = |members: &mut [Member], epoch| {
        members.iter_mut().for_each(|member| member.finish(Ticket(epoch)));
    };
    // The first starts may create resources that later ones reuse.
    (1..=STARTS).for_each(|epoch| start(&mut members, epoch));
    finish(&mut members, STARTS);
    let (before, uncalled) = (count(&may), count(never));
    let uses = driver.counter("default_stream_uses", None);
    (STARTS + 1..=2 * STARTS).for_each(|epoch| start(&mut members, epoch));
    assert_eq!(count(never), uncalled, "{never:?}");
    let all: Vec<u64> = count(&may).iter().zip(before).map(|(now, then)| now - then).collect();
    assert!(all.iter().all(|calls| calls % (4 * STARTS) == 0), "{all:?}");
    finish(&mut members, 2 * STARTS);
    assert_eq!(driver.counter("default_stream_uses", None), uses, "the default stream was used");
    if !options.in_place {
        members.iter().for_each(|member| member.ensure_gathered(|rank| rank as u8, "counted"));
    }
    std::array::from_fn(|index| all[index] / (4 * STARTS))
}

/// Checks that `most` copies of each device run at once, and never more, on a device with `engines` copy engines.
pub(crate) fn check_copies_at_once(engines: &str, most: i64) {
    /// On a loaded machine, the copies of one round may not meet.
    const ROUNDS: u64 = 10;
    let (driver, _turn) = driver();
    driver.set("COPY_ENGINES", engines);
    let mut members = world(4, 1 << 20, None);
    members.iter().for_each(|member| member.fill(member.me as u8));
    driver.set("COPY_DELAY_US", "5000");
    driver.reset_counters();
    let mut seen = [0; 4];
    for round in 1..=ROUNDS {
        for epoch in 3 * round - 2..=3 * round {
            for member in &mut members {
                member.submit(epoch, PLAIN);
            }
        }
        members.iter_mut().for_each(|member| member.finish(Ticket(3 * round)));
        seen = [0, 1, 2, 3].map(|it| driver.counter("most_copies_at_once", Some(it)));
        if seen == [most; 4] {
            break;
        }
    }
    driver.set("COPY_DELAY_US", "0");
    driver.set("COPY_ENGINES", "3");
    members.iter().for_each(|member| member.ensure_gathered(|rank| rank as u8, "delayed"));
    assert_eq!(seen, [most; 4], "{engines} copy engines");
}

#[test]
fn jitter_changes_no_byte() {
    for (signal, shard) in [(None, 300_001), (Some(SignalBy::Copy), 300_001), (None, 777)] {
        let (driver, _turn) = driver();
        let mut members = world(3, shard, signal);
        driver.set("JITTER_US", "400");
        for epoch in 1..=12 {
            let seed = |rank: usize| (rank as u8 * 16) ^ epoch as u8;
            members.iter().for_each(|member| member.fill(seed(member.me)));
            let tickets: Vec<_> =
                members.iter_mut().map(|member| member.submit(epoch, PLAIN)).collect();
            for (member, ticket) in members.iter_mut().zip(tickets) {
                member.finish(ticket);
            }
            let what = format!("{signal:?}, epoch {epoch}");
            members.iter().for_each(|member| member.ensure_gathered(seed, &what));
        }
        driver.set("JITTER_US", "0");
    }
}

/// Returns the number of calls that copy rows with the given strides from one rank to another.
pub(crate) fn calls_of_rows<const N: usize>(
    calls: [&str; N],
    count: u64,
    bytes: u64,
    strides: (u64, u64),
) -> [u64; N] {
    let (driver, _turn) = driver();
    let mut members = world(2, 100_000, None);
    let member = &mut members[0];
    let before = calls.map(|call| driver.calls(call));
    let ticket = member.put_rows(count, bytes, strides);
    member.finish(ticket);
    let mut after = calls.map(|call| driver.calls(call));
    after.iter_mut().zip(before).for_each(|(after, before)| *after -= before);
    after
}
