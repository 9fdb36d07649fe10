//! Says how many random cases a test runs.

use std::env;

/// Returns `all` if the variable `PEERLANE_SEEDS` is set, as the gate does, and otherwise `some`.
pub(crate) fn number_of_cases(some: u64, all: u64) -> u64 {
    if env::var_os("PEERLANE_SEEDS").is_some() { all } else { some }
}
