//! Checks which crates each crate of the workspace depends on.

use cargo_metadata::{DependencyKind, Metadata};

use super::Finding;
use super::tree::{File, Tree};

/// The dependencies that a crate may have.
struct CrateRule {
    name: &'static str,
    /// The crates of this workspace that it may depend on.
    arrows: &'static [&'static str],
    /// The crates of other projects that it may depend on; `None` if its dependencies are not restricted.
    others: Option<&'static [&'static str]>,
}

const HAL: &str = "peerlane-hal";
const TOOLKIT: &str = "peerlane-toolkit";
const HOST: &str = "peerlane-host";
const LAYERS: &str = "peerlane-layers";
const C_LAYOUT: &str = "peerlane-c-layout";
const ROCM_LIBRARY: &str = "peerlane-rocm-library";
const RXE_VM: &str = "peerlane-rxe-vm";
const SIMULATED: &str = "peerlane-simulated-driver";

/// The rules of all crates of the workspace; docs/ARCHITECTURE.md shows them.
const RULES: &[CrateRule] = &[
    CrateRule {
        name: HAL,
        // The example of its guide runs on the host backend.
        arrows: &[HOST],
        others: Some(&["thiserror"]),
    },
    CrateRule { name: TOOLKIT, arrows: &[HAL], others: Some(&["rustix", "thiserror"]) },
    CrateRule { name: HOST, arrows: &[HAL, TOOLKIT], others: Some(&["rustix", "thiserror"]) },
    CrateRule {
        name: "peerlane-cuda",
        // Its tests run on the simulated driver.
        arrows: &[HAL, TOOLKIT, HOST, SIMULATED],
        others: Some(&["cudarc", "libloading", "thiserror"]),
    },
    CrateRule {
        name: "peerlane-rocm",
        // Its tests run on the simulated driver.
        arrows: &[
            HAL,
            TOOLKIT,
            HOST,
            "peerlane-hip-sys",
            "peerlane-hsa-sys",
            ROCM_LIBRARY,
            SIMULATED,
        ],
        others: Some(&["thiserror"]),
    },
    CrateRule { name: "peerlane-hip-sys", arrows: &[ROCM_LIBRARY, C_LAYOUT], others: Some(&[]) },
    CrateRule { name: "peerlane-hsa-sys", arrows: &[ROCM_LIBRARY, C_LAYOUT], others: Some(&[]) },
    CrateRule {
        name: ROCM_LIBRARY,
        arrows: &[],
        others: Some(&["libc", "libloading", "thiserror"]),
    },
    CrateRule {
        name: "peerlane-rdma",
        arrows: &[HAL, TOOLKIT, "peerlane-ibverbs-sys"],
        others: Some(&["rustix", "thiserror"]),
    },
    CrateRule {
        name: "peerlane-ibverbs-sys",
        arrows: &[C_LAYOUT],
        others: Some(&["bitflags", "libloading", "thiserror"]),
    },
    CrateRule {
        name: "peerlane-collectives",
        arrows: &[HAL, TOOLKIT, HOST],
        others: Some(&["bytemuck", "half", "postcard", "serde", "thiserror"]),
    },
    CrateRule { name: LAYERS, arrows: &[HAL, TOOLKIT, HOST], others: Some(&["fastrand"]) },
    CrateRule {
        name: "peerlane",
        arrows: &[
            HAL,
            HOST,
            "peerlane-cuda",
            "peerlane-rocm",
            "peerlane-rdma",
            "peerlane-collectives",
        ],
        others: Some(&[]),
    },
    CrateRule {
        name: "peerlane-conformance",
        arrows: &[
            HAL,
            TOOLKIT,
            HOST,
            "peerlane-cuda",
            "peerlane-rocm",
            "peerlane-hip-sys",
            "peerlane-rdma",
            "peerlane-collectives",
            LAYERS,
            "peerlane",
            SIMULATED,
        ],
        others: None,
    },
    CrateRule {
        name: "peerlane-hip-on-cuda",
        arrows: &["peerlane", "peerlane-hip-sys", SIMULATED],
        others: None,
    },
    CrateRule { name: C_LAYOUT, arrows: &[], others: None },
    CrateRule { name: SIMULATED, arrows: &[], others: None },
    CrateRule {
        name: "peerlane-cli",
        arrows: &["peerlane", "peerlane-hip-sys", LAYERS, SIMULATED],
        others: None,
    },
    CrateRule { name: RXE_VM, arrows: &[], others: None },
    CrateRule { name: "xtask", arrows: &[RXE_VM], others: None },
];

