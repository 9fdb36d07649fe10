//! Defines the options that select algorithms and the number of chunks of a block.

use std::path::PathBuf;

use clap::Args;
use peerlane::collective::Collective;
use peerlane::topology::Topology;
use peerlane_planning::plan::{Algorithm, CHUNKS_MAX};

use crate::error::{Failure, Result};
use crate::options::{AlgorithmList, parse_size_above_0};
use crate::units::Size;

/// The options that select algorithms and chunks, and show predictions.
#[derive(Args, Clone, Debug)]
pub(crate) struct AlgorithmOptions {
    /// Select the algorithms, either auto (the lowest predicted time), all (one row for each), or a
    /// list of direct, pull, ring, double-ring, hierarchical, hierarchical-ring,
    /// recursive-doubling, scatter-all-gather and get-ring, such as direct,ring
    #[arg(long = "algorithm", default_value = "auto", value_name = "NAME,…")]
    pub(crate) selection: AlgorithmList,
    /// Set the number of chunks of each block, such as 4 [default: the number with the lowest
    /// predicted time]
    #[arg(long, value_name = "N", conflicts_with = "chunk_bytes", value_parser = parse_chunks)]
    pub(crate) chunks: Option<u32>,
    /// Set the size of a chunk in bytes, such as 512K, instead of the number of chunks
    #[arg(long, value_name = "SIZE", value_parser = parse_size_above_0)]
    pub(crate) chunk_bytes: Option<Size>,
    /// Predict times with the link speeds in FILE, which `peerlane calibrate --out` wrote, and show
    /// the predictions [default: typical speeds of such links]
    #[arg(long, value_name = "FILE")]
    pub(crate) calibration: Option<PathBuf>,
    /// Show the predicted time next to the measured time
    #[arg(long)]
    pub(crate) predict: bool,
    /// Print the reasons for the chosen algorithm, and the work of each lane
    #[arg(long)]
    pub(crate) explain: bool,
}

impl AlgorithmOptions {
    pub(super) fn chunks(&self, longest_block_bytes: u64) -> Result<Option<u32>> {
        let Some(Size(chunk)) = self.chunk_bytes else { return Ok(self.chunks) };
        let chunks = longest_block_bytes.div_ceil(chunk).max(1);
        let fitting = u32::try_from(chunks).ok().filter(|chunks| *chunks <= CHUNKS_MAX);
        fitting.map(Some).ok_or_else(|| {
            let text = format!(
                "--chunk-bytes {} makes {chunks} chunks of a block of {}, expected at most \
                 {CHUNKS_MAX} chunks",
                Size(chunk),
                Size(longest_block_bytes)
            );
            Failure::usage(text).with_advice("raise --chunk-bytes or lower --max-bytes")
        })
    }

    /// Returns the algorithms to measure on `topology`; `None` leaves the choice to the cost model.
    pub(super) fn algorithms(
        &self,
        topology: &Topology,
        collective: Collective,
    ) -> Vec<Option<Algorithm>> {
        // On one node, the hierarchical plans are equal to direct.
        let equal_on_one_node = [Algorithm::Hierarchical, Algorithm::HierarchicalRing];
        let differs = |algorithm| topology.nodes() > 1 || !equal_on_one_node.contains(&algorithm);
        let mut algorithms = self.selection.fitting(topology, collective);
        if self.selection == AlgorithmList::All {
            algorithms.retain(|algorithm| algorithm.is_none_or(differs));
        }
        algorithms
    }

    pub(super) fn named(&self) -> impl Iterator<Item = Algorithm> {
        let choices = match &self.selection {
            AlgorithmList::Listed(choices) => choices.as_slice(),
            AlgorithmList::All => &[],
        };
        choices.iter().filter_map(|choice| choice.0)
    }

    /// Returns whether result rows show the predicted time next to the measured time.
    pub(super) fn predicts(&self) -> bool {
        self.predict || self.calibration.is_some()
    }
}

fn parse_chunks(text: &str) -> std::result::Result<u32, String> {
    match text.parse() {
        Ok(chunks @ 1..=CHUNKS_MAX) => Ok(chunks),
        _ => Err(format!("expected a number of chunks from 1 to {CHUNKS_MAX}")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::options::tests::parse;
    use super::*;

    #[test]
    fn all_skips_algorithms_that_do_not_fit() {
        let algorithm = parse("--algorithm all").unwrap().algorithm;
        let [one, two]: [Topology; 2] = ["3", "2x2"].map(|text| text.parse().unwrap());
        let names = |topology| {
            let algorithms =
                algorithm.algorithms(topology, Collective::AllGather).into_iter().flatten();
            algorithms.map(Algorithm::name).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(names(&one), "direct pull ring double-ring get-ring");
        assert_eq!(
            names(&two),
            "direct pull ring double-ring hierarchical hierarchical-ring recursive-doubling"
        );
        assert_eq!(algorithm.selection.to_string(), "all");
        assert_eq!(parse("").unwrap().algorithm.algorithms(&two, Collective::AllGather), [None]);
        let listed = parse("--algorithm ring,auto").unwrap().algorithm;
        assert_eq!(listed.algorithms(&two, Collective::AllGather), [Some(Algorithm::Ring), None]);
        assert_eq!(listed.selection.to_string(), "ring,auto");
    }

    #[test]
    fn chunks_of_a_size_cover_the_longest_block() {
        let chunks = |line: &str, bytes| parse(line).unwrap().algorithm.chunks(bytes);
        assert_eq!(chunks("", 1 << 20), Ok(None));
        assert_eq!(chunks("--chunks 3", 1 << 20), Ok(Some(3)));
        assert_eq!(chunks("--chunk-bytes 64K", 1 << 20), Ok(Some(16)));
        assert_eq!(chunks("--chunk-bytes 64K", (1 << 20) + 1), Ok(Some(17)));
        assert_eq!(chunks("--chunk-bytes 64K", 0), Ok(Some(1)));
        insta::assert_snapshot!(chunks("--chunk-bytes 1", 1 << 20).unwrap_err(), @"
        error: --chunk-bytes 1 B makes 1048576 chunks of a block of 1 MiB, expected at most 65536 chunks
         help: raise --chunk-bytes or lower --max-bytes
        ");
        assert!(parse("--chunk-bytes 0").unwrap_err().contains("expected at least 1 byte"));
    }
}
