//! Measures collectives between GPUs of either vendor, with one GPU per rank and consecutive runs on one stream.
//!
//! | file | holds |
//! | --- | --- |
//! | `measure` | preparing, checking and timing candidates |
//! | `candidate` | what is timed, eagerly or from a graph |
//! | `gather` | Peerlane's all-gather |
//! | `baselines` | NCCL's collectives |
//! | `limit` | bare copies as the limit |
//! | `overlap` | all-gathers and compute work together |
//! | `timer` | times of starts on a stream |
//! | `content` | filling and comparing GPU memory |
//! | `device` | streams, events, graphs and memory of a GPU |

use std::time::Duration;

use peerlane::bootstrap::Bootstrap;
use peerlane::open::Backend;
use peerlane::{Algorithm, Group};

use super::backend::GpuSlot;
use super::measure::{Measurement, RankContext};
use super::setup::Setup;
use crate::error::{Failure, Result};
use crate::units::Size;

mod baselines;
mod candidate;
pub(crate) mod content;
pub(crate) mod device;
mod gather;
mod limit;
mod measure;
mod overlap;
mod timer;

use baselines::Baselines;
use device::Gpu;
use limit::LimitBuffers;
use measure::GpuBench;
use overlap::Compute;
use timer::StreamTimer;

/// The maximum time from a deadline until the ranks agree on the rank that is to blame.
pub(crate) const AGREEMENT_TIMEOUT: Duration = Duration::from_secs(2);

pub(super) fn run(context: RankContext<'_>, slot: &GpuSlot, backend: Backend) -> Result<()> {
    let options = context.options;
    let lengths = options.sweep(context.comm.ranks()).block_lengths();
    // Longer than the group's, so that the group names the rank that is to blame.
    let timeout = options.run.timeout + AGREEMENT_TIMEOUT;
    let gpu = Gpu::open(backend, slot.ordinal, timeout)?;
    let mut measurement = context.open(backend, Some(slot.ordinal))?;
    let Measurement { setup, comm, group, .. } = &mut measurement;
    let layout = setup.layout(lengths.last().copied().unwrap_or(0))?;
    let input_bytes = layout.input_bytes_max();
    let largest = (input_bytes, layout.output_bytes_max());
    check_device_memory(setup, largest, &gpu)?;
    let start_barrier = group.all_gather::<u8>(0).algorithm(Algorithm::Direct).chunks(1).outputs(1);
    let start_barrier = start_barrier.timeout(options.run.timeout).prepare()?;
    let mut timer = StreamTimer::new(gpu.clone(), gpu.stream()?, start_barrier)?;
    let mut limits = Vec::new();
    if options.limit {
        let buffers = LimitBuffers::open(&gpu, comm, largest)?;
        limits = measure::limits(setup, comm, &mut timer, &buffers, &lengths)?;
        buffers.close(comm)?;
    }
    let baselines = match options.vs {
        None => None,
        Some(_) => Some(Baselines::open(options, comm, &gpu, largest)?),
    };
    let compute = options.overlap.map(|_| Compute::open(options, &gpu)).transpose()?;
    let mut bench = GpuBench { timer, limits, baselines, compute };
    let measured = measurement.sweep(&mut bench);
    measured.map_err(|failure| cause(&mut measurement.group, failure))?;
    let GpuBench { timer, baselines, compute, .. } = bench;
    drop((timer, compute));
    if let Some(baselines) = baselines {
        baselines.close()?;
    }
    Ok(measurement.group.close()?)
}

/// Returns the error that has ended the group, or `failure` if the group still works.
pub(crate) fn cause(group: &mut Group, failure: Failure) -> Failure {
    match group.abort_record() {
        Some(_) => group.barrier().map_or_else(Failure::from, |()| failure),
        None => failure,
    }
}

fn check_device_memory(setup: &Setup<'_>, (input, output): (u64, u64), gpu: &Gpu) -> Result<()> {
    let options = setup.options;
    let operations = setup.algorithms().len() as u64;
    let pair = output.saturating_add(input);
    let pairs = operations + u64::from(options.limit) + if options.vs.is_some() { 3 } else { 0 };
    let outputs = operations * u64::from(options.outputs.unwrap_or(2).saturating_sub(1));
    let compute = if options.overlap.is_some() { overlap::MEMORY_BYTES } else { 0 };
    let required = pair
        .saturating_mul(pairs)
        .saturating_add(output.saturating_mul(outputs))
        .saturating_add(compute);
    let free = gpu.free_bytes()?;
    if required <= free {
        return Ok(());
    }
    Err(Failure::failed(format!(
        "the largest size needs {} of memory on each GPU, but only {} are free",
        Size(required),
        Size(free)
    ))
    .with_advice(
        "lower --max-bytes, or run nvidia-smi or rocm-smi to see which process uses the memory",
    ))
}
