//! Manages the streams, events and status words of work that is recorded into graphs.
//!
//! A graph may be replayed at any time, and no call reports its destruction. So a recorded slice
//! has its own side streams, events, and a word: the slice sets the word to 1 before its first wait
//! and to 0 after its last one. While the word is not 0, the graph runs, so the graph and the flags
//! that it waits for are alive. Only then does a release write to these flags.
//!
//! The words are in host memory, where the host reads them without a call of the driver. A copy
//! from the device can be stuck behind copies of blocked graphs. The price is 2 to 3 µs for the two
//! writes of each recorded start (docs/perf/beside-nccl.md).
//!
//! # Replays that wait
//! A stream can only write constants, so it cannot count replays. Instead the host changes a word
//! from 1 to 2. The slice overwrites it, at the end of its waits and at the next replay. A word
//! that is still 2 belongs to a slice that has waited since the host changed it.

use std::time::{Duration, Instant};

use super::StreamDevice;
use super::emit::SideStream;
use super::fused::FusedWords;
use super::pending::Awaited;
use super::resources::{Event, OwnStream, PAGE_WORDS, PinnedPage, Stream};
use crate::Fault;
use crate::device::{CaptureState, DevicePtr, StreamHandle};
use peerlane_hal::Mark;

/// The values of a status word in host memory, which shows whether a captured graph is waiting for
/// flags.
const IDLE: u64 = 0;
const WAITING: u64 = 1;
const MARKED: u64 = 2;

/// The first of the words of fused starts, which come last in the page.
const FUSED_WORD: usize = PAGE_WORDS - FusedWords::WORDS;

#[derive(Debug)]
struct Recorded {
    awaited: Box<[Awaited]>,
    marked_at: Instant,
}

#[derive(Debug)]
pub(super) struct Captures<D: StreamDevice> {
    /// The main stream of slices that are recorded beside a stream of the caller.
    home: Option<OwnStream<D>>,
    sides: Vec<SideStream<D>>,
    started: Event<D>,
    /// The events of marks, of which the first `marked` are in use since the last fork.
    marks: Vec<Event<D>>,
    marked: usize,
    /// The number of forks from streams that capture.
    forks: u64,
    recorded: Vec<Recorded>,
    words: PinnedPage,
    /// Whether the engine was ever captured into a graph; from then on, graphs may write to the
    /// engine's memory pages.
    used: bool,
}

impl<D: StreamDevice> Captures<D> {
    pub(super) fn new(context: &D) -> Result<Self, D::Error> {
        let (started, words) = (Event::create(context)?, PinnedPage::take(context)?);
        Ok(Self {
            home: None,
            sides: Vec::new(),
            started,
            marks: Vec::new(),
            marked: 0,
            forks: 0,
            recorded: Vec::new(),
            words,
            used: false,
        })
    }

