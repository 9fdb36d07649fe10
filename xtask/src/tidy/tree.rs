//! Reads the files that git tracks or would track.

use std::path::Path;
use std::process::Command;

use peerlane_rxe_vm::process::{self, Outcome};

/// A file, with its path relative to the root.
#[derive(Debug)]
pub(super) struct File {
    pub(super) path: String,
    /// The contents; empty unless it is UTF-8.
    pub(super) text: String,
}

/// The files of the workspace, without those that git ignores.
#[derive(Debug, Default)]
pub(super) struct Tree(Vec<File>);

impl Tree {
    /// Reads the tree under `root`, which must be a git checkout.
    pub(super) fn read(root: &Path) -> Outcome<Self> {
        let mut git = Command::new("git");
        git.current_dir(root).args(["ls-files", "-z", "--cached", "--others"]);
        git.arg("--exclude-standard");
        let listed = process::output(&mut git)?;
        let mut paths: Vec<&str> = listed.split_terminator('\0').collect();
        paths.sort_unstable();
        paths.dedup();

        let mut files = Vec::with_capacity(paths.len());
        for path in paths {
            // git lists a file that is deleted and not yet committed.
            if let Ok(bytes) = std::fs::read(root.join(path)) {
                let text = String::from_utf8(bytes).unwrap_or_default();
                files.push(File { path: path.to_owned(), text });
            }
        }
        Ok(Self(files))
    }

    #[cfg(test)]
    pub(super) fn of(files: &[(&str, &str)]) -> Self {
        let file = |&(path, text): &(&str, &str)| File { path: path.into(), text: text.into() };
        Self(files.iter().map(file).collect())
    }

    /// Returns all files, sorted by path.
    pub(super) fn files(&self) -> &[File] {
        &self.0
    }

    pub(super) fn file(&self, path: &str) -> Option<&File> {
        self.0.iter().find(|file| file.path == path)
    }

    /// Returns the files whose path ends so, such as `.rs`.
    pub(super) fn ending_in(&self, ending: &str) -> impl Iterator<Item = &File> {
        self.0.iter().filter(move |file| file.path.ends_with(ending))
    }
}

impl File {
    /// Returns the lines with their numbers, from 1.
    pub(super) fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        (1..).zip(self.text.lines())
    }

    /// Returns the number of the first line that fulfils the condition, or 1.
    pub(super) fn line_where(&self, is_it: impl Fn(&str) -> bool) -> usize {
        self.lines().find(|(_, line)| is_it(line)).map_or(1, |(number, _)| number)
    }
}
