//! Creates the result row of one operation from its report and its times.

use std::time::Duration;

use peerlane::Algorithm;
use peerlane::group::{Fallback, Report};
use peerlane::hal::BackendId;
use peerlane_planning::plan::Tier;

use super::setup::Setup;
use super::timer::Timing;
use crate::error::Failure;
use crate::ranks::statistics::Statistics;
use crate::report::{
    LaneRow, Limit, MissingRow, Predicted, Row, TierRow, bandwidths, microseconds,
};

pub(super) fn row(
    setup: &Setup<'_>,
    report: &Report,
    timing: Timing,
    limit: Option<Duration>,
) -> Row {
    let Statistics { median, p99, max } = timing.statistics;
    let (algbw_gbs, busbw_gbs) =
        bandwidths(report.collective, report.total_bytes, report.ranks, median);
    let lanes = report.lanes.iter().map(|lane| LaneRow {
        lane: lane.lane.0,
        tier: tier(lane.tier),
        backend: lane.backend.to_string(),
        kind: lane.kind.to_owned(),
        queued_waits: lane.queued_waits,
        polled: lane.polled,
    });

    let tiers = report.tiers.iter().map(|moved| TierRow {
        tier: tier(moved.tier),
        put_bytes: moved.put_bytes,
        got_bytes: moved.got_bytes,
        own_bytes: moved.own_bytes,
        compute_bytes: moved.compute_bytes,
    });

    Row {
        collective: setup.options.goal.text(),
        backend: setup.backend.clone(),
        device_name: setup.device_name.clone(),
        ranks: report.ranks,
        nodes: setup.topology.notation(),
        algorithm: report.algorithm.to_string(),
        chunks: report.chunks,
        engine: engine(report),
        kind: report.choice.engine.clone(),
        kinds: setup.kinds.clone(),
        form: report.choice.form.map(|form| form.name().to_owned()),
        dtype: setup.options.dtype.to_string(),
        in_place: setup.options.in_place,
        shape: setup.options.shape.text(),
        outputs: report.outputs,
        total_bytes: report.total_bytes,
        block_bytes: report.longest_block_bytes,
        iterations: timing.iterations,
        median_us: microseconds(median),
        p99_us: microseconds(p99),
        max_us: microseconds(max),
        algbw_gbs,
        busbw_gbs,
        checked: true,
        limit: limit.map(|limit| Limit::new(limit, median)),
        predicted: setup.predicted(report).map(|predicted| Predicted::new(predicted, median)),
        device: None,
        baselines_version: None,
        baselines: Vec::new(),
        overlap: Vec::new(),
        lanes: lanes.collect(),
        tiers: tiers.collect(),
        fallbacks: report.fallbacks.iter().map(ToString::to_string).collect(),
    }
}

pub(super) fn missing(
    setup: &Setup<'_>,
    algorithm: Option<Algorithm>,
    total_bytes: u64,
    why: &Failure,
) -> MissingRow {
    MissingRow {
        collective: setup.options.goal.text(),
        backend: setup.backend.clone(),
        device_name: setup.device_name.clone(),
        ranks: setup.ranks(),
        nodes: setup.topology.notation(),
        algorithm: algorithm.map_or("auto", Algorithm::name).to_owned(),
        dtype: setup.options.dtype.to_string(),
        in_place: setup.options.in_place,
        total_bytes,
        missing: why.text().to_owned(),
    }
}

fn tier(tier: Tier) -> String {
    tier.to_string()
}

/// Returns a text with the backends of all lanes, each with its number of lanes, and the fallbacks.
fn engine(report: &Report) -> String {
    let mut counts: Vec<(String, usize)> = Vec::new();
    for lane in &report.lanes {
        // All other backends have engines of one kind.
        let name = match lane.backend == BackendId::ROCM {
            true => format!("{} {}", lane.backend, lane.kind),
            false => lane.backend.to_string(),
        };
        match counts.iter_mut().find(|(seen, _)| *seen == name) {
            Some((_, count)) => *count += 1,
            None => counts.push((name, 1)),
        }
    }
    let names = counts.into_iter().map(|(name, count)| match count {
        1 => name,
        _ => format!("{count} × {name}"),
    });
    let mut text = names.collect::<Vec<_>>().join(" + ");
    if let Some(launch) = report.launch {
        text = format!("{text}, {launch}");
    }
    // Links and threads change the whole run; copies by compute units are listed with the lanes.
    let slow = report.fallbacks.iter().filter(|it| !matches!(it, Fallback::Compute(_)));
    let mut fallbacks: Vec<_> = slow.map(Fallback::name).collect();
    fallbacks.dedup();
    for name in fallbacks {
        text = format!("{text}, {name}");
    }
    text
}
