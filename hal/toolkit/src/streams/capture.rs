//! Slices that are recorded into graphs.
//!
//! A graph may be replayed at any time, and nobody says when it is gone. So what a recorded slice
//! uses is its own: streams beside the main one, events, and a word on the device that it sets to 1
//! before its first wait and to 0 behind its last one. While that word is 1 the graph runs, hence lives, and
//! hence the flags that it waits for live: only then does a release write to them.

use std::time::Duration;

use super::abilities::StreamDevice;
use super::emit::Side;
use super::page::{OnDevice, PAGE_WORDS, Pinned};
use super::pending::Awaited;
use super::queue::{Event, OwnStream};
use super::stream::Stream;
use crate::device::{Between, CaptureState, DevicePtr, Fault};

/// The first word of the page that a recorded slice can have.
const BUSY_FIRST: usize = 64;
/// How long a look may take on a device that is alive.
const LOOK_TIMEOUT: Duration = Duration::from_secs(1);

/// A recorded slice that waits.
#[derive(Debug)]
struct Recorded {
    awaited: Box<[Awaited]>,
}

/// What captures of one engine use.
#[derive(Debug)]
pub(super) struct Captures<D: StreamDevice> {
    sides: Vec<Side<D>>,
    started: Event<D>,
    /// Each has the word of its index.
    recorded: Vec<Recorded>,
    /// A write to the host would hold up the stream until it is seen there.
    busy: OnDevice,
    /// Whether a slice was ever recorded: from then on graphs may write to the engine's pages.
    used: bool,
}

impl<D: StreamDevice> Captures<D> {
    /// The context is current.
    pub(super) fn new(context: &D, stream: &OwnStream<D>) -> Result<Self, D::Error> {
        let (started, busy) = (Event::create(context)?, OnDevice::take(context)?);
        busy.clear(context, stream)?;
        stream.finish(context, LOOK_TIMEOUT, "the clearing of a page")?;
        Ok(Self { sides: Vec::new(), started, recorded: Vec::new(), busy, used: false })
    }

    /// Prepares for slices on `stream`, which captures; how many streams beside it they can use.
    ///
    /// A stream that is still part of another capture cannot be part of this one.
    pub(super) fn begin(
        &mut self,
        context: &D,
        stream: &Stream,
        sides: usize,
    ) -> Result<usize, D::Error> {
        let this = stream.capture(context)?;
        if self.sides.len() < sides {
            // Otherwise a capture of the global mode refuses to see a stream made.
            let _relaxed = context.enter_relaxed()?;
            while self.sides.len() < sides {
                self.sides.push(Side::create(context)?);
            }
        }
        for (usable, side) in self.sides.iter().enumerate() {
            let state = side.stream().capture(context)?;
            if state != CaptureState::None && (state != this || state == CaptureState::Unknown) {
                return Ok(usable);
            }
        }
        Ok(self.sides.len())
    }

    /// The streams that are usable, and the event where they start.
    pub(super) fn sides(&mut self, usable: usize) -> (&mut [Side<D>], &Event<D>) {
        (&mut self.sides[..usable], &self.started)
    }

    /// The busy word of a slice that waits for `awaited`. A plan that is recorded again gets the same
    /// one: its graphs use the same flags and cannot run at once.
    pub(super) fn busy_word(
        &mut self,
        awaited: impl Iterator<Item = Awaited> + Clone,
    ) -> Result<DevicePtr, Fault> {
        let same = |it: &Recorded| it.awaited.iter().copied().eq(awaited.clone());
        let index = match self.recorded.iter().position(same) {
            Some(index) => index,
            None => {
                let most = PAGE_WORDS - BUSY_FIRST;
                if self.recorded.len() == most {
                    return Err(Fault::Argument(format!(
                        "{most} different slices were recorded into graphs with one engine, wanted \
                         no more; prepare again on a new engine"
                    )));
                }
                self.recorded.push(Recorded { awaited: awaited.collect() });
                self.recorded.len() - 1
            }
        };
        Ok(self.busy.address(index))
    }

    /// For the next engine; nothing was recorded.
    pub(super) fn leave(self, context: &D) {
        self.busy.leave(context);
    }

    pub(super) fn note_use(&mut self) {
        self.used = true;
    }

    pub(super) fn is_used(&self) -> bool {
        self.used
    }

    /// Takes down which graphs run now.
    pub(super) fn look(
        &self,
        context: &D,
        stream: &OwnStream<D>,
        page: &Pinned,
    ) -> Result<(), D::Error> {
        if self.recorded.is_empty() {
            return Ok(());
        }
        let bytes = self.recorded.len() * size_of::<u64>();
        let (to, from) = (page.address(BUSY_FIRST), self.busy.address(0));
        // SAFETY: words of two pages, which are never freed.
        unsafe { context.copy(stream.raw(), to, from, bytes, Between::Host) }?;
        stream.finish(context, LOOK_TIMEOUT, "the look at graphs that run")
    }

    /// What graphs wait for that ran at the last look.
    pub(super) fn awaited<'a>(
        &'a self,
        page: &'a Pinned,
    ) -> impl Iterator<Item = Awaited> + Clone + 'a {
        let busy = |(index, _): &(usize, &Recorded)| page.load(BUSY_FIRST + index) != 0;
        let running = self.recorded.iter().enumerate().filter(busy);
        running.flat_map(|(_, recorded)| recorded.awaited.iter().copied())
    }
}
