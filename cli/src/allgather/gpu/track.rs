//! Times starts back to back: many in a row on one stream, between two events.
//!
//! Every lap begins behind a starting line, an all-gather of nothing, so that the GPUs begin
//! together although their hosts do not, and with some starts that are not timed, so that the queue
//! is full when the clock starts.

use std::rc::Rc;
use std::time::{Duration, Instant};

use peerlane::AllGather;

use super::device::{Event, Gpu, Stream};
use super::entrant::Entrant;
use super::lent::Lent;
use crate::error::Result;

/// Starts whose cost for the host is timed: few enough that the queue cannot fill.
const HOST_STARTS: u32 = 16;

/// How many starts a lap has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Counts {
    /// Not timed.
    pub(super) warmup: u32,
    pub(super) timed: u32,
    /// Whether the ranks line up again behind those that are not timed.
    pub(super) aligned: bool,
}

/// A stream, and the clock on it.
pub(super) struct Track {
    pub(super) gpu: Gpu,
    pub(super) stream: Rc<Stream>,
    line: AllGather<u8>,
    begin: Event,
    end: Event,
}

impl Track {
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
    pub(super) fn line_up(&mut self) -> Result<()> {
        Lent::of(&self.stream).start_behind(&self.stream, &mut self.line)
    }

    /// The time of one start on this rank. Collective.
    ///
    /// # Errors
    /// If a start fails or does not end in time.
    pub(super) fn lap(&mut self, entrant: &mut Entrant<'_>, counts: Counts) -> Result<Duration> {
        let (warmup, timed) = (entrant.whole(counts.warmup), entrant.whole(counts.timed));
        self.line_up()?;
        entrant.fork()?;
        entrant.enqueue(warmup)?;
        entrant.join()?;
        if counts.aligned {
            self.line_up()?;
        }
        self.record(&self.begin)?;
        entrant.fork()?;
        entrant.enqueue(timed)?;
        entrant.join()?;
        self.record(&self.end)?;
        self.gpu.wait(&self.end, entrant.name())?;
        Ok(self.gpu.elapsed(&self.begin, &self.end)? / timed.max(1))
    }

    /// What one start costs the host, on an empty queue. Collective.
    ///
    /// # Errors
    /// As [`lap`](Self::lap).
    pub(super) fn host_time(&mut self, entrant: &mut Entrant<'_>) -> Result<Duration> {
        let starts = entrant.whole(HOST_STARTS);
        entrant.fork()?;
        let begun = Instant::now();
        entrant.enqueue(starts)?;
        let time = begun.elapsed();
        entrant.join()?;
        self.record(&self.end)?;
        self.gpu.wait(&self.end, entrant.name())?;
        Ok(time / starts.max(1))
    }

    fn record(&self, event: &Event) -> Result<()> {
        self.gpu.record(event, &self.stream)
    }
}
