//! `cargo xtask new-backend`: generates a crate for a new accelerator from `tests/loopback`, which
//! passes the contract suite from the beginning.

use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;

use crate::workspace;
use peerlane_rxe_vm::process::{self, Outcome, cargo};

/// Options of `cargo xtask new-backend`.
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// The name of the backend, such as `tpu`.
    #[arg(required_unless_present = "check")]
    name: Option<String>,
    /// Generate backends below target/, and test them.
    #[arg(long, conflicts_with_all = ["name", "outside", "network"])]
    check: bool,
    /// Register the backend as a network between machines too.
    #[arg(long, conflicts_with = "outside")]
    network: bool,
    /// Generate a package of its own in this folder, and change nothing here.
    #[arg(long, value_name = "FOLDER")]
    outside: Option<PathBuf>,
}

const TEMPLATE: &str = "tests/loopback";
/// Names that backends and the template have.
const TAKEN: [&str; 13] = [
    "host", "cuda", "rocm", "rdma", "ucx", "staged", "loopback", "ring", "auto", "same", "default",
    "half", "cudarc",
];
const KEYWORDS: [&str; 40] = [
    "as", "async", "await", "box", "break", "const", "continue", "crate", "do", "dyn", "else",
    "enum", "extern", "false", "final", "fn", "for", "gen", "if", "impl", "in", "let", "loop",
    "match", "mod", "move", "mut", "priv", "pub", "ref", "return", "self", "static", "struct",
    "super", "trait", "true", "type", "use", "where",
];
/// The files of the template.
const FILES: [&str; 10] = [
    "Cargo.toml",
    "src/lib.rs",
    "src/device.rs",
    "src/engine.rs",
    "src/fabric.rs",
    "src/key.rs",
    "src/memory.rs",
    "tests/all_gather.rs",
    "tests/contract.rs",
    "tests/processes.rs",
];

pub(crate) fn run(options: &Options) -> Outcome {
    match &options.name {
        Some(name) => generate(name, options.outside.as_deref(), options.network),
        None => check(),
    }
}

fn generate(name: &str, outside: Option<&Path>, network: bool) -> Outcome {
    check_name(name)?;
    let root = workspace::members()?.workspace_root.into_std_path_buf();
    let folder = match outside {
        Some(folder) => folder.join(format!("peerlane-{name}")),
        None => root.join(format!("backend-{name}")),
    };
    if folder.exists() {
        return Err(
            format!("{} exists; choose another name, or remove it", folder.display()).into()
        );
    }
    for file in FILES {
        let text = renamed(&std::fs::read_to_string(root.join(TEMPLATE).join(file))?, name);
        let text = match (outside, file) {
            (Some(_), "Cargo.toml") => manifest_outside(&text, &root)?,
            (None, "Cargo.toml") => text.replace("publish = false\n", ""),
            (Some(_), _) => without_workspace_cfg(&text),
            (None, _) => text,
        };
        let to = folder.join(file);
        std::fs::create_dir_all(to.parent().expect("a file of a package is in a folder"))?;
        std::fs::write(to, text)?;
    }
    // The imports of the new name are sorted differently.
    let sources = FILES.iter().filter(|file| file.ends_with(".rs")).map(|file| folder.join(file));
    process::run(Command::new("rustfmt").args(["--edition", "2024"]).args(sources))?;
    if outside.is_none() {
        register(&root, name, network)?;
    }
    println!("generated {}", folder.display());
    println!(
        "  cargo test                        # in that folder: the contract suite, and all-gathers of threads, of processes and over two tiers"
    );
    if outside.is_none() {
        println!(
            "  peerlane allgather --backend {name}   # the program and the feature `{name}` have it"
        );
    }
    println!("  docs/PORTING.md                   # which file to replace first");
    Ok(())
}

