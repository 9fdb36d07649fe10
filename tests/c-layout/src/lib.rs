//! Compares Rust declarations with those of a C header, by a C compiler.
//!
//! A [`Claim`] is a C expression and the number that Rust has for it: a size, an offset, a
//! constant. [`check`] compiles a program that prints the numbers of C.

use std::ffi::OsString;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// An expression of C, and its value in Rust.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The expression; its value is of an integer type.
    pub c: String,
    /// What Rust has.
    pub rust: u64,
}

impl Claim {
    /// A claim about any expression.
    pub fn of(c: impl Into<String>, rust: u64) -> Self {
        Self { c: c.into(), rust }
    }
}

/// Claims about a structure: `claims!("struct ibv_mr", ibv_mr { addr, length })` about its size and the
/// offsets of these fields, `claims!("struct ibv_cq", ibv_cq, head { context })` about the offsets alone,
/// where only the first fields are declared.
#[macro_export]
macro_rules! claims {
    ($c:expr, $rust:ty { $($field:ident),* $(,)? }) => {{
        let mut claims = $crate::claims!($c, $rust, head { $($field),* });
        claims.push($crate::Claim::of(format!("sizeof({})", $c), size_of::<$rust>() as u64));
        claims
    }};
    ($c:expr, $rust:ty, head { $($field:ident),* $(,)? }) => {
        vec![$($crate::Claim::of(
            format!("offsetof({}, {})", $c, stringify!($field).trim_end_matches('_')),
            ::std::mem::offset_of!($rust, $field) as u64,
        )),*]
    };
}

/// Claims about constants by the names of the header, where Rust has each as a value of a newtype:
/// `constants! { status_t { STATUS_OK, STATUS_BUSY } }`.
#[macro_export]
macro_rules! constants {
    ($($group:ident { $($name:ident),* $(,)? })*) => {
        vec![$($($crate::Claim::of(stringify!($name), $group::$name.0.into())),*),*]
    };
}

/// What a header needs to be compiled.
#[derive(Clone, Debug)]
pub struct Header<'a> {
    /// Lines such as `#include <infiniband/verbs.h>`.
    pub includes: &'a str,
    /// What the compiler is called with.
    pub arguments: Vec<OsString>,
}

impl Header<'_> {
    /// Whether there is a compiler, and it finds the header.
    pub fn is_there(&self, folder: &Path) -> bool {
        let program = new_program(folder);
        let compiled = self.compile(&program, "");
        let _ = std::fs::remove_file(&program);
        compiled.is_ok()
    }

    fn compile(&self, program: &Path, body: &str) -> Result<(), String> {
        let source = format!(
            "#include <stdio.h>\n#include <stddef.h>\n{}\nint main(void) {{\n{body}return 0;\n}}\n",
            self.includes
        );
        let mut compiler = Command::new("cc")
            .args(["-x", "c", "-", "-o"])
            .arg(program)
            .args(&self.arguments)
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| format!("cc: {error}"))?;
        let mut input = compiler.stdin.take().ok_or("cc has no input")?;
        input.write_all(source.as_bytes()).map_err(|error| format!("cc: {error}"))?;
        drop(input);
        let output = compiler.wait_with_output().map_err(|error| format!("cc: {error}"))?;
        if output.status.success() {
            Ok(())
        } else {
            Err(format!("cc: {}", String::from_utf8_lossy(&output.stderr)))
        }
    }
}

/// Returns a path in the folder that no other call returns, also of other processes.
fn new_program(folder: &Path) -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    folder.join(format!("layout-{}-{number}", std::process::id()))
}

/// Compares all claims with C; every one that does not hold is a line of the error.
///
/// # Errors
/// A claim does not hold, or is no C.
pub fn check(header: &Header<'_>, claims: &[Claim], folder: &Path) -> Result<(), String> {
    let prints: Vec<String> = claims
        .iter()
        .map(|claim| format!("printf(\"%llu\\n\", (unsigned long long)({}));\n", claim.c))
        .collect();
    let program = new_program(folder);
    header.compile(&program, &prints.concat())?;
    let output = Command::new(&program).output().map_err(|error| format!("{program:?}: {error}"));
    let _ = std::fs::remove_file(&program);
    let output = String::from_utf8_lossy(&output?.stdout).into_owned();
    let lines: Vec<&str> = output.lines().collect();
    if lines.len() != claims.len() {
        return Err(format!("C printed {} numbers, expected {}", lines.len(), claims.len()));
    }
    let wrong: Vec<String> = claims
        .iter()
        .zip(lines)
        .filter(|(claim, line)| claim.rust.to_string() != **line)
        .map(|(claim, line)| format!("{}: {} in Rust, {line} in C", claim.c, claim.rust))
        .collect();
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(C)]
    struct Division {
        quot: i32,
        rem: i32,
    }

    #[test]
    fn a_claim_that_does_not_hold_is_named() {
        let header = Header { includes: "#include <stdlib.h>", arguments: Vec::new() };
        let folder = std::env::temp_dir();
        if !header.is_there(&folder) {
            peerlane_test_support::not_covered(
                "a_claim_that_does_not_hold_is_named",
                "there is no C compiler",
            );
            return;
        }
        let mut claims = claims!("div_t", Division { quot, rem });
        assert_eq!(check(&header, &claims, &folder), Ok(()));
        claims.push(Claim::of("EXIT_FAILURE", 7));
        assert_eq!(
            check(&header, &claims, &folder),
            Err("EXIT_FAILURE: 7 in Rust, 1 in C".to_owned())
        );
        claims.push(Claim::of("no_such_name", 0));
        assert!(check(&header, &claims, &folder).unwrap_err().contains("no_such_name"));
    }
}
