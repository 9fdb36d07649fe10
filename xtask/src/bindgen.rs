//! `cargo xtask bindgen`: generates types, constants and function types of HIP and of the HSA runtime from the
//! newest headers in Debian.
//!
//! The function tables of the crates are written by hand, and their functions are generated: a new function needs a
//! line in `table.rs` and a run of this command. bindgen is a program and not a dependency, because only this command
//! needs it. It and libclang are fetched below `target/bindgen` if they are missing.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::rocm;
use crate::workspace;
use peerlane_rxe_vm::packages::Store;
use peerlane_rxe_vm::process::{self, Outcome, cargo};

/// The version of bindgen, because another one may write the same headers differently.
const VERSION: &str = "0.72.1";

/// A crate of bindings.
struct Bindings {
    folder: &'static str,
    headers: &'static [&'static str],
    /// Prefix of the functions of its table.
    prefix: &'static str,
    /// Further constants and types that are generated, as regular expressions.
    constants: &'static str,
    types: &'static str,
    defines: &'static [&'static str],
    /// The enumeration to which enumerations without a name add values.
    extended: Option<&'static str>,
    /// The name of the library in texts.
    source: &'static str,
}

const BINDINGS: [Bindings; 2] = [
    Bindings {
        folder: "backend-rocm/hip-sys",
        headers: &["hip/hip_runtime_api.h"],
        prefix: "hip",
        constants: "hip(Event|Stream|Host|Device|Malloc|Ipc).*|HIP_VERSION_(MAJOR|MINOR)|HIP_IPC.*",
        types: "",
        defines: &["-D__HIP_PLATFORM_AMD__"],
        extended: None,
        source: "HIP",
    },
    Bindings {
        folder: "backend-rocm/hsa-sys",
        headers: &["hsa/hsa.h", "hsa/hsa_ext_amd.h"],
        prefix: "hsa_",
        constants: "HSA_(STATUS|AMD_INTERFACE).*",
        types: "hsa_amd_(agent_info|system_info|memory_pool_info|agent_memory_pool_info|\
                memory_pool_link_info|segment|sdma_engine_id|memory_pool_global_flag|hdp_flush|\
                memory_type|signal_attribute|memory_pool_flag).*|\
                hsa_(device_type|agent_info|agent_feature).*",
        defines: &[],
        extended: Some("hsa_status_t"),
        source: "the HSA runtime",
    },
];

/// Generates all bindings. With `check`, reports those that are out of date instead.
pub(crate) fn run(check: bool) -> Outcome {
    let metadata = workspace::members()?;
    let root = metadata.workspace_root.as_std_path();
    let folder = metadata.target_directory.join("bindgen").into_std_path_buf();
    let release = rocm::releases()?.into_iter().next().ok_or("there is no release of ROCm")?;
    let tools = Tools::obtain(&folder)?;
    let mut stale = Vec::new();
    for bindings in &BINDINGS {
        let text = bindings.generate(root, &tools, &folder, &release)?;
        let file = root.join(bindings.folder).join("src/header.rs");
        let name = file.strip_prefix(root)?.display().to_string();
        if fs::read_to_string(&file).is_ok_and(|kept| kept == text) {
            println!("{name}: up to date with ROCm {}", release.name);
        } else if check {
            stale.push(name);
        } else {
            fs::write(&file, text)?;
            println!("{name}: generated from ROCm {}", release.name);
        }
    }
    if stale.is_empty() {
        return Ok(());
    }
    let (names, name) = (stale.join(" and "), &release.name);
    Err(format!("{names}: out of date with ROCm {name}; run `cargo xtask bindgen`").into())
}

