//! What the program shows of a measurement: rows as a table, as JSON lines and as a plot, and the
//! progress on the way there.

mod comparison;
mod json;
mod lanes;
mod plot;
mod progress;
mod row;
mod table;

pub(crate) use json::JsonLines;
pub(crate) use lanes::lanes;
pub(crate) use plot::Plot;
pub(crate) use progress::Progress;
pub(crate) use row::{
    Beside, LaneRow, Limit, OnDevice, Predicted, Rival, Row, TierRow, bandwidths, microseconds,
};
pub(crate) use table::{aligned, tables};
