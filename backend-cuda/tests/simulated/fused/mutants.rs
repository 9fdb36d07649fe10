//! Shows that the tests of fused starts find faults of a kernel: each mutant of the model fails in
//! the smallest scenario that brings its fault out, in which the model without a fault passes.
//!
//! A scenario holds back stores or blocks of all devices but the first, which a weak memory model
//! allows, until rank 0 has ended its start. A right kernel does not end it before, so for that one
//! the hold ends after a moment. No result depends on the time that a step takes.

use std::time::{Duration, Instant};

use peerlane_cuda::Fabric;
use peerlane_hal::{CopyEngine as _, Region as _, Ticket};
use peerlane_simulated_driver::Driver;

use super::world::{Case, Collective, Member, PATIENCE, fabrics, world};
use crate::support::driver;

/// How long a start that must not end is watched.
const WATCHED: Duration = Duration::from_millis(25);
/// How long a start has that ends, if it is not expected to. One that waits for ever is then
/// released.
const OVERDUE: Duration = Duration::from_millis(150);

/// What a run has shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Finding {
    Right,
    WrongBytes,
    NeverEnds,
    /// A start is reported as done, or memory of peers is written, when it must not be.
    Forbidden,
}

/// A scenario and what it shows of a mutant.
struct Row {
    mutant: &'static str,
    case: Case,
    scenario: Scenario,
    finding: Finding,
}

