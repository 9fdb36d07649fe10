//! Removes capabilities from a fabric, to test the fallbacks of an executor on hardware that does
//! not need them.
//!
//! `piece_bytes_max` is not reduced here: it forbids no put, since every backend splits.

use peerlane_hal::{
    Caps, CopyEngine, EngineOffer, EngineRequirements, ErrorKind, Fabric, Op, Ticket,
};
use peerlane_toolkit::check_capabilities;

use crate::forward::{forward_streams, forward_to_engine};
use crate::{Error, Layer};

/// A layer that restricts the capabilities of every engine; by default it changes none.
#[derive(Clone, Copy, Debug)]
pub struct DowngradeLayer {
    /// Whether engines may queue waits for flags.
    pub queued_wait: bool,
    /// Whether engines may get.
    pub gets: bool,
    /// Whether engines may copy rows.
    pub rows: bool,
    /// The maximum number of ops in one `submit` call, unless the engine's own limit is lower.
    pub slice_ops_max: usize,
    /// The alignment of puts in bytes, if the engine does not require a larger one.
    pub put_align_bytes: u64,
}

impl Default for DowngradeLayer {
    fn default() -> Self {
        Self {
            queued_wait: true,
            gets: true,
            rows: true,
            slice_ops_max: usize::MAX,
            put_align_bytes: 1,
        }
    }
}

impl DowngradeLayer {
    fn caps(self, own: Caps) -> Caps {
        let put_align_bytes = own.put_align_bytes.max(self.put_align_bytes);
        assert!(put_align_bytes.is_multiple_of(own.put_align_bytes), "{self:?} over {own:?}");
        assert!(self.slice_ops_max > 0, "{self:?} leaves no op in a slice");

        Caps {
            queued_wait: own.queued_wait && self.queued_wait,
            gets: own.gets && self.gets,
            // The alignment of rows is not checked here.
            rows: own.rows && self.rows && put_align_bytes == own.put_align_bytes,
            slice_ops_max: own.slice_ops_max.min(self.slice_ops_max),
            put_align_bytes,
            ..own
        }
    }
}

// SAFETY: the engines wrap engines of the fabric.
unsafe impl<F: Fabric> Layer<F> for DowngradeLayer {
    type Engine = Downgrade<F::Engine>;

    fn engine(
        &self,
        fabric: &F,
        _: u64,
        requirements: EngineRequirements,
    ) -> Result<Self::Engine, Error<F::Error>> {
        Ok(Downgrade::new(fabric.engine(requirements).map_err(Error::Inner)?, *self))
    }

    fn offers(&self, own: Vec<EngineOffer>) -> Vec<EngineOffer> {
        let offer = |offer: EngineOffer| EngineOffer { caps: self.caps(offer.caps), ..offer };
        own.into_iter().map(offer).collect()
    }
}

/// An engine that reports and accepts fewer capabilities than its inner engine.
#[derive(Debug)]
pub struct Downgrade<E> {
    engine: E,
    caps: Caps,
}

impl<E: CopyEngine> Downgrade<E> {
    /// Restricts an engine to the capabilities that the layer allows.
    ///
    /// # Panics
    /// Panics if a limit of the layer is zero, or if its alignment is not a multiple of the
    /// engine's.
    pub fn new(engine: E, layer: DowngradeLayer) -> Self {
        let caps = layer.caps(*engine.caps());
        Self::with_caps(engine, caps)
    }

    /// Restricts an engine to `caps`, which it all has.
    pub(crate) fn with_caps(engine: E, caps: Caps) -> Self {
        Self { engine, caps }
    }

    fn check(&self, ops: &[Op<'_, E::Local, E::Remote>]) -> Result<(), Error<E::Error>> {
        let refuse = |text| Error::layer(ErrorKind::InvalidArgument, text);
        let slice_ops_max = self.caps.slice_ops_max;
        if ops.len() > slice_ops_max {
            return Err(refuse(format!(
                "a slice has {} ops, expected at most {slice_ops_max} (slice_ops_max of the \
                 engine); split it into several slices",
                ops.len()
            )));
        }

        let checked = ops.iter().try_for_each(|op| check_capabilities(&self.caps, op));
        checked.map_err(|fault| refuse(fault.to_string()))
    }
}

// SAFETY: the layer passes all calls on to an implementation that upholds the contract.
unsafe impl<E: CopyEngine> CopyEngine for Downgrade<E> {
    type Error = Error<E::Error>;
    type Local = E::Local;
    type Remote = E::Remote;

    fn caps(&self) -> &Caps {
        &self.caps
    }

    unsafe fn submit(
        &mut self,
        ops: &[Op<'_, E::Local, E::Remote>],
    ) -> Result<Ticket, Self::Error> {
        self.check(ops)?;
        // SAFETY: the caller's promise.
        unsafe { self.engine.submit(ops) }.map_err(Error::Inner)
    }

    forward_to_engine!(completed park is_busy waker release compute_bytes streams prepare_reduce);
}

forward_streams!([E: CopyEngine] Downgrade<E>);
