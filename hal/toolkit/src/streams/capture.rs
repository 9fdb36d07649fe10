//! Resources of slices that are recorded into graphs.
//!
//! A graph may be replayed at any time, and no call reports its destruction. So a recorded slice has its own
//! side streams, events, and a word on the device: the slice sets the word to 1 before its first wait and to
//! 0 after its last one. While the word is 1, the graph runs, so the graph and the flags that it waits for
//! are alive. Only then does a release write to these flags.

use std::time::Duration;

use super::StreamDevice;
use super::emit::SideStream;
use super::pending::Awaited;
use super::resources::{DevicePage, Event, OwnStream, PAGE_WORDS, PinnedPage, Stream};
use crate::Fault;
use crate::device::{CaptureState, CopyKind, DevicePtr};

/// First word of the page for recorded slices.
const BUSY_FIRST: usize = 64;
/// Time limit of a query on a device that works.
const POLL_TIMEOUT: Duration = Duration::from_secs(1);

/// A recorded slice with waits.
#[derive(Debug)]
struct Recorded {
    awaited: Box<[Awaited]>,
}

/// The resources of the captures of one engine.
#[derive(Debug)]
pub(super) struct Captures<D: StreamDevice> {
    sides: Vec<SideStream<D>>,
    started: Event<D>,
    /// Each uses the word with its index.
    recorded: Vec<Recorded>,
    /// In device memory, since a write to the host would block the stream until it is visible there.
    busy: DevicePage,
    /// Whether a slice was ever recorded. From then on, graphs may write to the engine's pages.
    used: bool,
}

impl<D: StreamDevice> Captures<D> {
    /// Creates the resources. The context is current.
    pub(super) fn new(context: &D, stream: &OwnStream<D>) -> Result<Self, D::Error> {
        let (started, busy) = (Event::create(context)?, DevicePage::take(context)?);
        busy.clear(context, stream)?;
        stream.finish(context, POLL_TIMEOUT, "clearing a page")?;
        Ok(Self { sides: Vec::new(), started, recorded: Vec::new(), busy, used: false })
    }

    /// Prepares for slices on `stream`, which captures. Returns the number of usable side streams.
    ///
    /// A side stream that is still part of another capture cannot be part of this one.
    pub(super) fn begin(
        &mut self,
        context: &D,
        stream: &Stream,
        sides: usize,
    ) -> Result<usize, D::Error> {
        let this = stream.capture(context)?;
        if self.sides.len() < sides {
            // A capture of the global mode would refuse the creation of a stream otherwise.
            let _relaxed = context.enter_relaxed()?;
            while self.sides.len() < sides {
                self.sides.push(SideStream::create(context)?);
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

    /// Returns the usable side streams, and the event at which they start.
    pub(super) fn sides(&mut self, usable: usize) -> (&mut [SideStream<D>], &Event<D>) {
        (&mut self.sides[..usable], &self.started)
    }

    /// Returns the busy word of a slice that waits for `awaited`. A plan that is recorded again gets the same
    /// word: its graphs use the same flags and cannot run at the same time.
    ///
    /// # Errors
    /// Returns [`Fault::Argument`] if the engine has recorded too many different slices.
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
                        "this engine has recorded {most} different slices into graphs, the \
                         maximum; use a new engine for more graphs"
                    )));
                }
                self.recorded.push(Recorded { awaited: awaited.collect() });
                self.recorded.len() - 1
            }
        };
        Ok(self.busy.address(index))
    }

    /// Leaves the page to the next engine. Nothing was recorded.
    pub(super) fn leave(self, context: &D) {
        self.busy.leave(context);
    }

    pub(super) fn note_use(&mut self) {
        self.used = true;
    }

    pub(super) fn is_used(&self) -> bool {
        self.used
    }

    /// Reads which graphs run now.
    pub(super) fn poll_running(
        &self,
        context: &D,
        stream: &OwnStream<D>,
        page: &PinnedPage,
    ) -> Result<(), D::Error> {
        if self.recorded.is_empty() {
            return Ok(());
        }
        let bytes = self.recorded.len() * size_of::<u64>();
        let (to, from) = (page.address(BUSY_FIRST), self.busy.address(0));
        // SAFETY: words of two pages, which are never freed.
        unsafe { context.copy(stream.raw(), to, from, bytes, CopyKind::Host) }?;
        stream.finish(context, POLL_TIMEOUT, "reading which graphs run")
    }

    /// Returns the flags that running graphs wait for, as of the last call of `poll_running`.
    pub(super) fn awaited<'a>(
        &'a self,
        page: &'a PinnedPage,
    ) -> impl Iterator<Item = Awaited> + Clone + 'a {
        let busy = |(index, _): &(usize, &Recorded)| page.load(BUSY_FIRST + index) != 0;
        let running = self.recorded.iter().enumerate().filter(busy);
        running.flat_map(|(_, recorded)| recorded.awaited.iter().copied())
    }
}
