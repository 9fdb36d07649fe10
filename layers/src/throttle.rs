//! Makes an engine as slow as a network, with a limited rate and a delay of every op.
//!
//! Each engine is a wire of its own with two directions. A put leaves when the outgoing direction
//! is free and arrives when its last byte has travelled. A signal needs no bandwidth and has the
//! same delay. A get sends a request first, so it takes both delays and bandwidth of the incoming
//! direction. Rate and delay overlap as on a wire: bytes under way do not block the next put. All
//! ops are throttled, including those to this rank.
//!
//! Every op is held by a queued wait, as in [`Delay`](crate::Delay), and a second engine ends that
//! wait when the op is due, whenever the throttled engine is called. So the inner backend keeps the
//! contract, and bytes arrive late and never early. An op behind a wait of the caller leaves when
//! that wait has passed: a signal to this rank behind each such wait marks this. Long puts are
//! moved in a few pieces, so that little is left to copy at the end.

use std::collections::VecDeque;
use std::fmt;
use std::time::{Duration, Instant};

use peerlane_hal::{
    At, Caps, CopyEngine, EngineOffer, EngineRequirements, Error as _, ErrorKind, Fabric, Flag,
    Link, Op, Reducer, Region, Ticket,
};
use peerlane_toolkit::{Piece, pieces};

use crate::forward::{forward_streams, forward_to_engine};
use crate::hold::{self, HoldFlags};
use crate::{Error, Layer, Local, Remote};

const DUE: u64 = 0;
const PASSED: u64 = 1;
const PIECES_MAX: u64 = 8;
/// Long puts and gets are split only if an engine accepts at least this many ops in one `submit`
/// call.
const SLICE_OPS_FOR_PIECES: usize = 256;
const PIECE_BYTES_MIN: u64 = 64 << 10;

type OpOf<'a, F> = Op<'a, Local<F>, Remote<F>>;
/// An op of at most one piece, and what the schedule counts for it.
type Part<'a, F> = (OpOf<'a, F>, Event);

/// A layer that limits the rate of each engine of a fabric separately, and delays its ops.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ThrottleLayer {
    /// The maximum rate of one engine in each direction, in bytes per second; `f64::INFINITY` for
    /// no limit.
    pub bytes_per_second: f64,
    /// The delay before an op (a put, get or signal) takes effect, in addition to its transfer
    /// time.
    pub delay: Duration,
}

/// Returns the capabilities of an engine whose inner engine has the capabilities `own`.
fn caps(own: Caps) -> Caps {
    // Each piece takes two ops, because a hold stands before it.
    let slice_ops_max = own.slice_ops_max / (2 * pieces_max(&own) as usize);
    // Holds end only while the caller calls the engine, so it is polled.
    Caps { slice_ops_max, polled: true, rows: false, ..own }
}

/// Returns into how many pieces a copy is cut at most.
fn pieces_max(own: &Caps) -> u64 {
    if own.slice_ops_max >= SLICE_OPS_FOR_PIECES { PIECES_MAX } else { 1 }
}

// SAFETY: the engines wrap engines of the fabric.
unsafe impl<F: Fabric + 'static> Layer<F> for ThrottleLayer {
    type Engine = Throttle<F>;

    fn engine(
        &self,
        fabric: &F,
        _: u64,
        requirements: EngineRequirements,
    ) -> Result<Self::Engine, Error<F::Error>> {
        Throttle::new(fabric, requirements, *self)
    }

    fn offers(&self, own: Vec<EngineOffer>) -> Vec<EngineOffer> {
        let offer = |offer: EngineOffer| EngineOffer { caps: caps(offer.caps), ..offer };
        own.into_iter().map(offer).collect()
    }

    fn missing(&self, caps: &Caps) -> Option<String> {
        hold::cannot_hold(caps)
    }

    fn link(&self, link: Link) -> Link {
        let own = link.bytes_per_second.unwrap_or(f64::INFINITY);
        let slower = own.min(self.bytes_per_second);
        Link { bytes_per_second: slower.is_finite().then_some(slower), ..link }
    }
}

/// An engine with the limited rate and the delay of a network.
pub struct Throttle<F: Fabric> {
    engine: F::Engine,
    opener: F::Engine,
    hold: HoldFlags<F>,
    caps: Caps,
    pieces_max: u64,
    schedule: Schedule,
}

