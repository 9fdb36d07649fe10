//! Algorithms whose plans are the same, as those of direct and ring between two ranks: what was measured
//! of one was measured of the other.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use peerlane::cost::Sample;
use peerlane::plan::{Algorithm, Lane};
use peerlane::schedule::{Shape, plans};
use peerlane::topology::Topology;

use crate::error::Result;

/// The lanes of all ranks.
type Lanes = Vec<Vec<Lane>>;

/// Gives samples of one plan and size the time of the fastest.
///
/// # Errors
/// If there is no such plan.
pub(super) fn pool(samples: &mut [Sample], topology: &Topology) -> Result<()> {
    let mut known = HashMap::<(Algorithm, Shape), Lanes>::new();
    for sample in &*samples {
        let (algorithm, shape) = (sample.algorithm, sample.shape());
        if let Entry::Vacant(place) = known.entry((algorithm, shape)) {
            let plans = plans(algorithm, topology, shape)?;
            place.insert(plans.into_iter().map(|plan| plan.lanes).collect());
        }
    }
    let lanes = |sample: &Sample| &known[&(sample.algorithm, sample.shape())];
    let alike = |one: &Sample, other: &Sample| {
        (one.shard_bytes, one.shape()) == (other.shard_bytes, other.shape())
            && lanes(one) == lanes(other)
    };
    let fastest = samples.iter().map(|sample| {
        let alike = samples.iter().filter(|other| alike(sample, other));
        alike.map(|other| other.seconds).fold(sample.seconds, f64::min)
    });
    let fastest: Vec<f64> = fastest.collect();
    samples.iter_mut().zip(fastest).for_each(|(sample, seconds)| sample.seconds = seconds);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::measure::Way;
    use super::*;

    fn pooled(ranks: usize, algorithms: &[(Algorithm, u32, f64)]) -> Vec<f64> {
        let sample = |&(algorithm, outputs, seconds): &(Algorithm, u32, f64)| Sample {
            seconds,
            ..Way { algorithm, outputs }.sample("host", 1024, 1)
        };
        let mut samples: Vec<Sample> = algorithms.iter().map(sample).collect();
        pool(&mut samples, &Topology::flat(ranks).unwrap()).unwrap();
        samples.iter().map(|sample| sample.seconds).collect()
    }

    #[test]
    fn one_plan_has_one_time() {
        use Algorithm::{Direct, Pull, Ring};
        let measured = [(Direct, 1, 3.0), (Pull, 1, 1.0), (Ring, 1, 2.0), (Ring, 2, 1.5)];
        assert_eq!(pooled(2, &measured), [2.0, 1.0, 2.0, 1.5]);
        assert_eq!(pooled(3, &measured), [3.0, 1.0, 2.0, 1.5]);
    }
}
