//! Measures one size on GPUs: opens, checks and times all candidates in turn.

use std::rc::Rc;
use std::time::Duration;

use peerlane::bootstrap::Bootstrap;
use peerlane::collective::Collective;
use peerlane::group::Report;
use peerlane::{ErrorKind, Group};

use super::baselines::Baselines;
use super::candidate::{Candidate, with_timeout};
use super::gather;
use super::limit::LimitBuffers;
use super::overlap::{Compute, measure_overlap};
use super::timer::{StartCounts, StreamTimer};
use crate::allgather::options::{Options, self_copy_name};
use crate::allgather::printer::{Activity, ProgressEvent, Sink};
use crate::allgather::row::{self, Measured};
use crate::allgather::setup::{Setup, Variant};
use crate::allgather::timeline;
use crate::error::Result;
use crate::ranks::comm::Comm;
use crate::ranks::data::TestData;
use crate::ranks::statistics::Statistics;
use crate::report::{Baseline, DeviceTimes, Row, bandwidths, microseconds};

/// Number of repetitions; the median counts.
const REPETITIONS: usize = 5;
/// Total size from which a few starts in a row are enough.
const LARGE_BYTES: u64 = 256 << 20;
const STARTS: u32 = 50;
const STARTS_LARGE: u32 = 10;

/// The state of a measuring rank.
pub(super) struct GpuMeasurement<'a> {
    pub(super) setup: Setup<'a>,
    pub(super) seed: u64,
    pub(super) comm: Comm,
    pub(super) sink: Sink<'a>,
    pub(super) timer: StreamTimer,
    /// The limit of each size, if it was measured.
    pub(super) limits: Vec<Duration>,
    pub(super) baselines: Option<Baselines>,
    pub(super) compute: Option<Compute>,
    pub(super) group: Group,
}

/// Times of a candidate; the longest time of all ranks counts in each repetition.
#[derive(Clone, Copy, Debug)]
struct Times {
    device: Statistics,
    host: Duration,
}

