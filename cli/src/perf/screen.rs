//! The one who prints: rows as JSON lines and as tables.

use std::io::{self, Write};

use super::options::Options;
use super::row::{Row, tables};
use crate::error::{Failure, Result};
use crate::ranks::Audience;
use crate::report::JsonLines;
use crate::size::Size;

/// Everything that a run shows.
pub(super) struct Screen {
    json: Option<JsonLines>,
    /// The standard output carries JSON; the tables go to the standard error output.
    json_is_stdout: bool,
    doing: String,
    rows: Vec<Row>,
}

impl Screen {
    /// Opens the outputs that the options name.
    ///
    /// # Errors
    /// If one cannot be opened.
    pub(super) fn open(options: &Options) -> Result<Self> {
        Ok(Self {
            json: options.json.as_deref().map(JsonLines::open).transpose()?,
            json_is_stdout: options.json.as_deref().is_some_and(|path| path.as_os_str() == "-"),
            doing: "the ranks were starting".to_owned(),
            rows: Vec::new(),
        })
    }

    /// Shows a row.
    ///
    /// # Errors
    /// If the JSON output cannot be written.
    pub(super) fn show(&mut self, row: Row) -> Result<()> {
        self.doing = format!("finished {} of {}", row.work.name(), Size(row.bytes));
        if let Some(json) = &mut self.json {
            json.write(&row)?;
        }
        self.rows.push(row);
        Ok(())
    }

    /// Prints what there is, also after a failure.
    ///
    /// # Errors
    /// If an output cannot be written.
    pub(super) fn finish(self) -> Result<()> {
        let Some(first) = self.rows.first() else { return Ok(()) };
        let text = format!("perf, 2 ranks, {} backend\n\n{}\n", first.backend, tables(&self.rows));
        let written = if self.json_is_stdout {
            io::stderr().write_all(text.as_bytes())
        } else {
            io::stdout().write_all(text.as_bytes())
        };
        written.map_err(|error| Failure::io("cannot print the tables", &error))
    }
}

impl Audience for Screen {
    fn hear(&mut self, line: &str) -> Result<()> {
        let row = serde_json::from_str(line).map_err(|error| {
            Failure::failed(format!("rank 0 said {line:?}, which is no row: {error}"))
        })?;
        self.show(row)
    }

    fn complaint(&self, line: &str) {
        // A closed standard error leaves nobody to tell.
        drop(writeln!(io::stderr(), "{line}"));
    }

    fn doing(&self) -> &str {
        &self.doing
    }
}
