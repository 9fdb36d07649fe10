//! Prints the results of `peerlane perf` as JSON lines and tables.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::options::{Options, PerfTest};
use crate::error::Result;
use crate::ranks::OutputHandler;
use crate::ranks::statistics::Statistics;
use crate::report::{Columns, JsonLines, microseconds, yes_or_no};
use crate::units::Size;

/// The result of one message size; the field names are those of the JSON output.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct PerfRow {
    pub(super) work: PerfTest,
    pub(super) backend: String,
    pub(super) bytes: u64,
    pub(super) engines: u16,
    pub(super) queue_pairs: u32,
    /// The maximum number of messages in flight on an engine.
    pub(super) window: u32,
    /// The number of messages of each engine, or of round trips.
    pub(super) iterations: u32,
    #[serde(flatten, skip_serializing_if = "Option::is_none", default)]
    pub(super) rate: Option<Throughput>,
    #[serde(flatten, skip_serializing_if = "Option::is_none", default)]
    pub(super) latency: Option<Latency>,
    pub(super) checked: bool,
}

/// The throughput from the first submit to the last completion.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Throughput {
    pub(super) elapsed_us: f64,
    /// The bandwidth in 10^9 bytes per second.
    pub(super) gbs: f64,
    pub(super) messages_per_second: f64,
}

/// The one-way times of a signal, each half of a round trip.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Latency {
    pub(super) min_us: f64,
    pub(super) median_us: f64,
    pub(super) mean_us: f64,
    pub(super) p99_us: f64,
    pub(super) max_us: f64,
}

impl PerfRow {
    pub(super) fn new(work: PerfTest, backend: String, bytes: u64, options: &Options) -> Self {
        let Options { engines, window, iterations, .. } = *options;
        // Round trips use one engine, one at a time.
        let (engines, window) = if work == PerfTest::Signal { (1, 1) } else { (engines, window) };
        let (rate, latency) = (None, None);
        let queue_pairs = options.nics.queue_pairs();
        Self {
            work,
            backend,
            bytes,
            engines,
            queue_pairs,
            window,
            iterations,
            rate,
            latency,
            checked: true,
        }
    }
}

impl Throughput {
    pub(super) fn new(messages: u64, bytes: u64, elapsed: Duration) -> Self {
        let nanoseconds = (elapsed.as_nanos() as f64).max(1.0);
        Self {
            elapsed_us: microseconds(elapsed),
            gbs: messages as f64 * bytes as f64 / nanoseconds,
            messages_per_second: messages as f64 * 1e9 / nanoseconds,
        }
    }
}

impl Latency {
    pub(super) fn of_times(times: Vec<Duration>) -> Self {
        let min = times.iter().min().copied().unwrap_or_default();
        let count = u32::try_from(times.len()).unwrap_or(u32::MAX).max(1);
        let mean = times.iter().sum::<Duration>() / count;
        let Statistics { median, p99, max } = Statistics::of(times);
        let [min_us, median_us, mean_us, p99_us, max_us] =
            [min, median, mean, p99, max].map(microseconds);
        Self { min_us, median_us, mean_us, p99_us, max_us }
    }
}

/// Returns a table of bandwidths and a table of latencies, each only if it has rows.
pub(super) fn tables(rows: &[PerfRow]) -> String {
    let rates: Vec<_> = rows.iter().filter_map(|row| Some((row, row.rate?))).collect();
    let latencies: Vec<_> = rows.iter().filter_map(|row| Some((row, row.latency?))).collect();
    let mut tables = Vec::new();

    if !rates.is_empty() {
        let messages = |row: &PerfRow| u64::from(row.iterations) * u64::from(row.engines);
        let table = Columns::of_rows(&rates)
            .left("work", |(row, _)| row.work.name())
            .right("message", |(row, _)| Size(row.bytes))
            .right("engines", |(row, _)| row.engines)
            .right("pairs", |(row, _)| row.queue_pairs)
            .right("window", |(row, _)| row.window)
            .right("messages", |(row, _)| messages(row))
            .right("GB/s", |(_, rate)| format!("{:.3}", rate.gbs))
            .right("1000/s", |(_, rate)| format!("{:.1}", rate.messages_per_second / 1e3))
            .right("checked", |(row, _)| yes_or_no(row.checked));
        tables.push(table.text());
    }

    if !latencies.is_empty() {
        let time = |microseconds: f64| format!("{microseconds:.2}");
        let table = Columns::of_rows(&latencies)
            .left("work", |(row, _)| row.work.name())
            .right("message", |(row, _)| Size(row.bytes))
            .right("round trips", |(row, _)| row.iterations)
            .right("min µs", |(_, latency)| time(latency.min_us))
            .right("median µs", |(_, latency)| time(latency.median_us))
            .right("mean µs", |(_, latency)| time(latency.mean_us))
            .right("p99 µs", |(_, latency)| time(latency.p99_us))
            .right("max µs", |(_, latency)| time(latency.max_us))
            .right("checked", |(row, _)| yes_or_no(row.checked));
        tables.push(table.text());
    }

    tables.join("\n\n")
}

