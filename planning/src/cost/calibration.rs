//! Stores calibrations, which are latencies and bandwidths of links that were fitted to measured
//! times of all-gathers.
//!
//! The figures of the links are fitted to all samples together, so a full cache or a short queue
//! shows as an error at a few sizes. A calibration keeps these errors: at a measured size the
//! prediction equals the measurement, and a choice follows it. They have no effect at other sizes
//! (docs/adr/0011-costs.md).

use std::fmt;

use peerlane_hal::ErrorKind;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

use crate::collective::Collective;
use crate::error::Error;
use crate::links::{Links, Residual};
use crate::plan::{Algorithm, FlagOrder};
use crate::schedule::Shape;
use crate::schedule::estimate::CostRequest;
use crate::topology::Topology;

/// The relative error up to which a predicted time counts as good, 20 %.
pub const GOOD: f64 = 0.2;

/// The conditions under which a calibration is valid, such as the machine, the backend and the
/// topology.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Key {
    /// The version of Peerlane that made the calibration.
    pub version: String,
    /// The name of the backend, such as `host`; the names of several tiers are joined by `+`.
    pub backend: String,
    /// The model names of the processors or GPUs, as the system reports them.
    pub machine: String,
    /// The topology of the measured group in its [notation](Topology::notation).
    pub topology: String,
    /// The [fingerprint](Topology::fingerprint) of the measured group's topology.
    pub fingerprint: u64,
}

/// The result of a calibration, which fits the latencies and bandwidths of links to measured times
/// of all-gathers, for each kind of engines.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "StoredCalibration")]
pub struct Calibration {
    /// The version, backend, machine and topology of the measurements.
    pub key: Key,
    /// The result for each kind of engines that was measured.
    pub engines: Vec<EngineCalibration>,
}

/// A calibration as a file holds it, with the fields of older versions, by which it is refused.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredCalibration {
    key: Key,
    #[serde(default)]
    engines: Vec<EngineCalibration>,
    links: Option<IgnoredAny>,
    #[serde(rename = "samples")]
    _samples: Option<IgnoredAny>,
    #[serde(rename = "errors")]
    _errors: Option<IgnoredAny>,
}

impl TryFrom<StoredCalibration> for Calibration {
    type Error = String;

    fn try_from(stored: StoredCalibration) -> Result<Self, String> {
        let StoredCalibration { key, engines, links, .. } = stored;
        if links.is_some() {
            let text = "it is a calibration of an older version, with the field `links`, expected \
                        `engines`; run `peerlane calibrate` again";
            return Err(text.to_owned());
        }
        if engines.is_empty() {
            return Err("engines is empty, expected at least one kind".to_owned());
        }
        Ok(Self { key, engines })
    }
}

/// The latencies and bandwidths of links with engines of one kind, and the measured times to which
/// they were fitted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EngineCalibration {
    /// The latencies and bandwidths of the links, with the kind of [engines](Links::engine).
    pub links: Links,
    /// The measured all-gathers to which the latencies and bandwidths were fitted.
    pub samples: Vec<Sample>,
    /// The relative error of each sample's predicted time, before the correction by
    /// [residuals](Links::residuals).
    pub errors: Vec<f64>,
}

impl Key {
    /// Creates the key of a calibration for a backend, a machine and a topology, with this version
    /// of Peerlane.
    pub fn new(backend: &str, machine: &str, topology: &Topology) -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            backend: backend.to_owned(),
            machine: machine.to_owned(),
            topology: topology.notation(),
            fingerprint: topology.fingerprint(),
        }
    }

    /// Checks that the calibration was made with the expected version, backend, machine and
    /// topology.
    ///
    /// # Errors
    /// [`Mismatch`](ErrorKind::Mismatch), naming the first field that differs.
    pub fn check(&self, expected: &Self) -> Result<(), Error> {
        let fields = [
            ("version", &self.version, &expected.version),
            ("backend", &self.backend, &expected.backend),
            ("machine", &self.machine, &expected.machine),
            ("topology", &self.topology, &expected.topology),
        ];

        let differing = fields.into_iter().find(|(_, found, expected)| found != expected);
        let (name, found, expected) = match differing {
            Some((name, found, expected)) => (name, format!("{found:?}"), format!("{expected:?}")),
            None if self.fingerprint == expected.fingerprint => return Ok(()),
            // A topology has one notation, so only a file that was edited or damaged gets here.
            None => (
                "fingerprint",
                format!("{:x}", self.fingerprint),
                format!("{:x}", expected.fingerprint),
            ),
        };

        let text = format!(
            "the calibration does not match: {name} is {found}, expected {expected}; run `peerlane \
             calibrate` again"
        );
        Err(Error::new(ErrorKind::Mismatch, text))
    }
}

impl Calibration {
    /// Returns the links for each kind of engines that was measured.
    pub fn links(&self) -> impl Iterator<Item = &Links> {
        self.engines.iter().map(|engine| &engine.links)
    }

    /// Returns the fraction of the samples whose predicted time is [good](GOOD).
    pub fn good_share(&self) -> f64 {
        let good = self.errors().filter(|error| error.abs() <= GOOD).count();
        // Without samples the share is 0.
        good as f64 / self.errors().count().max(1) as f64
    }

    fn errors(&self) -> impl Iterator<Item = f64> {
        self.engines.iter().flat_map(|engine| engine.errors.iter().copied())
    }
}

