//! Writes the page that shows the goals and lists the other pages of measurements.

use std::collections::BTreeSet;

use super::Pages;
use super::record::{Bound, Counts, Figure, Goal, Record, State, Subject, Value};
use crate::bench::report::{Column, table};

/// Limits how many values a cell shows one by one.
const VALUES_MAX: usize = 4;

/// Stands before the tables.
const INTRODUCTION: &str = "\
# Measurements

Written by `cargo xtask goals` from [goals.json](goals.json); do not edit.

This folder holds what was measured. A page says on which machine, with which versions, by which command and when, and a JSON
file beside it holds the record of a program. The [performance chapter](../book/performance.md) says what follows for users.
This page compares the goals of Peerlane with what was measured.

- *met*: every value reaches the goal. *missed*, 1 of 6: one of six values does not. The last column says why.
- *not measured*: the last column says what is missing. *In part* means that there are values, and none misses the goal.
- *Run 2* is the second machine and date above a table.
- × NCCL, × Open MPI and so on are the time of the other library divided by that of Peerlane; above 1, Peerlane is faster.
  *new ÷ old* is a ratio of times too, but below 1 the new version is faster.
- A range is from the least to the largest value. Rows with more than four values show those that miss the goal.
";

/// Returns the page.
pub(super) fn text(record: &Record, pages: &Pages<'_>) -> String {
    let mut page = format!("{INTRODUCTION}\n{}.\n\n", record.counts());
    let counts = |subject: &&Subject| Counts::sum(&subject.goals);
    let columns: [Column<'_, &Subject>; 4] = [
        ("<subject", &|it| format!("[{}](#{})", it.title, anchor(&it.title))),
        ("met", &|it| counts(it).met.to_string()),
        ("missed", &|it| counts(it).missed.to_string()),
        ("not measured", &|it| counts(it).not_measured.to_string()),
    ];
    page += &table(&record.subjects, &columns);

    for subject in &record.subjects {
        page += &section(record, subject, pages);
    }
    page + &other_pages(record, pages)
}

/// Returns the anchor of a heading of letters and spaces.
fn anchor(title: &str) -> String {
    title.to_lowercase().replace(' ', "-")
}

/// Returns the runs of a subject in their order, and a table of its goals.
fn section(record: &Record, subject: &Subject, pages: &Pages<'_>) -> String {
    let mut runs: Vec<&str> = Vec::new();
    for name in subject.goals.iter().filter_map(|goal| goal.run.as_deref()) {
        if !runs.contains(&name) {
            runs.push(name);
        }
    }

    let mut section = format!("\n## {}\n\n", subject.title);
    for (number, name) in (1..).zip(&runs) {
        let run = &record.runs[*name];
        let page = run.page.as_deref().map(|page| format!("; {}", link(page, pages)));
        let (machine, date) = (&run.machine, &run.date);
        section += &format!("{number}. {machine}; {date}{}\n", page.unwrap_or_default());
    }
    if !runs.is_empty() {
        section.push('\n');
    }

    // The number of the run stands in each row only if there are several.
    let number = |goal: &Goal| {
        let name = goal.run.as_deref().filter(|_| runs.len() > 1)?;
        Some(format!("Run {}.", runs.iter().position(|run| *run == name)? + 1))
    };
    let columns: [Column<'_, &Goal>; 5] = [
        ("<what", &|goal| cell(&goal.what)),
        ("<goal", &|goal| bound(goal)),
        ("<measured", &|goal| measured(goal)),
        ("<state", &|goal| state(goal)),
        ("<cause, or what is missing", &|goal| notes(goal, number(goal))),
    ];
    section + &table(&subject.goals, &columns)
}

/// Returns a text as it can stand in a cell.
fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

fn bound(goal: &Goal) -> String {
    let bound = match &goal.goal {
        Bound::AtLeast(bound) => format!("≥ {bound}"),
        Bound::AtMost(0.0) => "none".to_owned(),
        Bound::AtMost(bound) => format!("≤ {bound}"),
        Bound::Between(low, high) => format!("{low} to {high}"),
        Bound::Text(text) => cell(text),
    };
    format!("{bound} {}", goal.unit).trim_end().to_owned()
}

fn measured(goal: &Goal) -> String {
    if let Some(found) = &goal.found {
        return cell(found);
    }

    let all = || goal.values.iter();
    let ends = || all().map(|value| value.1.ends());
    let (least, largest) = ends().fold((f64::INFINITY, f64::NEG_INFINITY), |so_far, ends| {
        (so_far.0.min(ends.0), so_far.1.max(ends.1))
    });
    match goal.values.len() {
        0 => "–".to_owned(),
        1..=VALUES_MAX => list(all()),
        _ if goal.state() == State::Missed => {
            let range = figure(Figure::Range(least, largest));
            format!("{range}, but {}", list(goal.misses()))
        }
        _ => figure(Figure::Range(least, largest)),
    }
}

/// Returns values, each with its label.
fn list<'a>(values: impl Iterator<Item = &'a Value>) -> String {
    let one = |Value(label, value): &Value| match label.as_str() {
        "" => figure(*value),
        label => format!("{} ({})", figure(*value), cell(label)),
    };
    values.map(one).collect::<Vec<_>>().join("; ")
}

fn figure(figure: Figure) -> String {
    match figure {
        Figure::One(value) => value.to_string(),
        Figure::Range(least, largest) => format!("{least} to {largest}"),
    }
}

