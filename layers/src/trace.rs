//! Records the calls of an engine in a log, as text that tests can compare.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use peerlane_hal::{CopyEngine, EngineRequirements, Fabric, Op, Rank, Rows, Ticket};

use crate::forward::{forward_streams, forward_to_engine};
use crate::{Error, Layer};

/// One event in the trace of an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// The rank that the engine belongs to.
    pub rank: Rank,
    /// The number of the engine among those of its rank, from 0.
    pub engine: u64,
    /// The ticket of the `submit` call that the event belongs to.
    pub ticket: Ticket,
    /// The text of the event, which is an op, `complete`, `released`, or `refused` with a reason.
    pub text: String,
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, engine, ticket, text } = self;
        write!(f, "rank {rank} engine {engine} ticket {}: {text}", ticket.0)
    }
}

/// A log of events that several engines share. [`Display`](fmt::Display) prints one line per event.
#[derive(Clone, Debug, Default)]
pub struct TraceLog(Arc<Mutex<Vec<Event>>>);

impl TraceLog {
    /// Creates an empty trace log.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the engine events that were recorded so far.
    pub fn events(&self) -> Vec<Event> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Event>> {
        // Each event is pushed in one call, so the log stays consistent if a thread panics.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Display for TraceLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lock().iter().try_for_each(|event| writeln!(f, "{event}"))
    }
}

/// A layer that traces the calls of all engines of a fabric.
#[derive(Clone, Debug, Default)]
pub struct TraceLayer {
    log: TraceLog,
}

impl TraceLayer {
    /// Creates a layer whose engines write their events to `log`.
    pub fn new(log: TraceLog) -> Self {
        Self { log }
    }
}

// SAFETY: the engines wrap engines of the fabric.
unsafe impl<F: Fabric> Layer<F> for TraceLayer {
    type Engine = Trace<F::Engine>;

    fn engine(
        &self,
        fabric: &F,
        number: u64,
        requirements: EngineRequirements,
    ) -> Result<Self::Engine, Error<F::Error>> {
        let engine = fabric.engine(requirements).map_err(Error::Inner)?;
        Ok(Trace::new(engine, fabric.rank(), number, self.log.clone()))
    }
}

/// An engine that records the calls of its inner engine.
#[derive(Debug)]
pub struct Trace<E> {
    engine: E,
    rank: Rank,
    number: u64,
    log: TraceLog,
    /// Maps the address of a memory region to its number in the trace, in the order of first use.
    regions: HashMap<usize, usize>,
    completed: Ticket,
}

impl<E: CopyEngine> Trace<E> {
    /// Wraps `engine` to trace it as engine `number` of `rank`.
    pub fn new(engine: E, rank: Rank, number: u64, log: TraceLog) -> Self {
        Self { engine, rank, number, log, regions: HashMap::new(), completed: Ticket::NONE }
    }

    fn write(&self, ticket: Ticket, text: impl Into<String>) {
        let event = Event { rank: self.rank, engine: self.number, ticket, text: text.into() };
        self.log.lock().push(event);
    }

    fn region<R>(&mut self, region: &R) -> usize {
        let next = self.regions.len();
        *self.regions.entry(std::ptr::from_ref(region).addr()).or_insert(next)
    }

    /// Returns the text of an op, with numbers instead of addresses for its regions.
    fn describe(&mut self, op: &Op<'_, E::Local, E::Remote>) -> String {
        // A region is numbered when it is first looked up, so the order of the calls of `region`
        // decides the numbers in the text: sources come before destinations.
        match *op {
            Op::Put { dst, src, bytes } => {
                let (from, to) = (self.region(src.region), self.region(dst.region));
                let (src, dst) = (src.offset, dst.offset);
                format!("put {bytes} bytes from local {from} + {src} to remote {to} + {dst}")
            }
            Op::Get { dst, src, bytes } => {
                let (from, to) = (self.region(src.region), self.region(dst.region));
                let (src, dst) = (src.offset, dst.offset);
                format!("get {bytes} bytes from remote {from} + {src} to local {to} + {dst}")
            }
            Op::PutRows { dst, src, bytes, rows: Rows { count, dst_pitch, src_pitch } } => {
                let (from, to) = (self.region(src.region), self.region(dst.region));
                let (src, dst) = (src.offset, dst.offset);
                format!(
                    "put {count} rows of {bytes} bytes from local {from} + {src}, pitch {src_pitch}, to remote {to} + {dst}, pitch {dst_pitch}"
                )
            }
            Op::GetRows { dst, src, bytes, rows: Rows { count, dst_pitch, src_pitch } } => {
                let (from, to) = (self.region(src.region), self.region(dst.region));
                let (src, dst) = (src.offset, dst.offset);
                format!(
                    "get {count} rows of {bytes} bytes from remote {from} + {src}, pitch {src_pitch}, to local {to} + {dst}, pitch {dst_pitch}"
                )
            }
            Op::Signal { flag, value } => {
                let region = self.region(flag.region);
                format!("signal remote {region} word {} = {value}", flag.word)
            }
            Op::Wait { flag, value, reset } => {
                let region = self.region(flag.region);
                let then = if reset { ", then reset" } else { "" };
                format!("wait local {region} word {} >= {value}{then}", flag.word)
            }
            Op::Reduce { dst, srcs, bytes, reduction } => {
                let (operator, dtype) = (reduction.operator(), reduction.dtype());
                let from: Vec<_> = srcs
                    .iter()
                    .map(|src| format!("local {} + {}", self.region(src.region), src.offset))
                    .collect();
                let (from, to) = (from.join(", "), self.region(dst.region));

                format!(
                    "{operator} of {bytes} bytes of {dtype} from {from} to local {to} + {}",
                    dst.offset
                )
            }
            #[cfg(not(peerlane_workspace))]
            _ => op.name().to_owned(),
        }
    }
}

// SAFETY: the layer passes all calls on to an implementation that upholds the contract.
unsafe impl<E: CopyEngine> CopyEngine for Trace<E> {
    type Error = Error<E::Error>;
    type Local = E::Local;
    type Remote = E::Remote;

    unsafe fn submit(
        &mut self,
        ops: &[Op<'_, E::Local, E::Remote>],
    ) -> Result<Ticket, Self::Error> {
        let texts: Vec<String> = ops.iter().map(|op| self.describe(op)).collect();

        // SAFETY: the caller's promise.
        match unsafe { self.engine.submit(ops) } {
            Ok(ticket) => {
                texts.into_iter().for_each(|text| self.write(ticket, text));
                Ok(ticket)
            }
            Err(error) => {
                self.write(Ticket::NONE, format!("refused: {error}"));
                Err(Error::Inner(error))
            }
        }
    }

    fn completed(&mut self) -> Result<Ticket, Self::Error> {
        let completed = self.engine.completed().map_err(Error::Inner)?;
        if completed > self.completed {
            self.completed = completed;
            self.write(completed, "complete");
        }
        Ok(completed)
    }

    fn release(&mut self) -> Result<(), Self::Error> {
        self.write(self.completed, "released");
        self.engine.release().map_err(Error::Inner)
    }

    forward_to_engine!(caps park is_busy waker compute_bytes streams prepare_reduce);
}

forward_streams!([E: CopyEngine] Trace<E>);