impl<F: Fabric> Throttle<F> {
    /// Creates an engine with the rate and delay of `layer`. `fabric` is a fabric of this rank that
    /// is connected to this rank only.
    ///
    /// # Errors
    /// Returns the error of the fabric, and an error of kind `InvalidArgument` if its engines
    /// cannot queue waits or accept only single ops, or if the rate is not more than 0.
    pub fn new(
        fabric: &F,
        requirements: EngineRequirements,
        layer: ThrottleLayer,
    ) -> Result<Self, Error<F::Error>> {
        let ThrottleLayer { bytes_per_second, delay } = layer;
        if bytes_per_second.is_nan() || bytes_per_second <= 0.0 {
            let text = format!("bytes_per_second is {bytes_per_second}, expected a number above 0");
            return Err(Error::layer(ErrorKind::InvalidArgument, text));
        }

        let engine = fabric.engine(requirements).map_err(Error::Inner)?;
        let opener = fabric.engine(requirements).map_err(Error::Inner)?;
        let own = *engine.caps();
        hold::check_hold(&own)?;

        Ok(Self {
            engine,
            opener,
            hold: HoldFlags::new(fabric)?,
            caps: caps(own),
            pieces_max: pieces_max(&own),
            schedule: Schedule::new(bytes_per_second, delay, Instant::now()),
        })
    }

    /// Ends the holds that are due, and returns whether there were any. They stay due if the opener
    /// has no room for the signal.
    fn drive(&mut self) -> Result<bool, Error<F::Error>> {
        self.opener.completed().map_err(Error::Inner)?;

        let awaits = self.schedule.awaits_mark();
        let passed = if awaits { self.hold.local().flag_value(PASSED) } else { None };
        let Some(value) = self.schedule.advance(passed.unwrap_or(0), Instant::now()) else {
            return Ok(false);
        };

        let open = [Op::Signal { flag: Flag { region: self.hold.alias(), word: DUE }, value }];
        // SAFETY: the import lives as long as the opener, which is the only writer of the flag.
        match unsafe { self.opener.submit(&open) } {
            Ok(_) => self.schedule.opened(value),
            Err(error) if error.kind() == ErrorKind::QueueFull => {}
            Err(error) => return Err(Error::Inner(error)),
        }
        Ok(true)
    }

    /// Splits the copies of a slice into pieces, and returns all ops with their events.
    ///
    /// # Errors
    /// Returns an error if the layer does not pass on an op of the slice.
    fn split<'a>(&self, ops: &[OpOf<'a, F>]) -> Result<Vec<Part<'a, F>>, Error<F::Error>> {
        let mut parts = Vec::with_capacity(ops.len());

        for op in ops {
            match *op {
                // A copy of no bytes has no pieces, but it takes effect in order like any other op.
                Op::Put { bytes: 0, .. } => parts.push((*op, Event::Put(0))),
                Op::Put { dst, src, bytes } => {
                    parts.extend(pieces(bytes, self.piece_bytes(bytes)).map(|piece| {
                        let (dst, src) = (piece_span(dst, piece), piece_span(src, piece));
                        (Op::Put { dst, src, bytes: piece.bytes }, Event::Put(piece.bytes))
                    }));
                }
                Op::Get { bytes: 0, .. } => parts.push((*op, Event::Get(0))),
                Op::Get { dst, src, bytes } => {
                    parts.extend(pieces(bytes, self.piece_bytes(bytes)).map(|piece| {
                        let (dst, src) = (piece_span(dst, piece), piece_span(src, piece));
                        (Op::Get { dst, src, bytes: piece.bytes }, Event::Get(piece.bytes))
                    }));
                }
                Op::Signal { .. } => parts.push((*op, Event::Signal)),
                Op::Wait { .. } => parts.push((*op, Event::Mark)),
                Op::PutRows { .. } | Op::GetRows { .. } | Op::Reduce { .. } => {
                    return Err(hold::refused_op(op));
                }
                #[cfg(not(peerlane_workspace))]
                _ => return Err(hold::refused_op(op)),
            }
        }

        Ok(parts)
    }

    fn piece_bytes(&self, bytes: u64) -> u64 {
        let unit = PIECE_BYTES_MIN.next_multiple_of(self.caps.put_align_bytes);
        let piece = bytes.div_ceil(self.pieces_max);
        piece.checked_next_multiple_of(unit).unwrap_or(bytes).min(bytes)
    }
}