/// Generates a backend outside of the workspace and tests it, and checks one in a copy of the
/// repository, for the gate.
///
/// Both have the same sources, so that the tests run once. In the copy, what was added to the lists
/// of the workspace is checked.
pub(crate) fn check() -> Outcome {
    let metadata = workspace::members()?;
    let root = &metadata.workspace_root;
    let folder = metadata.target_directory.join("new-backend").into_std_path_buf();
    if folder.exists() {
        std::fs::remove_dir_all(&folder)?;
    }
    let run_in = |folder: &Path, target: &str, mut command: Command| {
        command.env("CARGO_TARGET_DIR", metadata.target_directory.join(target));
        process::run(command.env("CARGO_PROFILE_DEV_DEBUG", "false").current_dir(folder))
    };

    generate("example", Some(&folder), false)?;
    let outside = folder.join("peerlane-example");
    // The versions of this workspace, in its target folder, so that no dependency is compiled
    // again.
    std::fs::copy(root.join("Cargo.lock"), outside.join("Cargo.lock"))?;
    run_in(&outside, "", cargo(["test"]))?;

    let copy = folder.join("copy");
    // Cargo confuses the packages of two copies of a workspace in one target folder.
    let in_copy = |command| run_in(&copy, "new-backend-target", command);
    let xtask = |arguments: &[&str]| -> Outcome<Command> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(arguments);
        Ok(command)
    };
    let mut clone = Command::new("git");
    clone.args(["clone", "--quiet"]).arg(root).arg(&copy);
    process::run(&mut clone)?;
    // A network is in all lists.
    in_copy(xtask(&["new-backend", "example", "--network"])?)?;
    let mut add = Command::new("git");
    add.args(["add", "--all"]);
    in_copy(add)?;
    in_copy(cargo(["fmt", "--all", "--check"]))?;
    in_copy(xtask(&["tidy"])?)?;

    // Its tests are those of the crate outside.
    in_copy(cargo(["check", "--package", "peerlane", "--features", "peerlane/example"]))
}

fn check_name(name: &str) -> Outcome {
    let is_identifier = name.starts_with(|first: char| first.is_ascii_lowercase())
        && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
    if !is_identifier {
        let text = format!(
            "the name is {name:?}, expected lower-case letters, digits and `_` that begin with a letter, such as `tpu`"
        );
        return Err(text.into());
    }

    if TAKEN.contains(&name) {
        return Err(
            format!("the name is {name:?}, which Peerlane uses already; choose another").into()
        );
    }
    if KEYWORDS.contains(&name) {
        return Err(format!("the name is {name:?}, a keyword of Rust; choose another").into());
    }
    Ok(())
}

fn renamed(text: &str, name: &str) -> String {
    // A number from the name, so that two new backends rarely have the same one.
    let hash =
        name.bytes().fold(0_u16, |hash, byte| hash.wrapping_mul(31).wrapping_add(byte.into()));
    let description = "The crate from which `cargo xtask new-backend` begins a backend";
    text.replace(description, &format!("A backend of Peerlane for {name}"))
        .replace("BackendId(0x8000)", &format!("BackendId({:#06x})", 0x8001 | hash))
        .replace("loopback", name)
}

/// Removes the attributes that leave an arm out inside the workspace: the enums of the contract are
/// not exhaustive for a package outside of it.
fn without_workspace_cfg(text: &str) -> String {
    let is_kept = |line: &&str| line.trim() != "#[cfg(not(peerlane_workspace))]";
    text.split_inclusive('\n').filter(is_kept).collect()
}

/// Replaces what a package inherits from the workspace.
fn manifest_outside(text: &str, root: &Path) -> Outcome<String> {
    let root = root.to_str().ok_or("the path of the repository is not UTF-8")?;

    let folders = [
        ("peerlane-hal", "hal"),
        ("peerlane-toolkit", "hal/toolkit"),
        ("peerlane-conformance", "conformance"),
        ("peerlane-collectives", "collectives"),
        ("peerlane-host", "hal/host"),
    ];
    let inherited = [
        ("rust-version.workspace = true", "rust-version = \"1.88\""),
        ("version.workspace = true", "version = \"0.1.0\""),
        ("edition.workspace = true", "edition = \"2024\""),
        ("license.workspace = true", "license = \"MIT OR Apache-2.0\""),
        ("keywords.workspace = true\n", ""),
        ("categories.workspace = true\n", ""),
        ("\n[lints]\nworkspace = true\n", "\n[workspace]\n"),
    ];

    let mut text = text.to_owned();
    for (from, to) in inherited {
        text = text.replace(from, to);
    }
    for (package, folder) in folders {
        let to = format!("{package} = {{ path = \"{root}/{folder}\" }}");
        text = text.replace(&format!("{package}.workspace = true"), &to);
    }

    match text.contains("workspace = true") {
        true => Err("the template inherits a field that new_backend.rs does not know".into()),
        false => Ok(text),
    }
}

