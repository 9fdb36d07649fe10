//! Keeps the record of visits to machines, and reads the output of the script as a visit.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use peerlane_rxe_vm::process::Outcome;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::super::report::{self, Goals, size};
use super::{BEST, EARLIER, NAME, OVERLAP};
use crate::workspace;

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

/// One size of one collective.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Row {
    pub(super) collective: String,
    /// Empty where the type makes no difference.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(super) dtype: String,
    pub(super) ranks: usize,
    pub(super) captured: bool,
    pub(super) in_place: bool,
    /// What differs from a start without options, such as `one output`.
    pub(super) variant: String,
    pub(super) total_bytes: u64,
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
    #[serde(default = "yes", skip_serializing_if = "is_yes")]
    pub(super) overlapped: bool,
}

fn yes() -> bool {
    true
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_yes(flag: &bool) -> bool {
    *flag
}

/// One size of one run, as the program wrote it.
#[derive(Debug, Deserialize)]
struct Sample {
    collective: String,
    dtype: String,
    ranks: usize,
    captured: bool,
    in_place: bool,
    total_bytes: u64,
    median_us: f64,
    busbw_gbs: Option<f64>,
    host_us: Option<f64>,
    limit_us: Option<f64>,
    checked: bool,
    baselines_version: Option<String>,
    #[serde(default)]
    baselines: Vec<Value>,
    #[serde(default)]
    overlap: Vec<Overlap>,
}

impl Sample {
    /// Returns the row of a run of this variant.
    fn row(&self, variant: &str) -> Row {
        let path = |baseline: &Value| {
            let (name, us) = (baseline["path"].as_str()?, baseline["baseline_us"].as_f64()?);
            Some((name.to_owned(), us))
        };
        // A collective with a root is `broadcast from 0`.
        let collective = self.collective.split(' ').next().unwrap_or_default().to_owned();
        Row {
            collective,
            dtype: self.dtype.clone(),
            ranks: self.ranks,
            captured: self.captured,
            in_place: self.in_place,
            variant: variant.to_owned(),
            total_bytes: self.total_bytes,
            median_us: Some(self.median_us),
            host_us: self.host_us,
            busbw_gbs: self.busbw_gbs,
            limit_us: self.limit_us,
            nccl: self.baselines.iter().filter_map(path).collect(),
            ..Row::default()
        }
    }

    /// Returns what overlapped with compute in a run of this variant.
    fn overlaps(&self, variant: &str) -> impl Iterator<Item = Overlap> {
        self.overlap.iter().map(|overlap| Overlap {
            ranks: self.ranks,
            total_bytes: self.total_bytes,
            in_place: self.in_place,
            variant: variant.to_owned(),
            ..overlap.clone()
        })
    }
}

/// What distinguishes the rows of a visit.
type Key = (String, String, usize, bool, bool, String, u64);

impl Row {
    pub(super) fn key(&self) -> Key {
        let Self { collective, dtype, ranks, captured, in_place, variant, total_bytes, .. } =
            self.clone();
        (collective, dtype, ranks, captured, in_place, variant, total_bytes)
    }

    /// Returns the row whose figures are the medians of those of `rounds`, which have the same key.
    fn median(rounds: &[Self]) -> Self {
        let of =
            |value: fn(&Self) -> Option<f64>| median(rounds.iter().filter_map(value).collect());
        let mut row = rounds.first().cloned().unwrap_or_default();

        row.median_us = of(|row| row.median_us);
        row.busbw_gbs = of(|row| row.busbw_gbs);
        row.host_us = of(|row| row.host_us);
        row.limit_us = of(|row| row.limit_us);
        for (path, us) in &mut row.nccl {
            let times = rounds.iter().filter_map(|round| round.nccl.get(path).copied()).collect();
            *us = median(times).unwrap_or(f64::NAN);
        }
        row
    }

    /// Returns the speed relative to NCCL's fastest path.
    pub(super) fn by_best(&self) -> Option<f64> {
        let best = self.nccl.values().copied().min_by(f64::total_cmp);
        best.zip(self.median_us).map(|(nccl, us)| nccl / us).or(self.best_ratio)
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
        match (self.captured, self.in_place) {
            (false, false) => "eager",
            (false, true) => "in place",
            (true, false) => "captured",
            (true, true) => "captured in place",
        }
    }

    pub(super) fn goals(&self) -> Goals {
        let of_earlier = self.by_earlier().map(f64::recip);
        Goals::default().at_least("× NCCL's best", self.by_best(), BEST).at_most(
            "× the earlier version",
            of_earlier,
            EARLIER,
        )
    }
}

impl Overlap {
    /// Returns the goals of collectives of Peerlane that use no compute unit.
    fn goals(&self) -> Goals {
        let is_free = self.in_place || self.variant == "beside_compute";
        if self.path != "peerlane" || !is_free {
            return Goals::default();
        }
        Goals::default().at_most("× the GEMM alone", self.compute_ratio, OVERLAP).at_most(
            "× the all-gather alone",
            self.gather_ratio,
            OVERLAP,
        )
    }
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let (low, high) =
        (values.get(values.len().checked_sub(1)? / 2)?, values.get(values.len() / 2)?);
    Some(f64::midpoint(*low, *high))
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
        let mut rounds: BTreeMap<Key, Vec<Row>> = BTreeMap::new();
        let mut earlier: BTreeMap<Key, Vec<f64>> = BTreeMap::new();
        for path in paths {
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            let parts: Vec<&str> = name.split('.').collect();
            let [_, version, variant, _] = parts[..] else {
                return Err(
                    format!("{} has a name that no run of the script has", path.display()).into()
                );
            };
            let variant = if variant == "default" { "" } else { variant };

            for (number, line) in read(&path)?.lines().enumerate() {
                let place = |error: &dyn std::fmt::Display| {
                    format!("{}, line {}: {error}", path.display(), number + 1)
                };
                let sample: Sample = serde_json::from_str(line).map_err(|error| place(&error))?;
                if !sample.checked {
                    return Err(place(&"the bytes were not checked").into());
                }

                visit.overlaps.extend(sample.overlaps(variant));
                let row = sample.row(variant);
                if version == "earlier" {
                    earlier.entry(row.key()).or_default().extend(row.median_us);
                } else if sample.overlap.is_empty() {
                    rounds.entry(row.key()).or_default().push(row);
                }
                // The text also names a file of that machine.
                let nccl =
                    sample.baselines_version.as_deref().and_then(|text| text.split(' ').next());
                visit.nccl = nccl.map(str::to_owned).or(visit.nccl);
            }
        }

        visit.rows = rounds.values().map(|rounds| Row::median(rounds)).collect();
        for row in &mut visit.rows {
            row.earlier_us = earlier.remove(&row.key()).and_then(median);
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
            let Row { collective, dtype, ranks, total_bytes, .. } = row;
            let what = format!(
                "{collective} of {dtype}, {ranks} ranks, {}, {}",
                size(*total_bytes),
                row.form()
            );
            (what, row.goals())
        });

        let overlaps = self.overlaps.iter().map(|overlap| {
            let what =
                format!("{} ranks, {}, beside a GEMM", overlap.ranks, size(overlap.total_bytes));
            (what, overlap.goals())
        });
        rows.chain(overlaps)
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
