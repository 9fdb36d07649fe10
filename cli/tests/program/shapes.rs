//! Tests `peerlane allgather` with blocks of different lengths, lists and tensors, on the host and
//! on simulated GPUs.

use crate::common::end;
use crate::methods::on;

const SMALL: &str = "--min-bytes 5 --max-bytes 70000 --factor 1000 --iterations 2 --warmup 1 \
                     --timeout 20 --json -";

#[test]
fn every_shape_is_gathered_and_checked() {
    for backend in ["host", "cuda"] {
        for shape in [
            "--blocks 1:2:3:4",
            "--blocks 0:5:0:1 --in-place",
            "--list",
            "--list --blocks 4:0:1:3 --in-place",
            "--tensors 3",
            "--tensors 3 --blocks 1:2:3:4 --outputs 2",
            "--tensors 2 --in-place",
            "--nodes 3+1 --blocks 4:3:2:1 --algorithm hierarchical --chunks 3",
            "--nodes 2 --list --algorithm ring --chunks 2",
        ] {
            let words = format!("--ranks 4 --dtype f16 {shape} {SMALL}");
            let rows = end(&mut on(backend, &words)).rows();
            assert_eq!(rows.len(), 2, "{shape}: 8 B and 5 000 B: {rows:?}");
            for row in rows {
                assert_eq!(row["checked"], true, "{shape}: {row}");
                assert_eq!(row["backend"], backend);
                assert_ne!(row["shape"].as_str(), None, "{row}");
            }
        }
    }
}

#[test]
fn rows_have_the_longest_block_and_the_limit_of_the_shape() {
    for backend in ["host", "cuda"] {
        let words = "--ranks 4 --blocks 1:2:3:4 --limit --iterations 2 --warmup 1 --json - \
                     --min-bytes 10000 --max-bytes 10000";
        let row = &end(&mut on(backend, words)).rows()[0];
        assert_eq!((&row["total_bytes"], &row["block_bytes"]), (&10000.into(), &4000.into()));
        assert_eq!(row["shape"], "blocks 1:2:3:4");
        assert!(row["limit_us"].as_f64().unwrap() > 0.0, "{row}");
    }
}
