//! Files stay short enough to be read in one go.

use super::Finding;
use super::tree::Tree;

/// The most lines of a source file, tests included.
const LINES_MAX: usize = 400;

/// Finds Rust files that are longer.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    tree.ending_in(".rs")
        .map(|file| (file, file.text.lines().count()))
        .filter(|(_, lines)| *lines > LINES_MAX)
        .map(|(file, lines)| Finding {
            path: file.path.clone(),
            line: LINES_MAX + 1,
            what: format!("the file has {lines} lines, at most {LINES_MAX} are allowed"),
            mend: "split it by topic, each part with a name of its own".into(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_too_many_is_a_finding() {
        let (short, long) = ("//\n".repeat(LINES_MAX), "//\n".repeat(LINES_MAX + 1));
        let tree = Tree::of(&[("a.rs", &short), ("b.rs", &long), ("c.md", &long)]);
        let findings = check(&tree);
        assert_eq!(findings.len(), 1);
        assert_eq!(
            findings[0].to_string(),
            "b.rs:401: the file has 401 lines, at most 400 are allowed\n    \
             split it by topic, each part with a name of its own"
        );
    }
}