#[derive(Clone, Copy, Debug)]
enum Scenario {
    /// Makes starts while all devices but the first hold something back in the last one. Counts
    /// `added` starts more.
    Starts { hold: &'static str, count: usize, added: u64 },
    /// Releases rank 0, whose peers never start, and looks whether it ends.
    Released,
    /// As `Released`, with two starts, and looks at the memory of the peer.
    Untouched,
    /// Makes two starts on rank 0, whose peers never start, and looks whether the second one ends.
    Ahead,
    /// Looks whether rank 1 reports its start as done while blocks are held back.
    Done,
}

/// Makes one start with a hold.
const fn held(hold: &'static str) -> Scenario {
    Scenario::Starts { hold, count: 1, added: 0 }
}

fn rows() -> Vec<Row> {
    use Collective::{
        BroadcastTagged, GatherDirect, GatherTagged, ReduceDirect, ReduceInParts, ReduceTagged,
    };
    use Finding::{Forbidden, NeverEnds, WrongBytes};
    let pair = |collective, bytes, blocks| Case::new(collective, 2, bytes, blocks);
    let row = |mutant, case, scenario, finding| Row { mutant, case, scenario, finding };
    // Odd and even starts, the last of which has the tag 0.
    let wrap = Scenario::Starts { hold: "stores", count: 4, added: (1 << 32) - 4 };
    let before_wrap = Case { base: 0xffff, ..pair(ReduceDirect, 64, 1) };

    vec![
        row("no-fence", pair(ReduceDirect, 64, 1), held("stores"), WrongBytes),
        row("no-fence", pair(GatherDirect, 64, 1), held("stores"), WrongBytes),
        row("flag-first", pair(ReduceDirect, 64, 1), held("stores"), WrongBytes),
        row("stale-tag", pair(GatherTagged, 64, 1), held("none"), NeverEnds),
        row("first-half", pair(GatherTagged, 64, 1), held("halves"), WrongBytes),
        row("even-targets", pair(ReduceDirect, 64, 1), held("none"), WrongBytes),
        row("even-targets", pair(ReduceTagged, 64, 1), held("none"), NeverEnds),
        row("older-start", pair(ReduceDirect, 64, 1), held("stores"), WrongBytes),
        row("first-block", pair(ReduceDirect, 96, 3), held("blocks"), WrongBytes),
        row("first-leaves", pair(GatherTagged, 12_288, 3), held("turns"), NeverEnds),
        row("short-value", before_wrap, held("stores"), WrongBytes),
        row("later-tag", pair(GatherTagged, 64, 1), wrap, WrongBytes),
        row("other-parts", pair(ReduceInParts, 192, 3), held("turns"), WrongBytes),
        row("arrival-order", Case::new(ReduceDirect, 4, 1000, 1), held("none"), WrongBytes),
        row("no-tail", pair(GatherTagged, 13, 1), held("none"), WrongBytes),
        row("no-abort", pair(GatherTagged, 64, 1), Scenario::Released, NeverEnds),
        row("stores-after-abort", pair(GatherDirect, 64, 1), Scenario::Untouched, Forbidden),
        row("not-gone", pair(GatherTagged, 64, 1), Scenario::Untouched, Forbidden),
        row("ignores-last", pair(BroadcastTagged, 64, 1), Scenario::Ahead, Forbidden),
        row("early-done", pair(ReduceDirect, 96, 3), Scenario::Done, Forbidden),
    ]
}

/// How long a run looks at a start.
#[derive(Clone, Copy, Debug)]
struct Patience {
    /// At one that must not end yet.
    to_be_early: Duration,
    /// At one that must end.
    to_end: Duration,
}

/// Runs a scenario with a mutant, or with `none`.
fn observe(driver: &Driver, fabrics: &[Fabric], row: &Row, mutant: &str) -> Finding {
    let added = match row.scenario {
        Scenario::Starts { added, .. } => added,
        _ => 0,
    };
    driver.set("KERNEL_STARTS", &added.to_string());
    let mut members = world(&fabrics[..row.case.ranks], row.case);

    // Whatever is expected has time enough.
    let is_right = mutant == "none";
    let never_ends = !is_right && row.finding == Finding::NeverEnds;
    let patience = Patience {
        to_be_early: if is_right { WATCHED } else { PATIENCE },
        to_end: if never_ends { OVERDUE } else { PATIENCE },
    };

    driver.set("KERNEL_MUTANT", mutant);
    let finding = match row.scenario {
        Scenario::Starts { hold, count, .. } => {
            starts(driver, &mut members, (hold, count), patience)
        }
        Scenario::Released => released(&mut members[0], patience.to_end),
        Scenario::Untouched => untouched(&mut members),
        Scenario::Ahead => ahead(&mut members[0], patience.to_be_early),
        Scenario::Done => done(driver, &mut members, patience.to_be_early),
    };
    finish(driver, &mut members);
    driver.set("KERNEL_STARTS", "0");
    finding
}

/// Ends all holds and faults, and all starts.
fn finish(driver: &Driver, members: &mut [Member]) {
    driver.set("KERNEL_MUTANT", "none");
    driver.set("KERNEL_HOLD", "none");
    for member in members {
        let last = Ticket(member.started);
        assert!(member.is_done(last) || member.release_all(last), "a start stays blocked");
    }
}

fn starts(
    driver: &Driver,
    members: &mut [Member],
    (hold, count): (&str, usize),
    patience: Patience,
) -> Finding {
    for round in 0..count {
        let is_last = round + 1 == count;
        driver.set("KERNEL_HOLD", if is_last { hold } else { "none" });
        let expected = members[0].case.expected(round);
        members.iter().for_each(|member| member.prepare(round));
        let tickets: Vec<Ticket> = members.iter_mut().map(Member::start).collect();

        // Under these holds, peers go on only when the hold ends.
        if is_last && ["stores", "halves", "blocks"].contains(&hold) {
            if members[0].ends_within(tickets[0], patience.to_be_early) {
                return match members[0].wrong_byte(&expected) {
                    Some(_) => Finding::WrongBytes,
                    None => Finding::Right,
                };
            }
            driver.set("KERNEL_HOLD", "none");
        }

        for (member, ticket) in members.iter_mut().zip(tickets) {
            if !member.ends_within(ticket, patience.to_end) {
                return Finding::NeverEnds;
            }
            if member.wrong_byte(&expected).is_some() {
                return Finding::WrongBytes;
            }
        }
    }
    Finding::Right
}

fn released(member: &mut Member, patience: Duration) -> Finding {
    let ticket = member.start();
    await_begun(member, 1);
    member.engine.release().unwrap();
    if member.ends_within(ticket, patience) { Finding::Right } else { Finding::NeverEnds }
}

/// Looks whether a rank overwrites slots of peers that have not begun the start before.
fn ahead(member: &mut Member, patience: Duration) -> Finding {
    let first = member.start();
    let second = member.start();
    assert!(member.ends_within(first, PATIENCE), "the first start ends without its peers");
    if member.ends_within(second, patience) { Finding::Forbidden } else { Finding::Right }
}

/// Looks at what the starts of a released rank write to its peer: nothing behind a wait, and nothing
/// from the second start on.
fn untouched(members: &mut [Member]) -> Finding {
    members.iter().for_each(|member| member.prepare(0));
    let [first, peer] = members else { unreachable!() };
    let regions = &peer.regions;
    let output = bytes_of(&regions.output);
    let inbox = bytes_of(&regions.inbox);

    first.start();
    let last = first.start();
    await_begun(first, 1);
    assert!(first.release_all(last), "a released start stays blocked");

    // The first start puts into its slot of odd starts before it waits.
    let odd = first.case.inbox(0, 1) as usize;
    let even = |inbox: &[u8]| inbox[..odd].to_vec();
    let is_untouched =
        bytes_of(&regions.output) == output && even(&bytes_of(&regions.inbox)) == even(&inbox);
    if is_untouched { Finding::Right } else { Finding::Forbidden }
}

fn bytes_of(region: &peerlane_cuda::Local) -> Vec<u8> {
    let mut bytes = vec![0; region.bytes() as usize];
    // SAFETY: tests look at memory when nobody is to write it.
    unsafe { region.download(0, &mut bytes) }.unwrap();
    bytes
}

fn await_begun(member: &mut Member, start: u64) {
    let since = Instant::now();
    while member.progress().begun < start {
        assert!(since.elapsed() < PATIENCE, "no start begins");
        std::thread::yield_now();
    }
}

/// Looks whether rank 1 is done while all of its blocks but the first are held back.
fn done(driver: &Driver, members: &mut [Member], patience: Duration) -> Finding {
    driver.set("KERNEL_HOLD", "blocks");
    members.iter().for_each(|member| member.prepare(0));
    for member in members.iter_mut() {
        member.start();
    }

    let since = Instant::now();
    while since.elapsed() < patience {
        if members[1].progress().done > 0 {
            return Finding::Forbidden;
        }
        std::thread::yield_now();
    }
    Finding::Right
}

#[test]
fn every_mutant_is_found() {
    let (driver, _turn) = driver();
    let fabrics = fabrics(4);
    for row in rows() {
        let what = format!("{}: {:?}, {:?}", row.mutant, row.case, row.scenario);
        assert_eq!(observe(&driver, &fabrics, &row, "none"), Finding::Right, "without {what}");
        assert_eq!(observe(&driver, &fabrics, &row, row.mutant), row.finding, "{what}");
    }
}