fn piece_span<M>(whole: At<'_, M>, piece: Piece) -> At<'_, M> {
    // A span that leaves the address space leaves its region too, and is rejected.
    At { offset: whole.offset.saturating_add(piece.offset), ..whole }
}

// SAFETY: the layer passes all calls on to an implementation that upholds the contract.
unsafe impl<F: Fabric> CopyEngine for Throttle<F> {
    type Error = Error<F::Error>;
    type Local = Local<F>;
    type Remote = Remote<F>;

    fn caps(&self) -> &Caps {
        &self.caps
    }

    /// Returns `None`, because this layer does not support reductions.
    fn prepare_reduce(&mut self) -> Result<Option<Reducer>, Self::Error> {
        Ok(None)
    }

    unsafe fn submit(&mut self, ops: &[OpOf<'_, F>]) -> Result<Ticket, Self::Error> {
        if ops.len() > self.caps.slice_ops_max {
            let (seen, expected) = (ops.len(), self.caps.slice_ops_max);
            let text = format!(
                "a slice has {seen} ops, expected at most {expected} (slice_ops_max of the \
                 engine); split it into several slices"
            );
            return Err(Error::layer(ErrorKind::InvalidArgument, text));
        }

        let parts = self.split(ops)?;
        let (mut holds, mut marks) = self.schedule.hold_and_mark_counts();
        let mut held = Vec::with_capacity(2 * parts.len());
        for (op, event) in &parts {
            // A signal behind a wait of the caller shows that this wait has passed. Every other op
            // is held until the opener has signalled its number.
            if let Event::Mark = event {
                marks += 1;
                let flag = Flag { region: self.hold.alias(), word: PASSED };
                held.extend([*op, Op::Signal { flag, value: marks }]);
            } else {
                holds += 1;
                let flag = Flag { region: self.hold.local(), word: DUE };
                held.extend([Op::Wait { flag, value: holds, reset: false }, *op]);
            }
        }

        // SAFETY: the caller's promise. The flags live as long as the engine, the only reader of
        // one of them and the only writer of the other.
        let ticket = unsafe { self.engine.submit(&held) }.map_err(Error::Inner)?;
        // The schedule counts the ops only now, because a slice that is refused adds none.
        self.schedule.push(parts.into_iter().map(|(_, event)| event), Instant::now());
        self.drive()?;
        Ok(ticket)
    }

    fn completed(&mut self) -> Result<Ticket, Self::Error> {
        let done = self.engine.completed().map_err(Error::Inner)?;
        // Ops whose holds have just ended may be complete at once.
        if self.drive()? { self.engine.completed().map_err(Error::Inner) } else { Ok(done) }
    }

    fn park(&mut self, limit: Duration) -> Result<(), Self::Error> {
        if self.drive()? {
            return Ok(());
        }

        let until = self.schedule.next().map(|due| due.saturating_duration_since(Instant::now()));
        self.engine.park(until.map_or(limit, |until| until.min(limit))).map_err(Error::Inner)
    }

    fn release(&mut self) -> Result<(), Self::Error> {
        self.schedule.clear();
        self.engine.release().map_err(Error::Inner)
    }

    forward_to_engine!(is_busy waker compute_bytes streams);
}

forward_streams!([F: Fabric] Throttle<F>);

impl<F: Fabric> fmt::Debug for Throttle<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Throttle").field("schedule", &self.schedule).finish_non_exhaustive()
    }
}

/// The longest transfer time and delay, about three years, so that no clock overflows.
const LONGEST: Duration = Duration::from_secs(100_000_000);

/// An op with only the parameters that its transfer time depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    Put(u64),
    Get(u64),
    Signal,
    Mark,
}

/// Computes the time at which each op of a throttled engine completes. It reads no clock, because
/// all times are arguments.
#[derive(Debug)]
struct Schedule {
    bytes_per_second: f64,
    delay: Duration,
    /// The ops behind a wait that has not passed, whose completion times are not known yet. The
    /// first one is a mark.
    unknown: VecDeque<(Event, Instant)>,
    due: VecDeque<Instant>,
    holds: u64,
    marks: u64,
    open: u64,
    passed: u64,
    /// The earliest time at which the next transfer may begin, which is the end of the last wait.
    ready: Instant,
    out_free: Instant,
    in_free: Instant,
    got: Instant,
    /// The latest completion time of an op so far; no later op completes before it.
    last: Instant,
}

impl Schedule {
    fn new(bytes_per_second: f64, delay: Duration, now: Instant) -> Self {
        Self {
            bytes_per_second,
            delay: delay.min(LONGEST),
            unknown: VecDeque::new(),
            due: VecDeque::new(),
            holds: 0,
            marks: 0,
            open: 0,
            passed: 0,
            // Both directions are free from the beginning.
            ready: now,
            out_free: now,
            in_free: now,
            got: now,
            last: now,
        }
    }

    /// Returns the numbers of held ops and of marks that were submitted so far.
    fn hold_and_mark_counts(&self) -> (u64, u64) {
        (self.holds, self.marks)
    }

    fn push(&mut self, events: impl Iterator<Item = Event>, now: Instant) {
        for event in events {
            match event {
                Event::Mark => self.marks += 1,
                Event::Put(_) | Event::Get(_) | Event::Signal => self.holds += 1,
            }
            self.unknown.push_back((event, now));
        }
    }

    fn awaits_mark(&self) -> bool {
        !self.unknown.is_empty()
    }

