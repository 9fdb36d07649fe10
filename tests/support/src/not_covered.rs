//! Says what could not be tested on this machine.

use std::io::Write as _;

/// Says that a test, by its name, or a part of one could not run here, and why. `cargo xtask test` counts the test as ignored and
/// lists the reason.
pub fn not_covered(what: &str, why: &str) {
    // The standard harness would capture the output of `eprintln!`.
    let _ = writeln!(std::io::stderr(), "not covered: {what}: {why}");
}
