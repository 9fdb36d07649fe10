//! `cargo xtask goals`: writes `docs/perf/README.md` from `docs/perf/goals.json`.
//!
//! | file | holds |
//! | --- | --- |
//! | `record` | the data: goals, what was measured, and which goals are met |
//! | `page` | the page that shows them |

use std::collections::BTreeMap;
use std::fs;

use crate::workspace;
use peerlane_rxe_vm::process::Outcome;

mod page;
mod record;

/// Holds the measurements; the path begins at the root of the workspace.
const FOLDER: &str = "docs/perf/";
/// Holds the data, in the folder of the measurements.
const DATA: &str = "goals.json";
/// Is generated, in the folder of the measurements.
const PAGE: &str = "README.md";

/// Contains the texts of the pages of measurements by their names, without the generated one.
type Pages<'a> = BTreeMap<&'a str, &'a str>;

/// Writes the page, and prints how many goals are met.
pub(crate) fn run() -> Outcome {
    let root = workspace::members()?.workspace_root;
    let folder = root.join(FOLDER);
    let mut files = Vec::new();
    for entry in fs::read_dir(&folder)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name == DATA || name.ends_with(".md") {
            files.push((FOLDER.to_owned() + &name, fs::read_to_string(path)?));
        }
    }

    let files = files.iter().map(|(path, text)| (path.as_str(), text.as_str()));
    let (page, counts) = generate(files)?;
    fs::write(folder.join(PAGE), page)?;
    println!("{FOLDER}{PAGE}: {counts}");
    Ok(())
}

/// Checks the generated page of a tree, whose files are paths with texts. Returns the file that is
/// wrong, and why; `None` if the page is what the data and the other pages make it.
pub(crate) fn stale<'a>(
    files: impl Iterator<Item = (&'a str, &'a str)> + Clone,
) -> Option<(String, String)> {
    match generate(files.clone()) {
        Err(error) => Some((FOLDER.to_owned() + DATA, error)),
        Ok((page, _)) => {
            let path = FOLDER.to_owned() + PAGE;
            let is_current = files.into_iter().any(|file| file == (path.as_str(), page.as_str()));
            (!is_current).then(|| (path, "it is not what the data and the pages make it".into()))
        }
    }
}

/// Returns the page that belongs to the files, and how many goals are met.
fn generate<'a>(
    files: impl Iterator<Item = (&'a str, &'a str)>,
) -> Result<(String, String), String> {
    let in_folder = files.filter_map(|(path, text)| Some((path.strip_prefix(FOLDER)?, text)));
    let mut data = "";
    let mut pages = Pages::new();
    for (name, text) in in_folder {
        if name == DATA {
            data = text;
        } else if name.ends_with(".md") && !name.contains('/') && name != PAGE {
            pages.insert(name, text);
        }
    }

    let record = record::Record::parse(data, &pages)?;
    Ok((page::text(&record, &pages), record.counts().to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const RECORD: &str = r#"{
        "runs": {"a": {"machine": "2 cores", "date": "2026-11-30", "page": "a.md"}},
        "subjects": [{"title": "Gathers", "goals": [
            {"what": "8 B", "goal": {"at_most": 2}, "unit": "µs", "values": [["", 1]], "run": "a"}
        ]}]
    }"#;

    #[test]
    fn a_page_that_the_data_do_not_make_is_stale() {
        let mut files = vec![
            ("docs/perf/goals.json", RECORD),
            ("docs/perf/a.md", "# A\n\nThe first page. It is met.\n"),
            ("docs/perf/b.md", "# B\n\nThe other page.\n"),
            ("docs/perf/probes/c.md", "# C\n"),
        ];
        let (page, counts) = generate(files.iter().copied()).unwrap();
        assert_eq!(counts, "1 goals: 1 met, 0 missed, 0 not measured");
        assert!(page.contains("| [B](b.md) | The other page. |"), "{page}");
        assert!(!page.contains("The first page"), "{page}");

        let what = stale(files.iter().copied()).unwrap();
        assert_eq!(what.0, "docs/perf/README.md");
        files.push(("docs/perf/README.md", &page));
        assert_eq!(stale(files.iter().copied()), None);
        files.remove(1);
        let (path, why) = stale(files.iter().copied()).unwrap();
        assert_eq!(path, "docs/perf/goals.json");
        assert_eq!(why, "run a: there is no page a.md");
    }
}
