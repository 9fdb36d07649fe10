//! Checks which crates each crate of the workspace depends on.

use std::collections::BTreeMap;

use cargo_metadata::{DependencyKind, Metadata};
use serde::Deserialize;

use super::{File, Finding, Tree};
use crate::workspace::FACADE;

/// The dependencies that a crate may have, as `workspace.metadata.allowed-dependencies` in
/// Cargo.toml lists them.
#[derive(Debug, Deserialize)]
struct Allowed {
    /// The crates of this workspace.
    workspace: Vec<String>,
    /// The other crates that it may pass on to its users; `None` if these are not restricted.
    others: Option<Vec<String>>,
}

type Rules = BTreeMap<String, Allowed>;

fn rules(metadata: &Metadata) -> Result<Rules, serde_json::Error> {
    Rules::deserialize(&metadata.workspace_metadata["allowed-dependencies"])
}

/// Checks every dependency of every crate.
pub(super) fn check(metadata: &Metadata, tree: &Tree) -> Vec<Finding> {
    let rules = match rules(metadata) {
        Ok(rules) => rules,
        Err(error) => {
            let what = format!("workspace.metadata.allowed-dependencies: {error}");
            return vec![Finding::new("Cargo.toml", 1, what, "list what each crate may depend on")];
        }
    };

    let mut findings = Vec::new();
    for package in metadata.workspace_packages() {
        let name = package.name.as_str();
        let Some(allowed) = rules.get(name) else {
            let what = format!("the crate {name} has no entry in allowed-dependencies");
            findings.push(Finding::new("Cargo.toml", 1, what, "list what it may depend on"));
            continue;
        };

        let manifest = package.manifest_path.strip_prefix(&metadata.workspace_root);
        let manifest = manifest.unwrap_or(&package.manifest_path).as_str();

        for dependency in &package.dependencies {
            let development = dependency.kind == DependencyKind::Development;
            let in_workspace = rules.contains_key(&dependency.name);
            let problem = problem(name, allowed, &dependency.name, in_workspace, development);
            findings.extend(problem.map(|(what, mend)| {
                let declaration =
                    |file: &File| file.line_where(|line| declares(line, &dependency.name));
                let line = tree.file(manifest).map_or(1, declaration);
                Finding::new(manifest, line, what, mend)
            }));
        }
    }
    findings
}

/// Returns what is wrong about a dependency and how to fix it. `development` is true for tests,
/// examples and benchmarks.
fn problem(
    name: &str,
    allowed: &Allowed,
    dependency: &str,
    in_workspace: bool,
    development: bool,
) -> Option<(String, &'static str)> {
    // The examples in the documentation of every crate are those of its users.
    if development && dependency == FACADE {
        return None;
    }

    let lists = |names: &[String]| names.iter().any(|name| name == dependency);
    if in_workspace {
        let names = allowed.workspace.join(", ");
        let what =
            format!("{name} depends on {dependency}; of this workspace it may use [{names}]");
        let mend = "move the code to where the arrows allow it; docs/ARCHITECTURE.md draws them";
        return (!lists(&allowed.workspace)).then_some((what, mend));
    }
    if development || lists(allowed.others.as_ref()?) {
        return None;
    }
    let mend = "do without; or give the reason in docs/adr/0006-msrv-and-dependencies.md and list it in \
                Cargo.toml under workspace.metadata.allowed-dependencies";
    Some((format!("{name} depends on {dependency}, which all of its users inherit"), mend))
}

/// Returns whether a line of a manifest is `name = …` or `name.workspace = …`.
fn declares(line: &str, name: &str) -> bool {
    line.trim_start().strip_prefix(name).is_some_and(|rest| rest.starts_with([' ', '.', '=']))
}

#[cfg(test)]
mod tests {
    use super::super::texts;
    use super::*;

    fn check_one(name: &str, dependency: &str, development: bool) -> Option<String> {
        let rules = rules(&crate::workspace::members().unwrap()).unwrap();
        let in_workspace = rules.contains_key(dependency);
        let problem = problem(name, &rules[name], dependency, in_workspace, development);
        problem.map(|(what, _)| what)
    }

    #[test]
    fn a_collective_knows_no_vendor() {
        let expected = "peerlane-collectives depends on peerlane-cuda; \
                        of this workspace it may use [peerlane-hal, peerlane-planning, peerlane-bootstrap, peerlane-collectives, peerlane-toolkit, peerlane-staged, peerlane-host, peerlane-layers, peerlane-test-support]";
        let found = check_one("peerlane-collectives", "peerlane-cuda", true);
        assert_eq!(found.as_deref(), Some(expected));
        assert_eq!(check_one("peerlane-collectives", "peerlane-hal", false), None);

        // Examples in its documentation import the crate that re-exports it.
        assert_eq!(check_one("peerlane-collectives", "peerlane", true), None);
        assert!(check_one("peerlane-collectives", "peerlane", false).is_some());
    }

    #[test]
    fn a_library_inherits_only_what_is_listed() {
        let expected = "peerlane-hal depends on serde, which all of its users inherit";
        assert_eq!(check_one("peerlane-hal", "serde", false).as_deref(), Some(expected));
        assert_eq!(check_one("peerlane-hal", "serde", true), None);
        assert_eq!(check_one("peerlane-hal", "thiserror", false), None);
        assert_eq!(check_one("peerlane-cli", "plotters", false), None);
    }

    #[test]
    fn a_crate_without_an_entry_is_a_finding() {
        let mut metadata = crate::workspace::members().unwrap();
        assert_eq!(texts(&check(&metadata, &Tree::default())), [""; 0]);
        metadata.workspace_metadata["allowed-dependencies"]["peerlane-hal"]["workspace"].take();
        assert_eq!(check(&metadata, &Tree::default()).len(), 1);
        let rules = metadata.workspace_metadata["allowed-dependencies"].as_object_mut().unwrap();
        rules.remove("peerlane-hal");
        let findings = texts(&check(&metadata, &Tree::default()));
        let expected = "Cargo.toml:1 the crate peerlane-hal has no entry in allowed-dependencies";
        assert_eq!(findings[0], expected);
    }

    #[test]
    fn a_declaration_is_found() {
        assert!(declares("serde.workspace = true", "serde") && declares("serde = \"1\"", "serde"));
        assert!(!declares("serde_json = \"1\"", "serde"));
    }
}
