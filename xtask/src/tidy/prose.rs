//! Checks how function bodies and comments read, in files outside of tests.
//!
//! A body of many lines has paragraphs, a summary begins with a verb, comments are short lines, and
//! names can be searched. Files that nobody has rewritten yet are listed in `exempt.txt`. A file on
//! the list that follows the rules is a finding, so that the list shrinks with the files that
//! changes touch.

use std::collections::BTreeSet;

use super::names::declaration;
use super::{File, Finding, Tree};

/// The files that are exempt, one path per line.
const EXEMPT: &str = "xtask/src/tidy/exempt.txt";
/// The template of new backends, which follow the rules from the beginning.
const TEMPLATE: &str = "tests/loopback/src/";
/// The least number of lines of a body that must have a blank line or a comment.
const BODY_LINES: usize = 15;
/// The greatest width of a line with a comment.
const WIDTH_MAX: usize = 100;
/// Names of functions that occur in every file, so that no search finds their callers.
const VAGUE_NAMES: [&str; 9] = ["of", "at", "on", "give", "one", "enter", "number", "ask", "note"];
/// Phrases of comments that readers stumble over, and what to write instead.
const PHRASES: [(&str, &str); 5] = [
    ("also if", "even if"),
    ("must get", "must be passed, or takes"),
    ("with which", "a verb: `Computes …` instead of `… with which …`"),
    ("for which", "a verb, or `whose`"),
    ("in turns", "by turns"),
];
/// Verbs of summaries that had a meaning of their own in this project, and what to write instead.
const VERBS: [(&str, &str); 4] =
    [("Names", "Returns"), ("Enters", "Adds"), ("Gives", "Returns"), ("Drives", "Polls")];

/// Reports what readers stumble over, and files that are exempt without need.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let exempt: BTreeSet<&str> = tree.file(EXEMPT).map_or("", |file| &file.text).lines().collect();
    let mut findings = Vec::new();

    for file in tree.ending_in(".rs").filter(|file| is_product(file)) {
        let found = file_findings(file);
        if !exempt.contains(file.path.as_str()) {
            findings.extend(found);
        } else if found.is_empty() {
            let line = tree.file(EXEMPT).map_or(1, |list| list.line_where(|it| it == file.path));
            let what = format!("{} follows the rules of prose", file.path);
            findings.push(Finding::new(EXEMPT, line, what, "remove it from the list"));
        }
    }

    for path in exempt {
        if tree.file(path).is_none() {
            let what = format!("there is no file {path}");
            findings.push(Finding::new(EXEMPT, 1, what, "remove it from the list"));
        }
    }
    findings
}

/// Returns whether a file belongs to the product or its tools, and not to tests or generated code.
fn is_product(file: &File) -> bool {
    if file.path.starts_with(TEMPLATE) {
        return true;
    }

    let mut parts = file.path.split('/');
    let is_test = parts.any(|part| ["tests", "examples", "benches", "tests.rs"].contains(&part));
    !is_test && !file.text.starts_with(super::content::GENERATED)
}

fn file_findings(file: &File) -> Vec<Finding> {
    let lines = without_tests(file);
    let mut findings = Vec::new();

    for (index, &(number, text)) in lines.iter().enumerate() {
        findings.extend(comment(file, number, text));
        findings.extend(module_summary(file, &lines, index));
        let Some(name) = declaration(text, &["fn"]) else { continue };

        if VAGUE_NAMES.contains(&name) {
            let what = format!("the function {name} cannot be searched");
            let mend = "name it after what it returns or does, such as `from_hosts`";
            findings.push(Finding::new(&file.path, number, what, mend));
        }
        findings.extend(function_summary(file, &lines, index));
        findings.extend(bare_body(file, name, &lines[index..]));
    }
    findings
}

/// Returns the lines of a file without its modules of tests, each with its number.
fn without_tests(file: &File) -> Vec<(usize, &str)> {
    let all: Vec<_> = file.lines().collect();
    let mut kept = Vec::new();
    let mut index = 0;

    while let Some(&(number, text)) = all.get(index) {
        let next = all.get(index + 1).map_or("", |(_, next)| next.trim_start());
        if text.trim_start().starts_with("#[cfg(test)]") && next.starts_with("mod ") {
            index += 1 + item_lines(&all[index + 1..]);
        } else {
            kept.push((number, text));
            index += 1;
        }
    }
    kept
}

