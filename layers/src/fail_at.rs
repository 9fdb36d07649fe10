//! Makes an engine fail at a chosen op and stay failed, like a backend that lost its device or a peer.

use std::time::Duration;

use peerlane_hal::{CopyEngine, EngineRequirements, ErrorKind, Fabric, Op, Rank, Ticket};

use crate::forward::{forward_streams, forward_to_engine};
use crate::{Error, Layer};

/// A layer that makes every engine fail at the same op.
#[derive(Clone, Copy, Debug)]
pub struct FailAtLayer {
    /// The number of ops that succeed before the failure. With `u64::MAX`, an engine fails only after a call
    /// of [`FailAt::fail_at`].
    pub ops: u64,
    /// The kind of the error with which the engine fails.
    pub kind: ErrorKind,
    /// The rank that the error is about, if there is one.
    pub peer: Option<Rank>,
}

// SAFETY: the engines wrap engines of the fabric.
unsafe impl<F: Fabric> Layer<F> for FailAtLayer {
    type Engine = FailAt<F::Engine>;

    fn engine(
        &self,
        fabric: &F,
        _: u64,
        requirements: EngineRequirements,
    ) -> Result<Self::Engine, Error<F::Error>> {
        Ok(FailAt::new(fabric.engine(requirements).map_err(Error::Inner)?, *self))
    }

    fn break_engine(engine: &mut Self::Engine) -> Option<ErrorKind> {
        engine.fail_at(0);
        Some(engine.kind)
    }
}

/// An engine that fails at a chosen put, get, signal or wait, as a test of error handling. No op of that
/// slice runs, and nothing completes afterwards.
#[derive(Debug)]
pub struct FailAt<E> {
    engine: E,
    /// The number of puts, gets, signals and waits that still succeed before the failure.
    left: u64,
    kind: ErrorKind,
    peer: Option<Rank>,
    failed: bool,
}

impl<E: CopyEngine> FailAt<E> {
    /// Wraps `engine` so that it fails at the op that `layer` chooses.
    pub fn new(engine: E, layer: FailAtLayer) -> Self {
        let FailAtLayer { ops, kind, peer } = layer;
        Self { engine, left: ops, kind, peer, failed: false }
    }

    /// Makes the engine fail after `ops` more puts, gets, signals or waits.
    pub fn fail_at(&mut self, ops: u64) {
        self.left = ops;
    }

    fn error(&self, text: String) -> Error<E::Error> {
        Error::Layer { kind: self.kind, peer: self.peer, text }
    }

    fn check(&self) -> Result<(), Error<E::Error>> {
        if self.failed {
            return Err(
                self.error(format!("the engine is poisoned by an earlier error: {}", self.kind))
            );
        }
        Ok(())
    }
}

// SAFETY: the layer passes all calls on to an implementation that upholds the contract.
unsafe impl<E: CopyEngine> CopyEngine for FailAt<E> {
    type Error = Error<E::Error>;
    type Local = E::Local;
    type Remote = E::Remote;

    unsafe fn submit(
        &mut self,
        ops: &[Op<'_, E::Local, E::Remote>],
    ) -> Result<Ticket, Self::Error> {
        self.check()?;
        let count = ops.len() as u64;
        if count > self.left {
            self.failed = true;
            let text = format!(
                "op {} of a slice failed, because the layer FailAt injected the error: {}",
                self.left + 1,
                self.kind
            );
            return Err(self.error(text));
        }
        // SAFETY: the caller's promise.
        let ticket = unsafe { self.engine.submit(ops) }.map_err(Error::Inner)?;
        self.left -= count;
        Ok(ticket)
    }

    fn completed(&mut self) -> Result<Ticket, Self::Error> {
        self.check()?;
        self.engine.completed().map_err(Error::Inner)
    }

    fn park(&mut self, limit: Duration) -> Result<(), Self::Error> {
        self.check()?;
        self.engine.park(limit).map_err(Error::Inner)
    }

    fn release(&mut self) -> Result<(), Self::Error> {
        self.check()?;
        self.engine.release().map_err(Error::Inner)
    }

    forward_to_engine!(caps is_busy waker compute_bytes streams prepare_reduce);
}

forward_streams!([E: CopyEngine] FailAt<E>, check);