impl GpuMeasurement<'_> {
    /// Sends an event to the printer, on rank 0 only.
    pub(super) fn report_event(&mut self, event: ProgressEvent) -> Result<()> {
        if self.comm.rank().0 == 0 { (self.sink)(event) } else { Ok(()) }
    }

    /// Measures and checks blocks of `block_length` elements; `index` is the index of the size.
    /// Collective.
    pub(super) fn size(&mut self, index: usize, block_length: u64) -> Result<()> {
        let (rank, ranks) = (self.comm.rank(), self.comm.ranks());
        let layout = self.setup.layout(block_length)?;
        let total_bytes = layout.total_bytes();
        let counts = counts(self.setup.options, total_bytes);
        let limit = self.limits.get(index).copied();
        let data = |round| TestData { seed: self.seed, size: index as u64, round };
        let (before, after) = (data(0), data(1));
        let activity_event = |activity| ProgressEvent::Activity { activity, total_bytes };

        self.report_event(activity_event(Activity::Check))?;
        let Self { setup, comm, timer, baselines, compute, sink, group, .. } = self;
        let (options, gpu, stream) = (setup.options, timer.gpu.clone(), Rc::clone(&timer.stream));
        let mut report_event = |event| if rank.0 == 0 { sink(event) } else { Ok(()) };
        let (mut candidates, mut reports, mut refused) = (Vec::new(), Vec::new(), None);
        for algorithm in setup.algorithms() {
            let variant = Variant { algorithm, captured: options.graph, traced: false };
            let prepared = gather::prepare(setup, group, &stream, block_length, variant);
            let prepared = match prepared {
                // All ranks get the same refusal, before anything is captured.
                Err(why) if options.graph && why.kind() == Some(ErrorKind::InvalidArgument) => {
                    let row = Box::new(row::missing(setup, algorithm, total_bytes, &why));
                    report_event(ProgressEvent::Missing { row })?;
                    refused.get_or_insert(why);
                    continue;
                }
                prepared => prepared?,
            };
            let memory = (prepared.input, prepared.report.outputs);
            let implementation = prepared.implementation;
            candidates.push(Candidate::open(implementation, &gpu, &stream, memory, options.graph)?);
            reports.push(prepared.report);
        }
        if let Some(why) = refused.filter(|_| reports.is_empty()) {
            return Err(why);
        }
        for path in baselines.iter().flat_map(|baselines| baselines.paths()) {
            if let Some((implementation, input)) =
                path.at(layout.input_bytes(rank), comm, options.in_place, &stream)
            {
                let memory = (vec![input], 1);
                let open = || Candidate::open(implementation, &gpu, &stream, memory, options.graph);
                candidates.push(with_timeout("NCCL's first all-gather", comm.timeout(), open)?);
            }
        }
        for candidate in &mut candidates {
            candidate.guarded(|candidate| candidate.check(comm, setup.numbering(rank), before))?;
        }

        report_event(activity_event(Activity::Measure))?;
        let times = time(timer, comm, &mut candidates, counts)?;

        let mut overlaps = Vec::new();
        if let Some(compute) = compute {
            report_event(activity_event(Activity::Overlap))?;
            for candidate in &mut candidates {
                let work = |candidate: &mut Candidate<'_>| {
                    measure_overlap(timer, comm, compute, candidate)
                };
                overlaps.push(candidate.guarded(work)?);
            }
        }
        report_event(activity_event(Activity::Check))?;
        for candidate in &mut candidates {
            candidate.guarded(|candidate| candidate.check(comm, setup.numbering(rank), after))?;
        }

        let starts = candidates[0].rounded_up(counts.timed);
        // The overlaps of the baselines belong to the first row.
        let mut overlaps = overlaps.into_iter();
        let own_overlaps: Vec<_> = overlaps.by_ref().take(reports.len()).collect();
        for (index, report) in reports.iter().enumerate() {
            let predicted = setup.predicted(report);
            let mut row = row(setup, report, times[index], (limit, predicted), starts);
            if let Some(baselines) = baselines {
                let baseline_times = &times[reports.len()..];
                row.baselines =
                    compare(baselines, times[index], baseline_times, row.total_bytes, ranks);
                row.baselines_version = Some(baselines.version().to_owned());
            }
            row.overlap = own_overlaps.get(index).cloned().into_iter().collect();
            if index == 0 {
                row.overlap.extend(overlaps.by_ref());
            }
            if let Some(text) = setup.explanation(report) {
                report_event(ProgressEvent::Explanation { text })?;
            }
            report_event(ProgressEvent::Row { row: Box::new(row) })?;
        }
        drop(candidates);
        // After the barrier the memory of this size is free on every rank, so the next size can be
        // allocated.
        Ok(self.group.barrier()?)
    }

    /// Traces one start with blocks of `block_length` elements. Collective.
    pub(super) fn trace(&mut self, block_length: u64) -> Result<()> {
        let total_bytes = self.setup.layout(block_length)?.total_bytes();
        self.report_event(ProgressEvent::Activity { activity: Activity::Trace, total_bytes })?;
        let Self { setup, comm, group, .. } = self;
        let starts = timeline::trace(setup, comm, group, block_length)?;
        self.report_event(ProgressEvent::Trace { starts })
    }
}

fn counts(options: &Options, total_bytes: u64) -> StartCounts {
    let starts = if total_bytes < LARGE_BYTES { STARTS } else { STARTS_LARGE };
    let timed = options.iterations.unwrap_or(starts);
    StartCounts { warmup: options.warmup, timed, aligned: false }
}

