//! Tests `peerlane plan-buffers`.

use std::fs;
use std::path::PathBuf;

use serde_json::Value;

use crate::common::{Ended, command, end};

/// Runs the command on a file with this text.
fn plan(name: &str, text: &str, options: &str) -> (PathBuf, Ended) {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::write(&path, text).unwrap();
    let ended = end(command("plan-buffers").args(options.split_whitespace()).arg(&path));
    (path, ended)
}

const LAYERS: &str = r#"[
  {"name": "embedding", "bytes": 6000, "first_use": 0, "last_use": 1},
  {"name": "layer 0", "bytes": 4096, "first_use": 1, "last_use": 2},
  {"name": "layer 1", "bytes": 8192, "first_use": 2, "last_use": 3},
  {"name": "norm", "bytes": 100, "first_use": 3, "last_use": 3}
]"#;

#[test]
fn the_table_has_the_offsets_and_the_sums() {
    let (_, ended) = plan("layers.json", LAYERS, "");
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    insta::assert_snapshot!(ended.stdout, @"
    call site          offset           bytes  first use   last use
    embedding               0            6000          0          1
    layer 0              8192            4096          1          2
    layer 1                 0            8192          2          3
    norm                 8192             100          3          3

    peak                                12288 bytes (12 KiB)
    one buffer per call site            20608 bytes (20.1 KiB)
    lower bound                         12288 bytes (12 KiB)
    peak / lower bound                  1.000
    ");
}

#[test]
fn json_has_the_offsets_and_the_ratio() {
    let (_, ended) = plan("layers_for_json.json", LAYERS, "--json");
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    let json: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(json["buffers"].as_array().unwrap().len(), 4);
    assert_eq!(json["buffers"][0]["name"], "embedding");
    assert_eq!(json["buffers"][0]["offset_bytes"], json["buffers"][2]["offset_bytes"]);
    assert_eq!(json["peak_bytes"], 12288);
    assert_eq!(json["separate_bytes"], 20608);
    assert_eq!(json["lower_bound_bytes"], 12288);
    assert_eq!(json["ratio"], 1.0);
}

#[test]
fn errors_name_the_file_and_the_line_or_the_field() {
    let expected = "invalid JSON: expected a list of call sites with the fields `name`, `bytes`, `first_use` and `last_use`: ";
    for (name, text, cause) in [
        ("no_list.json", "{}", "invalid type: map, expected a sequence at line 1 column 0"),
        (
            "no_bytes.json",
            "[\n{\"name\": \"a\", \"first_use\": 0, \"last_use\": 1}\n]",
            "missing field `bytes` at line 2 column 44",
        ),
        (
            "unknown.json",
            "[{\"name\": \"a\", \"size\": 1}]",
            "unknown field `size`, expected one of `name`, `bytes`, `first_use`, `last_use` at line 1 column 21",
        ),
        (
            "negative.json",
            "[{\"name\": \"a\", \"bytes\": -1}]",
            "invalid value: integer `-1`, expected u64 at line 1 column 26",
        ),
    ] {
        let (path, ended) = plan(name, text, "");
        let error = format!("error: {}: {expected}{cause}\n", path.display());
        assert_eq!(ended.error(1), error);
    }
    let reversed = r#"[{"name": "a", "bytes": 1, "first_use": 2, "last_use": 1}]"#;
    let (path, ended) = plan("reversed.json", reversed, "");
    let cause = "call site \"a\": last_use is 1, expected at least 2, its first_use";
    assert_eq!(ended.error(1), format!("error: {}: {cause}\n", path.display()));
    let ended = end(&mut command("plan-buffers /proc/none"));
    assert!(ended.error(1).starts_with("error: cannot read /proc/none: "), "{ended:?}");
}
