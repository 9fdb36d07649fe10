//! Fetches a kernel with soft RoCE.
//!
//! Versions are not pinned, because distributions drop old ones. The newest package of the machine's own mirror is
//! unpacked and kept below `target/` with the few modules that are needed.

use std::fs;
use std::path::{Path, PathBuf};

use crate::modules::Modules;
use crate::packages::{self, Store};
use crate::process::Outcome;

/// Debian suites whose kernels are tried, in this order, before the machine's own suite.
const SUITES: [&str; 1] = ["trixie-backports"];
/// Modules to load. A missing one is either built in, or the guest reports what it lacks.
const MODULES: [&str; 7] =
    ["crc32_generic", "rdma_rxe", "rdma_ucm", "veth", "bridge", "sch_netem", "sch_tbf"];
/// First version that supports soft RoCE devices inside a network namespace.
const NAMESPACES_SINCE: (u32, u32) = (7, 2);

/// An unpacked kernel below `target/`.
#[derive(Debug)]
pub(crate) struct Kernel {
    pub(crate) image: PathBuf,
    pub(crate) modules: PathBuf,
    /// Names of the modules in loading order.
    pub(crate) order: Vec<String>,
    pub(crate) release: String,
}

impl Kernel {
    /// Returns the kept kernel or fetches one; `stock` restricts it to the machine's own sources.
    pub(crate) fn obtain(folder: &Path, stock: bool) -> Outcome<Self> {
        if let Some(kept) = Self::kept(folder) {
            return Ok(kept);
        }
        let mut refused = Vec::new();
        for (what, sources) in candidates(stock) {
            println!("kernel: taking it from {what}");
            match Self::take(folder, sources.as_deref()) {
                Ok(kernel) => return Ok(kernel),
                Err(error) => refused.push(format!("{what}: {}", error.to_string().trim_end())),
            }
        }
        Err(format!("no kernel with soft RoCE was found\n{}", refused.join("\n")).into())
    }

    /// Returns whether each node can have a namespace with its own device.
    pub(crate) fn namespaces(&self) -> bool {
        version(&self.release).is_some_and(|version| version >= NAMESPACES_SINCE)
    }

    fn kept(folder: &Path) -> Option<Self> {
        // This file is written last, so the others are complete.
        let listed = fs::read_to_string(folder.join("modules.order")).ok()?;
        let release = fs::read_to_string(folder.join("release")).ok()?;
        Some(Self {
            image: folder.join("vmlinuz"),
            modules: folder.join("modules"),
            order: listed.lines().map(str::to_owned).collect(),
            release,
        })
    }

    fn take(folder: &Path, sources: Option<&[String]>) -> Outcome<Self> {
        let _ = fs::remove_dir_all(folder);
        fs::create_dir_all(folder)?;
        let (store, tree) = (folder.join("apt"), folder.join("tree"));
        let packages = Store::open(&store, sources)?;
        let names = packages_of(&packages);
        if names.is_empty() {
            let complaints = packages.complaints();
            return Err(format!("there is no package of a kernel\n{complaints}").into());
        }
        println!("kernel: {}", names.join(", "));
        packages.unpack_alone(&names, &tree)?;

        let mut trees = Vec::new();
        for below in ["usr/lib/modules", "lib/modules"] {
            trees.extend(fs::read_dir(tree.join(below)).into_iter().flatten().flatten());
        }
        let tree_of_modules = trees.first().ok_or("the package holds no modules")?;
        let release = tree_of_modules.file_name().to_string_lossy().into_owned();
        let images = [
            tree_of_modules.path().join("vmlinuz"),
            tree.join("boot").join(format!("vmlinuz-{release}")),
        ];
        let image =
            images.iter().find(|image| image.exists()).ok_or("the package has no kernel")?;
        fs::copy(image, folder.join("vmlinuz"))?;
        let modules = Modules::below(&tree_of_modules.path())?;
        let order = modules.extract(&MODULES, &folder.join("modules"))?;
        if !order.iter().any(|name| name == "rdma_rxe") {
            return Err(format!("kernel {release} has no module rdma_rxe").into());
        }
        fs::remove_dir_all(&tree)?;
        fs::remove_dir_all(&store)?;
        fs::write(folder.join("release"), release)?;
        fs::write(folder.join("modules.order"), order.join("\n"))?;
        Self::kept(folder).ok_or_else(|| "the kernel could not be kept".into())
    }
}

