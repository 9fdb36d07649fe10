//! Numbers of bytes as people write and read them.
//!
//! Suffixes are powers of 1024. `KB` and `MB` are refused on purpose: half of the readers take them
//! for powers of 1000.

use std::fmt;
use std::str::FromStr;

/// A number of bytes from the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Size(pub(crate) u64);

/// Why a text is no size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SizeError(String);

impl FromStr for Size {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
        let suffix = &text[digits.len()..];
        if digits.is_empty() {
            let text = if text.is_empty() { "an empty text" } else { text };
            return Err(SizeError(format!("{text} is no size; write bytes, such as 65536 or 64K")));
        }
        let Some(shift) = shift(suffix) else {
            return Err(SizeError(format!(
                "the suffix {suffix} is unknown; write K, M or G (KiB, MiB, GiB), powers of 1024"
            )));
        };
        if let Some(other) = digits.chars().find(|c| !c.is_ascii_digit()) {
            return Err(SizeError(format!(
                "{other:?} cannot be part of a size; write a whole number, such as 65536 or 64K"
            )));
        }
        digits
            .parse::<u64>()
            .ok()
            .and_then(|count| count.checked_mul(1 << shift))
            .map(Self)
            .ok_or_else(|| SizeError(format!("{text} is more than 2^64 bytes")))
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

impl fmt::Display for SizeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for SizeError {}

fn shift(suffix: &str) -> Option<u32> {
    match suffix.to_ascii_lowercase().as_str() {
        "" | "b" => Some(0),
        "k" | "kib" => Some(10),
        "m" | "mib" => Some(20),
        "g" | "gib" => Some(30),
        _ => None,
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
        ] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_says_why() {
        let refusal = |text: &str| text.parse::<Size>().unwrap_err().to_string();
        insta::assert_snapshot!(refusal(""), @"an empty text is no size; write bytes, such as 65536 or 64K");
        insta::assert_snapshot!(refusal("many"), @"many is no size; write bytes, such as 65536 or 64K");
        insta::assert_snapshot!(refusal("64KB"), @"the suffix KB is unknown; write K, M or G (KiB, MiB, GiB), powers of 1024");
        insta::assert_snapshot!(refusal("1.5M"), @"'.' cannot be part of a size; write a whole number, such as 65536 or 64K");
        insta::assert_snapshot!(refusal("-1"), @"'-' cannot be part of a size; write a whole number, such as 65536 or 64K");
        insta::assert_snapshot!(refusal("99999999999G"), @"99999999999G is more than 2^64 bytes");
        insta::assert_snapshot!(refusal("18446744073709551616"), @"18446744073709551616 is more than 2^64 bytes");
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
}
