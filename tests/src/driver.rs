//! An engine in the hands of a check: bounded waiting, and short words for ops.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use peerlane_hal::{At, Caps, CopyEngine, Error, ErrorKind, Flag, Op, Region, Ticket};

use crate::board::{Board, Patience};
use crate::failure::{Failure, Outcome, ensure};
use crate::harness::{EngineOf, ErrorOf, Harness, LocalOf, RemoteOf};

/// An op of a harness's engine.
pub(crate) type OpOf<'r, H> = Op<'r, LocalOf<H>, RemoteOf<H>>;

/// One park of a loop that has other things to look at too.
const PARK: Duration = Duration::from_millis(1);

pub(crate) fn put<'r, L, R>(
    (dst, to): (&'r R, u64),
    (src, from): (&'r L, u64),
    bytes: u64,
) -> Op<'r, L, R> {
    let (dst, src) = (At { region: dst, offset: to }, At { region: src, offset: from });
    Op::Put { dst, src, bytes }
}

pub(crate) fn get<'r, L, R>(
    (dst, to): (&'r L, u64),
    (src, from): (&'r R, u64),
    bytes: u64,
) -> Op<'r, L, R> {
    let (dst, src) = (At { region: dst, offset: to }, At { region: src, offset: from });
    Op::Get { dst, src, bytes }
}

pub(crate) fn signal<L, R>(region: &R, word: u64, value: u64) -> Op<'_, L, R> {
    Op::Signal { flag: Flag { region, word }, value }
}

pub(crate) fn wait<L, R>(region: &L, word: u64, value: u64) -> Op<'_, L, R> {
    Op::Wait { flag: Flag { region, word }, value, reset: false }
}

pub(crate) fn wait_reset<L, R>(region: &L, word: u64, value: u64) -> Op<'_, L, R> {
    Op::Wait { flag: Flag { region, word }, value, reset: true }
}

/// The flag as the host sees it.
pub(crate) fn word<R: Region>(region: &R, word: u64) -> Option<&AtomicU64> {
    region.flags()?.get(usize::try_from(word).ok()?)
}

/// An engine of a check; `'r` is the life of every region that its ops name.
pub(crate) struct Driver<'r, 'w, H: Harness> {
    pub(crate) engine: EngineOf<H>,
    pub(crate) harness: &'w H,
    pub(crate) board: &'w Board,
    pub(crate) regions: PhantomData<&'r ()>,
}

impl<'r, 'w, H: Harness> Driver<'r, 'w, H> {
    pub(crate) fn caps(&self) -> Caps {
        *self.engine.caps()
    }

