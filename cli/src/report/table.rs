//! Formats result rows as text tables.

use std::fmt::Display;

use comfy_table::{CellAlignment, LineStyle, Table, TableStyle};

use super::row::{BaselineTimes, Overlap, Row};
use crate::units::Size;

pub(crate) fn tables(rows: &[Row]) -> String {
    let tables = [Some(table(rows)), baselines(rows), overlap(rows)];
    tables.into_iter().flatten().collect::<Vec<_>>().join("\n\n")
}

/// A text table that is built column by column, so that a column's name is next to its cells.
pub(crate) struct Columns<'r, R> {
    rows: &'r [R],
    names: Vec<&'static str>,
    cells: Vec<Vec<String>>,
    left: Vec<usize>,
}

impl<'r, R> Columns<'r, R> {
    pub(crate) fn of_rows(rows: &'r [R]) -> Self {
        let cells = vec![Vec::new(); rows.len()];
        Self { rows, names: Vec::new(), cells, left: Vec::new() }
    }

    pub(crate) fn right<D: Display>(
        mut self,
        name: &'static str,
        cell: impl Fn(&'r R) -> D,
    ) -> Self {
        self.names.push(name);
        for (row, cells) in self.rows.iter().zip(&mut self.cells) {
            cells.push(cell(row).to_string());
        }
        self
    }

    pub(crate) fn left<D: Display>(
        mut self,
        name: &'static str,
        cell: impl Fn(&'r R) -> D,
    ) -> Self {
        self.left.push(self.names.len());
        self.right(name, cell)
    }

    /// Adds columns only if at least one row has a value for them.
    pub(crate) fn if_any(
        self,
        has_value: impl Fn(&R) -> bool,
        columns: impl FnOnce(Self) -> Self,
    ) -> Self {
        if self.rows.iter().any(has_value) { columns(self) } else { self }
    }

    pub(crate) fn text(self) -> String {
        let mut table = Table::new();
        let line = LineStyle::none().fill('─').junction('─');
        table.load_style(TableStyle::new().header_separator(line));
        table.set_header(self.names);
        table.add_rows(self.cells);
        for (index, column) in table.column_iter_mut().enumerate() {
            if !self.left.contains(&index) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        table.trim_fmt()
    }
}

fn table(rows: &[Row]) -> String {
    let has_device = rows.iter().any(|row| row.device.is_some());
    let second_name = if has_device { "host µs" } else { "p99 µs" };
    let second = |row: &Row| match &row.device {
        Some(device) => time(device.host_us),
        None if has_device => "-".to_owned(),
        None => time(row.p99_us),
    };

    let limit = |row: &Row| row.limit.map(|limit| (limit.limit_us, limit.limit_share));
    let predicted = |row: &Row| row.predicted.map(|by| (by.predicted_us, by.predicted_ratio));

    Columns::of_rows(rows)
        .right("total", |row| Size(row.total_bytes))
        .right("block", |row| Size(row.block_bytes))
        .left("algorithm", |row| &row.algorithm)
        .if_any(|row| row.chunks > 1, |table| table.right("chunks", |row| row.chunks))
        .if_any(
            |row| row.form.is_some(),
            |table| table.left("form", |row| row.form.as_deref().unwrap_or_default()),
        )
        .left("engine", |row| &row.engine)
        .right("median µs", |row| time(row.median_us))
        .right(second_name, second)
        .right("algbw GB/s", |row| format!("{:.3}", row.algbw_gbs))
        .right("busbw GB/s", |row| format!("{:.3}", row.busbw_gbs))
        .right("checked", |row| yes_or_no(row.checked))
        .if_any(
            |row| row.limit.is_some(),
            |table| {
                let table = table.right("limit µs", |row| time_or_dash(limit(row)));
                table.right("of limit", |row| share_or_dash(limit(row)))
            },
        )
        .if_any(
            |row| row.predicted.is_some(),
            |table| {
                let table = table.right("predicted µs", |row| time_or_dash(predicted(row)));
                table.right("of median", |row| share_or_dash(predicted(row)))
            },
        )
        .text()
}

pub(crate) fn yes_or_no(is_true: bool) -> &'static str {
    if is_true { "yes" } else { "no" }
}

fn time_or_dash(time_and_share: Option<(f64, f64)>) -> String {
    time_and_share.map_or("-".to_owned(), |(microseconds, _)| time(microseconds))
}

fn share_or_dash(time_and_share: Option<(f64, f64)>) -> String {
    time_and_share.map_or("-".to_owned(), |(_, share)| format!("{:.0} %", share * 100.0))
}

fn time(microseconds: f64) -> String {
    format!("{microseconds:.1}")
}

/// Returns the comparison with other libraries as a table; `None` if none was timed.
fn baselines(rows: &[Row]) -> Option<String> {
    let first = rows.iter().find(|row| !row.baselines.is_empty())?;
    let version = first.baselines_version.as_deref().unwrap_or("of unknown version");
    let mut text = format!(
        "NCCL {version}, timed in turn with Peerlane; × is its time divided by Peerlane's\n\n"
    );
    let mut table = Columns::of_rows(rows)
        .right("total", |row| Size(row.total_bytes))
        .right("Peerlane µs", |row| time(row.median_us));
    for (index, baseline) in first.baselines.iter().enumerate() {
        let name = match baseline.path.as_str() {
            "symmetric" => "symmetric µs",
            "copy engines" => "copy engines µs",
            _ => "default µs",
        };
        let times = move |row: &Row| row.baselines.get(index)?.times;
        table = table.right(name, |row| or_missing(times(row), |by| time(by.baseline_us)));
    }

    let ratio = |row: &Row, times: Option<BaselineTimes>| {
        let ratio = |by: BaselineTimes| by.baseline_us / row.median_us.max(0.001);
        or_missing(times, |by| format!("{:.2}", ratio(by)))
    };
    let copy_engines =
        |row: &Row| row.baselines.iter().find(|baseline| baseline.path == "copy engines")?.times;
    text += &table
        .right("× best", |row| ratio(row, row.best_baseline()))
        .right("× copy engines", |row| ratio(row, copy_engines(row)))
        .right("host µs of best", |row| {
            or_missing(row.best_baseline(), |best| time(best.baseline_host_us))
        })
        .text();

    for baseline in &first.baselines {
        if let Some(why) = &baseline.missing {
            text += &format!("\nNCCL {}: n/a, {why}", baseline.path);
        }
    }

    Some(text)
}

fn or_missing(times: Option<BaselineTimes>, text: impl FnOnce(BaselineTimes) -> String) -> String {
    times.map_or("n/a".to_owned(), text)
}

/// Returns the table of all-gathers together with compute work; `None` if they were not measured.
fn overlap(rows: &[Row]) -> Option<String> {
    let of_row = |row| move |overlap| (row, overlap);
    let overlaps: Vec<(&Row, &Overlap)> =
        rows.iter().flat_map(|row| row.overlap.iter().map(of_row(row))).collect();
    if overlaps.is_empty() {
        return None;
    }

    let star = |is_whole: bool| if is_whole { "" } else { " *" };
    let table = Columns::of_rows(&overlaps)
        .right("total", |(row, _)| Size(row.total_bytes))
        .left("library", |(_, overlap)| &overlap.path)
        .right("GEMM alone µs", |(_, overlap)| time(overlap.compute_alone_us))
        .right("together µs", |(_, overlap)| time(overlap.compute_us))
        .right("× alone", |(_, overlap)| format!("{:.3}", overlap.compute_ratio))
        .right("all-gather alone µs", |(_, overlap)| time(overlap.gather_alone_us))
        .right("together µs", |(_, overlap)| time(overlap.gather_us))
        .right("× alone", |(_, overlap)| {
            format!("{:.3}{}", overlap.gather_ratio, star(overlap.overlapped))
        })
        .text();

    let note = match overlaps.iter().all(|(_, overlap)| overlap.overlapped) {
        true => "",
        false => "\n* one side ended before the other was timed",
    };

    Some(format!("all-gathers together with a GEMM, bf16, 8192 × 8192 × 8192\n\n{table}{note}"))
}

/// Returns a line about the lanes of each algorithm at the largest size, if it has several lanes or
/// fallbacks or if `all`.
pub(crate) fn lanes(rows: &[Row], all: bool) -> String {
    let largest = rows.iter().map(|row| row.total_bytes).max();
    let rows = rows.iter().filter(|row| Some(row.total_bytes) == largest);
    let worth = |row: &&Row| all || row.lanes.len() > 1 || !row.fallbacks.is_empty();
    let lines: String = rows.filter(worth).map(|row| lane_line(row) + "\n").collect();
    if lines.is_empty() { lines } else { format!("\n{lines}") }
}

fn lane_line(row: &Row) -> String {
    let lanes = row.lanes.iter().map(|lane| {
        let waits = if lane.queued_waits { "queued" } else { "polled" };
        format!(
            "lane {} {} on {} by {}, waits {waits}",
            lane.lane, lane.tier, lane.backend, lane.kind
        )
    });

    let tiers = row.tiers.iter().filter_map(|moved| {
        let named = [
            ("put", moved.put_bytes),
            ("got", moved.got_bytes),
            ("self copy", moved.own_bytes),
            ("of these by compute units", moved.compute_bytes),
        ];
        let words = named.iter().filter(|(_, bytes)| *bytes > 0);
        let words: Vec<_> = words.map(|(name, bytes)| format!("{} {name}", Size(*bytes))).collect();
        (!words.is_empty()).then(|| format!("{}: {}", moved.tier, words.join(", ")))
    });

    let fallbacks = row.fallbacks.iter().map(|why| format!("fallback: {why}"));
    let words: Vec<_> = lanes.chain(tiers).chain(fallbacks).collect();

    format!("{}, chunks {}, rank 0: {}", row.algorithm, row.chunks, words.join("; "))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::row::tests::row;
    use super::super::row::{Baseline, DeviceTimes, LaneRow, Predicted, TierRow};
    use super::super::table::tables;
    use super::*;

    #[test]
    fn a_table_without_limits() {
        let rows = [
            row(1024, Duration::from_nanos(6_543), None),
            row(64 << 20, Duration::from_micros(9_000), None),
        ];
        insta::assert_snapshot!(table(&rows), @"
          total    block   algorithm   engine   median µs    p99 µs   algbw GB/s   busbw GB/s   checked
        ────────────────────────────────────────────────────────────────────────────────────────────────
          1 KiB    256 B   direct      host           6.5       9.8        0.157        0.117       yes
         64 MiB   16 MiB   direct      host        9000.0   13500.0        7.457        5.592       yes
        ");
    }

    #[test]
    fn chunk_and_prediction_columns_appear_on_demand() {
        let mut rows = [
            row(1 << 20, Duration::from_micros(125), None),
            row(1 << 20, Duration::from_micros(500), None),
        ];
        rows[1].algorithm = "hierarchical".into();
        rows[1].chunks = 4;
        let time = Duration::from_micros;
        rows[1].predicted = Some(Predicted::new(time(450), time(500)));
        insta::assert_snapshot!(table(&rows), @"
         total     block   algorithm      chunks   engine   median µs   p99 µs   algbw GB/s   busbw GB/s   checked   predicted µs   of median
        ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────
         1 MiB   256 KiB   direct              1   host         125.0    187.5        8.389        6.291       yes              -           -
         1 MiB   256 KiB   hierarchical        4   host         500.0    750.0        2.097        1.573       yes          450.0        90 %
        ");
    }

    #[test]
    fn a_table_with_limits() {
        let rows = [
            row(1 << 20, Duration::from_micros(125), None),
            row(1 << 22, Duration::from_micros(500), Some(Duration::from_micros(450))),
        ];
        insta::assert_snapshot!(table(&rows), @"
         total     block   algorithm   engine   median µs   p99 µs   algbw GB/s   busbw GB/s   checked   limit µs   of limit
        ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────
         1 MiB   256 KiB   direct      host         125.0    187.5        8.389        6.291       yes          -          -
         4 MiB     1 MiB   direct      host         500.0    750.0        8.389        6.291       yes      450.0       90 %
        ");
    }

    fn measured() -> Row {
        let mut row = row(64 << 20, Duration::from_micros(150), Some(Duration::from_micros(129)));
        row.backend = "cuda".into();
        row.engine = "cuda".into();
        let (host, starts_in_a_row) = (6.25, 50);
        let self_copy = "local".to_owned();
        row.device =
            Some(DeviceTimes { host_us: host, starts_in_a_row, captured: false, self_copy });
        let time = Duration::from_micros;
        row.baselines = vec![
            Baseline::timed("default", time(186), time(150), time(5), 270.0),
            Baseline::timed("symmetric", time(156), time(150), time(4), 324.0),
            Baseline::missing("copy engines", "it needs CUDA 12.5"),
        ];
        row.baselines_version = Some("2.28.9 (libnccl.so.2)".into());
        row.overlap = vec![Overlap {
            path: "peerlane".into(),
            compute_alone_us: 1600.0,
            compute_us: 1664.0,
            compute_ratio: 1.04,
            gather_alone_us: 150.0,
            gather_us: 153.0,
            gather_ratio: 1.02,
            overlapped: false,
        }];
        row
    }

    #[test]
    fn all_tables_fit_120_columns() {
        let text = tables(&[measured()]);
        insta::assert_snapshot!(text, @"
          total    block   algorithm   engine   median µs   host µs   algbw GB/s   busbw GB/s   checked   limit µs   of limit
        ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────
         64 MiB   16 MiB   direct      cuda         150.0       6.2      447.392      335.544       yes      129.0       86 %

        NCCL 2.28.9 (libnccl.so.2), timed in turn with Peerlane; × is its time divided by Peerlane's

          total   Peerlane µs   default µs   symmetric µs   copy engines µs   × best   × copy engines   host µs of best
        ────────────────────────────────────────────────────────────────────────────────────────────────────────────────
         64 MiB         150.0        186.0          156.0               n/a     1.04              n/a               4.0
        NCCL copy engines: n/a, it needs CUDA 12.5

        all-gathers together with a GEMM, bf16, 8192 × 8192 × 8192

          total   library    GEMM alone µs   together µs   × alone   all-gather alone µs   together µs   × alone
        ─────────────────────────────────────────────────────────────────────────────────────────────────────────
         64 MiB   peerlane          1600.0        1664.0     1.040                 150.0         153.0   1.020 *
        * one side ended before the other was timed
        ");
        assert!(text.lines().all(|line| line.chars().count() <= 120), "{text}");
    }

    #[test]
    fn json_has_all_fields_and_can_be_parsed() {
        let row = measured();
        let json = serde_json::to_string(&row).unwrap();
        insta::assert_snapshot!(json, @r#"{"collective":"all-gather","backend":"cuda","device_name":"a processor","ranks":4,"nodes":"1x4","algorithm":"direct","chunks":1,"engine":"cuda","kind":"streams","kinds":["streams"],"dtype":"u8","in_place":false,"outputs":1,"total_bytes":67108864,"block_bytes":16777216,"iterations":20,"median_us":150.0,"p99_us":225.0,"max_us":300.0,"algbw_gbs":447.39242666666667,"busbw_gbs":335.54431999999997,"checked":true,"limit_us":129.0,"limit_share":0.86,"host_us":6.25,"starts_in_a_row":50,"captured":false,"self_copy":"local","baselines_version":"2.28.9 (libnccl.so.2)","baselines":[{"path":"default","baseline_us":186.0,"baseline_host_us":5.0,"baseline_busbw_gbs":270.0,"baseline_ratio":1.24},{"path":"symmetric","baseline_us":156.0,"baseline_host_us":4.0,"baseline_busbw_gbs":324.0,"baseline_ratio":1.04},{"path":"copy engines","missing":"it needs CUDA 12.5"}],"overlap":[{"path":"peerlane","compute_alone_us":1600.0,"compute_us":1664.0,"compute_ratio":1.04,"gather_alone_us":150.0,"gather_us":153.0,"gather_ratio":1.02,"overlapped":false}],"lanes":[],"tiers":[],"fallbacks":[]}"#);
        assert_eq!(serde_json::from_str::<Row>(&json).unwrap(), row);
    }

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
            compute_bytes: 0,
        };
        Row {
            algorithm: "hierarchical".into(),
            chunks: 4,
            lanes: vec![lane(0, "local", true), lane(1, "network", false)],
            tiers: vec![moved("local", 3 << 20, 1 << 20), moved("network", 2 << 20, 0)],
            fallbacks: vec!["copies to rank 2 go through host memory".into()],
            ..row(4 << 20, Duration::from_millis(1), None)
        }
    }

    #[test]
    fn lanes_are_printed_for_the_largest_size() {
        let rows = [row(1 << 20, Duration::from_millis(1), None), hierarchical()];
        insta::assert_snapshot!(lanes(&rows, false), @"

        hierarchical, chunks 4, rank 0: lane 0 local on host by processor, waits queued; lane 1 network on host by processor, waits polled; local: 3 MiB put, 1 MiB self copy; network: 2 MiB put; fallback: copies to rank 2 go through host memory
        ");
    }

    #[test]
    fn a_single_lane_is_printed_only_on_request() {
        let rows = [row(1 << 20, Duration::from_millis(1), None)];
        assert_eq!(lanes(&rows, false), "");
        assert_eq!(lanes(&rows, true), "\ndirect, chunks 1, rank 0: \n");
    }
}
