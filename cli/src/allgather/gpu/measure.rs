//! Prepares and times Peerlane's operations, NCCL's all-gathers and bare copies on GPUs.

use std::rc::Rc;
use std::time::Duration;

use peerlane::ErrorKind;
use peerlane::bootstrap::Bootstrap;

use super::baselines::{Baselines, NcclPath};
use super::candidate::{Candidate, with_timeout};
use super::gather;
use super::limit::LimitBuffers;
use super::overlap::{Compute, measure_overlap};
use super::timer::{StartCounts, StreamTimer};
use crate::allgather::measure::{Bench, Candidates, Measurement, Point};
use crate::allgather::options::{Options, self_copy_name};
use crate::allgather::printer::{Activity, ProgressEvent};
use crate::allgather::row;
use crate::allgather::setup::{Setup, Variant};
use crate::allgather::timer::{Timing, in_turn};
use crate::error::Result;
use crate::ranks::comm::Comm;
use crate::ranks::statistics::{Interval, longest_of_each};
use crate::report::{Baseline, DeviceTimes, Overlap, Row, bandwidths, microseconds};

/// The number of times that each measurement is repeated; the median counts.
const REPETITIONS: u32 = 5;
/// From this total size in bytes on, fewer consecutive runs are timed.
const LARGE_BYTES: u64 = 256 << 20;
const STARTS: u32 = 50;
const STARTS_LARGE: u32 = 10;

pub(super) struct GpuBench {
    pub(super) timer: StreamTimer,
    pub(super) limits: Vec<Duration>,
    pub(super) baselines: Option<Baselines>,
    pub(super) compute: Option<Compute>,
}

impl Bench for GpuBench {
    type Candidate = Candidate<'static>;

    fn limit(&mut self, _run: &mut Measurement<'_>, at: Point) -> Result<Option<Duration>> {
        Ok(self.limits.get(at.index).copied())
    }

    fn prepare(
        &mut self,
        run: &mut Measurement<'_>,
        at: Point,
    ) -> Result<Candidates<Self::Candidate>> {
        let options = run.setup.options;
        let (gpu, stream) = (self.timer.gpu.clone(), Rc::clone(&self.timer.stream));
        let (mut candidates, mut reports, mut refused) = (Vec::new(), Vec::new(), None);
        for algorithm in run.setup.algorithms() {
            let variant = Variant { algorithm, captured: options.graph, traced: false };
            let Measurement { setup, group, .. } = run;
            let prepared = match gather::prepare(setup, group, &stream, at.block_length, variant) {
                // All ranks get the same refusal, before anything is captured.
                Err(why) if options.graph && why.kind() == Some(ErrorKind::InvalidArgument) => {
                    let row = Box::new(row::missing(setup, algorithm, at.total_bytes, &why));
                    run.report_event(ProgressEvent::Missing { row })?;
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
        let Measurement { setup, comm, .. } = run;
        let blocks_of = |rank| setup.input_blocks(at.block_length, rank);
        for path in self.baselines.iter().flat_map(|baselines| &baselines.paths) {
            if let Some((operation, input)) = path.operation(options, comm, blocks_of, &stream)? {
                let memory = (input, 1);
                let open = || Candidate::open(operation, &gpu, &stream, memory, options.graph);
                candidates.push(with_timeout("NCCL's first operation", comm.timeout(), open)?);
            }
        }
        Ok(Candidates { all: candidates, reports })
    }

    fn time(
        &mut self,
        run: &mut Measurement<'_>,
        candidates: &mut [Self::Candidate],
        at: Point,
    ) -> Result<Vec<Timing>> {
        let (timer, comm) = (&mut self.timer, &run.comm);
        let counts = counts(run.setup.options, at.total_bytes);
        let starts = candidates[0].rounded_up(counts.timed);

        let mut measure = |candidate: &mut Candidate<'_>| {
            let device = timer.time_starts(candidate, counts)?;
            Ok([device, timer.host_time(candidate)?].map(Interval::of))
        };
        let guarded = |candidate: &mut Candidate<'_>| candidate.guarded(&mut measure);
        let times = in_turn(comm, candidates, REPETITIONS, longest_of_each, guarded)?;

        let timing = |[statistics, host]: [_; 2]| Timing {
            statistics,
            iterations: (starts * REPETITIONS) as usize,
            host: Some(host.median),
        };
        Ok(times.into_iter().map(timing).collect())
    }

    fn overlap(
        &mut self,
        run: &mut Measurement<'_>,
        candidates: &mut [Self::Candidate],
        at: Point,
    ) -> Result<Vec<Overlap>> {
        let Some(compute) = &self.compute else { return Ok(Vec::new()) };
        run.report_activity(Activity::Overlap, at)?;
        let (timer, comm) = (&mut self.timer, &run.comm);
        let rounds = run.setup.options.iterations;
        let measure = |candidate: &mut Candidate<'_>| {
            measure_overlap(timer, comm, compute, candidate, rounds)
        };
        candidates.iter_mut().map(measure).collect()
    }

    fn complete(&self, setup: &Setup<'_>, row: &mut Row, own: Timing, others: &[Timing]) {
        row.device = Some(DeviceTimes {
            host_us: own.host.map_or(0.0, microseconds),
            starts_in_a_row: own.iterations as u32 / REPETITIONS,
            captured: setup.options.graph,
            self_copy: self_copy_name(&setup.options.self_copy).to_owned(),
        });

        let Some(baselines) = &self.baselines else { return };
        let mut timed = others.iter();
        let ours = own.statistics.median;

        let baseline = |path: &NcclPath| match path.refusal() {
            Some(why) => Baseline::missing(path.name, why),
            None => timed.next().map_or_else(
                || Baseline::missing(path.name, "it was not timed"),
                |times| {
                    let (median, host) = (times.statistics.median, times.host.unwrap_or_default());
                    let (collective, ranks) = (setup.options.goal.collective, setup.ranks());
                    let busbw = bandwidths(collective, row.total_bytes, ranks, median).1;
                    Baseline::timed(path.name, median, ours, host, busbw)
                },
            ),
        };

        row.baselines = baselines.paths.iter().map(baseline).collect();
        row.baselines_version = Some(baselines.version.clone());
    }
}

fn counts(options: &Options, total_bytes: u64) -> StartCounts {
    let starts = if total_bytes < LARGE_BYTES { STARTS } else { STARTS_LARGE };
    let timed = options.iterations.unwrap_or(starts);
    StartCounts { warmup: options.warmup, timed, aligned: false }
}

/// Returns the shortest time of all ways to copy, for each block length.
///
/// It must be measured before other streams are created, because more streams share the queues of
/// the device.
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
            let measure =
                |scheme: &mut Candidate<'_>| Ok([Interval::of(timer.time_starts(scheme, counts)?)]);
            let times = in_turn(comm, &mut schemes, REPETITIONS, longest_of_each, measure)?;
            fastest = times.iter().map(|[scheme]| scheme.median).fold(fastest, Duration::min);
        }
        Ok(fastest)
    };
    lengths.iter().map(limit).collect()
}
