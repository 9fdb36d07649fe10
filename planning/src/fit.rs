//! Fits the link parameters of the cost model to measured all-gathers, by robust least squares.
//!
//! The fit minimises the sum of squared relative errors of the model; errors above 30 % count
//! linearly. The model has maxima and no useful derivative, so the search changes one parameter at
//! a time, by decreasing factors. A parameter on which no sample depends is not changed.

use std::iter;

use crate::cost::{
    CacheFactor, Calibration, Cost, EngineCalibration, Key, Link, Links, Residual, Sample, predict,
};
use crate::error::Error;
use crate::plan::Tier;
use crate::schedule::{Movement, movement};
use crate::topology::Topology;
use peerlane_hal::ErrorKind;

/// Relative errors above this value count linearly and not squared, so that outliers weigh less.
const OUTLIER: f64 = 0.3;

/// The factors by which the search changes a parameter, from coarse to fine.
const FACTORS: [f64; 6] = [4.0, 2.0, 1.4, 1.15, 1.05, 1.02];

/// The maximum number of times that the search tries all parameters with one factor.
const ROUNDS_MAX: usize = 40;

/// The ratio between consecutive memory sizes at which cache effects ([`CacheFactor`]) are fitted.
///
/// It is smaller than the ratio of cache sizes.
const REACH_STEP: u64 = 4;

/// A function that returns one of the link parameters that the search changes.
type Parameter = fn(&mut Links) -> &mut f64;

/// Fits link parameters to measured all-gathers, starting from the parameters `known`, for each
/// kind of engines that was measured.
///
/// # Errors
/// [`InvalidArgument`](ErrorKind::InvalidArgument) if there is no sample, or an impossible one.
pub fn calibrate(
    key: Key,
    known: Links,
    topology: &Topology,
    samples: Vec<Sample>,
) -> Result<Calibration, Error> {
    let invalid = |text| Err(Error::new(ErrorKind::InvalidArgument, text));
    if samples.is_empty() {
        return invalid("samples is empty, expected at least 1 measurement".to_owned());
    }

    for (index, sample) in samples.iter().enumerate() {
        let seconds = sample.seconds;
        if !(seconds.is_finite() && seconds > 0.0) {
            return invalid(format!(
                "samples[{index}].seconds is {seconds}, expected a number above 0"
            ));
        }
    }

    let mut by_engine: Vec<(String, Vec<Sample>)> = Vec::new();
    for sample in samples {
        match by_engine.iter_mut().find(|(engine, _)| *engine == sample.engine) {
            Some((_, samples)) => samples.push(sample),
            None => by_engine.push((sample.engine.clone(), vec![sample])),
        }
    }

    let engines = by_engine.into_iter().map(|(engine, samples)| {
        let known = Links { engine, ..known.clone() };
        let (mut links, errors) = fit(known, topology, &samples)?;
        // Residuals correct the predictions of the fitted links.
        links.residuals =
            samples.iter().zip(&errors).map(|(sample, error)| residual(sample, *error)).collect();
        Ok(EngineCalibration { links, samples, errors })
    });
    Ok(Calibration { key, engines: engines.collect::<Result<_, Error>>()? })
}

/// Returns the correction for operations like `sample`, whose predicted time has the relative error
/// `error`.
fn residual(sample: &Sample, error: f64) -> Residual {
    // The predicted time is 1 + `error` times the measured one.
    let factor = (1.0 / (1.0 + error)).clamp(Residual::FACTOR_MIN, Residual::FACTOR_MAX);

    let &Sample { algorithm, in_place, outputs, flags, tiers, block_bytes, .. } = sample;
    Residual { algorithm, in_place, outputs, flags, tiers, block_bytes, factor }
}

