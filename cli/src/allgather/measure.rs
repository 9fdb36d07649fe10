//! Measures one size after another, each with plain copies as the limit, a check, timed iterations
//! and a second check.
//!
//! A [`Bench`] does what differs between host memory and GPU memory.

use std::time::Duration;

use peerlane::Group;
use peerlane::bootstrap::Bootstrap;
use peerlane::group::Report;
use peerlane::open::Backend;

use super::options::Options;
use super::printer::{Activity, ProgressEvent, Sink};
use super::setup::Setup;
use super::timer::Timing;
use super::topology::RankTopology;
use super::{row, timeline, topology};
use crate::error::{Failure, Result};
use crate::ranks::comm::Comm;
use crate::ranks::data::TestData;
use crate::report::{Overlap, Row};

/// The open group of a measuring rank, with its options and its receiver of events.
pub(super) struct Measurement<'a> {
    pub(super) setup: Setup<'a>,
    pub(super) comm: Comm,
    pub(super) group: Group,
    pub(super) seed: u64,
    pub(super) sink: Sink<'a>,
}

/// A rank that has compared its options with all ranks and has not opened its fabrics yet.
pub(super) struct RankContext<'a> {
    pub(super) options: &'a Options,
    pub(super) comm: Comm,
    pub(super) rank_topology: &'a RankTopology,
    pub(super) device_name: String,
    pub(super) seed: u64,
    pub(super) sink: Sink<'a>,
}

impl<'a> RankContext<'a> {
    /// Opens the group of all ranks; `device` is the GPU of this rank. Collective.
    pub(super) fn open(self, backend: Backend, device: Option<u32>) -> Result<Measurement<'a>> {
        let Self { options, comm, rank_topology, device_name, seed, sink } = self;
        let group = topology::open(options, &comm, rank_topology, backend, device)?;

        let note = rank_topology.network_note(group.selection());
        if let Some(text) = note.filter(|_| comm.rank().0 == 0) {
            sink(ProgressEvent::AutoChoice { text })?;
        }

        let setup = Setup::from_group(options, &comm, rank_topology, &group, device_name)?;
        Ok(Measurement { setup, comm, group, seed, sink })
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Point {
    pub(super) index: usize,
    /// The average number of elements in a block.
    pub(super) block_length: u64,
    pub(super) total_bytes: u64,
}

/// An operation whose results can be compared with test data.
pub(super) trait Checked {
    /// Returns the name of the algorithm or library for error texts.
    fn name(&self) -> &'static str;

    /// Runs the operation on new data and compares every output byte of this rank. Returns the text
    /// of the first difference. Collective.
    fn check(&mut self, run: &Measurement<'_>, data: TestData) -> Result<Option<String>>;
}

/// Peerlane's operations at one size, one for each report, followed by those of other libraries.
pub(super) struct Candidates<C> {
    pub(super) all: Vec<C>,
    pub(super) reports: Vec<Report>,
}

/// Prepares and times operations in one kind of memory, on the host or on GPUs. All methods are
/// collective.
pub(super) trait Bench {
    type Candidate: Checked;