impl fmt::Display for Calibration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Key { backend, machine, topology, .. } = &self.key;
        let worst = self.errors().map(f64::abs).fold(0.0, f64::max);

        write!(f, "{backend}, {topology}, {machine}")?;
        // A file of an older `--check` does not name the kind.
        let named: Vec<_> = self.links().map(|links| &*links.engine).collect();
        if named.iter().all(|engine| !engine.is_empty()) {
            write!(f, ", by {}", named.join(" and "))?;
        }
        write!(
            f,
            ": {} samples, {:.0} % within {:.0} %, the worst {:.0} % off",
            self.errors().count(),
            self.good_share() * 100.0,
            GOOD * 100.0,
            worst * 100.0
        )
    }
}

/// One measured all-gather with blocks of equal length.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sample {
    /// The kind of the engines that made the measured all-gather.
    #[serde(default)]
    pub engine: String,
    /// The algorithm of the measured all-gather.
    pub algorithm: Algorithm,
    /// The number of chunks into which each block was cut.
    pub chunks: u32,
    /// Whether the measured all-gather was in place.
    pub in_place: bool,
    /// The number of output buffers that the measured operation alternated between.
    pub outputs: u32,
    /// The order of signals, waits and copies in the measured all-gather.
    pub flags: FlagOrder,
    /// Whether a network connected the nodes, as a tier of its own; otherwise one fabric connected
    /// all ranks.
    pub tiers: bool,
    /// The length of each rank's block in bytes.
    pub block_bytes: u64,
    /// The median time of one all-gather, in seconds, in the fastest of several rounds.
    pub seconds: f64,
}

impl Sample {
    /// Returns the plan options of the measured all-gather.
    pub fn shape(&self) -> Shape {
        let &Self { chunks, in_place, outputs, flags, tiers, .. } = self;
        Shape { chunks, in_place, outputs, flags, tiers, ..Shape::default() }
    }
}

impl Residual {
    /// Returns whether the residual was measured with the algorithm and options of `request`.
    fn matches(&self, request: &CostRequest<'_>) -> bool {
        let shape = request.shape;

        // The number of chunks does not count: the factor is that of any number.
        shape.collective == Collective::AllGather
            && self.algorithm == request.algorithm
            && self.in_place == shape.in_place
            && self.outputs == shape.outputs
            && self.flags == shape.flags
            && self.tiers == shape.tiers
    }
}

/// Returns the ratio of measured to predicted time for `request`, or 1 if it was not measured.
///
/// Only all-gathers with blocks of equal length are measured.
pub(super) fn correction(residuals: &[Residual], request: &CostRequest<'_>) -> f64 {
    let least = request.sums.block_bytes_min;
    let most = request.sums.block_bytes_max;
    let measured = residuals
        .iter()
        .find(|residual| residual.matches(request) && [least, most] == [residual.block_bytes; 2]);

    measured.map_or(1.0, |residual| residual.factor)
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::*;
    use crate::schedule::estimate::ClusterSums;

    #[test]
    fn what_a_calibration_holds_for_is_checked_field_by_field() {
        let (two, four) = (Topology::flat(2).unwrap(), Topology::flat(4).unwrap());
        let key = Key::new("host", "2 cores", &two);
        key.check(&key).unwrap();
        let text = |expected: Key| key.check(&expected).unwrap_err().to_string();
        assert_snapshot!(text(Key::new("host", "2 cores", &four)), @r#"the calibration does not match: topology is "1x2", expected "1x4"; run `peerlane calibrate` again"#);
        assert_snapshot!(text(Key::new("cuda", "2 cores", &two)), @r#"the calibration does not match: backend is "host", expected "cuda"; run `peerlane calibrate` again"#);
        assert_snapshot!(text(Key::new("host", "8 cores", &two)), @r#"the calibration does not match: machine is "2 cores", expected "8 cores"; run `peerlane calibrate` again"#);
        let other = Key { version: "9.9.9".to_owned(), ..key.clone() };
        assert!(text(other).contains("version"));
        let error = key.check(&Key { fingerprint: 1, ..key.clone() }).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch);
    }

    fn residual(algorithm: Algorithm, block_bytes: u64, factor: f64) -> Residual {
        let Shape { in_place, outputs, flags, tiers, .. } = Shape::default();
        Residual { algorithm, in_place, outputs, flags, tiers, block_bytes, factor }
    }

    #[test]
    fn it_holds_for_what_was_measured() {
        use Algorithm::{Direct, Pull, Ring};
        let residuals = [residual(Direct, 1000, 1.2), residual(Ring, 1000, 0.9)];
        let (topology, links) = (Topology::flat(2).unwrap(), Links::default());
        let of = |algorithm, blocks: [u64; 2], shape| {
            let sums = ClusterSums::new(&topology, Collective::AllGather, &blocks);
            let request = CostRequest { algorithm, sums: &sums, shape, links: &links };
            correction(&residuals, &request)
        };
        let plain = Shape::default();
        assert_eq!([999, 1000, 1001].map(|bytes| of(Direct, [bytes; 2], plain)), [1.0, 1.2, 1.0]);
        assert_eq!(of(Direct, [999, 1000], plain), 1.0, "blocks are unlike");
        assert_eq!(of(Ring, [1000; 2], Shape { chunks: 8, ..plain }), 0.9);
        assert_eq!(of(Ring, [1000; 2], Shape { outputs: 2, ..plain }), 1.0);
        assert_eq!(of(Pull, [1000; 2], plain), 1.0);
    }
}
