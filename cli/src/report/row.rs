//! The result of one size.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// One measured size, with the field names that the JSON output has.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Row {
    pub(crate) backend: String,
    pub(crate) ranks: usize,
    /// The nodes of the ranks, such as `2x4`.
    pub(crate) nodes: String,
    pub(crate) algorithm: String,
    /// Parts of a shard.
    pub(crate) parts: u32,
    pub(crate) engine: String,
    pub(crate) dtype: String,
    pub(crate) in_place: bool,
    /// What is gathered, unless that is equal shards in one tensor.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) shape: Option<String>,
    /// Outputs that starts used in turn.
    pub(crate) outputs: u32,
    /// All shards together: the bytes of one rank's output.
    pub(crate) total_bytes: u64,
    /// The longest shard.
    pub(crate) shard_bytes: u64,
    pub(crate) iterations: usize,
    pub(crate) median_us: f64,
    pub(crate) p99_us: f64,
    /// The longest iteration: a stall shows here.
    pub(crate) max_us: f64,
    /// `total_bytes` by the median, in 10^9 bytes a second.
    pub(crate) algbw_gbs: f64,
    /// What each rank receives from its peers, `(n - 1) / n` of the total, by the median.
    pub(crate) busbw_gbs: f64,
    /// Every byte of every rank's output was compared.
    pub(crate) checked: bool,
    #[serde(flatten)]
    pub(crate) limit: Option<Limit>,
    #[serde(flatten)]
    pub(crate) predicted: Option<Predicted>,
    #[serde(flatten)]
    pub(crate) device: Option<DeviceTimes>,
    /// Whose the rivals are: NCCL's version and file.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) rivals_version: Option<String>,
    /// What was timed in turn.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub(crate) rivals: Vec<Baseline>,
    /// What compute and gathers cost each other.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub(crate) beside: Vec<Overlap>,
    /// The lanes of rank 0.
    pub(crate) lanes: Vec<LaneRow>,
    /// What rank 0 moves.
    pub(crate) tiers: Vec<TierRow>,
    /// What is not done as it could be.
    pub(crate) fallbacks: Vec<String>,
}

/// One lane of a plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LaneRow {
    pub(crate) lane: u32,
    /// local, network.
    pub(crate) tier: String,
    pub(crate) backend: String,
    /// Which of the backend's kinds of engine it is, such as streams or sdma.
    pub(crate) kind: String,
    /// Its waits are queued with the engine.
    pub(crate) queued_waits: bool,
    /// Nothing moves unless a thread drives it.
    pub(crate) polled: bool,
}

/// What one rank moves over a fabric in a start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TierRow {
    /// local, network.
    pub(crate) tier: String,
    pub(crate) put_bytes: u64,
    pub(crate) got_bytes: u64,
    pub(crate) own_bytes: u64,
}

/// What the model of costs says.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Predicted {
    pub(crate) predicted_us: f64,
    /// The prediction by the median: above 1, it was faster than predicted.
    pub(crate) predicted_ratio: f64,
}

/// What bare copies of the same bytes take.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Limit {
    /// The median of the copies.
    pub(crate) limit_us: f64,
    /// The limit by the median of the operation: 1 is as fast as bare copies.
    pub(crate) limit_share: f64,
}

/// What is timed on a device only.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct DeviceTimes {
    /// What a start costs the host.
    pub(crate) host_us: f64,
    /// Starts between two events: the times above are those of one.
    pub(crate) starts_in_a_row: u32,
    /// They were replayed from a graph.
    pub(crate) captured: bool,
    /// How own shards were copied: local, link.
    pub(crate) own_copy: String,
}

/// The same gather by another library.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Baseline {
    pub(crate) path: String,
    #[serde(flatten)]
    pub(crate) times: Option<BaselineTimes>,
    /// Why it was not timed.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) missing: Option<String>,
}

/// The times of a rival.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct BaselineTimes {
    pub(crate) rival_us: f64,
    pub(crate) rival_host_us: f64,
    pub(crate) rival_busbw_gbs: f64,
    /// The rival's time by ours: above 1, ours is faster.
    pub(crate) rival_ratio: f64,
}

