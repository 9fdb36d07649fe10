//! Options of the backend, its devices and its kind of engine.

use std::str::FromStr;

use clap::{Args, ValueEnum};
use peerlane::{open, rocm};

use crate::error::{Failure, Result};
use crate::options::parse_ranks;

/// Options of the backend and its devices, of `allgather` and `calibrate`.
#[derive(Args, Clone, Debug)]
pub(crate) struct TargetOptions {
    /// Select the backend that connects the ranks of a node: auto (cuda or rocm if each rank has its
    /// own GPU, otherwise host), host (shared memory), cuda, rocm, or rdma (NICs, which connect the
    /// ranks of all nodes)
    #[arg(long, value_enum, default_value_t = Backend::Auto)]
    pub(crate) backend: Backend,
    /// Spawn this number of processes, such as 8; under a launcher, check its number of ranks
    /// [default: one per GPU, or 4 without GPUs]
    #[arg(long, value_name = "N", value_parser = parse_ranks)]
    pub(crate) ranks: Option<usize>,
    /// Use these GPUs, by the numbers of the driver, such as 0,1,3; the ranks of this machine take
    /// them in turn [default: all]
    #[arg(long, value_name = "N,N,…")]
    pub(crate) devices: Option<Devices>,
}

/// Backends of `--backend`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Backend {
    Auto,
    Host,
    Cuda,
    Rocm,
    Rdma,
}

/// Numbers of GPUs, such as `0,1,3`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Devices(pub(super) Vec<u32>);

impl Backend {
    /// Returns the backend of the library; `Auto` was resolved before.
    pub(crate) fn in_library(self) -> open::Backend {
        match self {
            Self::Auto | Self::Host => open::Backend::Host,
            Self::Cuda => open::Backend::Cuda,
            Self::Rocm => open::Backend::Rocm,
            Self::Rdma => open::Backend::Rdma,
        }
    }

    /// Returns the name on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Host => "host",
            Self::Cuda => "cuda",
            Self::Rocm => "rocm",
            Self::Rdma => "rdma",
        }
    }
}

impl FromStr for Devices {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let ordinal = |word: &str| {
            word.trim().parse().map_err(|_| {
                "expected numbers of GPUs separated by commas, such as 0,1,3".to_owned()
            })
        };
        text.split(',').map(ordinal).collect::<std::result::Result<_, _>>().map(Self)
    }
}

impl std::fmt::Display for Devices {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let words: Vec<_> = self.0.iter().map(u32::to_string).collect();
        f.write_str(&words.join(","))
    }
}

/// Kinds of engine of `--engine`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum EngineKind {
    Auto,
    Streams,
    Sdma,
}

impl EngineKind {
    /// Returns the name on the command line.
    pub(crate) fn name(self) -> &'static str {
        self.kind().name()
    }

    /// Returns the kind in the terms of the backend.
    pub(super) fn kind(self) -> rocm::EngineKind {
        match self {
            Self::Auto => rocm::EngineKind::Auto,
            Self::Streams => rocm::EngineKind::Streams,
            Self::Sdma => rocm::EngineKind::Sdma,
        }
    }

    /// Checks that the engine fits `--graph` and that this machine has it.
    pub(super) fn check(self, graph: bool) -> Result<()> {
        if self != Self::Sdma {
            return Ok(());
        }
        if graph {
            return Err(Failure::usage("--graph and --engine sdma cannot be used together")
                .with_advice(
                    "a graph cannot contain copies of SDMA engines: use --engine streams, or \
                     remove --graph",
                ));
        }
        let runtimes = rocm::runtimes().map_err(Failure::of_backend)?;
        match runtimes.hsa {
            Ok(_) => Ok(()),
            Err(why) => Err(Failure::failed(format!(
                "--engine sdma needs the HSA runtime, which cannot be used: {why}"
            ))
            .with_advice(
                "use --engine streams, or run `peerlane doctor` to see the runtimes of this machine",
            )),
        }
    }

    /// Refuses a kind of engine if the backend has only one kind.
    pub(super) fn check_without_rocm(self, backend: &str) -> Result<()> {
        if self == Self::Auto {
            return Ok(());
        }
        let text = format!(
            "--engine {} needs the backend rocm, but the backend is {backend}",
            self.name()
        );
        Err(Failure::usage(text).with_advice("remove the option, or use --backend rocm"))
    }
}
