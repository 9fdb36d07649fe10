//! Keeps the record of visits to machines, and reads the output of the script as a visit.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use peerlane_rxe_vm::process::Outcome;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::super::median;
use super::super::report::{self, Goals, size};
use super::{NAME, ONE_OUTPUT};
use crate::workspace;

/// The smallest speed relative to NCCL's fastest path.
const BEST: f64 = 1.0;
/// The longest time relative to the earlier version.
const EARLIER: f64 = 1.02;
/// Totals of all-gathers from here on, on a stream and out of place: the share of the limit, and
/// the speed relative to NCCL's fastest path.
const LARGE: [(u64, f64, f64); 3] =
    [(1 << 30, 0.97, 1.06), (256 << 20, 0.94, 1.08), (64 << 20, 0.84, 1.0)];
/// Totals up to here: the speed relative to NCCL's copy engines.
const SMALL: (u64, f64) = (4 << 20, 1.6);
/// The total with a maximum time in µs: with two outputs, and with one, which waits for `ready`.
const MEDIUM: (u64, f64, f64) = (1 << 20, 18.0, 27.0);
/// The maximum time of a start on the host, in µs.
const HOST_US: f64 = 8.0;
/// The maximum time in place by that out of place, which allows for noise.
const IN_PLACE: f64 = 1.02;
/// The maximum slowdown of all-gathers and compute that run at the same time.
const OVERLAP: f64 = 1.06;

/// All visits to machines, newest first.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) visits: Vec<Visit>,
}

impl Record {
    pub(super) fn load() -> Outcome<Self> {
        let path = workspace::members()?.workspace_root.join(format!("docs/perf/{NAME}.json"));
        Ok(serde_json::from_str(&std::fs::read_to_string(path)?)?)
    }

    /// Writes the record, with a line for each row, and its page.
    pub(super) fn save(&self) -> Outcome {
        let folder = workspace::members()?.workspace_root.join("docs/perf");
        std::fs::write(folder.join(format!("{NAME}.json")), self.json()?)?;
        std::fs::write(folder.join(format!("{NAME}.md")), self.page())?;
        println!("\nwritten: docs/perf/{NAME}.json, docs/perf/{NAME}.md");
        Ok(())
    }

    pub(super) fn json(&self) -> Outcome<String> {
        let visits = self.visits.iter().map(Visit::json).collect::<Outcome<Vec<_>>>()?;
        Ok(format!("{{\n  \"visits\": [\n{}\n  ]\n}}\n", visits.join(",\n")))
    }

    pub(super) fn page(&self) -> String {
        let sections = self.visits.iter().map(Visit::section).collect();
        report::page(include_str!("../pages/cuda.md.in"), &[("visits", sections)])
    }
}

/// All that was measured on one machine on one day.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Visit {
    pub(super) date: String,
    /// The version or the commit, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) peerlane: Option<String>,
    /// The GPUs, the driver and the links.
    pub(super) machine: Vec<String>,
    /// The version of NCCL, if it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) nccl: Option<String>,
    /// Sentences that are needed to read the figures.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) notes: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) commands: Vec<String>,
    pub(super) rows: Vec<Row>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) overlaps: Vec<Overlap>,
}

/// What distinguishes the rows of a visit.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Point {
    pub(super) collective: String,
    /// Empty where the type makes no difference.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(super) dtype: String,
    pub(super) ranks: usize,
    pub(super) captured: bool,
    pub(super) in_place: bool,
    /// What differs from a start without options, such as `one output`. The program does not write
    /// it.
    #[serde(default)]
    pub(super) variant: String,
    pub(super) total_bytes: u64,
}

/// One size of one collective.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Row {
    #[serde(flatten)]
    pub(super) point: Point,
    /// Absent where only a ratio was kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) median_us: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) host_us: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) busbw_gbs: Option<f64>,
    /// The time of bare copies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) limit_us: Option<f64>,
    /// The time of each of NCCL's paths.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) nccl: BTreeMap<String, f64>,
    /// The speed relative to NCCL's fastest path, where the times of the paths were not kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) best_ratio: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) earlier_us: Option<f64>,
}

