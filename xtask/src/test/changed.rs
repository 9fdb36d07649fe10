//! Finds the crates that a change reaches, for `cargo xtask test --changed`.

use std::collections::BTreeSet;
use std::path::Path;

use cargo_metadata::{Metadata, Package, PackageId};

use peerlane_rxe_vm::process::{self, Outcome};

use crate::workspace::FACADE;

/// Files at the root that can change every crate.
const OF_ALL: [&str; 3] = ["Cargo.toml", "Cargo.lock", ".cargo/"];

/// Returns the packages with files that differ from the commit `since`, and those that depend on them.
pub(super) fn packages(metadata: &Metadata, since: &str) -> Outcome<BTreeSet<PackageId>> {
    let git = |arguments: &[&str]| {
        let mut command = std::process::Command::new("git");
        process::output(command.arg("-C").arg(&metadata.workspace_root).args(arguments))
    };
    let mut files = git(&["diff", "--name-only", since, "--"])?;
    files += &git(&["ls-files", "--others", "--exclude-standard"])?;
    Ok(reached(metadata, files.lines()))
}

fn reached<'a>(
    metadata: &Metadata,
    files: impl Iterator<Item = &'a str> + Clone,
) -> BTreeSet<PackageId> {
    let all = &metadata.packages;
    if files.clone().any(|file| OF_ALL.iter().any(|of_all| file.starts_with(of_all))) {
        return all.iter().map(|package| package.id.clone()).collect();
    }
    let mut reached: BTreeSet<PackageId> = BTreeSet::new();
    for file in files {
        reached.extend(owner(metadata, Path::new(file)).map(|package| package.id.clone()));
    }

    // The crates that the facade re-exports use it for the examples in their documentation only.
    let facade = all.iter().find(|package| package.name == FACADE);
    let is_below = |package: &Package| {
        facade.is_some_and(|facade| facade.dependencies.iter().any(|of| of.name == *package.name))
    };

    loop {
        let names: BTreeSet<&str> = all
            .iter()
            .filter(|package| reached.contains(&package.id))
            .map(|package| package.name.as_str())
            .collect();
        let depends = |package: &&Package| {
            let is_example = |name: &str| name == FACADE && is_below(package);
            let mut dependencies = package.dependencies.iter().map(|of| of.name.as_str());
            dependencies.any(|name| names.contains(name) && !is_example(name))
        };
        let before = reached.len();
        reached.extend(all.iter().filter(depends).map(|package| package.id.clone()));
        if reached.len() == before {
            return reached;
        }
    }
}

/// Returns the package with the innermost folder that contains the file. Documents at the root and below `docs` are of none.
fn owner<'m>(metadata: &'m Metadata, file: &Path) -> Option<&'m Package> {
    let root = metadata.workspace_root.as_std_path();
    let folder = |package: &Package| {
        let folder = package.manifest_path.parent()?.as_std_path().strip_prefix(root).ok()?;
        Some(folder.to_owned())
    };
    let packages = metadata.packages.iter();
    let owners = packages.filter_map(|package| Some((folder(package)?, package)));
    let owners = owners.filter(|(folder, _)| match folder.as_os_str().is_empty() {
        true => file.starts_with("src") || file == Path::new("README.md"),
        false => file.starts_with(folder),
    });
    owners.max_by_key(|(folder, _)| folder.components().count()).map(|(_, package)| package)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace;

    fn names(files: &[&str]) -> Vec<String> {
        let metadata = workspace::members().unwrap();
        let reached = reached(&metadata, files.iter().copied());
        let packages = metadata.packages.iter().filter(|package| reached.contains(&package.id));
        packages.map(|package| package.name.to_string()).collect()
    }

    #[test]
    fn a_change_reaches_the_crates_that_depend_on_it() {
        assert!(names(&["docs/ARCHITECTURE.md", "CHANGELOG.md"]).is_empty());
        assert_eq!(names(&["xtask/src/main.rs"]), ["xtask"]);
        let cuda = names(&["backend-cuda/src/engine.rs"]);
        assert!(
            ["peerlane-cuda", "peerlane", "peerlane-cli"]
                .iter()
                .all(|name| cuda.iter().any(|it| it == name))
        );
        assert!(
            !cuda.iter().any(|name| name == "peerlane-rocm" || name == "peerlane-hal"),
            "{cuda:?}"
        );
        let all = workspace::members().unwrap().packages.len();
        assert_eq!(names(&["Cargo.lock"]).len(), all);
    }
}
