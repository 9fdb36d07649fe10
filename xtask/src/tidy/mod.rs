//! `cargo xtask tidy`: checks the rules of the tree that no compiler checks.
//!
//! A rule is a function from the files to its findings. Its test holds a small violation.
//! CONTRIBUTING.md lists the rules with their reasons.

use std::fmt;
use std::path::Path;
use std::process::Command;

use crate::{goals, kernels, workspace};
use peerlane_rxe_vm::process::{self, Outcome};

mod arrows;
mod circles;
mod content;
mod errors;
mod mirror;
mod names;
mod prose;

pub(crate) use content::{link_path, link_targets};

/// A violation of a rule, and how to fix it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Finding {
    path: String,
    /// Number of the line, from 1.
    line: usize,
    what: String,
    mend: String,
}

impl Finding {
    fn new(path: &str, line: usize, what: impl Into<String>, mend: impl Into<String>) -> Self {
        Self { path: path.to_owned(), line, what: what.into(), mend: mend.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}\n    {}", self.path, self.line, self.what, self.mend)
    }
}

/// Checks all rules over the files that git tracks or would track.
pub(crate) fn run() -> Outcome {
    let metadata = workspace::members()?;
    let tree = Tree::read(metadata.workspace_root.as_std_path())?;
    let findings = [
        arrows::check(&metadata, &tree),
        circles::check(&tree),
        mirror::check(&tree),
        names::check(&tree),
        prose::check(&tree),
        content::check(&tree),
        errors::check(&tree),
        check_kernels(&tree),
        check_goals(&tree),
    ]
    .concat();

    if findings.is_empty() {
        println!("tidy: {} files follow all rules", tree.files().len());
        return Ok(());
    }
    findings.iter().for_each(|finding| println!("{finding}"));
    Err(format!("tidy: {} findings", findings.len()).into())
}

/// Checks that the PTX of the kernels was generated from their source.
fn check_kernels(tree: &Tree) -> Vec<Finding> {
    let text = |path: &str| tree.file(path).map_or_else(String::new, |file| file.text.clone());
    let mend = "run `cargo xtask kernels`";

    let findings = kernels::NAMES.iter().filter_map(|name| {
        let ptx = kernels::ptx_path(name);
        let why = kernels::stale(&kernels::source(name, text), &text(&ptx))?;
        Some(Finding::new(&ptx, 1, why, mend))
    });
    findings.collect()
}

/// Checks that the page of the goals is generated from the data and the pages that there are.
fn check_goals(tree: &Tree) -> Vec<Finding> {
    let files = tree.files().iter().map(|file| (file.path.as_str(), file.text.as_str()));
    let stale = goals::stale(files).map(|(path, why)| {
        Finding::new(&path, 1, why, "correct docs/perf/goals.json, then run `cargo xtask goals`")
    });
    stale.into_iter().collect()
}

/// A file, with its path relative to the root.
#[derive(Debug)]
struct File {
    path: String,
    /// The contents; empty unless it is UTF-8.
    text: String,
}

/// The files of the workspace, without those that git ignores.
#[derive(Debug, Default)]
struct Tree(Vec<File>);

impl Tree {
    /// Reads the tree under `root`, which must be a git checkout.
    fn read(root: &Path) -> Outcome<Self> {
        let mut git = Command::new("git");
        git.current_dir(root).args(["ls-files", "-z", "--cached", "--others"]);
        git.arg("--exclude-standard");
        let listed = process::output(&mut git)?;
        let mut paths: Vec<&str> = listed.split_terminator('\0').collect();
        paths.sort_unstable();
        paths.dedup();

        let mut files = Vec::with_capacity(paths.len());
        for path in paths {
            // git lists a file that is deleted and not yet committed.
            if let Ok(bytes) = std::fs::read(root.join(path)) {
                let text = String::from_utf8(bytes).unwrap_or_default();
                files.push(File { path: path.to_owned(), text });
            }
        }
        Ok(Self(files))
    }

    #[cfg(test)]
    fn from_texts(files: &[(&str, &str)]) -> Self {
        let file = |&(path, text): &(&str, &str)| File { path: path.into(), text: text.into() };
        Self(files.iter().map(file).collect())
    }

    /// Returns all files, sorted by path.
    fn files(&self) -> &[File] {
        &self.0
    }

    fn file(&self, path: &str) -> Option<&File> {
        self.0.iter().find(|file| file.path == path)
    }

    /// Returns the files whose path ends so, such as `.rs`.
    fn ending_in(&self, ending: &str) -> impl Iterator<Item = &File> {
        self.0.iter().filter(move |file| file.path.ends_with(ending))
    }
}

impl File {
    /// Returns the lines with their numbers, from 1.
    fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        (1..).zip(self.text.lines())
    }

    /// Returns the number of the first line that fulfils the condition, or 1.
    fn line_where(&self, is_it: impl Fn(&str) -> bool) -> usize {
        self.lines().find(|(_, line)| is_it(line)).map_or(1, |(number, _)| number)
    }
}

/// Returns the findings as `path:line what`, for tests that compare them literally.
#[cfg(test)]
fn texts(findings: &[Finding]) -> Vec<String> {
    findings.iter().map(|it| format!("{}:{} {}", it.path, it.line, it.what)).collect()
}
