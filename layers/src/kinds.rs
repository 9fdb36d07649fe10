//! Offers the engines of a fabric as several kinds, to test the choice between kinds on hardware
//! that has one.

use peerlane_hal::{EngineOffer, EngineRequirements, ErrorKind, Fabric, Rank};

use crate::{Downgrade, Error, Layer};

/// A layer that offers several kinds of engines, which are all made of the kind that the fabric
/// prefers.
#[derive(Clone, Copy, Debug)]
pub struct KindsLayer {
    /// Returns the offers for the first one of the fabric. They may differ from it by the name of
    /// the kind, by rates, by blocks, and by capabilities that they lack.
    pub kinds: fn(EngineOffer) -> Vec<EngineOffer>,
    /// The kind that one rank offers but cannot create.
    pub refused: Option<(Rank, &'static str)>,
}

// SAFETY: the engines wrap engines of the fabric.
unsafe impl<F: Fabric> Layer<F> for KindsLayer {
    type Engine = Downgrade<F::Engine>;

    fn engine(
        &self,
        fabric: &F,
        _: u64,
        requirements: EngineRequirements,
    ) -> Result<Self::Engine, Error<F::Error>> {
        let offers = fabric.offers().map_err(Error::Inner)?;
        let offers = Layer::<F>::offers(self, offers);
        let invalid = |text| Error::layer(ErrorKind::InvalidArgument, text);
        let offer = requirements.select(&offers).map_err(invalid)?;
        if self.refused == Some((fabric.rank(), offer.kind())) {
            let text = format!("the layer refuses engines of the kind {}", offer.kind());
            return Err(Error::layer(ErrorKind::Unavailable, text));
        }

        let requirements = EngineRequirements { kind: None, ..requirements };
        let engine = fabric.engine(requirements).map_err(Error::Inner)?;
        Ok(Downgrade::with_caps(engine, offer.caps))
    }

    fn offers(&self, own: Vec<EngineOffer>) -> Vec<EngineOffer> {
        own.first().map(|&offer| (self.kinds)(offer)).unwrap_or_default()
    }
}
