//! Implements `peerlane bench all-gather-matmul` and `matmul-reduce-scatter`, which measure how
//! much of a collective hides behind matrix products of the same data.
//!
//! | file | holds |
//! | --- | --- |
//! | `options` | the command line, and the matrices of a run |
//! | `rank` | one rank from its start to its end: checks and times |
//! | `methods` | the ways to run collective and product, on the streams of a GPU |
//! | `matrices` | matrices in GPU memory, and the streams that multiply them |
//! | `report` | rows and their output |

use peerlane::Deadline;
use peerlane::bootstrap::environment::Environment;
use peerlane::bootstrap::tcp::TcpBootstrap;
use peerlane::open::Backend;

use crate::allgather::Selected;
use crate::cublas;
use crate::error::{Failure, Result};
use crate::ranks::affinity::{self, Bind};
use crate::ranks::{self, LaunchedBy, write_to_parent};

mod matrices;
mod methods;
mod options;
mod rank;
mod report;

pub(crate) use options::Options;
use options::Shape;
use report::{MatmulRow, Printer};

/// The receiver of the result rows on rank 0.
type Sink<'a> = &'a mut dyn FnMut(MatmulRow) -> Result<()>;

/// A collective and the products before or behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// The rows of all ranks are gathered and multiplied.
    AllGatherMatmul,
    /// The rows are multiplied, and the products of all ranks added.
    MatmulReduceScatter,
}

impl Work {
    fn name(self) -> &'static str {
        match self {
            Self::AllGatherMatmul => "all-gather-matmul",
            Self::MatmulReduceScatter => "matmul-reduce-scatter",
        }
    }

    /// Returns the name of the collective alone.
    fn collective(self) -> &'static str {
        match self {
            Self::AllGatherMatmul => "all-gather",
            Self::MatmulReduceScatter => "reduce-scatter",
        }
    }
}

/// Measures as one of the ranks of a launcher, or spawns one rank for each GPU.
pub(crate) fn run(work: Work, options: &Options) -> Result<()> {
    match LaunchedBy::of(options.run.spawned_by)? {
        LaunchedBy::User => spawn(work, options),
        LaunchedBy::Program(environment) => run_spawned(work, options, &environment),
        LaunchedBy::Launcher(environment) => join(work, options, &environment),
    }
}

/// Spawns one process per rank on this machine and prints the results.
fn spawn(work: Work, options: &Options) -> Result<()> {
    let selected = select(work, options, options.target.ranks)?;
    let ranks = options.target.ranks.unwrap_or(selected.ranks_default());
    let shape = Shape::new(work, options, ranks)?;

    // A library that is missing is reported once.
    cublas::LIBRARY.open(options.cublas.as_deref())?;
    ranks::spawn(ranks, options.run.timeout, Printer::open(options, &selected, &shape)?)
}

/// Runs a rank that the parent process of this program has spawned.
fn run_spawned(work: Work, options: &Options, environment: &Environment) -> Result<()> {
    let (rank, ranks) = (environment.rank.index(), environment.ranks);
    let selected = select(work, options, Some(ranks))?;
    if let Some(slot) = selected.slot(rank).filter(|_| options.run.bind == Bind::Core) {
        affinity::bind_near(&slot.pci_bus_id, rank, ranks)?;
    }
    measure(work, options, &selected, environment, &mut |row| write_to_parent(&row))
}

/// Runs a rank that a launcher has started; rank 0 prints the results.
fn join(work: Work, options: &Options, environment: &Environment) -> Result<()> {
    let ranks = environment.ranks;
    if let Some(given) = options.target.ranks.filter(|given| *given != ranks) {
        let text = format!("--ranks is {given}, but the launcher has started {ranks} ranks");
        return Err(Failure::usage(text).with_advice("remove --ranks"));
    }

    let selected = select(work, options, Some(ranks))?;
    let shape = Shape::new(work, options, ranks)?;
    ranks::print_on_rank_0(
        environment.rank,
        || Printer::open(options, &selected, &shape),
        |sink| measure(work, options, &selected, environment, sink),
    )
}

/// Selects the GPUs, or says why this machine cannot run the products.
fn select(work: Work, options: &Options, ranks: Option<usize>) -> Result<Selected> {
    let refuse = |backend: &str, why: &str| {
        let text = format!(
            "`bench {}` multiplies with cuBLAS on NVIDIA GPUs, but the backend is {backend}{why}",
            work.name()
        );
        let advice = format!(
            "use --backend cuda on a machine with NVIDIA GPUs; `peerlane bench {}` measures the \
             collective alone on every backend",
            work.collective()
        );
        Err(Failure::usage(text).with_advice(advice))
    };

    // Without a look at the driver of a backend that cannot be used.
    if let Some(other) = options.target.backend.0.filter(|backend| *backend != Backend::Cuda) {
        return refuse(other.name(), "");
    }
    let selected = Selected::of_target(&options.target, ranks)?;
    match (selected.backend, &selected.note) {
        (Backend::Cuda, _) => Ok(selected),
        (other, Some(note)) => refuse(other.name(), &format!(" ({note})")),
        (other, None) => refuse(other.name(), ""),
    }
}

/// Joins the other ranks and measures.
fn measure(
    work: Work,
    options: &Options,
    selected: &Selected,
    environment: &Environment,
    sink: Sink<'_>,
) -> Result<()> {
    let local_rank = environment.local_rank.unwrap_or(environment.rank.0) as usize;
    let slot = selected
        .slot(local_rank)
        .ok_or_else(|| Failure::failed(format!("there is no GPU for rank {}", environment.rank)))?;
    let bootstrap = TcpBootstrap::join(environment, Deadline::after(options.run.timeout))?;
    rank::run(work, options, slot, bootstrap, sink)
}
