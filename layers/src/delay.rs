//! Delays the ops of an engine and reports their completion late, by random times from a seed.
//!
//! Each op is held by a queued wait of its own. A second engine of the rank ends these waits at
//! random times, whenever the delayed engine is called. So the inner backend keeps the contract, no
//! op is copied, and the ops of one slice take effect far apart. The layer needs an engine with
//! queued waits; for a caller without them, put [`Downgrade`](crate::Downgrade) on top.

use std::collections::VecDeque;
use std::fmt;
use std::time::{Duration, Instant};

use peerlane_hal::{
    Caps, CopyEngine, EngineOffer, EngineRequirements, ErrorKind, Fabric, Flag, Op, Reducer, Ticket,
};

use crate::forward::{forward_streams, forward_to_engine};
use crate::hold::{self, HoldFlags};
use crate::{Error, Layer, Local, Remote};

const HOLD_WORD: u64 = 0;

/// A layer that delays the ops of every engine of a fabric.
#[derive(Clone, Copy, Debug)]
pub struct DelayLayer {
    seed: u64,
    longest: Duration,
}

impl DelayLayer {
    /// Creates a layer that delays each op by at most `longest`. The same seed draws the same
    /// delays.
    pub fn new(seed: u64, longest: Duration) -> Self {
        Self { seed, longest }
    }
}

/// Returns the capabilities of an engine whose inner engine has the capabilities `own`.
fn caps(own: Caps) -> Caps {
    // Half of each slice are waits, and they end only while the caller calls the engine.
    Caps { slice_ops_max: own.slice_ops_max / 2, polled: true, ..own }
}

// SAFETY: the engines wrap engines of the fabric.
unsafe impl<F: Fabric + 'static> Layer<F> for DelayLayer {
    type Engine = Delay<F>;

    fn engine(
        &self,
        fabric: &F,
        number: u64,
        requirements: EngineRequirements,
    ) -> Result<Self::Engine, Error<F::Error>> {
        let number = u64::from(fabric.rank().0) << 32 | (number + 1);
        let random =
            fastrand::Rng::with_seed(self.seed ^ number.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        Delay::new(fabric, requirements, random, self.longest)
    }

    fn offers(&self, own: Vec<EngineOffer>) -> Vec<EngineOffer> {
        let offer = |offer: EngineOffer| EngineOffer { caps: caps(offer.caps), ..offer };
        own.into_iter().map(offer).collect()
    }

    fn missing(&self, caps: &Caps) -> Option<String> {
        hold::cannot_hold(caps)
    }
}

/// An engine that delays each op by a random time.
pub struct Delay<F: Fabric> {
    engine: F::Engine,
    opener: F::Engine,
    // Declared after the engines, so that it is dropped last.
    hold: HoldFlags<F>,
    caps: Caps,
    random: fastrand::Rng,
    longest: Duration,
    due: VecDeque<Instant>,
    holds: u64,
    /// The last ticket that was reported as complete; later tickets may be complete too if `lags`
    /// is true.
    reported: Ticket,
    lags: bool,
}

impl<F: Fabric> Delay<F> {
    /// Creates a delayed engine on a fabric that is connected to its own rank.
    ///
    /// # Errors
    /// Returns the error of the fabric, and an error of kind `InvalidArgument` if its engines
    /// cannot queue waits or accept only single ops.
    pub fn new(
        fabric: &F,
        requirements: EngineRequirements,
        random: fastrand::Rng,
        longest: Duration,
    ) -> Result<Self, Error<F::Error>> {
        let engine = fabric.engine(requirements).map_err(Error::Inner)?;
        let opener = fabric.engine(requirements).map_err(Error::Inner)?;
        let own = *engine.caps();
        hold::check_hold(&own)?;

        Ok(Self {
            engine,
            opener,
            hold: HoldFlags::new(fabric)?,
            caps: caps(own),
            random,
            longest,
            due: VecDeque::new(),
            holds: 0,
            reported: Ticket::NONE,
            lags: false,
        })
    }

    fn drive(&mut self) -> Result<(), Error<F::Error>> {
        self.opener.completed().map_err(Error::Inner)?;
        let now = Instant::now();
        let due_count = self.due.iter().take_while(|&&due| due <= now).count();
        if due_count == 0 {
            return Ok(());
        }
        let closed = (self.due.len() - due_count) as u64;
        let flag = Flag { region: self.hold.alias(), word: HOLD_WORD };
        let open = [Op::Signal { flag, value: self.holds - closed }];
        // SAFETY: the import lives as long as the opener, which is the only writer of the flag.
        match unsafe { self.opener.submit(&open) } {
            Ok(_) => drop(self.due.drain(..due_count)),
            // They stay due.
            Err(error) if peerlane_hal::Error::kind(&error) == ErrorKind::QueueFull => {}
            Err(error) => return Err(Error::Inner(error)),
        }
        Ok(())
    }

    fn schedule(&mut self, holds: usize) {
        let mut at = self.due.back().copied().unwrap_or_else(Instant::now).max(Instant::now());
        for _ in 0..holds {
            // Half of the ops follow at once, so that neighbours take effect together as well as
            // apart.
            if self.random.bool() {
                at += self.longest.mul_f64(self.random.f64());
            }
            self.due.push_back(at);
        }
        self.holds += holds as u64;
    }
}

// SAFETY: the layer passes all calls on to an implementation that upholds the contract.
unsafe impl<F: Fabric> CopyEngine for Delay<F> {
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

    unsafe fn submit(
        &mut self,
        ops: &[Op<'_, Local<F>, Remote<F>>],
    ) -> Result<Ticket, Self::Error> {
        if ops.len() > self.caps.slice_ops_max {
            let (seen, expected) = (ops.len(), self.caps.slice_ops_max);
            let text = format!(
                "a slice has {seen} ops, expected at most {expected} (slice_ops_max of the \
                 engine); split it into several slices"
            );
            return Err(Error::layer(ErrorKind::InvalidArgument, text));
        }

        let flag = Flag { region: self.hold.local(), word: HOLD_WORD };
        let holds = (self.holds + 1..).map(|value| Op::Wait { flag, value, reset: false });
        let held: Vec<_> = holds.zip(ops).flat_map(|(hold, op)| [hold, *op]).collect();
        // SAFETY: the caller's promise. The hold flag lives as long as the engine, its only reader.
        let ticket = unsafe { self.engine.submit(&held) }.map_err(Error::Inner)?;
        self.schedule(ops.len());
        self.drive()?;

        Ok(ticket)
    }

    fn completed(&mut self) -> Result<Ticket, Self::Error> {
        self.drive()?;
        let completed = self.engine.completed().map_err(Error::Inner)?;
        self.lags = completed > self.reported && self.random.bool();
        if !self.lags {
            self.reported = completed;
        }
        Ok(self.reported)
    }

    fn park(&mut self, limit: Duration) -> Result<(), Self::Error> {
        self.drive()?;
        if self.lags {
            return Ok(());
        }
        let until = self.due.front().map(|due| due.saturating_duration_since(Instant::now()));
        self.engine.park(until.map_or(limit, |until| until.min(limit))).map_err(Error::Inner)
    }

    fn is_busy(&self) -> bool {
        self.lags || self.engine.is_busy()
    }

    forward_to_engine!(waker release compute_bytes streams);
}

forward_streams!([F: Fabric] Delay<F>);

impl<F: Fabric> fmt::Debug for Delay<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let closed = self.due.len();
        f.debug_struct("Delay").field("longest", &self.longest).field("closed", &closed).finish()
    }
}