/// Fits `links` to `samples`, and returns the fitted links and the relative error of each
/// prediction.
fn fit(
    mut links: Links,
    topology: &Topology,
    samples: &[Sample],
) -> Result<(Links, Vec<f64>), Error> {
    // Residuals of an earlier calibration would hide the errors of the links.
    links.residuals.clear();

    if links.local.by_processor {
        links.node.cache_factors = cache_points(&links, topology, samples);
    }

    // The search finds a minimum near its start, so it starts near the measured rates.
    scale_to_line(&mut links, topology, samples);

    // The scaling reads the rates of engines, so these limits are removed after it.
    for link in [&mut links.own, &mut links.local] {
        remove_shared_limits(link);
    }

    let parameters = parameters(&links, topology, samples);
    let mut best = loss(&links, topology, samples)?;
    for factor in FACTORS {
        for _ in 0..ROUNDS_MAX {
            let before = best;
            improve(&mut links, &mut best, factor, &parameters, topology, samples)?;

            // A round that lowers the loss by less than 0.1 % is not worth another one.
            if best > before * 0.999 {
                break;
            }
        }
    }

    let errors = relative_errors(&links, topology, samples)?;
    Ok((links, errors))
}

/// Tries each parameter multiplied and divided by `factor`, and keeps every change that lowers the
/// loss `best`.
fn improve(
    links: &mut Links,
    best: &mut f64,
    factor: f64,
    parameters: &[Parameter],
    topology: &Topology,
    samples: &[Sample],
) -> Result<(), Error> {
    let cache_factors = cache_factors_mut(links).len();
    for index in 0..parameters.len() + cache_factors {
        for by in [factor, 1.0 / factor] {
            let mut other = links.clone();
            scale(&mut other, parameters, index, by);

            // A figure outside of its bounds would make the calibration invalid.
            if other.check().is_err() {
                continue;
            }

            let found = loss(&other, topology, samples)?;
            if found < *best {
                *best = found;
                *links = other;
            }
        }
    }
    Ok(())
}

/// Multiplies the link parameter with index `at` by `by`.
///
/// The cache factors have the indices after those of `parameters`.
fn scale(links: &mut Links, parameters: &[Parameter], at: usize, by: f64) {
    match parameters.get(at) {
        Some(parameter) => {
            let value = parameter(links);
            // Scaling cannot change a time of 0, so no time becomes less than a nanosecond.
            *value = (*value * by).max(1e-9);
        }
        None => {
            let factor = &mut cache_factors_mut(links)[at - parameters.len()];
            // The bounds are those that `Links::check` accepts.
            **factor = (**factor * by).clamp(1e-3, 1e3);
        }
    }
}

/// Returns the put factors and get factors of all cache points, which the search changes.
fn cache_factors_mut(links: &mut Links) -> Vec<&mut f64> {
    let mut factors = Vec::new();
    for CacheFactor { factor, gets_factor, .. } in &mut links.node.cache_factors {
        factors.push(factor);
        factors.extend(gets_factor);
    }
    factors
}

/// Removes the rate limits of lanes and ranks from a link whose copies processors make.
///
/// One thread makes all copies over such a link, one at a time, so only its own rate limits them.
fn remove_shared_limits(link: &mut Link) {
    if link.by_processor {
        link.engine_bytes_per_second = Link::UNLIMITED;
        link.send_bytes_per_second = Link::UNLIMITED;
        link.receive_bytes_per_second = Link::UNLIMITED;
    }
}

/// Scales the initial link rates to the slope of a line through the times of direct all-gathers.
fn scale_to_line(links: &mut Links, topology: &Topology, samples: &[Sample]) {
    let peers = topology.ranks() as f64 - 1.0;
    if peers <= 0.0 {
        return;
    }

    let direct = samples.iter().filter(|sample| puts_to_every_peer(sample, topology));
    // A rank puts its block to each peer, so these are the bytes that pass its engine.
    let points: Vec<_> =
        direct.map(|sample| (sample.block_bytes as f64 * peers, sample.seconds)).collect();
    let Some((_, beta)) = line(&points) else { return };

    // Noise can make longer blocks seem faster.
    if beta > 0.0 {
        scale_rates(&mut links.local, beta);
        if links.own.by_processor {
            scale_rates(&mut links.own, beta);
        }
    }
}

