//! `cargo xtask book`: builds the book with mdBook, and checks all links of its pages.
//!
//! The summary lists pages of the whole tree, while mdBook reads one folder. So the pages and the
//! files that they link to are copied below target/book, at the same places relative to each other.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::tidy::{link_path, link_targets};
use crate::workspace;
use peerlane_rxe_vm::process::{self, Outcome};

const FOLDER: &str = "docs/book";

/// Installs mdBook with search, also over one that was built without.
const INSTALL: &str =
    "cargo install --locked --force --no-default-features --features search mdbook@0.5.4";

pub(crate) fn run() -> Outcome {
    if !process::answers(Command::new("mdbook").arg("--version")) {
        return Err(format!("mdbook is missing; run `{INSTALL}`").into());
    }

    // Files of an earlier build would hide that a page is missing now.
    let metadata = workspace::members()?;
    let root = metadata.workspace_root.as_std_path();
    let book = metadata.target_directory.as_std_path().join("book");
    if book.exists() {
        fs::remove_dir_all(&book)?;
    }

    copy_pages(root, &book.join("src"))?;
    for name in ["book.toml", "book.css"] {
        fs::copy(root.join(FOLDER).join(name), book.join(name))?;
    }
    process::run(Command::new("mdbook").arg("build").arg(&book))?;

    let html = book.join("html");
    check_search_index(&html)?;
    let dead = dead_links(&html)?;
    if !dead.is_empty() {
        let what = "links that lead nowhere, or to a folder without a page";
        return Err(format!("{what}:\n{}", dead.join("\n")).into());
    }
    println!("the book is {}", html.join("index.html").display());
    Ok(())
}

/// Copies the pages of the summary and the files that they link to or include, and writes a summary
/// relative to `to`.
fn copy_pages(root: &Path, to: &Path) -> Outcome {
    let place = format!("{FOLDER}/SUMMARY.md");
    let mut summary = fs::read_to_string(root.join(&place))?;
    let links: BTreeSet<String> =
        summary.lines().flat_map(link_targets).map(str::to_owned).collect();

    let mut files = BTreeSet::new();
    for link in links {
        let page = link_path(&place, &link);
        let text =
            fs::read_to_string(root.join(&page)).map_err(|error| format!("{page}: {error}"))?;
        let includes: Vec<Include<'_>> = includes(&text).collect();
        for include in &includes {
            include.check(&root.join(&page))?;
        }

        let includes = includes.iter().map(|include| include.file);
        let targets = text.lines().flat_map(link_targets).chain(includes);
        files.extend(targets.map(|target| link_path(&page, target)));

        // The summary of the copies is at their root, so its links become paths of the tree.
        summary = summary.replace(&format!("({link})"), &format!("({page})"));
        files.insert(page);
    }

    // A link to a folder has no file to copy; it leads to the page of the folder, or is dead.
    for file in files.iter().filter(|file| root.join(file).is_file()) {
        let copy = to.join(file);
        fs::create_dir_all(copy.parent().ok_or("a file is in a folder")?)?;
        match file.ends_with(".md") {
            true => fs::write(copy, of_book(&fs::read_to_string(root.join(file))?))?,
            false => drop(fs::copy(root.join(file), copy)?),
        }
    }
    Ok(fs::write(to.join("SUMMARY.md"), summary)?)
}

/// A directive by which mdBook includes a part of another page.
struct Include<'t> {
    file: &'t str,
    /// The numbers of the first and the last line to include; `None` if it names no lines.
    lines: Option<(usize, usize)>,
}

fn includes(text: &str) -> impl Iterator<Item = Include<'_>> {
    let places = text.split("{{#include ").skip(1).filter_map(|rest| rest.split("}}").next());
    places.map(|place| {
        let mut parts = place.split(':');
        let file = parts.next().unwrap_or_default();
        let lines = parts.next().zip(parts.next());
        let number = |text: &str| text.parse::<usize>().ok();
        let lines = lines.and_then(|(first, last)| number(first).zip(number(last)));
        Include { file, lines }
    })
}

impl Include<'_> {
    /// Checks that lines given by number are rows of a table, because a new measurement can move
    /// them.
    fn check(&self, page: &Path) -> Outcome {
        let Some((first, last)) = self.lines else { return Ok(()) };
        let text = fs::read_to_string(page.with_file_name("").join(self.file))?;
        let line = |number: usize| text.lines().nth(number - 1);
        if [first, last].iter().all(|at| line(*at).is_some_and(|line| line.starts_with('|'))) {
            return Ok(());
        }
        let what = format!("lines {first} to {last} of {}", self.file);
        Err(format!("{} includes {what}, which are no rows of a table", page.display()).into())
    }
}

/// Replaces links to Rust items, which only rustdoc resolves, by their texts, and links to the
/// summary, which is no page. The page of a `README.md` is `index.html`.
fn of_book(text: &str) -> String {
    let text = text.replace("docs/book/SUMMARY.md", "docs/book/introduction.md");
    let text = text.replace("/README.md)", "/index.html)").replace("/README.md#", "/index.html#");
    let text = text.replace("](README.md", "](index.html");

    // A part begins with the path of an item; the text of its link is at the end of the one before.
    let mut parts = text.split("](crate::");
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        if let Some(bracket) = plain.rfind('[') {
            plain.remove(bracket);
        }
        plain.push_str(part.split_once(')').map_or(part, |(_, rest)| rest));
    }
    plain
}

