//! Checks that the library has every symbol that the backends look up.
//!
//! The library's file is read, because one process can load only one library, and the symbols are
//! those of several.

use std::path::Path;

/// A file of a backend.
fn source(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path:?}: {error}"))
}

fn is_symbol(text: &str, prefix: &str) -> bool {
    text.starts_with(prefix) && text.chars().all(|c| c.is_alphanumeric() || c == '_')
}

/// The names in the table of the CUDA backend: literals such as `"cuInit"`.
fn wanted_of_cuda() -> Vec<String> {
    let text = source("backend-cuda/src/sys.rs");
    let literals = text.split('"').skip(1).step_by(2);
    literals.filter(|text| is_symbol(text, "cu")).map(str::to_owned).collect()
}

/// The names in a table of the ROCm backend: rows such as `init = hipInit;`.
fn wanted_of_rocm(path: &str, prefix: &str) -> Vec<String> {
    let text = source(path);
    let rows = text.lines().filter_map(|line| line.split_once(" = "));
    let names = rows.filter_map(|(_, value)| value.split([' ', ';']).next());
    names.filter(|name| is_symbol(name, prefix)).map(str::to_owned).collect()
}

#[test]
fn the_backends_find_all_they_look_up() {
    let library = std::fs::read(peerlane_simulated_driver::library()).unwrap();
    let tables = [
        ("CUDA", wanted_of_cuda()),
        ("HIP", wanted_of_rocm("backend-rocm/hip-sys/src/table.rs", "hip")),
        ("HSA", wanted_of_rocm("backend-rocm/hsa-sys/src/table.rs", "hsa_")),
    ];
    for (table, wanted) in tables {
        assert!(wanted.len() > 35, "the table of {table} is not where it was: {wanted:?}");
        let has = |name: &&String| {
            let text = [&[0], name.as_bytes(), &[0]].concat();
            library.windows(text.len()).any(|window| window == text)
        };
        let missing: Vec<_> = wanted.iter().filter(|name| !has(name)).collect();
        assert!(missing.is_empty(), "the simulated driver lacks {missing:?} of {table}");
    }
}