/// Returns the sources to try; `None` stands for the machine's own.
fn candidates(stock: bool) -> Vec<(String, Option<Vec<String>>)> {
    let mut found: Vec<(String, Option<Vec<String>>)> = Vec::new();
    for source in packages::of_debian().iter().filter(|_| !stock) {
        for suite in SUITES {
            found.push((format!("{suite}, {}", source.address), Some(vec![source.line(suite)])));
        }
    }
    found.push(("the machine's own sources".to_owned(), None));
    found
}

/// Returns the packages of the kernel and its modules, without their dependencies.
fn packages_of(store: &Store) -> Vec<String> {
    let mut open: Vec<String> =
        ["linux-image-amd64", "linux-image-generic"].map(str::to_owned).into();
    let mut found = Vec::new();
    while let Some(name) = open.pop() {
        let inner: Vec<String> =
            store.depends(&name).into_iter().filter(|inner| holds_kernel(inner)).collect();
        found.extend(
            inner.iter().filter(|inner| !found.contains(*inner)).cloned().collect::<Vec<_>>(),
        );
        open.extend(inner);
    }
    if found.is_empty() {
        found = newest(&store.names("linux-binary-"));
    }
    found
}

fn holds_kernel(name: &str) -> bool {
    let parts = ["linux-image-", "linux-binary-", "linux-modules-"];
    parts.iter().any(|part| {
        name.strip_prefix(part).is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    })
}

/// Without a metapackage: the highest version whose packages are all present.
fn newest(names: &[String]) -> Vec<String> {
    let plain = |release: &&str| {
        release.ends_with("-amd64")
            && !["-rt-", "-cloud-"].iter().any(|kind| release.contains(kind))
    };
    let releases = names.iter().filter_map(|name| name.strip_prefix("linux-binary-")).filter(plain);
    releases
        .filter(|release| version(release).is_some())
        .max_by_key(|release| numbers(release))
        .map(|release| vec![format!("linux-binary-{release}"), format!("linux-modules-{release}")])
        .unwrap_or_default()
}

fn numbers(release: &str) -> Vec<u32> {
    release.split(|c: char| !c.is_ascii_digit()).map_while(|number| number.parse().ok()).collect()
}

/// Parses the major and minor version of a release.
pub(crate) fn version(release: &str) -> Option<(u32, u32)> {
    match numbers(release)[..] {
        [major, minor, ..] => Some((major, minor)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_decides_on_namespaces() {
        assert_eq!(version("7.2.12+deb13-amd64"), Some((7, 2)));
        assert_eq!(version("6.1.0-51-amd64"), Some((6, 1)));
        assert_eq!(version("unsigned-7.2"), None);
        assert!(version("10.0-1").unwrap() > NAMESPACES_SINCE);
    }

    #[test]
    fn the_newest_plain_kernel_is_found() {
        let names =
            ["6.19.10+deb13", "7.2.6+deb13", "7.2.12+deb13", "7.2.12+deb13-rt", "7.3.4-cloud"]
                .map(|release| format!("linux-binary-{release}-amd64"));
        assert_eq!(
            newest(&names),
            ["linux-binary-7.2.12+deb13-amd64", "linux-modules-7.2.12+deb13-amd64"]
        );
        assert!(newest(&["linux-binary-unsigned-7.2.12-amd64".to_owned()]).is_empty());
    }

    #[test]
    fn only_packages_with_a_kernel_are_taken() {
        assert!(holds_kernel("linux-modules-7.2.12+deb13-amd64"));
        assert!(!holds_kernel("linux-base-amd64"));
        assert!(!holds_kernel("linux-image-amd64"));
    }
}