/// Returns the number of lines of the item that begins in the first line.
fn item_lines(lines: &[(usize, &str)]) -> usize {
    let mut depth = 0;
    for (index, (_, text)) in lines.iter().enumerate() {
        depth += braces(text);
        let ends = text.contains('}') || text.trim_end().ends_with(';');
        if depth == 0 && ends {
            return index + 1;
        }
    }
    lines.len()
}

/// Returns the number of opening braces of a line of code, less that of closing ones.
fn braces(line: &str) -> i32 {
    let mut depth = 0;
    let mut in_text = false;
    let mut chars = line.chars().peekable();

    while let Some(c) = chars.next() {
        match c {
            '\\' => drop(chars.next()),
            '"' => in_text = !in_text,
            _ if in_text => {}
            '/' if chars.peek() == Some(&'/') => break,
            // A brace in quotes is a character. Lifetimes have one quote only, and no brace behind
            // it.
            '\'' if matches!(chars.peek(), Some('{' | '}' | '"')) => drop(chars.next()),
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
    }
    depth
}

/// Returns the text of a comment that has a line of its own, without the marks.
fn comment_text(line: &str) -> Option<&str> {
    let text = line.trim_start().strip_prefix("//")?;
    Some(text.trim_start_matches(['/', '!']).trim_start())
}

/// Reports a comment that is too wide or has a phrase that readers stumble over.
fn comment(file: &File, number: usize, line: &str) -> Option<Finding> {
    let text = comment_text(line)?;
    // Rows of tables and addresses cannot be wrapped.
    if line.chars().count() > WIDTH_MAX && !text.starts_with('|') && !text.contains("://") {
        let what = format!("the comment is wider than {WIDTH_MAX} columns");
        return Some(Finding::new(&file.path, number, what, "wrap it"));
    }

    let lower = text.to_lowercase();
    let is_in = |phrase: &str| {
        let mut found = lower.match_indices(phrase);
        found.any(|(start, _)| !lower[..start].ends_with(|c: char| c.is_alphanumeric()))
    };
    let (phrase, instead) = PHRASES.into_iter().find(|(phrase, _)| is_in(phrase))?;
    let what = format!("the comment says `{phrase}`");
    Some(Finding::new(&file.path, number, what, format!("write {instead}")))
}

/// Reports the summary of a module that does not begin with a verb.
fn module_summary(file: &File, lines: &[(usize, &str)], index: usize) -> Option<Finding> {
    let (number, text) = lines[index];
    // The summary of a crate may be a noun: it stands beside the name of the crate.
    let is_crate = ["lib.rs", "main.rs"].iter().any(|name| file.path.ends_with(name));
    if index > 0 || is_crate || !text.starts_with("//! ") {
        return None;
    }
    summary(file, number, comment_text(text)?)
}

/// Reports the summary of the function of a line if it does not begin with a verb.
fn function_summary(file: &File, lines: &[(usize, &str)], index: usize) -> Option<Finding> {
    let is_above = |line: &str| {
        let line = line.trim_start();
        line.starts_with("///") || line.starts_with("#[") || line.starts_with("//")
    };
    let above = lines[..index].iter().rev().take_while(|(_, line)| is_above(line));
    let (number, first) = above.filter(|(_, line)| line.trim_start().starts_with("///")).last()?;
    summary(file, *number, comment_text(first)?)
}

/// Reports a summary that does not begin with a verb in the third person, or with one of our own.
fn summary(file: &File, number: usize, text: &str) -> Option<Finding> {
    // The modules of this program begin with their command: "`cargo xtask tidy`: checks …".
    let command = text.strip_prefix("`cargo ").and_then(|rest| rest.split_once("`: "));
    let text = command.map_or(text, |(_, what)| what);
    let first: String = text.chars().take_while(|c| c.is_alphanumeric()).collect();
    if let Some((verb, instead)) = VERBS.into_iter().find(|(verb, _)| first == *verb) {
        let what = format!("the summary begins with `{verb}`");
        return Some(Finding::new(&file.path, number, what, format!("write {instead} …")));
    }

    let is_word = command.is_some() || first.starts_with(|c: char| c.is_uppercase());
    let is_verb = is_word && first.ends_with('s');
    (!is_verb && !text.is_empty()).then(|| {
        let what = format!("the summary begins with `{first}`");
        let mend = "begin with a verb in the third person, such as `Returns …`";
        Finding::new(&file.path, number, what, mend)
    })
}

/// Reports a function, declared in the first line, whose long body has neither a blank line nor a
/// comment.
fn bare_body(file: &File, name: &str, lines: &[(usize, &str)]) -> Option<Finding> {
    let item = &lines[..item_lines(lines)];
    let head = item.iter().position(|(_, line)| braces(line) > 0)?;
    let body = item.get(head + 1..item.len() - 1)?;

    let is_why = |line: &str| comment_text(line).is_some_and(|text| !text.starts_with("SAFETY"));
    let has_paragraphs = body.iter().any(|(_, line)| line.trim().is_empty() || is_why(line));
    (body.len() >= BODY_LINES && !has_paragraphs).then(|| {
        let what = format!("{name} has {} lines without a blank line or a comment", body.len());
        let mend = "put a blank line between its steps, and say why where that is not obvious";
        Finding::new(&file.path, lines[0].0, what, mend)
    })
}

#[cfg(test)]
mod tests {
    use super::super::texts;
    use super::*;

    fn found(text: &str) -> Vec<String> {
        texts(&check(&Tree::from_texts(&[("a/src/b.rs", text)])))
    }

    #[test]
    fn a_long_body_has_paragraphs() {
        let body =
            |inner: &str| format!("fn f() {{\n{}{inner}}}\n", "    let a = '{';\n".repeat(15));
        let bare = ["a/src/b.rs:1 f has 15 lines without a blank line or a comment"];
        assert_eq!(found(&body("")), bare);
        let safety = body("    // SAFETY: it is safe.\n");
        assert_eq!(found(&safety).len(), 1);
        for inner in ["\n", "    // Why it is so.\n"] {
            assert_eq!(found(&body(inner)), [""; 0]);
        }
        let short = format!("fn f() {{\n{}}}\n", "    let a = \"{\";\n".repeat(14));
        assert_eq!(found(&short), [""; 0]);
        assert_eq!(found(&format!("#[cfg(test)]\nmod tests {{\n{}}}\n", body(""))), [""; 0]);
    }

    #[test]
    fn a_summary_begins_with_a_verb() {
        let text = "//! A module.\n\n/// Names a thing.\n///\n/// More.\n#[must_use]\nfn f() {}\n\
                    /// The rate.\npub fn g() {}\n/// Returns a rate.\nfn h() {}\n/// A
                    /// type.\nstruct S;\n";
        let expected = [
            "a/src/b.rs:1 the summary begins with `A`",
            "a/src/b.rs:3 the summary begins with `Names`",
            "a/src/b.rs:8 the summary begins with `The`",
        ];
        assert_eq!(found(text), expected);
        assert_eq!(found("//! `cargo xtask a`: checks a thing.\n"), [""; 0]);
        let noun = ["a/src/b.rs:1 the summary begins with `a`"];
        assert_eq!(found("//! `cargo xtask a`: a check.\n"), noun);
    }

    #[test]
    fn comments_are_narrow_and_names_can_be_searched() {
        let wide = format!("// {}\n// | {} |\n// https://{0}\n", "a".repeat(98), "a".repeat(98));
        assert_eq!(found(&wide), ["a/src/b.rs:1 the comment is wider than 100 columns"]);
        let text =
            "// It holds also if a rank ends.\nimpl A {\n    pub fn of() {}\n    fn off() {}\n}\n";
        let expected = [
            "a/src/b.rs:1 the comment says `also if`",
            "a/src/b.rs:3 the function of cannot be searched",
        ];
        assert_eq!(found(text), expected);
    }

    #[test]
    fn the_list_of_exempt_files_only_shrinks() {
        let bad = "/// A rate.\nfn f() {}\n";
        let files = [("a/b.rs", bad), ("a/c.rs", ""), (EXEMPT, "a/b.rs\na/c.rs\na/d.rs\n")];
        let expected = [
            format!("{EXEMPT}:2 a/c.rs follows the rules of prose"),
            format!("{EXEMPT}:1 there is no file a/d.rs"),
        ];
        assert_eq!(texts(&check(&Tree::from_texts(&files))), expected);
        assert_eq!(texts(&check(&Tree::from_texts(&[("a/tests/b.rs", bad)]))), [""; 0]);
    }
}