impl Bindings {
    fn generate(
        &self,
        root: &Path,
        tools: &Tools,
        folder: &Path,
        release: &rocm::Release,
    ) -> Outcome<String> {
        let table = fs::read_to_string(root.join(self.folder).join("src/table.rs"))?;
        let functions = functions(&table, self.prefix);
        if functions.is_empty() {
            return Err(format!("{}/src/table.rs lists no function", self.folder).into());
        }
        let wrapper = folder.join("wrapper.h");
        let includes: Vec<String> =
            self.headers.iter().map(|header| format!("#include <{header}>\n")).collect();
        fs::write(&wrapper, includes.concat())?;

        let mut command = Command::new(&tools.bindgen);
        command.arg(&wrapper);
        command.args(["--no-doc-comments", "--default-enum-style", "newtype"]);
        command.args(["--no-prepend-enum-name", "--with-derive-default", "--with-derive-eq"]);
        command.args(["--use-core", "--rust-edition", "2024", "--rust-target", "1.85"]);
        command.args(["--allowlist-function", &functions.join("|")]);
        command.args(["--allowlist-var", self.constants]);
        if !self.types.is_empty() {
            command.args(["--allowlist-type", self.types]);
        }
        command.args(["--", "-x", "c"]).args(self.defines);
        command.arg("-I").arg(release.headers());
        tools.prepare(&mut command);
        let text = process::output(&mut command)?;

        let source = format!("{} {}", self.source, release.name);
        let written = folder.join("header.rs");
        fs::write(&written, rewrite(&text, self.extended, &source))?;
        let mut format = Command::new("rustfmt");
        format.args(["--edition", "2024", "--config-path"]).arg(root.join("rustfmt.toml"));
        process::run(format.arg(&written))?;
        Ok(fs::read_to_string(written)?)
    }
}

/// Returns the functions that a table names in lines such as `malloc = hipMalloc;`.
fn functions(table: &str, prefix: &str) -> Vec<String> {
    let named = |line: &str| {
        let (_, named) = line.trim().strip_suffix(';')?.split_once(" = ")?;
        let name = named.split(' ').next()?;
        name.starts_with(prefix).then(|| name.to_owned())
    };
    table.lines().filter_map(named).collect()
}

/// The programs that read C headers.
struct Tools {
    bindgen: PathBuf,
    /// The unpacked libclang; `None` if the machine's own is used.
    libclang: Option<PathBuf>,
}

impl Tools {
    fn obtain(folder: &Path) -> Outcome<Self> {
        fs::create_dir_all(folder)?;
        let bindgen = folder.join("bin/bindgen");
        if !process::answers(Command::new(&bindgen).arg("--version")) {
            let package = format!("bindgen-cli@{VERSION}");
            let mut install = cargo(["install", "--locked", "--debug", &package]);
            process::run(install.arg("--root").arg(folder))?;
        }
        let libclang = folder.join("libclang");
        if std::env::var_os("LIBCLANG_PATH").is_some() {
            return Ok(Self { bindgen, libclang: None });
        }
        if !libclang.join("usr").exists() {
            let apt = folder.join("apt");
            let store = Store::open(&apt, None)?;
            let library = rocm::newest(&store, "libclang1-")?;
            let common = library.replace("libclang1-", "libclang-common-") + "-dev";
            println!("bindgen: fetching {library}");
            store.unpack_with_needs(&[&library], &libclang)?;
            // Some machines have these installed, so the call above leaves them out.
            store.unpack_alone(&[library, common], &libclang)?;
            fs::remove_dir_all(&apt)?;
        }
        Ok(Self { bindgen, libclang: Some(libclang) })
    }

    /// Sets the paths by which bindgen finds libclang, and libclang its headers.
    fn prepare(&self, command: &mut Command) {
        let Some(unpacked) = &self.libclang else { return };
        let libraries = unpacked.join("usr/lib/x86_64-linux-gnu");
        command.env("LD_LIBRARY_PATH", &libraries).env("LIBCLANG_PATH", &libraries);
        let versions = fs::read_dir(unpacked.join("usr/lib")).into_iter().flatten().flatten();
        let folders = versions.flat_map(|version| fs::read_dir(version.path().join("lib/clang")));
        for version in folders.flatten().flatten() {
            command.arg("-isystem").arg(version.path().join("include"));
        }
    }
}

