//! Times starts back to back: many in a row on one stream, between two events.
//!
//! Every time_starts begins behind a starting line, an all-gather of nothing, so that the GPUs begin
//! together although their hosts do not, and with some starts that are not timed, so that the queue
//! is full when the clock starts.

use std::rc::Rc;
use std::time::{Duration, Instant};

use peerlane::AllGather;

use super::candidate::Candidate;
use super::device::{Event, Gpu, Stream};
use super::gather::StreamArg;
use crate::error::Result;

/// Starts whose cost for the host is timed: few enough that the queue cannot fill.
const HOST_STARTS: u32 = 16;

/// How many starts a time_starts has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StartCounts {
    /// Not timed.
    pub(super) warmup: u32,
    pub(super) timed: u32,
    /// Whether the ranks line up again behind those that are not timed.
    pub(super) aligned: bool,
}

/// A stream, and the clock on it.
pub(super) struct StreamTimer {
    pub(super) gpu: Gpu,
    pub(super) stream: Rc<Stream>,
    line: AllGather<u8>,
    begin: Event,
    end: Event,
}

impl StreamTimer {
    /// A clock on `stream`; `line` gathers nothing.
    ///
    /// # Errors
    /// If events cannot be had.
    pub(super) fn new(gpu: Gpu, stream: Rc<Stream>, line: AllGather<u8>) -> Result<Self> {
        let (begin, end) = (gpu.event()?, gpu.event()?);
        Ok(Self { gpu, stream, line, begin, end })
    }

    /// Holds the stream until the streams of all ranks have come here. Collective.
    ///
    /// # Errors
    /// That of the start.
    pub(super) fn align_ranks(&mut self) -> Result<()> {
        StreamArg::of(&self.stream).start_behind(&self.stream, &mut self.line)
    }

    /// The time of one start on this rank. Collective.
    ///
    /// # Errors
    /// If a start fails or does not end in time.
    pub(super) fn time_starts(
        &mut self,
        candidate: &mut Candidate<'_>,
        counts: StartCounts,
    ) -> Result<Duration> {
        let (warmup, timed) = (candidate.whole(counts.warmup), candidate.whole(counts.timed));
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

    /// What one start costs the host, on an empty queue. Collective.
    ///
    /// # Errors
    /// As [`time_starts`](Self::time_starts).
    pub(super) fn host_time(&mut self, candidate: &mut Candidate<'_>) -> Result<Duration> {
        let starts = candidate.whole(HOST_STARTS);
        candidate.fork()?;
        let begun = Instant::now();
        candidate.enqueue(starts)?;
        let time = begun.elapsed();
        candidate.join()?;
        self.record(&self.end)?;
        self.gpu.wait(&self.end, candidate.name())?;
        Ok(time / starts.max(1))
    }

    fn record(&self, event: &Event) -> Result<()> {
        self.gpu.record(event, &self.stream)
    }
}
