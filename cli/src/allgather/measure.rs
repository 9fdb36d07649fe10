//! Measures one size: the limit of the machine, a check, the timed iterations, and a second check.

use std::time::Duration;

use peerlane::Group;
use peerlane::bootstrap::Bootstrap;

use super::content::{self, Comparison};
use super::host_operation::HostOperation;
use super::limit::{Limit, LimitCopies};
use super::printer::{Activity, ProgressEvent, Sink};
use super::row::{self, Measured};
use super::setup::{Setup, Variant};
use super::timeline;
use super::timer::{Timing, TimingOptions};
use crate::error::{Failure, Result};
use crate::ranks::comm::Comm;
use crate::ranks::data::TestData;
use crate::ranks::statistics::longest_of_each;
use crate::report::Row;

/// The state of a measuring rank.
pub(crate) struct Measurement<'a> {
    pub(crate) setup: Setup<'a>,
    pub(crate) seed: u64,
    pub(crate) timing_options: TimingOptions,
    pub(crate) comm: Comm,
    pub(crate) group: Group,
    pub(crate) limit: Option<Limit>,
    pub(crate) sink: Sink<'a>,
}

impl Measurement<'_> {
    /// Sends an event to the printer, on rank 0 only.
    pub(crate) fn report_event(&mut self, event: ProgressEvent) -> Result<()> {
        if self.comm.rank().0 == 0 { (self.sink)(event) } else { Ok(()) }
    }

    /// Measures and checks blocks of `block_length` elements; `index` is the index of the size.
    /// Collective.
    pub(crate) fn size(&mut self, index: usize, block_length: u64) -> Result<()> {
        let total_bytes = self.setup.layout(block_length)?.total_bytes();
        let activity_event = |activity| ProgressEvent::Activity { activity, total_bytes };
        let limit = if self.limit.is_some() {
            self.report_event(activity_event(Activity::Limit))?;
            self.measure_limit(block_length)?
        } else {
            None
        };
        let mut candidates = self.candidates(block_length)?;
        let data = |round| TestData { seed: self.seed, size: index as u64, round };
        let (before, after) = (data(0), data(1));
        self.report_event(activity_event(Activity::Check))?;
        self.check(&mut candidates, block_length, before)?;
        self.report_event(activity_event(Activity::Measure))?;
        let timings = self.time(&mut candidates)?;
        self.report_event(activity_event(Activity::Check))?;
        self.check(&mut candidates, block_length, after)?;
        for (operation, timing) in candidates.iter().zip(timings) {
            let report = operation.report();
            if let Some(text) = self.setup.explanation(report) {
                self.report_event(ProgressEvent::Explanation { text })?;
            }
            let row = self.row(&**operation, timing, limit);
            self.report_event(ProgressEvent::Row { row: Box::new(row) })?;
        }
        drop(candidates);
        // After the barrier the memory of this size is free on every rank, so the next size can be
        // allocated.
        Ok(self.group.barrier()?)
    }

    /// Traces one start with blocks of `block_length` elements. Collective.
    pub(crate) fn trace(&mut self, block_length: u64) -> Result<()> {
        let total_bytes = self.setup.layout(block_length)?.total_bytes();
        self.report_event(ProgressEvent::Activity { activity: Activity::Trace, total_bytes })?;
        let Self { setup, comm, group, .. } = self;
        let starts = timeline::trace(setup, comm, group, block_length)?;
        self.report_event(ProgressEvent::Trace { starts })
    }

    fn measure_limit(&mut self, block_length: u64) -> Result<Option<Duration>> {
        let Self { setup, timing_options, comm, group, limit, .. } = self;
        let Some(limit) = limit else { return Ok(None) };
        let layout = setup.layout(block_length)?;
        let copies = LimitCopies { layout: &layout, in_place: setup.options.in_place };
        limit.measure(copies, *timing_options, comm, group).map(Some)
    }

    fn candidates(&mut self, block_length: u64) -> Result<Vec<Box<dyn HostOperation>>> {
        let Self { setup, group, .. } = self;
        let candidate = |algorithm| {
            let variant = Variant { algorithm, captured: false, traced: false };
            setup.prepare_on_host(group, block_length, variant)
        };
        setup.algorithms().into_iter().map(candidate).collect()
    }

    fn time(&mut self, candidates: &mut [Box<dyn HostOperation>]) -> Result<Vec<Timing>> {
        let Self { timing_options, comm, group, .. } = self;
        let mut runs: Vec<_> = candidates.iter_mut().map(|operation| || operation.run()).collect();
        let mut operations: Vec<&mut dyn FnMut() -> Result<()>> =
            runs.iter_mut().map(|run| run as _).collect();
        timing_options.time(comm, group, longest_of_each, &mut operations)
    }

    /// Gathers new data into outputs with a known byte, compares every byte, and exchanges the
    /// result with all ranks.
    fn check(
        &mut self,
        candidates: &mut [Box<dyn HostOperation>],
        block_length: u64,
        data: TestData,
    ) -> Result<()> {
        let rank = self.comm.rank();
        for operation in candidates {
            let mut found: Comparison = Ok(());
            // With two outputs each start fills the other one. After these starts every output has been
            // overwritten, filled and compared.
            for _ in 0..operation.report().outputs {
                content::fill(&self.setup, &mut **operation, (rank, block_length), data)?;
                operation.run()?;
                found = found.and(content::compare(
                    &self.setup,
                    &mut **operation,
                    (rank, block_length),
                    data,
                )?);
            }
            let texts = self.comm.share("check", &found.err().map(|wrong| wrong.to_string()))?;
            let wrong = texts.into_iter().enumerate().find_map(|(rank, text)| Some((rank, text?)));
            if let Some((rank, text)) = wrong {
                let algorithm = operation.report().algorithm;
                let text = format!("{algorithm}: wrong data in the output of rank {rank}: {text}");
                return Err(Failure::failed(text).with_advice(
                    "this is a bug in Peerlane or a hardware fault: please report it",
                ));
            }
        }
        Ok(())
    }

    fn row(
        &self,
        operation: &dyn HostOperation,
        Timing { statistics, iterations }: Timing,
        limit: Option<Duration>,
    ) -> Row {
        let (setup, report) = (&self.setup, operation.report());
        let predicted = setup.predicted(report);
        row::row(setup, report, Measured { statistics, iterations, limit, predicted })
    }
}