/// Checks that mdBook has written the index of the search: `searchindex-HASH.js`.
fn check_search_index(html: &Path) -> Outcome {
    for entry in fs::read_dir(html)? {
        if entry?.file_name().to_string_lossy().starts_with("searchindex") {
            return Ok(());
        }
    }
    Err(format!("the book has no search, because mdbook was built without; run `{INSTALL}`").into())
}

/// Returns the links of all pages to files and sections that do not exist, and to folders without a
/// page.
fn dead_links(html: &Path) -> Outcome<Vec<String>> {
    let mut pages = BTreeMap::new();
    add_pages(html, &mut pages)?;
    let mut dead = Vec::new();
    for (page, text) in &pages {
        let of_page = page.to_string_lossy();
        for link in attributes(text, "href").chain(attributes(text, "src")) {
            if link.contains("://") || link.starts_with("data:") || link.starts_with("mailto:") {
                continue;
            }
            let (file, section) = link.split_once('#').unwrap_or((link, ""));
            let mut target = match file {
                "" => page.clone(),
                file => PathBuf::from(link_path(&of_page, file)),
            };
            // A browser opens the page of a folder, if it has one.
            if target.is_dir() {
                target.push("index.html");
            }

            let has_section = |text: &String| attributes(text, "id").any(|id| id == section);
            let is_there = match pages.get(&target) {
                Some(text) => section.is_empty() || has_section(text),
                None => target.exists(),
            };
            if !is_there {
                dead.push(format!("{}: {link}", page.strip_prefix(html)?.display()));
            }
        }
    }
    Ok(dead)
}

/// Adds the text of every page that is a chapter.
fn add_pages(folder: &Path, pages: &mut BTreeMap<PathBuf, String>) -> Outcome {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let is_chapter = path.extension().is_some_and(|extension| extension == "html")
            && !["print.html", "404.html", "toc.html"].iter().any(|name| path.ends_with(name));
        if path.is_dir() {
            add_pages(&path, pages)?;
        } else if is_chapter {
            let text = fs::read_to_string(&path)?;
            pages.insert(path, text);
        }
    }
    Ok(())
}

fn attributes<'t>(html: &'t str, name: &str) -> impl Iterator<Item = &'t str> {
    let start = format!(" {name}=\"");
    let values: Vec<&str> =
        html.split(&start).skip(1).filter_map(|rest| rest.split('"').next()).collect();
    values.into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_to_rust_items_become_their_texts() {
        let text = "the [contract](crate::contract), [`Op`](crate::Op) and [a page](page.md)";
        assert_eq!(of_book(text), "the contract, `Op` and [a page](page.md)");
    }

    #[test]
    fn links_to_a_readme_lead_to_the_page_of_its_folder() {
        let text = "[a](README.md), [b](../b/README.md), [c](c/README.md#d), README.md";
        let expected = "[a](index.html), [b](../b/index.html), [c](c/index.html#d), README.md";
        assert_eq!(of_book(text), expected);
    }

    #[test]
    fn included_lines_that_are_no_rows_are_refused() {
        let text = "a {{#include ../perf/x.md:2:3}} and {{#include y.md:name}}";
        let found: Vec<_> = includes(text).map(|include| (include.file, include.lines)).collect();
        assert_eq!(found, [("../perf/x.md", Some((2, 3))), ("y.md", None)]);
        let folder = std::env::temp_dir().join(format!("peerlane-include-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("x.md"), "text\n| a |\n| 1 |\n").unwrap();
        let page = folder.join("page.md");
        let is_accepted = [(2, 3), (1, 2), (3, 4)]
            .map(|lines| Include { file: "x.md", lines: Some(lines) }.check(&page).is_ok());
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(is_accepted, [true, false, false]);
    }

    #[test]
    fn a_book_without_a_search_index_is_refused() {
        let folder = std::env::temp_dir().join(format!("peerlane-search-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("searcher-09f2.js"), "").unwrap();
        let without = check_search_index(&folder).map_err(|error| error.to_string());
        fs::write(folder.join("searchindex-bc32.js"), "").unwrap();
        let with = check_search_index(&folder).map_err(|error| error.to_string());

        fs::remove_dir_all(&folder).unwrap();
        assert!(without.unwrap_err().contains("--features search"));
        assert_eq!(with, Ok(()));
    }

    #[test]
    fn links_to_missing_files_and_sections_are_dead() {
        let folder = std::env::temp_dir().join(format!("peerlane-book-{}", std::process::id()));
        fs::create_dir_all(folder.join("uses")).unwrap();
        fs::write(folder.join("a.html"), "<h1 id=\"top\"> <a href=\"uses/b.html#there\">").unwrap();
        fs::create_dir_all(folder.join("images")).unwrap();
        fs::create_dir_all(folder.join("notes")).unwrap();
        fs::write(folder.join("notes/index.html"), "<h1 id=\"first\">").unwrap();
        let links = [
            "../a.html#top",
            "../a.html#gone",
            "c.html",
            "#there",
            "https://example.org",
            "../images",
            "../notes",
            "../notes/#first",
            "../notes#second",
        ];
        let links: String = links.iter().map(|link| format!("<a href=\"{link}\">")).collect();
        fs::write(folder.join("uses/b.html"), format!("<h2 id=\"there\">{links}")).unwrap();
        let dead = dead_links(&folder).unwrap();
        fs::remove_dir_all(&folder).unwrap();
        let expected = ["../a.html#gone", "c.html", "../images", "../notes#second"];
        assert_eq!(dead, expected.map(|link| format!("uses/b.html: {link}")));
    }
}
