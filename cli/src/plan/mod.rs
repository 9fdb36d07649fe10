//! Implements `peerlane plan`, which prints the plan of each rank and the verifier's result.

use crate::error::Result;
use crate::report::print;

mod document;
mod drawing;
mod options;

use document::Document;
pub(crate) use options::Options;

pub(crate) fn run(options: &Options) -> Result<()> {
    if let Some(path) = &options.check {
        return print(&document::check(path)?);
    }
    let document = Document::make(options)?;
    if let Some(svg) = &options.svg {
        svg.write(&document.svg())?;
    }
    let text = if options.plan.json { document.json()? } else { document.text() };
    print(&text)
}