/// All-gathers and compute at the same time.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Overlap {
    #[serde(default)]
    pub(super) ranks: usize,
    #[serde(default)]
    pub(super) total_bytes: u64,
    #[serde(default)]
    pub(super) in_place: bool,
    #[serde(default)]
    pub(super) variant: String,
    pub(super) path: String,
    pub(super) compute_ratio: f64,
    pub(super) gather_ratio: f64,
    pub(super) gather_alone_us: f64,
    pub(super) gather_us: f64,
    /// Whether both sides were busy all the time.
    pub(super) overlapped: bool,
}

/// One size of one run, as the program wrote it.
#[derive(Debug, Deserialize)]
struct Sample {
    #[serde(flatten)]
    row: Row,
    checked: bool,
    baselines_version: Option<String>,
    #[serde(default)]
    baselines: Vec<Value>,
    #[serde(default)]
    overlap: Vec<Overlap>,
}

impl Sample {
    /// Reads a line of a run of this variant.
    fn parse(line: &str, variant: &str) -> Outcome<Self> {
        let mut sample: Self = serde_json::from_str(line)?;
        if !sample.checked {
            return Err("the bytes were not checked".into());
        }
        if sample.row.median_us.is_none() {
            return Err("missing field `median_us`".into());
        }

        let path = |baseline: &Value| {
            let (name, us) = (baseline["path"].as_str()?, baseline["baseline_us"].as_f64()?);
            Some((name.to_owned(), us))
        };
        sample.row.nccl = sample.baselines.iter().filter_map(path).collect();

        let point = &mut sample.row.point;
        variant.clone_into(&mut point.variant);
        // A collective with a root is `broadcast from 0`.
        if let Some(end) = point.collective.find(' ') {
            point.collective.truncate(end);
        }
        for overlap in &mut sample.overlap {
            (overlap.ranks, overlap.total_bytes) = (point.ranks, point.total_bytes);
            (overlap.in_place, overlap.variant) = (point.in_place, point.variant.clone());
        }
        Ok(sample)
    }
}

impl Row {
    /// Returns the row whose figures are the medians of those of `rounds`, which have the same key.
    fn median(rounds: &[Self]) -> Self {
        let of = |value: fn(&Self) -> Option<f64>| median_of(rounds.iter().filter_map(value));
        let mut row = rounds.first().cloned().unwrap_or_default();

        row.median_us = of(|row| row.median_us);
        row.busbw_gbs = of(|row| row.busbw_gbs);
        row.host_us = of(|row| row.host_us);
        row.limit_us = of(|row| row.limit_us);
        for (path, us) in &mut row.nccl {
            let times = rounds.iter().filter_map(|round| round.nccl.get(path).copied());
            *us = median_of(times).unwrap_or(f64::NAN);
        }
        row
    }

    /// Returns the speed relative to NCCL's fastest path.
    pub(super) fn by_best(&self) -> Option<f64> {
        let best = self.nccl.values().copied().min_by(f64::total_cmp);
        best.zip(self.median_us).map(|(nccl, us)| nccl / us).or(self.best_ratio)
    }

    /// Returns the speed relative to NCCL's copy engines.
    fn by_copy_engines(&self) -> Option<f64> {
        Some(self.nccl.get("copy engines")? / self.median_us?)
    }

    /// Returns the speed as a share of that of bare copies.
    pub(super) fn share(&self) -> Option<f64> {
        Some(self.limit_us? / self.median_us?)
    }

    /// Returns the speed relative to the earlier version.
    pub(super) fn by_earlier(&self) -> Option<f64> {
        Some(self.earlier_us? / self.median_us?)
    }

