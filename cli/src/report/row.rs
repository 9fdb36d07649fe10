//! Defines the result row of one measured size, as in the JSON output.

use std::time::Duration;

use peerlane::collective::Collective;
use serde::{Deserialize, Serialize};

/// The result of one algorithm at one total size; the field names are those of the JSON output.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Row {
    /// The name of the collective with its root, such as `all-gather` or `broadcast from 0`.
    #[serde(default = "all_gather")]
    pub(crate) collective: String,
    pub(crate) backend: String,
    /// The product name of rank 0's GPU, or the model of its processor.
    #[serde(default)]
    pub(crate) device_name: String,
    pub(crate) ranks: usize,
    pub(crate) nodes: String,
    pub(crate) algorithm: String,
    pub(crate) chunks: u32,
    pub(crate) engine: String,
    /// The kind of the engines, as the group names it.
    #[serde(default)]
    pub(crate) kind: String,
    /// The kinds of engines that all ranks offer, the preferred one first.
    #[serde(default)]
    pub(crate) kinds: Vec<String>,
    /// The form of an all-reduce.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) form: Option<String>,
    pub(crate) dtype: String,
    pub(crate) in_place: bool,
    /// A description of block lengths, list and tensors, absent for equal blocks in one tensor.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) shape: Option<String>,
    /// The number of output buffers that consecutive runs alternate between.
    pub(crate) outputs: u32,
    /// The bytes of all blocks, which is the output of one rank.
    pub(crate) total_bytes: u64,
    pub(crate) block_bytes: u64,
    pub(crate) iterations: usize,
    pub(crate) median_us: f64,
    pub(crate) p99_us: f64,
    /// The time of the longest iteration in microseconds, which shows a stall.
    pub(crate) max_us: f64,
    /// The total bytes divided by the median, in 10^9 bytes per second, as in nccl-tests.
    pub(crate) algbw_gbs: f64,
    /// The algorithm bandwidth times `(n - 1) / n`, the share that each rank receives from its
    /// peers.
    pub(crate) busbw_gbs: f64,
    pub(crate) checked: bool,
    #[serde(flatten)]
    pub(crate) limit: Option<Limit>,
    #[serde(flatten)]
    pub(crate) predicted: Option<Predicted>,
    #[serde(flatten)]
    pub(crate) device: Option<DeviceTimes>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) baselines_version: Option<String>,
    /// The results of other libraries, which were timed alternately with Peerlane.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub(crate) baselines: Vec<Baseline>,
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub(crate) overlap: Vec<Overlap>,
    pub(crate) lanes: Vec<LaneRow>,
    /// The bytes that rank 0 moves, inside its node and between nodes.
    pub(crate) tiers: Vec<TierRow>,
    /// The slower methods that the plan uses because a device lacks a capability.
    pub(crate) fallbacks: Vec<String>,
}

/// A result row that gives the reason why an algorithm cannot run at a size; the field names are
/// those of [`Row`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MissingRow {
    pub(crate) collective: String,
    pub(crate) backend: String,
    /// The product name of rank 0's GPU, or the model of its processor.
    #[serde(default)]
    pub(crate) device_name: String,
    pub(crate) ranks: usize,
    pub(crate) nodes: String,
    pub(crate) algorithm: String,
    pub(crate) dtype: String,
    pub(crate) in_place: bool,
    pub(crate) total_bytes: u64,
    pub(crate) missing: String,
}

/// One lane of a plan with the engine that executes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LaneRow {
    pub(crate) lane: u32,
    pub(crate) tier: String,
    pub(crate) backend: String,
    /// The kind of engine within the backend, such as streams or sdma.
    pub(crate) kind: String,
    /// Whether the engine executes waits for flags itself, without the host.
    pub(crate) queued_waits: bool,
    /// Whether the lane makes progress only while a thread polls its engine.
    pub(crate) polled: bool,
}

/// The bytes that one rank moves over a fabric in one run of the operation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TierRow {
    pub(crate) tier: String,
    pub(crate) put_bytes: u64,
    pub(crate) got_bytes: u64,
    pub(crate) own_bytes: u64,
    /// The bytes that compute units copy instead of copy engines.
    pub(crate) compute_bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Predicted {
    pub(crate) predicted_us: f64,
    /// The predicted time divided by the median, above 1 if the operation was faster than
    /// predicted.
    pub(crate) predicted_ratio: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Limit {
    pub(crate) limit_us: f64,
    /// The time of the bare copies divided by the median time of the operation.
    pub(crate) limit_share: f64,
}

/// The result values that exist only for operations on GPUs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct DeviceTimes {
    /// The time that the host needs to enqueue one run of the operation.
    pub(crate) host_us: f64,
    /// The number of runs between two timing events; the times of the row are those of one run.
    pub(crate) starts_in_a_row: u32,
    pub(crate) captured: bool,
    /// The method of self copies, `auto`, `local` or `link`.
    pub(crate) self_copy: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Baseline {
    pub(crate) path: String,
    #[serde(flatten)]
    pub(crate) times: Option<BaselineTimes>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) missing: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct BaselineTimes {
    pub(crate) baseline_us: f64,
    pub(crate) baseline_host_us: f64,
    pub(crate) baseline_busbw_gbs: f64,
    /// The time of the other library divided by Peerlane's time, above 1 if Peerlane is faster.
    pub(crate) baseline_ratio: f64,
}

/// The times of all-gathers and compute work, measured together and separately.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Overlap {
    pub(crate) path: String,
    pub(crate) compute_alone_us: f64,
    pub(crate) compute_us: f64,
    /// The time of compute work next to all-gathers divided by its time alone, 1 without a
    /// slowdown.
    pub(crate) compute_ratio: f64,
    pub(crate) gather_alone_us: f64,
    pub(crate) gather_us: f64,
    pub(crate) gather_ratio: f64,
    /// Whether all-gathers kept running while compute work was timed, and the reverse.
    pub(crate) overlapped: bool,
}

