//! The top of the repository holds what belongs there and nothing else.

use std::collections::BTreeSet;

use super::Finding;
use super::tree::Tree;

/// Folders and files that must be there; beside them only names that begin with a dot.
const ENTRIES: [&str; 21] = [
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "Cargo.lock",
    "Cargo.toml",
    "LICENSE-APACHE",
    "LICENSE-MIT",
    "README.md",
    "backend-cuda",
    "backend-rdma",
    "backend-rocm",
    "cli",
    "collectives",
    "deny.toml",
    "docs",
    "hal",
    "layers",
    "rustfmt.toml",
    "src",
    "staged",
    "tests",
    "xtask",
];

/// Finds what is too much and what is missing.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let paths = tree.files().iter().map(|file| file.path.as_str());
    let seen: BTreeSet<&str> = paths.filter_map(|path| path.split('/').next()).collect();
    let finding = |entry: &str, what: &str, mend: &str| Finding {
        path: entry.to_owned(),
        line: 1,
        what: what.to_owned(),
        mend: mend.to_owned(),
    };
    let stray = seen.iter().filter(|entry| !ENTRIES.contains(entry) && !entry.starts_with('.'));
    let missing = ENTRIES.iter().filter(|entry| !seen.contains(*entry));
    stray
        .map(|entry| {
            let mend = "move it into a crate or docs/, or list it in xtask/src/tidy/top_level.rs";
            finding(entry, "it does not belong at the top of the repository", mend)
        })
        .chain(missing.map(|entry| finding(entry, "it is missing", "add it")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stray_and_a_missing_entry_are_findings() {
        let mut files: Vec<(&str, &str)> = ENTRIES.map(|entry| (entry, "")).to_vec();
        files.retain(|(entry, _)| *entry != "README.md");
        files.extend([("notes/today.txt", ""), (".gitignore", "")]);
        let texts: Vec<String> =
            check(&Tree::of(&files)).iter().map(|it| format!("{}: {}", it.path, it.what)).collect();
        assert_eq!(
            texts,
            ["notes: it does not belong at the top of the repository", "README.md: it is missing"]
        );
    }
}
