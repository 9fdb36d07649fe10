//! The files that git tracks or would track.

use std::path::Path;
use std::process::Command;

use peerlane_rxe_vm::process::{self, Outcome};

/// One file, its path relative to the root.
#[derive(Debug)]
pub(super) struct File {
    pub(super) path: String,
    /// Empty for what is not text.
    pub(super) text: String,
}

/// All files of the workspace, ignored ones left out.
#[derive(Debug, Default)]
pub(super) struct Tree(Vec<File>);

impl Tree {
    /// Reads the tree under `root`, which must be a git checkout.
    pub(super) fn read(root: &Path) -> Outcome<Self> {
        let mut git = Command::new("git");
        git.current_dir(root).args([
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
        ]);
        let listed = process::output(&mut git)?;
        let mut paths: Vec<&str> = listed.split_terminator('\0').collect();
        paths.sort_unstable();
        paths.dedup();

        let mut files = Vec::with_capacity(paths.len());
        for path in paths {
            // A file that was deleted and not yet committed is listed, but is not there.
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

    /// In the order of their paths.
    pub(super) fn files(&self) -> &[File] {
        &self.0
    }

    pub(super) fn file(&self, path: &str) -> Option<&File> {
        self.0.iter().find(|file| file.path == path)
    }

    /// The files of one kind, such as `.rs`.
    pub(super) fn ending_in(&self, ending: &str) -> impl Iterator<Item = &File> {
        self.0.iter().filter(move |file| file.path.ends_with(ending))
    }
}

impl File {
    /// The lines with their numbers, from 1.
    pub(super) fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        (1..).zip(self.text.lines())
    }

    /// The number of the first line for which `is_it`, or 1.
    pub(super) fn line_where(&self, is_it: impl Fn(&str) -> bool) -> usize {
        self.lines().find(|(_, line)| is_it(line)).map_or(1, |(number, _)| number)
    }
}
