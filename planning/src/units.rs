//! Formats times, sizes and rates as text with three digits and a unit.

/// Formats a time in picoseconds as a text such as `2.08 ms`.
pub(crate) fn time(picoseconds: u64) -> String {
    scaled(picoseconds as f64 / 1e3, 1e3, &["ns", "µs", "ms", "s"])
}

/// Formats a number of bytes as a text such as `1.5 MiB`.
pub fn bytes(bytes: u64) -> String {
    scaled(bytes as f64, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"])
}

/// Formats a rate in bytes per second as a text such as `392 GB/s`.
pub(crate) fn rate(bytes_per_second: f64) -> String {
    scaled(bytes_per_second, 1e3, &["B/s", "KB/s", "MB/s", "GB/s", "TB/s", "PB/s"])
}

/// Formats `value` with three digits and a unit; each of `units` is `step` times the unit before
/// it.
fn scaled(mut value: f64, step: f64, units: &[&str]) -> String {
    // A value from 999.5 on would be rounded to 1000, so it gets the next unit.
    let mut unit = 0;
    while value >= step * 0.9995 && unit + 1 < units.len() {
        value /= step;
        unit += 1;
    }

    let digits = match value {
        // A whole number is shown in full, such as 1023 B.
        _ if value.fract() == 0.0 => 0,
        // From 9.995 on, two decimals would make four digits after rounding; the same holds for
        // 99.95.
        value if value < 9.995 => 2,
        value if value < 99.95 => 1,
        _ => 0,
    };

    let text = format!("{value:.digits$}");
    let text = if digits > 0 { text.trim_end_matches('0').trim_end_matches('.') } else { &text };

    format!("{text} {}", units[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_digits_are_shown() {
        assert_eq!(
            [0, 999, 1_000_000, 2_081_234_567].map(time),
            ["0 ns", "1 ns", "1 µs", "2.08 ms"]
        );
        assert_eq!([0, 1023, 1536, 100 << 20].map(bytes), ["0 B", "1023 B", "1.5 KiB", "100 MiB"]);
        assert_eq!([392e9, 48.5e9, 1e12].map(rate), ["392 GB/s", "48.5 GB/s", "1 TB/s"]);
        assert_eq!(time(u64::MAX), "18446744 s");
    }
}
