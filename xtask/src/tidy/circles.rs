//! Checks that modules beside each other do not import each other in circles.
//!
//! A circle has no file that can be read first. The circles that there are have a line each in
//! `circles.txt`, with the folder and the modules. A circle that grows is a finding, and so is one
//! that has become smaller than its line says, so that the list shrinks.

use std::collections::{BTreeMap, BTreeSet};

use super::{File, Finding, Tree};

/// The circles that there are, one per line: `collectives/src/group: order shared`.
const LIST: &str = "xtask/src/tidy/circles.txt";

/// The path of a module in its crate, such as `["group", "order"]`.
type Path = Vec<String>;

/// The modules that each module of a folder imports from the same folder.
type Imports = BTreeMap<String, BTreeSet<String>>;

/// Reports circles that are not listed as they are.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let listed: BTreeSet<&str> = tree.file(LIST).map_or("", |file| &file.text).lines().collect();
    let found = circles(tree);

    let mut findings = Vec::new();
    for circle in found.iter().filter(|circle| !listed.contains(circle.as_str())) {
        let what = format!("modules import each other in a circle: {circle}");
        let mend = "move what both need below both; if a listed circle became smaller, correct its \
                    line";
        findings.push(Finding::new(LIST, 1, what, mend));
    }
    for gone in listed.into_iter().filter(|line| !found.contains(*line)) {
        let line = tree.file(LIST).map_or(1, |list| list.line_where(|it| it == gone));
        let what = format!("there is no such circle any more: {gone}");
        findings.push(Finding::new(LIST, line, what, "remove the line, or correct it"));
    }
    findings
}

/// Returns all circles, as lines of the list.
fn circles(tree: &Tree) -> BTreeSet<String> {
    let files: Vec<(&File, &str, Path)> = tree
        .ending_in(".rs")
        .filter_map(|file| module(file).map(|(root, path)| (file, root, path)))
        .collect();
    // A folder is a module too, although its file may be called otherwise.
    let modules: BTreeSet<(&str, &[String])> = files
        .iter()
        .flat_map(|(_, root, path)| (1..=path.len()).map(|length| (*root, &path[..length])))
        .collect();

    let mut folders: BTreeMap<String, Imports> = BTreeMap::new();
    for (file, root, own) in &files {
        for import in imports(file, own) {
            // The first difference is between two modules of one folder.
            let common = own.iter().zip(&import).take_while(|(own, other)| own == other).count();
            let (Some(from), Some(to)) = (own.get(common), import.get(common)) else { continue };

            if modules.contains(&(*root, &import[..=common])) {
                let folder = format!("{root}/{}", own[..common].join("/"));
                let folder = folder.trim_end_matches('/').to_owned();
                folders
                    .entry(folder)
                    .or_default()
                    .entry(from.clone())
                    .or_default()
                    .insert(to.clone());
            }
        }
    }

    let lines = |(folder, imports): (&String, &Imports)| {
        let line = |modules: BTreeSet<String>| {
            format!("{folder}: {}", modules.into_iter().collect::<Vec<_>>().join(" "))
        };
        circles_of(imports).into_iter().map(line).collect::<Vec<_>>()
    };
    folders.iter().flat_map(lines).collect()
}

/// Returns the sets of modules of which each imports each other, directly or through others.
fn circles_of(imports: &Imports) -> BTreeSet<BTreeSet<String>> {
    let reached = |from: &String| {
        let mut reached = BTreeSet::new();
        let mut next: Vec<&String> = imports.get(from).into_iter().flatten().collect();
        while let Some(module) = next.pop() {
            if reached.insert(module.clone()) {
                next.extend(imports.get(module).into_iter().flatten());
            }
        }
        reached
    };
    let all: BTreeMap<&String, BTreeSet<String>> =
        imports.keys().map(|module| (module, reached(module))).collect();

    let circle = |(module, reached): (&&String, &BTreeSet<String>)| {
        let reaches_back =
            |other: &&String| all.get(other).is_some_and(|reached| reached.contains(*module));
        let others = reached.iter().filter(reaches_back).cloned();
        others.chain([(*module).clone()]).collect::<BTreeSet<_>>()
    };
    all.iter().map(circle).filter(|circle| circle.len() > 1).collect()
}