pub(super) struct Printer {
    json: Option<JsonLines>,
    activity: String,
    rows: Vec<PerfRow>,
}

impl Printer {
    pub(super) fn open(options: &Options) -> Result<Self> {
        Ok(Self {
            json: options.run.json.as_deref().map(JsonLines::open).transpose()?,
            activity: "starting the ranks".to_owned(),
            rows: Vec::new(),
        })
    }
}

impl OutputHandler for Printer {
    type Event = PerfRow;

    fn show(&mut self, row: PerfRow) -> Result<()> {
        self.activity = format!("finished {} of {}", row.work.name(), Size(row.bytes));
        if let Some(json) = &mut self.json {
            json.write(&row)?;
        }
        self.rows.push(row);
        Ok(())
    }

    fn finish(self) -> Result<()> {
        let Some(first) = self.rows.first() else { return Ok(()) };
        let text = format!("perf, 2 ranks, {} backend\n\n{}\n", first.backend, tables(&self.rows));
        JsonLines::print_beside(self.json.as_ref(), &text)
    }

    fn activity(&self) -> &str {
        &self.activity
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(work: PerfTest, bytes: u64) -> PerfRow {
        let (rate, latency) = (None, None);
        PerfRow {
            work,
            backend: "rdma".into(),
            bytes,
            engines: 2,
            queue_pairs: 1,
            window: 128,
            iterations: 100,
            rate,
            latency,
            checked: true,
        }
    }

    #[test]
    fn rates_and_times_have_a_table_each() {
        let rate = Throughput::new(200, 65536, Duration::from_millis(131));
        let times = [2_u64, 3, 7].map(Duration::from_micros);
        let latency = Latency::of_times(times.into());
        let rows = [
            PerfRow { rate: Some(rate), ..row(PerfTest::Put, 65536) },
            PerfRow { latency: Some(latency), engines: 1, ..row(PerfTest::Signal, 8) },
        ];
        insta::assert_snapshot!(tables(&rows), @"
         work   message   engines   pairs   window   messages    GB/s   1000/s   checked
        ─────────────────────────────────────────────────────────────────────────────────
         put     64 KiB         2       1      128        200   0.100      1.5       yes

         work     message   round trips   min µs   median µs   mean µs   p99 µs   max µs   checked
        ───────────────────────────────────────────────────────────────────────────────────────────
         signal       8 B           100     2.00        3.00      4.00     7.00     7.00       yes
        ");
    }

    #[test]
    fn a_row_is_one_json_line_and_can_be_parsed() {
        let rate = Throughput::new(100, 1000, Duration::from_micros(50));
        let put = PerfRow { rate: Some(rate), ..row(PerfTest::Put, 1000) };
        let line = serde_json::to_string(&put).unwrap();
        insta::assert_snapshot!(line, @r#"{"work":"put","backend":"rdma","bytes":1000,"engines":2,"queue_pairs":1,"window":128,"iterations":100,"elapsed_us":50.0,"gbs":2.0,"messages_per_second":2000000.0,"checked":true}"#);
        assert_eq!(serde_json::from_str::<PerfRow>(&line).unwrap(), put);
        let latency = Some(Latency::of_times(vec![Duration::from_micros(1)]));
        let signal = PerfRow { latency, ..row(PerfTest::Signal, 8) };
        let line = serde_json::to_string(&signal).unwrap();
        assert_eq!(serde_json::from_str::<PerfRow>(&line).unwrap(), signal);
    }
}
