//! Escapes characters of foreign text that a terminal would execute or not show.
//!
//! Names in files, options, the environment and the names of hosts come from outside. All text that people read passes through
//! [`printable`] where the program writes it, so that no name can move the cursor or change colours.

use std::borrow::Cow;
use std::path::Path;

/// Replaces every character that is not printable, except the ends of lines, by its escape in Rust, such as `\u{1b}`.
pub(crate) fn printable(text: &str) -> Cow<'_, str> {
    escape(text, |c| c == '\n' || is_printable(c), |c| c.escape_debug().to_string())
}

/// Returns the name of a file on one line.
pub(crate) fn file_name(path: &Path) -> String {
    one_line(&path.to_string_lossy(), usize::MAX)
}

/// Escapes a text that is shown on one line, and cuts it after `chars_max` characters.
fn one_line(text: &str, chars_max: usize) -> String {
    let end = text.char_indices().nth(chars_max).map(|(end, _)| end);
    let shown = &text[..end.unwrap_or(text.len())];
    let mut shown = escape(shown, is_printable, |c| c.escape_debug().to_string()).into_owned();
    if end.is_some() {
        shown.push('…');
    }
    shown
}

/// Returns an argument in the form in which an error quotes it: on one line, and only the beginning of a long one.
pub(crate) fn short(argument: &str) -> String {
    one_line(argument, 256)
}

/// Returns a line of an error, and only the beginning of a long one.
pub(crate) fn short_line(line: &str) -> String {
    one_line(line, 4096)
}

/// Replaces characters of a JSON text that are not printable by their escape in JSON. Outside of strings, there are only ends
/// of lines.
pub(crate) fn printable_json(text: &str) -> Cow<'_, str> {
    let unit = |unit: &mut u16| format!("\\u{unit:04x}");
    let escaped = |c: char| c.encode_utf16(&mut [0; 2]).iter_mut().map(unit).collect();
    escape(text, |c| c == '\n' || is_printable(c), escaped)
}

/// The escapes of the debug format are right for all characters, except those that it escapes as a delimiter.
fn is_printable(c: char) -> bool {
    matches!(c, '\'' | '"' | '\\') || c.escape_debug().eq([c])
}

fn escape(text: &str, is_kept: fn(char) -> bool, escaped: impl Fn(char) -> String) -> Cow<'_, str> {
    if text.chars().all(is_kept) {
        return Cow::Borrowed(text);
    }

    let mut printed = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_kept(c) {
            printed.push(c);
        } else {
            printed += &escaped(c);
        }
    }
    Cow::Owned(printed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_characters_that_are_not_printable_change() {
        let plain = "é — 漢字 😀 \"quoted\" \\ 'x' ─\nsecond line";
        assert!(matches!(printable(plain), Cow::Borrowed(same) if same == plain));
        assert_eq!(
            printable("\u{1b}[31mred\r\t\0\u{9b}\u{202e}"),
            r"\u{1b}[31mred\r\t\0\u{9b}\u{202e}"
        );
        assert_eq!(file_name(Path::new("a\nb")), r"a\nb");
        assert_eq!(short(&"é".repeat(300)), "é".repeat(256) + "…");
        assert_eq!(short(&"é".repeat(256)), "é".repeat(256));
    }

    #[test]
    fn json_keeps_its_meaning() {
        let value = serde_json::json!({"name": "\u{1b}\u{9b}\u{202e}\n\"\u{e0001}é"});
        let text = serde_json::to_string_pretty(&value).unwrap();
        let printed = printable_json(&text);
        assert!(printed.chars().all(|c| c == '\n' || is_printable(c)), "{printed}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&printed).unwrap(), value);
    }
}
