//! Implements `peerlane perf`, which measures single puts, gets and signals between two ranks.

use peerlane::Deadline;
use peerlane::bootstrap::Bootstrap;
use peerlane::bootstrap::environment::Environment;
use peerlane::bootstrap::tcp::TcpBootstrap;
use peerlane::open::FabricOptions;

use crate::error::{Failure, Result};
use crate::nics;
use crate::ranks::affinity::{self, Bind};
use crate::ranks::comm::Comm;
use crate::ranks::{self, LaunchedBy, write_to_parent};

mod measure;
mod options;
mod pair;
mod report;

pub(crate) use options::Options;
use options::PerfTest;
use pair::Pair;
use report::{PerfRow, Printer};

/// The number of ranks, of which rank 0 measures and rank 1 answers.
const RANKS: usize = 2;

/// The receiver of the result rows on rank 0.
type Sink<'a> = &'a mut dyn FnMut(PerfRow) -> Result<()>;

/// Measures as one of the two ranks of a launcher, or spawns two ranks.
pub(crate) fn run(options: &Options) -> Result<()> {
    match LaunchedBy::of(options.run.spawned_by)? {
        LaunchedBy::User => {
            options.check()?;
            ranks::spawn(RANKS, options.run.timeout, Printer::open(options)?)
        }
        LaunchedBy::Program(environment) => {
            let rank = environment.rank.index();
            if options.run.bind == Bind::Core {
                affinity::bind(rank, RANKS)?;
            }
            measure(options, &environment, true, &mut |row| write_to_parent(&row))
        }
        LaunchedBy::Launcher(environment) => join(options, &environment),
    }
}

/// Runs a rank that a launcher has started; rank 0 prints the results.
fn join(options: &Options, environment: &Environment) -> Result<()> {
    if environment.ranks != RANKS {
        let seen = environment.ranks;
        let text =
            format!("the launcher has started {seen} ranks, expected {RANKS} ranks for perf");
        return Err(Failure::usage(text)
            .with_advice("start two ranks, for example one on each of two machines"));
    }
    options.check()?;
    let printer = || Printer::open(options);
    ranks::print_on_rank_0(environment.rank, printer, |sink| {
        measure(options, environment, false, sink)
    })
}

fn measure(
    options: &Options,
    environment: &Environment,
    single_host: bool,
    sink: Sink<'_>,
) -> Result<()> {
    let bootstrap = TcpBootstrap::join(environment, Deadline::after(options.run.timeout))?;
    let comm = Comm::new(bootstrap, options.run.timeout);
    let measured = measure_joined(options, environment, single_host, comm.clone(), sink);
    measured.inspect_err(|failure| comm.report(failure))
}

fn measure_joined(
    options: &Options,
    environment: &Environment,
    single_host: bool,
    comm: Comm,
    sink: Sink<'_>,
) -> Result<()> {
    let seed = options.settings().agree(&comm)?;
    let (rank, ranks) = (comm.rank(), comm.ranks());
    // A rank that is only the target of puts and gets does not have to react quickly.
    let has_waiting_peer = rank.0 == 0 || options.signal;
    let spin = options.spin.filter(|_| has_waiting_peer).map(|spin| spin.0);
    let backend = options.backend;
    if !backend.is_network() {
        let hosts = comm.share("host", &comm.host().to_owned())?;
        if hosts[0] != hosts[1] {
            let text =
                "the two ranks run on different hosts, which the backend host cannot connect";
            let advice = format!("use {}", nics::one_of("--backend"));
            return Err(Failure::failed(text).with_advice(advice));
        }
    }

    let mut fabrics = FabricOptions::default();
    let local_rank = environment.local_rank.unwrap_or(0) as usize;
    options.nics.apply(&mut fabrics, local_rank, single_host);
    fabrics.host.bind = options.run.bind.of_threads();
    (fabrics.host.spin, fabrics.rdma.spin, fabrics.ucx.spin) = (spin, spin, spin);
    let mut pair = Pair::open(options, comm, fabrics.open(backend, rank, ranks)?, seed)?;
    for (work, sizes) in options.plan() {
        for bytes in sizes {
            let row = match work {
                PerfTest::Put | PerfTest::Get => measure::measure_rate(&mut pair, work, bytes)?,
                PerfTest::Signal => measure::measure_latency(&mut pair, bytes)?,
            };
            if let Some(row) = row {
                sink(row)?;
            }
        }
    }
    pair.close()
}
