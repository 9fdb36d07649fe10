//! The measurement as a page.

use std::fmt::Write;

use super::{Record, Row, What, goals};
use crate::bench::facts::Machine;

/// The page, in Markdown.
pub(super) fn page(record: &Record) -> Result<String, std::fmt::Error> {
    let Machine { command, date, peerlane, rustc, kernel, cpu, cores } = &record.machine;
    let mut page = String::new();
    writeln!(page, "# Planning and simulating over the number of ranks\n")?;
    writeln!(page, "Written by `{command}` on {date}; do not edit.\n")?;
    writeln!(page, "- Peerlane {peerlane}, {rustc}")?;
    writeln!(page, "- {cores} cores of {cpu}, {kernel}; one thread")?;
    writeln!(
        page,
        "- Nodes have 8 ranks; shards are whole, in one chunk, and other nodes are reached over a \
         network. A plan's time is that of the slowest of three ranks, each at its best of five \
         times. A simulation makes the plans of all ranks and runs one start over the default \
         links; its time is that on the processor, below 0.2 s the best of five times. Memory is what the heap holds at most."
    )?;
    for verdict in goals::judge(&record.rows) {
        writeln!(page, "- Goal: {verdict}")?;
    }
    writeln!(page, "\n![Time and memory over the number of ranks](planning.svg)")?;
    writeln!(page, "\n## One rank's plan\n")?;
    table(&mut page, record, What::Plan)?;
    writeln!(page, "\n## All ranks, simulated\n")?;
    table(&mut page, record, What::Simulate)?;
    Ok(page)
}

fn table(page: &mut String, record: &Record, what: What) -> std::fmt::Result {
    writeln!(page, "| algorithm | ranks | steps | time | memory |")?;
    writeln!(page, "| --- | --: | --: | --: | --: |")?;
    for (name, rows) in record.series(what) {
        for row in rows {
            let Row { ranks, steps, .. } = row;
            let (time, memory) = (time(row.seconds), memory(row.peak_bytes));
            writeln!(page, "| {name} | {ranks} | {steps} | {time} | {memory} |")?;
        }
    }
    Ok(())
}

/// A time in the unit that leaves one to three digits before the point.
pub(super) fn time(seconds: f64) -> String {
    match seconds {
        _ if seconds < 1e-3 => format!("{:.1} µs", seconds * 1e6),
        _ if seconds < 1.0 => format!("{:.2} ms", seconds * 1e3),
        _ => format!("{seconds:.1} s"),
    }
}

/// Bytes in powers of 1000.
pub(super) fn memory(bytes: u64) -> String {
    let value = bytes as f64;
    match bytes {
        0..1_000_000 => format!("{:.1} kB", value / 1e3),
        1_000_000..1_000_000_000 => format!("{:.2} MB", value / 1e6),
        _ => format!("{:.2} GB", value / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::row;
    use super::*;

    #[test]
    fn units_fit() {
        assert_eq!([2e-6, 0.0042, 31.26].map(time), ["2.0 µs", "4.20 ms", "31.3 s"]);
        assert_eq!([700, 4_200_000, 1_250_000_000].map(memory), ["0.7 kB", "4.20 MB", "1.25 GB"]);
    }

    #[test]
    fn a_page_has_goals_a_plot_and_both_tables() {
        let rows =
            vec![row(What::Plan, "ring", 16_384, 4e-3), row(What::Simulate, "ring", 4096, 31.26)];
        let page = page(&Record { machine: Machine::default(), rows }).unwrap();
        for text in [
            "5 ms and 5 MB: reached",
            "60 s and 8 GB: reached",
            "planning.svg",
            "| ring | 16384 | 49152 | 4.00 ms | 1.64 MB |",
            "| ring | 4096 | 12288 | 31.3 s | 409.6 kB |",
        ] {
            assert!(page.contains(text), "{text}:\n{page}");
        }
    }
}
