//! `cargo xtask bench cuda`: measures all-gathers between GPUs, against NCCL and bare copies.
//!
//! The machine with the GPUs may have no cargo, so measuring and recording are separate: a shell script runs the
//! program and leaves JSON in a folder, and a folder becomes a record. Without `--from`, both happen here.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::report::{self, Goals, figure, size};
use crate::workspace;
use peerlane_rxe_vm::process::{self, Outcome};

/// Options of `cargo xtask bench cuda`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Numbers of ranks, one per GPU.
    #[arg(long, value_delimiter = ',', default_values_t = [2, 4])]
    ranks: Vec<usize>,
    /// The smallest total, as the program takes it.
    #[arg(long, default_value = "4K")]
    min_bytes: String,
    /// The largest total.
    #[arg(long, default_value = "1G")]
    max_bytes: String,
    /// More options for each run, such as `--nccl PATH`, in one word.
    #[arg(long, default_value = "", allow_hyphen_values = true)]
    with: String,
    /// Leave out the runs that overlap with compute.
    #[arg(long)]
    without_compute: bool,
    /// Only print the script that measures, for a machine without cargo.
    #[arg(long)]
    script: bool,
    /// Record the output of the script in this folder.
    #[arg(long, value_name = "FOLDER", conflicts_with = "script")]
    from: Option<PathBuf>,
}

/// The number of GPUs at which NCCL 2.28.9 hangs if compute runs at the same time.
const NCCL_HANGS_AT: usize = 2;
/// Totals from here on, out of place: the share of the limit and the speed relative to NCCL's fastest path.
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
/// The maximum slowdown of compute and of all-gathers that overlap.
const OVERLAP: f64 = 1.06;

/// The runs in the order of the page: name, options and heading. A start with one output waits for `ready` first, as
/// in place.
const RUNS: [(&str, &str, &str); 5] = [
    ("out-of-place", "", "Out of place"),
    ("in-place", "--in-place", "In place"),
    ("with-ready", "--outputs 1", "Out of place with one output: every start waits for `ready`"),
    ("captured", "--graph", "Captured, out of place"),
    ("captured-in-place", "--graph --in-place", "Captured, in place"),
];
/// The runs that overlap with compute: name, options and where the results are.
const OVERLAPPED: [(&str, &str, &str); 3] = [
    ("overlap-out-of-place", "", "out of place"),
    ("overlap-self-copy-by-link", "--self-copy link", "out of place, self copy over the link"),
    ("overlap-in-place", "--in-place", "in place"),
];

/// Measures everything and writes docs/perf/cuda-allgather.
pub(super) fn run(options: &Options) -> Outcome {
    if options.script {
        print!("{}", script(options));
        return Ok(());
    }
    let folder = match &options.from {
        Some(folder) => folder.clone(),
        None => measure(options, workspace::members()?.target_directory.as_std_path())?,
    };
    let record = read(&folder)?;
    let page = record.page();
    print!("{page}");
    report::save("cuda-allgather", &record, &page, record.goals())
}

/// Builds the program and runs the script here.
fn measure(options: &Options, target: &Path) -> Outcome<PathBuf> {
    let program = workspace::build_program(target, true)?;
    let folder = target.join("bench-cuda");
    if folder.exists() {
        std::fs::remove_dir_all(&folder)?;
    }
    std::fs::create_dir_all(&folder)?;
    let path = folder.join("measure.sh");
    std::fs::write(&path, script(options))?;
    process::run(Command::new("sh").arg(&path).arg(program).arg(&folder))?;
    Ok(folder)
}

/// The beginning of the script.
const SCRIPT: &str = r#"#!/bin/sh
# Measures for `cargo xtask bench cuda --from FOLDER`: sh SCRIPT path/to/peerlane FOLDER
set -eu
"$1" doctor --json > "$2/doctor.json"
date -u '+%Y-%m-%d %H:%M UTC' > "$2/date"
"#;

/// Returns the script. Its arguments are the program and an existing folder.
fn script(options: &Options) -> String {
    let Options { ranks, min_bytes, max_bytes, with, .. } = options;
    let mut script = SCRIPT.to_owned();
    for ranks in ranks {
        let mut run = |name: &str, what: &str| {
            let words = format!("--backend cuda --ranks {ranks} {what} {with}");
            let words = words.split_whitespace().collect::<Vec<_>>().join(" ");
            script += &format!(
                "\"$1\" allgather {words} --json \"$2/{ranks}-{name}.jsonl\" > \"$2/{ranks}-{name}.txt\"\n"
            );
        };
        for (name, what, _) in RUNS {
            let sizes = format!("--min-bytes {min_bytes} --max-bytes {max_bytes}");
            run(name, &format!("{sizes} --limit --vs nccl {what}"));
        }
        for (name, what, _) in OVERLAPPED.into_iter().filter(|_| !options.without_compute) {
            let vs = if *ranks > NCCL_HANGS_AT { "--vs nccl" } else { "" };
            let sizes = "--min-bytes 64M --max-bytes 1G --factor 16";
            run(name, &format!("{sizes} {vs} --overlap gemm {what}"));
        }
    }
    script
}

