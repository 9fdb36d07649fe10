//! Implements the engine of the host backend, whose ops run when the caller polls it.
//!
//! There is no thread in the background. `submit` and `completed` run the ops at the head of the
//! queue, a bounded number of bytes at a time. A wait that is not satisfied stops them.
//!
//! A large copy with ordinary stores reads every line of the destination before it overwrites it,
//! and evicts everything else from the cache. Streaming stores do neither, so large copies use
//! them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Waker;
use std::time::{Duration, Instant};

use super::doorbell::{CoreNeighbours, Doorbell, DoorbellParker, Patience, PendingWakes};
use super::error::Error;
use super::memory::{Local, Remote};
use super::options::Options;
use super::share::{Queued, QueuedEngines, Share};
use peerlane_hal::{
    At, Caps, CopyEngine, Flag, Op, Priority, Reducer, Reduction, Rows, StreamOrdered, Ticket,
};
use peerlane_toolkit::{EngineState, TicketCounter, check_elements, pieces};

/// The largest number of bytes that one call of `completed` copies, which takes about a
/// millisecond.
const COMPLETED_BYTES_MAX: usize = 8 << 20;
/// While other engines of the priority have ops, `completed` begins no further part of a copy after
/// this time, so that a thread that polls all of them soon comes to a short message.
const SHARED_TIME: Duration = Duration::from_micros(20);
/// The bytes of such a part, which take a hundred times as long as a look at the clock. Copies in
/// parts are up to a third slower, so an engine alone makes none. While an engine of a higher
/// priority has ops, `completed` copies one part.
const PART_BYTES: usize = 64 << 10;
/// The largest number of bytes that such a call copies, however fast the copies are.
const SHARED_BYTES_MAX: usize = 2 << 20;
/// The largest number of bytes that `submit` copies, so that small messages are sent at once.
const SUBMIT_BYTES_MAX: usize = 64 << 10;
/// Copies of at most this many bytes are faster than waking another rank, so they are made before
/// pending wake-ups.
const WAKE_DELAY_BYTES_MAX: usize = 16 << 10;
/// Copies of this size may take as long as the time slice of a process, so peers that wait are told
/// of them.
const LONG_COPY_BYTES: usize = 512 << 10;
/// What runs the reductions of an engine.
const REDUCER: Reducer = Reducer { sources_max: 4096, blocks: 0, threads: 0 };
const WORD_BYTES: u64 = size_of::<u64>() as u64;

/// An engine of the host backend, whose ops run while the caller submits or polls.
#[derive(Debug)]
pub struct Engine {
    options: Options,
    queued: Queued,
    /// Whether nothing was polled since the last slice, so that a start polls only for a moment.
    is_fresh: bool,
    state: EngineState<Error>,
    streaming_bytes_min: u64,
    queue: VecDeque<Entry>,
    sources: Sources,
    tickets: TicketCounter,
    pending_wakes: PendingWakes,
    parker: DoorbellParker,
}

/// The sources of the queued reductions, in the order of the queue.
#[derive(Debug, Default)]
struct Sources(VecDeque<*const u8>);

// SAFETY: as for `QueuedOp`.
unsafe impl Send for Sources {}

#[derive(Debug)]
struct Entry {
    ticket: Ticket,
    op: QueuedOp,
}

/// A checked op with raw pointers, whose memory stays valid under the safety contract of `submit`.
#[derive(Debug)]
enum QueuedOp {
    Copy {
        dst: *mut u8,
        src: *const u8,
        bytes: usize,
        streaming: bool,
    },
    /// Copies the first `bytes` bytes of a row that are left, and then the rows behind it.
    Rows {
        dst: *mut u8,
        src: *const u8,
        bytes: usize,
        row_bytes: usize,
        rows: Rows,
        streaming: bool,
    },
    Signal {
        flag: *const AtomicU64,
        value: u64,
        doorbell: *const Doorbell,
    },
    Wait {
        flag: *const AtomicU64,
        value: u64,
        reset: bool,
    },
    /// Combines the first `number` of the [`Sources`].
    Reduce {
        dst: *mut u8,
        number: usize,
        bytes: usize,
        reduction: Reduction,
    },
}

// SAFETY: the contract of `submit` keeps the memory accessible until the op is complete, from any
// thread that drives the engine.
unsafe impl Send for QueuedOp {}

