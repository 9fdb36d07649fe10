//! The progress bar, on a terminal only.

use std::fmt;
use std::io::Write;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// How far a run is, drawn on the standard error output where that is a terminal.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// A bar of so many sizes.
    pub(crate) fn new(sizes: usize) -> Self {
        let bar = ProgressBar::with_draw_target(Some(sizes as u64), ProgressDrawTarget::stderr());
        // The template is a constant; were it ever wrong, the default style serves.
        if let Ok(style) = ProgressStyle::with_template("{bar:24} {pos}/{len} sizes  {msg}") {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(250));
        Self { bar }
    }

    /// Says what is being done.
    pub(crate) fn doing(&self, what: impl fmt::Display) {
        self.bar.set_message(what.to_string());
    }

    /// One size is finished.
    pub(crate) fn advance(&self) {
        self.bar.inc(1);
    }

    /// Writes a line above the bar, also where no bar is drawn.
    pub(crate) fn line(&self, line: &str) {
        // A closed standard error leaves nobody to tell.
        self.bar.suspend(|| writeln!(std::io::stderr(), "{line}").ok());
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
