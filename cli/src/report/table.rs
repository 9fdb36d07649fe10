//! Rows as a table for people.

use comfy_table::{CellAlignment, LineStyle, Table, TableStyle};

use super::comparison;
use super::row::Row;
use crate::size::Size;

/// The rows as a table, and one each for what they are compared with.
pub(crate) fn tables(rows: &[Row]) -> String {
    let tables = [Some(table(rows)), comparison::rivals(rows), comparison::beside(rows)];
    tables.into_iter().flatten().collect::<Vec<_>>().join("\n\n")
}

/// The columns that are there only where something of them was measured.
#[derive(Clone, Copy)]
struct Columns {
    parts: bool,
    limits: bool,
    predictions: bool,
    device: bool,
}

/// The rows as a table.
fn table(rows: &[Row]) -> String {
    let columns = Columns {
        parts: rows.iter().any(|row| row.parts > 1),
        limits: rows.iter().any(|row| row.limit.is_some()),
        predictions: rows.iter().any(|row| row.predicted.is_some()),
        device: rows.iter().any(|row| row.device.is_some()),
    };
    let engine = if columns.parts { 4 } else { 3 };
    aligned(header(columns), rows.iter().map(|row| cells(row, columns)), &[2, engine])
}

/// A table whose columns are flush right but for those named.
pub(crate) fn aligned(
    header: Vec<&'static str>,
    rows: impl Iterator<Item = Vec<String>>,
    left: &[usize],
) -> String {
    let mut table = Table::new();
    let line = LineStyle::none().fill('─').junction('─');
    table.load_style(TableStyle::new().header_separator(line));
    table.set_header(header);
    for row in rows {
        table.add_row(row);
    }
    for (index, column) in table.column_iter_mut().enumerate() {
        if !left.contains(&index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.trim_fmt()
}

fn header(Columns { parts, limits, predictions, device }: Columns) -> Vec<&'static str> {
    let mut header = vec!["total", "shard", "algorithm"];
    if parts {
        header.push("parts");
    }
    header.extend(["engine", "median µs"]);
    header.push(if device { "host µs" } else { "p99 µs" });
    header.extend(["algbw GB/s", "busbw GB/s", "checked"]);
    if limits {
        header.extend(["limit µs", "of limit"]);
    }
    if predictions {
        header.extend(["predicted µs", "of median"]);
    }
    header
}

fn cells(row: &Row, Columns { parts, limits, predictions, device }: Columns) -> Vec<String> {
    let mut cells = vec![
        Size(row.total_bytes).to_string(),
        Size(row.shard_bytes).to_string(),
        row.algorithm.clone(),
    ];
    if parts {
        cells.push(row.parts.to_string());
    }
    cells.extend([
        row.engine.clone(),
        time(row.median_us),
        match &row.device {
            Some(device) => time(device.host_us),
            None if device => "-".to_owned(),
            None => time(row.p99_us),
        },
        format!("{:.3}", row.algbw_gbs),
        format!("{:.3}", row.busbw_gbs),
        if row.checked { "yes" } else { "no" }.to_owned(),
    ]);
    if limits {
        cells.extend(beside(row.limit.map(|limit| (limit.limit_us, limit.limit_share))));
    }
    if predictions {
        let predicted = row.predicted.map(|by| (by.predicted_us, by.predicted_ratio));
        cells.extend(beside(predicted));
    }
    cells
}

/// Another time, and its share of the median.
fn beside(time_and_share: Option<(f64, f64)>) -> [String; 2] {
    match time_and_share {
        Some((other, share)) => [time(other), format!("{:.0} %", share * 100.0)],
        None => ["-".to_owned(), "-".to_owned()],
    }
}

/// A time in a cell.
pub(super) fn time(microseconds: f64) -> String {
    format!("{microseconds:.1}")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::row::Predicted;
    use super::super::row::tests::row;
    use super::*;

    #[test]
    fn a_table_without_limits() {
        let rows = [
            row(1024, Duration::from_nanos(6_543), None),
            row(64 << 20, Duration::from_micros(9_000), None),
        ];
        insta::assert_snapshot!(table(&rows), @"
          total    shard   algorithm   engine   median µs    p99 µs   algbw GB/s   busbw GB/s   checked
        ────────────────────────────────────────────────────────────────────────────────────────────────
          1 KiB    256 B   direct      host           6.5       9.8        0.157        0.117       yes
         64 MiB   16 MiB   direct      host        9000.0   13500.0        7.457        5.592       yes
        ");
    }

    #[test]
    fn parts_and_predictions_are_shown_where_there_are_any() {
        let mut rows = [
            row(1 << 20, Duration::from_micros(125), None),
            row(1 << 20, Duration::from_micros(500), None),
        ];
        rows[1].algorithm = "hierarchical".into();
        rows[1].parts = 4;
        let time = Duration::from_micros;
        rows[1].predicted = Some(Predicted::new(time(450), time(500)));
        insta::assert_snapshot!(table(&rows), @"
         total     shard   algorithm      parts   engine   median µs   p99 µs   algbw GB/s   busbw GB/s   checked   predicted µs   of median
        ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────
         1 MiB   256 KiB   direct             1   host         125.0    187.5        8.389        6.291       yes              -           -
         1 MiB   256 KiB   hierarchical       4   host         500.0    750.0        2.097        1.573       yes          450.0        90 %
        ");
    }

    #[test]
    fn a_table_with_limits() {
        let rows = [
            row(1 << 20, Duration::from_micros(125), None),
            row(1 << 22, Duration::from_micros(500), Some(Duration::from_micros(450))),
        ];
        insta::assert_snapshot!(table(&rows), @"
         total     shard   algorithm   engine   median µs   p99 µs   algbw GB/s   busbw GB/s   checked   limit µs   of limit
        ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────
         1 MiB   256 KiB   direct      host         125.0    187.5        8.389        6.291       yes          -          -
         4 MiB     1 MiB   direct      host         500.0    750.0        8.389        6.291       yes      450.0       90 %
        ");
    }
}
