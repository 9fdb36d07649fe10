//! The engine's work on the caller's stream.

use std::sync::Arc;

use super::Engine;
use super::abilities::StreamDevice;
use super::stream::Stream;
use crate::device::Fault;

/// The caller's stream that is the main stream now.
#[derive(Debug)]
pub(super) struct Forked {
    pub(super) stream: Stream,
    /// Streams beside it, if it captures.
    pub(super) captured: Option<usize>,
}

impl<D: StreamDevice> Engine<D> {
    /// # Errors
    /// As [`CopyEngine::is_capturing`](peerlane_hal::CopyEngine::is_capturing).
    pub fn is_capturing(&mut self, stream: &Stream) -> Result<bool, D::Error> {
        self.poison.check()?;
        let _entered = self.context.enter()?;
        stream.check(&*self.context)?;
        stream.is_capturing(&*self.context)
    }

    /// # Errors
    /// As [`CopyEngine::fork`](peerlane_hal::CopyEngine::fork).
    pub fn fork(&mut self, from: &Stream) -> Result<(), D::Error> {
        self.poison.check()?;
        let _entered = self.context.enter()?;
        self.forked = None;
        from.check(&*self.context)?;
        let captured = if from.is_capturing(&*self.context)? {
            self.capture_ability.clone()?;
            let sides = self.routes.sides().min(self.abilities.captured_sides_max);
            Some(self.hardware.captures.begin(&self.context, from, sides)?)
        } else {
            None
        };
        self.forked = Some(Forked { stream: from.clone(), captured });
        Ok(())
    }

    /// # Errors
    /// As [`CopyEngine::join`](peerlane_hal::CopyEngine::join).
    pub fn join(&mut self, into: &Stream) -> Result<(), D::Error> {
        let forked = self.forked.take();
        self.poison.check()?;
        let context = Arc::clone(&self.context);
        let _entered = context.enter()?;
        match forked {
            // Everything is on that stream already.
            Some(Forked { stream, .. }) if stream.raw() == into.raw() => Ok(()),
            Some(Forked { stream, captured: Some(_) }) => {
                into.check(&*context)?;
                self.hardware.joined.order(&context, stream.raw(), into.raw())
            }
            _ => {
                into.check(&*context)?;
                self.join_eager(into)
            }
        }
    }

    /// What `into` gets next comes after the last ticket.
    fn join_eager(&mut self, into: &Stream) -> Result<(), D::Error> {
        self.settle()?;
        if self.pending.is_empty() {
            return Ok(());
        }
        if into.is_capturing(&*self.context)? {
            return Err(Fault::Mismatch(format!(
                "{into:?} captures, and work that was submitted before is still running: it cannot \
                 become part of the graph; fork from the stream that captures"
            ))
            .into());
        }
        self.hardware.tickets.order(&self.context, into.raw())
    }
}
