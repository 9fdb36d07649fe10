//! Runs NCCL's collective in the same processes, with NCCL's own settings, with symmetric windows
//! and on copy engines.

use std::ffi::c_void;
use std::rc::Rc;
use std::time::Duration;

use peerlane::bootstrap::Bootstrap;
use peerlane::collective::Collective;
use peerlane::{DType, Rank};

use super::candidate::{Implementation, with_timeout};
use super::device::{Gpu, Memory, Span, Stream};
use crate::allgather::options::Options;
use crate::error::{Failure, Result};
use crate::nccl::{Communicator, Nccl, Policy, Window};
use crate::ranks::comm::Comm;

pub(super) struct Baselines {
    pub(super) version: String,
    pub(super) paths: [NcclPath; 3],
    timeout: Duration,
}

/// One of the three ways in which NCCL runs a collective, such as on copy engines.
pub(super) struct NcclPath {
    pub(super) name: &'static str,
    /// The open communicator with its memory, or the reason why NCCL refuses it.
    state: std::result::Result<OpenPath, String>,
}

struct OpenPath {
    communicator: Rc<Communicator>,
    input: PathMemory,
    output: PathMemory,
}

/// GPU memory for the largest size, either plain or registered as an NCCL window.
enum PathMemory {
    Plain(Memory),
    Window(Window),
}

struct NcclOperation {
    name: &'static str,
    communicator: Rc<Communicator>,
    collective: Collective,
    dtype: DType,
    /// The number of elements that NCCL's call takes.
    count: usize,
    input: u64,
    output: Vec<Span>,
    stream: Rc<Stream>,
}

/// An operation of NCCL and its input blocks.
pub(super) type WithInput = (Box<dyn Implementation>, Vec<Span>);

const DEFAULT: &str = "default";
const SYMMETRIC: &str = "symmetric";
const COPY_ENGINES: &str = "copy engines";

impl Baselines {
    /// Loads NCCL, joins its communicators and allocates their memory.
    ///
    /// The memory is for inputs and outputs of up to the given lengths. Collective.
    pub(super) fn open(
        options: &Options,
        comm: &Comm,
        gpu: &Gpu,
        (input_bytes, output_bytes): (u64, u64),
    ) -> Result<Self> {
        // The ranks exchange the result first, so that no rank waits inside NCCL for a rank that
        // cannot load it.
        let loaded = Nccl::open(options.nccl.as_deref());
        let mine = loaded.as_ref().map(|nccl| nccl.version()).map_err(|why| why.text().to_owned());
        let versions = comm.share("version of NCCL", &mine)?;
        let nccl = loaded?;

        for (rank, theirs) in versions.into_iter().enumerate() {
            match theirs {
                Ok(version) if version == nccl.version() => {}
                Ok(version) => {
                    let (mine, me) = (nccl.version(), comm.rank());
                    let text = format!(
                        "NCCL versions differ: rank {rank} has {version}, rank {me} has {mine}"
                    );
                    return Err(Failure::failed(text)
                        .with_advice("give the same file with --nccl on all ranks"));
                }
                Err(why) => {
                    return Err(Failure::failed(format!("rank {rank} cannot load NCCL: {why}")));
                }
            }
        }

        let timeout = comm.timeout();
        let join = |policy| {
            gpu.enter()?;
            let id = if comm.rank().0 == 0 { nccl.unique_id()? } else { Vec::new() };
            let ids = comm.share("unique id of NCCL", &id)?;
            let id = ids.into_iter().next().unwrap_or_default();
            let (rank, ranks) = (comm.rank().index(), comm.ranks());
            with_timeout("ncclCommInitRankConfig", timeout, || {
                Communicator::join(&nccl, &id, rank, ranks, policy)
            })
        };

        let plain = join(Policy::Default)?;
        let state = OpenPath {
            communicator: Rc::clone(&plain),
            input: PathMemory::Plain(gpu.allocate(input_bytes)?),
            output: PathMemory::Plain(gpu.allocate(output_bytes)?),
        };
        let default = NcclPath { name: DEFAULT, state: Ok(state) };

        let windows = |communicator: Rc<Communicator>| {
            let window = |bytes| {
                let bytes = usize::try_from(bytes).unwrap_or(usize::MAX).max(1);
                with_timeout("ncclCommWindowRegister", timeout, || communicator.window(bytes))
            };
            let input = PathMemory::Window(window(input_bytes)?);
            let output = PathMemory::Window(window(output_bytes)?);
            Ok(OpenPath { communicator, input, output })
        };

        // Only windows make NCCL choose its symmetric kernels, so the communicator is the same.
        let symmetric = NcclPath::agreed(SYMMETRIC, comm, windows(plain))?;
        let copy_engines =
            NcclPath::agreed(COPY_ENGINES, comm, join(Policy::CopyEngines).and_then(windows))?;

        let paths = [default, symmetric, copy_engines];
        Ok(Self { version: format!("{} ({})", nccl.version(), nccl.path), paths, timeout })
    }

