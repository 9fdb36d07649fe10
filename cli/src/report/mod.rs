//! Presents measurements as tables, JSON lines and plots, and shows the progress of a run.

mod output;
mod plot;
mod row;
mod table;

pub(crate) use output::{JsonLines, OutputFile, Progress, pretty_json, print, print_error};
pub(crate) use plot::{Line, Panel, panels, plot};
pub(crate) use row::{
    Baseline, DeviceTimes, LaneRow, Limit, MissingRow, Overlap, Predicted, Row, TierRow,
    bandwidths, microseconds,
};
pub(crate) use table::{Columns, lanes, tables, yes_or_no};
