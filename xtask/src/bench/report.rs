//! Writes the record and the page of a measurement, and compares figures with goals.

use std::fmt::Display;
use std::process::Command;

use crate::workspace;
use peerlane_rxe_vm::process::{self, Outcome};

/// The machine and the versions of a measurement.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub(super) struct Machine {
    pub(super) command: String,
    pub(super) date: String,
    pub(super) peerlane: String,
    pub(super) rustc: String,
    pub(super) kernel: String,
    pub(super) cpu: String,
    pub(super) cores: usize,
}

impl Machine {
    /// Describes this machine.
    pub(super) fn ask() -> Outcome<Self> {
        let line = |command: &mut Command| -> Outcome<String> {
            Ok(process::output(command)?.trim().to_owned())
        };
        Ok(Self {
            command: std::env::args()
                .skip(1)
                .fold("cargo xtask".into(), |done, word| done + " " + &word),
            date: line(Command::new("date").args(["-u", "+%Y-%m-%d %H:%M UTC"]))?,
            peerlane: peerlane(),
            rustc: line(Command::new("rustc").arg("--version"))?,
            kernel: line(Command::new("uname").arg("-sr"))?,
            cpu: processor(&std::fs::read_to_string("/proc/cpuinfo")?),
            cores: std::thread::available_parallelism()?.get(),
        })
    }

    /// Returns the head of a page: the title, the command and the versions.
    pub(super) fn head(&self, title: &str) -> String {
        let Self { command, date, peerlane, rustc, kernel, cpu, cores } = self;
        format!(
            "# {title}\n\nWritten by `{command}` on {date}; do not edit.\n\n\
             - Peerlane {peerlane}, {rustc}\n- {cores} cores of {cpu}, {kernel}\n"
        )
    }
}

/// Returns the version and, in a checkout with a history, the commit. It is marked if the tree is
/// changed elsewhere than in the pages and records that measurements write.
fn peerlane() -> String {
    let version = env!("CARGO_PKG_VERSION");
    let git = |words: &[&str]| process::output(Command::new("git").args(words));
    let Ok(commit) = git(&["describe", "--always", "--exclude", "*"]) else {
        return version.to_owned();
    };

    let changes = git(&["status", "--porcelain", "--", ".", ":!docs/perf"]).unwrap_or_default();
    let mark = if changes.trim().is_empty() { "" } else { "-dirty" };
    format!("{version} at {}{mark}", commit.trim())
}

fn processor(cpuinfo: &str) -> String {
    let model = |line: &str| Some(line.strip_prefix("model name")?.split_once(": ")?.1.to_owned());
    cpuinfo.lines().find_map(model).unwrap_or_else(|| "unknown".to_owned())
}

/// Writes `docs/perf/NAME.json` and `docs/perf/NAME.md`, then judges the goals.
pub(super) fn save(
    name: &str,
    record: &impl serde::Serialize,
    page: &str,
    goals: impl IntoIterator<Item = (String, Goals)>,
) -> Outcome {
    let folder = workspace::members()?.workspace_root.join("docs/perf");
    std::fs::create_dir_all(&folder)?;
    let json = serde_json::to_string_pretty(record)? + "\n";
    std::fs::write(folder.join(format!("{name}.json")), json)?;
    std::fs::write(folder.join(format!("{name}.md")), page)?;
    println!("\nwritten: docs/perf/{name}.json, docs/perf/{name}.md");
    judge(goals)
}

/// Returns a page: a template with a value for each `{name}`.
pub(super) fn page(template: &str, values: &[(&str, String)]) -> String {
    values.iter().fold(template.to_owned(), |page, (name, value)| {
        let name = format!("{{{name}}}");
        debug_assert!(page.contains(&name), "the template has no {name}");
        page.replace(&name, value)
    })
}

/// A column of a table: its title and the function that returns a row's cell. A title that begins with `<` is
/// aligned to the left, as texts are.
pub(crate) type Column<'a, R> = (&'a str, &'a dyn Fn(&R) -> String);