impl Engine {
    pub(super) fn new(
        options: Options,
        streaming_bytes_min: u64,
        doorbell: Arc<Doorbell>,
        (neighbours, patience): (CoreNeighbours, Arc<Patience>),
        engines: Arc<QueuedEngines>,
        priority: Priority,
    ) -> Self {
        Self {
            queued: Queued::new(engines, priority),
            is_fresh: false,
            streaming_bytes_min,
            queue: VecDeque::with_capacity(options.queue_ops),
            sources: Sources::default(),
            tickets: TicketCounter::with_capacity(options.queue_ops),
            pending_wakes: PendingWakes::with_capacity(options.queue_ops),
            parker: DoorbellParker::new(doorbell, options.spin, neighbours, patience),
            state: EngineState::new(options.caps),
            options,
        }
    }

    /// Returns the raw pointers of a checked op.
    ///
    /// # Errors
    /// Returns an error if the elements of a reduction are not aligned.
    fn resolve(&self, op: &Op<'_, Local, Remote>) -> Result<QueuedOp, Error> {
        Ok(match *op {
            Op::Put { dst, src, bytes } => {
                self.copy(dst.region.pointer(dst.offset), src.region.pointer(src.offset), bytes)
            }
            Op::Get { dst, src, bytes } => {
                self.copy(dst.region.pointer(dst.offset), src.region.pointer(src.offset), bytes)
            }
            Op::PutRows { dst, src, bytes, rows } => self.rows(
                dst.region.pointer(dst.offset),
                src.region.pointer(src.offset),
                bytes,
                rows,
            ),
            Op::GetRows { dst, src, bytes, rows } => self.rows(
                dst.region.pointer(dst.offset),
                src.region.pointer(src.offset),
                bytes,
                rows,
            ),
            Op::Signal { flag: Flag { region, word }, value } => QueuedOp::Signal {
                flag: region.pointer(word * WORD_BYTES).cast(),
                value,
                doorbell: Arc::as_ptr(region.doorbell()),
            },
            Op::Wait { flag: Flag { region, word }, value, reset } => {
                QueuedOp::Wait { flag: region.pointer(word * WORD_BYTES).cast(), value, reset }
            }
            Op::Reduce { dst, srcs, bytes, reduction } => {
                let place = |at: &At<'_, Local>| at.region.pointer(at.offset).addr() as u64;
                let places = srcs.iter().chain([&dst]).map(place).chain([bytes]);
                check_elements(places, reduction)?;

                QueuedOp::Reduce {
                    dst: dst.region.pointer(dst.offset),
                    number: srcs.len(),
                    bytes: usize::try_from(bytes).expect("a span lies inside a mapped region"),
                    reduction,
                }
            }
            #[cfg(not(peerlane_workspace))]
            _ => return Err(Error::refused_op(op)),
        })
    }

    /// Returns how much the engine copies in its next poll.
    #[cfg(test)]
    pub(super) fn share(&self) -> Share {
        self.queued.share()
    }

    fn copy(&self, dst: *mut u8, src: *const u8, bytes: u64) -> QueuedOp {
        QueuedOp::Copy {
            dst,
            src,
            bytes: usize::try_from(bytes).expect("a span lies inside a mapped region"),
            streaming: bytes >= self.streaming_bytes_min,
        }
    }

    fn rows(&self, dst: *mut u8, src: *const u8, bytes: u64, rows: Rows) -> QueuedOp {
        // Rows of no bytes would never use up the limit of a call.
        let rows = Rows { count: if bytes == 0 { 0 } else { rows.count }, ..rows };

        // The rows lie inside a region, so the product does not overflow.
        let streaming = bytes * rows.count >= self.streaming_bytes_min;
        let bytes = usize::try_from(bytes).expect("a row lies inside a mapped region");
        QueuedOp::Rows { dst, src, bytes, row_bytes: bytes, rows, streaming }
    }

    /// Runs ops from the head of the queue until one of them is incomplete, and copies at most
    /// `bytes_max` bytes. Returns whether these bytes were used up.
    fn run(&mut self, mut bytes_max: usize) -> bool {
        let mut progressed = false;
        while let Some(head) = self.queue.front_mut() {
            let piece_bytes_max = self.options.caps.piece_bytes_max;
            let is_long = head.op.bytes().min(bytes_max) >= LONG_COPY_BYTES;
            if is_long {
                self.parker.doorbell().note_long_copy();
            }

            let (done, copied) = head.op.advance(
                bytes_max,
                piece_bytes_max,
                &mut self.sources,
                &mut self.pending_wakes,
            );
            if is_long {
                self.parker.doorbell().note_long_copy();
            }
            bytes_max -= copied;
            progressed |= done || copied > 0;

            // Ops complete in order, so an incomplete op blocks those behind it.
            if !done {
                break;
            }

            self.tickets.finish_op(head.ticket);
            self.queue.pop_front();
        }

        // The caller may free the doorbells when it sees that their ops are complete.
        self.pending_wakes.flush();
        if progressed {
            self.parker.busy();
        }
        self.queued.set(!self.queue.is_empty());
        bytes_max == 0
    }

