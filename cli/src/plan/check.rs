//! Reads the plans of all ranks from a file and verifies them.
//!
//! A file holds what `peerlane plan` prints, edited or not, or plans of somebody else: text in which
//! every plan begins with the line that names its collective, or JSON.

use std::path::Path;

use peerlane::collective::Collective;
use peerlane::plan::Plan;
use serde::Deserialize;

use super::document;
use crate::error::{Failure, Result};

/// The first words of a plan.
const HEADERS: &[&str] = Collective::NAMES;

/// The JSON forms: what `--json` prints, or a bare list.
#[derive(Deserialize)]
#[serde(untagged)]
enum Json {
    Document { plans: Vec<Plan> },
    List(Vec<Plan>),
}

/// The verdict on the plans of the file.
///
/// # Errors
/// If the file cannot be read, is no set of plans, or has a fault.
pub(super) fn check(path: &Path) -> Result<String> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| Failure::io(format_args!("cannot read {}", path.display()), &error))?;
    let in_file = |failure: String| Failure::failed(format!("{}: {failure}", path.display()));
    let plans = parse(&text).map_err(in_file)?;
    if plans.is_empty() {
        return Err(in_file("holds no plan".to_owned()).with_advice(
            "each plan begins with a line such as `all-gather direct: rank 0 of 4, …`",
        ));
    }
    let verdict = document::verdict(&plans)?;
    Ok(format!("{verdict}\n"))
}

fn parse(text: &str) -> std::result::Result<Vec<Plan>, String> {
    if text.trim_start().starts_with(['{', '[']) {
        let json: Json = serde_json::from_str(text).map_err(|error| {
            format!("is neither a list of plans nor an object with them: {error}")
        })?;
        let (Json::Document { plans } | Json::List(plans)) = json;
        return Ok(plans);
    }
    sections(text).iter().map(|section| section.parse().map_err(said)).collect()
}

fn said(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// One text a plan. Blank lines stand for what comes before it, so that errors count the lines of
/// the file.
fn sections(text: &str) -> Vec<String> {
    let mut sections: Vec<String> = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let line = if line.trim_start().starts_with('#') { "" } else { line };
        if HEADERS.iter().any(|header| line.trim_start().starts_with(header))
            || (sections.is_empty() && !line.trim().is_empty())
        {
            sections.push("\n".repeat(number));
        }
        if let Some(section) = sections.last_mut() {
            section.push_str(line);
            section.push('\n');
        }
    }
    sections
}

#[cfg(test)]
mod tests {
    use peerlane::plan::Algorithm;
    use peerlane::schedule::{self, Shape};
    use peerlane::topology::Topology;

    use super::*;

    fn plans() -> Vec<Plan> {
        let topology = Topology::flat(3).unwrap();
        let shape = Shape { parts: 2, ..Shape::default() };
        schedule::plans(Algorithm::Direct, &topology, shape).unwrap()
    }

    #[test]
    fn text_and_json_are_read_back() {
        let plans = plans();
        let text: String = plans.iter().map(|plan| format!("# a remark\n\n{plan}")).collect();
        assert_eq!(parse(&text).unwrap(), plans);
        let list = serde_json::to_string(&plans).unwrap();
        assert_eq!(parse(&list).unwrap(), plans);
        assert_eq!(parse(&format!("{{\"plans\":{list},\"verdict\":\"\"}}")).unwrap(), plans);
        assert_eq!(parse("# nothing\n"), Ok(vec![]));
    }

    #[test]
    fn errors_count_the_lines_of_the_file() {
        let [first, second, _] = plans().try_into().unwrap();
        let text = format!("# a remark\n{first}\n{second}  jump to 3\n");
        let line = text.lines().count();
        let error = parse(&text).unwrap_err();
        assert!(error.starts_with(&format!("line {line} \"jump to 3\": ")), "{error}");
        let error = parse("hello\n").unwrap_err();
        assert!(error.starts_with("line 1 \"hello\": "), "{error}");
    }
}
