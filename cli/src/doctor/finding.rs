//! One thing that was looked at.

use serde::Serialize;

/// Whether something is as it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum State {
    /// As it should be.
    Ok,
    /// It works; something could be better.
    Warning,
    /// It is not there.
    Missing,
}

/// What was found, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    pub(super) topic: &'static str,
    pub(super) state: State,
    pub(super) found: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) advice: Option<String>,
}

impl Finding {
    /// All is well.
    pub(super) fn ok(topic: &'static str, found: impl Into<String>) -> Self {
        Self { topic, state: State::Ok, found: found.into(), advice: None }
    }

    /// It works, and could be better.
    pub(super) fn warning(
        topic: &'static str,
        found: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        let (found, advice) = (found.into(), Some(advice.into()));
        Self { topic, state: State::Warning, found, advice }
    }

    /// It is not there.
    pub(super) fn missing(
        topic: &'static str,
        found: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        let (found, advice) = (found.into(), Some(advice.into()));
        Self { topic, state: State::Missing, found, advice }
    }

    /// A line, and one below it for the advice.
    pub(super) fn text(&self, width: usize) -> String {
        let mark = match self.state {
            State::Ok => "ok",
            State::Warning => "--",
            State::Missing => "no",
        };
        let Self { topic, found, .. } = self;
        let line = format!("  {mark}  {topic:width$}  {found}\n");
        let Some(advice) = &self.advice else { return line };
        format!("{line}      {:width$}  → {advice}\n", "")
    }
}
