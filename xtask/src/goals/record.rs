//! Reads goals and what was measured, and decides which goals are met.
//!
//! The state of a goal that is a number is computed from what was measured. The state of a text is
//! stated by `met`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::Deserialize;

use super::Pages;

/// Holds all goals, by subjects.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Record {
    /// The runs in which something was measured, by their names in [`Goal::run`].
    pub(super) runs: BTreeMap<String, Run>,
    pub(super) subjects: Vec<Subject>,
}

/// Describes a measurement on one machine.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Run {
    pub(super) machine: String,
    pub(super) date: String,
    /// The page with all figures, in the folder of the measurements.
    pub(super) page: Option<String>,
}

/// Holds the goals of one subject.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Subject {
    pub(super) title: String,
    pub(super) goals: Vec<Goal>,
}

/// Holds a goal, and what was measured.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Goal {
    pub(super) what: String,
    pub(super) goal: Bound,
    #[serde(default)]
    pub(super) unit: String,
    /// The measured values of a goal that is a number.
    #[serde(default)]
    pub(super) values: Vec<Value>,
    /// The result of a goal that is a text.
    pub(super) found: Option<String>,
    /// Whether [`Goal::found`] is what the goal asks for.
    met: Option<bool>,
    /// The name of the run.
    pub(super) run: Option<String>,
    /// What has not been measured.
    pub(super) missing: Option<String>,
    /// Why the goal is missed.
    pub(super) cause: Option<String>,
}

/// Says what a goal asks for.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Bound {
    AtLeast(f64),
    AtMost(f64),
    Between(f64, f64),
    Text(String),
}

/// Holds the label of a measured value, and the value.
#[derive(Debug, Deserialize)]
pub(super) struct Value(pub(super) String, pub(super) Figure);

/// Holds a figure, or the least and the largest of several.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum Figure {
    One(f64),
    Range(f64, f64),
}

/// Says whether a goal is met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Met,
    Missed,
    /// Nothing that was measured misses the goal, but not all of it was measured.
    NotMeasured,
}

/// Counts the goals in each state.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    pub(super) met: usize,
    pub(super) missed: usize,
    pub(super) not_measured: usize,
}

impl Record {
    /// Reads the data, and refuses what is incomplete or contradicts itself.
    pub(super) fn parse(data: &str, pages: &Pages<'_>) -> Result<Self, String> {
        let record: Self = serde_json::from_str(data).map_err(|error| error.to_string())?;
        for (name, run) in &record.runs {
            run.check(pages).map_err(|why| format!("run {name}: {why}"))?;
        }

        let mut used = BTreeSet::new();
        for goal in record.goals() {
            let context = |why: String| format!("goal \"{}\": {why}", goal.what);
            goal.check().map_err(context)?;
            if let Some(name) = &goal.run {
                used.insert(name);
                let is_known = record.runs.contains_key(name);
                is_known.then_some(()).ok_or_else(|| context(format!("there is no run {name}")))?;
            }
        }

        match record.runs.keys().find(|name| !used.contains(name)) {
            Some(name) => Err(format!("run {name}: no goal uses it")),
            None => Ok(record),
        }
    }

    /// Returns the goals of all subjects.
    fn goals(&self) -> impl Iterator<Item = &Goal> {
        self.subjects.iter().flat_map(|subject| &subject.goals)
    }

    /// Counts the goals of all subjects.
    pub(super) fn counts(&self) -> Counts {
        Counts::sum(self.goals())
    }
}

impl Run {
    fn check(&self, pages: &Pages<'_>) -> Result<(), String> {
        if self.machine.is_empty() {
            return Err("the machine is missing".to_owned());
        }

        let parts: Vec<&str> = self.date.split('-').collect();
        let is_date = parts.iter().map(|part| part.len()).eq([4, 2, 2])
            && parts.concat().chars().all(|digit| digit.is_ascii_digit());
        if !is_date {
            return Err(format!("the date {:?} is not like 2026-11-30", self.date));
        }

        match &self.page {
            Some(page) if !pages.contains_key(page.as_str()) => {
                Err(format!("there is no page {page}"))
            }
            _ => Ok(()),
        }
    }
}

