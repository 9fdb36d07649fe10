//! How a signal gets to a peer.
//!
//! A stream writes the flag itself, in the batch with its neighbours. Some drivers do not do that to
//! a peer's address (CUDA 13.1 and newer: NVIDIA/nccl issue 2052). There the stream writes the value
//! to a word of its own and copies that word, eight aligned bytes, in one piece.

use std::time::Duration;

use super::abilities::StreamDevice;
use super::batch::Batch;
use super::copy_probe;
use super::page::{OnDevice, Pinned};
use super::queue::OwnStream;
use crate::device::{Between, CopyCalls, DevicePtr, Fault, MemoryCalls, StreamHandle, WordCalls};

/// How a signal gets to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SignalBy {
    /// The stream writes the peer's flag.
    StreamWrite,
    /// The stream copies a word of its own to the peer's flag.
    Copy,
}

const WORD_BYTES: usize = size_of::<u64>();
/// Words that eager signals take in turn. At least as many as a batch has writes, so that no word is
/// written twice in a batch: the copies go onto the stream behind it.
const RING_WORDS: usize = 255;
/// Words behind the ring that hold the values of captured signals.
const CONSTANTS_MAX: usize = super::page::PAGE_WORDS - RING_WORDS;

/// The words that signals are copied from, and the copies that the open batch lacks.
#[derive(Debug)]
pub(super) struct Words {
    page: OnDevice,
    next: usize,
    /// The values of captured signals, each with its word. A replay writes the value that is there.
    constants: Vec<u64>,
    /// From which word to which flag.
    owed: Vec<(DevicePtr, DevicePtr)>,
}

impl Words {
    pub(super) fn new<D: WordCalls + MemoryCalls>(context: &D) -> Result<Self, D::Error> {
        const { assert!(D::WORD_OPS_MAX <= RING_WORDS, "a batch writes no word twice") };
        let page = OnDevice::take(context)?;
        Ok(Self { page, next: 0, constants: Vec::new(), owed: Vec::with_capacity(RING_WORDS) })
    }

    /// For the next engine, unless graphs use the words.
    pub(super) fn leave<D: MemoryCalls>(self, context: &D) {
        if self.constants.is_empty() {
            self.page.leave(context);
        }
    }

    /// Whether the batch must go before anything that comes after a signal.
    pub(super) fn owes(&self) -> bool {
        !self.owed.is_empty()
    }

    /// A slice failed half-way.
    pub(super) fn forget_owed(&mut self) {
        self.owed.clear();
    }

    /// Adds a signal to the batch, and owes its copy.
    ///
    /// Eager words are written and read in the order of one stream, and the next stream comes after
    /// that (`Engine::submit`), so that none is written while its copy is pending. Graphs that are
    /// replayed know no such order; they get a word for each value, which no one changes.
    pub(super) fn signal<D: WordCalls>(
        &mut self,
        batch: &mut Batch<D>,
        flag: DevicePtr,
        value: u64,
        captured: bool,
    ) -> Result<(), Fault> {
        let word = if captured { self.constant(value)? } else { self.turn() };
        let from = self.page.address(word);
        batch.write(from, value);
        self.owed.push((from, flag));
        Ok(())
    }

    fn turn(&mut self) -> usize {
        let word = self.next;
        self.next = (word + 1) % RING_WORDS;
        word
    }

    fn constant(&mut self, value: u64) -> Result<usize, Fault> {
        let found = self.constants.iter().position(|constant| *constant == value);
        let index = found.unwrap_or(self.constants.len());
        if index == CONSTANTS_MAX {
            return Err(Fault::Argument(format!(
                "the captured slices of one engine signal more than {CONSTANTS_MAX} different \
                 values; wanted flags of two states"
            )));
        }
        if found.is_none() {
            self.constants.push(value);
        }
        Ok(RING_WORDS + index)
    }

