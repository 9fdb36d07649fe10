//! Slices that are recorded into graphs.
//!
//! A graph may be replayed at any time, and nobody says when it is gone. So what a recorded slice
//! uses is its own: streams beside the main one, events, and a word that it sets to 1 before its
//! first wait and to 0 behind its last one. While that word is 1 the graph runs, hence lives, and
//! hence the flags that it waits for live: only then does a release write to them.

use super::emit::Side;
use super::page::{PAGE_WORDS, Pinned};
use super::pending::Awaited;
use super::queue::{self, CaptureState, Event};
use super::stream::Stream;
use crate::device::Context;
use crate::error::Error;

/// The first word of the page that a recorded slice can have.
const BUSY_FIRST: usize = 64;

/// A recorded slice that waits.
#[derive(Debug)]
struct Recorded {
    awaited: Box<[Awaited]>,
}

/// What captures of one engine use.
#[derive(Debug)]
pub(super) struct Captures {
    sides: Vec<Side>,
    started: Event,
    /// Each has the word at its index behind `BUSY_FIRST`.
    recorded: Vec<Recorded>,
    /// Whether a slice was ever recorded: from then on graphs may write to the engine's pages.
    used: bool,
}

impl Captures {
    /// The context is current.
    pub(super) fn new(context: &Context) -> Result<Self, Error> {
        let started = Event::create(context)?;
        Ok(Self { sides: Vec::new(), started, recorded: Vec::new(), used: false })
    }

    /// Prepares for slices on `stream`, which captures; how many streams beside it they can use.
    ///
    /// A stream that is still part of another capture cannot be part of this one.
    pub(super) fn begin(
        &mut self,
        context: &Context,
        stream: &Stream,
        sides: usize,
    ) -> Result<usize, Error> {
        let this = queue::capture(context, stream.raw())?;
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
    pub(super) fn sides(&mut self, usable: usize) -> (&mut [Side], &Event) {
        (&mut self.sides[..usable], &self.started)
    }

    /// The busy word of a slice that waits for `awaited`. A plan that is recorded again gets the same
    /// one: its graphs use the same flags and cannot run at once.
    pub(super) fn busy_word(
        &mut self,
        awaited: impl Iterator<Item = Awaited> + Clone,
    ) -> Result<usize, Error> {
        let same = |it: &Recorded| it.awaited.iter().copied().eq(awaited.clone());
        let index = match self.recorded.iter().position(same) {
            Some(index) => index,
            None => {
                let most = PAGE_WORDS - BUSY_FIRST;
                if self.recorded.len() == most {
                    return Err(Error::Argument(format!(
                        "{most} different slices were recorded into graphs with one engine, wanted \
                         no more; prepare again on a new engine"
                    )));
                }
                self.recorded.push(Recorded { awaited: awaited.collect() });
                self.recorded.len() - 1
            }
        };
        Ok(BUSY_FIRST + index)
    }

    pub(super) fn note_use(&mut self) {
        self.used = true;
    }

    pub(super) fn is_used(&self) -> bool {
        self.used
    }

    /// What graphs wait for that run now.
    pub(super) fn awaited<'a>(&'a self, page: &'a Pinned) -> impl Iterator<Item = Awaited> + 'a {
        let busy = |(index, _): &(usize, &Recorded)| page.load(BUSY_FIRST + index) != 0;
        let running = self.recorded.iter().enumerate().filter(busy);
        running.flat_map(|(_, recorded)| recorded.awaited.iter().copied())
    }
}