    pub(crate) fn patience(&self, what: impl Into<String>) -> Patience<'w> {
        self.board.patience(what)
    }

    /// One slice, as the engine answers.
    pub(crate) fn try_submit(&mut self, ops: &[OpOf<'r, H>]) -> Result<Ticket, ErrorOf<H>> {
        // SAFETY: `Drop` below makes the compiler check that all regions (`'r`) outlive the engine.
        // The rest is the rule of every check in this crate: a source is not written, and a
        // destination not touched, from its submission to the completion (or, on a peer, to the
        // flag) that the check relies on; each flag has one writer and one reader.
        unsafe { self.engine.submit(ops) }
    }

    /// One slice, at once.
    pub(crate) fn submit_now(&mut self, ops: &[OpOf<'r, H>]) -> Outcome<Ticket> {
        self.try_submit(ops).map_err(|e| Failure::from(e).within("submit"))
    }

    /// One slice, as soon as the queue has room.
    pub(crate) fn submit(&mut self, ops: &[OpOf<'r, H>]) -> Outcome<Ticket> {
        let patience = self.patience(format!("room for {} ops", ops.len()));
        loop {
            match self.try_submit(ops) {
                Err(error) if error.kind() == ErrorKind::QueueFull => {
                    let done = self.completed()?;
                    patience.check(|| format!("{error}, completed {}", done.0))?;
                    self.engine.park(PARK)?;
                }
                answer => return answer.map_err(|e| Failure::from(e).within("submit")),
            }
        }
    }

    /// Any number of ops, in as many slices as they need; the last ticket.
    pub(crate) fn submit_all(&mut self, ops: &[OpOf<'r, H>]) -> Outcome<Ticket> {
        let mut last = self.submit(&[])?;
        for slice in ops.chunks(self.caps().slice_ops_max) {
            last = self.submit(slice)?;
        }
        Ok(last)
    }

    /// As many ops as the queue takes without anything in it moving on; the last ticket, and the
    /// rest. For ops behind a wait that nobody has satisfied yet.
    pub(crate) fn submit_held<'o>(
        &mut self,
        ops: &'o [OpOf<'r, H>],
    ) -> Outcome<(Ticket, &'o [OpOf<'r, H>])> {
        let mut last = Ticket::NONE;
        let mut rest = ops;
        while !rest.is_empty() {
            let (slice, behind) = rest.split_at(self.caps().slice_ops_max.min(rest.len()));
            last = match self.try_submit(slice) {
                Err(error) if error.kind() == ErrorKind::QueueFull => break,
                answer => answer?,
            };
            rest = behind;
        }
        Ok((last, rest))
    }

    pub(crate) fn completed(&mut self) -> Outcome<Ticket> {
        self.engine.completed().map_err(|e| Failure::from(e).within("completed"))
    }

    /// Drives the engine until the ticket is complete.
    pub(crate) fn finish(&mut self, ticket: Ticket) -> Outcome {
        let patience = self.patience(format!("ticket {} to complete", ticket.0));
        loop {
            let done = self.completed()?;
            if done >= ticket {
                return Ok(());
            }
            patience.check(|| format!("ticket {}", done.0))?;
            self.engine.park(PARK)?;
        }
    }

    /// Submits and finishes.
    pub(crate) fn run(&mut self, ops: &[OpOf<'r, H>]) -> Outcome {
        let ticket = self.submit_all(ops)?;
        self.finish(ticket)
    }

    /// Drives the engine for a while; `quiet` fails if something moved that must not.
    pub(crate) fn stays(&mut self, time: Duration, quiet: impl Fn(Ticket) -> Outcome) -> Outcome {
        let start = Instant::now();
        while start.elapsed() < time {
            let done = self.completed()?;
            quiet(done)?;
            self.engine.park(PARK)?;
        }
        Ok(())
    }

    /// Returns once the flag has the value: seen by the host where it can, else by the engine.
    pub(crate) fn reach(&mut self, flags: &'r LocalOf<H>, at: u64, value: u64) -> Outcome {
        let Some(flag) = word(flags, at) else {
            ensure!(self.caps().queued_wait, "flags are neither seen by the host nor waited for");
            return self.run(&[wait(flags, at, value)]);
        };
        let patience = self.patience(format!("flag {at} to be {value}"));
        loop {
            let seen = flag.load(Ordering::Acquire);
            if seen >= value {
                return Ok(());
            }
            self.completed()?;
            patience.check(|| seen.to_string())?;
            self.engine.park(PARK)?;
        }
    }

    /// A wait in front of what is submitted next: queued where the engine can, else over when this
    /// returns, as an executor does it.
    pub(crate) fn hold(
        &mut self,
        flags: &'r LocalOf<H>,
        at: u64,
        value: u64,
    ) -> Outcome<Option<OpOf<'r, H>>> {
        if self.caps().queued_wait {
            return Ok(Some(wait(flags, at, value)));
        }
        self.reach(flags, at, value).map(|()| None)
    }
}

impl<H: Harness> Drop for Driver<'_, '_, H> {
    fn drop(&mut self) {
        // What a failed check has left in the queue is of no use to anybody.
        let _ = self.engine.release();
    }
}
