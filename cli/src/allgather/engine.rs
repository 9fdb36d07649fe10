//! Which kind of engines the backend rocm copies with.

use clap::ValueEnum;
use peerlane::rocm;

use super::options::Options;
use crate::error::{Failure, Result};

/// A kind as it is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Engine {
    Auto,
    Streams,
    Sdma,
}

impl Engine {
    /// As the command line takes it.
    pub(crate) fn name(self) -> &'static str {
        self.kind().name()
    }

    /// As the backend takes it.
    pub(super) fn kind(self) -> rocm::EngineKind {
        match self {
            Self::Auto => rocm::EngineKind::Auto,
            Self::Streams => rocm::EngineKind::Streams,
            Self::Sdma => rocm::EngineKind::Sdma,
        }
    }

    /// Whether gathers are timed by whichever engines are predicted to be the fastest.
    pub(super) fn is_open(options: &Options) -> bool {
        options.engine == Self::Auto && !options.graph
    }

    /// Refuses what the engines cannot do, or this machine does not have.
    ///
    /// # Errors
    /// A failure that names the option.
    pub(super) fn check(options: &Options) -> Result<()> {
        if options.engine != Self::Sdma {
            return Ok(());
        }
        if options.graph {
            return Err(Failure::usage("--graph and --engine sdma do not fit together")
                .with_advice("the host drives SDMA engines: take streams, or leave out --graph"));
        }
        let runtimes = rocm::runtimes().map_err(Failure::of_backend)?;
        match runtimes.hsa {
            Ok(_) => Ok(()),
            Err(why) => Err(Failure::failed(format!("--engine sdma needs the HSA runtime: {why}"))
                .with_advice("take --engine streams; `peerlane doctor` shows what there is")),
        }
    }

    /// Refuses a kind where the backend has only one.
    ///
    /// # Errors
    /// A usage failure that names the option.
    pub(super) fn check_without_rocm(options: &Options, backend: &str) -> Result<()> {
        if options.engine == Self::Auto {
            return Ok(());
        }
        let text = format!(
            "--engine {} is of the backend rocm, this one is {backend}",
            options.engine.name()
        );
        Err(Failure::usage(text).with_advice("leave it out, or take --backend rocm"))
    }
}
