//! Checks how well a calibration predicts measurements to which it was not fitted.

use std::collections::BTreeMap;

use peerlane::Algorithm;
use peerlane::topology::Topology;
use peerlane_planning::cost::{
    Calibration, GOOD, Question, Sample, Variant, choose_among, predict,
};
use serde::{Deserialize, Serialize};

use super::measure::Configuration;
use crate::error::Result;

/// The comparison of a calibration's predictions and choices with measurements.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Check {
    pub(super) machine: String,
    pub(super) backend: String,
    pub(super) topology: String,
    points: Vec<Point>,
    choices: Vec<SizeChoice>,
    /// The share of unfitted measurements that are predicted within 20 %, from 0 to 1.
    good_share: f64,
    /// The largest fraction by which a chosen algorithm is slower than the fastest measured one.
    worst_choice: f64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Point {
    #[serde(default)]
    engine: String,
    algorithm: Algorithm,
    outputs: u32,
    #[serde(default = "one_chunk")]
    chunks: u32,
    block_bytes: u64,
    measured_us: f64,
    predicted_us: f64,
    fitted: bool,
}

/// The algorithm and the engines that the cost model chooses at one size, and the fastest measured
/// ones.
#[derive(Debug, Serialize, Deserialize)]
struct SizeChoice {
    outputs: u32,
    block_bytes: u64,
    chosen: Algorithm,
    #[serde(default)]
    chosen_engine: String,
    chosen_us: f64,
    best: Algorithm,
    #[serde(default)]
    best_engine: String,
    best_us: f64,
}

impl Check {
    /// Predicts the fitted samples and the other samples, and compares the times.
    pub(super) fn new(
        calibration: &Calibration,
        topology: &Topology,
        others: &[Sample],
    ) -> Result<Self> {
        let mut points = Vec::new();
        let mut groups = BTreeMap::<(u64, u32), Vec<&Sample>>::new();
        let fitted = calibration.engines.iter().flat_map(|engine| &engine.samples);
        let fitted = fitted.map(|sample| (sample, true));
        for (sample, fitted) in fitted.chain(others.iter().map(|sample| (sample, false))) {
            let blocks = vec![sample.block_bytes; topology.ranks()];
            let (algorithm, shape) = (sample.algorithm, sample.shape());
            let links = calibration.links().find(|links| links.engine == sample.engine);
            let Some(links) = links else { continue };
            let cost = predict(algorithm, topology, shape, &blocks, links)?;
            points.push(Point {
                engine: sample.engine.clone(),
                algorithm,
                outputs: sample.outputs,
                chunks: sample.chunks,
                block_bytes: sample.block_bytes,
                measured_us: sample.seconds * 1e6,
                predicted_us: cost.seconds() * 1e6,
                fitted,
            });
            groups.entry((sample.block_bytes, sample.outputs)).or_default().push(sample);
        }

        let choices =
            groups.values().map(|group| SizeChoice::of_samples(group, calibration, topology));
        let choices = choices.collect::<Result<Vec<_>>>()?;
        let good = |point: &&Point| (point.predicted_us / point.measured_us - 1.0).abs() <= GOOD;
        let good = between(&points).filter(good).count();
        let good_share = good as f64 / between(&points).count().max(1) as f64;
        let longer = choices.iter().map(|choice| choice.chosen_us / choice.best_us - 1.0);

        Ok(Self {
            machine: calibration.key.machine.clone(),
            backend: calibration.key.backend.clone(),
            topology: calibration.key.topology.clone(),
            good_share,
            worst_choice: longer.fold(0.0, f64::max),
            points,
            choices,
        })
    }

    pub(super) fn samples(&self) -> [Vec<Sample>; 2] {
        [true, false].map(|fitted| {
            let points = self.points.iter().filter(|point| point.fitted == fitted);
            points.map(|point| point.sample(&self.backend)).collect()
        })
    }

    /// Returns a summary of the comparison in one sentence.
    pub(super) fn text(&self) -> String {
        format!(
            "{} points that the links were not fitted to, {:.0} % of them predicted within {:.0} %; no \
             choice is more than {:.0} % slower than the best measured algorithm",
            between(&self.points).count(),
            self.good_share * 100.0,
            GOOD * 100.0,
            self.worst_choice * 100.0
        )
    }
}

/// Returns the measurements to which the links were not fitted.
fn between(points: &[Point]) -> impl Iterator<Item = &Point> {
    points.iter().filter(|point| !point.fitted)
}

/// Returns the number of chunks for measurement files that do not contain this number.
fn one_chunk() -> u32 {
    1
}

impl Point {
    fn sample(&self, backend: &str) -> Sample {
        let &Self { algorithm, outputs, chunks, block_bytes, measured_us, .. } = self;
        let configuration = Configuration { engine: self.engine.clone(), algorithm, outputs };
        let sample = configuration.sample(backend, block_bytes, chunks);
        Sample { seconds: measured_us * 1e-6, ..sample }
    }
}

impl SizeChoice {
    /// Chooses by the cost model among the algorithms and engines that were measured at one size.
    fn of_samples(
        group: &[&Sample],
        calibration: &Calibration,
        topology: &Topology,
    ) -> Result<Self> {
        let first = group[0];
        let blocks = vec![first.block_bytes; topology.ranks()];
        let measured = |engine: &str, algorithm| {
            let mut samples = group.iter();
            samples.find(|sample| sample.algorithm == algorithm && sample.engine == engine)
        };

        let refused: Vec<Vec<_>> = calibration
            .links()
            .map(|links| {
                let is_missing = |one: &&Algorithm| measured(&links.engine, **one).is_none();
                let others = Algorithm::ALL.iter().filter(is_missing);
                others.map(|algorithm| (*algorithm, "it was not measured")).collect()
            })
            .collect();
        let variants = calibration.links().zip(&refused).map(|(links, refused)| Variant {
            engine: &links.engine,
            form: None,
            transfer: None,
            question: Question {
                topology,
                block_bytes: &blocks,
                shape: first.shape(),
                links,
                measured: true,
                algorithm: None,
                chunks: Some(first.chunks),
                refused,
            },
        });
        let choice = choose_among(&variants.collect::<Vec<_>>(), &[])?;

        let best = group.iter().min_by(|one, other| one.seconds.total_cmp(&other.seconds));
        let best = best.unwrap_or(&group[0]);
        let chosen = measured(&choice.engine, choice.algorithm).unwrap_or(best);
        Ok(Self {
            outputs: first.outputs,
            block_bytes: first.block_bytes,
            chosen: chosen.algorithm,
            chosen_engine: chosen.engine.clone(),
            chosen_us: chosen.seconds * 1e6,
            best: best.algorithm,
            best_engine: best.engine.clone(),
            best_us: best.seconds * 1e6,
        })
    }
}