/// Reads the output of the script.
fn read(folder: &Path) -> Outcome<Record> {
    let read = |path: &Path| {
        std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
    };
    let mut paths: Vec<PathBuf> =
        std::fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<Outcome<_>>()?;
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "jsonl"));
    paths.sort_unstable();
    let mut samples = Vec::new();
    for path in paths {
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        // In `4-in-place` the number of ranks is dropped, because the samples have it too.
        let run = name.split_once('-').map_or(&*name, |(_, run)| run).to_owned();
        for (number, line) in read(&path)?.lines().enumerate() {
            let sample = Sample::parse(&run, line)
                .map_err(|error| format!("{}, line {}: {error}", path.display(), number + 1))?;
            samples.push(sample);
        }
    }
    if samples.is_empty() {
        let how = "make it with `cargo xtask bench cuda --script`";
        return Err(format!("{} holds no *.jsonl; {how}", folder.display()).into());
    }
    let doctor: Value = serde_json::from_str(&read(&folder.join("doctor.json"))?)?;
    let date = read(&folder.join("date"))?.trim().to_owned();
    Ok(Record::new(date, &doctor, samples))
}

/// One size of one run, as the program wrote it.
#[derive(Debug, Serialize, Deserialize)]
struct Sample {
    /// The name of the run, such as `captured`.
    #[serde(default)]
    run: String,
    ranks: usize,
    total_bytes: u64,
    outputs: u32,
    in_place: bool,
    captured: bool,
    checked: bool,
    median_us: f64,
    busbw_gbs: f64,
    host_us: f64,
    limit_us: Option<f64>,
    /// Not in the record, which has the version once, because the text names a file of that machine.
    #[serde(skip_serializing)]
    baselines_version: Option<String>,
    /// NCCL's paths, each with its `path` and `baseline_us`.
    #[serde(default)]
    baselines: Vec<Value>,
    #[serde(default)]
    overlap: Vec<Overlap>,
    #[serde(flatten)]
    more: Value,
}

/// All-gathers and compute at the same time.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Overlap {
    path: String,
    compute_ratio: f64,
    gather_ratio: f64,
    gather_alone_us: f64,
    gather_us: f64,
    overlapped: bool,
    #[serde(flatten)]
    more: Value,
}

impl Sample {
    /// Reads a line of the run of that name.
    fn parse(run: &str, line: &str) -> Outcome<Self> {
        let sample: Self = serde_json::from_str(line)?;
        if !sample.checked {
            return Err("the bytes were not checked".into());
        }
        let (captured, in_place) = (run.starts_with("captured"), run.ends_with("in-place"));
        if (sample.captured, sample.in_place) != (captured, in_place) {
            return Err(format!("the line is of another run than {run}").into());
        }
        Ok(Self { run: run.to_owned(), ..sample })
    }

    /// Returns the time of one of NCCL's paths.
    fn nccl_us(&self, path: &str) -> Option<f64> {
        self.baselines.iter().find(|baseline| baseline["path"] == path)?["baseline_us"].as_f64()
    }

    /// Returns the speed relative to NCCL's fastest path.
    fn by_best(&self) -> Option<f64> {
        let times = self.baselines.iter().filter_map(|baseline| baseline["baseline_us"].as_f64());
        Some(times.min_by(f64::total_cmp)? / self.median_us)
    }

    /// Returns the speed relative to NCCL's copy engines.
    fn by_copy_engines(&self) -> Option<f64> {
        Some(self.nccl_us("copy engines")? / self.median_us)
    }

    /// Returns the speed as a share of that of bare copies.
    fn share(&self) -> Option<f64> {
        Some(self.limit_us? / self.median_us)
    }

