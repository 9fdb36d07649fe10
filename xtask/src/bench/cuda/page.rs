//! What was measured, as data for programs and as tables for people.

use std::fmt::Write;
use std::path::Path;

use serde::Serialize;
use serde_json::Value;

use super::super::record::size;
use super::HANGS_BESIDE;
use super::goals;
use super::sample::Sample;
use peerlane_rxe_vm::process::Outcome;

/// All runs of one visit to a machine.
#[derive(Debug)]
pub(super) struct Record {
    date: String,
    /// The GPUs, the driver and the links.
    machine: Vec<String>,
    samples: Vec<Sample>,
}

/// The record as it is written.
#[derive(Serialize)]
struct Data<'a> {
    date: &'a str,
    machine: &'a [String],
    nccl: &'a str,
    rows: Vec<Row<'a>>,
}

#[derive(Serialize)]
struct Row<'a> {
    run: &'a str,
    #[serde(flatten)]
    line: &'a Value,
}

/// The runs in the order of the page, with their headings.
const RUNS: [(&str, &str); 5] = [
    ("out-of-place", "Out of place"),
    ("in-place", "In place"),
    ("with-ready", "Out of place with one output: every start asks for `ready`"),
    ("captured", "Captured, out of place"),
    ("captured-in-place", "Captured, in place"),
];
const BESIDE: [(&str, &str); 3] = [
    ("beside-out-of-place", "out of place"),
    ("beside-own-copy-by-link", "out of place, own copy back over the link"),
    ("beside-in-place", "in place"),
];

const HEAD: &str = "\
| ranks | total | Peerlane, µs | host, µs | bus, GB/s | limit, µs | of the limit | NCCL default, µs | symmetric, µs | copy engines, µs | × best | × copy engines | goal |
| --: | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: | --- |";
const HEAD_BESIDE: &str = "\
| ranks | total | place | gathers of | GEMM × alone | gather alone, µs | beside, µs | × alone | goal |
| --: | --: | --- | --- | --: | --: | --: | --: | --- |";

impl Record {
    /// Of one visit; `doctor` is what `peerlane doctor --json` found there.
    pub(super) fn new(date: String, doctor: &Value, mut samples: Vec<Sample>) -> Self {
        for sample in &mut samples {
            if let Some(line) = sample.line.as_object_mut() {
                // It names a file of that machine; the version is said once for all.
                line.remove("rivals_version");
            }
        }
        Self { date, machine: machine(doctor), samples }
    }

    /// Writes `NAME.json` and `NAME.md` into `folder`.
    pub(super) fn save(&self, folder: &Path, name: &str) -> Outcome {
        std::fs::create_dir_all(folder)?;
        let Self { date, machine, samples } = self;
        let rows = samples.iter().map(|sample| Row { run: &sample.run, line: &sample.line });
        let data = Data { date, machine, nccl: self.nccl(), rows: rows.collect() };
        let json = serde_json::to_string_pretty(&data)? + "\n";
        std::fs::write(folder.join(name).with_extension("json"), json)?;
        std::fs::write(folder.join(name).with_extension("md"), self.page()?)?;
        Ok(())
    }

    /// How many goals are missed.
    pub(super) fn missed(&self) -> usize {
        let verdicts = self.samples.iter().filter_map(|sample| self.judge(sample));
        let besides = self.samples.iter().filter_map(|sample| {
            let ours = sample.beside.first()?;
            Some(goals::judge_beside(ours, &sample.beside))
        });
        verdicts.chain(besides).filter(Result::is_err).count()
    }

    fn judge(&self, sample: &Sample) -> Option<Result<String, String>> {
        // The same plan but for the place: as many outputs, so `ready` or not in both.
        let of = |sample: &Sample| (sample.ranks, sample.total_bytes, sample.outputs);
        let same = |other: &&Sample| {
            ["out-of-place", "with-ready"].contains(&other.run.as_str()) && of(other) == of(sample)
        };
        goals::judge(sample, self.samples.iter().find(same))
    }

    /// The page.
    pub(super) fn page(&self) -> Result<String, std::fmt::Error> {
        let mut page = String::new();
        writeln!(page, "# All-gather between GPUs of one host\n")?;
        writeln!(
            page,
            "Written by `cargo xtask bench cuda`, measured on {}; do not edit.\n",
            self.date
        )?;
        self.machine.iter().try_for_each(|line| writeln!(page, "- {line}"))?;
        writeln!(page, "- NCCL {}", self.nccl())?;
        writeln!(
            page,
            "- One process a GPU. A time is that of one start among many in a row on a stream, \
             between two events; of all ranks the longest, then the median of five laps, in which \
             Peerlane, NCCL's paths and the limit take turns. The limit is the time of bare copies \
             of the same shards to all peers at once. Every byte is compared before and after.\n"
        )?;
        for (run, heading) in RUNS {
            self.section(&mut page, run, heading)?;
        }
        self.beside(&mut page)?;
        Ok(page.trim_end().to_owned() + "\n")
    }