    /// Returns the number of streams besides the main stream that the capture of `stream` can use.
    ///
    /// A side stream that is still part of another capture cannot be part of this one.
    pub(super) fn begin(
        &mut self,
        context: &D,
        stream: &Stream,
        sides: usize,
    ) -> Result<usize, D::Error> {
        let this = stream.capture(context)?;
        (self.forks, self.marked) = (self.forks + 1, 0);
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

    /// Returns the main stream of slices that are recorded beside a stream of the caller.
    ///
    /// # Errors
    /// [`Fault::Argument`] if that stream is still part of another capture, and the driver's error.
    pub(super) fn home(
        &mut self,
        context: &D,
        capture: CaptureState,
    ) -> Result<StreamHandle, D::Error> {
        let home = match &mut self.home {
            Some(home) => home,
            none => {
                // A capture of the global mode would refuse the creation of a stream otherwise.
                let _relaxed = context.enter_relaxed()?;
                none.insert(OwnStream::create(context)?)
            }
        };

        // An earlier start of the same capture leaves it there.
        let state = home.capture(context)?;
        if state != CaptureState::None && state != capture {
            let text = "a start of this operation is still part of another capture; finish it, or \
                        end that capture";
            return Err(Fault::Argument(text.to_owned()).into());
        }
        Ok(home.raw())
    }

    /// Returns whether slices that are recorded beside a stream are part of a capture that goes on.
    pub(super) fn is_home_capturing(&self, context: &D) -> Result<bool, D::Error> {
        let home = self.home.as_ref().map(|home| home.capture(context)).transpose()?;
        Ok(home.is_some_and(|state| state != CaptureState::None))
    }

    /// Marks the place that a recorded stream has reached.
    pub(super) fn mark(&mut self, context: &D, stream: StreamHandle) -> Result<Mark, D::Error> {
        let index = self.marked;
        if self.marks.len() == index {
            let _relaxed = context.enter_relaxed()?;
            self.marks.push(Event::create(context)?);
        }

        self.marks[index].record(context, stream)?;
        self.marked += 1;
        Ok(Mark::Captured { fork: self.forks, index })
    }

    /// Returns the event of a mark, or `None` if the mark is not one of the last fork.
    pub(super) fn event(&self, fork: u64, index: usize) -> Option<&Event<D>> {
        let is_valid = fork == self.forks && index < self.marked;
        self.marks.get(index).filter(|_| is_valid)
    }

    pub(super) fn sides(&mut self, usable: usize) -> (&mut [SideStream<D>], &Event<D>) {
        (&mut self.sides[..usable], &self.started)
    }

    /// Returns the status word that a recorded slice sets while it waits for the flags in
    /// `awaited`. A plan that is recorded again gets the same word: its graphs use the same flags
    /// and cannot run at the same time.
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
                let most = FUSED_WORD;
                if self.recorded.len() == most {
                    return Err(Fault::Argument(format!(
                        "this engine has recorded {most} different slices into graphs, the \
                         maximum; use a new engine for more graphs"
                    )));
                }
                let awaited = awaited.collect();
                self.recorded.push(Recorded { awaited, marked_at: Instant::now() });
                self.recorded.len() - 1
            }
        };
        Ok(self.words.address(index))
    }

    /// Returns the words by which the host and fused starts know of each other. Graphs write to
    /// them, as to the status words.
    pub(super) fn fused_words(&self) -> FusedWords {
        FusedWords::new(self.words.part(FUSED_WORD..PAGE_WORDS))
    }

    /// Makes the page of status words available to the next engine; no graph may have been recorded
    /// with the page.
    pub(super) fn leave(self, context: &D) {
        self.words.leave(context);
    }

    pub(super) fn note_use(&mut self) {
        self.used = true;
    }

    pub(super) fn is_used(&self) -> bool {
        self.used
    }

    /// Returns the longest time that a captured graph has been waiting for flags, or `None` if none
    /// waits.
    ///
    /// The time counts from the first call that finds the slice waiting.
    pub(super) fn longest_wait(&mut self) -> Option<Duration> {
        let mut longest = None;
        for (index, recorded) in self.recorded.iter_mut().enumerate() {
            let waited = match self.words.exchange(index, WAITING, MARKED) {
                IDLE => continue,
                MARKED => recorded.marked_at.elapsed(),
                _ => {
                    recorded.marked_at = Instant::now();
                    Duration::ZERO
                }
            };
            longest = longest.max(Some(waited));
        }
        longest
    }

    pub(super) fn is_waiting(&self) -> bool {
        (0..self.recorded.len()).any(|index| self.words.load(index) != IDLE)
    }

    pub(super) fn awaited(&self) -> impl Iterator<Item = Awaited> + Clone {
        let recorded = self.recorded.iter().enumerate();
        let running = recorded.filter(|(index, _)| self.words.load(*index) != IDLE);
        running.flat_map(|(_, recorded)| recorded.awaited.iter().copied())
    }
}
