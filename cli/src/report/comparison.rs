//! Tables of what the rows are compared with.

use super::row::{Rival, Row};
use super::table::{aligned, time};
use crate::size::Size;

/// Ours beside the rivals; `None` without any.
pub(super) fn rivals(rows: &[Row]) -> Option<String> {
    let first = rows.iter().find(|row| !row.rivals.is_empty())?;
    let version = first.rivals_version.as_deref().unwrap_or("of unknown version");
    let mut text = format!("NCCL {version}, in turn with ours; × is its time by ours\n\n");
    let mut header = vec!["total", "ours µs"];
    header.extend(first.rivals.iter().map(|rival| match rival.path.as_str() {
        "symmetric" => "symmetric µs",
        "copy engines" => "copy engines µs",
        _ => "default µs",
    }));
    header.extend(["× best", "× copy engines", "best's host µs"]);
    text += &aligned(header, rows.iter().map(cells), &[]);
    for rival in &first.rivals {
        if let Some(why) = &rival.missing {
            text += &format!("\nNCCL {}: n/a, {why}", rival.path);
        }
    }
    Some(text)
}

fn cells(row: &Row) -> Vec<String> {
    let ours = row.median_us;
    let us = |rival: &Rival| rival.times.map(|times| times.rival_us);
    let copy_engines = row.rivals.iter().find(|rival| rival.path == "copy engines").and_then(us);
    let ratio = |theirs: Option<f64>| {
        theirs.map_or("n/a".to_owned(), |theirs| format!("{:.2}", theirs / ours.max(0.001)))
    };
    let best = row.rivals.iter().filter_map(|rival| rival.times);
    let best = best.min_by(|left, right| left.rival_us.total_cmp(&right.rival_us));
    let mut cells = vec![Size(row.total_bytes).to_string(), time(ours)];
    cells.extend(row.rivals.iter().map(|rival| us(rival).map_or("n/a".to_owned(), time)));
    cells.extend([
        ratio(row.best_rival_us()),
        ratio(copy_engines),
        best.map_or("n/a".to_owned(), |best| time(best.rival_host_us)),
    ]);
    cells
}

/// Gathers beside compute; `None` where it was not measured.
pub(super) fn beside(rows: &[Row]) -> Option<String> {
    let mut besides =
        rows.iter().flat_map(|row| row.beside.iter().map(move |beside| (row, beside)));
    let mut cells = Vec::new();
    let mut partial = false;
    for (row, beside) in &mut besides {
        partial |= !beside.overlapped;
        cells.push(vec![
            Size(row.total_bytes).to_string(),
            beside.path.clone(),
            time(beside.compute_alone_us),
            time(beside.compute_us),
            format!("{:.3}", beside.compute_ratio),
            time(beside.gather_alone_us),
            time(beside.gather_us),
            format!("{:.3}{}", beside.gather_ratio, if beside.overlapped { "" } else { " *" }),
        ]);
    }
    if cells.is_empty() {
        return None;
    }
    let header = vec![
        "total",
        "gathers of",
        "GEMM alone µs",
        "beside µs",
        "× alone",
        "gather alone µs",
        "beside µs",
        "× alone",
    ];
    let table = aligned(header, cells.into_iter(), &[1]);
    let note = if partial { "\n* one side ended before the other had been timed" } else { "" };
    Some(format!("beside a GEMM, bf16, 8192 × 8192 × 8192; both run all along\n\n{table}{note}"))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::row::tests::row;
    use super::super::row::{Beside, OnDevice};
    use super::super::table::tables;
    use super::*;

    fn measured() -> Row {
        let mut row = row(64 << 20, Duration::from_micros(150), Some(Duration::from_micros(129)));
        row.backend = "cuda".into();
        row.engine = "cuda".into();
        let (host, starts_in_a_row) = (6.25, 50);
        let own_copy = "local".to_owned();
        row.device = Some(OnDevice { host_us: host, starts_in_a_row, captured: false, own_copy });
        let time = Duration::from_micros;
        row.rivals = vec![
            Rival::timed("default", time(186), time(150), time(5), 270.0),
            Rival::timed("symmetric", time(156), time(150), time(4), 324.0),
            Rival::missing("copy engines", "it wants CUDA 12.5"),
        ];
        row.rivals_version = Some("2.28.9 (libnccl.so.2)".into());
        row.beside = vec![Beside {
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
          total    shard   algorithm   engine   median µs   host µs   algbw GB/s   busbw GB/s   checked   limit µs   of limit
        ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────
         64 MiB   16 MiB   direct      cuda         150.0       6.2      447.392      335.544       yes      129.0       86 %

        NCCL 2.28.9 (libnccl.so.2), in turn with ours; × is its time by ours

          total   ours µs   default µs   symmetric µs   copy engines µs   × best   × copy engines   best's host µs
        ───────────────────────────────────────────────────────────────────────────────────────────────────────────
         64 MiB     150.0        186.0          156.0               n/a     1.04              n/a              4.0
        NCCL copy engines: n/a, it wants CUDA 12.5

        beside a GEMM, bf16, 8192 × 8192 × 8192; both run all along

          total   gathers of   GEMM alone µs   beside µs   × alone   gather alone µs   beside µs   × alone
        ───────────────────────────────────────────────────────────────────────────────────────────────────
         64 MiB   peerlane            1600.0      1664.0     1.040             150.0       153.0   1.020 *
        * one side ended before the other had been timed
        ");
        assert!(text.lines().all(|line| line.chars().count() <= 120), "{text}");
    }

    #[test]
    fn json_has_all_and_is_read_back() {
        let row = measured();
        let json = serde_json::to_string(&row).unwrap();
        insta::assert_snapshot!(json, @r#"{"collective":"all-gather","backend":"cuda","ranks":4,"nodes":"1x4","algorithm":"direct","parts":1,"engine":"cuda","dtype":"u8","in_place":false,"outputs":1,"total_bytes":67108864,"shard_bytes":16777216,"iterations":20,"median_us":150.0,"p99_us":225.0,"max_us":300.0,"algbw_gbs":447.39242666666667,"busbw_gbs":335.54431999999997,"checked":true,"limit_us":129.0,"limit_share":0.86,"host_us":6.25,"starts_in_a_row":50,"captured":false,"own_copy":"local","rivals_version":"2.28.9 (libnccl.so.2)","rivals":[{"path":"default","rival_us":186.0,"rival_host_us":5.0,"rival_busbw_gbs":270.0,"rival_ratio":1.24},{"path":"symmetric","rival_us":156.0,"rival_host_us":4.0,"rival_busbw_gbs":324.0,"rival_ratio":1.04},{"path":"copy engines","missing":"it wants CUDA 12.5"}],"beside":[{"path":"peerlane","compute_alone_us":1600.0,"compute_us":1664.0,"compute_ratio":1.04,"gather_alone_us":150.0,"gather_us":153.0,"gather_ratio":1.02,"overlapped":false}],"lanes":[],"tiers":[],"fallbacks":[]}"#);
        assert_eq!(serde_json::from_str::<Row>(&json).unwrap(), row);
    }
}
