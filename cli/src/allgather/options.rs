//! Defines the command line of `peerlane allgather`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use peerlane::cuda::SelfCopy;
use peerlane::planning::{Form, Transfer};
use peerlane::{DType, Deadline};
use peerlane_planning::schedule::algorithms;

use super::algorithm::AlgorithmOptions;
use super::node_options::NodeOptions;
use super::shape::{ShapeOptions, Sweep};
use super::target::TargetOptions;
use crate::error::{Failure, Result};
use crate::goal::{Goal, form_name, form_parser, transfer_parser};
use crate::nccl;
use crate::nics::NicOptions;
use crate::options::{RunOptions, SweepOptions, check_needs, first_given, one_of};
use crate::ranks::comm::{Settings, given};
use crate::report::OutputFile;

/// Measure all-gathers between ranks, and check every byte of their results
///
/// Spawns one process per rank on this machine. Under a launcher that sets RANK and WORLD_SIZE
/// (torchrun, or the variables of Slurm and Open MPI) it joins that group instead, and rank 0
/// prints. If the ranks are on several hosts, the hosts are the nodes: --backend moves the bytes
/// inside a node, a network (RDMA or UCX) moves them between nodes, and hierarchical plans are
/// predicted and run.
///
/// At each size, every rank fills its block with new random data, overwrites its output with a
/// known byte, gathers and compares every byte, before and after the timed iterations. A timed
/// iteration is one all-gather between two readings of the clock, after a barrier that is not
/// timed; the longest time of all ranks counts. The table shows the median and the 99th percentile
/// of the iterations. algbw is the total size divided by the median, busbw is algbw × (n − 1) / n,
/// both in 10^9 bytes per second, as in nccl-tests.
///
/// On GPUs each rank has one GPU, and starts are timed back to back: many in a row on one stream
/// between two events, without the host in between. The time of one start is the elapsed time
/// divided by their number; the longest time of all ranks counts. The table shows the median of
/// several repetitions and the host time of one start.
///
/// If the total size is not a multiple of n whole elements, the block is rounded up; the table
/// shows the actual total.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    #[command(flatten)]
    pub(crate) target: TargetOptions,
    #[command(flatten)]
    pub(crate) nics: NicOptions,
    #[command(flatten)]
    pub(crate) algorithm: AlgorithmOptions,
    #[command(flatten)]
    pub(crate) node_options: NodeOptions,
    #[command(flatten)]
    pub(crate) shape: ShapeOptions,
    #[command(flatten)]
    pub(crate) sizes: SweepOptions,
    /// Set the number of timed iterations for each size, such as 100; on GPUs they are enqueued
    /// back to back [default: as many as fit in 500 ms, from 20 to 1000; on GPUs 50 below 256 MiB
    /// and 10 from there on]
    #[arg(long, short = 'n', value_name = "N")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) iterations: Option<u32>,
    /// Set the number of untimed iterations before the timed iterations
    #[arg(long, short, default_value_t = 5, value_name = "N")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) warmup: u32,
    /// Gather in place, so that the input of a rank is its block of the output
    #[arg(long)]
    pub(crate) in_place: bool,
    /// Set the number of output buffers to 1, or to 2 for double buffering, where iterations
    /// alternate between the buffers and a rank need not wait until its peers are ready [default: 2
    /// for small outputs that are not in place, otherwise 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=2))]
    pub(crate) outputs: Option<u32>,
    /// Set how a GPU copies its own block to its output, either local (with a kernel, which
    /// competes with compute work), link (with a copy engine, back from a peer), or auto (link for
    /// small blocks, otherwise local)
    #[arg(long, default_value = "auto", value_name = "HOW")]
    #[arg(value_parser = one_of([SelfCopy::Auto, SelfCopy::Local, SelfCopy::Link], self_copy_name))]
    pub(crate) self_copy: SelfCopy,
    /// Set the largest number of blocks of threads that add in a reduction on an NVIDIA GPU, such
    /// as 32 to leave most multiprocessors free [default: one for each multiprocessor]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) reduce_blocks: Option<u32>,
    /// Set the largest number of blocks of threads that run a start as one launch on an NVIDIA GPU,
    /// the same on all ranks [default: as many as are useful]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) fused_blocks: Option<u32>,
    /// Select the kind of engines among those that all ranks offer, such as streams, on
    /// NVIDIA GPUs kernels (each start is one launch) or, on AMD GPUs, sdma (SDMA engines that the
    /// host drives); auto is the kind with the lowest predicted
    /// time at each size
    #[arg(long, default_value = "auto", value_name = "KIND")]
    pub(crate) engine: String,
    /// Set the form of an all-reduce, either whole (every rank adds everything) or in-parts (each
    /// rank adds one part and passes it on) [default: the lowest predicted time at each size]
    #[arg(long, value_name = "FORM", value_parser = form_parser())]
    pub(crate) form: Option<Form>,
    /// Have each start be one launch, and set how its data moves, either tagged (data that is
    /// polled) or direct (flags follow the data) [default: what is fastest at each size]
    #[arg(long, value_name = "HOW", value_parser = transfer_parser())]
    pub(crate) transfer: Option<Transfer>,
    /// Run beside kernels: let GPUs return the own block over the link, and add on few
    /// multiprocessors, even if that is slower on an idle GPU
    #[arg(long)]
    pub(crate) beside_compute: bool,
    /// Fail instead of falling back to host memory, if GPUs have no peer access, to compute units
    /// that copy or add, such as the own block of a GPU, or to a thread that drives the copies
    #[arg(long)]
    pub(crate) strict: bool,
    #[arg(
        long,
        default_value = "u8",
        value_parser = parse_dtype,
        help = format!("Set the element type, one of {}", dtype_names())
    )]
    pub(crate) dtype: DType,
    /// Also measure the limit of the hardware with plain copies of the same bytes between the same
    /// ranks, without synchronization
    ///
    /// The table then shows the time of these copies, and that time as a share of the time of the
    /// all-gather: 100 % means that the all-gather is as fast as the copies. The time of an
    /// iteration is that of its slowest rank. If ranks share cores, it is the time from the first
    /// begin to the last end. On GPUs, only copies to peers are timed, with the fastest of several
    /// methods.
    #[arg(long)]
    pub(crate) limit: bool,
    /// Capture the all-gather into a graph and time its replays (backends cuda, and rocm with
    /// streams); an algorithm that cannot be captured is not timed, and its row has the reason
    #[arg(long)]
    pub(crate) graph: bool,
    /// Also time the collective of another library in the same processes, in turn with Peerlane
    /// (backend cuda only)
    ///
    /// NCCL is timed with three settings: its own choice, symmetric windows, and copy engines. Only
    /// equal blocks of one tensor can be compared.
    #[arg(long, value_enum, value_name = "LIBRARY")]
    #[arg(conflicts_with_all = ["blocks", "list", "tensors"])]
    pub(crate) vs: Option<BaselineLibrary>,
    /// Load NCCL from PATH, the file libnccl.so.2 or the folder that contains it [default: search
    /// the usual folders]
    #[arg(long, value_name = "PATH")]
    pub(crate) nccl: Option<PathBuf>,
    /// Also measure how much all-gathers and compute work slow each other down (backend cuda only);
    /// gemm multiplies bf16 matrices of 8192 × 8192 with cuBLAS
    #[arg(long, value_enum, value_name = "COMPUTE")]
    pub(crate) overlap: Option<ComputeWork>,
    /// Load cuBLAS from PATH, the file libcublas.so or the folder that contains it [default: search
    /// the usual folders]
    #[arg(long, value_name = "PATH")]
    pub(crate) cublas: Option<PathBuf>,
    /// Draw a plot of bandwidth and time by size into FILE.svg
    #[arg(long, value_name = "FILE.svg", value_parser = OutputFile::parser("--plot", "svg"))]
    pub(crate) plot: Option<OutputFile>,
    /// Run the largest size once more and write the steps of all lanes and ranks to FILE.json, as
    /// trace events for Perfetto
    #[arg(long, value_name = "FILE.json", value_parser = OutputFile::parser("--trace", "json"))]
    pub(crate) trace: Option<OutputFile>,
    /// The collective to measure, which the command sets.
    #[arg(skip)]
    pub(crate) goal: Goal,
    #[command(flatten)]
    pub(crate) run: RunOptions,
}

