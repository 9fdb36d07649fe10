//! Names that say nothing.

use super::Finding;
use super::tree::Tree;

/// Files named after no topic.
const FILES: [&str; 4] = ["utils.rs", "util.rs", "helpers.rs", "misc.rs"];
/// What may stand before `fn`.
const QUALIFIERS: [&str; 8] =
    ["pub", "pub(crate)", "pub(super)", "const", "async", "unsafe", "extern", "\"C\""];

/// Finds such files, and functions called `get_…`.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in tree.ending_in(".rs") {
        let name = file.path.rsplit('/').next().unwrap_or_default();
        if FILES.contains(&name) {
            findings.push(Finding {
                path: file.path.clone(),
                line: 1,
                what: format!("{name} has no topic"),
                mend: "name the file after what it holds, or move each item to where it is used"
                    .into(),
            });
        }
        for (line, getter) in file.lines().filter_map(|(line, text)| Some((line, getter(text)?))) {
            findings.push(Finding {
                path: file.path.clone(),
                line,
                what: format!("the function {getter} says `get_`, which says nothing"),
                mend: format!("call it {}", getter.trim_start_matches("get_")),
            });
        }
    }
    findings
}

/// The name of the function that the line declares, if it begins with `get_`.
fn getter(line: &str) -> Option<&str> {
    let mut words = line.split_whitespace().skip_while(|word| QUALIFIERS.contains(word));
    if words.next()? != "fn" {
        return None;
    }
    let name = words.next()?.split(['(', '<']).next()?;
    name.starts_with("get_").then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_names_are_findings() {
        let source = "struct A;\n    pub(crate) const fn get_rank(&self) -> u32 {\n// fn get_x\n";
        let tree = Tree::of(&[("a/src/utils.rs", ""), ("a/src/b.rs", source)]);
        let findings: Vec<String> = check(&tree).iter().map(Finding::to_string).collect();
        assert_eq!(
            findings,
            [
                "a/src/utils.rs:1: utils.rs has no topic\n    \
                 name the file after what it holds, or move each item to where it is used",
                "a/src/b.rs:2: the function get_rank says `get_`, which says nothing\n    \
                 call it rank",
            ]
        );
    }
}
