//! Records when the steps of one lane were submitted and seen complete.

use std::time::Instant;

use peerlane_hal::Ticket;

use crate::plan::{LaneId, Step};
use crate::run::port::Bound;
use crate::trace::TracedStep;

/// The largest number of recorded steps of a lane; each takes about hundred bytes.
const STEPS_MAX: usize = 1 << 18;

/// The record of one lane.
pub(crate) struct Tracer {
    lane: LaneId,
    /// The plan's step of every bound step.
    origins: Box<[Step]>,
    records: Vec<Record>,
    /// The records before this index have ended.
    open: usize,
    /// The time since which the lane polls a flag.
    looks_since: Option<Instant>,
    is_cut: bool,
}

struct Record {
    epoch: u64,
    index: usize,
    /// `None` for a wait that the executor polls.
    ticket: Option<Ticket>,
    submitted: Instant,
    end: Option<Instant>,
}

impl Tracer {
    pub(crate) fn new(lane: LaneId, origins: Box<[Step]>) -> Self {
        let (records, open, looks_since, is_cut) = (Vec::new(), 0, None, false);
        Self { lane, origins, records, open, looks_since, is_cut }
    }

    pub(crate) fn is_cut(&self) -> bool {
        self.is_cut
    }

    /// Records that step `index` of start `epoch` was submitted.
    pub(crate) fn submitted(&mut self, epoch: u64, index: usize, ticket: Ticket, at: Instant) {
        self.keep(Record { epoch, index, ticket: Some(ticket), submitted: at, end: None });
    }

    /// Records that the lane polls the flag of its next step.
    pub(crate) fn looks(&mut self) {
        self.looks_since.get_or_insert_with(Instant::now);
    }

    /// Records that the flag of step `index` was signalled.
    pub(crate) fn reached(&mut self, epoch: u64, index: usize) {
        let now = Instant::now();
        let submitted = self.looks_since.take().unwrap_or(now);
        self.keep(Record { epoch, index, ticket: None, submitted, end: Some(now) });
    }

    /// Records that the engine has completed everything up to `ticket`.
    pub(crate) fn completed(&mut self, ticket: Ticket) {
        let now = Instant::now();
        while let Some(record) = self.records.get_mut(self.open)
            && record.ticket.is_none_or(|own| own <= ticket)
        {
            record.end.get_or_insert(now);
            self.open += 1;
        }
    }

    fn keep(&mut self, record: Record) {
        if self.records.len() < STEPS_MAX {
            self.records.push(record);
        } else {
            self.is_cut = true;
        }
    }

    /// Returns the steps of start `epoch`, which was made at `origin`.
    pub(crate) fn steps(&self, epoch: u64, origin: Instant, bound: &[Bound]) -> Vec<TracedStep> {
        let nanos = |at: Instant| {
            u64::try_from(at.saturating_duration_since(origin).as_nanos()).unwrap_or(u64::MAX)
        };
        let first = self.records.partition_point(|record| record.epoch < epoch);
        let mut before = first.checked_sub(1).and_then(|before| self.records[before].end);
        let records = self.records[first..].iter().take_while(|record| record.epoch == epoch);
        let step = |record: &Record| {
            let begin = before.map_or(record.submitted, |before| before.max(record.submitted));
            before = record.end;
            TracedStep {
                lane: self.lane,
                step: self.origins[record.index],
                bytes: match bound[record.index] {
                    Bound::Put { bytes, .. } | Bound::Get { bytes, .. } => bytes,
                    Bound::Signal { .. } | Bound::Wait { .. } => 0,
                },
                submitted_ns: nanos(record.submitted),
                begin_ns: nanos(begin),
                end_ns: record.end.map(nanos),
            }
        };
        records.map(step).collect()
    }
}
