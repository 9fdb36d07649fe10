//! Kills or stops one rank of several processes in every phase. All other ranks must name it soon,
//! with the same abort record, and must leave nothing behind.
//!
//! The victim halts at a place that it selects, and the parent kills it there when all other ranks
//! wait for it. Killing two ranks at once is left out on purpose: which of them is named depends on
//! chance.

mod case;
mod groups;
mod rank;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};
use peerlane_tests::processes::Parent;

use case::{Case, End, Hub, Phase};

fn main() -> ExitCode {
    if let Some(parent) = Parent::find() {
        return parent.exit_code(match parent.role() {
            groups::ROLE => groups::run_rank(&parent),
            _ => rank::run_rank(&parent),
        });
    }
    let trials =
        cases().map(|case| Trial::test(case.to_string(), move || case.run().map_err(Into::into)));
    let of_groups = Trial::test("Killed::in_groups", || groups::run().map_err(Into::into));
    libtest_mimic::run(&Arguments::from_args(), trials.chain([of_groups]).collect()).exit_code()
}

fn cases() -> impl Iterator<Item = Case> {
    let killed = |ranks, victim, phase| {
        let (hub, end, nodes) = (Hub::RankZero, End::Killed, None);
        Case { ranks, victim, phase, hub, end, nodes, ring: false }
    };
    let in_every_phase = Phase::ALL.into_iter().flat_map(move |phase| {
        // Rank 0 holds the hub.
        [killed(3, 0, phase), killed(3, 2, phase)]
    });
    let sizes = [Phase::Opened, Phase::Importing, Phase::Ready, Phase::BetweenStarts];
    let sizes = sizes.into_iter().flat_map(move |phase| [killed(2, 1, phase), killed(4, 1, phase)]);
    let outside = [Phase::BeforeJoin, Phase::Joined, Phase::Opened, Phase::Pushing, Phase::Closing];
    let outside = outside.map(|phase| Case { hub: Hub::Parent, ..killed(3, 0, phase) });
    let stopped =
        move |ranks, victim, phase| Case { end: End::Stopped, ..killed(ranks, victim, phase) };
    let in_exchanges = [Phase::Connecting, Phase::Preparing, Phase::Importing];
    let in_starts = [Phase::Prepared, Phase::Ready, Phase::BetweenStarts];
    let in_rings = in_starts.into_iter().flat_map(move |phase| {
        [(4, 0), (4, 2), (5, 3)]
            .map(|(ranks, victim)| Case { ring: true, ..stopped(ranks, victim, phase) })
    });
    let stopped = in_exchanges
        .into_iter()
        .chain(in_starts)
        .flat_map(move |phase| [0, 1].map(|victim| stopped(3, victim, phase)))
        .chain(in_rings);
    let tiers = [Phase::Importing, Phase::Prepared, Phase::Ready, Phase::Pushing];
    let tiers =
        tiers.into_iter().chain([Phase::BetweenStarts, Phase::Messages]).flat_map(move |phase| {
            [1, 3].map(|victim| Case { nodes: Some("2x2"), ..killed(4, victim, phase) })
        });
    let waiting = [("2x1", 2, 1), ("2x2", 4, 1), ("2x2", 4, 2)].map(|(nodes, ranks, victim)| {
        Case { nodes: Some(nodes), end: End::Stopped, ..killed(ranks, victim, Phase::Ready) }
    });
    let tiers = tiers.chain(waiting);
    in_every_phase.chain(sizes).chain(outside).chain(stopped).chain(tiers)
}
