//! The Rust test programs of the RDMA backend: which there are, and their build.

use std::io::BufReader;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use cargo_metadata::{Message, Metadata, Package, TargetKind};

use peerlane_rxe_vm::process::{self, Outcome};
use peerlane_rxe_vm::{Program, Programs};

/// Packages all of whose tests are about RDMA.
const PACKAGES: [&str; 2] = ["peerlane-rdma", "peerlane-ibverbs-sys"];
/// What the names of tests about RDMA begin with in other packages.
const PREFIX: &str = "rdma";
/// What test programs open by its file.
const LIBRARY: &str = "peerlane_simulated_driver";

/// `cargo test` for the tests of the RDMA backend; `None` if there are none.
pub(super) fn command(metadata: &Metadata) -> Option<Command> {
    let mut command = process::cargo(["test", "--no-fail-fast"]);
    let (mut found, mut library) = (false, false);
    for package in &metadata.packages {
        let tests = tests(package);
        if !tests.is_empty() {
            found = true;
            command.args(["--package", package.name.as_str()]);
        }
        for (name, is_library) in tests {
            if is_library {
                library = true;
            } else {
                command.args(["--test", &name]);
            }
        }
    }
    if library {
        command.arg("--lib");
    }
    found.then_some(command)
}

/// Builds them, and does not run them. With `workspace` the whole workspace's tests are built as
/// `cargo test --workspace` does, of which the gate has most at hand.
pub(super) fn build(metadata: &Metadata, workspace: bool, release: bool) -> Outcome<Programs> {
    let Some(mut command) = command(metadata) else { return Ok(Programs::default()) };
    if workspace {
        command = process::cargo(["test", "--workspace"]);
    }
    if release {
        command.arg("--release");
    }
    command.args(["--no-run", "--message-format=json-render-diagnostics"]);
    let mut child = command
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| format!("{}: {error}", process::line(&command)))?;
    let printed = BufReader::new(child.stdout.take().expect("standard output is piped"));
    let mut built = Programs::default();
    for message in Message::parse_stream(printed) {
        let Message::CompilerArtifact(artifact) = message? else { continue };
        if artifact.target.name == LIBRARY && !artifact.profile.test {
            let libraries = artifact.filenames.iter().filter(|it| it.extension() == Some("so"));
            built.helpers.extend(libraries.map(Into::into));
        }
        let Some(file) = artifact.executable else { continue };
        let Some(package) = metadata.packages.iter().find(|one| one.id == artifact.package_id)
        else {
            continue;
        };
        let tests = tests(package);
        let target = &artifact.target.name;
        let is_library = artifact.target.kind.contains(&TargetKind::Lib);
        if !artifact.profile.test {
            // Another package's programs are nothing to these tests.
            if !tests.is_empty() {
                built.helpers.push(file.into());
            }
        } else if tests.contains(&(target.clone(), is_library)) {
            built.tests.push(Program {
                name: format!("{} {target}", package.name),
                file: file.into(),
                folder: package.manifest_path.parent().ok_or("a package has a folder")?.into(),
            });
        }
    }
    let status = child.wait()?;
    if !status.success() {
        return Err(format!("{} failed: {status}", process::line(&command)).into());
    }
    built.tests.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(built)
}

/// Builds the program `peerlane`, which lines of shell may call, and returns its file.
pub(crate) fn peerlane(metadata: &Metadata, release: bool) -> Outcome<PathBuf> {
    let mut command = process::cargo(["build", "--package", "peerlane-cli"]);
    let profile = if release { "release" } else { "debug" };
    if release {
        command.arg("--release");
    }
    process::run(&mut command)?;
    Ok(metadata.target_directory.join(profile).join("peerlane").into())
}

/// The names of the package's tests about RDMA, and whether each is the library.
fn tests(package: &Package) -> Vec<(String, bool)> {
    let whole = PACKAGES.contains(&package.name.as_str());
    let targets = package.targets.iter().filter_map(|target| {
        let is_library = target.kind.contains(&TargetKind::Lib);
        let is_test = target.kind.contains(&TargetKind::Test);
        let wanted = whole && (is_library || is_test) || is_test && target.name.starts_with(PREFIX);
        wanted.then(|| (target.name.clone(), is_library))
    });
    targets.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace;

    #[test]
    fn the_tests_of_the_backend_are_chosen() {
        let metadata = workspace::members().unwrap();
        let package = |name: &str| {
            tests(metadata.packages.iter().find(|package| package.name.as_str() == name).unwrap())
        };
        assert!(package("peerlane-rdma").contains(&("peerlane_rdma".to_owned(), true)));
        assert!(package("peerlane-hal").is_empty());
        assert!(!package("peerlane-conformance").iter().any(|(name, _)| name == "host"));

        let command = process::line(&command(&metadata).unwrap());
        assert_eq!(command.matches("--lib").count(), 1, "{command}");
        assert!(command.contains("--package peerlane-rdma"), "{command}");
    }
}
