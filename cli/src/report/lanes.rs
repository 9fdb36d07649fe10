//! What ran where: the lanes of each algorithm, what they moved, and what is not as it could be.

use super::row::Row;
use crate::size::Size;

/// A line for each algorithm of the largest size, where that is worth one: if it has several lanes or
/// fallbacks, or if `all` are wanted. Nothing otherwise.
pub(crate) fn lanes(rows: &[Row], all: bool) -> String {
    let largest = rows.iter().map(|row| row.total_bytes).max();
    let rows = rows.iter().filter(|row| Some(row.total_bytes) == largest);
    let worth = |row: &&Row| all || row.lanes.len() > 1 || !row.fallbacks.is_empty();
    let lines: String = rows.filter(worth).map(|row| line(row) + "\n").collect();
    if lines.is_empty() { lines } else { format!("\n{lines}") }
}

fn line(row: &Row) -> String {
    let lanes = row.lanes.iter().map(|lane| {
        let waits = if lane.queued_waits { "queued" } else { "polled" };
        format!(
            "lane {} {} on {} by {}, waits {waits}",
            lane.lane, lane.tier, lane.backend, lane.kind
        )
    });
    let tiers = row.tiers.iter().filter_map(|moved| {
        let named = [("put", moved.put_bytes), ("got", moved.got_bytes), ("own", moved.own_bytes)];
        let words = named.iter().filter(|(_, bytes)| *bytes > 0);
        let words: Vec<_> = words.map(|(name, bytes)| format!("{} {name}", Size(*bytes))).collect();
        (!words.is_empty()).then(|| format!("{}: {}", moved.tier, words.join(", ")))
    });
    let fallbacks = row.fallbacks.iter().map(|why| format!("fallback: {why}"));
    let words: Vec<_> = lanes.chain(tiers).chain(fallbacks).collect();
    format!("{}, parts {}, rank 0: {}", row.algorithm, row.parts, words.join("; "))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::row::tests::row;
    use super::super::row::{LaneRow, TierRow};
    use super::*;

    fn hierarchical() -> Row {
        let lane = |lane, tier: &str, queued_waits| LaneRow {
            lane,
            tier: tier.into(),
            backend: "host".into(),
            kind: "processor".into(),
            queued_waits,
            polled: true,
        };
        let moved = |tier: &str, put_bytes, own_bytes| TierRow {
            tier: tier.into(),
            put_bytes,
            got_bytes: 0,
            own_bytes,
        };
        Row {
            algorithm: "hierarchical".into(),
            parts: 4,
            lanes: vec![lane(0, "local", true), lane(1, "network", false)],
            tiers: vec![moved("local", 3 << 20, 1 << 20), moved("network", 2 << 20, 0)],
            fallbacks: vec!["to rank 2 through host memory".into()],
            ..row(4 << 20, Duration::from_millis(1), None)
        }
    }

    #[test]
    fn the_largest_size_is_told() {
        let rows = [row(1 << 20, Duration::from_millis(1), None), hierarchical()];
        insta::assert_snapshot!(lanes(&rows, false), @"

        hierarchical, parts 4, rank 0: lane 0 local on host by processor, waits queued; lane 1 network on host by processor, waits polled; local: 3 MiB put, 1 MiB own; network: 2 MiB put; fallback: to rank 2 through host memory
        ");
    }

    #[test]
    fn one_lane_is_told_only_if_asked_for() {
        let rows = [row(1 << 20, Duration::from_millis(1), None)];
        assert_eq!(lanes(&rows, false), "");
        assert_eq!(lanes(&rows, true), "\ndirect, parts 1, rank 0: \n");
    }
}
