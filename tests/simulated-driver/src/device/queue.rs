//! Implements a queue: a thread that runs one command after the other.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::capture::{CaptureError, Member};
use super::command::Command;
use super::completion::Completion;
use super::counters::Counter;
use super::session::Session;
use super::settings::Setting;
use super::sync::lock;

/// How a queue orders itself with the default queue of its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QueueKind {
    /// Each waits for what the other was given before.
    Blocking,
    /// Not at all.
    NonBlocking,
    Default,
}

/// Why a command was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// The queue stayed full, or did not drain, for as long as callers wait.
    TooLong,
    Capture(CaptureError),
}

impl From<CaptureError> for Refused {
    fn from(error: CaptureError) -> Self {
        Self::Capture(error)
    }
}

#[derive(Debug, Default)]
struct State {
    /// Commands with their numbers in the hardware queue.
    pending: VecDeque<(u64, Command)>,
    /// A command is out of the queue and not done.
    running: bool,
    closed: bool,
    /// The thread of the queue waits for a command.
    resting: bool,
    /// Number of callers that wait for a command to be done.
    callers: usize,
    /// Set while commands are recorded instead of run.
    member: Option<Member>,
}

#[derive(Debug)]
pub(crate) struct Queue {
    session: Arc<Session>,
    kind: QueueKind,
    /// The hardware queue.
    channel: usize,
    state: Mutex<State>,
    /// Wakes the thread of the queue.
    submitted: Condvar,
    /// Wakes callers that wait.
    done: Condvar,
}

impl Queue {
    /// Starts its thread, which ends when the queue is closed and empty.
    pub(super) fn start(session: Arc<Session>, kind: QueueKind) -> Arc<Self> {
        Counter::LiveStreams.add(session.device(), 1);
        let (channel, state) = (session.channel(), Mutex::default());
        let (submitted, done) = (Condvar::new(), Condvar::new());
        let queue = Arc::new(Self { session, kind, channel, state, submitted, done });
        let worker = queue.clone();
        let name = format!("sim-queue-{}", queue.session.device());
        std::thread::Builder::new()
            .name(name)
            .stack_size(256 << 10)
            .spawn(move || worker.work())
            .expect("a thread for a simulated queue");
        queue
    }

    pub(crate) fn session(&self) -> &Arc<Session> {
        &self.session
    }

    pub(crate) fn kind(&self) -> QueueKind {
        self.kind
    }

    fn work(&self) {
        let mut state = lock(&self.state);
        loop {
            let Some((number, command)) = state.pending.pop_front() else {
                if state.closed {
                    return;
                }
                state.resting = true;
                state = self.submitted.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.resting = false;
                continue;
            };
            state.running = true;
            drop(state);
            self.session.wait_for_turn(self.channel, number);
            self.session.wait_until_free();
            if self.session.fault().is_some() {
                command.abandon();
            } else if let Err(fault) = command.run(&self.session) {
                self.session.break_with(fault);
                command.abandon();
            }
            // What the command held goes before anybody hears that it is done.
            drop(command);
            self.session.leave_channel(self.channel, number);
            state = lock(&self.state);
            state.running = false;
            // A notification is a system call even if nobody waits.
            if state.callers > 0 {
                self.done.notify_all();
            }
        }
    }

    /// Takes no more; what was taken is still done.
    pub(crate) fn close(&self) {
        let mut state = lock(&self.state);
        if !state.closed {
            state.closed = true;
            Counter::LiveStreams.add(self.session.device(), -1);
        }
        self.submitted.notify_one();
    }

    /// Takes a command: into the capture, if there is one, or to be run.
    pub(crate) fn submit(&self, command: Command) -> Result<(), Refused> {
        self.session.wait_until_open();
        self.order_with_default()?;
        let mut state = lock(&self.state);
        if let Some(member) = &mut state.member {
            member.record(command, &self.session)?;
            return Ok(());
        }
        self.push(state, command)
    }

    /// Takes a command to be run, whatever is captured.
    fn submit_now(&self, command: Command) -> Result<(), Refused> {
        self.push(lock(&self.state), command)
    }

    fn push(&self, mut state: MutexGuard<'_, State>, command: Command) -> Result<(), Refused> {
        let full = |state: &State| state.pending.len() as u64 >= Setting::QueueLength.value();
        let deadline = patience();
        while full(&state) {
            state = self.wait_until(state, deadline).ok_or(Refused::TooLong)?;
        }
        let number = self.session.enter_channel(self.channel);
        state.pending.push_back((number, command));
        let is_resting = state.resting;
        // The woken thread takes the lock at once.
        drop(state);
        if is_resting {
            self.submitted.notify_one();
        }
        Ok(())
    }

    /// The default queue and the blocking ones wait for what each was given before.
    fn order_with_default(&self) -> Result<(), Refused> {
        let others = match self.kind {
            QueueKind::NonBlocking => return Ok(()),
            QueueKind::Blocking => Vec::from_iter(self.session.existing_default_queue()),
            QueueKind::Default => {
                let mut queues = self.session.queues();
                queues.retain(|queue| queue.kind == QueueKind::Blocking);
                queues
            }
        };
        for other in others {
            if self.is_capturing() {
                continue;
            }
            if other.is_capturing() {
                other.invalidate_capture();
                return Err(CaptureError::Implicit.into());
            }
            if !other.is_idle() {
                let completion = Arc::new(Completion::default());
                other.submit_now(Command::Finish(completion.clone()))?;
                self.submit_now(Command::Await(completion))?;
            }
        }
        Ok(())
    }

    pub(crate) fn is_idle(&self) -> bool {
        let state = lock(&self.state);
        state.pending.is_empty() && !state.running
    }

    /// Waits until everything that was taken is done.
    pub(crate) fn drain(&self) -> Result<(), Refused> {
        let deadline = patience();
        let mut state = lock(&self.state);
        while !state.pending.is_empty() || state.running {
            state = self.wait_until(state, deadline).ok_or(Refused::TooLong)?;
        }
        Ok(())
    }

    /// Waits until a command is done; `None` after the deadline.
    fn wait_until<'a>(
        &self,
        mut state: MutexGuard<'a, State>,
        deadline: Instant,
    ) -> Option<MutexGuard<'a, State>> {
        let left = deadline.checked_duration_since(Instant::now()).filter(|it| !it.is_zero())?;
        state.callers += 1;
        let waited = self.done.wait_timeout(state, left);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        state.callers -= 1;
        Some(state)
    }

    /// Looks at the queue's part in a capture, or changes it.
    pub(crate) fn with_member<T>(&self, look: impl FnOnce(&mut Option<Member>) -> T) -> T {
        look(&mut lock(&self.state).member)
    }

    pub(crate) fn is_capturing(&self) -> bool {
        self.with_member(|member| member.is_some())
    }

    pub(crate) fn invalidate_capture(&self) {
        self.with_member(|member| {
            if let Some(member) = member {
                member.capture().invalidate();
            }
        });
    }

    /// For calls that a captured queue cannot answer: they spoil its capture.
    pub(crate) fn refuse_while_capturing(&self) -> Result<(), CaptureError> {
        if self.is_capturing() {
            self.invalidate_capture();
            return Err(CaptureError::Unsupported);
        }
        Ok(())
    }
}

/// When a caller that waits from now on gives up.
pub(crate) fn patience() -> Instant {
    Instant::now() + Duration::from_millis(Setting::PatienceMillis.value())
}