fn state(goal: &Goal) -> String {
    let is_measured = goal.found.is_some() || !goal.values.is_empty();
    match goal.state() {
        State::Met => "met".to_owned(),
        State::Missed if goal.values.len() > 1 => {
            format!("**missed**, {} of {}", goal.misses().count(), goal.values.len())
        }
        State::Missed => "**missed**".to_owned(),
        State::NotMeasured if is_measured => "not measured, in part".to_owned(),
        State::NotMeasured => "not measured".to_owned(),
    }
}

fn notes(goal: &Goal, run: Option<String>) -> String {
    let missing = goal.missing.as_deref().map(|missing| match goal.state() {
        State::Missed => format!("Not measured: {missing}"),
        _ => missing.to_owned(),
    });
    let notes: Vec<String> = [goal.cause.clone(), missing, run].into_iter().flatten().collect();
    cell(&notes.join(" "))
}

/// Returns the list of the pages that no run names, with their first sentences.
fn other_pages(record: &Record, pages: &Pages<'_>) -> String {
    let named: BTreeSet<&str> =
        record.runs.values().filter_map(|run| run.page.as_deref()).collect();
    let others = pages.iter().filter(|(name, _)| !named.contains(*name));
    let columns: [Column<'_, (&&str, &&str)>; 2] = [
        ("<page", &|(name, _)| link(name, pages)),
        ("<first sentence", &|(_, text)| cell(&first_sentence(text))),
    ];
    format!("\n## Other pages\n\n{}", table(others, &columns))
}

/// Returns a link to a page by its title.
fn link(name: &str, pages: &Pages<'_>) -> String {
    let first = pages.get(name).and_then(|text| text.lines().next()).unwrap_or_default();
    format!("[{}]({name})", cell(first.trim_start_matches('#').trim()))
}

/// Returns the first sentence of the text before the first section. A page without a text there has
/// a list, whose first entry says where it was measured, or the command that has written it.
fn first_sentence(page: &str) -> String {
    let head = page.split("\n## ").next().unwrap_or_default();
    let paragraphs = || head.split("\n\n").map(str::trim).skip(1);
    let is_text = |paragraph: &&str| {
        let others = ["- ", "|", "```", "<!--", "Written by ", "Command: "];
        !others.iter().any(|other| paragraph.starts_with(other))
    };
    let paragraph = paragraphs().find(is_text).or(paragraphs().next()).unwrap_or_default();
    let paragraph = paragraph.trim_start_matches("- ").split("\n- ").next().unwrap_or_default();

    let line = paragraph.split_whitespace().collect::<Vec<_>>().join(" ");
    let sentence = line.split(". ").next().unwrap_or_default();
    let sentence = sentence.trim_end_matches("; do not edit.");
    format!("{}.", sentence.trim_end_matches(['.', ':']))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_shows_goals_and_lists_other_pages() {
        let data = r#"{
            "runs": {
                "a": {"machine": "2 cores", "date": "2026-11-30", "page": "a.md"},
                "b": {"machine": "2 GPUs", "date": "2026-11-29"}
            },
            "subjects": [{"title": "Some goals", "goals": [
                {"what": "8 B", "goal": {"at_most": 2}, "unit": "µs", "values": [["", [1, 1.5]]], "run": "a"},
                {"what": "ratios", "goal": {"between": [0.9, 1.1]}, "run": "b", "cause": "It is slow.",
                 "values": [["1", 1], ["2", 1], ["3", 1], ["4", [0.8, 0.9]], ["5", 1.2]]},
                {"what": "kills", "goal": {"text": "named"}, "found": "3 | 3 are", "run": "a",
                 "missing": "4 GPUs."}
            ]}]
        }"#;
        let pages = Pages::from([
            ("a.md", "# Page a\n"),
            ("b.md", "# Page b\n\nWritten by `x`.\n\n- 2 cores\n\nIt tells\nall. More.\n"),
            ("c.md", "# Page c\n\n- 2 cores\n  of AMD\n- a\n\n| a |\n| - |\n\n## S\n\nText.\n"),
            ("d.md", "# Page d\n\nWritten by `x` today; do not edit.\n\n- 2 cores\n"),
        ]);
        let page = text(&Record::parse(data, &pages).unwrap(), &pages);
        let expected = "
3 goals: 1 met, 1 missed, 1 not measured.

| subject | met | missed | not measured |
| --- | --: | --: | --: |
| [Some goals](#some-goals) | 1 | 1 | 1 |

## Some goals

1. 2 cores; 2026-11-30; [Page a](a.md)
2. 2 GPUs; 2026-11-29

| what | goal | measured | state | cause, or what is missing |
| --- | --- | --- | --- | --- |
| 8 B | ≤ 2 µs | 1 to 1.5 | met | Run 1. |
| ratios | 0.9 to 1.1 | 0.8 to 1.2, but 0.8 to 0.9 (4); 1.2 (5) | **missed**, 2 of 5 | It is slow. Run 2. |
| kills | named | 3 \\| 3 are | not measured, in part | 4 GPUs. Run 1. |

## Other pages

| page | first sentence |
| --- | --- |
| [Page b](b.md) | It tells all. |
| [Page c](c.md) | 2 cores of AMD. |
| [Page d](d.md) | Written by `x` today. |
";
        assert_eq!(page.strip_prefix(INTRODUCTION), Some(expected));
    }
}
