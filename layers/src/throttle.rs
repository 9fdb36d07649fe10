//! Makes an engine as slow as a network: so many bytes a second, each so much later.
//!
//! Each engine is a wire of its own with two directions. A put leaves when the wire out is free and
//! is there when its last byte has travelled; a signal takes no room and travels as long; a get asks
//! first, so it takes both ways and the room on the wire in. Rate and delay overlap as on a wire: what
//! is under way does not keep the next put from leaving. All ops are paced, those to oneself too.
//!
//! Every op stands behind a queued wait of its own, as under [`Delay`](crate::Delay), and a second
//! engine opens that gate when the op is due, whenever the throttled engine is called. So the
//! backend itself keeps the contract, and bytes come late and never early. What stands behind a
//! wait of the caller leaves when the wait has passed: behind each such wait a signal to oneself marks
//! that. Long puts are moved in a few pieces, so that little is left to be copied at the end.

mod schedule;

use std::fmt;
use std::time::{Duration, Instant};

use peerlane_hal::{
    At, Caps, CopyEngine, EngineRequirements, Error as _, ErrorKind, Fabric, Flag, Link, Op,
    Region, Ticket,
};
use peerlane_toolkit::{Piece, pieces};

use self::schedule::{Event, Schedule};
use crate::gate::Gate;
use crate::pass::{pass_streams, pass_to_engine};
use crate::{Error, Layer, Local, Remote};

/// The flag that opens what is due.
const DUE: u64 = 0;
/// The flag that tells which waits of the caller have passed.
const PASSED: u64 = 1;
/// Pieces that a long put is moved in, where slices are long enough.
const PIECES_MAX: u64 = 8;
/// A slice of so many ops has room for pieces.
const SLICE_OPS_FOR_PIECES: usize = 256;
/// Shorter puts are not split.
const PIECE_BYTES_MIN: u64 = 64 << 10;

type OpOf<'a, F> = Op<'a, Local<F>, Remote<F>>;

/// Throttles all engines of a fabric, each by itself.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ThrottleLayer {
    /// What one engine sends, and what it gets, at most; `f64::INFINITY` for no limit.
    pub bytes_per_second: f64,
    /// How much later everything takes effect.
    pub delay: Duration,
}

impl<F: Fabric + 'static> Layer<F> for ThrottleLayer {
    type Engine = Throttle<F>;

    fn engine(
        &mut self,
        fabric: &mut F,
        requirements: EngineRequirements,
    ) -> Result<Self::Engine, Error<F::Error>> {
        Throttle::new(fabric, requirements, *self)
    }

    fn link(&self, link: Link) -> Link {
        let own = link.bytes_per_second.unwrap_or(f64::INFINITY);
        let slower = own.min(self.bytes_per_second);
        Link { bytes_per_second: slower.is_finite().then_some(slower), ..link }
    }
}

/// An engine as slow as a network.
pub struct Throttle<F: Fabric> {
    engine: F::Engine,
    /// Opens the gates.
    keeper: F::Engine,
    gate: Gate<F>,
    caps: Caps,
    pieces_max: u64,
    schedule: Schedule,
}

impl<F: Fabric> Throttle<F> {
    /// Makes a throttled engine of `fabric`, which is connected to itself.
    ///
    /// # Errors
    /// Those of the fabric, and `InvalidArgument` if its engines cannot queue waits or take only
    /// single ops, or if the rate is not more than 0.
    pub fn new(
        fabric: &mut F,
        requirements: EngineRequirements,
        layer: ThrottleLayer,
    ) -> Result<Self, Error<F::Error>> {
        let ThrottleLayer { bytes_per_second, delay } = layer;
        if bytes_per_second.is_nan() || bytes_per_second <= 0.0 {
            let text = format!("bytes_per_second is {bytes_per_second}, wanted more than 0");
            return Err(Error::layer(ErrorKind::InvalidArgument, text));
        }
        let engine = fabric.engine(requirements).map_err(Error::Inner)?;
        let keeper = fabric.engine(requirements).map_err(Error::Inner)?;
        let own = *engine.caps();
        if !own.queued_wait || own.slice_ops_max < 2 {
            let text = format!("a throttle needs queued waits and slices of two ops, seen {own:?}");
            return Err(Error::layer(ErrorKind::InvalidArgument, text));
        }
        let splits = own.slice_ops_max >= SLICE_OPS_FOR_PIECES;
        let pieces_max = if splits { PIECES_MAX } else { 1 };
        // A gate for each piece; and gates open only while somebody calls.
        let slice_ops_max = own.slice_ops_max / (2 * pieces_max as usize);
        Ok(Self {
            engine,
            keeper,
            gate: Gate::new(fabric)?,
            caps: Caps { slice_ops_max, polled: true, ..own },
            pieces_max,
            schedule: Schedule::new(bytes_per_second, delay, Instant::now()),
        })
    }