/// Scales all rates of `link` so that its engine takes `seconds_per_byte` for each byte.
fn scale_rates(link: &mut Link, seconds_per_byte: f64) {
    let factor = 1.0 / (seconds_per_byte * link.engine_bytes_per_second);
    for rate in rates(link) {
        // The bounds are those that `Links::check` accepts.
        *rate = (*rate * factor).clamp(1.0, 1e18);
    }
}

/// Fits the line `seconds = α + β · bytes` to `points` by least squares of relative errors.
///
/// Returns α and β, or `None` with fewer than two different sizes.
fn line(points: &[(f64, f64)]) -> Option<(f64, f64)> {
    // The sums of the weights, and of the weighted values and products.
    let mut w = 0.0;
    let mut wx = 0.0;
    let mut wy = 0.0;
    let mut wxx = 0.0;
    let mut wxy = 0.0;
    for &(x, y) in points.iter().filter(|(_, y)| *y > 0.0) {
        // A relative error is an error divided by `y`, and its square counts.
        let weight = 1.0 / (y * y);
        w += weight;
        wx += weight * x;
        wy += weight * y;
        wxx += weight * x * x;
        wxy += weight * x * y;
    }

    // The determinant is 0 if all sizes are equal, up to rounding.
    let determinant = w * wxx - wx * wx;
    if determinant.is_nan() || determinant <= w * wxx * 1e-12 {
        return None;
    }

    let beta = (w * wxy - wx * wy) / determinant;
    Some(((wy - beta * wx) / w, beta))
}

/// Returns the memory sizes at which cache effects are fitted, each with an initial factor of 1.
///
/// They cover the memory sizes of the samples.
fn cache_points(links: &Links, topology: &Topology, samples: &[Sample]) -> Vec<CacheFactor> {
    let memory: Vec<u64> = samples
        .iter()
        .filter_map(|sample| Some(cost(sample, topology, links).ok()?.memory_bytes))
        .collect();
    let (Some(least), Some(most)) = (memory.iter().min(), memory.iter().max()) else {
        return Vec::new();
    };

    let pulls = samples.iter().any(|sample| moved(sample, topology).gets);
    let gets_factor = pulls.then_some(1.0);

    // Smaller operations fit into every cache.
    let first = (64 << 10).max(*least);
    let sizes = iter::successors(Some(first), |bytes| bytes.checked_mul(REACH_STEP));
    let sizes = sizes.take_while(|bytes| bytes <= most);
    sizes.map(|bytes| CacheFactor { bytes, factor: 1.0, gets_factor }).collect()
}

fn rates(link: &mut Link) -> [&mut f64; 4] {
    [
        &mut link.bytes_per_second,
        &mut link.engine_bytes_per_second,
        &mut link.send_bytes_per_second,
        &mut link.receive_bytes_per_second,
    ]
}

