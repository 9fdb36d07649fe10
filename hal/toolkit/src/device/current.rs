//! Guards for what is current on a thread: a caller's thread keeps its own.

use std::marker::PhantomData;

use super::DeviceContext;

/// The context is current on this thread.
#[derive(Debug)]
pub struct Entered<'a, D: DeviceContext> {
    context: &'a D,
    /// What to put back, if it was another one.
    before: Option<D::Current>,
    /// What is current belongs to the thread.
    not_send: PhantomData<*const ()>,
}

impl<'a, D: DeviceContext> Entered<'a, D> {
    pub(super) fn begin(context: &'a D) -> Result<Self, D::Error> {
        Ok(Self { context, before: context.make_current()?, not_send: PhantomData })
    }
}

impl<D: DeviceContext> Drop for Entered<'_, D> {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            self.context.put_back(before);
        }
    }
}

/// The context is current, and captures of other threads do not see what this one does.
#[derive(Debug)]
pub struct Relaxed<'a, D: DeviceContext> {
    entered: Entered<'a, D>,
    before: D::CaptureMode,
}

impl<'a, D: DeviceContext> Relaxed<'a, D> {
    pub(super) fn begin(context: &'a D) -> Result<Self, D::Error> {
        let entered = Entered::begin(context)?;
        Ok(Self { entered, before: context.relax_captures()? })
    }
}

impl<D: DeviceContext> Drop for Relaxed<'_, D> {
    fn drop(&mut self) {
        self.entered.context.put_back_captures(self.before);
    }
}
