//! Checks which crates each crate of the workspace depends on.

use cargo_metadata::{DependencyKind, Metadata};

use super::Finding;
use super::tree::Tree;

/// The dependencies that a crate may have.
struct CrateRule {
    name: &'static str,
    manifest: &'static str,
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
const STAGED: &str = "peerlane-staged";
const RXE_VM: &str = "peerlane-rxe-vm";
const SIMULATED: &str = "peerlane-simulated-driver";

/// The rules of all crates of the workspace; docs/ARCHITECTURE.md shows them.
const RULES: &[CrateRule] = &[
    CrateRule {
        name: HAL,
        manifest: "hal/Cargo.toml",
        // The example of its guide runs on the host backend.
        arrows: &[HOST],
        others: Some(&["thiserror"]),
    },
    CrateRule {
        name: TOOLKIT,
        manifest: "hal/toolkit/Cargo.toml",
        arrows: &[HAL],
        others: Some(&["rustix", "thiserror"]),
    },
    CrateRule {
        name: HOST,
        manifest: "hal/host/Cargo.toml",
        arrows: &[HAL, TOOLKIT],
        others: Some(&["rustix", "thiserror"]),
    },
    CrateRule {
        name: "peerlane-cuda",
        manifest: "backend-cuda/Cargo.toml",
        // Its tests run on the simulated driver.
        arrows: &[HAL, TOOLKIT, HOST, SIMULATED],
        others: Some(&["cudarc", "libloading", "thiserror"]),
    },
    CrateRule {
        name: "peerlane-rocm",
        manifest: "backend-rocm/Cargo.toml",
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
    CrateRule {
        name: "peerlane-hip-sys",
        manifest: "backend-rocm/hip-sys/Cargo.toml",
        arrows: &[ROCM_LIBRARY, C_LAYOUT],
        others: Some(&[]),
    },
    CrateRule {
        name: "peerlane-hsa-sys",
        manifest: "backend-rocm/hsa-sys/Cargo.toml",
        arrows: &[ROCM_LIBRARY, C_LAYOUT],
        others: Some(&[]),
    },
    CrateRule {
        name: ROCM_LIBRARY,
        manifest: "backend-rocm/rocm-library/Cargo.toml",
        arrows: &[],
        others: Some(&["libc", "libloading", "thiserror"]),
    },
    CrateRule {
        name: "peerlane-rdma",
        manifest: "backend-rdma/Cargo.toml",
        arrows: &[HAL, TOOLKIT, "peerlane-ibverbs-sys"],
        others: Some(&["rustix", "thiserror"]),
    },
    CrateRule {
        name: "peerlane-ibverbs-sys",
        manifest: "backend-rdma/ibverbs-sys/Cargo.toml",
        arrows: &[C_LAYOUT],
        others: Some(&["bitflags", "libloading", "thiserror"]),
    },
    CrateRule {
        name: STAGED,
        manifest: "staged/Cargo.toml",
        arrows: &[HAL, TOOLKIT],
        others: Some(&[]),
    },
    CrateRule {
        name: "peerlane-collectives",
        manifest: "collectives/Cargo.toml",
        arrows: &[HAL, STAGED, HOST],
        others: Some(&["bytemuck", "half", "postcard", "serde", "thiserror"]),
    },
    CrateRule {
        name: LAYERS,
        manifest: "layers/Cargo.toml",
        arrows: &[HAL, TOOLKIT, HOST],
        others: Some(&["fastrand"]),
    },
    CrateRule {
        name: "peerlane",
        manifest: "Cargo.toml",
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
        manifest: "tests/Cargo.toml",
        arrows: &[
            HAL,
            TOOLKIT,
            HOST,
            "peerlane-cuda",
            "peerlane-rocm",
            "peerlane-hip-sys",
            "peerlane-rdma",
            "peerlane-collectives",
            STAGED,
            LAYERS,
            "peerlane",
            SIMULATED,
        ],
        others: None,
    },
    CrateRule {
        name: "peerlane-hip-on-cuda",
        manifest: "tests/hip-on-cuda/Cargo.toml",
        arrows: &["peerlane", "peerlane-hip-sys", SIMULATED],
        others: None,
    },
    CrateRule { name: C_LAYOUT, manifest: "tests/c-layout/Cargo.toml", arrows: &[], others: None },
    CrateRule {
        name: SIMULATED,
        manifest: "tests/simulated-driver/Cargo.toml",
        arrows: &[],
        others: None,
    },
    CrateRule {
        name: "peerlane-cli",
        manifest: "cli/Cargo.toml",
        arrows: &["peerlane", "peerlane-hip-sys", LAYERS, SIMULATED],
        others: None,
    },
    CrateRule { name: RXE_VM, manifest: "tests/rxe-vm/Cargo.toml", arrows: &[], others: None },
    CrateRule { name: "xtask", manifest: "xtask/Cargo.toml", arrows: &[RXE_VM], others: None },
];

/// A crate and its dependencies, as in its manifest.
#[derive(Debug)]
pub(super) struct Member {
    name: String,
    dependencies: Vec<Dependency>,
}

#[derive(Debug)]
struct Dependency {
    name: String,
    /// Whether it is for tests, examples and benchmarks only.
    development: bool,
}

/// Returns the crates of the workspace.
pub(super) fn members(metadata: &Metadata) -> Vec<Member> {
    let packages = metadata.workspace_packages().into_iter();
    packages
        .map(|package| Member {
            name: package.name.to_string(),
            dependencies: package
                .dependencies
                .iter()
                .map(|dependency| Dependency {
                    name: dependency.name.clone(),
                    development: dependency.kind == DependencyKind::Development,
                })
                .collect(),
        })
        .collect()
}

/// Checks every dependency of every crate.
pub(super) fn check(members: &[Member], tree: &Tree) -> Vec<Finding> {
    let findings_of = |member: &Member| match RULES.iter().find(|rule| rule.name == member.name) {
        Some(rule) => {
            let found = member.dependencies.iter().filter_map(|it| misplaced(rule, it, tree));
            found.collect()
        }
        None => vec![Finding {
            path: "Cargo.toml".into(),
            line: 1,
            what: format!("the crate {} has no rule among the others", member.name),
            mend: "say in xtask/src/tidy/arrows.rs what it may depend on".into(),
        }],
    };
    members.iter().flat_map(findings_of).collect()
}

fn misplaced(rule: &CrateRule, dependency: &Dependency, tree: &Tree) -> Option<Finding> {
    let name = dependency.name.as_str();
    let (what, mend) = if RULES.iter().any(|other| other.name == name) {
        if rule.arrows.contains(&name) {
            return None;
        }
        let allowed = if rule.arrows.is_empty() { "none".into() } else { rule.arrows.join(", ") };
        (
            format!("{} depends on {name}; of this workspace it may use {allowed}", rule.name),
            "move the code to where the arrows allow it; docs/ARCHITECTURE.md draws them"
                .to_owned(),
        )
    } else {
        let others = rule.others?;
        if dependency.development || others.contains(&name) {
            return None;
        }
        (
            format!("{} depends on {name}, which everyone who uses it would inherit", rule.name),
            "do without; or give the reason in docs/adr/0006-msrv-and-dependencies.md and list it in \
             xtask/src/tidy/arrows.rs"
                .to_owned(),
        )
    };
    let manifest = tree.file(rule.manifest);
    let line = manifest.map_or(1, |file| file.line_where(|line| declares(line, name)));
    Some(Finding { path: rule.manifest.into(), line, what, mend })
}

/// Whether a line of a manifest is `name = …` or `name.workspace = …`.
fn declares(line: &str, name: &str) -> bool {
    line.trim_start().strip_prefix(name).is_some_and(|rest| rest.starts_with([' ', '.', '=']))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_one(name: &str, dependency: &str, development: bool) -> Vec<String> {
        let dependency = Dependency { name: dependency.into(), development };
        let member = Member { name: name.into(), dependencies: vec![dependency] };
        let manifest = "[dependencies]\nserde.workspace = true\npeerlane-cuda = { path = \"x\" }\n";
        let tree = Tree::of(&[("hal/Cargo.toml", manifest), ("collectives/Cargo.toml", manifest)]);
        check(&[member], &tree)
            .iter()
            .map(|it| format!("{}:{} {}", it.path, it.line, it.what))
            .collect()
    }

    #[test]
    fn a_collective_knows_no_vendor() {
        assert_eq!(
            check_one("peerlane-collectives", "peerlane-cuda", true),
            ["collectives/Cargo.toml:3 peerlane-collectives depends on peerlane-cuda; \
              of this workspace it may use peerlane-hal, peerlane-staged, peerlane-host"]
        );
        assert_eq!(check_one("peerlane-collectives", "peerlane-hal", false), [""; 0]);
    }

    #[test]
    fn a_library_inherits_only_what_is_listed() {
        assert_eq!(
            check_one(HAL, "serde", false),
            [
                "hal/Cargo.toml:2 peerlane-hal depends on serde, which everyone who uses it would inherit"
            ]
        );
        assert_eq!(check_one(HAL, "serde", true), [""; 0]);
        assert_eq!(check_one(HAL, "thiserror", false), [""; 0]);
        assert_eq!(check_one("peerlane-cli", "plotters", false), [""; 0]);
    }

    #[test]
    fn a_new_crate_needs_a_place() {
        assert_eq!(
            check_one("peerlane-new", "serde", false),
            ["Cargo.toml:1 the crate peerlane-new has no rule among the others"]
        );
    }
}