/// Returns the link parameters that the samples can determine.
fn parameters(links: &Links, topology: &Topology, samples: &[Sample]) -> Vec<Parameter> {
    let mut parameters: Vec<Parameter> = vec![
        |links| &mut links.start_seconds,
        |links| &mut links.local.put_seconds,
        |links| &mut links.local.step_seconds,
        |links| &mut links.local.flag_seconds,
        |links| &mut links.local.bytes_per_second,
    ];
    if !links.local.by_processor {
        parameters.push(|links| &mut links.local.engine_bytes_per_second);
        parameters.push(|links| &mut links.local.send_bytes_per_second);
        parameters.push(|links| &mut links.local.receive_bytes_per_second);
    }

    // Only some algorithms use several lanes, get blocks or forward them.
    if links.lane_seconds > 0.0 && samples.iter().any(|sample| moved(sample, topology).lanes > 1) {
        parameters.push(|links| &mut links.lane_seconds);
    }
    if samples.iter().any(|sample| moved(sample, topology).gets) {
        parameters.push(|links| &mut links.local.get_seconds);
    }
    // Only the time of a put depends on whether it forwards.
    let forwards = |sample: &Sample| {
        let movement = moved(sample, topology);
        movement.forwards && !movement.gets
    };
    if links.local.by_processor && samples.iter().any(forwards) {
        parameters
            .push(|links| links.local.passed_on_bytes_per_second.get_or_insert(Link::UNLIMITED));
        parameters.push(|links| &mut links.local.passed_on_seconds);
    }

    // Engines of a device run self copies concurrently with the puts, which hide them. A parameter
    // fitted to that would be arbitrary, and wrong for uneven blocks.
    if links.own.by_processor {
        parameters.push(|links| &mut links.own.put_seconds);
        parameters.push(|links| &mut links.own.bytes_per_second);
    }

    if links.local.submit_seconds > 0.0 {
        parameters.push(|links| &mut links.local.submit_seconds);
        parameters.push(|links| &mut links.own.submit_seconds);
    }

    if samples.iter().any(|sample| sample.tiers) {
        parameters.push(|links| &mut links.network.put_seconds);
        parameters.push(|links| &mut links.network.step_seconds);
        parameters.push(|links| &mut links.network.flag_seconds);
        parameters.push(|links| &mut links.network.bytes_per_second);
        parameters.push(|links| &mut links.network.engine_bytes_per_second);
        parameters.push(|links| &mut links.network.receive_bytes_per_second);
    }

    debug_assert!(
        links.link_of_tier(Tier::Local, false) == &links.local,
        "parameters name links directly"
    );
    parameters
}

/// Returns the sum of the squared relative errors of all predictions, in which outliers count
/// linearly.
fn loss(links: &Links, topology: &Topology, samples: &[Sample]) -> Result<f64, Error> {
    let errors = relative_errors(links, topology, samples)?;
    let each = errors.iter().map(|error| match error.abs() {
        // The line continues the square at the bound, with the same value and slope.
        large if large > OUTLIER => OUTLIER * (2.0 * large - OUTLIER),
        small => small * small,
    });
    Ok(each.sum())
}

/// Returns the relative error of each predicted time; positive if the prediction is too long.
fn relative_errors(
    links: &Links,
    topology: &Topology,
    samples: &[Sample],
) -> Result<Vec<f64>, Error> {
    let relative_error = |sample: &Sample| {
        let predicted = cost(sample, topology, links)?.seconds();
        Ok(predicted / sample.seconds - 1.0)
    };
    samples.iter().map(relative_error).collect()
}

fn cost(sample: &Sample, topology: &Topology, links: &Links) -> Result<Cost, Error> {
    let blocks = vec![sample.block_bytes; topology.ranks()];
    predict(sample.algorithm, topology, sample.shape(), &blocks, links)
}

fn moved(sample: &Sample, topology: &Topology) -> Movement {
    movement(sample.algorithm, topology, sample.tiers)
}

fn puts_to_every_peer(sample: &Sample, topology: &Topology) -> bool {
    // With several lanes, no engine would carry the bytes of all peers.
    moved(sample, topology) == Movement { gets: false, forwards: false, lanes: 1 }
}

#[cfg(test)]
mod tests {
    use crate::cost::{Question, choose};
    use crate::plan::{Algorithm, FlagOrder};
    use insta::assert_snapshot;
    use peerlane_hal::LinkKind;

    use super::*;

    #[test]
    fn a_line_is_found() {
        let points = [1e3, 1e5, 1e7].map(|bytes| (bytes, 2e-6 + bytes / 10e9));
        let (alpha, beta) = line(&points).unwrap();
        assert!((alpha - 2e-6).abs() < 1e-9 && (beta * 10e9 - 1.0).abs() < 1e-6);
        assert_eq!(line(&points[..1]), None);
        assert_eq!(line(&[(5.0, 1.0), (5.0, 2.0)]), None);
    }

