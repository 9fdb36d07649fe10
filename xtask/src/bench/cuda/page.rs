//! Renders visits as sections of a page.

use super::super::report::{self, figure, size};
use super::UNEVEN;
use super::visit::{Point, Row, Visit};

impl Visit {
    pub(super) fn section(&self) -> String {
        let Self { date, peerlane, machine, nccl, notes, commands, .. } = self;
        let mut text = format!("\n## {date}: {}", machine.first().map_or("", |line| line));
        text += &nccl.as_ref().map_or_else(String::new, |nccl| format!(", NCCL {nccl}"));
        text += "\n\n";
        text += &peerlane
            .as_ref()
            .map_or_else(String::new, |version| format!("- Peerlane {version}\n"));
        machine.iter().skip(1).chain(notes).for_each(|line| text += &format!("- {line}\n"));
        if !commands.is_empty() {
            let lines: String = commands.iter().map(|line| format!("$ {line}\n")).collect();
            text += &format!("\n```console\n{lines}```\n");
        }

        let mut tables: Vec<TableKey<'_>> = Vec::new();
        for key in self.rows.iter().map(TableKey::of_row) {
            if !tables.contains(&key) {
                tables.push(key);
            }
        }
        text += &tables.iter().map(|table| self.table(*table)).collect::<String>();
        text + &self.overlap_table()
    }

    /// Returns the table of one collective: a line for each size, and two columns for each form.
    fn table(&self, key: TableKey<'_>) -> String {
        let rows: Vec<&Row> = self.rows.iter().filter(|row| TableKey::of_row(row) == key).collect();
        let mut totals: Vec<u64> = rows.iter().map(|row| row.point.total_bytes).collect();
        totals.sort_unstable();
        totals.dedup();

        let mut titles = vec!["total".to_owned()];
        let mut cells: Vec<Vec<String>> = totals.iter().map(|total| vec![size(*total)]).collect();
        let mut add = |title: String, cell: &dyn Fn(u64) -> String| {
            let column: Vec<String> = totals.iter().map(|total| cell(*total)).collect();
            if column.iter().any(|cell| cell != "–") {
                titles.push(title);
                cells.iter_mut().zip(column).for_each(|(line, cell)| line.push(cell));
            }
        };
        for form in ["eager", "in place", "captured", "captured in place"] {
            let find = |total| {
                rows.iter().find(|row| row.form() == form && row.point.total_bytes == total)
            };
            let value = |value: &dyn Fn(&Row) -> Option<f64>, total, decimals| {
                figure(find(total).and_then(|row| value(row)), decimals)
            };
            add(format!("{form}, µs"), &|total| value(&|row| row.median_us, total, 1));
            add("× best".into(), &|total| value(&Row::by_best, total, 2));
            add("of the limit".into(), &|total| value(&Row::share, total, 2));
            add("× earlier".into(), &|total| value(&Row::by_earlier, total, 2));
            add("× even".into(), &|total| {
                let row = find(total).filter(|row| row.point.variant == UNEVEN);
                figure(row.and_then(|row| self.by_even(row)), 2)
            });
        }

        let rules = titles.iter().map(|_| "--:".to_owned());
        let head = report::joined(titles.clone()) + &report::joined(rules);
        let lines: String = cells.into_iter().map(report::joined).collect();
        format!("\n{key}:\n\n{head}{lines}")
    }

    /// Returns the time of the collective with even blocks of about the same total, divided by that
    /// of uneven ones.
    fn by_even(&self, row: &Row) -> Option<f64> {
        let is_even = |other: &&Row| {
            let total_bytes = other.point.total_bytes;
            let even = Point { variant: String::new(), total_bytes, ..row.point.clone() };
            // The lengths of uneven blocks are rounded.
            let difference = total_bytes.abs_diff(row.point.total_bytes);
            other.point == even && difference * 100 < row.point.total_bytes
        };
        Some(self.rows.iter().find(is_even)?.median_us? / row.median_us?)
    }

    fn overlap_table(&self) -> String {
        if self.overlaps.is_empty() {
            return String::new();
        }

        let table = report::table(
            &self.overlaps,
            &[
                ("ranks", &|row| row.ranks.to_string()),
                ("total", &|row| size(row.total_bytes)),
                ("<place", &|row| {
                    if row.in_place { "in place" } else { "out of place" }.to_owned()
                }),
                ("<all-gathers of", &|row| match row.variant.as_str() {
                    "" => row.path.clone(),
                    variant => format!("{}, {variant}", row.path),
                }),
                ("GEMM × alone", &|row| figure(row.compute_ratio, 3)),
                ("alone, µs", &|row| figure(row.gather_alone_us, 1)),
                ("overlapped, µs", &|row| figure(row.gather_us, 1)),
                ("× alone", &|row| figure(row.gather_ratio, 3)),
            ],
        );

        format!("\nAll-gathers beside a bf16 GEMM of 8192³ that runs all the time:\n\n{table}")
    }
}

/// What the rows of one table have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct TableKey<'r> {
    collective: &'r str,
    dtype: &'r str,
    ranks: usize,
    variant: &'r str,
}

impl<'r> TableKey<'r> {
    fn of_row(row: &'r Row) -> Self {
        let Point { collective, dtype, ranks, variant, .. } = &row.point;
        Self { collective, dtype, ranks: *ranks, variant }
    }
}

impl std::fmt::Display for TableKey<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { collective, dtype, ranks, variant } = self;
        let mut name = (*collective).to_owned();
        name.get_mut(..1).into_iter().for_each(str::make_ascii_uppercase);
        write!(f, "{name}")?;
        if *dtype != "u8" {
            write!(f, " of {dtype}")?;
        }
        write!(f, ", {ranks} ranks")?;
        if variant.is_empty() { Ok(()) } else { write!(f, ", {variant}") }
    }
}