    /// NCCL's version, without the file that was loaded.
    fn nccl(&self) -> &str {
        let mut versions =
            self.samples.iter().filter_map(|sample| sample.rivals_version.as_deref());
        versions.next().and_then(|text| text.split(' ').next()).unwrap_or("not there")
    }

    fn section(&self, page: &mut String, run: &str, heading: &str) -> std::fmt::Result {
        let samples = || self.samples.iter().filter(|sample| sample.run == run);
        if samples().next().is_none() {
            return Ok(());
        }
        writeln!(page, "## {heading}\n\n{HEAD}")?;
        samples().try_for_each(|sample| writeln!(page, "{}", self.line(sample)))?;
        writeln!(page)
    }

    fn line(&self, sample: &Sample) -> String {
        let time = |us: Option<f64>| us.map_or("–".to_owned(), |us| format!("{us:.1}"));
        let ratio = |ratio: Option<f64>| ratio.map_or("–".to_owned(), |it| format!("{it:.2}"));
        let rival = |path| time(sample.rival_us(path));
        format!(
            "| {} | {} | {:.1} | {:.1} | {:.1} | {} | {} | {} | {} | {} | {} | {} | {} |",
            sample.ranks,
            size(sample.total_bytes),
            sample.median_us,
            sample.host_us,
            sample.busbw_gbs,
            time(sample.limit_us),
            ratio(sample.share()),
            rival("default"),
            rival("symmetric"),
            rival("copy engines"),
            ratio(sample.against(sample.best_us())),
            ratio(sample.against(sample.rival_us("copy engines"))),
            words(self.judge(sample)),
        )
    }

    fn beside(&self, page: &mut String) -> std::fmt::Result {
        let samples = BESIDE.iter().flat_map(|(run, place)| {
            let of_run = self.samples.iter().filter(move |sample| sample.run == *run);
            of_run.map(move |sample| (*place, sample))
        });
        let mut samples = samples.filter(|(_, sample)| !sample.beside.is_empty()).peekable();
        if samples.peek().is_none() {
            return Ok(());
        }
        writeln!(page, "## Beside a bf16 GEMM of 8192³ that runs all along\n")?;
        writeln!(
            page,
            "Without NCCL between {HANGS_BESIDE} GPUs, where it hangs beside compute.\n\n{HEAD_BESIDE}"
        )?;
        for (place, sample) in samples {
            for (index, beside) in sample.beside.iter().enumerate() {
                let goal = (index == 0).then(|| goals::judge_beside(beside, &sample.beside));
                writeln!(
                    page,
                    "| {} | {} | {place} | {} | {:.3} | {:.1} | {:.1} | {:.3} | {} |",
                    sample.ranks,
                    size(sample.total_bytes),
                    beside.path,
                    beside.compute_ratio,
                    beside.gather_alone_us,
                    beside.gather_us,
                    beside.gather_ratio,
                    words(goal),
                )?;
            }
        }
        Ok(())
    }
}

/// What the doctor's lines say of devices and links, without what names one machine.
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

fn words(verdict: Option<Result<String, String>>) -> String {
    match verdict {
        None => "–".to_owned(),
        Some(Ok(reached)) => reached,
        Some(Err(missed)) => format!("**missed**: {missed}"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::sample::tests::{nccl, sample};
    use super::*;

    #[test]
    fn the_page_has_a_section_for_each_run_that_was_made() {
        let doctor = serde_json::json!({"cuda": [
            {"topic": "driver", "found": "CUDA 13.0"},
            {"topic": "GPU", "found": "0: NVIDIA H200, 139.72 GiB, 3 copy engines, sm_90, 0000:1b:00.0, GPU-1"},
            {"topic": "GPU", "found": "1: NVIDIA H200, 139.72 GiB, 3 copy engines, sm_90, 0000:1c:00.0, GPU-2"},
            {"topic": "links", "found": "NVLink between all 2 GPUs"},
        ]});
        let beside = r#","beside":[{"path":"peerlane","compute_ratio":1.04,"gather_ratio":1.2,
            "gather_alone_us":150.0,"gather_us":180.0,"overlapped":true}]"#;
        let samples = vec![
            sample("captured", 1 << 20, 30.0, &nccl(13.0, 9.0, 41.5)),
            sample("beside-in-place", 64 << 20, 150.0, beside),
        ];
        let record = Record::new("a day".into(), &doctor, samples);
        let page = record.page().unwrap();
        assert!(page.contains("- 2 × NVIDIA H200, 139.72 GiB, 3 copy engines, sm_90\n"), "{page}");
        assert!(page.contains("## Captured, out of place\n"), "{page}");
        assert!(!page.contains("## Out of place\n") && !page.contains("0000:1b"), "{page}");
        let line = "| 4 | 1 MiB | 30.0 | 6.5 | 1.5 | – | – | 13.0 | 9.0 | 41.5 | 0.30 | 1.38 | \
                    ≥ 1 × NCCL's copy engines |";
        assert!(page.contains(line), "{page}");
        assert!(page.contains("**missed**: 1.200 × the gather alone, wanted 1.06"), "{page}");
        assert_eq!(record.missed(), 1);
    }
}