/// Adds the crate to the lists of the workspace, to the crate `peerlane` and to the program.
fn register(root: &Path, name: &str, network: bool) -> Outcome {
    let of_network = if network { network_entries(name) } else { Vec::new() };
    for (file, before, added) in entries(name).into_iter().chain(of_network) {
        let path = root.join(file);
        let text = std::fs::read_to_string(&path)?;
        let at = text.find(before).ok_or_else(|| format!("{file} has no {before:?}"))?;
        std::fs::write(path, format!("{}{added}{}", &text[..at], &text[at..]))?;
    }

    let counted = if network { &COUNTED[..] } else { &COUNTED[..1] };
    for (file, list) in counted {
        let path = root.join(file);
        let text = std::fs::read_to_string(&path)?;
        let counted = text.split_once(*list).and_then(|(head, rest)| {
            let (count, rest) = rest.split_once(']')?;
            Some((head, count.parse::<usize>().ok()?, rest))
        });
        let (head, count, rest) = counted.ok_or_else(|| format!("{file} has no list {list:?}"))?;
        std::fs::write(path, format!("{head}{list}{}]{rest}", count + 1))?;
    }

    // The added lines are sorted among the others.
    process::run(cargo(["fmt", "--package", "peerlane"]).current_dir(root))
}

/// The lists whose types contain their lengths: that of all backends, and that of networks.
const COUNTED: [(&str, &str); 2] =
    [("src/open/survey.rs", "ALL: [Self; "), ("src/open/survey.rs", "NETWORKS: [Self; ")];

/// A file that lists backends, with a text in it and what is added before that text.
type Entry = (&'static str, &'static str, String);

/// Returns the name of the variant of `Backend`.
fn variant(name: &str) -> String {
    let words = name.split('_').filter(|word| !word.is_empty());
    words.map(|word| format!("{}{}", word[..1].to_uppercase(), &word[1..])).collect()
}

/// Returns what is added to the lists of networks.
fn network_entries(name: &str) -> Vec<Entry> {
    let variant = variant(name);
    let survey = |before, added| ("src/open/survey.rs", before, added);

    vec![
        survey("];\n\n    /// Returns whether the backend connects", format!(", Self::{variant}")),
        survey(
            "}\n\nimpl Survey {",
            format!(
                "    /// The devices of {name} on this machine, or the reason why there are none.\n    pub {name}: Result<Vec<Device>, String>,\n"
            ),
        ),
        survey(
            "            rdma: Self::of_network(",
            format!("            {name}: Self::of_network(Backend::{variant}),\n"),
        ),
        survey(
            "            rdma: Err(NOT_LOOKED_FOR",
            format!("            {name}: Err(NOT_LOOKED_FOR.to_owned()),\n"),
        ),
        survey(
            "            Backend::Rdma => Some(&self.rdma)",
            format!("            Backend::{variant} => Some(&self.{name}),\n"),
        ),
        survey(
            "        #[cfg(feature = \"rdma\")]\n        Backend::Rdma =>",
            format!(
                "        #[cfg(feature = \"{name}\")]\n        Backend::{variant} => network_devices(backend, peerlane_{name}::discover(), |device| device.name, \"the library of the vendor\"),\n"
            ),
        ),
    ]
}

