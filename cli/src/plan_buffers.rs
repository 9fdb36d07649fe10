//! Implements `peerlane plan-buffers`, which prints offsets for buffers that share memory.

use std::path::{Path, PathBuf};

use clap::Args;
use peerlane::buffer_plan::{BufferPlan, CallSite, plan_buffers};
use serde::Serialize;

use crate::error::{Failure, Result};
use crate::printable::file_name;
use crate::report::{pretty_json, print};
use crate::text_file;

/// Plan the offsets of buffers in one allocation, in which buffers that are not live at the same step share memory
///
/// Prints the offset of each buffer, the length of the allocation (peak), the sum of one buffer for each call site, and the
/// lower bound, which is the largest sum of buffers that are live at one step. Nothing is executed.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    /// Read the call sites from FILE, a JSON list such as [{"name": "layer 0", "bytes": 65536, "first_use": 0, "last_use": 1}];
    /// the steps first_use and last_use are both included
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Print the plan as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct JsonPlan<'p> {
    #[serde(flatten)]
    plan: &'p BufferPlan,
    ratio: f64,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let plan = load(&options.file)?;
    print(&if options.json {
        pretty_json(&JsonPlan { plan: &plan, ratio: plan.ratio() })?
    } else {
        plan.to_string()
    })
}

fn load(path: &Path) -> Result<BufferPlan> {
    let text = text_file::read(path)?;
    let in_file = |failure: String| Failure::failed(format!("{}: {failure}", file_name(path)));
    let call_sites: Vec<CallSite> = serde_json::from_str(&text).map_err(|error| {
        in_file(format!(
            "invalid JSON: expected a list of call sites with the fields `name`, `bytes`, `first_use` and `last_use`: {error}"
        ))
    })?;
    plan_buffers(&call_sites).map_err(|error| in_file(error.to_string()))
}
