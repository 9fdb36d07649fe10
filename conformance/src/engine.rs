//! Wraps an engine for checks: bounded waiting, and short constructors for ops.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use peerlane_hal::{At, Caps, CopyEngine, Error, ErrorKind, Flag, Op, Region, Rows, Ticket};

use crate::failure::{Failure, Outcome, ensure};
use crate::harness::{EngineOf, ErrorOf, Harness, LocalOf, RemoteOf};
use crate::ranks::{Participant, Rendezvous, TimeLimit, Window};

/// An op of a harness's engine.
pub(crate) type OpOf<'r, H> = Op<'r, LocalOf<H>, RemoteOf<H>>;

/// Limit of one park in a loop that also checks other conditions.
const PARK: Duration = Duration::from_millis(1);

fn at<R>((region, offset): (&R, u64)) -> At<'_, R> {
    At { region, offset }
}

pub(crate) fn put<'r, L, R>(dst: (&'r R, u64), src: (&'r L, u64), bytes: u64) -> Op<'r, L, R> {
    Op::Put { dst: at(dst), src: at(src), bytes }
}

pub(crate) fn get<'r, L, R>(dst: (&'r L, u64), src: (&'r R, u64), bytes: u64) -> Op<'r, L, R> {
    Op::Get { dst: at(dst), src: at(src), bytes }
}

pub(crate) fn rows_to<'r, L, R>(
    dst: (&'r R, u64),
    src: (&'r L, u64),
    bytes: u64,
    rows: Rows,
) -> Op<'r, L, R> {
    Op::PutRows { dst: at(dst), src: at(src), bytes, rows }
}

pub(crate) fn rows_from<'r, L, R>(
    dst: (&'r L, u64),
    src: (&'r R, u64),
    bytes: u64,
    rows: Rows,
) -> Op<'r, L, R> {
    Op::GetRows { dst: at(dst), src: at(src), bytes, rows }
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

/// Returns a flag as the host sees it, or `None` if the host cannot load it.
pub(crate) fn word<R: Region>(region: &R, word: u64) -> Option<&AtomicU64> {
    region.flags()?.get(usize::try_from(word).ok()?)
}

/// Drives an engine for a check; `'r` is the lifetime of every region that its ops name.
pub(crate) struct TestEngine<'r, 'w, H: Harness> {
    pub(crate) inner: EngineOf<H>,
    pub(crate) harness: &'w H,
    pub(crate) rendezvous: &'w Rendezvous,
    pub(crate) regions: PhantomData<&'r ()>,
}

impl<'r, 'w, H: Harness> TestEngine<'r, 'w, H> {
    pub(crate) fn caps(&self) -> Caps {
        *self.inner.caps()
    }

    pub(crate) fn time_limit(&self, what: impl Into<String>) -> TimeLimit<'w> {
        self.rendezvous.time_limit(self.harness, what)
    }

    /// Submits one slice and returns the engine's result.
    pub(crate) fn try_submit(&mut self, ops: &[OpOf<'r, H>]) -> Result<Ticket, ErrorOf<H>> {
        // SAFETY: `Drop` below makes the compiler check that all regions (`'r`) outlive the engine.
        // Every check in this crate keeps the other rules: from the submission to the completion (or, on
        // a peer, to the flag) that the check relies on, a source is not written and a destination not
        // touched; each flag has one writer and one reader.
        unsafe { self.inner.submit(ops) }
    }

    /// Submits one slice, without waiting for room in the queue.
    pub(crate) fn submit_now(&mut self, ops: &[OpOf<'r, H>]) -> Outcome<Ticket> {
        self.try_submit(ops).map_err(|e| Failure::from(e).within("submit"))
    }

    /// Submits one slice as soon as the queue has room.
    pub(crate) fn submit(&mut self, ops: &[OpOf<'r, H>]) -> Outcome<Ticket> {
        let time_limit = self.time_limit(format!("room for {} ops", ops.len()));
        loop {
            match self.try_submit(ops) {
                Err(error) if error.kind() == ErrorKind::QueueFull => {
                    let done = self.completed()?;
                    time_limit.check(|| format!("{error}, completed {}", done.0))?;
                    self.inner.park(PARK)?;
                }
                answer => return answer.map_err(|e| Failure::from(e).within("submit")),
            }
        }
    }

    /// Submits any number of ops in as many slices as they need. Returns the last ticket.
    pub(crate) fn submit_all(&mut self, ops: &[OpOf<'r, H>]) -> Outcome<Ticket> {
        let mut last = self.submit(&[])?;
        for slice in ops.chunks(self.caps().slice_ops_max) {
            last = self.submit(slice)?;
        }
        Ok(last)
    }

    /// Submits as many ops as the queue takes without progress. Returns the last ticket and the
    /// remaining ops.
    ///
    /// For ops behind a wait that is not yet satisfied.
    pub(crate) fn submit_held<'o>(
        &mut self,
        ops: &'o [OpOf<'r, H>],
    ) -> Outcome<(Ticket, &'o [OpOf<'r, H>])> {
        let mut last = Ticket::NONE;
        let mut rest = ops;
        while !rest.is_empty() {
            let (slice, remaining) = rest.split_at(self.caps().slice_ops_max.min(rest.len()));
            last = match self.try_submit(slice) {
                Err(error) if error.kind() == ErrorKind::QueueFull => break,
                answer => answer?,
            };
            rest = remaining;
        }
        Ok((last, rest))
    }

    pub(crate) fn completed(&mut self) -> Outcome<Ticket> {
        self.inner.completed().map_err(|e| Failure::from(e).within("completed"))
    }

    /// Polls the engine until the ticket is complete.
    pub(crate) fn finish(&mut self, ticket: Ticket) -> Outcome {
        let time_limit = self.time_limit(format!("ticket {} to complete", ticket.0));
        loop {
            let done = self.completed()?;
            if done >= ticket {
                return Ok(());
            }
            time_limit.check(|| format!("completed ticket {}", done.0))?;
            self.inner.park(PARK)?;
        }
    }

    /// Submits the ops and waits until they are complete.
    pub(crate) fn run(&mut self, ops: &[OpOf<'r, H>]) -> Outcome {
        let ticket = self.submit_all(ops)?;
        self.finish(ticket)
    }

    /// Polls the engine for `time`; `quiet` fails if an op took effect that must not.
    pub(crate) fn watch(&mut self, time: Duration, quiet: impl Fn(Ticket) -> Outcome) -> Outcome {
        let start = Instant::now();
        while start.elapsed() < time {
            let done = self.completed()?;
            quiet(done)?;
            self.inner.park(PARK)?;
        }
        Ok(())
    }

    /// Waits until the flag has the value: by loads of the host if it can, else by a wait of the
    /// engine.
    pub(crate) fn wait_for_flag(&mut self, flags: &'r LocalOf<H>, at: u64, value: u64) -> Outcome {
        let Some(flag) = word(flags, at) else {
            ensure!(
                self.caps().queued_wait,
                "the flag cannot be observed: the host cannot load it, and the engine has no \
                 queued_wait"
            );
            return self.run(&[wait(flags, at, value)]);
        };

        let time_limit = self.time_limit(format!("flag {at} to reach the value {value}"));
        loop {
            let seen = flag.load(Ordering::Acquire);
            if seen >= value {
                return Ok(());
            }
            self.completed()?;
            time_limit.check(|| format!("value {seen}"))?;
            self.inner.park(PARK)?;
        }
    }

    /// Signals the flag of this rank on every rank, and waits for the flags of all ranks. What the engines that take part have put
    /// before has then arrived; a completed ticket does not tell that.
    pub(crate) fn wait_for_peers(
        &mut self,
        me: &Participant<'_, H>,
        arrived: &'r Window<H>,
    ) -> Outcome {
        let signals: Vec<OpOf<'r, H>> =
            arrived.remote.iter().map(|flags| signal(flags, me.me as u64, 1)).collect();
        self.run(&signals)?;
        (0..me.ranks as u64).try_for_each(|peer| self.wait_for_flag(&arrived.local, peer, 1))
    }

    /// Returns a wait to submit in front of the next ops. If the engine cannot queue waits, waits
    /// here until the flag has the value, as an executor does, and returns `None`.
    pub(crate) fn wait_op(
        &mut self,
        flags: &'r LocalOf<H>,
        at: u64,
        value: u64,
    ) -> Outcome<Option<OpOf<'r, H>>> {
        if self.caps().queued_wait {
            return Ok(Some(wait(flags, at, value)));
        }
        self.wait_for_flag(flags, at, value).map(|()| None)
    }
}

impl<H: Harness> Drop for TestEngine<'_, '_, H> {
    fn drop(&mut self) {
        // A failed check may leave ops in the queue; their result is not needed.
        let _ = self.inner.release();
    }
}
