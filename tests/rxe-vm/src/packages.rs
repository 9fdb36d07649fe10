//! Downloads Debian packages and unpacks them below `target/`.
//!
//! Nothing is installed and nothing on the machine changes, so root is not needed. apt works on private lists and a
//! private cache; mirrors, keys and versions are those of the machine's own configuration.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::process::{self, Outcome};

/// A private apt cache.
#[derive(Debug)]
pub struct Store {
    folder: PathBuf,
    config: PathBuf,
    /// Warnings of apt about the package lists; they are not fatal by themselves.
    complaints: String,
}

impl Store {
    /// Opens a cache in `folder`, with the machine's own sources or with the given source lines.
    ///
    /// # Errors
    /// If apt is missing or cannot be run.
    pub fn open(folder: &Path, sources: Option<&[String]>) -> Outcome<Self> {
        Self::with(folder, sources, "")
    }

    /// Opens a cache that treats no package as installed, so that all dependencies are downloaded too, preferably from
    /// `suite`.
    ///
    /// # Errors
    /// If apt is missing or cannot be run.
    pub fn bare(folder: &Path, sources: &[String], suite: &str) -> Outcome<Self> {
        fs::create_dir_all(folder)?;
        let installed = folder.join("status");
        fs::write(&installed, "")?;
        let lines = format!(
            "Dir::State::status \"{}\";\nAPT::Default-Release \"{suite}\";\n",
            installed.display()
        );
        Self::with(folder, Some(sources), &lines)
    }

    fn with(folder: &Path, sources: Option<&[String]>, more: &str) -> Outcome<Self> {
        if !available() {
            return Err(
                "packages are taken with apt-get and dpkg-deb, which this machine lacks".into()
            );
        }
        for part in ["lists/partial", "archives/partial"] {
            fs::create_dir_all(folder.join(part))?;
        }
        let shown = folder.display();
        let mut lines = format!(
            "Dir::State::lists \"{shown}/lists\";\nDir::Cache \"{shown}\";\n\
             Dir::Cache::archives \"{shown}/archives\";\nAcquire::Retries \"3\";\n\
             APT::Sandbox::User \"\";\nDebug::NoLocking \"true\";\nDpkg::Use-Pty \"false\";\n"
        );
        if let Some(sources) = sources {
            let list = folder.join("sources.list");
            fs::write(&list, sources.join("\n") + "\n")?;
            lines += &format!(
                "Dir::Etc::sourcelist \"{}\";\nDir::Etc::sourceparts \"/dev/null\";\n",
                list.display()
            );
        }
        let config = folder.join("apt.conf");
        fs::write(&config, lines + more)?;
        let mut store = Self { folder: folder.to_owned(), config, complaints: String::new() };
        let update = store.apt("apt-get").args(["--quiet=2", "update"]).output()?;
        store.complaints = String::from_utf8_lossy(&update.stderr).into_owned();
        Ok(store)
    }

    /// Unpacks these packages and their dependencies that are not installed.
    ///
    /// # Errors
    /// If a package cannot be downloaded or unpacked.
    pub fn unpack_with_needs(&self, names: &[&str], into: &Path) -> Outcome {
        let mut command = self.apt("apt-get");
        // Only downloads: packages that apt would remove for an installation stay installed.
        command.args(["--quiet=2", "--yes", "--download-only", "--no-install-recommends"]);
        self.download(command.arg("install").args(names))?;
        self.unpack(into)
    }

    /// Unpacks these packages without their dependencies.
    ///
    /// # Errors
    /// If a package cannot be downloaded or unpacked.
    pub fn unpack_alone(&self, names: &[String], into: &Path) -> Outcome {
        let mut command = self.apt("apt-get");
        command.current_dir(self.folder.join("archives"));
        self.download(command.args(["--quiet=2", "download"]).args(names))?;
        self.unpack(into)
    }

    /// Returns the direct dependencies of a package, or nothing if it does not exist.
    pub fn depends(&self, name: &str) -> Vec<String> {
        let shown =
            process::output(self.apt("apt-cache").args(["show", "--no-all-versions", name]));
        shown.map(|shown| depends(&shown)).unwrap_or_default()
    }

    /// Returns the names of all packages with this prefix.
    pub fn names(&self, prefix: &str) -> Vec<String> {
        let shown = process::output(self.apt("apt-cache").args(["pkgnames", prefix]));
        shown.map(|shown| shown.lines().map(str::to_owned).collect()).unwrap_or_default()
    }

    /// Returns the warnings of apt about the package lists.
    pub fn complaints(&self) -> &str {
        self.complaints.trim_end()
    }

    fn download(&self, command: &mut Command) -> Outcome {
        process::output(command)
            .map_err(|error| format!("{}\n{}", error.to_string().trim_end(), self.complaints()))?;
        Ok(())
    }

    fn unpack(&self, into: &Path) -> Outcome {
        fs::create_dir_all(into)?;
        for entry in fs::read_dir(self.folder.join("archives"))? {
            let package = entry?.path();
            if package.extension().is_some_and(|extension| extension == "deb") {
                process::output(Command::new("dpkg-deb").arg("--extract").args([&package, into]))?;
                fs::remove_file(package)?;
            }
        }
        Ok(())
    }

    fn apt(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("APT_CONFIG", &self.config).env("DEBIAN_FRONTEND", "noninteractive");
        command
    }
}

