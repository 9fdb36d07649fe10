//! Runs one block of a launch, in steps that are short enough to be mixed with those of others.

use std::sync::atomic::Ordering;

use super::Launch;
use super::faults::{Hold, KernelMutant};
use super::program::{
    AddressPair, COPY, Control, DATA_BYTES, HostWords, LAST, MARK, Op, PEERS_MAX, REDUCE, SYNC,
    WORD_BYTES, part_bytes,
};
use super::stores::Stores;
use crate::device::jitter::Draws;

/// Bytes and words of data that a step moves.
const PIECE_BYTES: usize = 512;
const STEP_WORDS: usize = PIECE_BYTES / DATA_BYTES as usize;

/// What a step did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Moved,
    /// It waits for others.
    Blocked,
    Ended,
}

/// How far an op has come.
#[derive(Debug)]
enum Phase {
    Ahead,
    /// The next byte of an op without slots, and the end of the bytes of the block.
    Bytes(u64, u64),
    /// The first word that is not looked at of an op with slots, and the words that are polled.
    Words(u64, Vec<u64>),
    /// The signals of a synchronization are stored.
    Signalled,
}

/// Data of one place, aligned to every type of elements.
type Piece = [u64; STEP_WORDS];

#[derive(Debug)]
pub(super) struct Block {
    index: u32,
    /// Set when the block begins.
    start: Option<u64>,
    op: usize,
    phase: Phase,
    pub(super) stores: Stores,
    /// It has found an abort.
    is_gone: bool,
}

impl Block {
    pub(super) fn new(index: u32) -> Self {
        let (start, phase, stores) = (None, Phase::Ahead, Stores::default());
        Self { index, start, op: 0, phase, stores, is_gone: false }
    }

    pub(super) fn step(&mut self, launch: &Launch<'_>, draws: &mut Draws) -> Step {
        if self.start.is_none() && self.is_held(launch) {
            return Step::Blocked;
        }

        let start = match self.start {
            Some(start) => start,
            None => self.begin(launch),
        };
        let ignores_abort = KernelMutant::StoresAfterAbort.is_on();
        let step = match launch.program.ops().get(self.op) {
            Some(op) if !self.is_gone || ignores_abort => self.run(op, start, launch, draws),
            _ => Step::Ended,
        };

        // A device looks at the word in every so many polls.
        if step == Step::Blocked && !self.is_gone && !KernelMutant::NoAbort.is_on() {
            let abort = launch.program.host + std::mem::offset_of!(HostWords, abort) as u64;
            self.is_gone = launch.held.short_word(abort).load(Ordering::Acquire) != 0;
        }
        if step == Step::Ended {
            self.leave(start, launch);
        }
        step
    }

    /// Returns whether the schedule does not let the block begin.
    fn is_held(&self, launch: &Launch<'_>) -> bool {
        let is_later = self.index > 0;
        is_later && Hold::Blocks.is_on(launch.session)
            || Hold::Turns.is_on(launch.session) && self.index > launch.ended.get()
    }

    fn begin(&mut self, launch: &Launch<'_>) -> u64 {
        let control = launch.program.control;
        let start = launch.held.load(control + std::mem::offset_of!(Control, start) as u64);
        let start = start + 1 + launch.added_starts;
        let gone = control + std::mem::offset_of!(Control, gone) as u64;
        self.is_gone = launch.held.short_word(gone).load(Ordering::Acquire) != 0;
        self.is_gone &= !KernelMutant::NotGone.is_on();

        if self.index == 0 {
            let begun = launch.program.host + std::mem::offset_of!(HostWords, begun) as u64;
            launch.held.store(begun, start);
        }
        self.start = Some(start);
        start
    }

