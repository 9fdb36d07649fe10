//! What the program shows of a measurement: rows as a table, as JSON lines and as a plot, and the
//! progress on the way there.

mod comparison;
mod json;
mod plot;
mod progress;
mod row;
mod table;

pub(crate) use json::JsonLines;
pub(crate) use plot::Plot;
pub(crate) use progress::Progress;
pub(crate) use row::{Beside, Limit, OnDevice, Rival, Row, bandwidths, microseconds};
pub(crate) use table::{aligned, tables};
