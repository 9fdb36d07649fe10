//! Defines the command line of `peerlane bench all-gather-matmul` and `matmul-reduce-scatter`.

use std::ops::Range;
use std::path::PathBuf;

use clap::Args;
use peerlane::{BlockChunk, Rank};
use peerlane_planning::layout::CHUNK_ALIGN_BYTES;

use super::Work;
use crate::allgather::TargetOptions;
use crate::error::{Failure, Result};
use crate::options::RunOptions;
use crate::ranks::comm::Settings;

/// The bytes of an element of bf16.
pub(super) const ELEMENT_BYTES: u64 = 2;

#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    /// Set the number of rows of A of all ranks together, a multiple of the number of ranks
    #[arg(long, value_name = "M", default_value_t = 8192, value_parser = parse_side())]
    pub(super) rows: u32,
    /// Set the inner dimension of the product of each rank
    #[arg(long, value_name = "K", default_value_t = 8192, value_parser = parse_side())]
    pub(super) inner: u32,
    /// Set the number of columns of the product of each rank
    #[arg(long, value_name = "N", default_value_t = 8192, value_parser = parse_side())]
    pub(super) columns: u32,
    /// Multiply blocks on this number of streams by turns, 1 to 4; each number is measured
    #[arg(long, value_name = "N,N,…", default_value = "1,2", value_delimiter = ',')]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=4))]
    pub(super) streams: Vec<u32>,
    /// Cut each block into this number of chunks, which are multiplied one by one; each number is
    /// measured, but not one that does not cut the rows of a block evenly
    #[arg(long, value_name = "N,N,…", default_value = "1", value_delimiter = ',')]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(super) chunks: Vec<u32>,
    /// Set the number of rounds, in each of which everything is timed once in turn
    #[arg(long, value_name = "N", default_value_t = 9)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(super) rounds: u32,
    /// Set the number of timed calls in a row in each round
    #[arg(long, short = 'n', value_name = "N", default_value_t = 10)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(super) iterations: u32,
    /// Set the number of untimed calls before the timed ones
    #[arg(long, short, value_name = "N", default_value_t = 2)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(super) warmup: u32,
    /// Load cuBLAS from PATH, the file libcublas.so or the folder that contains it [default: search
    /// the usual folders]
    #[arg(long, value_name = "PATH")]
    pub(super) cublas: Option<PathBuf>,
    #[command(flatten)]
    pub(super) target: TargetOptions,
    #[command(flatten)]
    pub(super) run: RunOptions,
}

fn parse_side() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=1 << 20)
}

impl Options {
    /// Returns the options that must be equal on all ranks.
    pub(super) fn settings(&self, work: Work) -> Settings {
        let list =
            |numbers: &[u32]| numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");

        // If several options differ between ranks, the first of this list is reported.
        let as_written = [
            ("the command", work.name().to_owned()),
            ("--rows", self.rows.to_string()),
            ("--inner", self.inner.to_string()),
            ("--columns", self.columns.to_string()),
            ("--streams", list(&self.streams)),
            ("--chunks", list(&self.chunks)),
            ("--rounds", self.rounds.to_string()),
            ("--iterations", self.iterations.to_string()),
            ("--warmup", self.warmup.to_string()),
            ("--timeout", self.run.timeout.as_secs_f64().to_string()),
        ];
        Settings::new(as_written, self.run.seed)
    }
}

/// The matrices of a run, and the numbers of chunks that cut a block of rows evenly.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) ranks: usize,
    pub(super) rows: u32,
    pub(super) inner: u32,
    pub(super) columns: u32,
    pub(super) chunks: Vec<u32>,
    pub(super) skipped_chunks: Vec<u32>,
}

impl Shape {
    pub(super) fn new(work: Work, options: &Options, ranks: usize) -> Result<Self> {
        let Options { rows, inner, columns, .. } = *options;
        if !(rows as usize).is_multiple_of(ranks) {
            let text =
                format!("--rows is {rows}, expected a multiple of {ranks}, the number of ranks");
            return Err(Failure::usage(text).with_advice("give another number of rows or ranks"));
        }

        // The chunks of the library begin at a multiple of this number of bytes.
        let rows_of_block = rows / ranks as u32;
        let moved_columns = match work {
            Work::AllGatherMatmul => inner,
            Work::MatmulReduceScatter => columns,
        };
        let row_bytes = u64::from(moved_columns) * ELEMENT_BYTES;
        let is_even = |&chunks: &u32| {
            let bytes = u64::from(rows_of_block / chunks) * row_bytes;
            chunks == 1
                || rows_of_block.is_multiple_of(chunks) && bytes.is_multiple_of(CHUNK_ALIGN_BYTES)
        };
        let (chunks, skipped_chunks): (Vec<_>, Vec<_>) =
            options.chunks.iter().copied().partition(is_even);

        if chunks.is_empty() {
            let listed: Vec<_> = skipped_chunks.iter().map(ToString::to_string).collect();
            let text = format!(
                "--chunks is {}, expected a number that cuts the {rows_of_block} rows of a block \
                 into parts of equal length, each a multiple of {CHUNK_ALIGN_BYTES} bytes",
                listed.join(",")
            );
            return Err(Failure::usage(text).with_advice("use 1, or give another --rows"));
        }
        Ok(Self { ranks, rows, inner, columns, chunks, skipped_chunks })
    }

    /// Returns the rows of one chunk, if each block has `chunks` chunks.
    pub(super) fn rows_of(
        &self,
        BlockChunk { block, chunk }: BlockChunk,
        chunks: u32,
    ) -> Range<u32> {
        let rows_of_block = self.rows / self.ranks as u32;
        let rows = rows_of_block / chunks;
        let begin = block.0 * rows_of_block + chunk * rows;
        begin..begin + rows
    }

    /// Returns the rows of the block of a rank.
    pub(super) fn rows_of_block(&self, rank: Rank) -> Range<u32> {
        self.rows_of(BlockChunk { block: rank, chunk: 0 }, 1)
    }

    /// Returns the bytes of a matrix.
    pub(super) fn bytes(rows: u32, columns: u32) -> u64 {
        u64::from(rows) * u64::from(columns) * ELEMENT_BYTES
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    fn shape(line: &str, ranks: usize) -> Result<Shape> {
        let words = std::iter::once("bench").chain(line.split_whitespace());
        Shape::new(Work::AllGatherMatmul, &Line::parse_from(words).options, ranks)
    }

    #[test]
    fn chunks_cut_the_rows_of_a_block_evenly() {
        let shape = shape("--rows 24 --inner 64 --chunks 1,2,3,8", 4).unwrap();
        assert_eq!((&shape.chunks[..], &shape.skipped_chunks[..]), (&[1, 2, 3][..], &[8][..]));
        let rows =
            |block, chunk, chunks| shape.rows_of(BlockChunk { block: Rank(block), chunk }, chunks);
        assert_eq!((rows(1, 0, 1), rows(3, 2, 3)), (6..12, 22..24));
    }

    #[test]
    fn rows_that_cannot_be_cut_are_refused() {
        insta::assert_snapshot!(shape("--rows 10", 4).unwrap_err(), @r"
        error: --rows is 10, expected a multiple of 4, the number of ranks
         help: give another number of rows or ranks
        ");
        insta::assert_snapshot!(shape("--rows 8 --inner 8 --chunks 2,3", 4).unwrap_err(), @r"
        error: --chunks is 2,3, expected a number that cuts the 2 rows of a block into parts of equal length, each a multiple of 64 bytes
         help: use 1, or give another --rows
        ");
    }
}
