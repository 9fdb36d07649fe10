//! What all ranks of an all-gather must have been told alike.

use super::options::Options;
use crate::ranks::settings::{Settings, given};

/// The options that shape a run, with the backend that was taken.
pub(crate) fn of(options: &Options, backend: &str) -> Settings {
    let Options { method, tiers, shape, dtype, min_bytes, max_bytes, factor, .. } = options;
    let (warmup, in_place) = (options.warmup, options.in_place);
    let iterations = options.iterations.map_or("as many as fit".to_owned(), |n| n.to_string());
    let as_written = [
        ("--backend", backend.to_owned()),
        ("the collective", options.collective.to_string()),
        ("--algorithm", method.wanted.name()),
        ("--parts", given(method.parts.map(|parts| parts.to_string()))),
        ("--part-bytes", given(method.part_bytes.map(|size| size.0.to_string()))),
        ("--nodes", given(tiers.nodes.as_ref().map(|nodes| format!("{nodes:?}")))),
        ("--network", tiers.network.name().to_owned()),
        ("--network-bandwidth", given(tiers.network_bandwidth.map(|rate| rate.to_string()))),
        ("--network-delay", given(tiers.network_delay.map(|delay| delay.to_string()))),
        ("--local-bandwidth", given(tiers.local_bandwidth.map(|rate| rate.to_string()))),
        ("--shards", given(shape.shards.as_ref().map(ToString::to_string))),
        ("--list", shape.list.to_string()),
        ("--tensors", given(shape.tensors.map(|tensors| tensors.to_string()))),
        ("--trace", options.trace.is_some().to_string()),
        ("--dtype", dtype.to_string()),
        ("--in-place", in_place.to_string()),
        ("--outputs", options.outputs.map_or("auto".to_owned(), |n| n.to_string())),
        ("--min-bytes", min_bytes.0.to_string()),
        ("--max-bytes", max_bytes.0.to_string()),
        ("--factor", factor.to_string()),
        ("--iterations", iterations),
        ("--warmup", warmup.to_string()),
        ("--timeout", options.timeout.as_secs_f64().to_string()),
        ("--limit", options.limit.to_string()),
        ("--graph", options.graph.to_string()),
        ("--strict", options.strict.to_string()),
        ("--own-copy", options.own_copy.name().to_owned()),
        ("--engine", options.engine.name().to_owned()),
        ("--vs", given(options.vs.map(|vs| format!("{vs:?}")))),
        ("--beside", given(options.beside.map(|what| format!("{what:?}")))),
    ];
    Settings::new(as_written, options.seed)
}

#[cfg(test)]
mod tests {
    use super::super::options::tests::parse;
    use super::*;

    #[test]
    fn the_first_option_that_differs_is_named_with_its_rank() {
        let settings = |line: &str| of(&parse(line).unwrap(), "host");
        let mine = settings("--dtype f32 --seed 7");
        assert_eq!(mine.compare(0, 1, &settings("--dtype f32 --seed 8")), Ok(()));
        let error = mine.compare(0, 2, &settings("--dtype i32")).unwrap_err();
        insta::assert_snapshot!(error, @"
        error: rank 2 has --dtype i32, rank 0 has f32
         help: start all ranks with the same program and the same options
        ");
        let error = mine.compare(0, 3, &settings("--dtype f32 --in-place")).unwrap_err();
        insta::assert_snapshot!(error, @"
        error: rank 3 has --in-place true, rank 0 has false
         help: start all ranks with the same program and the same options
        ");
    }
}