    /// Counts the block as ended. The last one ends the start.
    fn leave(&self, start: u64, launch: &Launch<'_>) {
        let control = launch.program.control;
        let word = |offset: usize| launch.held.short_word(control + offset as u64);
        if self.is_gone {
            word(std::mem::offset_of!(Control, gone)).store(1, Ordering::Release);
        }

        let arrived = word(std::mem::offset_of!(Control, arrived));
        let before = arrived.fetch_add(1, Ordering::AcqRel);
        let is_last = before + 1 == launch.blocks;
        if is_last {
            arrived.store(0, Ordering::Release);
        }
        let ends = |mutant: KernelMutant| if mutant.is_on() { before == 0 } else { is_last };
        if ends(KernelMutant::FirstLeaves) {
            let place = control + std::mem::offset_of!(Control, start) as u64;
            launch.held.store(place, start - launch.added_starts);
        }
        if ends(KernelMutant::EarlyDone) {
            let done = launch.program.host + std::mem::offset_of!(HostWords, done) as u64;
            launch.held.store(done, start);
        }
    }

    fn run(&mut self, op: &Op, start: u64, launch: &Launch<'_>, draws: &mut Draws) -> Step {
        if let Phase::Ahead = self.phase {
            // The block's own loads see its own stores, and stores to one place keep their order.
            if launch.follows[self.op] {
                self.stores.deliver_all(&launch.held, draws);
            }
            if let Some(next) = launch.program.ops().get(self.op + 1)
                && next.kind == SYNC
                && KernelMutant::FlagFirst.is_on()
            {
                self.signal(next, start, launch);
            }
        }

        let step = match op.kind {
            COPY | REDUCE if op.has_slots() => self.run_words(op, start, launch, draws),
            COPY | REDUCE => self.run_bytes(op, start, launch),
            SYNC => self.synchronize(op, start, launch, draws),
            MARK => {
                if self.index == 0 {
                    let value = launch.program.signalled(start);
                    let flags = op.targets().iter().map(|flag| flag.address(start));
                    flags.for_each(|flag| self.stores.push_word(flag, value));
                }
                Step::Ended
            }
            LAST => self.await_last(op, start, launch),
            _ => Step::Ended,
        };

        // The op has ended, and not the block.
        if step == Step::Ended {
            (self.op, self.phase) = (self.op + 1, Phase::Ahead);
            return Step::Moved;
        }
        step
    }

    /// Moves a piece of the bytes that belong to the block.
    fn run_bytes(&mut self, op: &Op, start: u64, launch: &Launch<'_>) -> Step {
        let (from, end) = match self.phase {
            Phase::Bytes(from, end) => (from, end),
            _ => {
                let is_other = op.kind == REDUCE && KernelMutant::OtherParts.is_on();
                let blocks = launch.blocks.saturating_sub(u32::from(is_other)).max(1);
                let part = part_bytes(op.bytes, blocks);
                let first = (u64::from(self.index) * part).min(op.bytes);
                (first, (first + part).min(op.bytes))
            }
        };
        if from == end {
            return Step::Ended;
        }

        let bytes = (end - from).min(PIECE_BYTES as u64);
        let mut pieces = [[0; STEP_WORDS]; PEERS_MAX];
        for (place, piece) in op.sources().iter().zip(&mut pieces) {
            let piece = &mut as_bytes_mut(piece)[..bytes as usize];
            launch.held.read(place.address(start) + from, piece);
        }
        let result = launch.combine(op, &pieces, bytes as usize);
        for (index, place) in op.targets().iter().enumerate() {
            let piece = source_of(op, index, &pieces, result.as_ref());
            let piece = &as_bytes(piece)[..bytes as usize];
            self.stores.push_piece(target(*place, start) + from, piece);
        }

        self.phase = Phase::Bytes(from + bytes, end);
        Step::Moved
    }

