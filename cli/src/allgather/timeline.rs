//! Traces one run of an operation on all ranks, and merges the steps of the ranks into one timeline.
//!
//! A traced all-gather is prepared in addition to the timed ones. It is slower, because each step
//! is submitted and observed alone.

use peerlane::Group;
use peerlane::bootstrap::Bootstrap;
use peerlane::trace::{Trace, TracedStart};
use peerlane_planning::plan::{Step, Tier};
use serde::{Deserialize, Serialize};

use super::setup::{Setup, Variant};
use crate::error::Result;
use crate::ranks::comm::Comm;
use crate::trace::TraceEvent;

/// The number of traced runs, of which the last one is shown.
const STARTS: usize = 2;
/// The gap on the timeline between the runs of two algorithms, in nanoseconds.
const PAUSE_NS: f64 = 10_000.0;

/// The traced steps of one run of an algorithm, by rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Traced {
    algorithm: String,
    ranks: Vec<Trace>,
}

/// Traces one run of every algorithm with blocks of `block_length` elements. Collective.
pub(super) fn trace(
    setup: &Setup<'_>,
    comm: &Comm,
    group: &mut Group,
    block_length: u64,
) -> Result<Vec<Traced>> {
    let mut starts = Vec::new();
    for algorithm in setup.algorithms() {
        let variant = Variant { algorithm, captured: false, traced: true };
        let mut operation = setup.prepare_on_host(group, block_length, variant)?;
        for _ in 0..STARTS {
            group.barrier()?;
            operation.run()?;
        }
        let mut trace = operation.trace().unwrap_or_default();
        trace.starts.drain(..trace.starts.len().saturating_sub(1));
        let ranks = comm.share("trace", &trace)?;
        let report = operation.report();
        let algorithm = format!("{}, chunks {}", report.algorithm, report.chunks);
        if comm.rank().0 == 0 {
            starts.push(Traced { algorithm, ranks });
        }
        drop(operation);
        group.barrier()?;
    }
    Ok(starts)
}

/// Returns the trace events of all runs, one run after another.
pub(super) fn events(starts: &[Traced]) -> Vec<TraceEvent> {
    let mut origin = 0.0;
    let mut events = Vec::new();
    for traced in starts {
        let all = || traced.ranks.iter().flat_map(|rank| &rank.starts);
        let first = all().map(|start| start.unix_ns).min().unwrap_or(0);
        let mut end: f64 = origin;
        for rank in &traced.ranks {
            for start in &rank.starts {
                let started_at = origin + (start.unix_ns - first) as f64;
                for event in start_events(&traced.algorithm, rank, start, started_at) {
                    end = end.max(event.start_ns + event.duration_ns);
                    events.push(event);
                }
            }
        }
        origin = end + PAUSE_NS;
    }
    events
}

fn start_events<'a>(
    algorithm: &'a str,
    rank: &'a Trace,
    start: &'a TracedStart,
    started_at: f64,
) -> impl Iterator<Item = TraceEvent> + 'a {
    start.steps.iter().map(move |step| {
        let lane = rank.lanes.iter().find(|lane| lane.lane == step.lane);
        let network = lane.is_some_and(|lane| lane.tier == Tier::Network);
        let place_text = if network { " (network)" } else { "" };
        // A step whose completion was not observed has no duration.
        let end = step.end_ns.unwrap_or(step.begin_ns);
        TraceEvent {
            rank: rank.rank,
            lane: step.lane.0,
            name: format!("{}{place_text} [{algorithm}]", name(&step.step)),
            start_ns: started_at + step.begin_ns as f64,
            duration_ns: end.saturating_sub(step.begin_ns) as f64,
        }
    })
}

fn name(step: &Step) -> String {
    match step {
        Step::Put { peer, cell, .. } => format!("put {cell} to {peer}"),
        Step::Get { peer, cell, .. } => format!("get {cell} of {peer}"),
        Step::Reduce { cell, from } => format!("reduce {cell} of {from}"),
        Step::Signal { peer, flag } => format!("signal {flag} to {peer}"),
        Step::Wait { flag } => format!("wait {flag}"),
    }
}

#[cfg(test)]
mod tests {
    use peerlane::Rank;
    use peerlane::trace::{TracedLane, TracedStep};
    use peerlane_planning::plan::{Cell, Flag, LaneId, Source};

    use super::*;

    fn rank_trace(rank: u32, unix_ns: u64) -> Trace {
        let lane = LaneId::HOME;
        let cell = Cell { block: Rank(rank), chunk: 0 };
        let peer = Rank(1 - rank);
        let traced = |step, submitted_ns, begin_ns, end_ns| TracedStep {
            lane,
            step,
            bytes: 8,
            submitted_ns,
            begin_ns,
            end_ns,
        };
        let steps = vec![
            traced(Step::Put { peer, cell, from: Source::Input }, 10, 20, Some(120)),
            traced(Step::Wait { flag: Flag::Arrived { cell, lane } }, 10, 120, None),
        ];
        let lanes = vec![TracedLane { lane, tier: Tier::Network, backend: "host".to_owned() }];
        let starts = vec![TracedStart { epoch: 2, unix_ns, steps }];
        Trace { rank, lanes, starts, is_cut: false }
    }

    #[test]
    fn ranks_share_a_clock_and_algorithms_follow_each_other() {
        let traced = |algorithm: &str| Traced {
            algorithm: algorithm.to_owned(),
            ranks: vec![rank_trace(0, 1_000_000), rank_trace(1, 1_000_500)],
        };
        let events = events(&[traced("direct, chunks 1"), traced("ring, chunks 1")]);
        let lines: Vec<_> = events
            .iter()
            .map(|event| {
                let TraceEvent { rank, lane, name, start_ns, duration_ns } = event;
                format!("{rank} {lane} {start_ns} +{duration_ns}: {name}")
            })
            .collect();
        insta::assert_snapshot!(lines.join("\n"), @"
        0 0 20 +100: put 0.0 to 1 (network) [direct, chunks 1]
        0 0 120 +0: wait arrived 0.0 (network) [direct, chunks 1]
        1 0 520 +100: put 1.0 to 0 (network) [direct, chunks 1]
        1 0 620 +0: wait arrived 1.0 (network) [direct, chunks 1]
        0 0 10640 +100: put 0.0 to 1 (network) [ring, chunks 1]
        0 0 10740 +0: wait arrived 0.0 (network) [ring, chunks 1]
        1 0 11140 +100: put 1.0 to 0 (network) [ring, chunks 1]
        1 0 11240 +0: wait arrived 1.0 (network) [ring, chunks 1]
        ");
    }
}
