//! Writes the report of an operation as JSON.

use peerlane::group::{GroupStats, MemoryUse, Report};
use peerlane::hal::Space;
use peerlane::planning::Form;
use serde_json::{Value, json};

/// Returns the memory of one kind as JSON. `device` is null for memory of the host.
fn memory_json(one: &MemoryUse) -> Value {
    let space = if one.space == Space::Host { "host" } else { "device" };
    json!({ "kind": one.kind.name(), "bytes": one.bytes, "space": space, "device": one.device })
}

/// Returns what a group holds as one JSON object.
pub fn stats_json(stats: &GroupStats) -> String {
    let memory = stats.memory.iter().map(memory_json).collect::<Vec<_>>();

    let counts = &stats.immediate;
    let immediate = json!({
        "calls": counts.calls, "hits": counts.hits, "copied": counts.copied, "operations": counts.operations,
        "copy_bytes": counts.copy_bytes,
    });
    let paths = stats.paths.iter().map(|path| {
        json!({
            "collective": path.collective, "form": path.form.map(Form::name), "algorithm": path.algorithm.name(),
            "engine": path.engine, "calls": path.calls,
        })
    });
    let paths: Vec<_> = paths.collect();
    json!({ "memory": memory, "immediate": immediate, "paths": paths, "moves": stats.moves })
        .to_string()
}

/// Returns the report as JSON, with the fields of the JSON lines of the program `peerlane`.
pub(crate) fn json(report: &Report) -> Value {
    let lanes = report.lanes.iter().map(|lane| {
        json!({
            "lane": lane.lane.0, "tier": lane.tier.to_string(), "backend": lane.backend.to_string(), "kind": lane.kind,
            "queued_waits": lane.queued_waits, "polled": lane.polled,
        })
    });

    let tiers = report.tiers.iter().map(|tier| {
        json!({
            "tier": tier.tier.to_string(), "put_bytes": tier.put_bytes, "got_bytes": tier.got_bytes,
            "own_bytes": tier.own_bytes, "compute_bytes": tier.compute_bytes,
        })
    });

    let choice = &report.choice;
    let refused = choice.refused_engines.iter().map(|(kind, why)| format!("{kind}: {why}"));

    json!({
        "kind": choice.engine, "form": choice.form.map(Form::name), "refused_kinds": refused.collect::<Vec<_>>(),
        "collective": report.collective.to_string(), "algorithm": report.algorithm.to_string(), "ranks": report.ranks,
        "chunks": report.chunks, "outputs": report.outputs, "capturable": report.capturable,
        "input_bytes": report.input_bytes, "output_bytes": report.output_bytes, "total_bytes": report.total_bytes,
        "memory": report.memory.iter().map(memory_json).collect::<Vec<_>>(),
        "launch": report.launch.map(|launch| launch.to_string()), "lanes": lanes.collect::<Vec<_>>(), "tiers": tiers.collect::<Vec<_>>(),
        "fallbacks": report.fallbacks.iter().map(ToString::to_string).collect::<Vec<_>>(), "proof": report.proof,
    })
}
