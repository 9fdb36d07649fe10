//! Backends mirror each other: the same files with the same types, so that who has read one can
//! find anything in the others.

use super::Finding;
use super::tree::{File, Tree};

/// Where the reference backend lies; it makes no raw calls and so has no `sys`.
const HOST: &str = "hal/host/src";
const VENDORS: [&str; 3] = ["backend-cuda/src", "backend-rocm/src", "backend-rdma/src"];

/// The files of a backend, in the order in which they are read, and the types that each declares.
const FILES: [(&str, &[&str]); 7] = [
    ("sys", &[]),
    ("error", &["Error"]),
    ("device", &["Device"]),
    ("memory", &["Memory", "Local", "Remote"]),
    ("key", &["Key"]),
    ("engine", &["Engine"]),
    ("fabric", &["Fabric"]),
];

/// Finds missing files and types, and modules out of order.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let host = check_backend(tree, HOST, "lib.rs", &FILES[1..]);
    let vendors = VENDORS.iter().flat_map(|folder| check_backend(tree, folder, "lib.rs", &FILES));
    host.into_iter().chain(vendors).collect()
}

fn check_backend(tree: &Tree, folder: &str, top: &str, files: &[(&str, &[&str])]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let top = format!("{folder}/{top}");
    match tree.file(&top) {
        Some(top) => findings.extend(out_of_order(top, files)),
        None => findings.push(missing(&top)),
    }
    for (name, types) in files {
        let path = format!("{folder}/{name}.rs");
        let folder_path = format!("{folder}/{name}/mod.rs");
        let Some(file) = tree.file(&path).or_else(|| tree.file(&folder_path)) else {
            findings.push(missing(&path));
            continue;
        };
        let absent =
            types.iter().filter(|name| !file.text.lines().any(|line| declares(line, name)));
        findings.extend(absent.map(|name| Finding {
            path: file.path.clone(),
            line: 1,
            what: format!("the public type {name} is missing"),
            mend: "declare it here, as the other backends do".into(),
        }));
    }
    findings
}

fn missing(path: &str) -> Finding {
    Finding {
        path: path.to_owned(),
        line: 1,
        what: "the file is missing".into(),
        mend: "add it: every backend has the same files, see docs/ARCHITECTURE.md".into(),
    }
}

/// Modules of the common names must come in one order, which is the one that rustfmt sorts to.
fn out_of_order(top: &File, files: &[(&str, &[&str])]) -> Option<Finding> {
    let seen: Vec<&str> = top
        .text
        .lines()
        .filter_map(module)
        .filter(|module| files.iter().any(|(name, _)| name == module))
        .collect();
    let mut wanted: Vec<&str> = files.iter().map(|(name, _)| *name).collect();
    wanted.sort_unstable();
    (seen != wanted).then(|| Finding {
        path: top.path.clone(),
        line: top.line_where(|line| module(line).is_some()),
        what: format!("the modules are {}", seen.join(", ")),
        mend: format!("declare {}, in this order", wanted.join(", ")),
    })
}

/// The module that a line declares.
fn module(line: &str) -> Option<&str> {
    let declaration = line.strip_prefix("pub ").unwrap_or(line);
    declaration.strip_prefix("mod ")?.strip_suffix(';')
}

/// Whether a line declares the public type `name`.
fn declares(line: &str, name: &str) -> bool {
    let declaration = line.strip_prefix("pub struct ").or_else(|| line.strip_prefix("pub enum "));
    let declaration = declaration.or_else(|| line.strip_prefix("pub type "));
    let rest = declaration.and_then(|declaration| declaration.strip_prefix(name));
    rest.is_some_and(|rest| !rest.starts_with(|c: char| c.is_alphanumeric() || c == '_'))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOP: &str =
        "mod device;\nmod engine;\nmod error;\nmod fabric;\nmod key;\nmod memory;\nmod sys;\n";
    const WHOLE: [(&str, &str); 8] = [
        ("b/lib.rs", TOP),
        ("b/sys.rs", ""),
        ("b/error.rs", "pub enum Error {"),
        ("b/device.rs", "pub struct Device(u32);"),
        ("b/memory.rs", "pub struct Memory;\npub struct Local;\npub enum Remote {}"),
        ("b/key.rs", "pub struct Key {"),
        ("b/engine.rs", "pub struct Engine<'a> {"),
        ("b/fabric.rs", "pub type Fabric = u32;"),
    ];

    fn findings(change: impl Fn(&mut Vec<(&str, &str)>)) -> Vec<String> {
        let mut files = WHOLE.to_vec();
        change(&mut files);
        let findings = check_backend(&Tree::of(&files), "b", "lib.rs", &FILES);
        findings.iter().map(|it| format!("{}:{}: {}", it.path, it.line, it.what)).collect()
    }

    #[test]
    fn a_whole_backend_has_no_findings() {
        assert_eq!(findings(|_| ()), [""; 0]);
    }

    #[test]
    fn a_common_file_may_be_a_folder() {
        assert_eq!(findings(|files| files[3].0 = "b/device/mod.rs"), [""; 0]);
    }

    #[test]
    fn a_missing_file_and_a_missing_type_are_findings() {
        assert_eq!(
            findings(|files| {
                files.retain(|(path, _)| *path != "b/key.rs");
                files[4].1 = "pub struct Memory;\npub struct LocalRegion;\nstruct Remote;";
            }),
            [
                "b/memory.rs:1: the public type Local is missing",
                "b/memory.rs:1: the public type Remote is missing",
                "b/key.rs:1: the file is missing",
            ]
        );
    }

    #[test]
    fn modules_out_of_order_are_a_finding() {
        assert_eq!(
            findings(|files| files[0].1 = "//! Top.\n\nmod sys;\nmod error;\nmod queue;\n"),
            ["b/lib.rs:3: the modules are sys, error"]
        );
    }
}
