//! Checks that all backends have the same files with the same types.

use super::{Finding, Tree};

/// The folder of the reference backend, which has no `sys` because it makes no raw calls.
const HOST: &str = "hal/host/src";
const VENDORS: [&str; 4] =
    ["backend-cuda/src", "backend-rocm/src", "backend-rdma/src", "backend-ucx/src"];

/// The files of a backend in reading order, and the types that each declares. rustfmt sorts their
/// modules.
const FILES: [(&str, &[&str]); 7] = [
    ("sys", &[]),
    ("error", &["Error"]),
    ("device", &["Device"]),
    ("memory", &["Memory", "Local", "Remote"]),
    ("key", &["Key"]),
    ("engine", &["Engine"]),
    ("fabric", &["Fabric"]),
];

/// Reports missing files and types.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let host = check_backend(tree, HOST, &FILES[1..]);
    let vendors = VENDORS.iter().flat_map(|folder| check_backend(tree, folder, &FILES));
    host.into_iter().chain(vendors).collect()
}

fn check_backend(tree: &Tree, folder: &str, files: &[(&str, &[&str])]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (name, types) in files {
        let path = format!("{folder}/{name}.rs");
        let file = tree.file(&path).or_else(|| tree.file(&format!("{folder}/{name}/mod.rs")));
        let Some(file) = file else {
            let mend = "add it: every backend has the same files, see docs/ARCHITECTURE.md";
            findings.push(Finding::new(&path, 1, "the file is missing", mend));
            continue;
        };

        let absent =
            types.iter().filter(|name| !file.text.lines().any(|line| declares(line, name)));
        findings.extend(absent.map(|name| {
            let what = format!("the public type {name} is missing");
            Finding::new(&file.path, 1, what, "declare it here, as the other backends do")
        }));
    }
    findings
}

/// Returns whether a line declares the public type `name`.
fn declares(line: &str, name: &str) -> bool {
    let declaration = line.strip_prefix("pub struct ").or_else(|| line.strip_prefix("pub enum "));
    let declaration = declaration.or_else(|| line.strip_prefix("pub type "));
    let rest = declaration.and_then(|declaration| declaration.strip_prefix(name));
    rest.is_some_and(|rest| !rest.starts_with(|c: char| c.is_alphanumeric() || c == '_'))
}

#[cfg(test)]
mod tests {
    use super::super::texts;
    use super::*;

    const WHOLE: [(&str, &str); 7] = [
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
        texts(&check_backend(&Tree::from_texts(&files), "b", &FILES))
    }

    #[test]
    fn a_whole_backend_has_no_findings() {
        assert_eq!(findings(|_| ()), [""; 0]);
    }

    #[test]
    fn a_file_may_be_a_folder() {
        assert_eq!(findings(|files| files[5].0 = "b/engine/mod.rs"), [""; 0]);
    }

    #[test]
    fn a_missing_file_and_a_missing_type_are_findings() {
        assert_eq!(
            findings(|files| {
                files.retain(|(path, _)| *path != "b/key.rs");
                files[3].1 = "pub struct Memory;\npub struct LocalRegion;\nstruct Remote;";
            }),
            [
                "b/memory.rs:1 the public type Local is missing",
                "b/memory.rs:1 the public type Remote is missing",
                "b/key.rs:1 the file is missing",
            ]
        );
    }
}