    /// Deregisters all NCCL windows and destroys all communicators. Collective.
    pub(super) fn close(self) -> Result<()> {
        // Paths may share a communicator. It is destroyed once, after the windows of all paths.
        let mut left: Vec<Rc<Communicator>> = Vec::new();

        for path in self.paths {
            let Ok(OpenPath { communicator, input, output }) = path.state else { continue };
            for held in [input, output] {
                if let PathMemory::Window(window) = held {
                    let close = || communicator.close_window(&window);
                    with_timeout("ncclCommWindowDeregister", self.timeout, close)?;
                }
            }

            if !left.iter().any(|seen| Rc::ptr_eq(seen, &communicator)) {
                left.push(communicator);
            }
        }

        for communicator in left {
            with_timeout("ncclCommDestroy", self.timeout, || communicator.close())?;
        }
        Ok(())
    }
}

impl NcclPath {
    /// Keeps the communicator if it is open on every rank, and the reason of the first refusal
    /// otherwise. Collective.
    fn agreed(name: &'static str, comm: &Comm, open: Result<OpenPath>) -> Result<Self> {
        let mine = open.as_ref().err().map(|why| why.text().to_owned());
        let refusals = comm.share("path of NCCL", &mine)?;
        let refusal = refusals.into_iter().flatten().next();

        let state = match (open, refusal) {
            (Ok(open), None) => Ok(open),
            (_, refusal) => Err(refusal.unwrap_or_default()),
        };
        Ok(Self { name, state })
    }

    pub(super) fn refusal(&self) -> Option<&str> {
        self.state.as_ref().err().map(String::as_str)
    }

    /// Returns NCCL's collective and the input blocks of this rank. `blocks_of` returns the lengths
    /// of the input blocks of a rank. Returns `None` if NCCL refuses the path.
    pub(super) fn operation(
        &self,
        options: &Options,
        comm: &Comm,
        blocks_of: impl Fn(Rank) -> Result<Vec<u64>>,
        stream: &Rc<Stream>,
    ) -> Result<Option<WithInput>> {
        let Ok(OpenPath { communicator, input, output }) = &self.state else { return Ok(None) };
        let Options { goal, dtype, in_place, .. } = options;
        let (collective, rank) = (goal.collective, comm.rank());

        // NCCL counts the elements of one block on all ranks, also on those that have no input.
        let sent = blocks_of(collective.only_provider().unwrap_or(rank))?;
        let is_scattered = collective.has_input_block_per_receiver();
        let count = if is_scattered { sent[rank.index()] } else { sent.iter().sum() };

        let has_block_of_each = collective.has_output_block_per_provider();
        let blocks = if has_block_of_each { comm.ranks() } else { 1 };
        let output_blocks = vec![count; blocks * usize::from(collective.is_receiver(rank))];
        let own = if has_block_of_each { rank.index() as u64 * count } else { 0 };

        let output = output.address();
        let input = if *in_place { output + own } else { input.address() };
        let input_blocks = blocks_of(rank)?;

        let operation = NcclOperation {
            name: self.name,
            communicator: Rc::clone(communicator),
            collective,
            dtype: if collective.is_reduction() { *dtype } else { DType::U8 },
            count: count as usize / if collective.is_reduction() { dtype.bytes() } else { 1 },
            input,
            output: consecutive(output, &output_blocks),
            stream: Rc::clone(stream),
        };
        Ok(Some((Box::new(operation), consecutive(input, &input_blocks))))
    }
}

/// Returns blocks of these lengths that follow each other in memory.
fn consecutive(mut address: u64, bytes: &[u64]) -> Vec<Span> {
    let block = |&bytes: &u64| {
        let block = Span { address, bytes };
        address += bytes;
        block
    };
    bytes.iter().map(block).collect()
}

impl PathMemory {
    fn address(&self) -> u64 {
        match self {
            Self::Plain(memory) => memory.span().address,
            Self::Window(window) => window.address as u64,
        }
    }
}

impl Implementation for NcclOperation {
    fn name(&self) -> &'static str {
        match self.name {
            SYMMETRIC => "NCCL with symmetric windows",
            COPY_ENGINES => "NCCL on copy engines",
            _ => "NCCL",
        }
    }

    fn may_hang(&self) -> bool {
        true
    }

    fn start(&mut self) -> Result<()> {
        let stream: *mut c_void = self.stream.raw();
        let Self { communicator, collective, dtype, count, input, output, .. } = self;
        // A rank without an output still names memory.
        let output = output.first().map_or(*input, |block| block.address);
        let (memory, elements) = ((*input, output), (*count, *dtype));
        // SAFETY: the memory fits the largest size and outlives the communicator; the stream
        // belongs to the same GPU.
        unsafe { communicator.start(*collective, memory, elements, stream) }
    }

    fn output(&self) -> Result<Vec<Span>> {
        Ok(self.output.clone())
    }
}
