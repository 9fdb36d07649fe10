//! Implements events: points in the work of a queue that other queues and callers wait for.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::capture::{Capture, CaptureError, join};
use super::command::Command;
use super::completion::Completion;
use super::counters::Counter;
use super::queue::{Queue, Refused, patience};
use super::session::Session;
use super::sync::lock;

#[derive(Clone, Debug)]
enum State {
    Never,
    Recorded(Arc<Completion>),
    /// Recorded in a capture, after these nodes.
    Captured(Arc<Capture>, Vec<usize>),
}

#[derive(Debug)]
pub(crate) struct Event {
    session: Arc<Session>,
    /// True if the event keeps its time.
    timed: bool,
    state: Mutex<State>,
}

impl Event {
    pub(crate) fn new(session: Arc<Session>, timed: bool) -> Arc<Self> {
        Counter::LiveEvents.add(session.device(), 1);
        Arc::new(Self { session, timed, state: Mutex::new(State::Never) })
    }

    pub(crate) fn session(&self) -> &Arc<Session> {
        &self.session
    }

    pub(crate) fn is_timed(&self) -> bool {
        self.timed
    }

    /// Records the commands that the queue holds now.
    pub(crate) fn record(&self, queue: &Queue) -> Result<(), Refused> {
        let captured = queue.with_member(|member| {
            let member = member.as_ref()?;
            Some((member.capture().clone(), member.tail().to_vec()))
        });
        let state = match captured {
            Some((capture, _)) if capture.is_invalid() => {
                return Err(CaptureError::Invalidated.into());
            }
            Some((capture, tail)) => State::Captured(capture, tail),
            None => {
                let completion = Arc::new(Completion::default());
                queue.submit(Command::Finish(completion.clone()))?;
                State::Recorded(completion)
            }
        };
        *lock(&self.state) = state;
        Ok(())
    }

    /// Blocks the queue until the recorded commands are done.
    pub(crate) fn hold(&self, queue: &Arc<Queue>) -> Result<(), Refused> {
        let state = lock(&self.state).clone();
        match state {
            State::Captured(capture, nodes) if capture.is_active() => {
                Ok(join(queue, &capture, &nodes)?)
            }
            // Commands outside a capture cannot be waited for inside it.
            _ if queue.is_capturing() => {
                queue.invalidate_capture();
                Err(CaptureError::Isolation.into())
            }
            State::Captured(..) => Err(CaptureError::CapturedEvent.into()),
            State::Never => Ok(()),
            State::Recorded(completion) if completion.is_done() => Ok(()),
            State::Recorded(completion) => queue.submit(Command::Await(completion)),
        }
    }

    /// Returns whether the recorded commands are done; true for an event that was never recorded.
    pub(crate) fn is_done(&self) -> Result<bool, CaptureError> {
        match &*lock(&self.state) {
            State::Never => Ok(true),
            State::Recorded(completion) => Ok(completion.is_done()),
            State::Captured(capture, _) => {
                capture.invalidate();
                Err(CaptureError::CapturedEvent)
            }
        }
    }

    /// Waits until it is done.
    pub(crate) fn wait(&self) -> Result<(), Refused> {
        self.is_done()?;
        let State::Recorded(completion) = lock(&self.state).clone() else { return Ok(()) };
        let deadline = patience();
        let done = completion.wait(|| Instant::now() >= deadline);
        if done { Ok(()) } else { Err(Refused::TooLong) }
    }

    /// Returns when it was done; `None` if it was never recorded.
    pub(crate) fn at(&self) -> Option<Option<Instant>> {
        match &*lock(&self.state) {
            State::Recorded(completion) => Some(completion.at()),
            _ => None,
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        Counter::LiveEvents.add(self.session.device(), -1);
    }
}
