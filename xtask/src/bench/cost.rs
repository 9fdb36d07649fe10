//! `cargo xtask bench cost`: how well the model of costs predicts a backend.
//!
//! The program calibrates itself on some sizes and predicts those and the sizes between; see
//! `peerlane calibrate --check`. Here the figures are only written down.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use super::facts::Facts;
use super::program::Peerlane;
use super::record::size;
use crate::workspace;
use peerlane_rxe_vm::process::Outcome;

/// The goals: points predicted within 20 %, and what a choice may cost.
const GOOD_SHARE: f64 = 0.9;
const WORST_CHOICE: f64 = 0.1;

/// What is measured.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Numbers of ranks.
    #[arg(long, value_delimiter = ',', default_values_t = [2, 4])]
    ranks: Vec<usize>,
    /// The algorithms.
    #[arg(long, default_value = "direct,pull,ring")]
    algorithms: String,
    /// How often everything is measured.
    #[arg(long, default_value_t = 15)]
    rounds: u32,
    /// The largest total.
    #[arg(long, default_value_t = 64 << 20)]
    max_bytes: u64,
    /// Instead of measuring the host here: what `peerlane calibrate --check` has written elsewhere
    #[arg(long, value_name = "FILE")]
    from: Option<PathBuf>,
    /// With `--from`: when and with which version the times were measured, if not just now
    #[arg(long, value_name = "TEXT", requires = "from")]
    measured: Option<String>,
}

/// What the program writes.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
struct Check {
    machine: String,
    backend: String,
    topology: String,
    points: Vec<Point>,
    choices: Vec<Choice>,
    good_share: f64,
    worst_choice: f64,
}

#[derive(Debug, serde::Serialize, serde::Deserialize)]
struct Point {
    algorithm: String,
    outputs: u32,
    #[serde(default = "one")]
    chunks: u32,
    shard_bytes: u64,
    measured_us: f64,
    predicted_us: f64,
    fitted: bool,
}

fn one() -> u32 {
    1
}

#[derive(Debug, serde::Serialize, serde::Deserialize)]
struct Choice {
    outputs: u32,
    shard_bytes: u64,
    chosen: String,
    chosen_us: f64,
    best: String,
    best_us: f64,
}

#[derive(Debug, serde::Serialize)]
struct Record {
    facts: Facts,
    measured: Option<String>,
    rounds: u32,
    checks: Vec<Check>,
}

/// Writes docs/perf/cost-host, or that of the backend of a file; a missed goal is an error.
pub(super) fn run(options: &Options) -> Outcome {
    let metadata = workspace::members()?;
    let facts = Facts::collect()?;
    let checks = match &options.from {
        Some(file) => vec![serde_json::from_str(&std::fs::read_to_string(file)?)?],
        None => measure(options, metadata.target_directory.as_std_path())?,
    };
    let measured = options.measured.clone();
    let record = Record { facts, measured, rounds: options.rounds, checks };
    let name = format!("cost-{}", record.backend());
    record.save(&metadata.workspace_root.as_std_path().join("docs/perf"), &name)?;
    println!("\nwritten: docs/perf/{name}.json, docs/perf/{name}.md");
    let missed: Vec<_> = record.checks.iter().filter_map(Check::missed).collect();
    if missed.is_empty() { Ok(()) } else { Err(missed.join("; ").into()) }
}

/// Calibrates the host backend here and checks what that predicts.
fn measure(options: &Options, target: &Path) -> Outcome<Vec<Check>> {
    let peerlane = Peerlane::build(target)?;
    let scratch = target.join("cost");
    std::fs::create_dir_all(&scratch)?;
    let mut checks: Vec<Check> = Vec::new();
    for ranks in &options.ranks {
        let (out, check) = (scratch.join("links.json"), scratch.join("check.json"));
        peerlane.run([
            "calibrate".to_owned(),
            "--backend=host".to_owned(),
            format!("--ranks={ranks}"),
            format!("--algorithms={}", options.algorithms),
            format!("--rounds={}", options.rounds),
            format!("--max-bytes={}", options.max_bytes),
            format!("--out={}", out.display()),
            format!("--check={}", check.display()),
        ])?;
        checks.push(serde_json::from_str(&std::fs::read_to_string(&check)?)?);
    }
    Ok(checks)
}

