//! Prints the results of products beside collectives as JSON lines and a table.

use serde::{Deserialize, Serialize};

use super::options::{Options, Shape};
use crate::allgather::Selected;
use crate::error::Result;
use crate::ranks::OutputHandler;
use crate::report::{Columns, JsonLines, yes_or_no};

/// The time of one way to run collective and product; the field names are those of the JSON output.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct MatmulRow {
    /// Either `all-gather-matmul` or `matmul-reduce-scatter`.
    pub(super) work: String,
    pub(super) backend: String,
    /// The product name of rank 0's GPU.
    pub(super) device_name: String,
    pub(super) ranks: usize,
    pub(super) dtype: String,
    pub(super) rows: u32,
    pub(super) inner: u32,
    pub(super) columns: u32,
    /// Either `matmul`, `sequence` or `blocks`.
    pub(super) method: String,
    /// The number of streams that multiply blocks by turns.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(super) streams: Option<u32>,
    /// The collective; absent for the product alone.
    #[serde(flatten)]
    pub(super) collective: Option<CollectiveColumns>,
    pub(super) rounds: u32,
    pub(super) iterations: u32,
    pub(super) median_us: f64,
    pub(super) max_us: f64,
    /// The median divided by that of the product alone.
    pub(super) ratio: f64,
    /// Whether the result was compared; only that of blocks is.
    pub(super) checked: bool,
}

/// How the collective of a row runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct CollectiveColumns {
    pub(super) algorithm: String,
    pub(super) chunks: u32,
    /// The kind of the engines, as the group names it.
    pub(super) kind: String,
}

fn table(rows: &[MatmulRow]) -> String {
    let collective = |row: &MatmulRow, value: fn(&CollectiveColumns) -> String| {
        row.collective.as_ref().map_or_else(|| "-".to_owned(), value)
    };
    let streams =
        |row: &MatmulRow| row.streams.map_or_else(|| "-".to_owned(), |number| number.to_string());

    Columns::of_rows(rows)
        .left("method", |row| row.method.clone())
        .right("streams", streams)
        .left("algorithm", |row| collective(row, |one| one.algorithm.clone()))
        .left("engines", |row| collective(row, |one| one.kind.clone()))
        .right("chunks", |row| collective(row, |one| one.chunks.to_string()))
        .right("median µs", |row| format!("{:.1}", row.median_us))
        .right("max µs", |row| format!("{:.1}", row.max_us))
        .right("of matmul", |row| format!("{:.3}", row.ratio))
        .right("checked", |row| if row.streams.is_some() { yes_or_no(row.checked) } else { "-" })
        .text()
}

/// Returns the first lines of the output.
fn title(row: &MatmulRow) -> String {
    let MatmulRow { work, backend, ranks, dtype, rows, inner, columns, .. } = row;
    let of_ranks = if *ranks == 1 { "rank" } else { "ranks" };
    format!(
        "{work}, {ranks} {of_ranks}, {backend} backend, {dtype}, {rows} × {inner} by {inner} × \
         {columns} on each rank"
    )
}

pub(super) struct Printer {
    json: Option<JsonLines>,
    /// The choice of the backend, and what is not measured.
    notes: Vec<String>,
    activity: String,
    rows: Vec<MatmulRow>,
}

impl Printer {
    pub(super) fn open(options: &Options, selected: &Selected, shape: &Shape) -> Result<Self> {
        let skipped = shape.skipped_chunks.iter().map(|chunks| {
            format!("chunks {chunks}: not measured, it does not cut the rows of a block evenly")
        });
        Ok(Self {
            json: options.run.json.as_deref().map(JsonLines::open).transpose()?,
            notes: selected.note.iter().cloned().chain(skipped).collect(),
            activity: "checking the results".to_owned(),
            rows: Vec::new(),
        })
    }
}

impl OutputHandler for Printer {
    type Event = MatmulRow;

    fn show(&mut self, row: MatmulRow) -> Result<()> {
        self.activity = format!("finished {}", row.method);
        if let Some(json) = &mut self.json {
            json.write(&row)?;
        }
        self.rows.push(row);
        Ok(())
    }

    fn finish(self) -> Result<()> {
        let Some(first) = self.rows.first() else { return Ok(()) };
        let notes: String = self.notes.iter().map(|note| format!("{note}\n")).collect();
        let text = format!("{}\n{notes}\n{}\n", title(first), table(&self.rows));
        JsonLines::print_beside(self.json.as_ref(), &text)
    }

    fn activity(&self) -> &str {
        &self.activity
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(method: &str, streams: Option<u32>, algorithm: Option<&str>) -> MatmulRow {
        let collective = |algorithm: &str| CollectiveColumns {
            algorithm: algorithm.to_owned(),
            chunks: 1,
            kind: "streams".to_owned(),
        };
        MatmulRow {
            work: "all-gather-matmul".to_owned(),
            backend: "cuda".to_owned(),
            device_name: "a GPU".to_owned(),
            ranks: 2,
            dtype: "bf16".to_owned(),
            rows: 8192,
            inner: 4096,
            columns: 2048,
            method: method.to_owned(),
            streams,
            collective: algorithm.map(collective),
            rounds: 9,
            iterations: 10,
            median_us: 1500.0,
            max_us: 1600.0,
            ratio: 1.25,
            checked: streams.is_some(),
        }
    }

    #[test]
    fn a_table_has_a_line_for_each_way() {
        let rows = [
            row("matmul", None, None),
            row("sequence", None, Some("direct")),
            row("blocks", Some(2), Some("pull")),
        ];
        insta::assert_snapshot!(title(&rows[0]), @"all-gather-matmul, 2 ranks, cuda backend, bf16, 8192 × 4096 by 4096 × 2048 on each rank");
        insta::assert_snapshot!(table(&rows), @"
         method     streams   algorithm   engines   chunks   median µs   max µs   of matmul   checked
        ──────────────────────────────────────────────────────────────────────────────────────────────
         matmul           -   -           -              -      1500.0   1600.0       1.250         -
         sequence         -   direct      streams        1      1500.0   1600.0       1.250         -
         blocks           2   pull        streams        1      1500.0   1600.0       1.250       yes
        ");
    }

    #[test]
    fn a_row_is_one_json_line_and_can_be_parsed() {
        for one in [row("matmul", None, None), row("blocks", Some(1), Some("direct"))] {
            let line = serde_json::to_string(&one).unwrap();
            assert_eq!(serde_json::from_str::<MatmulRow>(&line).unwrap(), one);
        }
        let line = serde_json::to_string(&row("blocks", Some(1), Some("direct"))).unwrap();
        insta::assert_snapshot!(line, @r#"{"work":"all-gather-matmul","backend":"cuda","device_name":"a GPU","ranks":2,"dtype":"bf16","rows":8192,"inner":4096,"columns":2048,"method":"blocks","streams":1,"algorithm":"direct","chunks":1,"kind":"streams","rounds":9,"iterations":10,"median_us":1500.0,"max_us":1600.0,"ratio":1.25,"checked":true}"#);
    }
}