/// Returns what is added to the lists of backends.
fn entries(name: &str) -> Vec<Entry> {
    let dependencies = "\"peerlane-hal\", \"peerlane-toolkit\", \"peerlane-conformance\", \"peerlane-collectives\", \"peerlane-host\"";
    let variant = variant(name);
    let crate_name = format!("peerlane_{name}");

    vec![
        ("Cargo.toml", "\"planning\", \"bootstrap\", ", format!("\"backend-{name}\", ")),
        (
            "Cargo.toml",
            "peerlane-rdma = { path",
            format!("peerlane-{name} = {{ path = \"backend-{name}\", version = \"0.1.0\" }}\n"),
        ),
        (
            "Cargo.toml",
            "# RDMA verbs; needs",
            format!("# The backend for {name}.\n{name} = [\"dep:peerlane-{name}\"]\n"),
        ),
        (
            "Cargo.toml",
            "peerlane-rdma = { workspace = true, optional",
            format!("peerlane-{name} = {{ workspace = true, optional = true }}\n"),
        ),
        (
            "Cargo.toml",
            "peerlane-staged = { workspace = [\"peerlane-hal\"",
            format!("peerlane-{name} = {{ workspace = [{dependencies}], others = [] }}\n"),
        ),
        ("Cargo.toml", "    \"peerlane-collectives\",\n]", format!("    \"peerlane-{name}\",\n")),
        (
            "docs/ARCHITECTURE.md",
            "| `collectives/` |",
            format!(
                "| `backend-{name}/` | peerlane-{name} | the backend for {name} | hal, toolkit |\n"
            ),
        ),
        (
            "src/lib.rs",
            "#[cfg(feature = \"rdma\")]\npub use",
            format!("#[cfg(feature = \"{name}\")]\npub use {crate_name} as {name};\n"),
        ),
        (
            "src/open/survey.rs",
            "    /// The backend for RDMA NICs",
            format!("    /// The backend for {name}.\n    {variant},\n"),
        ),
        (
            "src/open/survey.rs",
            "Self::Rdma, Self::Ucx];\n\n    /// The backends that connect",
            format!("Self::{variant}, "),
        ),
        (
            "src/open/survey.rs",
            "            Self::Rdma => \"rdma\"",
            format!("            Self::{variant} => \"{name}\",\n"),
        ),
        (
            "src/open/survey.rs",
            "            Self::Rdma => cfg!",
            format!("            Self::{variant} => cfg!(feature = \"{name}\"),\n"),
        ),
        (
            "src/open/fabrics.rs",
            "            #[allow(unreachable_patterns",
            format!(
                "            #[cfg(feature = \"{name}\")]\n            Backend::{variant} => Ok(DynFabric::new({crate_name}::Fabric::open(rank, ranks)?)),\n"
            ),
        ),
        ("cli/Cargo.toml", "\"half\"]", format!("\"{name}\", ")),
        (
            "cli/src/doctor/mod.rs",
            "        finding!(\n            rdma,",
            format!("        finding!({name}, \"install the library of the vendor\"),\n"),
        ),
        ("cli/src/doctor/mod.rs", "\"rdma\", \"ucx\"]);", format!("\"{name}\", ")),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_identifiers_that_no_backend_has() {
        for name in ["tpu", "gaudi3", "my_chip"] {
            assert!(check_name(name).is_ok(), "{name}");
        }
        let text = |name| check_name(name).unwrap_err().to_string();
        assert!(text("cuda").contains("which Peerlane uses already"));
        assert!(text("type").contains("a keyword of Rust"));
        for name in ["", "3d", "Tpu", "a-b", "a b", "../x"] {
            assert!(text(name).contains(&format!("{name:?}")), "{name}");
        }
    }

    #[test]
    fn a_package_outside_inherits_nothing() {
        let root = workspace::members().unwrap().workspace_root.into_std_path_buf();
        let template = std::fs::read_to_string(root.join(TEMPLATE).join("Cargo.toml")).unwrap();
        let manifest =
            manifest_outside(&renamed(&template, "tpu"), Path::new("/peerlane")).unwrap();
        assert!(manifest.contains("name = \"peerlane-tpu\""), "{manifest}");
        assert!(manifest.contains("peerlane-hal = { path = \"/peerlane/hal\" }"), "{manifest}");
        assert!(manifest.contains("\nversion = \"0.1.0\"\n"), "{manifest}");
        assert!(manifest.contains("\nrust-version = \"1.88\"\n"), "{manifest}");
        assert!(manifest.ends_with("[workspace]\n"), "{manifest}");
    }

    #[test]
    fn the_lists_of_the_workspace_have_the_text_before_which_a_line_is_added() {
        let root = workspace::members().unwrap().workspace_root.into_std_path_buf();
        for (file, before, _) in entries("tpu").into_iter().chain(network_entries("tpu")) {
            let text = std::fs::read_to_string(root.join(file)).unwrap();
            assert_eq!(text.matches(before).count(), 1, "{file} {before}");
        }
    }
}
