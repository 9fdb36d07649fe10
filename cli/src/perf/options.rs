//! Defines the command line of `peerlane perf`.

use clap::Args;
use clap::builder::TypedValueParser;
use peerlane::open::Backend;
use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::nics::NicOptions;
use crate::options::{RunOptions, one_of};
use crate::ranks::comm::{Settings, given};
use crate::units::{Delay, Size};

/// Measure puts, gets and signals between two ranks
///
/// Spawns two processes on this machine. Under a launcher that has started two ranks, for instance
/// on two machines, it joins them. By hand: set RANK=0 WORLD_SIZE=2 MASTER_ADDR=HOST
/// PEERLANE_SECRET=SECRET on one machine and RANK=1 with the same other variables on the second
/// machine, where HOST is the machine of rank 0 and SECRET is the output of `openssl rand -hex 32`.
///
/// The measurements correspond to those of perftest: compare with ib_write_bw, ib_read_bw and
/// ib_write_lat at the same sizes, iterations, window (--tx-depth there) and number of engines
/// (--qp there); each engine has its own queue pair and is that of a channel. With --queue-pairs,
/// the messages of one engine are split over several queue pairs, which perftest does not do.
///
/// --put and --get: rank 0 moves messages in one direction, from one buffer per engine to one
/// buffer per engine, with at most one window of messages in flight on each engine. The time is
/// measured from the first submit to the last completion. Each message is submitted by itself.
///
/// --signal: rank 0 puts a message and signals after it; rank 1 waits for the flag and answers in
/// the same way. The time of a message is half of a round trip. With 0 bytes only the signal is
/// sent.
///
/// The data are random and are compared at the receiver after each size.
#[derive(Args, Clone, Debug)]
#[command(group = clap::ArgGroup::new("work").required(true).multiple(true))]
pub(crate) struct Options {
    /// Measure the bandwidth of puts
    #[arg(long, group = "work")]
    pub(crate) put: bool,
    /// Measure the bandwidth of gets
    #[arg(long, group = "work")]
    pub(crate) get: bool,
    /// Measure the one-way latency of a put followed by a signal
    #[arg(long, group = "work")]
    pub(crate) signal: bool,
    /// Select the backend that moves the bytes, either host (shared memory), rdma (NICs) or ucx
    /// (networks such as Ethernet)
    #[arg(long, default_value = "host", value_parser = parse_backend())]
    pub(crate) backend: Backend,
    #[command(flatten)]
    pub(crate) nics: NicOptions,
    /// Set the message sizes in bytes, such as 8,64K,1M [default: 64K,1M for puts and gets, 8 for
    /// signals]
    #[arg(long, value_name = "SIZE,…", value_delimiter = ',')]
    pub(crate) bytes: Vec<Size>,
    /// Set the number of timed messages per engine, or of round trips with --signal [default: 1000]
    #[arg(long, value_name = "N", default_value_t = 1000, hide_default_value = true)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=100_000_000))]
    pub(crate) iterations: u32,
    /// Set the number of untimed messages before the timed messages
    #[arg(long, value_name = "N", default_value_t = 20)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) warmup: u32,
    /// Set the largest number of messages in flight on each engine, 1 to 4096
    #[arg(long, value_name = "N", default_value_t = 128)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) window: u32,
    /// Set the number of queues (copy engines) to which rank 0 submits puts and gets, 1 to 64; each
    /// gets the same number of messages
    #[arg(long, value_name = "N", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) engines: u16,
    /// Set how long a waiting rank spins without yielding before it sleeps, such as 1ms; not used
    /// by a rank that is only a target [default: the default of the backend]
    #[arg(long, value_name = "TIME")]
    pub(crate) spin: Option<Delay>,
    #[command(flatten)]
    pub(crate) run: RunOptions,
}

fn parse_backend() -> impl TypedValueParser<Value = Backend> {
    one_of([Backend::Host].into_iter().chain(Backend::NETWORKS), |backend| backend.name())
}

