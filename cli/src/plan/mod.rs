//! `peerlane plan`: shows what every rank of an all-gather does, and the verdict of the verifier.

use std::io::{self, Write};

use crate::error::{Failure, Result};

mod check;
mod document;
mod options;

use document::Document;
pub(crate) use options::Options;

/// Makes plans, or reads them, and prints them with the verdict.
///
/// # Errors
/// If the options do not fit together, the plans have a fault, or nothing can be printed.
pub(crate) fn run(options: &Options) -> Result<()> {
    if let Some(path) = &options.check {
        return print(&check::check(path)?);
    }
    let document = Document::make(options)?;
    let text = if options.json { document.json()? } else { document.text() };
    print(&text)
}

fn print(text: &str) -> Result<()> {
    io::stdout()
        .write_all(text.as_bytes())
        .map_err(|error| Failure::io("cannot print the plan", &error))
}