impl Row {
    pub(crate) fn best_baseline(&self) -> Option<BaselineTimes> {
        let times = self.baselines.iter().filter_map(|baseline| baseline.times);
        times.min_by(|left, right| left.baseline_us.total_cmp(&right.baseline_us))
    }
}

impl Baseline {
    /// Creates the result of another library that was timed; `ours` is Peerlane's median.
    pub(crate) fn timed(
        path: &str,
        median: Duration,
        ours: Duration,
        host: Duration,
        busbw_gbs: f64,
    ) -> Self {
        let times = BaselineTimes {
            baseline_us: microseconds(median),
            baseline_host_us: microseconds(host),
            baseline_busbw_gbs: busbw_gbs,
            baseline_ratio: microseconds(median) / microseconds(ours).max(0.001),
        };
        Self { path: path.to_owned(), times: Some(times), missing: None }
    }

    pub(crate) fn missing(path: &str, why: &str) -> Self {
        Self { path: path.to_owned(), times: None, missing: Some(why.to_owned()) }
    }
}

impl Predicted {
    pub(crate) fn new(predicted: Duration, median: Duration) -> Self {
        let predicted_us = microseconds(predicted);
        Self { predicted_us, predicted_ratio: predicted_us / microseconds(median).max(0.001) }
    }
}

impl Limit {
    pub(crate) fn new(limit: Duration, median: Duration) -> Self {
        let limit_us = microseconds(limit);
        Self { limit_us, limit_share: limit_us / microseconds(median).max(0.001) }
    }
}

/// Returns a time in microseconds with nanosecond resolution.
pub(crate) fn microseconds(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1000.0
}

fn all_gather() -> String {
    Collective::AllGather.to_string()
}

/// Returns the algorithm and bus bandwidths in 10^9 bytes per second, as nccl-tests defines them.
pub(crate) fn bandwidths(
    collective: Collective,
    total_bytes: u64,
    ranks: usize,
    median: Duration,
) -> (f64, f64) {
    let nanoseconds = (median.as_nanos() as f64).max(1.0);
    let algorithm = total_bytes as f64 / nanoseconds;
    (algorithm, algorithm * collective.bus_factor(ranks.max(1)))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Creates a result row of 4 ranks with the given size and times.
    pub(crate) fn row(total_bytes: u64, median: Duration, limit: Option<Duration>) -> Row {
        let (algbw_gbs, busbw_gbs) = bandwidths(Collective::AllGather, total_bytes, 4, median);

        Row {
            kind: "streams".into(),
            kinds: vec!["streams".into()],
            form: None,
            collective: all_gather(),
            backend: "host".into(),
            device_name: "a processor".into(),
            ranks: 4,
            nodes: "1x4".into(),
            algorithm: "direct".into(),
            chunks: 1,
            engine: "host".into(),
            dtype: "u8".into(),
            in_place: false,
            shape: None,
            outputs: 1,
            total_bytes,
            block_bytes: total_bytes / 4,
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
            baselines_version: None,
            baselines: Vec::new(),
            overlap: Vec::new(),
            lanes: Vec::new(),
            tiers: Vec::new(),
            fallbacks: Vec::new(),
        }
    }

    #[test]
    fn bandwidths_are_those_of_nccl_tests() {
        let (algorithm, bus) =
            bandwidths(Collective::AllGather, 4_000_000, 4, Duration::from_millis(1));
        assert!((algorithm - 4.0).abs() < 1e-12, "{algorithm}");
        assert!((bus - 3.0).abs() < 1e-12, "{bus}");
        assert_eq!(bandwidths(Collective::AllGather, 1 << 20, 1, Duration::from_millis(1)).1, 0.0);
    }

    #[test]
    fn the_share_of_the_limit_is_one_at_the_limit() {
        let limit = Limit::new(Duration::from_micros(9), Duration::from_micros(10));
        assert_eq!(limit, Limit { limit_us: 9.0, limit_share: 0.9 });
    }
}
