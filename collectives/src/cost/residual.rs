//! Corrections of predictions at sizes that were measured.
//!
//! The figures of the links are fitted to all samples together, so a full cache or a short queue shows as an error at a few
//! sizes. A calibration keeps these errors: at a measured size the prediction equals the measurement, and a choice follows it.
//! They have no effect at other sizes (docs/adr/0011-costs.md).

use serde::{Deserialize, Serialize};

use super::estimate::CostRequest;
use super::links::invalid;
use super::sample::Sample;
use crate::collective::Collective;
use crate::error::Error;
use crate::plan::{Algorithm, FlagOrder};

/// The smallest factor.
const LEAST: f64 = 1e-3;
const MOST: f64 = 1e3;

/// The correction for all-gathers of equal shards at one size.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Residual {
    /// The algorithm, with any number of chunks.
    pub algorithm: Algorithm,
    /// Whether the operation was in place.
    pub in_place: bool,
    /// The number of outputs.
    pub outputs: u32,
    /// The order of flags.
    pub flags: FlagOrder,
    /// Whether network lanes reached the other nodes.
    pub tiers: bool,
    /// The bytes of each shard.
    pub shard_bytes: u64,
    /// The measured time divided by the predicted one.
    pub times_longer: f64,
}

impl Residual {
    /// Creates the correction of a sample; `error` is the relative error of the prediction.
    pub(super) fn new(sample: &Sample, error: f64) -> Self {
        let &Sample { algorithm, in_place, outputs, flags, tiers, shard_bytes, .. } = sample;
        let times_longer = (1.0 / (1.0 + error)).clamp(LEAST, MOST);
        Self { algorithm, in_place, outputs, flags, tiers, shard_bytes, times_longer }
    }

    fn is_of(&self, request: &CostRequest<'_>) -> bool {
        let (algorithm, shape) = (request.algorithm, request.shape);
        shape.collective == Collective::AllGather
            && (self.algorithm, self.in_place, self.outputs)
                == (algorithm, shape.in_place, shape.outputs)
            && (self.flags, self.tiers) == (shape.flags, shape.tiers)
    }
}

/// By how much longer `request` takes than the figures say: what was measured of a plan of this algorithm,
/// shape and size. 1 where nothing was, or shards are unlike.
pub(super) fn times_longer(residuals: &[Residual], request: &CostRequest<'_>) -> f64 {
    let (least, most) = (request.sums.shard_bytes_min, request.sums.shard_bytes_max);
    let measured = |one: &&Residual| one.is_of(request) && [least, most] == [one.shard_bytes; 2];
    residuals.iter().find(measured).map_or(1.0, |one| one.times_longer)
}

pub(super) fn check_residuals(residuals: &[Residual]) -> Result<(), Error> {
    for (index, Residual { times_longer, .. }) in residuals.iter().enumerate() {
        if !(LEAST..=MOST).contains(times_longer) {
            let text = format!("residuals[{index}].times_longer is {times_longer}");
            return Err(invalid(format!("{text}, expected {LEAST} to {MOST}")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::super::links::Links;
    use super::super::sums::ClusterSums;
    use super::*;
    use crate::schedule::Shape;
    use crate::topology::Topology;

    fn residual(algorithm: Algorithm, shard_bytes: u64, times_longer: f64) -> Residual {
        let Shape { in_place, outputs, flags, tiers, .. } = Shape::default();
        Residual { algorithm, in_place, outputs, flags, tiers, shard_bytes, times_longer }
    }

    #[test]
    fn it_holds_for_what_was_measured() {
        use Algorithm::{Direct, Pull, Ring};
        let residuals = [residual(Direct, 1000, 1.2), residual(Ring, 1000, 0.9)];
        let (topology, links) = (Topology::flat(2).unwrap(), Links::default());
        let of = |algorithm, shards: [u64; 2], shape| {
            let sums = ClusterSums::new(&topology, &shards);
            let request = CostRequest { algorithm, sums: &sums, shape, links: &links };
            times_longer(&residuals, &request)
        };
        let plain = Shape::default();
        assert_eq!([999, 1000, 1001].map(|bytes| of(Direct, [bytes; 2], plain)), [1.0, 1.2, 1.0]);
        assert_eq!(of(Direct, [999, 1000], plain), 1.0, "shards are unlike");
        assert_eq!(of(Ring, [1000; 2], Shape { chunks: 8, ..plain }), 0.9);
        assert_eq!(of(Ring, [1000; 2], Shape { outputs: 2, ..plain }), 1.0);
        assert_eq!(of(Pull, [1000; 2], plain), 1.0);
    }

    #[test]
    fn impossible_ones_are_named() {
        let error = check_residuals(&[
            residual(Algorithm::Pull, 8, 1.0),
            residual(Algorithm::Pull, 9, 0.0),
        ]);
        assert_snapshot!(error.unwrap_err(), @"residuals[1].times_longer is 0, expected 0.001 to 1000");
    }
}
