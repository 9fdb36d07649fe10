//! Writes text to stdout, JSON lines and files of a given format, and shows a progress bar.

use std::fmt;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use clap::builder::{PathBufValueParser, TypedValueParser};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use peerlane_toolkit::limits;
use serde::Serialize;

use crate::error::{Failure, Result};
use crate::printable::{file_name, printable, printable_json, short_line};
use crate::text_file;

/// Prints text that people read to stdout.
pub(crate) fn print(text: &str) -> Result<()> {
    let text = printable(text);
    // Tests run commands in their process for the errors.
    if cfg!(test) {
        return Ok(());
    }
    io::stdout()
        .write_all(text.as_bytes())
        .map_err(|error| Failure::io("cannot write to stdout", &error))
}

/// Prints a line that people read to stderr.
pub(crate) fn print_error(line: impl fmt::Display) {
    let text = line.to_string();
    let lines: Vec<String> = text.lines().map(short_line).collect();
    // If stderr is closed, the line cannot be reported anywhere.
    writeln!(io::stderr(), "{}", lines.join("\n")).ok();
}

/// Returns a value as indented JSON with a line end.
pub(crate) fn pretty_json(value: &impl Serialize) -> Result<String> {
    let json = serde_json::to_string_pretty(value);
    let json = json.map_err(|error| Failure::failed(error.to_string()))?;
    Ok(printable_json(&json).into_owned() + "\n")
}

/// A file of one format that an option names and that is written at the end.
#[derive(Clone, Debug)]
pub(crate) struct OutputFile {
    option: &'static str,
    path: PathBuf,
}

impl OutputFile {
    /// Returns the parser of an option whose file name must end in `extension`.
    pub(crate) fn parser(
        option: &'static str,
        extension: &'static str,
    ) -> impl TypedValueParser<Value = Self> {
        PathBufValueParser::new().try_map(move |path| {
            match path.extension().is_some_and(|seen| seen.eq_ignore_ascii_case(extension)) {
                true => Ok(Self { option, path }),
                false => Err(format!(
                    "expected a file name that ends in .{extension}; no other format is supported"
                )),
            }
        })
    }

    pub(crate) fn write(&self, content: &str) -> Result<()> {
        text_file::write(&self.path, content).map_err(|error| {
            Failure::io(format_args!("cannot write {}", file_name(&self.path)), &error)
                .with_advice(format!("give {} a file in an existing folder", self.option))
        })
    }
}

/// Writes one JSON object per line, each as soon as it is known, so that a failed run keeps its
/// rows.
pub(crate) struct JsonLines<W = Box<dyn Write>> {
    writer: W,
    name: String,
    is_stdout: bool,
    origin: Origin,
}

/// The machine and the version of the program that have measured a line.
struct Origin {
    version: &'static str,
    host: String,
    now: fn() -> u64,
}

/// A row, and where and when it was written.
#[derive(Serialize)]
struct Line<'a, R> {
    #[serde(flatten)]
    row: &'a R,
    version: &'a str,
    host: &'a str,
    /// In seconds since 1970.
    unix_time: u64,
}

impl Origin {
    fn here() -> Self {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let now = || UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs());
        Self { version: env!("CARGO_PKG_VERSION"), host, now }
    }
}

impl JsonLines {
    /// Opens a file for writing, or stdout if the path is `-`.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        if path == Path::new("-") {
            return Ok(Self {
                writer: Box::new(io::stdout()),
                name: "stdout".into(),
                is_stdout: true,
                origin: Origin::here(),
            });
        }
        let name = file_name(path);
        let file = text_file::create(path).map_err(|error| {
            Failure::io(format_args!("cannot create {name}"), &error)
                .with_advice("give --json a file in an existing folder, or - for stdout")
        })?;
        Ok(Self { writer: Box::new(file), name, is_stdout: false, origin: Origin::here() })
    }

    /// Prints the tables of a run to stderr if stdout carries JSON lines, and to stdout otherwise.
    pub(crate) fn print_beside(json: Option<&Self>, text: &str) -> Result<()> {
        if json.is_none_or(|json| !json.is_stdout) {
            return print(text);
        }
        io::stderr()
            .write_all(printable(text).as_bytes())
            .map_err(|error| Failure::io("cannot write to stderr", &error))
    }
}