/// Returns the source folder of a file's crate and the path of its module, or `None` outside of the
/// sources of crates.
fn module(file: &File) -> Option<(&str, Path)> {
    let end = if file.path.starts_with("src/") { 3 } else { file.path.find("/src/")? + 4 };
    let (root, inside) = (&file.path[..end], file.path[end + 1..].strip_suffix(".rs")?);
    if inside.starts_with("bin/") {
        return None;
    }

    let mut path: Path = inside.split('/').map(str::to_owned).collect();
    if path.last().is_some_and(|last| matches!(last.as_str(), "mod" | "lib" | "main")) {
        path.pop();
    }
    Some((root, path))
}

/// Returns the paths that a module imports from its crate, outside of its tests.
fn imports(file: &File, own: &[String]) -> Vec<Path> {
    let product = file.text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    let code = product.lines().filter(|line| !line.trim_start().starts_with("//"));
    let code = code.map(str::trim).collect::<Vec<_>>().join(" ");

    let mut found = Vec::new();
    for prefix in ["crate::", "super::", "self::"] {
        for (at, _) in code.match_indices(prefix) {
            // `super::super::` is read from its beginning, and `$crate::` is another crate.
            let is_inside = |last: char| last.is_alphanumeric() || "_:$".contains(last);
            if !code[..at].ends_with(is_inside) {
                expand(&code[at..], &mut Vec::new(), &mut found);
            }
        }
    }
    found.into_iter().filter_map(|path| resolve(path, own)).collect()
}

/// Adds the paths at the beginning of `text` to `found`, such as two for `a::{b, c}`, and returns
/// the text behind them.
fn expand<'t>(text: &'t str, prefix: &mut Path, found: &mut Vec<Path>) -> &'t str {
    let text = text.trim_start();
    if let Some(mut rest) = text.strip_prefix('{') {
        loop {
            rest = expand(rest, prefix, found).trim_start();
            match rest.strip_prefix(',') {
                Some(next) => rest = next,
                None => return rest.strip_prefix('}').unwrap_or(rest),
            }
        }
    }

    let length = text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
    let (name, rest) = text.split_at(length);
    prefix.push(name.to_owned());
    let rest = match rest.strip_prefix("::") {
        Some(inner) => expand(inner, prefix, found),
        None => {
            found.push(prefix.clone());
            // A new name, as in `a as b`, is of no interest.
            let end = rest.find([',', '}', ';', '(', ')', '<', '>']).unwrap_or(rest.len());
            &rest[end..]
        }
    };
    prefix.pop();
    rest
}

/// Returns a path in the crate, from one that begins with `crate`, `self` or `super`.
fn resolve(path: Path, own: &[String]) -> Option<Path> {
    let mut names = path.into_iter();
    let mut base = match names.next()?.as_str() {
        "crate" => Vec::new(),
        "self" => own.to_vec(),
        _ => own[..own.len().checked_sub(1)?].to_vec(),
    };
    for name in names {
        match name.as_str() {
            "super" => drop(base.pop()),
            "self" | "" => {}
            _ => base.push(name),
        }
    }
    Some(base)
}

#[cfg(test)]
mod tests {
    use super::super::texts;
    use super::*;

    fn tree(list: &str) -> Tree {
        Tree::from_texts(&[
            ("a/src/lib.rs", "mod one; mod two; mod three; use crate::one::Thing;"),
            ("a/src/one.rs", "use crate::{two::{Two, self}, Other};"),
            ("a/src/two/mod.rs", "mod inner; pub struct Two;"),
            ("a/src/two/inner.rs", "use super::Two;\nuse super::super::one::Thing as Alias;"),
            (
                "a/src/three.rs",
                "use crate::one;\n// use crate::two;\n#[cfg(test)]\nmod tests { use crate::three; }",
            ),
            (LIST, list),
        ])
    }

    #[test]
    fn a_circle_between_modules_of_one_folder_is_found() {
        let circle = "a/src: one two";
        assert_eq!(circles(&tree("")), BTreeSet::from([circle.to_owned()]));
        assert_eq!(texts(&check(&tree(circle))), [""; 0]);
        assert_eq!(
            texts(&check(&tree("a/src: one three two"))),
            [
                format!("{LIST}:1 modules import each other in a circle: {circle}"),
                format!("{LIST}:1 there is no such circle any more: a/src: one three two"),
            ]
        );
    }
}