/// Returns whether apt-get and dpkg-deb are installed.
pub fn available() -> bool {
    process::answers(Command::new("apt-get").arg("--version"))
        && process::answers(Command::new("dpkg-deb").arg("--version"))
}

/// A package source of the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// Address of the mirror.
    pub address: String,
    /// Name of the suite.
    pub suite: String,
    /// Keyring that signs the packages.
    pub signed_by: Option<String>,
}

impl Source {
    /// Returns the source line for another suite of the same mirror.
    pub fn line(&self, suite: &str) -> String {
        let options = self.signed_by.as_ref().map(|key| format!("[signed-by={key}] "));
        format!("deb {}{} {suite} main", options.unwrap_or_default(), self.address)
    }
}

/// Returns the machine's Debian mirrors. A third-party mirror with a similar address may be among them.
pub fn of_debian() -> Vec<Source> {
    let mut found: Vec<Source> = Vec::new();
    for source in sources() {
        let debian = source.address.trim_end_matches('/').ends_with("debian");
        if debian && found.iter().all(|other| other.address != source.address) {
            found.push(source);
        }
    }
    found
}

/// Reads the machine's package sources.
fn sources() -> Vec<Source> {
    let mut files = vec![PathBuf::from("/etc/apt/sources.list")];
    if let Ok(entries) = fs::read_dir("/etc/apt/sources.list.d") {
        files.extend(entries.flatten().map(|entry| entry.path()));
    }
    files.sort();
    let mut found = Vec::new();
    for file in files {
        let Ok(text) = fs::read_to_string(&file) else { continue };
        match file.extension().and_then(|extension| extension.to_str()) {
            Some("list") => found.extend(text.lines().filter_map(one_line)),
            Some("sources") => found.extend(text.split("\n\n").flat_map(stanza)),
            _ => {}
        }
    }
    found
}

/// Parses a line such as `deb [signed-by=KEY] ADDRESS SUITE main`.
fn one_line(line: &str) -> Option<Source> {
    let mut rest = line.trim().strip_prefix("deb ")?.trim_start();
    let mut signed_by = None;
    if let Some(options) = rest.strip_prefix('[') {
        let (options, after) = options.split_once(']')?;
        let mut options = options.split_whitespace();
        signed_by = options.find_map(|option| option.strip_prefix("signed-by=")).map(str::to_owned);
        rest = after;
    }
    let mut words = rest.split_whitespace();
    let (address, suite) = (words.next()?.to_owned(), words.next()?.to_owned());
    Some(Source { address, suite, signed_by })
}

/// Parses the fields `Types`, `URIs`, `Suites` and `Signed-By` of a stanza.
fn stanza(text: &str) -> Vec<Source> {
    let field = |name: &str| {
        let mut lines = text.lines().filter_map(|line| line.split_once(':'));
        lines.find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim())
    };
    if !field("Types").is_some_and(|types| types.split_whitespace().any(|kind| kind == "deb")) {
        return Vec::new();
    }
    let signed_by = field("Signed-By").filter(|key| key.starts_with('/')).map(str::to_owned);
    let suites = field("Suites").unwrap_or_default();
    let addresses = field("URIs").unwrap_or_default();
    let pairs = addresses
        .split_whitespace()
        .flat_map(|address| suites.split_whitespace().map(move |suite| (address, suite)));
    pairs
        .map(|(address, suite)| Source {
            address: address.to_owned(),
            suite: suite.to_owned(),
            signed_by: signed_by.clone(),
        })
        .collect()
}

fn depends(shown: &str) -> Vec<String> {
    let lines = shown.lines().filter_map(|line| line.strip_prefix("Depends: "));
    lines
        .flat_map(|line| line.split(", "))
        .filter_map(|name| name.split_whitespace().next())
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_read_in_both_notations() {
        let source = |suite: &str, signed_by: Option<&str>| Source {
            address: "http://mirror.example/debian".into(),
            suite: suite.into(),
            signed_by: signed_by.map(str::to_owned),
        };
        let key = Some("/usr/share/keyrings/a.gpg");
        let text = "Types: deb\n# a note\nURIs: http://mirror.example/debian\n\
                    Suites: stable stable-updates\nComponents: main\nSigned-By: /usr/share/keyrings/a.gpg";
        assert_eq!(stanza(text), [source("stable", key), source("stable-updates", key)]);
        assert_eq!(stanza("Types: deb-src\nURIs: http://a\nSuites: b"), []);

        let line = "deb [arch=amd64 signed-by=/usr/share/keyrings/a.gpg] http://mirror.example/debian stable main";
        assert_eq!(one_line(line), Some(source("stable", key)));
        assert_eq!(
            one_line("deb http://mirror.example/debian stable main"),
            Some(source("stable", None))
        );
        assert_eq!(one_line("# deb http://mirror.example/debian stable main"), None);
        assert_eq!(
            source("stable", key).line("other"),
            "deb [signed-by=/usr/share/keyrings/a.gpg] http://mirror.example/debian other main"
        );
    }

    #[test]
    fn dependencies_lose_their_versions() {
        let shown = "Package: a\nDepends: b-1 (= 7.2), c | d, e\nSize: 3\n";
        assert_eq!(depends(shown), ["b-1", "c", "e"]);
    }
}