/// Turns functions into types of the same name, because nothing is linked, and adds the values of enumerations
/// without a name to `extended`.
fn rewrite(text: &str, extended: Option<&str>, source: &str) -> String {
    let mut out: Vec<String> = vec![
        format!(
            "// @generated by `cargo xtask bindgen` from the headers of {source}; change those or it."
        ),
        String::new(),
        LINTS.to_owned(),
    ];
    let mut functions = Vec::new();
    let mut declaration: Option<String> = None;
    for line in text.lines() {
        if line.starts_with("unsafe extern \"C\" {") {
            declaration = Some(String::new());
        } else if let Some(function) = &mut declaration {
            if line == "}" {
                functions.push(type_of(function));
                declaration = None;
            } else {
                *function += line.trim();
                function.push(' ');
            }
        } else if DROPPED.iter().any(|dropped| line.starts_with(dropped)) {
        } else if extended.is_some() && line.starts_with(&format!("pub struct {NAMELESS}")) {
            // Its attributes are dropped too.
            while out.last().is_some_and(|line| line.starts_with("#[")) {
                out.pop();
            }
        } else {
            out.push(extended.map_or_else(|| line.to_owned(), |name| named(line, name)));
        }
    }
    out.append(&mut functions);
    out.join("\n") + "\n"
}

/// The lints that generated code does not follow.
const LINTS: &str = r#"#![allow(
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    missing_debug_implementations,
    clippy::identity_op,
    clippy::multiple_unsafe_ops_per_block,
    clippy::undocumented_unsafe_blocks,
    clippy::unnecessary_operation,
    reason = "the header's names, zeroed defaults of plain C structures, and checks of their layout"
)]
"#;

/// Beginnings of lines that are dropped: bindgen's first line, and an attribute without a reason.
const DROPPED: [&str; 2] = ["/* automatically generated", "#[allow("];

/// The name that bindgen gives to enumerations without one, without its number.
const NAMELESS: &str = "_bindgen_ty_";

/// Returns the type of a function `pub fn NAME(..) -> ..;`.
fn type_of(function: &str) -> String {
    let signature = function.trim().strip_prefix("pub fn ").unwrap_or(function);
    let (name, rest) = signature.split_once('(').unwrap_or((signature, ");"));
    format!("pub type {name} = unsafe extern \"C\" fn({}", rest.trim_start())
}

/// Returns the line with `name` in place of every enumeration without a name.
fn named(line: &str, name: &str) -> String {
    let mut parts = line.split(NAMELESS);
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |done, part| {
        done + name + part.trim_start_matches(|c: char| c.is_ascii_digit())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_those_of_the_table() {
        let table = "    required {\n        malloc = hipMalloc;\n    }\n        \
                     batch = hipStreamBatchMemOp since \"6.4\";\nconst A: u8 = 1;\n";
        assert_eq!(functions(table, "hip"), ["hipMalloc", "hipStreamBatchMemOp"]);
    }

    #[test]
    fn functions_become_types_and_the_nameless_get_a_name() {
        let text = "/* automatically generated by rust-bindgen 0.72.1 */\n\
            pub const BUSY: _bindgen_ty_3 = _bindgen_ty_3(46);\n\
            #[repr(transparent)]\n#[derive(Clone)]\npub struct _bindgen_ty_3(pub u32);\n\
            unsafe extern \"C\" {\n    pub fn init(\n        flags: u32,\n    ) -> status;\n}\n\
            #[repr(C)]\npub struct other {\n}\n#[allow(clippy::identity_op)]\n";
        assert_eq!(
            rewrite(text, Some("status"), "X 1.0"),
            format!(
                "// @generated by `cargo xtask bindgen` from the headers of X 1.0; change those or \
                 it.\n\n{LINTS}\npub const BUSY: status = status(46);\n#[repr(C)]\npub struct other \
                 {{\n}}\npub type init = unsafe extern \"C\" fn(flags: u32, ) -> status;\n"
            )
        );
    }
}
