//! `cargo xtask tidy`: the rules of the tree that no compiler checks.
//!
//! Each rule is a function from what it looks at to its findings, with a test that holds a small
//! offender. The rules themselves are explained in CONTRIBUTING.md.

use std::fmt;

use crate::workspace;
use peerlane_rxe_vm::process::Outcome;

mod arrows;
mod length;
mod links;
mod machine;
mod mirror;
mod names;
mod records;
mod top_level;
mod tree;

use tree::Tree;

/// A broken rule, where, and how to mend it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Finding {
    path: String,
    /// From 1.
    line: usize,
    what: String,
    mend: String,
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
        arrows::check(&arrows::members(&metadata), &tree),
        top_level::check(&tree),
        mirror::check(&tree),
        length::check(&tree),
        names::check(&tree),
        machine::check(&tree),
        links::check(&tree),
        records::check(&tree),
    ]
    .concat();

    if findings.is_empty() {
        println!("tidy: {} files keep all rules", tree.files().len());
        return Ok(());
    }
    findings.iter().for_each(|finding| println!("{finding}"));
    Err(format!("tidy: {} findings", findings.len()).into())
}
