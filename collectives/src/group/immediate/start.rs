//! Starts the operations of immediate calls, between the copies of their memory.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use peerlane_hal::{ErrorKind, Stream};

use super::kept::Kept;
use super::memory::Memory;
use super::staging::{Copier, Copy, CopyDirection};
use super::{Immediate, Ready, When};
use crate::error::Error;
use crate::group::operation::{OpenStart, Patience};

/// A handle to an immediate call on the host that may not be complete yet.
///
/// If it is dropped, the call goes on, and the next call or the end of the group completes it.
#[must_use = "a start is finished by `wait`"]
pub struct ImmediateStart(Arc<OpenCall>);

/// A call on the host, which its handle or the next call completes.
pub(super) struct OpenCall(Mutex<State>);

enum State {
    Open(Open),
    Complete,
    Failed(Error),
}

struct Open {
    operation: Arc<Kept>,
    start: OpenStart,
    copy_out: Option<Copy>,
    copier: Copier,
}

impl OpenCall {
    /// Waits for the call, and returns whether it is complete.
    fn wait(&self, patience: Patience) -> Result<bool, Error> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Open { operation, start, copy_out, copier } = match &*state {
            State::Open(open) => open,
            State::Complete => return Ok(true),
            State::Failed(error) => return Err(error.clone()),
        };

        let waited = operation.lock().wait_for_start(*start, patience);
        let waited = waited.and_then(|is_done| {
            if let Some(copy) = copy_out.as_ref().filter(|_| is_done) {
                // SAFETY: the start is complete and the next one needs `&mut Group`, so no rank
                // writes the output. The caller keeps others away from the memory of the call.
                unsafe { copier.copy_now(copy, CopyDirection::FromWindow) }?;
            }
            Ok(is_done)
        });

        match &waited {
            Ok(false) => {}
            Ok(true) => *state = State::Complete,
            // Nothing is copied any more, so the memory of the call is free.
            Err(error) => *state = State::Failed(error.clone()),
        }
        waited
    }

    pub(super) fn finish(&self) -> Result<(), Error> {
        self.wait(Patience::Whole).map(drop)
    }
}

impl ImmediateStart {
    /// Waits until the output is complete.
    ///
    /// # Errors
    /// As [`Operation::run`](crate::group::Operation::run).
    pub fn wait(self) -> Result<(), Error> {
        self.0.finish()
    }

    /// Waits until the output is complete, but at most for `limit`, and returns whether it is
    /// complete.
    ///
    /// A limit that passes does not end the group, unlike the timeout of the call.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub fn wait_for(&mut self, limit: Duration) -> Result<bool, Error> {
        self.0.wait(if limit.is_zero() { Patience::None } else { Patience::Limit(limit) })
    }

    /// Waits for `part` of the time in which the call may complete, as
    /// [`OwnedStart::wait_part`](crate::group::OwnedStart::wait_part).
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub fn wait_part(&mut self, part: Duration) -> Result<bool, Error> {
        self.0.wait(Patience::Part(part))
    }
}

impl fmt::Debug for ImmediateStart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ImmediateStart").finish_non_exhaustive()
    }
}

/// Starts a call on the host. Returns `None` if it would have to exchange messages but may not.
pub(super) fn try_on_host(
    mut call: Immediate<'_>,
    input: Option<Memory>,
    output: Option<Memory>,
) -> Result<Option<ImmediateStart>, Error> {
    match call.group.immediate.has_calls_on_streams {
        true => call.group.finish_immediate()?,
        false => call.group.finish_open_call()?,
    }
    let Some(ready) = call.ready(input, output, When::OnHost)? else { return Ok(None) };
    let Ready { operation, placed, .. } = ready;

    let staging = &call.group.immediate.staging;
    let copier = staging.copier();
    let copy_in = placed.copy_in;
    let start = operation.lock().start_after(|| match &copy_in {
        // SAFETY: the start has claimed its ranges of the windows, and no other start is open. The
        // caller of the call keeps others away from its memory.
        Some(copy) => unsafe { copier.copy_now(copy, CopyDirection::ToWindow) },
        None => Ok(()),
    })?;

    let open = Open { operation, start, copy_out: placed.copy_out, copier };
    let open = Arc::new(OpenCall(Mutex::new(State::Open(open))));
    call.group.immediate.open = Some(Arc::clone(&open));
    Ok(Some(ImmediateStart(open)))
}

/// Enqueues a call on a stream, or records it into the graph that the stream captures. Returns
/// false if it would have to exchange messages but may not.
pub(super) fn try_on_stream<S: Stream>(
    mut call: Immediate<'_>,
    stream: &S,
    input: Option<Memory>,
    output: Option<Memory>,
) -> Result<bool, Error> {
    call.group.finish_open_call()?;
    call.group.staging_engine()?;
    let copier = call.group.immediate.staging.copier();
    let is_recorded = copier.capture_state(stream)?.is_capturing();
    if is_recorded && !call.captures {
        let text = "the stream captures a graph, but the call is not capturable; make it with \
                    `capturable()`";
        let error = Error::new(ErrorKind::InvalidArgument, text);
        return call.refused::<()>(error).map(|_| false);
    }

    let when = if is_recorded { When::Recorded } else { When::OnStream };
    let Some(ready) = call.ready(input, output, when)? else { return Ok(false) };
    call.group.immediate.has_calls_on_streams = true;
    let Ready { operation, placed, is_staged } = ready;
    if !is_staged && placed.copy_in.is_none() {
        operation.lock().start_on_after(stream, || Ok(()))?;
        return Ok(true);
    }

    // Without a copy, an empty slice orders the start after the copies of calls on other streams,
    // and the next ones after the start.
    let [copy_in, copy_out] =
        [(&placed.copy_in, CopyDirection::ToWindow), (&placed.copy_out, CopyDirection::FromWindow)]
            .map(|(copy, direction)| copy.as_ref().map(|copy| (copy, direction)));
    operation.lock().start_on_after(stream, || {
        // SAFETY: the stream makes the copy before the start, which has claimed its ranges of the
        // windows. The owner of the memory keeps others away until the stream is done.
        unsafe { copier.copy_on(stream, copy_in) }
    })?;
    // SAFETY: the stream makes the copy after the start and before the next one, which the engine
    // for copies orders. The owner of the memory keeps others away until the stream is done.
    let copied = unsafe { copier.copy_on(stream, copy_out) };
    copied.map_err(|error| call.group.runtime.life.fail("an immediate call", error))?;
    Ok(true)
}
