//! No file names a place of somebody's machine.

use super::Finding;
use super::tree::Tree;

/// Folders at the root of a file system in which people and machines keep their own things.
const ROOTS: [&str; 8] = ["home", "root", "Users", "work", "workspace", "mnt", "media", "build"];

/// Finds absolute paths into such folders, in every text file but the lock file.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in tree.files().iter().filter(|file| file.path != "Cargo.lock") {
        for (line, text) in file.lines() {
            let Some(root) = ROOTS.iter().find(|root| names_folder(text, root)) else { continue };
            findings.push(Finding {
                path: file.path.clone(),
                line,
                what: format!("a path below /{root} exists on one machine only"),
                mend: "name it relative to the repository, or take it from the environment".into(),
            });
        }
    }
    findings
}

/// Whether a path in `text` begins with the folder; not if it stands inside a longer path or an
/// address.
fn names_folder(text: &str, root: &str) -> bool {
    let folder = format!("/{root}/");
    let inside = |before: char| before.is_ascii_alphanumeric() || "_.-~$})".contains(before);
    text.match_indices(&folder).any(|(at, _)| !text[..at].ends_with(inside))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_of_a_machine_is_a_finding() {
        let offender = format!("first\nsee {}/me/notes\n", "/home");
        let harmless = "$HOME/work/x https://example.org/home/x a/root/b ../work/c /homes/d\n";
        let tree = Tree::of(&[("docs/a.md", &offender), ("docs/b.md", harmless)]);
        let findings = check(&tree);
        assert_eq!(findings.len(), 1);
        assert_eq!((findings[0].path.as_str(), findings[0].line), ("docs/a.md", 2));
        assert_eq!(findings[0].what, "a path below /home exists on one machine only");
    }
}
