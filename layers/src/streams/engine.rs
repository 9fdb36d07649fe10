//! The engine that puts its slices onto streams.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Wake, Waker};
use std::time::{Duration, Instant};

use peerlane_hal::{
    At, Caps, CopyEngine, EngineRequirements, Error as _, ErrorKind, Fabric, Flag, Op,
    StreamOrdered, Ticket, stream_of,
};

use super::queue::Stream;
use crate::gate::Gate;
use crate::{Error, Local, Remote};

const GATE: u64 = 0;
/// Between two looks of a stream at its slice.
const LOOK_PAUSE: Duration = Duration::from_micros(20);
/// Flags of a device wake nobody; a parked caller looks so often.
const PARK_MAX: Duration = Duration::from_millis(1);
/// How long a dropped engine waits for its slices.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// An engine with streams over engines of `F` without.
pub struct Streams<F: Fabric> {
    shared: Arc<Shared<F>>,
    caps: Caps,
    slices_max: usize,
    own: Stream,
    forked: Option<Stream>,
    last: Ticket,
}

/// What the engine shares with the jobs on streams.
struct Shared<F: Fabric> {
    engines: Mutex<Engines<F>>,
    bell: Arc<Bell>,
}

struct Engines<F: Fabric> {
    engine: F::Engine,
    /// Opens the gates.
    keeper: F::Engine,
    /// Runs captured slices.
    replayer: F::Engine,
    /// Why a job failed.
    broken: Option<Error<F::Error>>,
    // Behind the engines, so that it goes last.
    gate: Gate<F>,
    released: bool,
    /// Counts releases: a replay that comes after one is blocked until the next.
    releases: u64,
    dropped: bool,
}

#[derive(Default)]
struct Bell {
    rung: Mutex<bool>,
    changed: Condvar,
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        *self.rung.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }
}

/// An op that has forgotten how long its regions live; `submit`'s contract says that it is long
/// enough.
enum Kept<F: Fabric> {
    Put { dst: (*const Remote<F>, u64), src: (*const Local<F>, u64), bytes: u64 },
    Get { dst: (*const Local<F>, u64), src: (*const Remote<F>, u64), bytes: u64 },
    Signal { flag: (*const Remote<F>, u64), value: u64 },
    Wait { flag: (*const Local<F>, u64), value: u64, reset: bool },
}

// SAFETY: it names regions, which are `Send` and `Sync`.
unsafe impl<F: Fabric> Send for Kept<F> {}
// SAFETY: as above.
unsafe impl<F: Fabric> Sync for Kept<F> {}

impl<F: Fabric> Kept<F> {
    fn of(op: &Op<'_, Local<F>, Remote<F>>) -> Self {
        match *op {
            Op::Put { dst, src, bytes } => {
                Self::Put { dst: (dst.region, dst.offset), src: (src.region, src.offset), bytes }
            }
            Op::Get { dst, src, bytes } => {
                Self::Get { dst: (dst.region, dst.offset), src: (src.region, src.offset), bytes }
            }
            Op::Signal { flag, value } => Self::Signal { flag: (flag.region, flag.word), value },
            Op::Wait { flag, value, reset } => {
                Self::Wait { flag: (flag.region, flag.word), value, reset }
            }
        }
    }

    /// # Safety
    /// The regions live.
    unsafe fn op<'a>(&self) -> Op<'a, Local<F>, Remote<F>> {
        match *self {
            Self::Put { dst, src, bytes } => {
                // SAFETY: the caller's.
                let to = unsafe { &*dst.0 };
                // SAFETY: the caller's.
                let from = unsafe { &*src.0 };
                let dst = At { region: to, offset: dst.1 };
                Op::Put { dst, src: At { region: from, offset: src.1 }, bytes }
            }
            Self::Get { dst, src, bytes } => {
                // SAFETY: the caller's.
                let to = unsafe { &*dst.0 };
                // SAFETY: the caller's.
                let from = unsafe { &*src.0 };
                let dst = At { region: to, offset: dst.1 };
                Op::Get { dst, src: At { region: from, offset: src.1 }, bytes }
            }
            Self::Signal { flag, value } => {
                // SAFETY: the caller's.
                let region = unsafe { &*flag.0 };
                Op::Signal { flag: Flag { region, word: flag.1 }, value }
            }
            Self::Wait { flag, value, reset } => {
                // SAFETY: the caller's.
                let region = unsafe { &*flag.0 };
                Op::Wait { flag: Flag { region, word: flag.1 }, value, reset }
            }
        }
    }
}