impl Goal {
    /// Refuses a goal without what its state needs.
    fn check(&self) -> Result<(), String> {
        let is_measured = !self.values.is_empty() || self.found.is_some();
        let is_text = matches!(self.goal, Bound::Text(_));
        let state = self.state();

        // Only the state of a text can be stated, and only from what was found.
        let is_sound = match is_text {
            true => self.values.is_empty() && (self.met.is_none() || self.found.is_some()),
            false => self.found.is_none() && self.met.is_none(),
        };
        let refusal = if !is_sound {
            "numbers have `values`, texts have `found` and `met`"
        } else if !is_measured && self.missing.is_none() {
            "it has neither what was measured nor what is missing"
        } else if is_text && is_measured && self.met.is_none() && self.missing.is_none() {
            "`met` is missing"
        } else if is_measured && self.run.is_none() {
            "what was measured has no run, so no machine and no date"
        } else if !is_measured && self.run.is_some() {
            "it has a run, but nothing was measured"
        } else if state == State::Missed && self.cause.as_ref().is_none_or(String::is_empty) {
            "it is missed, and has no cause"
        } else if state != State::Missed && self.cause.is_some() {
            "it has a cause, but is not missed"
        } else {
            return Ok(());
        };
        Err(refusal.to_owned())
    }

    /// Returns the state. One value that misses the goal is a miss, whatever is missing.
    pub(super) fn state(&self) -> State {
        let is_missed = self.met == Some(false) || self.misses().next().is_some();
        match (is_missed, &self.missing) {
            (true, _) => State::Missed,
            (false, Some(_)) => State::NotMeasured,
            (false, None) => State::Met,
        }
    }

    /// Returns the values that miss the goal.
    pub(super) fn misses(&self) -> impl Iterator<Item = &Value> {
        self.values.iter().filter(|value| !self.goal.is_reached_by(value.1))
    }
}

impl Bound {
    fn is_reached_by(&self, figure: Figure) -> bool {
        let (least, largest) = figure.ends();
        match *self {
            Self::AtLeast(bound) => least >= bound,
            Self::AtMost(bound) => largest <= bound,
            Self::Between(low, high) => least >= low && largest <= high,
            Self::Text(_) => false,
        }
    }
}

impl Figure {
    /// Returns the least and the largest value.
    pub(super) fn ends(self) -> (f64, f64) {
        match self {
            Self::One(value) => (value, value),
            Self::Range(least, largest) => (least, largest),
        }
    }
}