/// Returns a Markdown table with one line per row.
pub(crate) fn table<R>(rows: impl IntoIterator<Item = R>, columns: &[Column<'_, R>]) -> String {
    let mut table = head(columns);
    rows.into_iter().for_each(|row| table += &line(&row, columns));
    table
}

/// Returns the first two lines of a table.
pub(super) fn head<R>(columns: &[Column<'_, R>]) -> String {
    let titles = columns.iter().map(|(title, _)| title.trim_start_matches('<').to_owned());
    let rules = columns.iter().map(|(title, _)| if title.starts_with('<') { "---" } else { "--:" });
    joined(titles) + &joined(rules.map(str::to_owned))
}

/// Returns a row of a table.
pub(super) fn line<R>(row: &R, columns: &[Column<'_, R>]) -> String {
    joined(columns.iter().map(|(_, cell)| cell(row)))
}

/// Returns a row of cells.
pub(super) fn joined(cells: impl IntoIterator<Item = String>) -> String {
    format!("| {} |\n", cells.into_iter().collect::<Vec<_>>().join(" | "))
}

/// Returns a figure with this number of decimals, or a dash if it is absent or not a number.
pub(super) fn figure(value: impl Into<Option<f64>>, decimals: usize) -> String {
    let value = value.into().filter(|value| !value.is_nan());
    value.map_or_else(|| "–".to_owned(), |value| format!("{value:.decimals$}"))
}

/// Returns a size in the largest unit that divides it.
pub(super) fn size(bytes: u64) -> String {
    let units = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
    let fitting = units.iter().find(|(shift, _)| bytes > 0 && bytes.is_multiple_of(1 << shift));
    fitting
        .map_or_else(|| format!("{bytes} B"), |(shift, unit)| format!("{} {unit}", bytes >> shift))
}

/// The goals that a figure reaches and misses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Goals {
    reached: Vec<String>,
    missed: Vec<String>,
}

impl Goals {
    /// Expects a figure of at least `bound`. A figure that is absent, such as that of a library which is not
    /// installed, is no goal; one that is not a number is missed.
    pub(super) fn at_least(self, unit: &str, found: impl Into<Option<f64>>, bound: f64) -> Self {
        let Some(found) = found.into() else { return self };
        self.enter(found >= bound, &format!("≥ {bound} {unit}"), figure(found, 3))
    }

    /// Expects a figure of at most `bound`.
    pub(super) fn at_most(self, unit: &str, found: impl Into<Option<f64>>, bound: f64) -> Self {
        let Some(found) = found.into() else { return self };
        self.enter(found <= bound, &format!("≤ {bound} {unit}"), figure(found, 3))
    }

    /// Enters a goal of another kind.
    pub(super) fn enter(mut self, is_reached: bool, goal: &str, found: impl Display) -> Self {
        match is_reached {
            true => self.reached.push(goal.to_owned()),
            false => self.missed.push(format!("{goal} (found {found})")),
        }
        self
    }

    /// Returns the cell of a table.
    pub(super) fn cell(&self) -> String {
        match (self.reached.as_slice(), self.missed.as_slice()) {
            ([], []) => "–".to_owned(),
            (reached, []) => reached.join(", "),
            (_, missed) => format!("**missed**: {}", missed.join(", ")),
        }
    }

    /// Returns whether a goal is missed.
    pub(super) fn are_missed(&self) -> bool {
        !self.missed.is_empty()
    }
}

/// Fails if goals are missed, and names what missed them.
pub(super) fn judge(all: impl IntoIterator<Item = (String, Goals)>) -> Outcome {
    let missed = all.into_iter().filter(|(_, goals)| goals.are_missed());
    let missed: Vec<String> =
        missed.map(|(what, goals)| format!("{what}: {}", goals.missed.join(", "))).collect();
    match missed.as_slice() {
        [] => Ok(()),
        missed => Err(format!("goals are missed:\n{}", missed.join("\n")).into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processor_is_described() {
        let info = "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n";
        assert_eq!(processor(info), "Some CPU @ 2 GHz");
        assert_eq!(processor("processor\t: 0\n"), "unknown");
    }

    #[test]
    fn sizes_are_short() {
        let sizes = [1000, 1024, 262_144, 1 << 20, 3 << 29].map(size);
        assert_eq!(sizes, ["1000 B", "1 KiB", "256 KiB", "1 MiB", "1536 MiB"]);
    }

    #[test]
    fn a_template_is_filled() {
        let values = [("a", "1".to_owned()), ("b", "2".to_owned())];
        assert_eq!(page("{a} and {b}, {a}\n", &values), "1 and 2, 1\n");
    }

    #[test]
    fn a_table_has_a_head_and_rows() {
        let columns: [Column<'_, f64>; 2] =
            [("value", &|value| figure(*value, 1)), ("<name", &|_| figure(None, 1))];
        assert_eq!(
            table([1.25, 3.0], &columns),
            "| value | name |\n| --: | --- |\n| 1.2 | – |\n| 3.0 | – |\n"
        );
    }

    #[test]
    fn goals_are_reached_or_missed() {
        assert_eq!(Goals::default().cell(), "–");
        let goals = Goals::default()
            .at_least("× Open MPI", 1.5, 1.3)
            .at_least("× NCCL", None, 1.3)
            .at_most("µs", 8.0, 8.0);
        assert_eq!(goals.cell(), "≥ 1.3 × Open MPI, ≤ 8 µs");
        assert!(judge([("a".to_owned(), goals.clone())]).is_ok());
        let goals = goals.at_least("of the limit", f64::NAN, 0.9).at_most("µs", 9.123, 8.0);
        assert_eq!(goals.cell(), "**missed**: ≥ 0.9 of the limit (found –), ≤ 8 µs (found 9.123)");
        let error = judge([("1 MiB".to_owned(), goals)]).unwrap_err().to_string();
        assert!(error.ends_with("\n1 MiB: ≥ 0.9 of the limit (found –), ≤ 8 µs (found 9.123)"));
    }
}
