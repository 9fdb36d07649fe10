//! What rank 0 tells the one who prints: a JSON object a line over a pipe where that is another
//! process.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::timeline::Traced;
use crate::error::Result;
use crate::report::Row;
use crate::size::Size;

/// A step of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(crate) enum Event {
    /// Something was taken that nobody asked for, and why.
    Took { text: String },
    /// The group stands; there will be so many rows.
    Begin { rows: usize },
    /// Something begins that takes a while.
    Doing { activity: Activity, total_bytes: u64 },
    /// A size is finished, with one algorithm.
    Row { row: Box<Row> },
    /// Something that people want to know.
    Note { text: String },
    /// What every rank did in a start.
    Trace { starts: Vec<Traced> },
}

/// What takes a while.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Activity {
    Limit,
    Check,
    Measure,
    /// Beside compute.
    Beside,
    /// Step by step.
    Trace,
}

/// Takes events.
pub(crate) type Sink<'a> = &'a mut dyn FnMut(Event) -> Result<()>;

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Took { .. } => f.write_str("opening the group"),
            Self::Begin { rows } => write!(f, "beginning {rows} measurements"),
            Self::Doing { activity, total_bytes } => {
                let verb = match activity {
                    Activity::Limit => "measuring the limit of",
                    Activity::Check => "checking",
                    Activity::Measure => "measuring",
                    Activity::Beside => "measuring beside compute",
                    Activity::Trace => "tracing",
                };
                write!(f, "{verb} {}", Size(*total_bytes))
            }
            Self::Note { .. } => f.write_str("explaining"),
            Self::Trace { .. } => f.write_str("tracing"),
            Self::Row { row } => write!(f, "finished {}", Size(row.total_bytes)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_a_line_and_is_read_back() {
        let event = Event::Doing { activity: Activity::Check, total_bytes: 3 << 20 };
        let line = serde_json::to_string(&event).unwrap();
        assert_eq!(line, r#"{"event":"doing","activity":"check","total_bytes":3145728}"#);
        assert_eq!(serde_json::from_str::<Event>(&line).unwrap(), event);
        assert_eq!(event.to_string(), "checking 3 MiB");
    }
}