/// Checks every dependency of every crate.
pub(super) fn check(metadata: &Metadata, tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for package in metadata.workspace_packages() {
        let Some(rule) = RULES.iter().find(|rule| rule.name == package.name.as_str()) else {
            let what = format!("the crate {} has no rule", package.name);
            let mend = "say in xtask/src/tidy/arrows.rs what it may depend on";
            findings.push(Finding::new("Cargo.toml", 1, what, mend));
            continue;
        };
        let manifest = package.manifest_path.strip_prefix(&metadata.workspace_root);
        let manifest = manifest.unwrap_or(&package.manifest_path).as_str();
        for dependency in &package.dependencies {
            let development = dependency.kind == DependencyKind::Development;
            findings.extend(misplaced(rule, &dependency.name, development, manifest, tree));
        }
    }
    findings
}

/// Reports a dependency that the rule does not allow. `development` is true for tests, examples and benchmarks.
fn misplaced(
    rule: &CrateRule,
    name: &str,
    development: bool,
    manifest: &str,
    tree: &Tree,
) -> Option<Finding> {
    let (what, mend) = if RULES.iter().any(|other| other.name == name) {
        if rule.arrows.contains(&name) {
            return None;
        }
        let allowed = if rule.arrows.is_empty() { "none".into() } else { rule.arrows.join(", ") };
        (
            format!("{} depends on {name}; of this workspace it may use {allowed}", rule.name),
            "move the code to where the arrows allow it; docs/ARCHITECTURE.md draws them",
        )
    } else {
        if development || rule.others?.contains(&name) {
            return None;
        }
        (
            format!("{} depends on {name}, which all of its users inherit", rule.name),
            "do without; or give the reason in docs/adr/0006-msrv-and-dependencies.md and list it in \
             xtask/src/tidy/arrows.rs",
        )
    };
    let declaration = |file: &File| file.line_where(|line| declares(line, name));
    let line = tree.file(manifest).map_or(1, declaration);
    Some(Finding::new(manifest, line, what, mend))
}

/// Returns whether a line of a manifest is `name = …` or `name.workspace = …`.
fn declares(line: &str, name: &str) -> bool {
    line.trim_start().strip_prefix(name).is_some_and(|rest| rest.starts_with([' ', '.', '=']))
}

#[cfg(test)]
mod tests {
    use super::super::texts;
    use super::*;

    fn check_one(name: &str, dependency: &str, development: bool) -> Vec<String> {
        let manifest = "[dependencies]\nserde.workspace = true\npeerlane-cuda = { path = \"x\" }\n";
        let tree = Tree::of(&[("a/Cargo.toml", manifest)]);
        let rule = RULES.iter().find(|rule| rule.name == name).unwrap();
        let finding = misplaced(rule, dependency, development, "a/Cargo.toml", &tree);
        texts(finding.as_slice())
    }

    #[test]
    fn a_collective_knows_no_vendor() {
        assert_eq!(
            check_one("peerlane-collectives", "peerlane-cuda", true),
            ["a/Cargo.toml:3 peerlane-collectives depends on peerlane-cuda; \
              of this workspace it may use peerlane-hal, peerlane-toolkit, peerlane-host"]
        );
        assert_eq!(check_one("peerlane-collectives", "peerlane-hal", false), [""; 0]);
    }

    #[test]
    fn a_library_inherits_only_what_is_listed() {
        assert_eq!(
            check_one(HAL, "serde", false),
            ["a/Cargo.toml:2 peerlane-hal depends on serde, which all of its users inherit"]
        );
        assert_eq!(check_one(HAL, "serde", true), [""; 0]);
        assert_eq!(check_one(HAL, "thiserror", false), [""; 0]);
        assert_eq!(check_one("peerlane-cli", "plotters", false), [""; 0]);
    }

    #[test]
    fn every_crate_has_a_rule() {
        let metadata = crate::workspace::members().unwrap();
        assert_eq!(texts(&check(&metadata, &Tree::default())), [""; 0]);
    }
}
