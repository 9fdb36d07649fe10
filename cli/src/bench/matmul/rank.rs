//! Runs one rank, which compares its options with all ranks, opens the group, checks and measures.

use std::time::Duration;

use peerlane::bootstrap::Bootstrap;
use peerlane::open::{Backend, OpenOptions};
use peerlane::{Group, GroupOptions};

use super::matrices::RankMatrices;
use super::methods::{Method, Methods};
use super::options::{Options, Shape};
use super::report::{CollectiveColumns, MatmulRow};
use super::{Sink, Work};
use crate::allgather::GpuSlot;
use crate::allgather::gpu::device::Gpu;
use crate::allgather::gpu::{AGREEMENT_TIMEOUT, cause};
use crate::allgather::timer::in_turn;
use crate::error::{Failure, Result};
use crate::ranks::comm::Comm;
use crate::ranks::statistics::{Interval, Statistics, longest_of_each};
use crate::report::microseconds;

/// Measures as one rank of the group that `bootstrap` connects. On rank 0, `sink` receives the
/// rows.
pub(super) fn run(
    work: Work,
    options: &Options,
    slot: &GpuSlot,
    bootstrap: impl Bootstrap + 'static,
    sink: Sink<'_>,
) -> Result<()> {
    let comm = Comm::new(bootstrap, options.run.timeout);
    let measured = open(work, options, slot, &comm, sink);
    measured.inspect_err(|failure| comm.report(failure))
}

/// Opens the group of all ranks and measures in it.
fn open(work: Work, options: &Options, slot: &GpuSlot, comm: &Comm, sink: Sink<'_>) -> Result<()> {
    let seed = options.settings(work).agree(comm)?;
    let shape = Shape::new(work, options, comm.ranks())?;
    let hosts = comm.share("host", &comm.host().to_owned())?;
    if let Some(rank) = hosts.iter().position(|host| *host != hosts[0]) {
        let text = format!("rank {rank} runs on another host than rank 0, expected one host");
        return Err(Failure::failed(text).with_advice("start the ranks on one machine"));
    }

    // Longer than the group's, so that the group names the rank that is to blame.
    let timeout = options.run.timeout;
    let gpu = Gpu::open(Backend::Cuda, slot.ordinal, timeout + AGREEMENT_TIMEOUT)?;
    let group = GroupOptions::default().timeout(timeout).start_timeout(timeout);
    let open = OpenOptions::default().backend(Backend::Cuda).device(slot.ordinal).group(group);
    let mut group = open.open(comm.clone())?;
    let measured = measure(work, options, (shape, seed, gpu), (&mut group, comm), &slot.product);
    for row in measured.map_err(|failure| cause(&mut group, failure))? {
        sink(row)?;
    }
    Ok(group.close()?)
}

/// Checks all methods that have something to check, times all by turns, and returns the rows.
fn measure(
    work: Work,
    options: &Options,
    (shape, seed, gpu): (Shape, u64, Gpu),
    (group, comm): (&mut Group, &Comm),
    device_name: &str,
) -> Result<Vec<MatmulRow>> {
    let matrices =
        RankMatrices::open(work, options, shape.clone(), &gpu, (&mut *group, comm), seed)?;
    let mut methods = Methods::prepare(work, options, matrices, (&mut *group, comm))?;
    let mut all = methods.all();
    for method in &all {
        let fault = methods.check(*method)?;
        if let Some((rank, text)) = comm.first_fault(fault)? {
            let text = format!("rank {rank}: {text} (--seed {seed})");
            return Err(Failure::failed(text));
        }
    }

    let timed = |method: &mut Method| Ok([Interval::of(methods.time(*method)?)]);
    let times = in_turn(comm, &mut all, options.rounds, longest_of_each, timed)?;
    let alone = times.first().map_or(Duration::ZERO, |[times]| times.median);
    let row = |(method, [times]): (&Method, [Statistics; 1])| {
        let collective = methods.report(*method).map(|report| CollectiveColumns {
            algorithm: report.algorithm.name().to_owned(),
            chunks: report.chunks,
            kind: report.choice.engine.clone(),
        });
        let streams = match method {
            Method::Blocks { streams, .. } => Some(*streams),
            Method::Matmul | Method::Sequence => None,
        };
        MatmulRow {
            work: work.name().to_owned(),
            backend: Backend::Cuda.name().to_owned(),
            device_name: device_name.to_owned(),
            ranks: shape.ranks,
            dtype: "bf16".to_owned(),
            rows: shape.rows,
            inner: shape.inner,
            columns: shape.columns,
            method: method.name().to_owned(),
            streams,
            collective,
            rounds: options.rounds,
            iterations: options.iterations,
            median_us: microseconds(times.median),
            max_us: microseconds(times.max),
            ratio: times.median.as_secs_f64() / alone.as_secs_f64().max(1e-9),
            checked: streams.is_some(),
        }
    };
    Ok(all.iter().zip(times).map(row).collect())
}
