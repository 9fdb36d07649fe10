//! Times many consecutive runs of an operation on one stream, between two events.
//!
//! Each measurement begins with an all-gather of 0 bytes, so that the GPUs begin together although
//! their hosts do not. Then come some untimed starts, so that the queue is full when the timed ones
//! begin.

use std::rc::Rc;
use std::time::{Duration, Instant};

use peerlane::Operation;

use super::candidate::Candidate;
use super::device::{Event, Gpu, Stream};
use crate::allgather::measure::Checked;
use crate::error::Result;

/// The number of runs whose host time is measured, few enough that the stream's queue does not fill.
const HOST_STARTS: u32 = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StartCounts {
    pub(super) warmup: u32,
    pub(super) timed: u32,
    /// Whether all ranks wait for each other again between the untimed and the timed runs.
    pub(super) aligned: bool,
}

/// Times runs of an operation on one stream with two events, behind an all-gather of 0 bytes that aligns the ranks.
pub(super) struct StreamTimer {
    pub(super) gpu: Gpu,
    pub(super) stream: Rc<Stream>,
    start_barrier: Operation<u8>,
    begin: Event,
    end: Event,
}

impl StreamTimer {
    pub(super) fn new(gpu: Gpu, stream: Rc<Stream>, start_barrier: Operation<u8>) -> Result<Self> {
        let (begin, end) = (gpu.event()?, gpu.event()?);
        Ok(Self { gpu, stream, start_barrier, begin, end })
    }

    pub(super) fn align_ranks(&mut self) -> Result<()> {
        self.stream.start_after(&mut self.start_barrier)
    }

    /// Returns the time that one run of the operation takes on the GPU of this rank. Collective.
    pub(super) fn time_starts(
        &mut self,
        candidate: &mut Candidate<'_>,
        counts: StartCounts,
    ) -> Result<Duration> {
        let (warmup, timed) =
            (candidate.rounded_up(counts.warmup), candidate.rounded_up(counts.timed));
        self.align_ranks()?;
        candidate.fork()?;
        candidate.enqueue(warmup)?;
        candidate.join()?;
        if counts.aligned {
            self.align_ranks()?;
        }
        self.record(&self.begin)?;
        candidate.fork()?;
        candidate.enqueue(timed)?;
        candidate.join()?;
        self.record(&self.end)?;
        self.gpu.wait(&self.end, candidate.name())?;
        Ok(self.gpu.elapsed(&self.begin, &self.end)? / timed.max(1))
    }

    /// Returns the time that the host needs to enqueue one run of the operation onto an empty stream. Collective.
    pub(super) fn host_time(&mut self, candidate: &mut Candidate<'_>) -> Result<Duration> {
        let starts = candidate.rounded_up(HOST_STARTS);
        candidate.fork()?;
        let started_at = Instant::now();
        candidate.enqueue(starts)?;
        let time = started_at.elapsed();
        candidate.join()?;
        self.record(&self.end)?;
        self.gpu.wait(&self.end, candidate.name())?;
        Ok(time / starts.max(1))
    }

    fn record(&self, event: &Event) -> Result<()> {
        self.gpu.record(event, &self.stream)
    }
}