impl Check {
    fn missed(&self) -> Option<String> {
        let Self { topology, good_share, worst_choice, .. } = self;
        let good = *good_share >= GOOD_SHARE;
        (!good || *worst_choice > WORST_CHOICE).then(|| {
            format!(
                "{topology}: {:.0} % within 20 %, wanted {:.0} %; the worst choice {:.0} % slower, \
                 wanted at most {:.0} %",
                good_share * 100.0,
                GOOD_SHARE * 100.0,
                worst_choice * 100.0,
                WORST_CHOICE * 100.0
            )
        })
    }

    fn page(&self, page: &mut String) -> std::fmt::Result {
        let Self { topology, good_share, worst_choice, points, .. } = self;
        let (share, worst) = (good_share * 100.0, worst_choice * 100.0);
        let between = points.iter().filter(|point| !point.fitted).count();
        writeln!(page, "\n## {topology}\n")?;
        writeln!(
            page,
            "{} points; of the {between} that the links were not fitted to {share:.0} % within 20 %. The \
             worst choice is {worst:.0} % slower than the best measured.",
            points.len()
        )?;
        if let Some(missed) = self.missed() {
            writeln!(page, "\n**Missed**: {missed}.")?;
        }
        writeln!(
            page,
            "\n| shard | outputs | algorithm | measured, µs | predicted, µs | error | |"
        )?;
        writeln!(page, "| --: | --: | --- | --: | --: | --: | --- |")?;
        let mut points: Vec<&Point> = points.iter().collect();
        points.sort_by_key(|point| (point.shard_bytes, point.outputs));
        for Point { algorithm, outputs, shard_bytes, measured_us, predicted_us, fitted, .. } in
            points
        {
            let error = (predicted_us / measured_us - 1.0) * 100.0;
            let (shard, fitted) = (size(*shard_bytes), if *fitted { "fitted" } else { "" });
            writeln!(
                page,
                "| {shard} | {outputs} | {algorithm} | {measured_us:.1} | {predicted_us:.1} | \
                 {error:+.0} % | {fitted} |"
            )?;
        }
        Ok(())
    }
}

impl Record {
    fn backend(&self) -> &str {
        self.checks.first().map_or("host", |check| &check.backend)
    }

    fn save(&self, folder: &Path, name: &str) -> Outcome {
        std::fs::create_dir_all(folder)?;
        let json = serde_json::to_string_pretty(self)? + "\n";
        std::fs::write(folder.join(format!("{name}.json")), json)?;
        std::fs::write(folder.join(format!("{name}.md")), self.page()?)?;
        Ok(())
    }

    fn page(&self) -> Result<String, std::fmt::Error> {
        let Facts { command, date, peerlane, rustc, kernel, cpu, cores, .. } = &self.facts;
        let mut page = String::new();
        writeln!(page, "# What the model of costs predicts for the {} backend\n", self.backend())?;
        writeln!(page, "Written by `{command}` on {date}; do not edit.\n")?;
        writeln!(page, "- Peerlane {peerlane}, {rustc}")?;
        match self.checks.first().filter(|check| check.backend != "host") {
            Some(check) => writeln!(page, "- {} of {}", check.topology, check.machine)?,
            None => writeln!(page, "- {cores} cores of {cpu}, {kernel}")?,
        }
        if let Some(measured) = &self.measured {
            writeln!(page, "- Measured {measured}; fitted to these times anew.")?;
        }
        writeln!(
            page,
            "- A time is the median of the iterations of a run, in the fastest of {} rounds. Algorithms \
             whose plans are the same, as those of direct and ring between two ranks, share it. The links \
             are fitted to every second size, and what is measured there is what they predict; the others \
             are predicted only.",
            self.rounds
        )?;
        self.checks.iter().try_for_each(|check| check.page(&mut page))?;
        Ok(page)
    }
}