    /// Moves words whose tags have come, out of those that the threads of the block poll.
    fn run_words(&mut self, op: &Op, start: u64, launch: &Launch<'_>, draws: &mut Draws) -> Step {
        let words = match KernelMutant::NoTail.is_on() {
            true => op.bytes / DATA_BYTES,
            false => op.bytes.div_ceil(DATA_BYTES),
        };
        let threads = u64::from(launch.threads);
        let (mut next, mut polled) = match std::mem::replace(&mut self.phase, Phase::Ahead) {
            Phase::Words(next, polled) => (next, polled),
            _ => (u64::from(self.index) * threads, Vec::new()),
        };
        if polled.is_empty() {
            if next >= words {
                return Step::Ended;
            }
            polled.extend(next..words.min(next + threads));
            next += threads * u64::from(launch.blocks);
        }

        // Threads go on in any order.
        let first = draws.below(polled.len() as u64) as usize;
        polled.rotate_left(first);
        let mut pieces = [[0; STEP_WORDS]; PEERS_MAX];
        let mut moved = Vec::with_capacity(STEP_WORDS);
        polled.retain(|&word| {
            let is_taken = moved.len() < STEP_WORDS
                && self.load_word(op, word, start, launch, (&mut pieces, moved.len()));
            if is_taken {
                moved.push(word);
            }
            !is_taken
        });
        self.phase = Phase::Words(next, polled);
        if moved.is_empty() {
            return Step::Blocked;
        }

        let result = launch.combine(op, &pieces, moved.len() * DATA_BYTES as usize);
        for (index, place) in op.targets().iter().enumerate() {
            let piece = source_of(op, index, &pieces, result.as_ref());
            let place = target(*place, start);
            for (&word, &data) in moved.iter().zip(piece) {
                if op.is_slot_target(index) {
                    self.put_word(place + WORD_BYTES * word, data, start);
                } else {
                    let bytes = (op.bytes - DATA_BYTES * word).min(DATA_BYTES);
                    self.stores.push_data(place + DATA_BYTES * word, data, bytes);
                }
            }
        }
        Step::Moved
    }

    /// Loads a word of every source into the pieces, or returns false if a tag has not come.
    fn load_word(
        &self,
        op: &Op,
        word: u64,
        start: u64,
        launch: &Launch<'_>,
        (pieces, index): (&mut [Piece; PEERS_MAX], usize),
    ) -> bool {
        for (source, place) in op.sources().iter().enumerate() {
            let place = place.address(start);
            let data = &mut pieces[source][index];
            if !op.is_slot_source(source) {
                let bytes = (op.bytes - DATA_BYTES * word).min(DATA_BYTES) as usize;
                let mut loaded = [0; DATA_BYTES as usize];
                launch.held.read(place + DATA_BYTES * word, &mut loaded[..bytes]);
                *data = u64::from_le_bytes(loaded);
                continue;
            }

            let place = place + WORD_BYTES * word;
            let halves = [place, place + WORD_BYTES / 2].map(|half| launch.held.load(half));
            if !self.is_gone && !has_tag(halves, start as u32) {
                return false;
            }
            *data = halves[0] & u64::from(u32::MAX) | halves[1] << 32;
        }
        true
    }

    /// Stores a word with its tag in a slot.
    fn put_word(&mut self, place: u64, data: u64, start: u64) {
        let tag = (start as u32).wrapping_sub(u32::from(KernelMutant::StaleTag.is_on()));
        let tag = u64::from(tag) << 32;
        self.stores.push_word(place, data & u64::from(u32::MAX) | tag);
        self.stores.push_word(place + WORD_BYTES / 2, data >> 32 | tag);
    }