impl<F: Fabric> Engines<F> {
    /// Lets the slice of `ticket` go once everything before it is done; whether it is done too.
    fn advance(&mut self, ticket: Ticket, opened: &mut bool) -> Result<bool, Error<F::Error>> {
        self.keeper.completed().map_err(Error::Inner)?;
        let done = self.engine.completed().map_err(Error::Inner)?;
        if !*opened && !self.released && done.0 + 1 >= ticket.0 {
            let flag = Flag { region: self.gate.alias(), word: GATE };
            let open = [Op::Signal { flag, value: ticket.0 }];
            // SAFETY: the alias lives as long as the keeper, which is the gate's only writer.
            match unsafe { self.keeper.submit(&open) } {
                Ok(_) => *opened = true,
                Err(error) if error.kind() == ErrorKind::QueueFull => {}
                Err(error) => return Err(Error::Inner(error)),
            }
        }
        Ok(done >= ticket)
    }

    /// Runs a captured slice; its ticket, once it is submitted.
    fn replay(&mut self, slice: &[Kept<F>]) -> Result<Option<Ticket>, Error<F::Error>> {
        self.replayer.completed().map_err(Error::Inner)?;
        // SAFETY: `Streams::submit`'s contract: as long as the graph lives.
        let ops: Vec<_> = slice.iter().map(|kept| unsafe { kept.op() }).collect();
        // SAFETY: as above.
        match unsafe { self.replayer.submit(&ops) } {
            Ok(ticket) => Ok(Some(ticket)),
            Err(error) if error.kind() == ErrorKind::QueueFull => Ok(None),
            Err(error) => Err(Error::Inner(error)),
        }
    }
}

impl<F: Fabric> Shared<F> {
    fn engines(&self) -> MutexGuard<'_, Engines<F>> {
        self.engines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `step` until it says that it is done.
    fn hold(&self, mut step: impl FnMut(&mut Engines<F>) -> Result<bool, Error<F::Error>>) {
        loop {
            let mut engines = self.engines();
            match step(&mut engines) {
                Ok(true) => break,
                Ok(false) => {}
                Err(_) if engines.released => break,
                Err(error) => {
                    engines.broken.get_or_insert(error);
                    break;
                }
            }
            drop(engines);
            std::thread::sleep(LOOK_PAUSE);
        }
        Arc::clone(&self.bell).wake();
    }
}

impl<F: Fabric + 'static> Streams<F> {
    pub(super) fn new(fabric: &mut F, slices_max: usize) -> Result<Self, Error<F::Error>> {
        let mut engine = || fabric.engine(EngineRequirements::default()).map_err(Error::Inner);
        let (engine, keeper, replayer) = (engine()?, engine()?, engine()?);
        let own = *engine.caps();
        if !own.queued_wait || own.slice_ops_max < 2 {
            let text = format!("streams need queued waits and slices of two ops, seen {own:?}");
            return Err(Error::layer(ErrorKind::InvalidArgument, text));
        }
        let engines = Engines {
            engine,
            keeper,
            replayer,
            broken: None,
            gate: Gate::new(fabric)?,
            released: false,
            releases: 0,
            dropped: false,
        };
        let shared = Arc::new(Shared { engines: Mutex::new(engines), bell: Arc::default() });
        let slice_ops_max = own.slice_ops_max - 1;
        let caps = Caps { slice_ops_max, polled: false, flags_batched: true, ..own };
        let (own, forked, last) = (Stream::new(), None, Ticket::NONE);
        Ok(Self { shared, caps, slices_max, own, forked, last })
    }

    fn capture(&self, stream: &Stream, ops: &[Op<'_, Local<F>, Remote<F>>]) {
        let slice: Vec<Kept<F>> = ops.iter().map(Kept::of).collect();
        let shared = Arc::clone(&self.shared);
        stream.run(move || {
            let (mut ticket, mut releases) = (None, None);
            shared.hold(|engines| {
                let before = *releases.get_or_insert(engines.releases);
                if engines.released {
                    // It may not touch its regions any more, but is as blocked as on a device.
                    return Ok(engines.dropped || engines.releases > before);
                }
                if ticket.is_none() {
                    ticket = engines.replay(&slice)?;
                }
                let done = engines.replayer.completed().map_err(Error::Inner)?;
                Ok(ticket.is_some_and(|ticket| done >= ticket))
            });
        });
    }
}

