//! Finds the dependencies of kernel modules and their loading order.
//!
//! A module names its dependencies in its own `.modinfo` section, so `depmod` is not needed.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::process::Outcome;

/// The module files of one kernel by name.
pub(crate) struct Modules {
    files: BTreeMap<String, PathBuf>,
}

impl Modules {
    /// Finds all modules below a folder, compressed or not.
    pub(crate) fn below(folder: &Path) -> Outcome<Self> {
        let mut files = BTreeMap::new();
        let mut open = vec![folder.to_owned()];
        while let Some(folder) = open.pop() {
            for entry in fs::read_dir(&folder)? {
                let entry = entry?;
                if entry.file_type()?.is_dir() {
                    open.push(entry.path());
                } else if let Some((name, _)) =
                    entry.file_name().to_string_lossy().split_once(".ko")
                {
                    files.insert(normal(name), entry.path());
                }
            }
        }
        Ok(Self { files })
    }

    /// Writes the modules `wanted` and their dependencies to `into`, uncompressed, and returns their names in loading
    /// order. Names that are not modules of this kernel are skipped, because they can be built in.
    pub(crate) fn extract(&self, wanted: &[&str], into: &Path) -> Outcome<Vec<String>> {
        fs::create_dir_all(into)?;
        let mut order = Vec::new();
        for name in wanted {
            self.extract_one(&normal(name), into, &mut order)?;
        }
        Ok(order)
    }

    fn extract_one(&self, name: &str, into: &Path, order: &mut Vec<String>) -> Outcome {
        let Some(file) = self.files.get(name) else { return Ok(()) };
        if order.iter().any(|done| done == name) {
            return Ok(());
        }
        let module = unpacked(file)?;
        for needed in depends(&module) {
            self.extract_one(&needed, into, order)?;
        }
        fs::write(into.join(format!("{name}.ko")), module)?;
        order.push(name.to_owned());
        Ok(())
    }
}

/// Normalises a name: file names and references differ in dashes.
fn normal(name: &str) -> String {
    name.replace('-', "_")
}

fn unpacked(file: &Path) -> Outcome<Vec<u8>> {
    let program = match file.extension().and_then(|extension| extension.to_str()) {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        Some("gz") => "gzip",
        _ => return Ok(fs::read(file)?),
    };
    let mut command = Command::new(program);
    let output = command
        .args(["--decompress", "--stdout", "--quiet"])
        .arg(file)
        .output()
        .map_err(|error| format!("{program}, which unpacks {}: {error}", file.display()))?;
    if output.status.success() {
        Ok(output.stdout)
    } else {
        Err(format!("{program} could not unpack {}", file.display()).into())
    }
}

/// Parses the entry `depends=a,b` of a module.
fn depends(module: &[u8]) -> Vec<String> {
    let key = b"\0depends=";
    let Some(at) = module.windows(key.len()).position(|window| window == key) else {
        return Vec::new();
    };
    let rest = &module[at + key.len()..];
    let end = rest.iter().position(|byte| *byte == 0).unwrap_or(rest.len());
    let names = String::from_utf8_lossy(&rest[..end]).into_owned();
    names.split(',').filter(|name| !name.is_empty()).map(normal).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_module_needs_stands_in_it() {
        assert_eq!(
            depends(b"ELF\0license=GPL\0depends=ib-core,udp_tunnel\0name=x\0"),
            ["ib_core", "udp_tunnel"]
        );
        assert!(depends(b"ELF\0depends=\0name=x\0").is_empty());
        assert!(depends(b"ELF\0name=x\0").is_empty());
    }
}
