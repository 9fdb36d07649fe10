//! Kills or stops one rank of several processes in every phase. All other ranks must name it soon,
//! with the same abort record, and must leave nothing behind.
//!
//! The victim halts at a place that it selects, and the parent kills it there when all other ranks
//! wait for it. Killing two ranks at once is left out on purpose: which of them is named depends on
//! chance.

mod case;
mod rank;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};
use peerlane_conformance::processes::Parent;

use case::{Case, End, Hub, Phase};

fn main() -> ExitCode {
    if let Some(parent) = Parent::find() {
        return rank::run_rank(&parent);
    }
    let trials =
        cases().map(|case| Trial::test(case.to_string(), move || case.run().map_err(Into::into)));
    libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit_code()
}

fn cases() -> impl Iterator<Item = Case> {
    let killed = |ranks, victim, phase| {
        let (hub, end, nodes) = (Hub::RankZero, End::Killed, None);
        Case { ranks, victim, phase, hub, end, nodes }
    };
    let in_every_phase = Phase::ALL.into_iter().flat_map(move |phase| {
        // Rank 0 holds the hub.
        [killed(3, 0, phase), killed(3, 2, phase)]
    });
    let sizes = [Phase::Opened, Phase::Importing, Phase::Ready, Phase::BetweenStarts];
    let sizes = sizes.into_iter().flat_map(move |phase| [killed(2, 1, phase), killed(4, 1, phase)]);
    let outside = [Phase::BeforeJoin, Phase::Joined, Phase::Opened, Phase::Pushing, Phase::Closing];
    let outside = outside.map(|phase| Case { hub: Hub::Parent, ..killed(3, 0, phase) });
    let stopped = [Phase::Prepared, Phase::Ready, Phase::BetweenStarts];
    let stopped = stopped.into_iter().flat_map(move |phase| {
        [0, 1].map(|victim| Case { end: End::Stopped, ..killed(3, victim, phase) })
    });
    let tiers = [Phase::Importing, Phase::Prepared, Phase::Ready, Phase::Pushing];
    let tiers = tiers.into_iter().chain([Phase::BetweenStarts]).flat_map(move |phase| {
        [1, 3].map(|victim| Case { nodes: Some("2x2"), ..killed(4, victim, phase) })
    });
    let waiting = Case { nodes: Some("2x1"), end: End::Stopped, ..killed(2, 1, Phase::Ready) };
    let tiers = tiers.chain([waiting]);
    in_every_phase.chain(sizes).chain(outside).chain(stopped).chain(tiers)
}