    /// Returns the name of the form in which the collective ran.
    pub(super) fn form(&self) -> &'static str {
        match (self.point.captured, self.point.in_place) {
            (false, false) => "eager",
            (false, true) => "in place",
            (true, false) => "captured",
            (true, true) => "captured in place",
        }
    }

    /// Returns the goals of this row. `out_of_place` is the row of the same size and plan out of
    /// place.
    pub(super) fn goals(&self, out_of_place: Option<&Self>) -> Goals {
        let of_earlier = self.by_earlier().map(f64::recip);
        let goals = Goals::default().at_least("× NCCL's best", self.by_best(), BEST).at_most(
            "× the earlier version",
            of_earlier,
            EARLIER,
        );
        let total = self.point.total_bytes;
        if self.point.collective != "all-gather" {
            return goals;
        }

        match (self.form(), self.point.variant.as_str()) {
            ("eager", "") => {
                let large = LARGE.iter().find(|(from, ..)| total >= *from);
                let (share, best) = large.map_or((None, None), |_| (self.share(), self.by_best()));
                let (_, share_min, best_min) = *large.unwrap_or(&LARGE[0]);
                let small = self.by_copy_engines().filter(|_| total <= SMALL.0);
                let medium = self.median_us.filter(|_| total == MEDIUM.0);
                goals
                    .at_least("of the limit", share, share_min)
                    .at_least("× NCCL's best", best, best_min)
                    .at_least("× NCCL's copy engines", small, SMALL.1)
                    .at_most("µs", medium, MEDIUM.1)
                    .at_most("µs of the host", self.host_us, HOST_US)
            }
            ("eager", ONE_OUTPUT) if total == MEDIUM.0 => {
                goals.at_most("µs", self.median_us, MEDIUM.2)
            }
            ("in place", "") => {
                let other = out_of_place.and_then(|row| row.median_us);
                let ratio = self.median_us.zip(other).map(|(own, other)| own / other);
                goals.at_most("× out of place", ratio, IN_PLACE)
            }
            _ => goals,
        }
    }
}

impl Overlap {
    /// Returns the goals of Peerlane's all-gathers during compute; `others` are of all paths of the
    /// same run.
    fn goals<'o>(&self, mut others: impl Iterator<Item = &'o Self>) -> Goals {
        let better = others.find(|other| {
            other.compute_ratio < self.compute_ratio && other.gather_us < self.gather_us
        });
        let path = better.map_or("", |other| &other.path);
        Goals::default()
            .at_most("× the GEMM alone", self.compute_ratio, OVERLAP)
            .at_most("× the all-gather alone", self.gather_ratio, OVERLAP)
            .enter(self.overlapped, "overlaps all the time", "one side that ended too early")
            .enter(better.is_none(), "no path is better on both", path)
    }

    /// Returns whether another path was measured in the same run.
    fn is_of_run(&self, other: &Self) -> bool {
        let run = |it: &Self| (it.ranks, it.total_bytes, it.in_place, it.variant.clone());
        run(self) == run(other)
    }
}

/// Returns the median of values, if there are any.
fn median_of(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values = values.peekable();
    values.peek().is_some().then(|| median(values))
}

impl Visit {
    /// Reads the output of the script.
    pub(super) fn read(folder: &Path) -> Outcome<Self> {
        let read = |path: &Path| {
            std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
        };
        let mut paths: Vec<PathBuf> =
            std::fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<Outcome<_>>()?;
        paths.retain(|path| path.extension().is_some_and(|extension| extension == "jsonl"));
        paths.sort_unstable();
        if paths.is_empty() {
            let how = "make it with `cargo xtask bench cuda --script`";
            return Err(format!("{} holds no *.jsonl; {how}", folder.display()).into());
        }

        let mut visit = Self::default();
        let mut rounds: BTreeMap<Point, Vec<Row>> = BTreeMap::new();
        let mut earlier: BTreeMap<Point, Vec<f64>> = BTreeMap::new();
        for path in paths {
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            let parts: Vec<&str> = name.split('.').collect();
            let [_, version, variant, _] = parts[..] else {
                return Err(
                    format!("{} has a name that no run of the script has", path.display()).into()
                );
            };
            let variant = if variant == "default" { "" } else { &variant.replace('-', " ") };

            for (number, line) in (1..).zip(read(&path)?.lines()) {
                let Sample { row, baselines_version, overlap, .. } =
                    Sample::parse(line, variant)
                        .map_err(|error| format!("{}, line {number}: {error}", path.display()))?;
                if version == "earlier" {
                    earlier.entry(row.point).or_default().extend(row.median_us);
                } else if overlap.is_empty() {
                    rounds.entry(row.point.clone()).or_default().push(row);
                }
                visit.overlaps.extend(overlap);

                // The text also names a file of that machine.
                let nccl = baselines_version.as_deref().and_then(|text| text.split(' ').next());
                visit.nccl = nccl.map(str::to_owned).or(visit.nccl);
            }
        }

        visit.rows = rounds.values().map(|rounds| Row::median(rounds)).collect();
        for row in &mut visit.rows {
            row.earlier_us =
                earlier.remove(&row.point).and_then(|times| median_of(times.into_iter()));
        }

        let doctor: Value = serde_json::from_str(&read(&folder.join("doctor.json"))?)?;
        visit.machine = machine(&doctor);
        visit.date = read(&folder.join("date"))?.trim().to_owned();
        let version = read(&folder.join("version"))?;
        visit.peerlane = Some(version.trim().trim_start_matches("peerlane ").to_owned());
        visit.commands = vec!["cargo xtask bench cuda".to_owned()];
        Ok(visit)
    }