    /// Returns the goals of the run. `out_of_place` is the sample of the same size and plan out of place.
    fn goals(&self, out_of_place: Option<&Self>) -> Goals {
        let goals = Goals::default();
        let total = self.total_bytes;
        match self.run.as_str() {
            "out-of-place" => {
                let large = LARGE.iter().find(|(from, ..)| total >= *from);
                let (share, best) = large.map_or((None, None), |_| (self.share(), self.by_best()));
                let (_, share_min, best_min) = *large.unwrap_or(&LARGE[0]);
                let small = self.by_copy_engines().filter(|_| total <= SMALL.0);
                let is_medium = total == MEDIUM.0 && self.outputs == 2;
                goals
                    .at_least("of the limit", share, share_min)
                    .at_least("× NCCL's best", best, best_min)
                    .at_least("× NCCL's copy engines", small, SMALL.1)
                    .at_most("µs", Some(self.median_us).filter(|_| is_medium), MEDIUM.1)
                    .at_most("µs of the host", self.host_us, HOST_US)
            }
            "with-ready" if total == MEDIUM.0 => goals.at_most("µs", self.median_us, MEDIUM.2),
            "in-place" => {
                let ratio = out_of_place.map(|other| self.median_us / other.median_us);
                goals.at_most("× out of place", ratio, IN_PLACE)
            }
            "captured" | "captured-in-place" => {
                goals.at_least("× NCCL's copy engines", self.by_copy_engines(), 1.0)
            }
            _ => self.overlap_goals(),
        }
    }

    /// Returns the goals of Peerlane's all-gathers during compute, which come first among all paths.
    fn overlap_goals(&self) -> Goals {
        let Some(ours) = self.overlap.first() else { return Goals::default() };
        let better = |other: &&Overlap| {
            other.compute_ratio < ours.compute_ratio && other.gather_us < ours.gather_us
        };
        let better = self.overlap.iter().find(better);
        let path = better.map_or("", |other| &other.path);
        Goals::default()
            .at_most("× the GEMM alone", ours.compute_ratio, OVERLAP)
            .at_most("× the all-gather alone", ours.gather_ratio, OVERLAP)
            .enter(ours.overlapped, "overlaps all the time", "one side that ended too early")
            .enter(better.is_none(), "no path is better on both", path)
    }
}

/// All runs of one visit to a machine.
#[derive(Debug, Serialize)]
struct Record {
    date: String,
    /// The GPUs, the driver and the links.
    machine: Vec<String>,
    /// The version of NCCL, without the file that was loaded.
    nccl: String,
    rows: Vec<Sample>,
}

impl Record {
    /// Creates a record of samples. `doctor` is the output of `peerlane doctor --json` on the same machine.
    fn new(date: String, doctor: &Value, rows: Vec<Sample>) -> Self {
        let version = rows.iter().find_map(|sample| sample.baselines_version.as_deref());
        let nccl =
            version.and_then(|text| text.split(' ').next()).unwrap_or("not there").to_owned();
        Self { date, machine: machine(doctor), nccl, rows }
    }

    fn goals(&self) -> impl Iterator<Item = (String, Goals)> {
        self.rows.iter().map(|sample| {
            let Sample { run, ranks, total_bytes, .. } = sample;
            (format!("{ranks} ranks, {}, {run}", size(*total_bytes)), self.goals_of(sample))
        })
    }

    fn goals_of(&self, sample: &Sample) -> Goals {
        // The number of outputs decides whether a start waits for `ready`, so it is the same in both.
        let key = |sample: &Sample| (sample.ranks, sample.total_bytes, sample.outputs);
        let is_counterpart = |other: &&Sample| {
            ["out-of-place", "with-ready"].contains(&other.run.as_str())
                && key(other) == key(sample)
        };
        sample.goals(self.rows.iter().find(is_counterpart))
    }

    fn page(&self) -> String {
        let values = [
            ("date", self.date.clone()),
            ("machine", self.machine.join("\n- ")),
            ("nccl", self.nccl.clone()),
            ("sections", RUNS.iter().map(|(run, _, heading)| self.section(run, heading)).collect()),
            ("overlaps", self.overlaps()),
        ];
        report::page(include_str!("pages/cuda.md.in"), &values)
    }

