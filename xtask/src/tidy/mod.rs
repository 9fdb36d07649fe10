//! `cargo xtask tidy`: checks the rules of the tree that no compiler checks.
//!
//! A rule is a function from the files to its findings. Its test holds a small violation. CONTRIBUTING.md lists
//! the rules with their reasons.

use std::fmt;

use crate::workspace;
use peerlane_rxe_vm::process::Outcome;

mod arrows;
mod content;
mod mirror;
mod names;
mod tree;

use tree::Tree;

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
        mirror::check(&tree),
        names::check(&tree),
        content::check(&tree),
    ]
    .concat();

    for exception in names::unused_exceptions(&tree) {
        println!("tidy: note: xtask/src/tidy/exceptions.txt no longer needs `{exception}`");
    }
    if findings.is_empty() {
        println!("tidy: {} files follow all rules", tree.files().len());
        return Ok(());
    }
    findings.iter().for_each(|finding| println!("{finding}"));
    Err(format!("tidy: {} findings", findings.len()).into())
}

/// The findings as `path:line what`, for tests that compare them literally.
#[cfg(test)]
fn texts(findings: &[Finding]) -> Vec<String> {
    findings.iter().map(|it| format!("{}:{} {}", it.path, it.line, it.what)).collect()
}
