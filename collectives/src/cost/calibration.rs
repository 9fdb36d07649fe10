//! Calibrations: measured links, with the conditions of the measurement.

use std::fmt;

use peerlane_hal::ErrorKind;
use serde::{Deserialize, Serialize};

use super::fit::fit;
use super::links::Links;
use super::residual::Residual;
use super::sample::Sample;
use crate::error::Error;
use crate::topology::Topology;

/// The relative error up to which a prediction counts as good.
pub const GOOD: f64 = 0.2;

/// The conditions for which a calibration is valid: another machine, backend, topology or version needs another one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Key {
    /// The version of Peerlane.
    pub version: String,
    /// The backend, such as `host`; several tiers are joined by `+`.
    pub backend: String,
    /// The processors or GPUs, as the system names them.
    pub machine: String,
    /// The topology in its [notation](Topology::notation).
    pub topology: String,
    /// The topology's [fingerprint](Topology::fingerprint).
    pub fingerprint: u64,
}

/// Measured links.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    /// The conditions of the measurement.
    pub key: Key,
    /// The links.
    pub links: Links,
    /// The measurements.
    pub samples: Vec<Sample>,
    /// The relative error of the prediction for each sample, without [residuals](Links::residuals).
    pub errors: Vec<f64>,
}

impl Key {
    /// Creates a key for this version of Peerlane.
    pub fn new(backend: &str, machine: &str, topology: &Topology) -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            backend: backend.to_owned(),
            machine: machine.to_owned(),
            topology: topology.notation(),
            fingerprint: topology.fingerprint(),
        }
    }

    /// Returns an error if the calibration is for other conditions.
    ///
    /// # Errors
    /// [`Mismatch`](ErrorKind::Mismatch), naming the first field that differs.
    pub fn check(&self, wanted: &Self) -> Result<(), Error> {
        let fields = [
            ("version", &self.version, &wanted.version),
            ("backend", &self.backend, &wanted.backend),
            ("machine", &self.machine, &wanted.machine),
            ("topology", &self.topology, &wanted.topology),
        ];
        let differing = fields.into_iter().find(|(_, seen, wanted)| seen != wanted);
        let (name, seen, wanted) = match differing {
            Some((name, seen, wanted)) => (name, format!("{seen:?}"), format!("{wanted:?}")),
            None if self.fingerprint == wanted.fingerprint => return Ok(()),
            None => (
                "fingerprint",
                format!("{:x}", self.fingerprint),
                format!("{:x}", wanted.fingerprint),
            ),
        };
        let text =
            format!("the calibration is for {name} {seen}, wanted {wanted}; calibrate again");
        Err(Error::new(ErrorKind::Mismatch, text))
    }
}

impl Calibration {
    /// Fits links to samples, starting from default links.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if there is no sample, or an impossible one.
    pub fn new(
        key: Key,
        known: Links,
        topology: &Topology,
        samples: Vec<Sample>,
    ) -> Result<Self, Error> {
        if samples.is_empty() {
            return Err(invalid("samples is empty, expected one measurement at least".to_owned()));
        }
        for (index, sample) in samples.iter().enumerate() {
            let seconds = sample.seconds;
            if !(seconds.is_finite() && seconds > 0.0) {
                let text = format!("samples[{index}].seconds is {seconds}, expected more than 0");
                return Err(invalid(text));
            }
        }
        let (mut links, errors) = fit(known, topology, &samples)?;
        links.residuals =
            samples.iter().zip(&errors).map(|(one, error)| Residual::new(one, *error)).collect();
        Ok(Self { key, links, samples, errors })
    }

    /// Returns the fraction of the samples with a [good](GOOD) prediction.
    pub fn good_share(&self) -> f64 {
        let good = self.errors.iter().filter(|error| error.abs() <= GOOD).count();
        good as f64 / self.errors.len().max(1) as f64
    }
}

impl fmt::Display for Calibration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Key { backend, machine, topology, .. } = &self.key;
        let worst = self.errors.iter().copied().map(f64::abs).fold(0.0, f64::max);
        write!(
            f,
            "{backend}, {topology}, {machine}: {} samples, {:.0} % within {:.0} %, the worst {:.0} % off",
            self.samples.len(),
            self.good_share() * 100.0,
            GOOD * 100.0,
            worst * 100.0
        )
    }
}

