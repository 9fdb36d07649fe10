//! Submits messages to the engine of a channel, and counts those that are not complete.

use std::collections::VecDeque;

use peerlane_hal::{CopyEngine, Deadline, DynEngine, DynError, ErrorKind, StreamOrdered, Ticket};

use super::PARK_MAX;
use crate::bootstrap::AbortRecord;
use crate::error::Error;
use crate::group::shared::Shared;
use crate::run::port::Ops;

/// The number of slices after which a queue asks which of them are complete.
const OPEN_SLICES: usize = 64;

pub(super) struct Queue {
    pub(super) engine: DynEngine,
    pub(super) last: Ticket,
    /// The slices that may be incomplete, each with its number of messages.
    open: VecDeque<(Ticket, usize)>,
    /// The number of messages in `open`.
    pub(super) unfinished: usize,
    /// The vector is empty between calls, so that only its allocation is reused.
    pub(super) ops: Ops<'static>,
}

impl Queue {
    pub(super) fn new(engine: DynEngine) -> Self {
        let open = VecDeque::with_capacity(OPEN_SLICES);
        Self { engine, last: Ticket::NONE, open, unfinished: 0, ops: Vec::new() }
    }

    pub(super) fn streams(&mut self) -> Result<&mut dyn StreamOrdered<Error = DynError>, Error> {
        let kind = self.engine.caps().kind;
        self.engine.streams().ok_or_else(|| {
            let text =
                format!("{kind} engines cannot run on a stream; send messages from the host");
            Error::new(ErrorKind::Mismatch, text)
        })
    }

    /// Asks the engine what is complete.
    pub(super) fn poll(&mut self) -> Result<(), Error> {
        let completed = self.engine.completed();
        let completed =
            completed.map_err(|error| Error::of_fabric("query the completed tickets", error))?;
        while let Some(&(ticket, messages)) = self.open.front()
            && ticket <= completed
        {
            self.open.pop_front();
            self.unfinished -= messages;
        }
        Ok(())
    }

    /// Submits ops in slices, and waits for room in the queue of the engine.
    pub(super) fn submit(&mut self, ops: &Ops<'_>, shared: &Shared) -> Result<(), Error> {
        if self.open.len() == self.open.capacity() {
            self.poll()?;
        }
        let slice_ops_max = self.engine.caps().slice_ops_max;
        let mut deadline = None;
        for slice in ops.chunks(slice_ops_max) {
            loop {
                // SAFETY: the ranges were checked against the window, which has one size on all ranks; the window and the flags
                // live as long as the channel, and the channel longer than the graphs that record it, which the caller of
                // `Channel::capturable` guarantees. Only this engine writes these flags of the peer. What messages race with is the
                // callers', who only see bytes.
                match unsafe { self.engine.submit(slice) } {
                    Ok(ticket) => {
                        // A slice in a capture gets no ticket of its own.
                        if ticket > self.last {
                            self.last = ticket;
                            self.unfinished += slice.len();
                            self.open.push_back((ticket, slice.len()));
                        }
                        break;
                    }
                    Err(error) if peerlane_hal::Error::kind(&error) == ErrorKind::QueueFull => {}
                    Err(error) => return Err(Error::of_fabric("submit messages", error)),
                }
                shared.check()?;
                let deadline = *deadline.get_or_insert_with(|| Deadline::after(shared.timeout));
                if deadline.has_passed() {
                    let text =
                        format!("the engine has had no room for messages for {:?}", shared.timeout);
                    return Err(Error::new(ErrorKind::Timeout, text));
                }
                self.poll()?;
                let limit = deadline.remaining().min(PARK_MAX);
                self.engine
                    .park(limit)
                    .map_err(|error| Error::of_fabric("park the engine", error))?;
            }
        }
        Ok(())
    }
}

/// Ends the group if an engine has failed.
pub(super) fn fail(shared: &Shared, name: &str, error: Error) -> Error {
    if matches!(error.kind(), ErrorKind::Timeout | ErrorKind::InvalidArgument)
        || shared.check().is_err()
    {
        return shared.check().err().unwrap_or(error);
    }
    let rank = shared.bootstrap.rank();
    let (cause, peer, text) = shared.cause_of_engine(&error);
    shared.raise(AbortRecord {
        cause,
        by: Some(rank),
        operation: name.to_owned(),
        phase: "engine".to_owned(),
        ..AbortRecord::timeout(Some(peer), format!("{name}: {text}"))
    });
    shared.check().err().unwrap_or(error)
}