/// Returns the time of bare copies in the fastest way, for each block length. It must be measured
/// before other streams are created, because more streams share the queues of the device.
///
/// Many iterations in a row hide the host time of a single one. Without flags, however, the ranks
/// get out of step, and copies from several ranks to one peer collide. Therefore a few iterations
/// that begin together count as well. Collective.
pub(super) fn limits(
    setup: &Setup<'_>,
    comm: &Comm,
    timer: &mut StreamTimer,
    buffers: &LimitBuffers,
    lengths: &[u64],
) -> Result<Vec<Duration>> {
    let (gpu, stream) = (timer.gpu.clone(), Rc::clone(&timer.stream));
    let limit = |&length: &u64| {
        let layout = setup.layout(length)?;
        let open =
            |(scheme, input)| Candidate::open(scheme, &gpu, &stream, (vec![input], 1), false);
        let schemes = buffers.schemes(&layout, comm.rank(), &stream).into_iter().map(open);
        let mut schemes = schemes.collect::<Result<Vec<_>>>()?;
        let in_a_row = counts(setup.options, layout.total_bytes());
        let warmup = in_a_row.warmup.max(1);
        let aligned = |timed| StartCounts { warmup, timed, aligned: true };
        let mut fastest = Duration::MAX;
        for counts in [in_a_row, aligned(1), aligned(4)] {
            let measure = |scheme: &mut Candidate<'_>| Ok(vec![timer.time_starts(scheme, counts)?]);
            let times = repetitions(comm, &mut schemes, measure)?;
            fastest = times.iter().map(|scheme| scheme[0].median).fold(fastest, Duration::min);
        }
        Ok(fastest)
    };
    lengths.iter().map(limit).collect()
}

/// Returns the device and host times of all candidates. Collective.
fn time(
    timer: &mut StreamTimer,
    comm: &Comm,
    candidates: &mut [Candidate<'_>],
    counts: StartCounts,
) -> Result<Vec<Times>> {
    let measure = |candidate: &mut Candidate<'_>| {
        Ok([timer.time_starts(candidate, counts)?, timer.host_time(candidate)?].into())
    };
    let times = repetitions(comm, candidates, measure)?;
    let times = times.iter().map(|times| Times { device: times[0], host: times[1].median });
    Ok(times.collect())
}

/// Runs `measure` for all candidates in turn, so that a disturbance affects all of them alike. Each run
/// returns one or more times; the longest of all ranks counts. Collective.
fn repetitions(
    comm: &Comm,
    candidates: &mut [Candidate<'_>],
    mut measure: impl FnMut(&mut Candidate<'_>) -> Result<Vec<Duration>>,
) -> Result<Vec<Vec<Statistics>>> {
    let mut own: Vec<Vec<Vec<Duration>>> = vec![Vec::new(); candidates.len()];
    for _ in 0..REPETITIONS {
        for (candidate, repetitions) in candidates.iter_mut().zip(&mut own) {
            repetitions.push(candidate.guarded(&mut measure)?);
        }
    }
    let ranks = comm.share("times", &own)?;
    let of = |candidate: usize| {
        let longest = |repetition: usize, kind: usize| {
            ranks.iter().map(|rank| rank[candidate][repetition][kind]).max().unwrap_or_default()
        };
        let kind = |kind| {
            Statistics::of((0..REPETITIONS).map(|repetition| longest(repetition, kind)).collect())
        };
        (0..own[candidate][0].len()).map(kind).collect()
    };
    Ok((0..own.len()).map(of).collect())
}

fn row(
    setup: &Setup<'_>,
    report: &Report,
    times: Times,
    (limit, predicted): (Option<Duration>, Option<Duration>),
    starts: u32,
) -> Row {
    let iterations = starts as usize * REPETITIONS;
    let measured = Measured { statistics: times.device, iterations, limit, predicted };
    let device = DeviceTimes {
        host_us: microseconds(times.host),
        starts_in_a_row: starts,
        captured: setup.options.graph,
        self_copy: self_copy_name(&setup.options.self_copy).to_owned(),
    };
    Row { device: Some(device), ..row::row(setup, report, measured) }
}

/// Returns the comparison with all paths of NCCL; `times` are those of the available paths.
fn compare(
    baselines: &Baselines,
    ours: Times,
    times: &[Times],
    total_bytes: u64,
    ranks: usize,
) -> Vec<Baseline> {
    let ours = ours.device.median;
    let mut times = times.iter();
    let baseline = |path: &super::baselines::NcclPath| match path.refusal() {
        Some(why) => Baseline::missing(path.name, why),
        None => times.next().map_or_else(
            || Baseline::missing(path.name, "it was not timed"),
            |times| {
                let median = times.device.median;
                let busbw = bandwidths(Collective::AllGather, total_bytes, ranks, median).1;
                Baseline::timed(path.name, median, ours, times.host, busbw)
            },
        ),
    };
    baselines.paths().iter().map(baseline).collect()
}