    /// Runs ops as [`run`](Self::run), in parts and only for a short time.
    fn run_shared(&mut self) {
        // The clock is read only for copies of several parts.
        let mut begun = None;
        for _ in 0..SHARED_BYTES_MAX / PART_BYTES {
            let is_used_up = self.run(PART_BYTES);
            if !is_used_up || begun.get_or_insert_with(Instant::now).elapsed() >= SHARED_TIME {
                break;
            }
        }
    }
}

impl QueuedOp {
    /// Returns how many bytes the op still moves.
    fn bytes(&self) -> usize {
        match self {
            Self::Signal { .. } | Self::Wait { .. } => 0,
            Self::Copy { bytes, .. } => *bytes,
            Self::Rows { bytes, rows, .. } => bytes.saturating_mul(rows.count as usize),
            Self::Reduce { bytes, number, .. } => bytes.saturating_mul(*number),
        }
    }

    /// Runs a part of the op, and returns whether the op is complete and how many bytes of the
    /// limit `bytes_max` the part took.
    fn advance(
        &mut self,
        bytes_max: usize,
        piece_bytes_max: u64,
        sources: &mut Sources,
        pending_wakes: &mut PendingWakes,
    ) -> (bool, usize) {
        match self {
            Self::Copy { dst, src, bytes, streaming } => {
                let now = (*bytes).min(bytes_max);
                // Ranks that earlier signals wake do not wait for a long copy.
                if now > WAKE_DELAY_BYTES_MAX {
                    pending_wakes.flush();
                }

                for piece in pieces(now as u64, piece_bytes_max) {
                    // Both fit, since the pieces tile `now`, which is a `usize`.
                    let (at, length) = (piece.offset as usize, piece.bytes as usize);
                    let (dst, src) = (dst.wrapping_add(at), src.wrapping_add(at));

                    // SAFETY: The check of the slice bounded the span. The contract of `submit`
                    // keeps both regions alive and excludes races.
                    unsafe { copy_piece(dst, src, length, *streaming) };
                }

                *dst = dst.wrapping_add(now);
                *src = src.wrapping_add(now);
                *bytes -= now;
                (*bytes == 0, now)
            }
            Self::Rows { dst, src, bytes, row_bytes, rows, streaming } => {
                // Ranks that earlier signals wake do not wait for all rows.
                pending_wakes.flush();

                let mut copied = 0;
                while rows.count > 0 && copied < bytes_max {
                    let now = (*bytes).min(bytes_max - copied);
                    // SAFETY: The check of the slice bounded all rows. The contract of `submit`
                    // keeps both regions alive and excludes races.
                    unsafe { copy_piece(*dst, *src, now, *streaming) };
                    (*dst, *src) = (dst.wrapping_add(now), src.wrapping_add(now));
                    (copied, *bytes) = (copied + now, *bytes - now);

                    // Skips the gap between the end of this row and the start of the next one.
                    if *bytes == 0 {
                        let gap = |pitch: u64| (pitch as usize).wrapping_sub(*row_bytes);
                        *dst = dst.wrapping_add(gap(rows.dst_pitch));
                        *src = src.wrapping_add(gap(rows.src_pitch));
                        (*bytes, rows.count) = (*row_bytes, rows.count - 1);
                    }
                }

                (rows.count == 0, copied)
            }
            Self::Signal { flag, value, doorbell } => {
                // SAFETY: The check of the slice bounded the word, the words of a region are
                // aligned, and the contract of `submit` keeps the region alive.
                unsafe { &**flag }.store(*value, Ordering::Release);
                pending_wakes.push(*doorbell);
                (true, 0)
            }
            Self::Wait { flag, value, reset } => {
                // SAFETY: as for `Signal`.
                let flag = unsafe { &**flag };
                let reached = flag.load(Ordering::Acquire) >= *value;

                if reached && *reset {
                    // Release ordering: a rank that reads the zero may signal again.
                    flag.store(0, Ordering::Release);
                }
                (reached, 0)
            }
            Self::Reduce { dst, number, bytes, reduction } => {
                // Every source counts towards the limit. A part of whole words has whole elements
                // of any type.
                let word = WORD_BYTES as usize;
                let most = (bytes_max / *number).max(word).min(bytes_max);
                let now = (*bytes).min(most - most % word);

                // Ranks that earlier signals wake do not wait for a long reduction.
                if now.saturating_mul(*number) > WAKE_DELAY_BYTES_MAX {
                    pending_wakes.flush();
                }

                let op_sources = &mut sources.0.make_contiguous()[..*number];
                // SAFETY: The check of the slice bounded the spans, and `submit` has checked that
                // they are aligned. The contract of `submit` keeps the regions alive and excludes
                // races.
                unsafe { reduction.run(*dst, op_sources, now) };

                *dst = dst.wrapping_add(now);
                op_sources.iter_mut().for_each(|source| *source = source.wrapping_add(now));
                *bytes -= now;

                if *bytes == 0 {
                    sources.0.drain(..*number);
                }
                (*bytes == 0, now.saturating_mul(*number).min(bytes_max))
            }
        }
    }
}