    fn samples(links: &Links, topology: &Topology, flags: FlagOrder) -> Vec<Sample> {
        let mut samples = Vec::new();
        for algorithm in [Algorithm::Direct, Algorithm::Pull, Algorithm::Ring] {
            for outputs in [1, 2] {
                for power in 0..10 {
                    let block_bytes = 256 << (2 * power);
                    let mut sample = Sample {
                        engine: String::new(),
                        algorithm,
                        chunks: 1,
                        in_place: false,
                        outputs,
                        flags,
                        tiers: false,
                        block_bytes,
                        seconds: 0.0,
                    };
                    let blocks = vec![block_bytes; topology.ranks()];
                    let cost = predict(algorithm, topology, sample.shape(), &blocks, links);
                    sample.seconds = cost.unwrap().seconds();
                    samples.push(sample);
                }
            }
        }
        samples
    }

    #[test]
    fn links_are_found_again_from_what_they_predict() {
        let topology = Topology::flat(4).unwrap();
        for (kind, flags) in
            [(LinkKind::SharedMemory, FlagOrder::Prompt), (LinkKind::NvLink, FlagOrder::Batched)]
        {
            let mut truth = Links::of_kinds(kind, LinkKind::Rdma);
            truth.start_seconds *= 1.7;
            truth.local.flag_seconds *= 0.6;
            truth.local.get_seconds *= 1.5;
            if truth.local.by_processor {
                truth.local.passed_on_bytes_per_second = Some(20e9);
                truth.local.passed_on_seconds = 3e-6;
                truth.local.get_bytes_per_second = Some(2.5e9);
            }
            for rate in rates(&mut truth.local) {
                *rate *= 0.4;
            }
            let mut samples = samples(&truth, &topology, flags);
            // One measurement is an outlier.
            samples[3].seconds *= 5.0;
            let (found, mut errors) =
                fit(Links::of_kinds(kind, LinkKind::Rdma), &topology, &samples).unwrap();
            errors.remove(3);
            let worst = errors.into_iter().map(f64::abs).fold(0.0, f64::max);
            assert!(worst < 0.1, "{kind:?}: an error of {worst}");
            if !truth.own.by_processor {
                // Puts hide the self copies, so equal blocks determine nothing about them.
                assert_eq!(found.own, truth.own);
            }
        }
    }

    fn sample(seconds: f64) -> Sample {
        Sample {
            engine: String::new(),
            algorithm: Algorithm::Direct,
            chunks: 1,
            in_place: false,
            outputs: 1,
            flags: FlagOrder::Prompt,
            tiers: false,
            block_bytes: 1 << 20,
            seconds,
        }
    }

    #[test]
    fn what_was_measured_is_predicted_and_chosen() {
        use Algorithm::{Direct, Pull};
        let topology = Topology::flat(4).unwrap();
        let measured =
            |algorithm, block_bytes, seconds| Sample { algorithm, block_bytes, ..sample(seconds) };
        // At the middle size, direct is slower than any line through its other times.
        let samples = vec![
            measured(Direct, 1 << 10, 5e-6),
            measured(Pull, 1 << 10, 6e-6),
            measured(Direct, 1 << 16, 9e-5),
            measured(Pull, 1 << 16, 4e-5),
            measured(Direct, 1 << 22, 1e-3),
            measured(Pull, 1 << 22, 2e-3),
        ];
        let key = Key::new("host", "2 cores", &topology);
        let calibration = calibrate(key, Links::default(), &topology, samples).unwrap();
        let EngineCalibration { links, samples, .. } = &calibration.engines[0];
        for one in samples {
            let blocks = [one.block_bytes; 4];
            let cost = predict(one.algorithm, &topology, one.shape(), &blocks, links).unwrap();
            assert!((cost.seconds() / one.seconds - 1.0).abs() < 1e-3, "{one:?}: {cost}");
        }
        let chosen = [1 << 10, 1 << 16, 1 << 22].map(|bytes| {
            let question = Question {
                topology: &topology,
                block_bytes: &[bytes; 4],
                shape: samples[0].shape(),
                links,
                measured: true,
                algorithm: None,
                chunks: Some(1),
                refused: &[Algorithm::Ring, Algorithm::DoubleRing, Algorithm::RecursiveDoubling]
                    .map(|other| (other, "it was not measured")),
            };
            choose(&question).unwrap().algorithm
        });
        assert_eq!(chosen, [Direct, Pull, Direct]);
    }

