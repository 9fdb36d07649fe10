//! The one who prints: turns events into progress, JSON lines, a table and a plot.

use std::io::{self, Write};

use super::event::Event;
use super::options::Options;
use super::timeline::{self, Traced};
use crate::error::{Failure, Result};
use crate::ranks::Audience;
use crate::report::{JsonLines, Plot, Progress, Row, lanes, tables};
use crate::trace::TraceFile;

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
    /// Why algorithms were chosen.
    notes: Vec<String>,
    explains: bool,
    trace: Option<TraceFile>,
    traced: Vec<Traced>,
    /// What was taken that nobody asked for, and why.
    taken: Vec<String>,
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
            notes: Vec::new(),
            explains: options.method.explain,
            trace: options.trace.as_deref().map(TraceFile::to).transpose()?,
            traced: Vec::new(),
            taken: note.map(str::to_owned).into_iter().collect(),
        })
    }

    /// Shows an event.
    ///
    /// # Errors
    /// If the JSON output cannot be written.
    pub(crate) fn show(&mut self, event: Event) -> Result<()> {
        self.doing = event.to_string();
        match event {
            Event::Took { text } => self.taken.push(text),
            Event::Begin { rows } => self.progress = Some(Progress::new(rows)),
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
            Event::Note { text } => self.notes.push(text),
            Event::Trace { starts } => self.traced = starts,
        }
        Ok(())
    }

    /// Ends the progress and prints what there is, also after a failure.
    ///
    /// # Errors
    /// If an output cannot be written.
    pub(crate) fn finish(mut self) -> Result<()> {
        self.progress = None;
        let Some(first) = self.rows.first() else { return Ok(()) };
        let title = title(first);
        let note: String = self.taken.iter().map(|text| format!("{text}\n")).collect();
        let lanes = lanes(&self.rows, self.explains);
        let notes: String = self.notes.iter().map(|note| format!("\n{note}\n")).collect();
        let text = format!("{title}\n{note}\n{}\n{lanes}{notes}", tables(&self.rows));
        let written = if self.json_is_stdout {
            io::stderr().write_all(text.as_bytes())
        } else {
            io::stdout().write_all(text.as_bytes())
        };
        written.map_err(|error| Failure::io("cannot print the table", &error))?;
        if let Some(trace) = &self.trace {
            trace.write(&title, timeline::events(&self.traced))?;
        }
        self.plot.map_or(Ok(()), |plot| plot.write(&title, &fastest(&self.rows)))
    }
}

impl Audience for Screen {
    fn hear(&mut self, line: &str) -> Result<()> {
        let event = serde_json::from_str(line).map_err(|error| {
            Failure::failed(format!("rank 0 said {line:?}, which is no event: {error}"))
        })?;
        self.show(event)
    }

    fn complaint(&self, line: &str) {
        match &self.progress {
            Some(progress) => progress.line(line),
            // A closed standard error leaves nobody to tell.
            None => drop(writeln!(io::stderr(), "{line}")),
        }
    }

    fn doing(&self) -> &str {
        &self.doing
    }
}

/// Of each size the fastest row.
fn fastest(rows: &[Row]) -> Vec<Row> {
    let mut fastest: Vec<Row> = Vec::new();
    for row in rows {
        match fastest.last_mut().filter(|last| last.total_bytes == row.total_bytes) {
            Some(last) if last.median_us <= row.median_us => {}
            Some(last) => *last = row.clone(),
            None => fastest.push(row.clone()),
        }
    }
    fastest
}

fn title(row: &Row) -> String {
    let ranks = if row.ranks == 1 { "rank" } else { "ranks" };
    let place = if row.in_place { "in place" } else { "out of place" };
    let how = match &row.device {
        None => "",
        Some(device) if device.captured => ", captured, back to back",
        Some(_) => ", back to back",
    };
    let Row { collective, backend, dtype, nodes, .. } = row;
    let nodes = if nodes.starts_with("1x") { String::new() } else { format!(" on nodes {nodes}") };
    let shape = row.shape.as_ref().map_or_else(String::new, |shape| format!(", {shape}"));
    format!(
        "{collective}, {} {ranks}{nodes}, {backend} backend, {dtype}, {place}{shape}{how}",
        row.ranks
    )
}
