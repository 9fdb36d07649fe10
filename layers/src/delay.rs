//! Holds ops back and reports completion late, by a seed.
//!
//! Every op is put behind a queued wait of its own, and a second engine of the rank opens these
//! gates at random times, whenever the delayed engine is called. So the backend itself keeps the
//! contract, no op is copied, and the ops of one slice take effect far apart. It needs an engine
//! with queued waits; a caller without them gets one by [`Downgrade`](crate::Downgrade) on top.

use std::collections::VecDeque;
use std::fmt;
use std::time::{Duration, Instant};

use peerlane_hal::{Caps, CopyEngine, EngineRequirements, ErrorKind, Fabric, Flag, Op, Ticket};

use crate::gate::Gate;
use crate::pass::{pass_streams, pass_to_engine};
use crate::{Error, Layer, Local, Remote};

const GATE: u64 = 0;

/// Delays all engines of a fabric.
#[derive(Clone, Copy, Debug)]
pub struct DelayLayer {
    seed: u64,
    longest: Duration,
    engines: u64,
}

impl DelayLayer {
    /// Delays each op by at most `longest`; the same seed draws the same delays.
    pub fn new(seed: u64, longest: Duration) -> Self {
        Self { seed, longest, engines: 0 }
    }
}

impl<F: Fabric + 'static> Layer<F> for DelayLayer {
    type Engine = Delay<F>;

    fn engine(
        &mut self,
        fabric: &mut F,
        requirements: EngineRequirements,
    ) -> Result<Self::Engine, Error<F::Error>> {
        self.engines += 1;
        let number = u64::from(fabric.rank().0) << 32 | self.engines;
        let random =
            fastrand::Rng::with_seed(self.seed ^ number.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        Delay::new(fabric, requirements, random, self.longest)
    }
}

/// An engine that takes its time.
pub struct Delay<F: Fabric> {
    engine: F::Engine,
    /// Opens the gates.
    keeper: F::Engine,
    // Behind the engines, so that it goes last.
    gate: Gate<F>,
    caps: Caps,
    random: fastrand::Rng,
    longest: Duration,
    /// When each closed gate opens, in order.
    due: VecDeque<Instant>,
    /// Gates made, and so the value of the last one.
    gates: u64,
    /// What was last said to be complete, and whether more could have been said.
    told: Ticket,
    lags: bool,
}

impl<F: Fabric> Delay<F> {
    /// Makes a delayed engine of `fabric`, which is connected to itself.
    ///
    /// # Errors
    /// Those of the fabric, and `InvalidArgument` if its engines cannot queue waits or take only
    /// single ops.
    pub fn new(
        fabric: &mut F,
        requirements: EngineRequirements,
        random: fastrand::Rng,
        longest: Duration,
    ) -> Result<Self, Error<F::Error>> {
        let engine = fabric.engine(requirements).map_err(Error::Inner)?;
        let keeper = fabric.engine(requirements).map_err(Error::Inner)?;
        let own = *engine.caps();
        if !own.queued_wait || own.slice_ops_max < 2 {
            let text = format!("a delay needs queued waits and slices of two ops, seen {own:?}");
            return Err(Error::layer(ErrorKind::InvalidArgument, text));
        }
        Ok(Self {
            engine,
            keeper,
            gate: Gate::new(fabric)?,
            // Half of each slice is gates; and they open only while somebody calls.
            caps: Caps { slice_ops_max: own.slice_ops_max / 2, polled: true, ..own },
            random,
            longest,
            due: VecDeque::new(),
            gates: 0,
            told: Ticket::NONE,
            lags: false,
        })
    }

    /// Opens the gates that are due.
    fn drive(&mut self) -> Result<(), Error<F::Error>> {
        self.keeper.completed().map_err(Error::Inner)?;
        let now = Instant::now();
        let ripe = self.due.iter().take_while(|&&due| due <= now).count();
        if ripe == 0 {
            return Ok(());
        }
        let closed = (self.due.len() - ripe) as u64;
        let flag = Flag { region: self.gate.alias(), word: GATE };
        let open = [Op::Signal { flag, value: self.gates - closed }];
        // SAFETY: the alias lives as long as the keeper, which is the gate's only writer.
        match unsafe { self.keeper.submit(&open) } {
            Ok(_) => drop(self.due.drain(..ripe)),
            // They stay due.
            Err(error) if peerlane_hal::Error::kind(&error) == ErrorKind::QueueFull => {}
            Err(error) => return Err(Error::Inner(error)),
        }
        Ok(())
    }

    /// Draws when the gates of a slice open, one after the other.
    fn schedule(&mut self, gates: usize) {
        let mut at = self.due.back().copied().unwrap_or_else(Instant::now).max(Instant::now());
        for _ in 0..gates {
            // Half of the ops follow at once, so that neighbours come together as well as apart.
            if self.random.bool() {
                at += self.longest.mul_f64(self.random.f64());
            }
            self.due.push_back(at);
        }
        self.gates += gates as u64;
    }
}

impl<F: Fabric> CopyEngine for Delay<F> {
    type Error = Error<F::Error>;
    type Local = Local<F>;
    type Remote = Remote<F>;

    fn caps(&self) -> &Caps {
        &self.caps
    }

    unsafe fn submit(
        &mut self,
        ops: &[Op<'_, Local<F>, Remote<F>>],
    ) -> Result<Ticket, Self::Error> {
        if ops.len() > self.caps.slice_ops_max {
            let (seen, wanted) = (ops.len(), self.caps.slice_ops_max);
            let text = format!("a slice has {seen} ops, wanted at most {wanted}");
            return Err(Error::layer(ErrorKind::InvalidArgument, text));
        }
        let flag = Flag { region: self.gate.local(), word: GATE };
        let gates = (self.gates + 1..).map(|value| Op::Wait { flag, value, reset: false });
        let held: Vec<_> = gates.zip(ops).flat_map(|(gate, op)| [gate, *op]).collect();
        // SAFETY: the caller's promise; the gate lives as long as the engine, its only reader.
        let ticket = unsafe { self.engine.submit(&held) }.map_err(Error::Inner)?;
        self.schedule(ops.len());
        self.drive()?;
        Ok(ticket)
    }

    fn completed(&mut self) -> Result<Ticket, Self::Error> {
        self.drive()?;
        let completed = self.engine.completed().map_err(Error::Inner)?;
        self.lags = completed > self.told && self.random.bool();
        if !self.lags {
            self.told = completed;
        }
        Ok(self.told)
    }

    fn park(&mut self, limit: Duration) -> Result<(), Self::Error> {
        self.drive()?;
        if self.lags {
            return Ok(());
        }
        let until = self.due.front().map(|due| due.saturating_duration_since(Instant::now()));
        self.engine.park(until.map_or(limit, |until| until.min(limit))).map_err(Error::Inner)
    }

    /// The engine behind it, or what was complete and has not been said.
    fn is_busy(&self) -> bool {
        self.lags || self.engine.is_busy()
    }

    pass_to_engine!(waker release streams);
}

pass_streams!([F: Fabric] Delay<F>);

impl<F: Fabric> fmt::Debug for Delay<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let closed = self.due.len();
        f.debug_struct("Delay").field("longest", &self.longest).field("closed", &closed).finish()
    }
}
