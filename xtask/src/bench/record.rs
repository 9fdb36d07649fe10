//! What was measured, as data for programs and as a table for people.

use std::fmt::Write;
use std::path::Path;

use super::facts::Facts;
use super::goals;
use peerlane_rxe_vm::process::Outcome;

/// A whole comparison.
#[derive(Debug, serde::Serialize)]
pub(super) struct Record {
    pub(super) facts: Facts,
    /// Each median is that of so many runs, taken in turns.
    pub(super) rounds: usize,
    pub(super) rows: Vec<Row>,
}

/// One number of ranks and one size.
#[derive(Clone, Debug, serde::Serialize)]
pub(super) struct Row {
    pub(super) ranks: usize,
    pub(super) total_bytes: u64,
    pub(super) shard_bytes: u64,
    pub(super) iterations: u32,
    pub(super) open_mpi: Side,
    pub(super) peerlane: Side,
    /// As many bare copies at once, in µs.
    pub(super) limit_us: Option<f64>,
}

/// One side of a row; times are medians over the rounds.
#[derive(Clone, Debug, serde::Serialize)]
pub(super) struct Side {
    /// Open MPI's better setting, or Peerlane's algorithm and engine.
    pub(super) how: String,
    pub(super) median_us: f64,
    pub(super) p99_us: f64,
    /// The median of each round.
    pub(super) rounds_us: Vec<f64>,
}

impl Row {
    /// How many times faster Peerlane is.
    fn ratio(&self) -> f64 {
        self.open_mpi.median_us / self.peerlane.median_us
    }

    /// The speed of Peerlane as a share of that of bare copies.
    fn share(&self) -> Option<f64> {
        self.limit_us.map(|limit_us| limit_us / self.peerlane.median_us)
    }

    /// Whether the goals are reached, with words.
    pub(super) fn verdict(&self) -> Result<String, String> {
        goals::judge(self.total_bytes, self.ratio(), self.share())
    }

    /// The row as a line of a Markdown table.
    pub(super) fn line(&self) -> String {
        let verdict = match self.verdict() {
            Ok(reached) => reached,
            Err(missed) => format!("**missed**: {missed}"),
        };
        let limit = self.limit_us.map_or_else(|| "–".into(), |limit| format!("{limit:.1}"));
        let share = self.share().map_or_else(|| "–".into(), |share| format!("{share:.2}"));
        format!(
            "| {} | {} | {:.1} | {} | {:.1} | {:.2} | {limit} | {share} | {verdict} |",
            self.ranks,
            size(self.total_bytes),
            self.open_mpi.median_us,
            self.open_mpi.how,
            self.peerlane.median_us,
            self.ratio(),
        )
    }
}

/// The head of the table that [`Row::line`] fills.
pub(super) const HEAD: &str = "\
| ranks | total | Open MPI, µs | its setting | Peerlane, µs | times faster | limit, µs | share of the limit | goal |
| --: | --: | --: | --- | --: | --: | --: | --: | --- |";

impl Record {
    /// Writes `NAME.json` and `NAME.md` into `folder`.
    pub(super) fn save(&self, folder: &Path, name: &str) -> Outcome {
        std::fs::create_dir_all(folder)?;
        let json = serde_json::to_string_pretty(self)? + "\n";
        std::fs::write(folder.join(name).with_extension("json"), json)?;
        std::fs::write(folder.join(name).with_extension("md"), self.page()?)?;
        Ok(())
    }

    fn page(&self) -> Result<String, std::fmt::Error> {
        let Facts { command, date, peerlane, open_mpi, rustc, kernel, cpu, cores } = &self.facts;
        let mut page = String::new();
        writeln!(page, "# All-gather between processes of one host\n")?;
        writeln!(page, "Written by `{command}` on {date}; do not edit.\n")?;
        writeln!(page, "- Peerlane {peerlane}, Open MPI {open_mpi}, {rustc}")?;
        writeln!(page, "- {cores} cores of {cpu}, {kernel}")?;
        writeln!(
            page,
            "- An iteration is barrier, all-gather, maximum over the ranks. A time is the median of \
             the iterations, then the median of {} rounds, in which both sides take turns. Open MPI \
             has its best setting of those tried. The limit is the time of as many plain copies of \
             the same sizes, at once.\n",
            self.rounds
        )?;
        writeln!(page, "{HEAD}")?;
        self.rows.iter().try_for_each(|row| writeln!(page, "{}", row.line()))?;
        Ok(page)
    }
}

/// A size in the largest unit that divides it.
pub(super) fn size(bytes: u64) -> String {
    let units = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
    let fitting = units.iter().find(|(shift, _)| bytes > 0 && bytes.is_multiple_of(1 << shift));
    fitting
        .map_or_else(|| format!("{bytes} B"), |(shift, unit)| format!("{} {unit}", bytes >> shift))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_short() {
        let sizes = [1000, 1024, 262_144, 1 << 20, 3 << 29].map(size);
        assert_eq!(sizes, ["1000 B", "1 KiB", "256 KiB", "1 MiB", "1536 MiB"]);
    }

    #[test]
    fn a_row_shows_both_sides_and_the_goal() {
        let side = |how: &str, median_us| Side {
            how: how.into(),
            median_us,
            p99_us: 2.0 * median_us,
            rounds_us: vec![median_us],
        };
        let mut row = Row {
            ranks: 4,
            total_bytes: 1 << 20,
            shard_bytes: 1 << 18,
            iterations: 10,
            open_mpi: side("yielding", 300.0),
            peerlane: side("direct, host", 150.0),
            limit_us: Some(120.0),
        };
        assert_eq!(
            row.line(),
            "| 4 | 1 MiB | 300.0 | yielding | 150.0 | 2.00 | 120.0 | 0.80 | ≥ 1.3 × Open MPI |"
        );
        row.open_mpi.median_us = 120.0;
        row.limit_us = None;
        assert_eq!(
            row.line(),
            "| 4 | 1 MiB | 120.0 | yielding | 150.0 | 0.80 | – | – | \
             **missed**: slower than Open MPI: 0.80 |"
        );
    }
}
