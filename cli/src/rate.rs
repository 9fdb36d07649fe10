//! Rates and delays of networks, as people write and read them.
//!
//! Rates take powers of 1000, as networks are sold; memory has powers of 1024: [`crate::size`].

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Bytes a second from the command line, more than 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Rate(pub(crate) f64);

/// A short time from the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Delay(pub(crate) Duration);

const RATES: [(&str, f64); 4] = [("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3), ("B/s", 1.0)];
const TIMES: [(&str, f64); 4] = [("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3), ("s", 1.0)];

impl FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let rate = scaled(text, &RATES).filter(|rate| (1.0..=1e15).contains(rate));
        rate.map(Self).ok_or_else(|| "wanted a rate above 0, such as 2GB/s or 500MB/s".to_owned())
    }
}

impl FromStr for Delay {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let seconds = scaled(text, &TIMES).filter(|seconds| (0.0..=10.0).contains(seconds));
        let delay = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        delay.map(Self).ok_or_else(|| "wanted a time up to 10s, such as 20us or 1ms".to_owned())
    }
}

/// A number in front of one of the units.
fn scaled(text: &str, units: &[(&str, f64)]) -> Option<f64> {
    let (number, factor) = units.iter().find_map(|(unit, factor)| {
        let number = text.strip_suffix(unit)?.trim();
        number.ends_with(|c: char| c.is_ascii_digit() || c == '.').then_some((number, factor))
    })?;
    let value = number.parse::<f64>().ok()? * factor;
    value.is_finite().then_some(value)
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fits = RATES.iter().find(|(_, factor)| self.0 >= *factor);
        let (unit, factor) = fits.unwrap_or(&("B/s", 1.0));
        write!(f, "{} {unit}", self.0 / factor)
    }
}

impl fmt::Display for Delay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_powers_of_1000() {
        let rate = |text: &str| text.parse::<Rate>().map(|rate| rate.0);
        assert_eq!(rate("2GB/s"), Ok(2e9));
        assert_eq!(rate("2.5 GB/s"), Ok(2.5e9));
        assert_eq!(rate("500MB/s"), Ok(5e8));
        assert_eq!(rate("7B/s"), Ok(7.0));
        for wrong in ["", "2", "0GB/s", "-1GB/s", "2Gb/s", "NaNB/s", "infGB/s", "GB/s", "1e9GB/s"] {
            assert!(rate(wrong).is_err(), "{wrong}");
        }
        assert_eq!("2.5GB/s".parse::<Rate>().unwrap().to_string(), "2.5 GB/s");
    }

    #[test]
    fn delays_are_short() {
        let delay = |text: &str| text.parse::<Delay>().map(|delay| delay.0);
        assert_eq!(delay("20us"), Ok(Duration::from_micros(20)));
        assert_eq!(delay("1.5ms"), Ok(Duration::from_micros(1500)));
        assert_eq!(delay("0s"), Ok(Duration::ZERO));
        assert_eq!(delay("7ns"), Ok(Duration::from_nanos(7)));
        for wrong in ["", "20", "11s", "-1us", "1h", "us"] {
            assert!(delay(wrong).is_err(), "{wrong}");
        }
    }
}
