//! Gives engines streams and captured graphs, so that what runs on a caller's stream can be tested
//! where no device is.
//!
//! A [`Stream`] is a thread that does one thing after the other. A slice is handed to the engine
//! below at once, behind a queued wait of its own; the stream opens that gate when it comes to the
//! slice, and goes on when the slice is complete. So the backend itself keeps the contract, and a
//! stream that is held up holds up its slices. Captured slices are submitted at each replay, to an
//! engine of their own, since they must not stand behind gates that are opened later.

mod engine;
mod queue;

use peerlane_hal::{EngineRequirements, Fabric};

pub use engine::Streams;
pub use queue::{Graph, Stream};

use crate::{Error, Layer};

/// Gives streams to all engines of a fabric.
#[derive(Clone, Copy, Debug)]
pub struct StreamLayer {
    /// Slices that a queue holds.
    pub slices_max: usize,
}

impl Default for StreamLayer {
    fn default() -> Self {
        Self { slices_max: 256 }
    }
}

impl<F: Fabric + 'static> Layer<F> for StreamLayer {
    type Engine = Streams<F>;

    fn engine(
        &mut self,
        fabric: &mut F,
        _: EngineRequirements,
    ) -> Result<Self::Engine, Error<F::Error>> {
        Streams::new(fabric, self.slices_max)
    }
}
