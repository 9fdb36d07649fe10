//! Rows as JSON, an object a line, written as they come: a run that fails keeps what it had.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use serde::Serialize;

use crate::error::{Failure, Result};

/// Where JSON lines go.
pub(crate) struct JsonLines<W = Box<dyn Write>> {
    to: W,
    name: String,
}

impl JsonLines {
    /// Opens `path`, or the standard output for `-`.
    ///
    /// # Errors
    /// If the file cannot be created.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        if path == Path::new("-") {
            return Ok(Self { to: Box::new(io::stdout()), name: "standard output".into() });
        }
        let name = path.display().to_string();
        let file = File::create(path).map_err(|error| {
            Failure::io(format_args!("cannot create {name}"), &error).with_advice(
                "--json takes a file in a folder that exists, or - for standard output",
            )
        })?;
        Ok(Self { to: Box::new(file), name })
    }
}

impl<W: Write> JsonLines<W> {
    /// Writes one row.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(crate) fn write(&mut self, row: &impl Serialize) -> Result<()> {
        let mut line =
            serde_json::to_vec(row).map_err(|error| Failure::failed(error.to_string()))?;
        line.push(b'\n');
        self.to
            .write_all(&line)
            .and_then(|()| self.to.flush())
            .map_err(|error| Failure::io(format_args!("cannot write {}", self.name), &error))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::row::Row;
    use super::super::row::tests::row;
    use super::*;

    #[test]
    fn a_row_is_a_line_and_is_read_back() {
        let mut lines = JsonLines { to: Vec::new(), name: "memory".into() };
        let rows = [
            row(1 << 20, Duration::from_micros(125), None),
            row(1 << 22, Duration::from_micros(500), Some(Duration::from_micros(450))),
        ];
        for row in &rows {
            lines.write(row).unwrap();
        }
        let text = String::from_utf8(lines.to).unwrap();
        insta::assert_snapshot!(text, @r#"
        {"collective":"all-gather","backend":"host","ranks":4,"nodes":"1x4","algorithm":"direct","parts":1,"engine":"host","dtype":"u8","in_place":false,"outputs":1,"total_bytes":1048576,"shard_bytes":262144,"iterations":20,"median_us":125.0,"p99_us":187.5,"max_us":250.0,"algbw_gbs":8.388608,"busbw_gbs":6.291456,"checked":true,"lanes":[],"tiers":[],"fallbacks":[]}
        {"collective":"all-gather","backend":"host","ranks":4,"nodes":"1x4","algorithm":"direct","parts":1,"engine":"host","dtype":"u8","in_place":false,"outputs":1,"total_bytes":4194304,"shard_bytes":1048576,"iterations":20,"median_us":500.0,"p99_us":750.0,"max_us":1000.0,"algbw_gbs":8.388608,"busbw_gbs":6.291456,"checked":true,"limit_us":450.0,"limit_share":0.9,"lanes":[],"tiers":[],"fallbacks":[]}
        "#);
        let read: Vec<Row> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(read, rows);
    }
}