impl<F: Fabric + 'static> CopyEngine for Streams<F> {
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
        let (seen, wanted) = (ops.len(), self.caps.slice_ops_max);
        if seen > wanted {
            let text = format!("a slice has {seen} ops, wanted at most {wanted}");
            return Err(Error::layer(ErrorKind::InvalidArgument, text));
        }
        let stream = self.forked.as_ref().unwrap_or(&self.own);
        if stream.captures() {
            self.capture(stream, ops);
            return Ok(self.last);
        }
        let mut engines = self.shared.engines();
        let open = self.last.0 - engines.engine.completed().map_err(Error::Inner)?.0;
        if open >= self.slices_max as u64 {
            let text = format!("{open} slices are open, room for {}", self.slices_max);
            return Err(Error::layer(ErrorKind::QueueFull, text));
        }
        let Engines { engine, gate, .. } = &mut *engines;
        let flag = Flag { region: gate.local(), word: GATE };
        let wait = Op::Wait { flag, value: self.last.0 + 1, reset: false };
        let gated: Vec<_> = std::iter::once(wait).chain(ops.iter().copied()).collect();
        // SAFETY: the caller's promise; the gate is boxed and lives as long as the engine, its only
        // reader.
        let ticket = unsafe { engine.submit(&gated) }.map_err(Error::Inner)?;
        drop(engines);
        self.last = ticket;
        let shared = Arc::clone(&self.shared);
        let opened = Mutex::new(false);
        stream.run(move || {
            let mut opened = opened.lock().unwrap_or_else(PoisonError::into_inner);
            shared.hold(|engines| engines.advance(ticket, &mut opened));
        });
        Ok(ticket)
    }

    fn completed(&mut self) -> Result<Ticket, Self::Error> {
        let mut engines = self.shared.engines();
        match engines.broken.take() {
            Some(error) => {
                let (kind, text) = (error.kind(), error.to_string());
                engines.broken = Some(error);
                Err(Error::layer(kind, text))
            }
            None => engines.engine.completed().map_err(Error::Inner),
        }
    }

    fn park(&mut self, limit: Duration) -> Result<(), Self::Error> {
        let bell = &self.shared.bell;
        let rung = bell.rung.lock().unwrap_or_else(PoisonError::into_inner);
        let limit = limit.min(PARK_MAX);
        let waited = bell.changed.wait_timeout_while(rung, limit, |rung| !*rung);
        *waited.unwrap_or_else(PoisonError::into_inner).0 = false;
        Ok(())
    }

    /// The streams' threads make progress.
    fn is_busy(&self) -> bool {
        false
    }

    fn waker(&self) -> Waker {
        Waker::from(Arc::clone(&self.shared.bell))
    }

    fn release(&mut self) -> Result<(), Self::Error> {
        let mut engines = self.shared.engines();
        engines.released = true;
        engines.releases += 1;
        engines.engine.release().map_err(Error::Inner)?;
        engines.replayer.release().map_err(Error::Inner)
    }

    fn streams(&mut self) -> Option<&mut dyn StreamOrdered<Error = Self::Error>> {
        Some(self)
    }
}

impl<F: Fabric + 'static> StreamOrdered for Streams<F> {
    type Error = Error<F::Error>;

    fn is_capturing(&mut self, stream: &dyn Any) -> Result<bool, Self::Error> {
        Ok(layer_stream::<F>(stream)?.captures())
    }

    fn fork(&mut self, from: &dyn Any) -> Result<(), Self::Error> {
        self.forked = Some(layer_stream::<F>(from)?.clone());
        Ok(())
    }

    fn join(&mut self, into: &dyn Any) -> Result<(), Self::Error> {
        let forked = self.forked.take();
        let into = layer_stream::<F>(into)?;
        if forked.is_some_and(|forked| forked.is(into)) {
            return Ok(());
        }
        let (shared, last) = (Arc::clone(&self.shared), self.last);
        into.run(move || {
            shared.hold(|engines| Ok(engines.engine.completed().map_err(Error::Inner)? >= last));
        });
        Ok(())
    }
}

fn layer_stream<F: Fabric>(stream: &dyn Any) -> Result<&Stream, Error<F::Error>> {
    stream_of(stream).map_err(|text| Error::layer(ErrorKind::Mismatch, text))
}

impl<F: Fabric> Drop for Streams<F> {
    fn drop(&mut self) {
        // Jobs that come later find released engines, which touch no memory.
        let due = Instant::now() + DRAIN_TIMEOUT;
        loop {
            let mut engines = self.shared.engines();
            (engines.released, engines.dropped) = (true, true);
            // Nothing can be done about an engine that is broken.
            let _ = engines.replayer.release();
            let _ = engines.engine.release();
            let done = engines.engine.completed();
            drop(engines);
            if done.is_ok_and(|done| done < self.last) && Instant::now() < due {
                std::thread::sleep(LOOK_PAUSE);
            } else {
                break;
            }
        }
    }
}

impl<F: Fabric> fmt::Debug for Streams<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Streams").field("last", &self.last).finish_non_exhaustive()
    }
}