    fn section(&self, run: &str, heading: &str) -> String {
        let samples: Vec<&Sample> = self.rows.iter().filter(|sample| sample.run == run).collect();
        if samples.is_empty() {
            return String::new();
        }
        let table = report::table(
            samples,
            &[
                ("ranks", &|row| row.ranks.to_string()),
                ("total", &|row| size(row.total_bytes)),
                ("Peerlane, µs", &|row| figure(row.median_us, 1)),
                ("host, µs", &|row| figure(row.host_us, 1)),
                ("bus, GB/s", &|row| figure(row.busbw_gbs, 1)),
                ("limit, µs", &|row| figure(row.limit_us, 1)),
                ("of the limit", &|row| figure(row.share(), 2)),
                ("NCCL default, µs", &|row| figure(row.nccl_us("default"), 1)),
                ("symmetric, µs", &|row| figure(row.nccl_us("symmetric"), 1)),
                ("copy engines, µs", &|row| figure(row.nccl_us("copy engines"), 1)),
                ("× best", &|row| figure(row.by_best(), 2)),
                ("× copy engines", &|row| figure(row.by_copy_engines(), 2)),
                ("<goal", &|row| self.goals_of(row).cell()),
            ],
        );
        format!("\n## {heading}\n\n{table}")
    }

