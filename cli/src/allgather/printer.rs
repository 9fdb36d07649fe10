//! Prints the progress and the results of a measurement.
//!
//! Rank 0 reports progress as events. If the printing process is another one, the events go to it
//! through a pipe, as one JSON object per line.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::options::Options;
use super::timeline::{self, Traced};
use crate::error::Result;
use crate::ranks::OutputHandler;
use crate::report::{
    JsonLines, MissingRow, OutputFile, Progress, Row, lanes, plot, print_error, tables,
};
use crate::trace::render;
use crate::units::Size;

/// Receives the events of a measurement, and prints its tables, JSON lines and plot.
pub(crate) struct Printer {
    json: Option<JsonLines>,
    plot: Option<OutputFile>,
    progress: Option<Progress>,
    activity: String,
    rows: Vec<Row>,
    /// The notes below the tables, such as the reason why an algorithm cannot run.
    notes: Vec<String>,
    explains: bool,
    trace: Option<OutputFile>,
    traced: Vec<Traced>,
    auto_choices: Vec<String>,
}

impl Printer {
    /// Opens the output files; `note` says which backend `auto` has selected.
    pub(crate) fn open(options: &Options, note: Option<&str>) -> Result<Self> {
        Ok(Self {
            json: options.run.json.as_deref().map(JsonLines::open).transpose()?,
            plot: options.plot.clone(),
            progress: None,
            activity: "starting the ranks".to_owned(),
            rows: Vec::new(),
            notes: Vec::new(),
            explains: options.algorithm.explain,
            trace: options.trace.clone(),
            traced: Vec::new(),
            auto_choices: note.map(str::to_owned).into_iter().collect(),
        })
    }

    /// Writes a row to the JSON output and counts it in the progress bar.
    fn write(&mut self, row: &impl Serialize) -> Result<()> {
        if let Some(progress) = &self.progress {
            progress.advance();
        }
        self.json.as_mut().map_or(Ok(()), |json| json.write(row))
    }
}

impl OutputHandler for Printer {
    type Event = ProgressEvent;

    fn show(&mut self, event: ProgressEvent) -> Result<()> {
        self.activity = event.to_string();
        match event {
            ProgressEvent::AutoChoice { text } => self.auto_choices.push(text),
            ProgressEvent::Begin { rows } => self.progress = Some(Progress::new(rows)),
            ProgressEvent::Activity { .. } => {
                if let Some(progress) = &self.progress {
                    progress.set_activity(&self.activity);
                }
            }
            ProgressEvent::Row { row } => {
                self.write(&row)?;
                self.rows.push(*row);
            }
            ProgressEvent::Missing { row } => {
                self.write(&row)?;
                let note = format!("{}: n/a, {}", row.algorithm, row.missing);
                if !self.notes.contains(&note) {
                    self.notes.push(note);
                }
            }
            ProgressEvent::Explanation { text } => self.notes.push(text),
            ProgressEvent::Trace { starts } => self.traced = starts,
        }
        Ok(())
    }

    fn finish(mut self) -> Result<()> {
        self.progress = None;
        let Some(first) = self.rows.first() else { return Ok(()) };
        let title = title(first);
        let note: String = self.auto_choices.iter().map(|text| format!("{text}\n")).collect();
        let lanes = lanes(&self.rows, self.explains);
        let notes: String = self.notes.iter().map(|note| format!("\n{note}\n")).collect();
        let text = format!("{title}\n{note}\n{}\n{lanes}{notes}", tables(&self.rows));
        JsonLines::print_beside(self.json.as_ref(), &text)?;
        if let Some(trace) = &self.trace {
            trace.write(&render(&title, timeline::events(&self.traced)))?;
        }
        match &self.plot {
            None => Ok(()),
            Some(file) => file.write(&plot(&title, &fastest(&self.rows))?),
        }
    }

    fn on_stderr(&self, line: &str) {
        match &self.progress {
            Some(progress) => progress.line(line),
            None => print_error(line),
        }
    }

    fn activity(&self) -> &str {
        &self.activity
    }
}

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
    let place_text = if row.in_place { "in place" } else { "out of place" };
    let how = match &row.device {
        None => "",
        Some(device) if device.captured => ", captured, back to back",
        Some(_) => ", back to back",
    };
    let Row { collective, backend, dtype, nodes, .. } = row;
    let nodes = if nodes.starts_with("1x") { String::new() } else { format!(" on nodes {nodes}") };
    let shape = row.shape.as_ref().map_or_else(String::new, |shape| format!(", {shape}"));
    format!(
        "{collective}, {} {ranks}{nodes}, {backend} backend, {dtype}, {place_text}{shape}{how}",
        row.ranks
    )
}

/// An event that rank 0 reports to the process that prints.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(crate) enum ProgressEvent {
    AutoChoice {
        text: String,
    },
    /// The group is open, and `rows` result rows will follow this event.
    Begin {
        rows: usize,
    },
    Activity {
        activity: Activity,
        total_bytes: u64,
    },
    Row {
        row: Box<Row>,
    },
    Missing {
        row: Box<MissingRow>,
    },
    Explanation {
        text: String,
    },
    Trace {
        starts: Vec<Traced>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Activity {
    Limit,
    Check,
    Measure,
    Overlap,
    Trace,
}

/// The receiver of the events of a measurement.
pub(crate) type Sink<'a> = &'a mut dyn FnMut(ProgressEvent) -> Result<()>;

impl fmt::Display for ProgressEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AutoChoice { .. } => f.write_str("opening the group"),
            Self::Begin { rows } => write!(f, "starting {rows} measurements"),
            Self::Activity { activity, total_bytes } => {
                let verb = match activity {
                    Activity::Limit => "measuring the limit of",
                    Activity::Check => "checking",
                    Activity::Measure => "measuring",
                    Activity::Overlap => "measuring the overlap with compute work",
                    Activity::Trace => "tracing",
                };
                write!(f, "{verb} {}", Size(*total_bytes))
            }
            Self::Explanation { .. } => f.write_str("explaining"),
            Self::Trace { .. } => f.write_str("tracing"),
            Self::Missing { row } => write!(f, "skipped {}", Size(row.total_bytes)),
            Self::Row { row } => write!(f, "finished {}", Size(row.total_bytes)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_one_json_line_and_can_be_parsed() {
        let event = ProgressEvent::Activity { activity: Activity::Check, total_bytes: 3 << 20 };
        let line = serde_json::to_string(&event).unwrap();
        assert_eq!(line, r#"{"event":"activity","activity":"check","total_bytes":3145728}"#);
        assert_eq!(serde_json::from_str::<ProgressEvent>(&line).unwrap(), event);
        assert_eq!(event.to_string(), "checking 3 MiB");
    }
}