    fn synchronize(&mut self, op: &Op, start: u64, launch: &Launch<'_>, draws: &mut Draws) -> Step {
        if let Phase::Ahead = self.phase {
            let is_early = KernelMutant::FlagFirst.is_on() && self.op > 0;
            if !is_early {
                if !KernelMutant::NoFence.is_on() && !self.fence(launch, draws) {
                    return Step::Blocked;
                }
                self.signal(op, start, launch);
            }
            self.phase = Phase::Signalled;
            return Step::Moved;
        }

        let older = u64::from(KernelMutant::OlderStart.is_on());
        let value = launch.program.value(start - older);
        let value = if KernelMutant::ShortValue.is_on() { value & 0xffff } else { value };
        let word = if KernelMutant::FirstBlock.is_on() { 0 } else { u64::from(self.index) };
        let is_signalled =
            |flag: &AddressPair| launch.held.load(flag.address(start) + 8 * word) >= value;
        // It gets here after an abort only as a mutant.
        match self.is_gone || op.sources().iter().all(is_signalled) {
            true => Step::Ended,
            false => Step::Blocked,
        }
    }

    fn await_last(&self, op: &Op, start: u64, launch: &Launch<'_>) -> Step {
        let awaited = launch.program.value(start - 1);
        let is_signalled = |flag: &AddressPair| launch.held.load(flag.address(start)) >= awaited;
        let is_over = KernelMutant::IgnoresLast.is_on() || self.is_gone;
        match is_over || op.sources().iter().all(is_signalled) {
            true => Step::Ended,
            false => Step::Blocked,
        }
    }

    /// Delivers all stores of the block, or returns false if a schedule holds some back.
    fn fence(&mut self, launch: &Launch<'_>, draws: &mut Draws) -> bool {
        if !launch.is_held_back() {
            self.stores.deliver_all(&launch.held, draws);
        }
        self.stores.is_empty()
    }

    fn signal(&self, op: &Op, start: u64, launch: &Launch<'_>) {
        for flag in op.targets() {
            let word = flag.address(start) + 8 * u64::from(self.index);
            launch.held.store(word, launch.program.signalled(start));
        }
    }
}

fn has_tag(halves: [u64; 2], tag: u32) -> bool {
    let is_right = |half: u64| match ((half >> 32) as u32, KernelMutant::LaterTag.is_on()) {
        (found, true) => found >= tag,
        (found, false) => found == tag,
    };
    is_right(halves[0]) && (KernelMutant::FirstHalf.is_on() || is_right(halves[1]))
}

/// Returns the address at which data is stored.
fn target(place: AddressPair, start: u64) -> u64 {
    place.address(if KernelMutant::EvenTargets.is_on() { 0 } else { start })
}

/// Returns the data for a target.
fn source_of<'a>(
    op: &Op,
    target: usize,
    pieces: &'a [Piece; PEERS_MAX],
    result: Option<&'a Piece>,
) -> &'a Piece {
    let source = if op.sources().len() == 1 { 0 } else { target };
    result.unwrap_or(&pieces[source])
}

pub(super) fn as_bytes(piece: &Piece) -> &[u8; PIECE_BYTES] {
    // SAFETY: words have no padding, and bytes need no alignment.
    unsafe { &*std::ptr::from_ref(piece).cast() }
}

fn as_bytes_mut(piece: &mut Piece) -> &mut [u8; PIECE_BYTES] {
    // SAFETY: as above, and all bytes make words.
    unsafe { &mut *std::ptr::from_mut(piece).cast() }
}

impl Launch<'_> {
    /// Returns the result of a reduction of the pieces, or `None` for copies.
    fn combine(&self, op: &Op, pieces: &[Piece; PEERS_MAX], bytes: usize) -> Option<Piece> {
        let reduction = self.reduction.filter(|_| op.kind == REDUCE)?;
        let pieces = &pieces[..op.sources().len()];
        let mut sources: Vec<_> = pieces.iter().map(|piece| piece.as_ptr().cast::<u8>()).collect();
        if KernelMutant::ArrivalOrder.is_on() {
            sources.reverse();
        }

        let mut result = [0; STEP_WORDS];
        // SAFETY: the pieces are locals of the caller, at least this long, and aligned to words.
        unsafe { reduction.run(result.as_mut_ptr().cast(), &sources, bytes) };
        Some(result)
    }
}