    fn overlaps(&self) -> String {
        let mut rows = Vec::new();
        for (run, _, place) in OVERLAPPED {
            for sample in self.rows.iter().filter(|sample| sample.run == run) {
                for (index, overlap) in sample.overlap.iter().enumerate() {
                    let goals = if index == 0 { self.goals_of(sample) } else { Goals::default() };
                    rows.push((place, sample, overlap, goals));
                }
            }
        }
        if rows.is_empty() {
            return String::new();
        }
        let table = report::table(
            rows,
            &[
                ("ranks", &|(_, sample, ..)| sample.ranks.to_string()),
                ("total", &|(_, sample, ..)| size(sample.total_bytes)),
                ("<place", &|(place, ..)| (*place).to_owned()),
                ("<all-gathers of", &|(_, _, row, _)| row.path.clone()),
                ("GEMM × alone", &|(_, _, row, _)| figure(row.compute_ratio, 3)),
                ("all-gather alone, µs", &|(_, _, row, _)| figure(row.gather_alone_us, 1)),
                ("overlapped, µs", &|(_, _, row, _)| figure(row.gather_us, 1)),
                ("× alone", &|(_, _, row, _)| figure(row.gather_ratio, 3)),
                ("<goal", &|(.., goals)| goals.cell()),
            ],
        );
        format!(
            "\n## Overlap with a bf16 GEMM of 8192³ that runs all the time\n\n\
             Without NCCL between {NCCL_HANGS_AT} GPUs, where it hangs during compute.\n\n{table}"
        )
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a sample of a run of 4 ranks.
    fn sample(run: &str, total_bytes: u64, median_us: f64, more: &str) -> Sample {
        let line = format!(
            r#"{{"ranks":4,"total_bytes":{total_bytes},"outputs":1,"in_place":{},
            "captured":{},"checked":true,"median_us":{median_us},"busbw_gbs":1.5,"host_us":6.5{more}}}"#,
            run.ends_with("in-place"),
            run.starts_with("captured")
        );
        Sample::parse(run, &line).unwrap()
    }

    /// Returns the times of NCCL's paths as JSON.
    fn nccl(default: f64, symmetric: f64, copy_engines: f64) -> String {
        format!(
            r#","baselines":[{{"path":"default","baseline_us":{default}}},
            {{"path":"symmetric","baseline_us":{symmetric}}},
            {{"path":"copy engines","baseline_us":{copy_engines}}}]"#
        )
    }

    #[test]
    fn the_script_has_a_line_for_each_run() {
        let options = Options {
            ranks: vec![2, 4],
            min_bytes: "4K".into(),
            max_bytes: "1G".into(),
            with: "--nccl x.so".into(),
            without_compute: false,
            script: true,
            from: None,
        };
        let script = script(&options);
        assert_eq!(script.lines().count(), 5 + 2 * 8);
        let expected = "\"$1\" allgather --backend cuda --ranks 4 --min-bytes 4K --max-bytes 1G \
                      --limit --vs nccl --graph --nccl x.so --json \"$2/4-captured.jsonl\" > \
                      \"$2/4-captured.txt\"";
        assert!(script.lines().any(|line| line == expected), "{script}");
        let hangs =
            |line: &str| ["--ranks 2", "--overlap", "--vs"].iter().all(|word| line.contains(word));
        assert!(!script.lines().any(hangs), "{script}");
    }

    #[test]
    fn a_folder_without_measurements_says_how_to_make_them() {
        let folder = std::env::temp_dir().join(format!("peerlane-bench-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let error = read(&folder).unwrap_err().to_string();
        std::fs::write(folder.join("4-captured.jsonl"), "{}\n").unwrap();
        let broken = read(&folder).unwrap_err().to_string();
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(error.contains("holds no *.jsonl; make it with"), "{error}");
        assert!(broken.contains("4-captured.jsonl, line 1: missing field"), "{broken}");
    }

    #[test]
    fn each_run_has_its_goals() {
        let large = nccl(2450.0, 2411.0, 2221.0) + r#","limit_us":2055.0"#;
        let small = nccl(13.0, 9.0, 32.0);
        let other = sample("out-of-place", 1 << 24, 50.0, "");
        let goals = |run, total, median_us, more: &str| {
            sample(run, total, median_us, more).goals(Some(&other)).cell()
        };
        let reached = "≥ 0.97 of the limit, ≥ 1.06 × NCCL's best, ≤ 8 µs of the host";
        assert_eq!(goals("out-of-place", 1 << 30, 2080.0, &large), reached);
        let missed =
            "**missed**: ≥ 0.97 of the limit (found 0.934), ≥ 1.06 × NCCL's best (found 1.010)";
        assert_eq!(goals("out-of-place", 1 << 30, 2200.0, &large), missed);
        let reached = "≥ 1.6 × NCCL's copy engines, ≤ 8 µs of the host";
        assert_eq!(goals("out-of-place", 1 << 20, 18.0, &small), reached);
        let missed = "**missed**: ≥ 1.6 × NCCL's copy engines (found 1.524)";
        assert_eq!(goals("out-of-place", 1 << 20, 21.0, &small), missed);
        assert_eq!(goals("out-of-place", 8, 2.0, ""), "≤ 8 µs of the host");
        let missed = "**missed**: ≥ 1 × NCCL's copy engines (found 0.970)";
        assert_eq!(goals("captured", 1 << 20, 33.0, &small), missed);
        assert_eq!(goals("in-place", 1 << 24, 50.0, ""), "≤ 1.02 × out of place");
        assert!(goals("in-place", 1 << 24, 53.0, "").starts_with("**missed**"));
        assert_eq!(sample("in-place", 1 << 24, 53.0, "").goals(None), Goals::default());
    }

    #[test]
    fn no_path_of_nccl_is_better_on_both() {
        let overlap = |path: &str, compute_ratio, gather_us| Overlap {
            path: path.into(),
            compute_ratio,
            gather_ratio: 1.02,
            gather_us,
            overlapped: true,
            ..Overlap::default()
        };
        let goals = |nccl_us| {
            let overlap = vec![overlap("peerlane", 1.04, 153.0), overlap("NCCL", 1.02, nccl_us)];
            Sample { overlap, ..sample("overlap-in-place", 1 << 26, 153.0, "") }.goals(None)
        };
        assert!(!goals(160.0).are_missed());
        assert_eq!(goals(150.0).cell(), "**missed**: no path is better on both (found NCCL)");
    }

    #[test]
    fn the_page_has_a_section_for_each_run_that_was_made() {
        let doctor = serde_json::json!({"cuda": [
            {"topic": "driver", "found": "CUDA 13.0"},
            {"topic": "GPU", "found": "0: NVIDIA H200, 139.72 GiB, 3 copy engines, sm_90, 0000:1b:00.0, GPU-1"},
            {"topic": "GPU", "found": "1: NVIDIA H200, 139.72 GiB, 3 copy engines, sm_90, 0000:1c:00.0, GPU-2"},
            {"topic": "links", "found": "NVLink between all 2 GPUs"},
        ]});
        let overlap = r#","overlap":[{"path":"peerlane","compute_ratio":1.04,"gather_ratio":1.2,
            "gather_alone_us":150.0,"gather_us":180.0,"overlapped":true}]"#;
        let samples = vec![
            sample("captured", 1 << 20, 30.0, &nccl(13.0, 9.0, 41.5)),
            sample("overlap-in-place", 64 << 20, 150.0, overlap),
        ];
        let record = Record::new("a day".into(), &doctor, samples);
        let page = record.page();
        assert!(page.contains("- 2 × NVIDIA H200, 139.72 GiB, 3 copy engines, sm_90\n"), "{page}");
        assert!(page.contains("## Captured, out of place\n"), "{page}");
        assert!(!page.contains("## Out of place\n") && !page.contains("0000:1b"), "{page}");
        let line = "| 4 | 1 MiB | 30.0 | 6.5 | 1.5 | – | – | 13.0 | 9.0 | 41.5 | 0.30 | 1.38 | \
                    ≥ 1 × NCCL's copy engines |";
        assert!(page.contains(line), "{page}");
        let missed = "**missed**: ≤ 1.06 × the all-gather alone (found 1.200)";
        assert!(page.contains(missed), "{page}");
        assert_eq!(record.goals().filter(|(_, goals)| goals.are_missed()).count(), 1);
    }
}
