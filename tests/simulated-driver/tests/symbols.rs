//! The library has every symbol that the CUDA backend looks up, so that the two cannot drift apart.

mod driver;

use std::path::Path;

use driver::{start, symbol};

/// The names in the backend's table: literals such as `"cuInit"`.
fn wanted() -> Vec<String> {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../backend-cuda/src/sys.rs");
    let text =
        std::fs::read_to_string(&sources).unwrap_or_else(|error| panic!("{sources:?}: {error}"));
    let literals = text.split('"').skip(1).step_by(2);
    let name = |text: &&str| {
        text.starts_with("cu") && text.chars().all(|c| c.is_alphanumeric() || c == '_')
    };
    literals.filter(name).map(str::to_owned).collect()
}

#[test]
fn the_backend_finds_all_it_looks_up() {
    let _driver = start();
    let wanted = wanted();
    assert!(wanted.len() > 50, "the table is not where it was: {wanted:?}");
    let missing: Vec<&String> = wanted.iter().filter(|name| symbol(name).is_null()).collect();
    assert!(missing.is_empty(), "the simulated driver lacks {missing:?}");
}
