//! What all ranks must have been told alike.

use peerlane::bootstrap::Bootstrap;
use serde::{Deserialize, Serialize};

use super::circle::Circle;
use super::options::Options;
use crate::error::{Failure, Result};

/// The options that shape a run, as people write them, and the seed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Settings {
    options: Vec<(String, String)>,
    seed: u64,
}

impl Settings {
    /// Of this rank.
    pub(crate) fn of(options: &Options, backend: &str) -> Self {
        let Options { method, tiers, shape, dtype, min_bytes, max_bytes, factor, .. } = options;
        let (warmup, in_place) = (options.warmup, options.in_place);
        let given = |value: Option<String>| value.unwrap_or_else(|| "nothing".to_owned());
        let iterations = options.iterations.map_or("as many as fit".to_owned(), |n| n.to_string());
        let options_as_written = [
            ("version", env!("CARGO_PKG_VERSION").to_owned()),
            ("--backend", backend.to_owned()),
            ("--algorithm", method.wanted.name().to_owned()),
            ("--parts", given(method.parts.map(|parts| parts.to_string()))),
            ("--part-bytes", given(method.part_bytes.map(|size| size.0.to_string()))),
            ("--nodes", given(tiers.nodes.as_ref().map(|nodes| format!("{nodes:?}")))),
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
            ("--vs", options.vs.map_or("nothing".to_owned(), |vs| format!("{vs:?}"))),
            ("--beside", options.beside.map_or("nothing".to_owned(), |what| format!("{what:?}"))),
        ];
        Self {
            options: options_as_written.map(|(name, value)| (name.to_owned(), value)).to_vec(),
            seed: options.seed.unwrap_or_else(|| fastrand::u64(..)),
        }
    }

    /// Compares with all ranks and returns the seed of rank 0. Collective.
    ///
    /// # Errors
    /// If a rank was told otherwise: which, and what.
    pub(crate) fn agree(self, circle: &Circle) -> Result<u64> {
        let all = circle.share("settings", &self)?;
        for (rank, other) in all.iter().enumerate() {
            self.compare(circle.rank().index(), rank, other)?;
        }
        Ok(all.first().map_or(self.seed, |first| first.seed))
    }

    fn compare(&self, me: usize, rank: usize, other: &Self) -> Result<()> {
        let pairs = self.options.iter().zip(&other.options);
        match pairs.into_iter().find(|(mine, theirs)| mine != theirs) {
            None => Ok(()),
            Some(((name, mine), (_, theirs))) => Err(Failure::failed(format!(
                "rank {rank} has {name} {theirs}, rank {me} has {mine}"
            ))
            .with_advice("start all ranks with the same program and the same options")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::options::tests::parse;
    use super::*;

    #[test]
    fn the_first_option_that_differs_is_named_with_its_rank() {
        let settings = |line: &str| Settings::of(&parse(line).unwrap(), "host");
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