    /// Opens the gates that are due; whether there were any.
    fn drive(&mut self) -> Result<bool, Error<F::Error>> {
        self.keeper.completed().map_err(Error::Inner)?;
        let awaits = self.schedule.awaits_mark();
        let passed = if awaits { self.gate.local().flag_value(PASSED) } else { None };
        let Some(value) = self.schedule.look(passed.unwrap_or(0), Instant::now()) else {
            return Ok(false);
        };
        let open = [Op::Signal { flag: Flag { region: self.gate.alias(), word: DUE }, value }];
        // SAFETY: the alias lives as long as the keeper, which is the gate's only writer.
        match unsafe { self.keeper.submit(&open) } {
            Ok(_) => self.schedule.opened(value),
            // They stay due.
            Err(error) if error.kind() == ErrorKind::QueueFull => {}
            Err(error) => return Err(Error::Inner(error)),
        }
        Ok(true)
    }

    /// The slice with long copies in pieces.
    fn split<'a>(&self, ops: &[OpOf<'a, F>]) -> Vec<OpOf<'a, F>> {
        let mut parts = Vec::with_capacity(ops.len());
        for op in ops {
            match *op {
                Op::Put { dst, src, bytes } if bytes > 0 => {
                    parts.extend(pieces(bytes, self.piece_bytes(bytes)).map(|piece| {
                        let (dst, src) = (part(dst, piece), part(src, piece));
                        Op::Put { dst, src, bytes: piece.bytes }
                    }));
                }
                Op::Get { dst, src, bytes } if bytes > 0 => {
                    parts.extend(pieces(bytes, self.piece_bytes(bytes)).map(|piece| {
                        let (dst, src) = (part(dst, piece), part(src, piece));
                        Op::Get { dst, src, bytes: piece.bytes }
                    }));
                }
                op => parts.push(op),
            }
        }
        parts
    }

    fn piece_bytes(&self, bytes: u64) -> u64 {
        let unit = PIECE_BYTES_MIN.next_multiple_of(self.caps.put_align_bytes);
        let piece = bytes.div_ceil(self.pieces_max);
        piece.checked_next_multiple_of(unit).unwrap_or(bytes).min(bytes)
    }
}

/// A part of a span; one that leaves the address space leaves its region too, and is refused.
fn part<M>(whole: At<'_, M>, piece: Piece) -> At<'_, M> {
    At { offset: whole.offset.saturating_add(piece.offset), ..whole }
}

impl<F: Fabric> CopyEngine for Throttle<F> {
    type Error = Error<F::Error>;
    type Local = Local<F>;
    type Remote = Remote<F>;

    fn caps(&self) -> &Caps {
        &self.caps
    }

    unsafe fn submit(&mut self, ops: &[OpOf<'_, F>]) -> Result<Ticket, Self::Error> {
        if ops.len() > self.caps.slice_ops_max {
            let (seen, wanted) = (ops.len(), self.caps.slice_ops_max);
            let text = format!("a slice has {seen} ops, wanted at most {wanted}");
            return Err(Error::layer(ErrorKind::InvalidArgument, text));
        }
        let parts = self.split(ops);
        let (mut gates, mut marks) = self.schedule.made();
        let mut held = Vec::with_capacity(2 * parts.len());
        for op in &parts {
            if let Op::Wait { .. } = op {
                marks += 1;
                let flag = Flag { region: self.gate.alias(), word: PASSED };
                held.extend([*op, Op::Signal { flag, value: marks }]);
            } else {
                gates += 1;
                let flag = Flag { region: self.gate.local(), word: DUE };
                held.extend([Op::Wait { flag, value: gates, reset: false }, *op]);
            }
        }
        // SAFETY: the caller's promise; the gate lives as long as the engine, the only reader of one
        // of its flags and the only writer of the other.
        let ticket = unsafe { self.engine.submit(&held) }.map_err(Error::Inner)?;
        let events = parts.iter().map(|op| match *op {
            Op::Put { bytes, .. } => Event::Put(bytes),
            Op::Get { bytes, .. } => Event::Get(bytes),
            Op::Signal { .. } => Event::Signal,
            Op::Wait { .. } => Event::Mark,
        });
        self.schedule.push(events, Instant::now());
        self.drive()?;
        Ok(ticket)
    }

    fn completed(&mut self) -> Result<Ticket, Self::Error> {
        let done = self.engine.completed().map_err(Error::Inner)?;
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

    pass_to_engine!(is_busy waker streams);
}

pass_streams!([F: Fabric] Throttle<F>);

impl<F: Fabric> fmt::Debug for Throttle<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Throttle").field("schedule", &self.schedule).finish_non_exhaustive()
    }
}
