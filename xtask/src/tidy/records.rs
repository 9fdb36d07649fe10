//! Measurements are data that programs can read.

use super::Finding;
use super::tree::Tree;

/// Finds records under docs/perf that are no JSON.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    tree.ending_in(".json")
        .filter(|file| file.path.starts_with("docs/perf/"))
        .filter_map(|file| {
            let error = serde_json::from_str::<serde_json::Value>(&file.text).err()?;
            Some(Finding {
                path: file.path.clone(),
                line: error.line().max(1),
                what: format!("the record is no JSON: {error}"),
                mend: "write it again with `cargo xtask bench`, never by hand".into(),
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broken_record_is_a_finding() {
        let tree = Tree::of(&[
            ("docs/perf/good.json", "{\"rows\": []}\n"),
            ("docs/perf/bad.json", "{\n  \"rows\": [,]\n}\n"),
            ("elsewhere/bad.json", "{"),
        ]);
        let findings = check(&tree);
        assert_eq!(findings.len(), 1);
        assert_eq!((findings[0].path.as_str(), findings[0].line), ("docs/perf/bad.json", 2));
    }
}
