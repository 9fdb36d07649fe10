//! Defines the options that select the backend, its devices and its kind of copy engine.

use clap::Args;
use clap::builder::TypedValueParser;
use peerlane::open::Backend;

use crate::options::{one_of, parse_ranks};

/// The options that select the backend, the ranks and the GPUs of `allgather` and `calibrate`.
#[derive(Args, Clone, Debug)]
pub(crate) struct TargetOptions {
    /// Select the backend that connects the ranks of a node, either auto (cuda or rocm if each rank
    /// has its own GPU, otherwise host; an error if a driver does not work), host (shared memory),
    /// cuda, rocm, or a network that connects the ranks of all nodes, rdma (NICs) or ucx (such as
    /// Ethernet)
    #[arg(long, default_value = "auto", value_parser = parse_backend())]
    pub(crate) backend: BackendChoice,
    /// Spawn this number of processes, such as 8; under a launcher, check its number of ranks
    /// [default: one per GPU, or 4 without GPUs]
    #[arg(long, short = 'g', value_name = "N", value_parser = parse_ranks)]
    pub(crate) ranks: Option<usize>,
    /// Use these GPUs, by the numbers of the driver, such as 0,1,3; the ranks of this machine take
    /// them in turn [default: all]
    #[arg(long, value_name = "N,N,…", value_delimiter = ',', value_parser = parse_device)]
    pub(crate) devices: Vec<u32>,
}

/// A backend, or `None` for the one that the devices of the machine suggest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BackendChoice(pub(crate) Option<Backend>);

impl BackendChoice {
    pub(crate) fn name(&self) -> &'static str {
        self.0.map_or("auto", Backend::name)
    }
}

fn parse_backend() -> impl TypedValueParser<Value = BackendChoice> {
    let all = Backend::ALL.into_iter().map(Some);
    one_of(std::iter::once(None).chain(all).map(BackendChoice), BackendChoice::name)
}

fn parse_device(text: &str) -> Result<u32, String> {
    text.trim()
        .parse()
        .map_err(|_| "expected numbers of GPUs separated by commas, such as 0,1,3".to_owned())
}
