//! Checks that the book names errors and functions as programs in Rust, C and Python see them.

use std::collections::BTreeSet;

use super::{Finding, Tree};

/// The file that names the kinds of errors, in lines such as `Self::PeerLost => "peer lost",`.
const KINDS: &str = "hal/src/error.rs";
const HEADER: &str = "capi/include/peerlane.h";
const EXCEPTIONS: &str = "python/peerlane/_errors.py";
/// The page whose table has a row for each kind.
const PAGE: &str = "docs/book/troubleshooting.md";
/// The pages whose names of C functions and types are those of the header.
const PAGES_OF_C: [&str; 2] = [PAGE, "docs/book/uses/c.md"];

/// Checks all rules of this file.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    [kinds_of_errors(tree), names_of_c(tree)].concat()
}

/// Reports kinds of errors without a row on [`PAGE`], and rows that belong to no kind.
fn kinds_of_errors(tree: &Tree) -> Vec<Finding> {
    let rows: Vec<String> = kinds(text(tree, KINDS))
        .map(|(kind, name)| row_of_kind(kind, name, text(tree, EXCEPTIONS)))
        .collect();
    if rows.is_empty() {
        let mend = "mend xtask/src/tidy/errors.rs, which finds them by the arms of `name`";
        return vec![Finding::new(KINDS, 1, "no kinds of errors were found", mend)];
    }

    let mut findings = Vec::new();
    for row in &rows {
        if !text(tree, PAGE).lines().any(|line| line.starts_with(row)) {
            let what = format!("the table of errors has no row `{row} …`");
            findings.push(Finding::new(PAGE, 1, what, "add it, with the usual cause"));
        }
    }

    let lines = (1..).zip(text(tree, PAGE).lines());
    for (number, line) in lines.filter(|(_, line)| line.contains(" | `PEERLANE_STATUS_")) {
        if !rows.iter().any(|row| line.starts_with(row)) {
            let what = "the row names no kind of error as it is in Rust, C and Python";
            findings.push(Finding::new(PAGE, number, what, "mend its names, or remove it"));
        }
    }
    findings
}

/// Reports names of C functions and types that the header does not have.
fn names_of_c(tree: &Tree) -> Vec<Finding> {
    let header: BTreeSet<&str> = words(text(tree, HEADER)).collect();
    let is_unknown = |word: &&str| {
        let is_name = word.starts_with("peerlane_") || word.starts_with("PEERLANE_STATUS_");
        is_name && !header.contains(word)
    };

    let mut findings = Vec::new();
    for page in PAGES_OF_C.iter().filter_map(|path| tree.file(path)) {
        for (number, line) in page.lines() {
            findings.extend(words(line).filter(is_unknown).map(|word| {
                let what = format!("{HEADER} has no {word}");
                Finding::new(&page.path, number, what, "name what the header has")
            }));
        }
    }
    findings
}

fn text<'t>(tree: &'t Tree, path: &str) -> &'t str {
    tree.file(path).map_or("", |file| &file.text)
}

/// Returns the kinds of errors with their names for people, such as `PeerLost` and `peer lost`.
fn kinds(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.lines().filter_map(|line| {
        let arm = line.trim().strip_prefix("Self::")?.strip_suffix("\",")?;
        arm.split_once(" => \"")
    })
}

/// Returns the beginning of the row of a kind: its names in Rust, C and Python.
fn row_of_kind(kind: &str, name: &str, exceptions: &str) -> String {
    let status = name.to_uppercase().replace(' ', "_");
    let exception = match class_of_kind(exceptions, name) {
        Some(class) => format!("`peerlane.{class}`"),
        None => format!("`peerlane.Error`, `kind` is `\"{name}\"`"),
    };
    let section = kind.to_lowercase();
    format!("| [`{kind}`](#{section}) | `PEERLANE_STATUS_{status}` | {exception} |")
}

/// Returns the Python class of a kind, if the kind has a class of its own.
fn class_of_kind<'t>(exceptions: &'t str, name: &str) -> Option<&'t str> {
    let attribute = format!("kind = \"{name}\"");
    let (before, _) = exceptions.split_once(&attribute)?;
    let (_, class) = before.rsplit_once("\nclass ")?;
    class.split('(').next()
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
}

#[cfg(test)]
mod tests {
    use super::super::texts;
    use super::*;

    const KINDS_TEXT: &str = "Self::PeerLost => \"peer lost\",\n  Self::Other => \"other\",\n";
    const ROWS: &str = "\
        | [`PeerLost`](#peerlost) | `PEERLANE_STATUS_PEER_LOST` | `peerlane.PeerLost` | … |\n\
        | [`Other`](#other) | `PEERLANE_STATUS_OTHER` | `peerlane.Error`, `kind` is `\"other\"` | … |\n";

    fn tree(kinds: &str, page: &str) -> Tree {
        let exceptions = "\nclass Error(Exception):\n    kind: str = \"other\"\n\
            \nclass PeerLost(Error, ConnectionError):\n    kind = \"peer lost\"\n";
        let header = "PEERLANE_STATUS_PEER_LOST PEERLANE_STATUS_OTHER peerlane_error_rank(void)";
        Tree::from_texts(&[
            (KINDS, kinds),
            (HEADER, header),
            (EXCEPTIONS, exceptions),
            (PAGE, page),
        ])
    }

    #[test]
    fn a_kind_without_a_row_and_a_row_without_a_kind_are_findings() {
        assert_eq!(check(&tree(KINDS_TEXT, ROWS)), []);

        let renamed = ROWS.replace("peerlane.PeerLost", "peerlane.Error");
        assert_eq!(
            texts(&check(&tree(KINDS_TEXT, &renamed))),
            [
                "docs/book/troubleshooting.md:1 the table of errors has no row `| \
                 [`PeerLost`](#peerlost) | `PEERLANE_STATUS_PEER_LOST` | `peerlane.PeerLost` | …`",
                "docs/book/troubleshooting.md:1 the row names no kind of error as it is in Rust, C \
                 and Python",
            ]
        );

        let none = texts(&check(&tree("", ROWS)));
        assert_eq!(none, ["hal/src/error.rs:1 no kinds of errors were found"]);
    }

    #[test]
    fn a_name_that_the_header_does_not_have_is_a_finding() {
        let page = format!("{ROWS}`peerlane_error_rank()` and `peerlane_error_peer()`\n");
        assert_eq!(
            texts(&names_of_c(&tree(KINDS_TEXT, &page))),
            ["docs/book/troubleshooting.md:3 capi/include/peerlane.h has no peerlane_error_peer"]
        );
    }
}