/// Copies bytes in memory, with streaming stores or with ordinary stores.
///
/// # Safety
/// As [`copy_streaming`].
unsafe fn copy_piece(dst: *mut u8, src: *const u8, bytes: usize, streaming: bool) {
    if streaming {
        // SAFETY: the caller's.
        unsafe { copy_streaming(dst, src, bytes) }
    } else {
        // SAFETY: the caller's.
        unsafe { std::ptr::copy_nonoverlapping(src, dst, bytes) }
    }
}

// SAFETY: ops are checked against their regions, and tickets complete after their ops.
unsafe impl CopyEngine for Engine {
    type Error = Error;
    type Local = Local;
    type Remote = Remote;

    fn caps(&self) -> &Caps {
        self.state.caps()
    }

    fn prepare_reduce(&mut self) -> Result<Option<Reducer>, Self::Error> {
        self.state.set_reducer(Some(REDUCER));
        self.sources.0.reserve(REDUCER.sources_max);
        Ok(Some(REDUCER))
    }

    unsafe fn submit(&mut self, ops: &[Op<'_, Local, Remote>]) -> Result<Ticket, Error> {
        self.state.check_slice(ops)?;
        self.tickets.check_room(self.queue.len(), ops.len())?;

        // The queue takes the whole slice or nothing, so what is before a refused op is removed.
        let (queued, ticket) = (self.queue.len(), Ticket(self.tickets.last().0 + 1));
        for op in ops {
            match self.resolve(op) {
                Ok(op) => self.queue.push_back(Entry { ticket, op }),
                Err(error) => {
                    self.queue.truncate(queued);
                    return Err(error);
                }
            }
        }

        let count = u32::try_from(ops.len()).expect("a slice has fewer than 2^32 ops");
        let ticket = self.tickets.issue(count);
        for op in ops {
            if let Op::Reduce { srcs, .. } = op {
                let sources = srcs.iter().map(|src| src.region.pointer(src.offset).cast_const());
                self.sources.0.extend(sources);
            }
        }

        self.parker.busy();
        self.run(SUBMIT_BYTES_MAX);
        self.is_fresh = true;
        Ok(ticket)
    }

    fn completed(&mut self) -> Result<Ticket, Error> {
        let is_fresh = std::mem::take(&mut self.is_fresh);
        match self.queued.share() {
            _ if is_fresh => drop(self.run(SUBMIT_BYTES_MAX)),
            Share::Whole => drop(self.run(COMPLETED_BYTES_MAX)),
            Share::Slice => self.run_shared(),
            Share::Part => drop(self.run(PART_BYTES)),
        }
        Ok(self.tickets.completed())
    }

    fn park(&mut self, limit: Duration) -> Result<(), Error> {
        if !self.is_busy() {
            self.parker.park(limit);
        }
        Ok(())
    }

    fn is_busy(&self) -> bool {
        let front = self.queue.front().map(|entry| &entry.op);
        let moves = |op: &QueuedOp| !matches!(op, QueuedOp::Signal { .. } | QueuedOp::Wait { .. });
        front.is_some_and(moves)
    }

    fn waker(&self) -> Waker {
        self.parker.waker()
    }

    fn release(&mut self) -> Result<(), Error> {
        self.state.release();
        self.queue.clear();
        self.queued.set(false);
        self.sources.0.clear();
        self.tickets.finish_all();
        Ok(())
    }

    /// Returns 0, because the processor copies all bytes.
    fn compute_bytes(&mut self, _ops: &[Op<'_, Local, Remote>], _captured: bool) -> u64 {
        0
    }

    fn streams(&mut self) -> Option<&mut dyn StreamOrdered<Error = Self::Error>> {
        None
    }
}

/// Copies `bytes` bytes with streaming stores where the processor has them.
///
/// # Safety
/// `src` is readable and `dst` writable for `bytes`. The spans do not overlap, and no other thread
/// accesses `dst` or writes `src` meanwhile.
unsafe fn copy_streaming(dst: *mut u8, src: *const u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx") {
        // SAFETY: the caller's promise, and AVX was just detected.
        return unsafe { x86::stream(dst, src, bytes) };
    }

    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(src, dst, bytes) }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{__m256i, _mm256_loadu_si256, _mm256_stream_si256};

