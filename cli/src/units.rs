//! Parses and prints sizes, rates and delays of the command line.
//!
//! Sizes of memory use powers of 1024. `KB` and `MB` are refused, because many readers take them
//! for powers of 1000. Rates of networks use powers of 1000, as vendors state them.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// A number of bytes on the command line, such as `64K`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Size(pub(crate) u64);

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
        let suffix = &text[digits.len()..];
        if digits.is_empty() {
            let text = if text.is_empty() { "an empty text" } else { text };
            return Err(format!(
                "{text} is not a size, expected a number of bytes, such as 65536 or 64K"
            ));
        }
        let Some(shift) = shift(suffix) else {
            return Err(format!(
                "unknown suffix {suffix}, expected K, M or G (or KiB, MiB, GiB), powers of 1024"
            ));
        };
        let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
        if let Some(other) = [whole, fraction].concat().chars().find(|c| !c.is_ascii_digit()) {
            return Err(format!(
                "{other:?} is not allowed in a size, expected a number, such as 65536, 64K or 1.5M"
            ));
        }
        if digits.contains('.') {
            let bytes =
                digits.parse::<f64>().map_err(|error| error.to_string())? * (1u64 << shift) as f64;
            // Every whole number up to this is exact.
            let is_whole = bytes.fract() == 0.0 && bytes <= (1u64 << 53) as f64;
            return is_whole.then_some(Self(bytes as u64)).ok_or_else(|| {
                format!("{text} is {bytes} bytes, expected a whole number of bytes")
            });
        }
        digits
            .parse::<u64>()
            .ok()
            .and_then(|count| count.checked_mul(1 << shift))
            .map(Self)
            .ok_or_else(|| format!("{text} is too large, expected less than 2^64 bytes"))
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u32, &str); 6] =
            [(60, "EiB"), (50, "PiB"), (40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
        let text = match UNITS.iter().find(|(shift, _)| self.0 >> shift > 0) {
            None => format!("{} B", self.0),
            Some((shift, unit)) if self.0.trailing_zeros() >= *shift => {
                format!("{} {unit}", self.0 >> shift)
            }
            Some((shift, unit)) => format!("{:.2} {unit}", self.0 as f64 / (1u64 << shift) as f64),
        };
        f.pad(&text)
    }
}

fn shift(suffix: &str) -> Option<u32> {
    match suffix.to_ascii_lowercase().as_str() {
        "" | "b" => Some(0),
        "k" | "kib" => Some(10),
        "m" | "mib" => Some(20),
        "g" | "gib" => Some(30),
        _ => None,
    }
}

/// A rate in bytes per second on the command line, such as `2GB/s`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Rate(pub(crate) f64);

/// A time of at most 10 s on the command line, such as `20us`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Delay(pub(crate) Duration);

const RATES: [(&str, f64); 4] = [("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3), ("B/s", 1.0)];
const TIMES: [(&str, f64); 4] = [("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3), ("s", 1.0)];

impl FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let rate = scaled(text, &RATES).filter(|rate| (1.0..=1e15).contains(rate));
        rate.map(Self).ok_or_else(|| {
            "expected a number above 0 with a unit, such as 2GB/s or 500MB/s".to_owned()
        })
    }
}

impl FromStr for Delay {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let seconds = scaled(text, &TIMES).filter(|seconds| (0.0..=10.0).contains(seconds));
        let delay = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        delay.map(Self).ok_or_else(|| {
            "expected a time with a unit, at most 10s, such as 20us or 1ms".to_owned()
        })
    }
}

/// Returns the number in front of one of the units, multiplied by the factor of the unit.
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
    fn sizes_are_powers_of_1024() {
        for (text, bytes) in [
            ("0", 0),
            ("65536", 1 << 16),
            ("7B", 7),
            ("64K", 1 << 16),
            ("64k", 1 << 16),
            ("3KiB", 3 << 10),
            ("5M", 5 << 20),
            ("5MiB", 5 << 20),
            ("2G", 2 << 30),
            ("2GiB", 2 << 30),
            ("1.5M", 3 << 19),
            ("0.5K", 512),
            ("2.0", 2),
        ] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
    }

    #[test]
    fn invalid_sizes_are_refused_with_a_reason() {
        let refusal = |text: &str| text.parse::<Size>().unwrap_err();
        insta::assert_snapshot!(refusal(""), @"an empty text is not a size, expected a number of bytes, such as 65536 or 64K");
        insta::assert_snapshot!(refusal("many"), @"many is not a size, expected a number of bytes, such as 65536 or 64K");
        insta::assert_snapshot!(refusal("64KB"), @"unknown suffix KB, expected K, M or G (or KiB, MiB, GiB), powers of 1024");
        insta::assert_snapshot!(refusal("1.2.5M"), @"'.' is not allowed in a size, expected a number, such as 65536, 64K or 1.5M");
        insta::assert_snapshot!(refusal("1.3K"), @"1.3K is 1331.2 bytes, expected a whole number of bytes");
        insta::assert_snapshot!(refusal("-1"), @"'-' is not allowed in a size, expected a number, such as 65536, 64K or 1.5M");
        insta::assert_snapshot!(refusal("99999999999G"), @"99999999999G is too large, expected less than 2^64 bytes");
        insta::assert_snapshot!(refusal("18446744073709551616"), @"18446744073709551616 is too large, expected less than 2^64 bytes");
    }

    #[test]
    fn sizes_are_shown_exactly_where_they_are_whole() {
        let shown = |bytes| Size(bytes).to_string();
        assert_eq!(shown(0), "0 B");
        assert_eq!(shown(1023), "1023 B");
        assert_eq!(shown(1024), "1 KiB");
        assert_eq!(shown(1026), "1.00 KiB");
        assert_eq!(shown(3 << 20), "3 MiB");
        assert_eq!(shown((3 << 19) + 1), "1.50 MiB");
        assert_eq!(shown(1 << 30), "1 GiB");
        assert_eq!(shown(u64::MAX), "16.00 EiB");
        assert_eq!(format!("{:>8}", Size(1 << 20)), "   1 MiB");
    }

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
