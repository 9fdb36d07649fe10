//! Checks the names of files, modules, types and functions, and where modules with submodules are.

use std::collections::BTreeSet;

use super::{File, Finding, Tree};

/// File names that name no topic.
const FILES: [&str; 4] = ["utils.rs", "util.rs", "helpers.rs", "misc.rs"];
/// Words that can precede `fn`, `struct` and `mod`.
const QUALIFIERS: [&str; 8] =
    ["pub", "pub(crate)", "pub(super)", "const", "async", "unsafe", "extern", "\"C\""];
/// Keywords that declare a type or a module.
const DECLARATIONS: [&str; 6] = ["struct", "enum", "trait", "type", "union", "mod"];
/// The nouns that docs/GLOSSARY.md refuses. The plural is refused too.
const NOUNS: [&str; 18] = [
    "bed", "cast", "chapter", "course", "crew", "found", "ground", "manner", "place", "play",
    "reach", "seat", "seen", "stage", "stop", "story", "strand", "way",
];
/// Reports names that say nothing and modules in the wrong place.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let folder = |file: &File| file.path.rsplit_once('/').map(|(folder, _)| folder.to_owned());
    let folders: BTreeSet<String> = tree.ending_in(".rs").filter_map(folder).collect();
    let mut findings = Vec::new();
    for file in tree.ending_in(".rs") {
        findings.extend(file_name(file));
        findings.extend(module_file(&folders, file));
        for (line, text) in file.lines() {
            findings.extend(getter(file, line, text));
            findings.extend(vague_noun(file, line, text));
        }
    }
    findings
}

fn file_name(file: &File) -> Option<Finding> {
    let name = file.path.rsplit('/').next().unwrap_or_default();
    FILES.contains(&name).then(|| {
        let mend = "name the file after what it holds, or move each item to where it is used";
        Finding::new(&file.path, 1, format!("{name} has no topic"), mend)
    })
}

/// Reports `foo.rs` beside a folder `foo/` with Rust files.
fn module_file(folders: &BTreeSet<String>, file: &File) -> Option<Finding> {
    let module = file.path.strip_suffix(".rs").filter(|module| folders.contains(*module))?;
    let what = format!("the module has submodules in {module}/");
    let mend =
        format!("move it to {module}/mod.rs, or to {module}/main.rs if it is a test program");
    Some(Finding::new(&file.path, 1, what, mend))
}

/// Reports the declaration of a function `get_…`.
fn getter(file: &File, line: usize, text: &str) -> Option<Finding> {
    let name = declaration(text, &["fn"])?;
    let topic = name.strip_prefix("get_")?;
    let what = format!("the function {name} says `get_`, which says nothing");
    Some(Finding::new(&file.path, line, what, format!("call it {topic}")))
}

/// Reports the declaration of a type or module whose name is a noun that docs/GLOSSARY.md refuses.
fn vague_noun(file: &File, line: usize, text: &str) -> Option<Finding> {
    let name = declaration(text, &DECLARATIONS)?;
    let singular = name.strip_suffix('s').unwrap_or(name);
    let noun = NOUNS.into_iter().find(|noun| singular.eq_ignore_ascii_case(noun))?;
    let what = format!("`{noun}` in the name {name} fits everything");
    let mend = "use the term for the thing itself; docs/GLOSSARY.md lists terms";
    Some(Finding::new(&file.path, line, what, mend))
}

/// Returns the name that a line declares with one of these keywords.
pub(super) fn declaration<'a>(text: &'a str, keywords: &[&str]) -> Option<&'a str> {
    let mut words = text.split_whitespace().skip_while(|word| QUALIFIERS.contains(word));
    words.next().filter(|word| keywords.contains(word))?;
    let is_end = |c: char| !c.is_alphanumeric() && c != '_';
    words.next()?.split(is_end).next()
}

#[cfg(test)]
mod tests {
    use super::super::texts;
    use super::*;

    #[test]
    fn names_without_a_topic_are_findings() {
        let source = "struct A;\n    pub(crate) const fn get_rank(&self) -> u32 {\n// fn get_x\n";
        let tree = Tree::from_texts(&[("a/src/utils.rs", ""), ("a/src/b.rs", source)]);
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

    #[test]
    fn vague_nouns_are_findings() {
        let source = [
            "pub struct Place<'a> {",
            "pub(crate) mod ways;",
            "let way = 1;",
            "enum Pathway {}",
            "type Seen = u32;",
            "struct Wayland;",
            "mod found {",
            "// struct Bed",
        ];
        let source = source.join("\n");
        let tree = Tree::from_texts(&[("cli/src/a.rs", &source)]);
        assert_eq!(
            texts(&check(&tree)),
            [
                "cli/src/a.rs:1 `place` in the name Place fits everything",
                "cli/src/a.rs:2 `way` in the name ways fits everything",
                "cli/src/a.rs:5 `seen` in the name Seen fits everything",
                "cli/src/a.rs:7 `found` in the name found fits everything",
            ]
        );
    }

    #[test]
    fn a_module_beside_its_folder_is_a_finding() {
        let tree = Tree::from_texts(&[
            ("a/src/b.rs", ""),
            ("a/src/b/c.rs", ""),
            ("a/src/bc.rs", ""),
            ("a/src/d/mod.rs", ""),
        ]);
        assert_eq!(texts(&check(&tree)), ["a/src/b.rs:1 the module has submodules in a/src/b/"]);
    }
}