    const LINE_BYTES: usize = 64;
    const VECTOR_BYTES: usize = size_of::<__m256i>();

    /// Copies `bytes` bytes with streaming stores of AVX.
    ///
    /// # Safety
    /// As [`copy_streaming`](super::copy_streaming); the processor has AVX.
    #[target_feature(enable = "avx")]
    pub(super) unsafe fn stream(dst: *mut u8, src: *const u8, bytes: usize) {
        let head = dst.align_offset(LINE_BYTES).min(bytes);
        let body = (bytes - head) / LINE_BYTES * LINE_BYTES;

        // SAFETY: `head <= bytes`, within the caller's spans.
        unsafe { std::ptr::copy_nonoverlapping(src, dst, head) };

        for line in (head..head + body).step_by(LINE_BYTES) {
            // SAFETY: the line ends at most at `head + body <= bytes`; `dst + head` is aligned to a
            // line.
            unsafe { stream_line(dst.wrapping_add(line), src.wrapping_add(line)) };
        }

        // Streaming stores are weakly ordered; the fence keeps the flag that follows behind them.
        // SAFETY: a fence accesses no memory, register or flag. The intrinsic is unsafe up to Rust
        // 1.88 and safe from 1.89 on, so no form of calling it compiles without a warning on both.
        unsafe { std::arch::asm!("sfence", options(nostack, preserves_flags)) };

        let done = head + body;
        let (dst, src) = (dst.wrapping_add(done), src.wrapping_add(done));
        // SAFETY: the tail ends at `bytes`.
        unsafe { std::ptr::copy_nonoverlapping(src, dst, bytes - done) };
    }

    /// Copies one cache line with streaming stores.
    ///
    /// # Safety
    /// `src` is readable and `dst` writable for a line, and `dst` is aligned to one.
    #[target_feature(enable = "avx")]
    #[inline]
    unsafe fn stream_line(dst: *mut u8, src: *const u8) {
        for vector in (0..LINE_BYTES).step_by(VECTOR_BYTES) {
            let (dst, src) = (dst.wrapping_add(vector).cast(), src.wrapping_add(vector).cast());
            // SAFETY: inside the line (the caller's promise).
            let value = unsafe { _mm256_loadu_si256(src) };
            // SAFETY: as above, and aligned since lines and vectors are powers of two.
            unsafe { _mm256_stream_si256(dst, value) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streaming_copies_exactly_its_bytes_at_any_alignment() {
        let src: Vec<u8> = (0..1000_u32).map(|i| (i * 7 + 3) as u8).collect();
        for bytes in [0, 1, 31, 32, 63, 64, 65, 127, 128, 129, 500, 511] {
            for (to, from) in [(0, 0), (1, 0), (0, 1), (63, 17), (33, 64)] {
                let mut dst = vec![0xA5_u8; 1000];
                let (target, source) =
                    (dst.as_mut_ptr().wrapping_add(to), src.as_ptr().wrapping_add(from));
                // SAFETY: both spans are inside their vectors, which no other code accesses.
                unsafe { copy_streaming(target, source, bytes) };
                assert_eq!(dst[to..to + bytes], src[from..from + bytes], "{bytes} {to} {from}");
                assert!(dst[..to].iter().all(|&byte| byte == 0xA5), "{bytes} {to} {from}");
                assert!(dst[to + bytes..].iter().all(|&byte| byte == 0xA5), "{bytes} {to} {from}");
            }
        }
    }
}