/// Returns the name on the command line of the method by which a GPU copies its own block.
pub(super) fn self_copy_name(self_copy: &SelfCopy) -> &'static str {
    match self_copy {
        SelfCopy::Auto => "auto",
        SelfCopy::Local => "local",
        SelfCopy::Link => "link",
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum BaselineLibrary {
    Nccl,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ComputeWork {
    Gemm,
}

/// The value of `--engine` that lets the library select the kind of engines.
const AUTO: &str = "auto";

impl Options {
    /// Returns whether the library may select the kind of copy engine by its prediction.
    pub(super) fn any_engine(&self) -> bool {
        self.engine_kind().is_none() && !self.graph
    }

    /// Returns the kind of engines that the user names, or `None` for auto.
    pub(super) fn engine_kind(&self) -> Option<&str> {
        (self.engine != AUTO).then_some(&*self.engine)
    }

    /// The number of ranks to spawn if there are no GPUs and `--ranks` is not given.
    pub(crate) const RANKS_DEFAULT: usize = 4;

    pub(crate) fn with_goal(self, goal: Goal) -> Self {
        Self { goal, ..self }
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.sizes.max_bytes < self.sizes.min_bytes {
            return Err(Failure::usage(format!(
                "--max-bytes {} is less than --min-bytes {}",
                self.sizes.max_bytes, self.sizes.min_bytes
            ))
            .with_advice("raise --max-bytes or lower --min-bytes"));
        }

        let fixed = first_given([("--list", self.shape.list), ("--in-place", self.in_place)]);
        if let Some(option) = fixed.filter(|_| self.outputs == Some(2)) {
            let text = format!("{option} and --outputs 2 cannot be used together");
            let advice = "these destinations are fixed, so outputs cannot alternate: remove one of \
                          the two options";
            return Err(Failure::usage(text).with_advice(advice));
        }

        self.check_collective()
    }

    /// Rejects options that the collective does not support.
    fn check_collective(&self) -> Result<()> {
        let goal = self.goal;
        // The default goal is the all-gather, which supports all options.
        if goal == Goal::default() {
            return Ok(());
        }

        let (name, collective) = (goal.name(), goal.collective);
        if self.in_place && !collective.runs_in_place() {
            let name = collective.with_article();
            let text = format!("--in-place is not supported for {name}, which keeps its input");
            return Err(Failure::usage(text).with_advice("remove the option"));
        }

        let shape = &self.shape;
        if shape.blocks.is_some() && !goal.takes_lengths() {
            let text = format!("--blocks is not supported for {name}, whose blocks are equal");
            return Err(Failure::usage(text).with_advice("remove the option"));
        }

        let is_reduction = collective.is_reduction();
        let of_all_gather = [("--list", shape.list), ("--tensors", shape.tensors.is_some())];
        if let Some(option) = first_given(of_all_gather) {
            let text = format!(
                "{option} is supported only for an all-gather, but the collective is {name}"
            );
            return Err(Failure::usage(text).with_advice("remove the option"));
        }

        let limited = [
            ("--vs", self.vs.is_some() && !nccl::has(collective), "collectives of NCCL"),
            ("--limit", self.limit && is_reduction, "collectives that only copy"),
        ];
        if let Some((option, _, of)) = limited.into_iter().find(|(_, given, _)| *given) {
            let text = format!("{option} is supported only for {of}, but the collective is {name}");
            return Err(Failure::usage(text).with_advice("remove the option"));
        }

        if self.in_place && self.graph && is_reduction {
            let text = format!("--graph and --in-place cannot be used together for {name}");
            let advice = "a graph holds several starts, and each would add to the sum of the one before: remove one of the two options";
            return Err(Failure::usage(text).with_advice(advice));
        }

        // NCCL needs to know the type only to add; other collectives move the elements as bytes.
        let has_type = !is_reduction || nccl::data_type(self.dtype).is_some();
        if self.vs.is_some() && !has_type {
            let text = format!("--dtype {} is not supported by NCCL", self.dtype);
            return Err(Failure::usage(text).with_advice("use another type, or remove --vs"));
        }

        let known: Vec<_> = algorithms(collective).collect();
        let unknown = self.algorithm.named().find(|algorithm| !known.contains(algorithm));
        if let Some(algorithm) = unknown {
            let names: Vec<_> = known.iter().map(|algorithm| algorithm.name()).collect();
            let text = format!("--algorithm {algorithm} does not support {name}");
            let advice = format!("use auto, all, {}", names.join(" or "));
            return Err(Failure::usage(text).with_advice(advice));
        }
        Ok(())
    }

    pub(crate) fn check_without_gpus(&self, backend: &str) -> Result<()> {
        let asked = first_given([
            ("--graph", self.graph),
            ("--vs", self.vs.is_some()),
            ("--overlap", self.overlap.is_some()),
            ("--devices", !self.target.devices.is_empty()),
        ]);
        check_needs(asked, "GPUs", backend, "use --backend cuda, or remove the option")
    }

    pub(crate) fn check_without_cuda(&self) -> Result<()> {
        let asked =
            first_given([("--vs", self.vs.is_some()), ("--overlap", self.overlap.is_some())]);
        check_needs(asked, "NVIDIA GPUs", "rocm", "remove the option")
    }

    pub(crate) fn deadline(&self) -> Deadline {
        Deadline::after(self.run.timeout)
    }

    pub(crate) fn sweep(&self, ranks: usize) -> Sweep {
        Sweep {
            ranks,
            element_bytes: self.dtype.bytes() as u64,
            min_bytes: self.sizes.min_bytes.0,
            max_bytes: self.sizes.max_bytes.0,
            factor: self.sizes.factor,
        }
    }
}

fn parse_dtype(text: &str) -> std::result::Result<DType, String> {
    text.parse().map_err(|_| format!("expected one of {}", dtype_names()))
}

fn dtype_names() -> String {
    DType::ALL.map(DType::name).join(", ")
}

/// Returns the options that must be equal on all ranks, with the selected backend.
pub(crate) fn settings(options: &Options, backend: &str) -> Settings {
    let Options { algorithm, node_options, shape, dtype, sizes, .. } = options;
    let iterations = options.iterations.map_or("automatic".to_owned(), |n| n.to_string());

    // If several options differ between ranks, the first of this list is reported.
    let as_written = [
        ("--backend", backend.to_owned()),
        ("the collective", options.goal.text()),
        ("--algorithm", algorithm.selection.to_string()),
        ("--chunks", given(algorithm.chunks.map(|chunks| chunks.to_string()))),
        ("--chunk-bytes", given(algorithm.chunk_bytes.map(|size| size.0.to_string()))),
        ("--nodes", given(node_options.nodes.as_ref().map(|nodes| format!("{nodes:?}")))),
        ("--network", node_options.network.name().to_owned()),
        ("--network-bandwidth", given(node_options.network_bandwidth.map(|rate| rate.to_string()))),
        ("--network-delay", given(node_options.network_delay.map(|delay| delay.to_string()))),
        ("--local-bandwidth", given(node_options.local_bandwidth.map(|rate| rate.to_string()))),
        ("--blocks", given(shape.blocks.as_ref().map(ToString::to_string))),
        ("--list", shape.list.to_string()),
        ("--tensors", given(shape.tensors.map(|tensors| tensors.to_string()))),
        ("--trace", options.trace.is_some().to_string()),
        ("--dtype", dtype.to_string()),
        ("--in-place", options.in_place.to_string()),
        ("--outputs", options.outputs.map_or("auto".to_owned(), |n| n.to_string())),
        ("--min-bytes", sizes.min_bytes.0.to_string()),
        ("--max-bytes", sizes.max_bytes.0.to_string()),
        ("--factor", sizes.factor.to_string()),
        ("--iterations", iterations),
        ("--warmup", options.warmup.to_string()),
        ("--timeout", options.run.timeout.as_secs_f64().to_string()),
        ("--limit", options.limit.to_string()),
        ("--graph", options.graph.to_string()),
        ("--strict", options.strict.to_string()),
        ("--beside-compute", options.beside_compute.to_string()),
        ("--self-copy", self_copy_name(&options.self_copy).to_owned()),
        ("--reduce-blocks", given(options.reduce_blocks.map(|blocks| blocks.to_string()))),
        ("--fused-blocks", given(options.fused_blocks.map(|blocks| blocks.to_string()))),
        ("--engine", options.engine.clone()),
        ("--form", given(options.form.map(|form| form_name(&form).to_owned()))),
        ("--transfer", given(options.transfer.map(|transfer| transfer.name().to_owned()))),
        ("--vs", given(options.vs.map(|vs| format!("{vs:?}")))),
        ("--overlap", given(options.overlap.map(|what| format!("{what:?}")))),
    ];

    Settings::new(as_written, options.run.seed)
}

#[cfg(test)]
pub(super) mod tests {
    use std::time::Duration;

    use clap::Parser;

    use super::super::target::BackendChoice;
    use super::*;
    use crate::units::Size;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    /// Parses a command line; the error is the text that clap prints.
    pub(crate) fn parse(line: &str) -> std::result::Result<Options, String> {
        let words = std::iter::once("allgather").chain(line.split_whitespace());
        Line::try_parse_from(words).map(|line| line.options).map_err(|error| error.to_string())
    }

    #[test]
    fn the_defaults_match_the_help() {
        let options = parse("").unwrap();
        assert_eq!(options.check(), Ok(()));
        assert_eq!(
            (options.sizes.min_bytes, options.sizes.max_bytes),
            (Size(1 << 10), Size(64 << 20))
        );
        assert_eq!((options.sizes.factor, options.warmup, options.iterations), (4, 5, None));
        assert_eq!(
            (options.target.backend, options.algorithm.selection.to_string().as_str()),
            (BackendChoice(None), "auto")
        );
        assert_eq!((options.dtype, options.run.timeout), (DType::U8, Duration::from_secs(30)));
        assert!(!options.in_place && !options.limit && options.target.ranks.is_none());
    }

    #[test]
    fn every_option_is_read() {
        let options = parse(
            "--backend host --ranks 3 --algorithm direct --min-bytes 7 --max-bytes 2MiB --factor 2 \
             --outputs 1 --iterations 9 --warmup 1 --in-place --dtype bf16 --timeout 0.25 --seed 5 --limit \
             --json - --plot out.svg",
        );
        let options = options.unwrap();

        assert_eq!(options.check(), Ok(()));
        assert_eq!(
            (options.algorithm.selection.to_string().as_str(), options.algorithm.chunks),
            ("direct", None)
        );
        assert_eq!((options.dtype, options.run.timeout), (DType::Bf16, Duration::from_millis(250)));
        assert_eq!(
            (options.run.seed, options.iterations, options.target.ranks),
            (Some(5), Some(9), Some(3))
        );
        assert_eq!(options.outputs, Some(1));
    }

    #[test]
    fn a_wrong_value_is_refused_with_the_valid_values() {
        let first_line = |line: &str| parse(line).unwrap_err().lines().next().unwrap().to_owned();

        insta::assert_snapshot!(first_line("--ranks 0"), @"error: invalid value '0' for '--ranks <N>': expected a number of ranks from 1 to 4096");
        insta::assert_snapshot!(first_line("--ranks 5000"), @"error: invalid value '5000' for '--ranks <N>': expected a number of ranks from 1 to 4096");
        insta::assert_snapshot!(first_line("--algorithm spiral"), @"error: invalid value 'spiral' for '--algorithm <NAME,…>': unknown algorithm; expected auto, all or direct, pull, ring, double-ring, hierarchical, hierarchical-ring, recursive-doubling, scatter-all-gather, get-ring");
        insta::assert_snapshot!(first_line("--chunks 0"), @"error: invalid value '0' for '--chunks <N>': expected a number of chunks from 1 to 65536");
        insta::assert_snapshot!(first_line("--dtype f8"), @"error: invalid value 'f8' for '--dtype <DTYPE>': expected one of u8, u16, u32, u64, i8, i16, i32, i64, f8e4m3, f8e5m2, f8e8m0, f16, bf16, f32, f64, complex64");

        insta::assert_snapshot!(first_line("--timeout 0"), @"error: invalid value '0' for '--timeout <SECONDS>': expected a number of seconds above 0, such as 30 or 0.5");
        insta::assert_snapshot!(first_line("--timeout=-1"), @"error: invalid value '-1' for '--timeout <SECONDS>': expected a number of seconds above 0, such as 30 or 0.5");
        insta::assert_snapshot!(first_line("--timeout 1e309"), @"error: invalid value '1e309' for '--timeout <SECONDS>': expected less than 2^64 seconds, such as 30 or 0.5");
        insta::assert_snapshot!(first_line("--timeout NaN"), @"error: invalid value 'NaN' for '--timeout <SECONDS>': expected a number of seconds above 0, such as 30 or 0.5");
        insta::assert_snapshot!(first_line("--timeout soon"), @"error: invalid value 'soon' for '--timeout <SECONDS>': expected a number of seconds above 0, such as 30 or 0.5");

        insta::assert_snapshot!(first_line("--max-bytes 1KB"), @"error: invalid value '1KB' for '--max-bytes <SIZE>': unknown suffix KB, expected K, M or G (or KiB, MiB, GiB), powers of 1024");
        insta::assert_snapshot!(first_line("--factor 1"), @"error: invalid value '1' for '--factor <FACTOR>': 1 is not in 2..18446744073709551615");
        insta::assert_snapshot!(first_line("--iterations 0"), @"error: invalid value '0' for '--iterations <N>': 0 is not in 1..=1000000");
        insta::assert_snapshot!(first_line("--min-bytes 0"), @"error: invalid value '0' for '--min-bytes <SIZE>': expected at least 1 byte");

        insta::assert_snapshot!(first_line("--trace trace.svg"), @"error: invalid value 'trace.svg' for '--trace <FILE.json>': expected a file name that ends in .json; no other format is supported");
        insta::assert_snapshot!(first_line("--plot sizes.png"), @"error: invalid value 'sizes.png' for '--plot <FILE.svg>': expected a file name that ends in .svg; no other format is supported");
        insta::assert_snapshot!(first_line("--vs nccl --blocks 1:2"), @"error: the argument '--vs <LIBRARY>' cannot be used with '--blocks <N:N:…>'");
        assert!(parse("--plot sizes.SVG").is_ok());
        insta::assert_snapshot!(first_line("--backend tpu"), @"error: invalid value 'tpu' for '--backend <BACKEND>'");
    }

    #[test]
    fn options_that_do_not_fit_together_are_named() {
        let refusal = |line: &str| parse(line).unwrap().check().unwrap_err();
        insta::assert_snapshot!(refusal("--min-bytes 2K --max-bytes 1K"), @"
        error: --max-bytes 1 KiB is less than --min-bytes 2 KiB
         help: raise --max-bytes or lower --min-bytes
        ");
        insta::assert_snapshot!(refusal("--list --outputs 2"), @r"
        error: --list and --outputs 2 cannot be used together
         help: these destinations are fixed, so outputs cannot alternate: remove one of the two options
        ");
    }

    #[test]
    fn the_first_option_that_differs_is_named_with_its_rank() {
        let settings = |line: &str| settings(&parse(line).unwrap(), "host");
        let mine = settings("--dtype f32 --seed 7");
        assert_eq!(mine.compare(0, 1, &settings("--dtype f32 --seed 8")), Ok(()));
        let error = mine.compare(0, 2, &settings("--dtype i32")).unwrap_err();
        insta::assert_snapshot!(error, @r"
        error: ranks have different values of --dtype: i32 on rank 2, f32 on rank 0
         help: start all ranks with the same program and the same options
        ");
        let error = mine.compare(0, 3, &settings("--dtype f32 --in-place")).unwrap_err();
        insta::assert_snapshot!(error, @r"
        error: ranks have different values of --in-place: true on rank 3, false on rank 0
         help: start all ranks with the same program and the same options
        ");
    }
}