    /// Computes the completion times of the ops before the next mark that has not passed, and
    /// returns the number of the last hold that is due, or `None` if no hold is.
    ///
    /// `passed` is the number of marks that have passed, and is read only if an op is unknown.
    fn advance(&mut self, passed: u64, now: Instant) -> Option<u64> {
        while let Some((event, at)) = self.unknown.front().copied() {
            if event == Event::Mark {
                if self.passed == passed {
                    break;
                }

                // The layer sees only now that the wait has passed, so no later op leaves before.
                self.passed += 1;
                self.ready = self.ready.max(now);
            } else {
                let time = self.completion_time(event, at);
                self.due.push_back(time);
            }
            self.unknown.pop_front();
        }

        let due_count = self.due.partition_point(|due| *due <= now);
        (due_count > 0).then(|| self.open + due_count as u64)
    }

    fn opened(&mut self, last: u64) {
        let count = usize::try_from(last - self.open).unwrap_or(usize::MAX);
        self.due.drain(..count.min(self.due.len()));
        self.open = last;
    }

    fn next(&self) -> Option<Instant> {
        self.due.front().copied()
    }

    fn clear(&mut self) {
        self.unknown.clear();
        self.due.clear();
    }

    /// Returns the completion time of an op that was submitted at `at`, and occupies the wire until
    /// its last byte has left.
    fn completion_time(&mut self, event: Event, at: Instant) -> Instant {
        let ready = self.ready.max(at);

        let effect = match event {
            Event::Put(bytes) => {
                self.out_free = self.out_free.max(ready) + self.travel(bytes);
                self.out_free
            }
            Event::Get(bytes) => {
                // The request takes as long as the answer.
                self.in_free = self.in_free.max(ready + self.delay) + self.travel(bytes);
                self.got = self.in_free + self.delay;
                self.in_free
            }
            // A signal may announce the bytes of an earlier get, so it leaves after their arrival.
            Event::Signal | Event::Mark => self.out_free.max(ready).max(self.got),
        };

        self.last = self.last.max(effect + self.delay);
        self.last
    }

    fn travel(&self, bytes: u64) -> Duration {
        let seconds = bytes as f64 / self.bytes_per_second;
        Duration::try_from_secs_f64(seconds).map_or(LONGEST, |time| time.min(LONGEST))
    }
}

#[cfg(test)]
mod tests {
    use super::Event::{Get, Mark, Put, Signal};
    use super::*;

    const DELAY: u64 = 10;

    /// Returns the completion time of each op in milliseconds, at a rate of one byte per
    /// millisecond.
    fn times(events: &[Event]) -> Vec<u128> {
        let start = Instant::now();
        let mut schedule = Schedule::new(1000.0, Duration::from_millis(DELAY), start);
        schedule.push(events.iter().copied(), start);
        schedule.advance(0, start);
        schedule.due.iter().map(|due| (*due - start).as_millis()).collect()
    }

    #[test]
    fn rate_and_delay_overlap() {
        assert_eq!(times(&[Put(5), Put(5), Signal]), [15, 20, 20]);
        assert_eq!(times(&[Signal, Put(0)]), [10, 10]);
    }

    #[test]
    fn a_get_takes_both_ways_and_the_other_direction() {
        assert_eq!(times(&[Get(5), Get(5)]), [25, 30]);
        // In order, though the wire out was free before.
        assert_eq!(times(&[Get(5), Put(7)]), [25, 25]);
        assert_eq!(times(&[Put(20), Get(5)]), [30, 30]);
        // The signal says that the bytes are here, so it leaves when they are.
        assert_eq!(times(&[Get(5), Signal]), [25, 35]);
    }

    #[test]
    fn what_stands_behind_a_wait_leaves_when_it_has_passed() {
        let start = Instant::now();
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        let mut schedule = Schedule::new(1000.0, Duration::from_millis(DELAY), start);
        schedule.push([Put(1), Mark, Put(2), Signal].into_iter(), start);
        assert_eq!((schedule.advance(0, at(0)), schedule.next()), (None, Some(at(11))));
        assert_eq!(schedule.advance(0, at(11)), Some(1));
        // It was not opened, so it stays due.
        assert_eq!(schedule.advance(0, at(40)), Some(1));
        schedule.opened(1);
        assert_eq!((schedule.advance(0, at(50)), schedule.next()), (None, None));
        assert_eq!((schedule.advance(1, at(100)), schedule.next()), (None, Some(at(112))));
        assert_eq!(schedule.advance(1, at(112)), Some(3));
        schedule.opened(3);
        assert!(!schedule.awaits_mark() && schedule.next().is_none());
    }

    #[test]
    fn a_rate_of_almost_nothing_overflows_no_clock() {
        let start = Instant::now();
        let mut schedule = Schedule::new(f64::MIN_POSITIVE, Duration::MAX, start);
        schedule.push([Put(u64::MAX), Put(u64::MAX), Get(1)].into_iter(), start);
        assert_eq!(schedule.advance(0, start), None);
    }
}