    #[test]
    fn a_calibration_survives_json() {
        let topology = Topology::flat(2).unwrap();
        let key = Key::new("host", "2 cores", &topology);
        let samples = vec![sample(1e-4)];
        let calibration = calibrate(key, Links::default(), &topology, samples).unwrap();
        assert_eq!(calibration.good_share(), 1.0, "{calibration}");
        let text = serde_json::to_string(&calibration).unwrap();
        let read = serde_json::from_str::<Calibration>(&text).unwrap();
        let links = &calibration.engines[0].links;
        assert_eq!(read.engines[0].links.fingerprint(), links.fingerprint());
        assert_eq!(read, calibration);
        assert_ne!(Links::default().fingerprint(), links.fingerprint());
    }

    #[test]
    fn each_kind_of_engines_has_links_of_its_own() {
        let topology = Topology::flat(2).unwrap();
        let of = |engine: &str, seconds| Sample { engine: engine.to_owned(), ..sample(seconds) };
        let samples = vec![of("streams", 1e-4), of("sdma", 3e-4), of("streams", 1e-4)];
        let key = Key::new("rocm", "2 GPUs", &topology);
        let calibration = calibrate(key, Links::default(), &topology, samples).unwrap();

        let engines = calibration.engines.iter();
        let engines = engines.map(|one| (&*one.links.engine, one.samples.len()));
        assert_eq!(engines.collect::<Vec<_>>(), [("streams", 2), ("sdma", 1)]);
        assert!(calibration.to_string().contains(", by streams and sdma: 3 samples"));
    }

    #[test]
    fn calibrations_of_older_versions_are_refused_by_name() {
        let key = Key::new("host", "2 cores", &Topology::flat(2).unwrap());
        let key = serde_json::to_string(&key).unwrap();
        let error = |fields: &str| {
            let text = format!(r#"{{"key": {key}, {fields}}}"#);
            serde_json::from_str::<Calibration>(&text).unwrap_err().to_string()
        };
        let found = error(r#""links": {}, "samples": [], "errors": []"#);
        let expected = "it is a calibration of an older version, with the field `links`, expected \
                        `engines`; run `peerlane calibrate` again";
        assert_eq!(found, expected);
        assert_eq!(error(r#""engines": []"#), "engines is empty, expected at least one kind");
    }

    #[test]
    fn the_largest_block_ends_the_cache_points() {
        let topology = Topology::flat(2).unwrap();
        let largest = Sample { block_bytes: u64::MAX, ..sample(1.0) };
        let links = Links::of_kinds(LinkKind::SharedMemory, LinkKind::Rdma);
        let points = cache_points(&links, &topology, &[sample(1.0), largest]);
        assert!(points.is_sorted_by(|one, next| one.bytes < next.bytes));
        assert_eq!(points.len(), 22);
    }

    #[test]
    fn impossible_samples_are_named() {
        let topology = Topology::flat(2).unwrap();
        let text = |samples| {
            let key = Key::new("host", "2 cores", &topology);
            calibrate(key, Links::default(), &topology, samples).unwrap_err().to_string()
        };
        assert_snapshot!(text(vec![]), @"samples is empty, expected at least 1 measurement");
        assert_snapshot!(text(vec![sample(1.0), sample(0.0)]), @"samples[1].seconds is 0, expected a number above 0");
    }
}