impl Counts {
    /// Counts goals.
    pub(super) fn sum<'a>(goals: impl IntoIterator<Item = &'a Goal>) -> Self {
        let mut counts = Self::default();
        for goal in goals {
            match goal.state() {
                State::Met => counts.met += 1,
                State::Missed => counts.missed += 1,
                State::NotMeasured => counts.not_measured += 1,
            }
        }
        counts
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { met, missed, not_measured } = self;
        let all = met + missed + not_measured;
        write!(f, "{all} goals: {met} met, {missed} missed, {not_measured} not measured")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(goal: &str) -> Result<Record, String> {
        let runs = r#"{"a": {"machine": "2 cores", "date": "2026-11-30"}}"#;
        let goals = format!(
            r#"{{"what": "it", "goal": {{"at_least": 1}}, "values": [["", 1]], "run": "a"}}, {goal}"#
        );
        let subjects = format!(r#"[{{"title": "T", "goals": [{goals}]}}]"#);
        let data = format!(r#"{{"runs": {runs}, "subjects": {subjects}}}"#);
        Record::parse(&data, &Pages::new())
    }

    fn state(goal: &str) -> State {
        parse(goal).unwrap().subjects[0].goals[1].state()
    }

    fn refusal(goal: &str) -> String {
        parse(goal).unwrap_err().trim_start_matches("goal \"x\": ").to_owned()
    }

    #[test]
    fn states_are_computed_from_numbers() {
        let goal = |bound: &str, values: &str, rest: &str| {
            format!(r#"{{"what": "x", "goal": {bound}, "values": {values}, "run": "a"{rest}}}"#)
        };
        let cause = r#", "cause": "It is slow.""#;
        let cases = [
            (r#"{"at_least": 1.5}"#, r#"[["a", 1.5], ["b", [1.6, 2]]]"#, "", State::Met),
            (r#"{"at_least": 1.5}"#, r#"[["a", 1.5], ["b", [1.4, 2]]]"#, cause, State::Missed),
            (r#"{"at_most": 1.5}"#, r#"[["a", [1, 1.5]]]"#, "", State::Met),
            (r#"{"at_most": 1.5}"#, r#"[["a", [1, 1.6]]]"#, cause, State::Missed),
            (r#"{"between": [0.9, 1.1]}"#, r#"[["a", [0.9, 1.1]]]"#, "", State::Met),
            (r#"{"between": [0.9, 1.1]}"#, r#"[["a", 0.8]]"#, cause, State::Missed),
        ];
        for (bound, values, rest, expected) in cases {
            assert_eq!(state(&goal(bound, values, rest)), expected, "{bound} {values}");
        }

        let part = goal(r#"{"at_most": 2}"#, r#"[["a", 1]]"#, r#", "missing": "4 GPUs.""#);
        assert_eq!(state(&part), State::NotMeasured);
        let typed = goal(r#"{"at_most": 2}"#, r#"[["a", 1]]"#, r#", "met": true"#);
        assert_eq!(refusal(&typed), "numbers have `values`, texts have `found` and `met`");
    }

    #[test]
    fn states_of_texts_are_stated() {
        let goal = |rest: &str| format!(r#"{{"what": "x", "goal": {{"text": "no hang"}}{rest}}}"#);
        let found = r#", "found": "none", "run": "a""#;
        assert_eq!(state(&goal(&format!(r#"{found}, "met": true"#))), State::Met);
        let missed = format!(r#"{found}, "met": false, "cause": "It hangs.""#);
        assert_eq!(state(&goal(&missed)), State::Missed);
        assert_eq!(state(&goal(r#", "missing": "GPUs.""#)), State::NotMeasured);
        assert_eq!(refusal(&goal(found)), "`met` is missing");
    }

    #[test]
    fn incomplete_goals_are_refused() {
        let goal = |rest: &str| format!(r#"{{"what": "x", "goal": {{"at_most": 2}}{rest}}}"#);
        let cases = [
            (r#", "values": [["", 3]], "run": "a""#, "it is missed, and has no cause"),
            (r#", "values": [["", 3]], "run": "a", "cause": """#, "it is missed, and has no cause"),
            (r#", "values": [["", 1]]"#, "what was measured has no run, so no machine and no date"),
            (r#", "values": [["", 1]], "run": "b""#, "there is no run b"),
            (
                r#", "values": [["", 1]], "run": "a", "cause": "c""#,
                "it has a cause, but is not missed",
            ),
            ("", "it has neither what was measured nor what is missing"),
            (r#", "missing": "m", "run": "a""#, "it has a run, but nothing was measured"),
        ];
        for (rest, expected) in cases {
            assert_eq!(refusal(&goal(rest)), expected);
        }
    }

    #[test]
    fn incomplete_runs_are_refused() {
        let cases = [
            (r#""machine": "", "date": "2026-11-30""#, "the machine is missing"),
            (r#""machine": "m", "date": "today""#, "the date \"today\" is not like 2026-11-30"),
            (r#""machine": "m", "date": "2026-11-30", "page": "p.md""#, "there is no page p.md"),
            (r#""machine": "m", "date": "2026-11-30""#, "no goal uses it"),
        ];
        for (run, expected) in cases {
            let data = format!(r#"{{"runs": {{"a": {{{run}}}}}, "subjects": []}}"#);
            let error = Record::parse(&data, &Pages::new()).unwrap_err();
            assert_eq!(error, format!("run a: {expected}"));
        }
    }
}