impl<W: Write> JsonLines<W> {
    pub(crate) fn write(&mut self, row: &impl Serialize) -> Result<()> {
        let Origin { version, host, now } = &self.origin;
        let line = Line { row, version, host, unix_time: now() };
        let line = serde_json::to_string(&line);
        let line = line.map_err(|error| Failure::failed(error.to_string()))?;
        let line = printable_json(&line).into_owned() + "\n";
        self.writer
            .write_all(line.as_bytes())
            .and_then(|()| self.writer.flush())
            .map_err(|error| Failure::io(format_args!("cannot write {}", self.name), &error))
    }
}

/// Draws a progress bar on stderr if that is a terminal.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: ProgressBar,
}

impl Progress {
    pub(crate) fn new(rows: usize) -> Self {
        let bar = ProgressBar::with_draw_target(Some(rows as u64), ProgressDrawTarget::stderr());
        // The template is a constant; if it were invalid, the default style would be used.
        if let Ok(style) = ProgressStyle::with_template("{bar:24} {pos}/{len} sizes  {msg}") {
            bar.set_style(style);
        }
        // The bar starts a thread, which must not end the program if there is no room for one.
        if !bar.is_hidden() && limits::spawn("probe", || ()).is_ok() {
            bar.enable_steady_tick(Duration::from_millis(250));
        }
        Self { bar }
    }

    pub(crate) fn set_activity(&self, activity: impl fmt::Display) {
        self.bar.set_message(activity.to_string());
    }

    pub(crate) fn advance(&self) {
        self.bar.inc(1);
    }

    /// Writes a line to stderr above the progress bar, or plainly if no bar is drawn.
    pub(crate) fn line(&self, line: &str) {
        self.bar.suspend(|| print_error(line));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::row::Row;
    use super::super::row::tests::row;
    use super::*;

    #[test]
    fn a_row_is_one_json_line_and_can_be_parsed() {
        let origin = Origin { version: "1.2.3", host: "node7".into(), now: || 7 };
        let (writer, name) = (Vec::new(), "memory".into());
        let mut lines = JsonLines { writer, name, is_stdout: false, origin };
        let rows = [
            row(1 << 20, Duration::from_micros(125), None),
            row(1 << 22, Duration::from_micros(500), Some(Duration::from_micros(450))),
        ];
        for row in &rows {
            lines.write(row).unwrap();
        }
        let text = String::from_utf8(lines.writer).unwrap();
        insta::assert_snapshot!(text, @r#"
        {"collective":"all-gather","backend":"host","device_name":"a processor","ranks":4,"nodes":"1x4","algorithm":"direct","chunks":1,"engine":"host","kind":"streams","kinds":["streams"],"dtype":"u8","in_place":false,"outputs":1,"total_bytes":1048576,"block_bytes":262144,"iterations":20,"median_us":125.0,"p99_us":187.5,"max_us":250.0,"algbw_gbs":8.388608,"busbw_gbs":6.291456,"checked":true,"lanes":[],"tiers":[],"fallbacks":[],"version":"1.2.3","host":"node7","unix_time":7}
        {"collective":"all-gather","backend":"host","device_name":"a processor","ranks":4,"nodes":"1x4","algorithm":"direct","chunks":1,"engine":"host","kind":"streams","kinds":["streams"],"dtype":"u8","in_place":false,"outputs":1,"total_bytes":4194304,"block_bytes":1048576,"iterations":20,"median_us":500.0,"p99_us":750.0,"max_us":1000.0,"algbw_gbs":8.388608,"busbw_gbs":6.291456,"checked":true,"limit_us":450.0,"limit_share":0.9,"lanes":[],"tiers":[],"fallbacks":[],"version":"1.2.3","host":"node7","unix_time":7}
        "#);
        let read: Vec<Row> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(read, rows);
    }
}