    fn json(&self) -> Outcome<String> {
        let lines = |rows: Vec<String>| format!("[\n        {}\n      ]", rows.join(",\n        "));
        let rows = self.rows.iter().map(serde_json::to_string).collect::<Result<_, _>>()?;
        let overlaps: Vec<_> =
            self.overlaps.iter().map(serde_json::to_string).collect::<Result<_, _>>()?;
        let mut fields = vec![format!("\"date\": {}", serde_json::to_string(&self.date)?)];
        let mut add = |name: &str, value: String| fields.push(format!("\"{name}\": {value}"));

        for (name, value) in [("peerlane", &self.peerlane), ("nccl", &self.nccl)] {
            if let Some(value) = value {
                add(name, serde_json::to_string(value)?);
            }
        }
        let texts =
            [("machine", &self.machine), ("notes", &self.notes), ("commands", &self.commands)];
        for (name, texts) in texts.into_iter().filter(|(_, texts)| !texts.is_empty()) {
            let texts = texts.iter().map(serde_json::to_string).collect::<Result<_, _>>()?;
            add(name, lines(texts));
        }
        add("rows", lines(rows));
        if !overlaps.is_empty() {
            add("overlaps", lines(overlaps));
        }
        Ok(format!("    {{\n      {}\n    }}", fields.join(",\n      ")))
    }

    pub(super) fn goals(&self) -> impl Iterator<Item = (String, Goals)> {
        let rows = self.rows.iter().map(|row| {
            let Point { collective, dtype, ranks, total_bytes, .. } = &row.point;
            let (total, form) = (size(*total_bytes), row.form());
            let what = format!("{collective} of {dtype}, {ranks} ranks, {total}, {form}");
            (what, row.goals(self.out_of_place(row)))
        });

        let ours = self.overlaps.iter().filter(|overlap| overlap.path == "peerlane");
        let overlaps = ours.map(|ours| {
            let what = format!("{} ranks, {}, beside a GEMM", ours.ranks, size(ours.total_bytes));
            let others = self.overlaps.iter().filter(|other| ours.is_of_run(other));
            (what, ours.goals(others))
        });
        rows.chain(overlaps)
    }

    /// Returns the row of the same size and plan out of place. A start in place has one output, and
    /// waits for `ready`.
    fn out_of_place(&self, row: &Row) -> Option<&Row> {
        let find = |variant: &str| {
            let point = Point { in_place: false, variant: variant.to_owned(), ..row.point.clone() };
            self.rows.iter().find(|row| row.point == point)
        };
        find(ONE_OUTPUT).or_else(|| find(""))
    }
}

/// Returns the doctor's lines about devices and links, without the identity of the machine.
fn machine(doctor: &Value) -> Vec<String> {
    let findings = doctor["cuda"].as_array().map(Vec::as_slice).unwrap_or_default();
    let of = |topic: &str| {
        let of_topic = findings.iter().filter(|finding| finding["topic"] == topic);
        of_topic.filter_map(|finding| finding["found"].as_str()).collect::<Vec<_>>()
    };
    let mut lines: Vec<String> = Vec::new();
    let devices = of("GPU");
    // `0: NVIDIA H200, 139.72 GiB, 3 copy engines, sm_90, …`
    if let Some((_, text)) = devices.first().and_then(|text| text.split_once(": ")) {
        let text = text.split(", ").take(4).collect::<Vec<_>>().join(", ");
        lines.push(format!("{} × {text}", devices.len()));
    }
    lines.extend(of("driver").into_iter().chain(of("links")).map(str::to_owned));
    lines
}
