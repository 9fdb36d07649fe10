//! Links between pages of the repository lead somewhere.

use super::Finding;
use super::tree::Tree;

/// Finds links in Markdown files to files and folders that are not there.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in tree.ending_in(".md") {
        for (line, text) in file.lines() {
            for target in targets(text).filter(|target| !leads_to_a_file(tree, &file.path, target))
            {
                findings.push(Finding {
                    path: file.path.clone(),
                    line,
                    what: format!("the link to {target} leads nowhere"),
                    mend: "name an existing file, relative to the page".into(),
                });
            }
        }
    }
    findings
}

/// What the line links to inside the repository; pages of the web, sections of this page and items
/// of Rust documentation are for others to check.
fn targets(line: &str) -> impl Iterator<Item = &str> {
    let targets = line.split("](").skip(1).filter_map(|rest| Some(rest.split_once(')')?.0));
    targets
        .filter(|target| !target.contains("://") && !target.contains("::"))
        .filter_map(|target| target.split('#').next())
        .filter(|target| !target.is_empty())
}

fn leads_to_a_file(tree: &Tree, page: &str, target: &str) -> bool {
    let mut folders: Vec<&str> = page.split('/').collect();
    folders.pop();
    for part in target.trim_end_matches('/').split('/') {
        match part {
            "." => {}
            ".." => drop(folders.pop()),
            part => folders.push(part),
        }
    }
    let path = folders.join("/");
    let inside = |file: &str| file.strip_prefix(&path).is_some_and(|rest| rest.starts_with('/'));
    tree.files().iter().any(|file| file.path == path || inside(&file.path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_to_nothing_is_a_finding() {
        let page = "[a](adr) [b](adr/1.md#x) [c](../hal/a.rs)\n\
            [d](adr/2.md) [e](https://example.org) [f](#here) [g](crate::Rank) [h](ad)\n";
        let tree = Tree::of(&[("docs/page.md", page), ("docs/adr/1.md", ""), ("hal/a.rs", "")]);
        let texts: Vec<String> =
            check(&tree).iter().map(|it| format!("{}:{} {}", it.path, it.line, it.what)).collect();
        assert_eq!(
            texts,
            [
                "docs/page.md:2 the link to adr/2.md leads nowhere",
                "docs/page.md:2 the link to ad leads nowhere",
            ]
        );
    }
}
