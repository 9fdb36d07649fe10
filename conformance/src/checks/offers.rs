//! Checks contract 16: offers.

use peerlane_hal::{CopyEngine, EngineRequirements, Error, ErrorKind, Fabric};

use crate::data::aligned;
use crate::engine::{OpOf, put, signal};
use crate::failure::{Failure, Outcome, ensure};
use crate::harness::{EngineOf, FabricOf, Harness};
use crate::ranks::on_each;

/// Creates an engine of each kind that the fabric offers, and compares it with the offer.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn an_engine_is_what_its_fabric_offers<H: Harness>(harness: &H) -> Outcome {
    on_each(harness, [1, 2], |me| {
        let offers = me.fabric.offers().map_err(|e| Failure::from(e).within("offers"))?;
        ensure!(!offers.is_empty(), "the fabric offers no engine, expected at least one kind");

        for (index, offer) in offers.iter().enumerate() {
            let kind = offer.kind();
            let named_before = offers[..index].iter().any(|other| other.kind() == kind);
            ensure!(!named_before, "two kinds of engines have the name {kind:?}");

            let mut engine = of_kind::<H>(&me.fabric, Some(kind), false)?;
            let caps = *engine.caps();
            ensure!(caps == offer.caps, "an engine has {caps:?}, but {:?} is offered", offer.caps);
            let (streams, offered) = (engine.streams().is_some(), offer.streams);
            ensure!(streams == offered, "streams of {kind}: {streams}, but {offered} is offered");
        }

        // Without streams the first kind is the one that is preferred.
        let requirements = EngineRequirements { streams: false, ..Default::default() };
        let preferred = me.fabric.engine(requirements);
        let preferred = *preferred.map_err(|e| Failure::from(e).within("engine"))?.caps();
        let first = offers[0].caps;
        ensure!(preferred == first, "an engine of any kind has {preferred:?}, expected {first:?}");

        let later = me.fabric.offers().map_err(|e| Failure::from(e).within("offers"))?;
        ensure!(later == offers, "the offers changed from {offers:?} to {later:?}");
        me.barrier()
    })
}

/// Asks for an engine of a kind that the fabric does not offer.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_kind_that_is_not_offered_is_refused<H: Harness>(harness: &H) -> Outcome {
    on_each(harness, [1, 2], |me| {
        let kind = Some("of no backend");
        let refused = me.fabric.engine(EngineRequirements { kind, ..Default::default() });
        let refused = refused.map(|engine| engine.caps().kind);

        match refused {
            Err(error) if error.kind() == ErrorKind::InvalidArgument => {}
            Err(error) => {
                let found = error.kind();
                return Err(Failure::new(format!("{error}: {found}, expected InvalidArgument")));
            }
            Ok(found) => {
                let text = format!("an engine of a kind that is not offered has the kind {found}");
                return Err(Failure::new(text));
            }
        }

        me.barrier()
    })
}

/// Compares what compute units would copy of a slice with and without the requirement, for each
/// kind of engines.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn an_engine_beside_compute_copies_no_more_by_compute_units<H: Harness>(
    harness: &H,
) -> Outcome {
    on_each(harness, [1, 2, 3], |me| {
        let offers = me.fabric.offers().map_err(|e| Failure::from(e).within("offers"))?;
        let longest = aligned(&me.caps, 4 << 20);
        let (source, landing) = (me.bytes(longest)?, me.bytes(longest)?);
        let flags = me.flags(1)?;

        for bytes in [64, 64 << 10, 4 << 20].map(|bytes| aligned(&me.caps, bytes)) {
            let from = (&source.local, 0);
            let puts = (0..me.ranks).map(|rank| put((&landing.remote[rank], 0), from, bytes));
            let signals = (0..me.ranks).map(|rank| signal(&flags.remote[rank], 0, 1));
            let ops: Vec<OpOf<'_, H>> = puts.chain(signals).collect();
            for offer in &offers {
                let kind = offer.kind();
                let mut plain = of_kind::<H>(&me.fabric, Some(kind), false)?;
                let mut beside = of_kind::<H>(&me.fabric, Some(kind), true)?;
                let [plain, beside] =
                    [&mut plain, &mut beside].map(|engine| engine.compute_bytes(&ops, false));
                ensure!(
                    beside <= plain,
                    "puts of {bytes} bytes to {} ranks by {kind}: compute units copy {beside} bytes beside \
                     compute, and {plain} otherwise",
                    me.ranks
                );
            }
        }
        me.barrier()
    })
}

fn of_kind<H: Harness>(
    fabric: &FabricOf<H>,
    kind: Option<&'static str>,
    beside_compute: bool,
) -> Outcome<EngineOf<H>> {
    let requirements = EngineRequirements { kind, beside_compute, ..Default::default() };
    let engine = fabric.engine(requirements);
    engine.map_err(|error| Failure::from(error).within(format!("an engine of the kind {kind:?}")))
}