/// FNV-1a.
fn fingerprint(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

impl Links {
    /// Returns a hash of all figures, with which ranks verify that they use the same links.
    pub fn fingerprint(&self) -> u64 {
        // Plain data always encodes; floats as their bits.
        fingerprint(postcard::to_stdvec(self).unwrap_or_default().into_iter())
    }
}

fn invalid(text: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, text)
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::super::choose::{Question, choose};
    use super::super::predict::predict;
    use super::*;
    use crate::plan::{Algorithm, FlagOrder};

    fn sample(seconds: f64) -> Sample {
        Sample {
            algorithm: Algorithm::Direct,
            chunks: 1,
            in_place: false,
            outputs: 1,
            flags: FlagOrder::Prompt,
            tiers: false,
            shard_bytes: 1 << 20,
            seconds,
        }
    }

    #[test]
    fn what_a_calibration_holds_for_is_checked_field_by_field() {
        let (two, four) = (Topology::flat(2).unwrap(), Topology::flat(4).unwrap());
        let key = Key::new("host", "2 cores", &two);
        key.check(&key).unwrap();
        let text = |wanted: Key| key.check(&wanted).unwrap_err().to_string();
        assert_snapshot!(text(Key::new("host", "2 cores", &four)), @r#"the calibration is for topology "1x2", wanted "1x4"; calibrate again"#);
        assert_snapshot!(text(Key::new("cuda", "2 cores", &two)), @r#"the calibration is for backend "host", wanted "cuda"; calibrate again"#);
        assert_snapshot!(text(Key::new("host", "8 cores", &two)), @r#"the calibration is for machine "2 cores", wanted "8 cores"; calibrate again"#);
        let other = Key { version: "9.9.9".to_owned(), ..key.clone() };
        assert!(text(other).contains("version"));
        let error = key.check(&Key { fingerprint: 1, ..key.clone() }).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch);
    }

    #[test]
    fn what_was_measured_is_predicted_and_chosen() {
        use Algorithm::{Direct, Pull};
        let topology = Topology::flat(4).unwrap();
        let measured =
            |algorithm, shard_bytes, seconds| Sample { algorithm, shard_bytes, ..sample(seconds) };
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
        let calibration = Calibration::new(key, Links::default(), &topology, samples).unwrap();
        let links = &calibration.links;
        for one in &calibration.samples {
            let shards = [one.shard_bytes; 4];
            let cost = predict(one.algorithm, &topology, one.shape(), &shards, links).unwrap();
            assert!((cost.seconds() / one.seconds - 1.0).abs() < 1e-3, "{one:?}: {cost}");
        }
        let chosen = [1 << 10, 1 << 16, 1 << 22].map(|bytes| {
            let question = Question {
                topology: &topology,
                shard_bytes: &[bytes; 4],
                shape: calibration.samples[0].shape(),
                links,
                measured: true,
                algorithm: None,
                chunks: Some(1),
                refused: &[(Algorithm::Ring, "asked elsewhere"), (Algorithm::DoubleRing, "too")],
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
        let calibration = Calibration::new(key, Links::default(), &topology, samples).unwrap();
        assert_eq!(calibration.good_share(), 1.0, "{calibration}");
        let text = serde_json::to_string(&calibration).unwrap();
        let read: Calibration = serde_json::from_str(&text).unwrap();
        assert_eq!(read.links.fingerprint(), calibration.links.fingerprint());
        assert_eq!(read, calibration);
        assert_ne!(Links::default().fingerprint(), calibration.links.fingerprint());
    }

    #[test]
    fn impossible_samples_are_named() {
        let topology = Topology::flat(2).unwrap();
        let text = |samples| {
            let key = Key::new("host", "2 cores", &topology);
            Calibration::new(key, Links::default(), &topology, samples).unwrap_err().to_string()
        };
        assert_snapshot!(text(vec![]), @"samples is empty, expected one measurement at least");
        assert_snapshot!(text(vec![sample(1.0), sample(0.0)]), @"samples[1].seconds is 0, expected more than 0");
    }
}