/// The op that a measurement repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum PerfTest {
    Put,
    Get,
    Signal,
}

impl PerfTest {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Put => "put",
            Self::Get => "get",
            Self::Signal => "signal",
        }
    }
}

impl Options {
    /// Checks that this machine has the requested network devices, or that none is requested
    /// without a network.
    pub(crate) fn check(&self) -> Result<()> {
        match self.backend.is_network() {
            true => self.nics.check(self.backend),
            false => self.nics.check_fits(None),
        }
    }

    /// Returns the measurements in order, each with its message sizes.
    pub(crate) fn plan(&self) -> Vec<(PerfTest, Vec<u64>)> {
        let asked =
            [(PerfTest::Put, self.put), (PerfTest::Get, self.get), (PerfTest::Signal, self.signal)];
        let sizes = |work| match (self.bytes.as_slice(), work) {
            ([], PerfTest::Signal) => vec![8],
            ([], _) => vec![64 << 10, 1 << 20],
            (given, _) => given.iter().map(|size| size.0).collect(),
        };
        let asked = asked.into_iter().filter(|(_, asked)| *asked);
        asked.map(|(work, _)| (work, sizes(work))).collect()
    }

    pub(crate) fn settings(&self) -> Settings {
        let works: Vec<_> = self.plan().into_iter().map(|(work, _)| work.name()).collect();
        let bytes: Vec<_> = self.bytes.iter().map(|size| size.0.to_string()).collect();
        let as_written = [
            ("--put, --get, --signal", works.join(", ")),
            ("--backend", self.backend.name().to_owned()),
            ("--bytes", given((!bytes.is_empty()).then(|| bytes.join(",")))),
            ("--iterations", self.iterations.to_string()),
            ("--warmup", self.warmup.to_string()),
            ("--window", self.window.to_string()),
            ("--engines", self.engines.to_string()),
            ("--timeout", self.run.timeout.as_secs_f64().to_string()),
        ];
        Settings::new(as_written, self.run.seed)
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

    fn parse(line: &str) -> std::result::Result<Options, String> {
        let words = std::iter::once("perf").chain(line.split_whitespace());
        Line::try_parse_from(words).map(|line| line.options).map_err(|error| error.to_string())
    }

    #[test]
    fn default_sizes_depend_on_the_test() {
        let plan = |line: &str| parse(line).unwrap().plan();
        assert_eq!(plan("--signal"), [(PerfTest::Signal, vec![8])]);
        let large = vec![64 << 10, 1 << 20];
        assert_eq!(plan("--get --put"), [(PerfTest::Put, large.clone()), (PerfTest::Get, large)]);
        assert_eq!(plan("--put --bytes 1,4K"), [(PerfTest::Put, vec![1, 4096])]);
    }

    #[test]
    fn ranks_with_different_options_are_named() {
        let settings = |line: &str| parse(line).unwrap().settings();
        let mine = settings("--put --window 8");
        let error = mine.compare(0, 1, &settings("--put --window 9")).unwrap_err();
        insta::assert_snapshot!(error, @"
        error: ranks have different values of --window: 9 on rank 1, 8 on rank 0
         help: start all ranks with the same program and the same options
        ");
        assert!(mine.compare(0, 1, &settings("--get --window 8")).is_err());
    }

    #[test]
    fn a_test_is_required_and_network_devices_need_a_network() {
        assert!(parse("").unwrap_err().contains("<--put|--get|--signal>"));
        insta::assert_snapshot!(parse("--put --port 1").unwrap().check().unwrap_err(), @"
        error: --port selects a network device, but these ranks use no network
         help: use --backend rdma, or remove the option
        ");
        let other = parse("--put --backend ucx --queue-pairs 2").unwrap();
        insta::assert_snapshot!(other.check().unwrap_err(), @"
        error: --queue-pairs is an option of rdma, but these ranks use ucx
         help: use --backend rdma, or remove the option
        ");
    }
}