    /// Puts the copies behind the batch, which is on the stream; how many.
    pub(super) fn copy<D: CopyCalls>(
        &mut self,
        context: &D,
        stream: StreamHandle,
    ) -> Result<usize, D::Error> {
        let owed = self.owed.len();
        let copied = self.owed.iter().try_for_each(|&(from, to)| {
            // SAFETY: a word of the page and a flag of a region that lives (`submit`).
            unsafe { context.copy(stream, to, from, WORD_BYTES, Between::Flags) }
        });
        self.owed.clear();
        copied.map(|()| owed)
    }
}

/// How long a probe may take.
const PROBE: Duration = Duration::from_secs(5);
/// Both halves are needed to see a write of 32 bits.
const PROBE_VALUE: u64 = 0x5EED_F1A6_0DDB_A115;

/// Finds out how signals get to the word `target` of a peer, and how copies, by doing it and reading it
/// back. The word is 0 before and after; nobody else uses it meanwhile.
///
/// # Errors
/// Of kind `Unavailable` if neither way works; the driver's refusal.
pub fn probe_signal<D: StreamDevice>(context: &D, target: DevicePtr) -> Result<SignalBy, D::Error> {
    let _relaxed = context.enter_relaxed()?;
    let stream = OwnStream::create(context)?;
    let page = Pinned::take(context)?;
    let mut by = SignalBy::StreamWrite;
    if !writes(context, &stream, &page, target)? {
        by = SignalBy::Copy;
        let copied = send(context, &stream, &page, target, PROBE_VALUE, by)
            .and_then(|()| read(context, &stream, &page, target))?;
        if copied != PROBE_VALUE {
            return Err(Fault::Unavailable(format!(
                "a signal from {} to a peer does not arrive: wrote {PROBE_VALUE:#x}, read \
                 {copied:#x}; is peer access between the devices broken?",
                context.label()
            ))
            .into());
        }
    }
    copy_probe::check_peer(context, &stream, &page, target)?;
    send(context, &stream, &page, target, 0, by)?;
    stream.finish(context, PROBE, "the probe of signals")?;
    page.leave(context);
    Ok(by)
}

/// Whether a stream write arrives. A driver that refuses it, and one that loses it, say no.
fn writes<D: StreamDevice>(
    context: &D,
    stream: &OwnStream<D>,
    page: &Pinned,
    target: DevicePtr,
) -> Result<bool, D::Error> {
    match send(context, stream, page, target, PROBE_VALUE, SignalBy::StreamWrite) {
        Ok(()) => Ok(read(context, stream, page, target)? == PROBE_VALUE),
        Err(error) if D::is_write_refused(&error) => Ok(false),
        Err(error) => Err(error),
    }
}

fn send<D: StreamDevice>(
    context: &D,
    stream: &OwnStream<D>,
    page: &Pinned,
    target: DevicePtr,
    value: u64,
    by: SignalBy,
) -> Result<(), D::Error> {
    let mut batch = Batch::new(false);
    match by {
        SignalBy::StreamWrite => {
            batch.write(target, value);
            batch.issue(context, stream.raw())
        }
        SignalBy::Copy => {
            page.store(1, value);
            let from = page.address(1);
            // SAFETY: a word of the page and the caller's word.
            unsafe { context.copy(stream.raw(), target, from, WORD_BYTES, Between::Host) }?;
            // The word of the page is written again.
            stream.finish(context, PROBE, "the probe of signals")
        }
    }
}

fn read<D: StreamDevice>(
    context: &D,
    stream: &OwnStream<D>,
    page: &Pinned,
    target: DevicePtr,
) -> Result<u64, D::Error> {
    // SAFETY: the caller's word and a word of the page.
    unsafe { context.copy(stream.raw(), page.address(0), target, WORD_BYTES, Between::Host) }?;
    stream.finish(context, PROBE, "the probe of signals")?;
    Ok(page.load(0))
}
