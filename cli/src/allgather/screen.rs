//! The one who prints: turns events into progress, JSON lines, a table and a plot.

use std::io::{self, Write};

use super::event::Event;
use super::options::Options;
use crate::error::{Failure, Result};
use crate::report::{JsonLines, Plot, Progress, Row, tables};

/// Everything that a run shows.
pub(crate) struct Screen {
    json: Option<JsonLines>,
    /// The standard output carries JSON; the table goes to the standard error output.
    json_is_stdout: bool,
    plot: Option<Plot>,
    progress: Option<Progress>,
    /// What is being done, for the text of a failure.
    doing: String,
    rows: Vec<Row>,
    /// What the backend was taken for.
    note: Option<String>,
}

impl Screen {
    /// Opens the outputs that the options name; `note` says which backend was taken, and why.
    ///
    /// # Errors
    /// If one cannot be opened.
    pub(crate) fn open(options: &Options, note: Option<&str>) -> Result<Self> {
        Ok(Self {
            json: options.json.as_deref().map(JsonLines::open).transpose()?,
            json_is_stdout: options.json.as_deref().is_some_and(|path| path.as_os_str() == "-"),
            plot: options.plot.as_deref().map(Plot::to).transpose()?,
            progress: None,
            doing: "the ranks were starting".to_owned(),
            rows: Vec::new(),
            note: note.map(str::to_owned),
        })
    }

    /// Shows an event.
    ///
    /// # Errors
    /// If the JSON output cannot be written.
    pub(crate) fn show(&mut self, event: Event) -> Result<()> {
        self.doing = event.to_string();
        match event {
            Event::Begin { sizes } => self.progress = Some(Progress::new(sizes)),
            Event::Doing { .. } => {
                if let Some(progress) = &self.progress {
                    progress.doing(&self.doing);
                }
            }
            Event::Row { row } => {
                if let Some(json) = &mut self.json {
                    json.write(&row)?;
                }
                if let Some(progress) = &self.progress {
                    progress.advance();
                }
                self.rows.push(*row);
            }
        }
        Ok(())
    }

    /// Writes a line to the standard error output, around the progress bar.
    pub(crate) fn line(&self, line: &str) {
        match &self.progress {
            Some(progress) => progress.line(line),
            // A closed standard error leaves nobody to tell.
            None => drop(writeln!(io::stderr(), "{line}")),
        }
    }

    /// What was being done last.
    pub(crate) fn doing(&self) -> &str {
        &self.doing
    }

    /// Ends the progress and prints what there is, also after a failure.
    ///
    /// # Errors
    /// If an output cannot be written.
    pub(crate) fn finish(mut self) -> Result<()> {
        self.progress = None;
        let Some(first) = self.rows.first() else { return Ok(()) };
        let title = title(first);
        let note = self.note.as_ref().map_or(String::new(), |note| format!("{note}\n"));
        let text = format!("{title}\n{note}\n{}\n", tables(&self.rows));
        let written = if self.json_is_stdout {
            io::stderr().write_all(text.as_bytes())
        } else {
            io::stdout().write_all(text.as_bytes())
        };
        written.map_err(|error| Failure::io("cannot print the table", &error))?;
        self.plot.map_or(Ok(()), |plot| plot.write(&title, &self.rows))
    }
}

fn title(row: &Row) -> String {
    let ranks = if row.ranks == 1 { "rank" } else { "ranks" };
    let place = if row.in_place { "in place" } else { "out of place" };
    let how = match &row.device {
        None => "",
        Some(device) if device.captured => ", captured, back to back",
        Some(_) => ", back to back",
    };
    let Row { backend, dtype, .. } = row;
    format!("all-gather, {} {ranks}, {backend} backend, {dtype}, {place}{how}", row.ranks)
}