    /// Returns the time of bare copies, or `None` if the limit is not measured.
    fn limit(&mut self, run: &mut Measurement<'_>, at: Point) -> Result<Option<Duration>>;

    fn prepare(
        &mut self,
        run: &mut Measurement<'_>,
        at: Point,
    ) -> Result<Candidates<Self::Candidate>>;

    fn time(
        &mut self,
        run: &mut Measurement<'_>,
        candidates: &mut [Self::Candidate],
        at: Point,
    ) -> Result<Vec<Timing>>;

    /// Times all candidates together with compute work; the result is empty if that is not
    /// requested.
    fn overlap(
        &mut self,
        _run: &mut Measurement<'_>,
        _candidates: &mut [Self::Candidate],
        _at: Point,
    ) -> Result<Vec<Overlap>> {
        Ok(Vec::new())
    }

    /// Adds the values that exist only for this kind of memory to a result row; `others` are the
    /// times of other libraries.
    fn complete(&self, _setup: &Setup<'_>, _row: &mut Row, _own: Timing, _others: &[Timing]) {}
}

impl Measurement<'_> {
    /// Sends an event to the printer if this is rank 0.
    pub(super) fn report_event(&mut self, event: ProgressEvent) -> Result<()> {
        if self.comm.rank().0 == 0 { (self.sink)(event) } else { Ok(()) }
    }

    pub(super) fn report_activity(&mut self, activity: Activity, point: Point) -> Result<()> {
        let total_bytes = point.total_bytes;
        self.report_event(ProgressEvent::Activity { activity, total_bytes })
    }

    /// Measures all sizes of the sweep, and then traces the largest one if `--trace` is given.
    /// Collective.
    pub(super) fn sweep(&mut self, bench: &mut impl Bench) -> Result<()> {
        let options = self.setup.options;
        let lengths = options.sweep(self.comm.ranks()).block_lengths();
        let rows = lengths.len() * self.setup.algorithms().len();
        self.report_event(ProgressEvent::Begin { rows })?;

        let mut last = None;
        for (index, &block_length) in lengths.iter().enumerate() {
            let total_bytes = self.setup.layout(block_length)?.total_bytes();
            let point = Point { index, block_length, total_bytes };
            self.size(bench, point)?;
            last = Some(point);
        }

        let Some(point) = last.filter(|_| options.trace.is_some()) else { return Ok(()) };
        self.report_activity(Activity::Trace, point)?;
        let Self { setup, comm, group, .. } = self;
        let starts = timeline::trace(setup, comm, group, point.block_length)?;
        self.report_event(ProgressEvent::Trace { starts })
    }

    fn size(&mut self, bench: &mut impl Bench, point: Point) -> Result<()> {
        let limit = bench.limit(self, point)?;
        self.report_activity(Activity::Check, point)?;
        let Candidates { all: mut candidates, reports } = bench.prepare(self, point)?;
        self.check(&mut candidates, point, 0)?;
        self.report_activity(Activity::Measure, point)?;
        let timings = bench.time(self, &mut candidates, point)?;
        let overlaps = bench.overlap(self, &mut candidates, point)?;
        self.report_activity(Activity::Check, point)?;
        self.check(&mut candidates, point, 1)?;

        let (own, others) = timings.split_at(reports.len());
        let mut overlaps = overlaps.into_iter();
        let own_overlaps: Vec<_> = overlaps.by_ref().take(reports.len()).collect();
        for (index, (report, &timing)) in reports.iter().zip(own).enumerate() {
            let mut row = row::row(&self.setup, report, timing, limit);
            bench.complete(&self.setup, &mut row, timing, others);
            row.overlap = own_overlaps.get(index).cloned().into_iter().collect();
            if index == 0 {
                // The overlaps of other libraries belong to the first row.
                row.overlap.extend(overlaps.by_ref());
            }
            if let Some(text) = self.setup.explanation(report) {
                self.report_event(ProgressEvent::Explanation { text })?;
            }
            self.report_event(ProgressEvent::Row { row: Box::new(row) })?;
        }
        drop(candidates);
        // After the barrier the memory of this size is free on every rank, so the next size can be
        // allocated.
        Ok(self.group.barrier()?)
    }

    /// Checks all candidates, and fails on every rank if one rank has found a wrong byte.
    fn check(&self, candidates: &mut [impl Checked], point: Point, round: u64) -> Result<()> {
        let data = TestData { seed: self.seed, size: point.index as u64, round };
        for candidate in candidates {
            let found = candidate.check(self, data)?;
            if let Some((rank, text)) = self.comm.first_fault(found)? {
                // Every rank knows the first wrong rank, so that all of them end here.
                let collective = self.setup.options.goal.collective.with_article();
                let text = format!(
                    "wrong data in the output of rank {rank} after {collective} by {}: {text}",
                    candidate.name()
                );
                return Err(Failure::failed(text).with_advice(
                    "this is a bug in the library that copied the bytes, or a hardware fault: please \
                     report it",
                ));
            }
        }
        Ok(())
    }
}