/// Gathers and compute beside each other, and each alone.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Overlap {
    /// Whose gathers.
    pub(crate) path: String,
    pub(crate) compute_alone_us: f64,
    pub(crate) compute_us: f64,
    /// 1 is as fast as alone.
    pub(crate) compute_ratio: f64,
    pub(crate) gather_alone_us: f64,
    pub(crate) gather_us: f64,
    pub(crate) gather_ratio: f64,
    /// Each ran all along while the other was timed.
    pub(crate) overlapped: bool,
}

impl Row {
    /// The fastest rival's time.
    pub(crate) fn best_rival_us(&self) -> Option<f64> {
        let times = self.rivals.iter().filter_map(|rival| rival.times);
        times.map(|times| times.rival_us).min_by(f64::total_cmp)
    }
}

impl Baseline {
    /// One that was timed.
    pub(crate) fn timed(
        path: &str,
        median: Duration,
        ours: Duration,
        host: Duration,
        busbw_gbs: f64,
    ) -> Self {
        let times = BaselineTimes {
            rival_us: microseconds(median),
            rival_host_us: microseconds(host),
            rival_busbw_gbs: busbw_gbs,
            rival_ratio: microseconds(median) / microseconds(ours).max(0.001),
        };
        Self { path: path.to_owned(), times: Some(times), missing: None }
    }

    /// One that is not there.
    pub(crate) fn missing(path: &str, why: &str) -> Self {
        Self { path: path.to_owned(), times: None, missing: Some(why.to_owned()) }
    }
}

impl Predicted {
    /// The prediction beside the operation that took `median`.
    pub(crate) fn new(predicted: Duration, median: Duration) -> Self {
        let predicted_us = microseconds(predicted);
        Self { predicted_us, predicted_ratio: predicted_us / microseconds(median).max(0.001) }
    }
}

impl Limit {
    /// The limit beside the operation that took `median`.
    pub(crate) fn new(limit: Duration, median: Duration) -> Self {
        let limit_us = microseconds(limit);
        Self { limit_us, limit_share: limit_us / microseconds(median).max(0.001) }
    }
}

/// A time in microseconds, to the nanosecond.
pub(crate) fn microseconds(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1000.0
}

/// The algorithm and bus bandwidths in 10^9 bytes a second, as nccl-tests define them for the
/// all-gather.
pub(crate) fn bandwidths(total_bytes: u64, ranks: usize, median: Duration) -> (f64, f64) {
    let nanoseconds = (median.as_nanos() as f64).max(1.0);
    let algorithm = total_bytes as f64 / nanoseconds;
    (algorithm, algorithm * ranks.saturating_sub(1) as f64 / ranks.max(1) as f64)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A row such as a run of 4 ranks makes.
    pub(crate) fn row(total_bytes: u64, median: Duration, limit: Option<Duration>) -> Row {
        let (algbw_gbs, busbw_gbs) = bandwidths(total_bytes, 4, median);
        Row {
            backend: "host".into(),
            ranks: 4,
            nodes: "1x4".into(),
            algorithm: "direct".into(),
            parts: 1,
            engine: "host".into(),
            dtype: "u8".into(),
            in_place: false,
            shape: None,
            outputs: 1,
            total_bytes,
            shard_bytes: total_bytes / 4,
            iterations: 20,
            median_us: microseconds(median),
            p99_us: microseconds(median * 3 / 2),
            max_us: microseconds(median * 2),
            algbw_gbs,
            busbw_gbs,
            checked: true,
            limit: limit.map(|limit| Limit::new(limit, median)),
            predicted: None,
            device: None,
            rivals_version: None,
            rivals: Vec::new(),
            beside: Vec::new(),
            lanes: Vec::new(),
            tiers: Vec::new(),
            fallbacks: Vec::new(),
        }
    }

    #[test]
    fn bandwidths_are_those_of_nccl_tests() {
        let (algorithm, bus) = bandwidths(4_000_000, 4, Duration::from_millis(1));
        assert!((algorithm - 4.0).abs() < 1e-12, "{algorithm}");
        assert!((bus - 3.0).abs() < 1e-12, "{bus}");
        assert_eq!(bandwidths(1 << 20, 1, Duration::from_millis(1)).1, 0.0);
    }

    #[test]
    fn the_share_of_the_limit_is_one_at_the_limit() {
        let limit = Limit::new(Duration::from_micros(9), Duration::from_micros(10));
        assert_eq!(limit, Limit { limit_us: 9.0, limit_share: 0.9 });
    }
}
