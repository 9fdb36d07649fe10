//! `cargo xtask bench cuda`: measures all collectives between GPUs, beside NCCL, bare copies and an
//! earlier version of Peerlane.
//!
//! The machine with the GPUs may have no cargo, so measuring and recording are separate: a shell
//! script runs the programs and leaves JSON in a folder, and a folder becomes a visit of the record
//! docs/perf/beside-nccl.json. Without `--from`, both happen here. `--page` only renders the
//! record.

use std::path::{Path, PathBuf};
use std::process::Command;

use peerlane_rxe_vm::process::{self, Outcome};

use super::report;
use crate::workspace;
use visit::{Record, Visit};

mod page;
mod visit;

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
    /// How often everything is measured; the medians count.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// More options for each run, such as `--nccl PATH`, in one word.
    #[arg(long, default_value = "", allow_hyphen_values = true)]
    with: String,
    /// Measure these collectives only.
    #[arg(long, value_delimiter = ',')]
    collectives: Vec<String>,
    /// Leave out the runs that overlap with compute.
    #[arg(long)]
    without_compute: bool,
    /// Measure this program of an earlier version in turn.
    #[arg(long, value_name = "PROGRAM")]
    earlier: Option<PathBuf>,
    /// Only print the script that measures, for a machine without cargo.
    #[arg(long)]
    script: bool,
    /// Record the output of the script in this folder.
    #[arg(long, value_name = "FOLDER", conflicts_with = "script")]
    from: Option<PathBuf>,
    /// Only render the page of the record.
    #[arg(long, conflicts_with_all = ["script", "from"])]
    page: bool,
}

/// The name of the record and its page below docs/perf.
const NAME: &str = "beside-nccl";

/// The number of GPUs at which NCCL 2.28.9 hangs if compute runs at the same time.
const NCCL_HANGS_AT: usize = 2;

/// The collectives with their element types, and with the forms in which they run.
const COLLECTIVES: [(&str, &[&str], &[&str]); 8] = [
    ("all-gather", &["u8"], &["", "--in-place", "--graph", "--graph --in-place"]),
    ("broadcast", &["u8"], &["", "--in-place", "--graph", "--graph --in-place"]),
    ("all-to-all", &["u8"], &["", "--graph"]),
    ("gather", &["u8"], &["", "--graph"]),
    ("scatter", &["u8"], &["", "--graph"]),
    ("reduce-scatter", &["bf16", "f32"], &["", "--graph"]),
    ("all-reduce", &["bf16", "f32"], &["", "--in-place", "--graph"]),
    ("reduce", &["bf16", "f32"], &["", "--graph"]),
];
/// The runs that overlap with compute: the variant and its options.
const OVERLAPPED: [(&str, &str); 4] = [
    ("default", ""),
    ("self-copy-by-link", "--self-copy link"),
    ("beside_compute", "--beside-compute"),
    ("default", "--in-place"),
];

/// The variant of all-gathers whose blocks have different lengths.
const UNEVEN: &str = "uneven";
/// The variant of all-gathers in which every start waits for `ready`.
const ONE_OUTPUT: &str = "one output";

/// Measures everything and writes docs/perf/beside-nccl.
pub(super) fn run(options: &Options) -> Outcome {
    if options.script {
        print!("{}", script(options));
        return Ok(());
    }

    let mut record = Record::load()?;
    if options.page {
        return record.save();
    }
    let folder = match &options.from {
        Some(folder) => folder.clone(),
        None => measure(options, workspace::members()?.target_directory.as_std_path())?,
    };
    let visit = Visit::read(&folder)?;
    print!("{}", visit.section());

    let goals: Vec<_> = visit.goals().collect();
    record.visits.insert(0, visit);
    record.save()?;
    report::judge(goals)
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
    let mut command = Command::new("sh");
    command.arg(&path).arg(program).arg(&folder).args(&options.earlier);
    process::run(&mut command)?;
    Ok(folder)
}

/// The beginning of the script. A run that fails leaves its text, and the others go on.
const SCRIPT: &str = r#"#!/bin/sh
# Measures for `cargo xtask bench cuda --from FOLDER`:
# sh SCRIPT path/to/peerlane FOLDER [path/to/an/earlier/peerlane]
set -eu
folder=$2
"$1" doctor --json > "$folder/doctor.json"
"$1" --version > "$folder/version"
date -u '+%Y-%m-%d' > "$folder/date"
run() {
    program=$1; name=$2; shift 2
    "$program" bench "$@" --json "$folder/$name.jsonl" > "$folder/$name.txt" 2>&1 ||
        echo "failed: bench $*, see $folder/$name.txt"
}
"#;

/// Returns the script. Its arguments are the program, an existing folder and perhaps an earlier
/// program.
///
/// The files have names of four parts: round, version, variant with dashes, and what makes them
/// unique.
fn script(options: &Options) -> String {
    let is_asked = |name: &str| {
        options.collectives.is_empty() || options.collectives.iter().any(|asked| asked == name)
    };
    let mut script = SCRIPT.to_owned();

    for round in 0..options.rounds {
        for ranks in &options.ranks {
            let asked = COLLECTIVES.iter().filter(|(name, ..)| is_asked(name));
            script += &asked
                .map(|collective| runs(round, *ranks, *collective, options))
                .collect::<String>();
            if is_asked("all-gather") {
                script += &variants(round, *ranks, options);
            }
        }
    }

    for ranks in options.ranks.iter().filter(|_| !options.without_compute) {
        script += &overlapped(*ranks, options);
    }
    script
}

/// Returns the lines that measure a collective in all types and forms, each with this version and
/// then with the earlier one.
fn runs(
    round: usize,
    ranks: usize,
    (collective, dtypes, forms): (&str, &[&str], &[&str]),
    options: &Options,
) -> String {
    let Options { min_bytes, max_bytes, with, .. } = options;
    // Bare copies are no limit of collectives that add.
    let limit = if dtypes == ["u8"] { "--limit" } else { "" };
    let mut lines = String::new();

    let runs = dtypes.iter().flat_map(|dtype| forms.iter().map(move |form| (dtype, form)));
    for (number, (dtype, form)) in runs.enumerate() {
        let what = format!(
            "{collective} --backend cuda --ranks {ranks} --dtype {dtype} \
             --min-bytes {min_bytes} --max-bytes {max_bytes} {form}"
        );
        let unique = format!("default.{ranks}-{collective}-{number}");

        lines +=
            &words(&format!("run \"$1\" {round}.now.{unique} {what} {limit} --vs nccl {with}"));
        lines += &words(&format!("[ $# -lt 3 ] || run \"$3\" {round}.earlier.{unique} {what}"));
    }
    lines
}

/// Returns the lines that measure all-gathers beside a GEMM.
fn overlapped(ranks: usize, options: &Options) -> String {
    let vs = if ranks > NCCL_HANGS_AT { "--vs nccl" } else { "" };
    let run = |(number, (variant, what)): (usize, &(&str, &str))| {
        words(&format!(
            "run \"$1\" 0.now.{variant}.{ranks}-overlap-{number} all-gather --backend cuda \
             --ranks {ranks} --min-bytes 64M --max-bytes 1G --factor 16 {vs} --overlap gemm \
             {what} {}",
            options.with
        ))
    };
    OVERLAPPED.iter().enumerate().map(run).collect()
}

/// Returns the lines that measure all-gathers with one output, and those whose last block is three
/// times as long as each other one, of the same totals as the even ones.
fn variants(round: usize, ranks: usize, options: &Options) -> String {
    let Options { min_bytes, max_bytes, with, .. } = options;
    let uneven = format!("--blocks {}3", "1:".repeat(ranks - 1));
    let one_output = "--outputs 1 --limit --vs nccl".to_owned();
    let line = |(variant, what): (&str, String)| {
        let variant = variant.replace(' ', "-");
        words(&format!(
            "run \"$1\" {round}.now.{variant}.{ranks}-all-gather all-gather --backend cuda \
             --ranks {ranks} --min-bytes {min_bytes} --max-bytes {max_bytes} {what} {with}"
        ))
    };
    [(ONE_OUTPUT, one_output), (UNEVEN, uneven)].into_iter().map(line).collect()
}

/// Returns a line with one space between words.
fn words(line: &str) -> String {
    line.split_whitespace().collect::<Vec<_>>().join(" ") + "\n"
}

#[cfg(test)]
mod tests {
    use super::visit::{Overlap, Point, Row, Visit};
    use super::*;

    fn options() -> Options {
        Options {
            ranks: vec![2, 4],
            min_bytes: "4K".into(),
            max_bytes: "1G".into(),
            rounds: 2,
            with: "--nccl x.so".into(),
            collectives: Vec::new(),
            without_compute: false,
            earlier: None,
            script: true,
            from: None,
            page: false,
        }
    }

    /// Returns the line of an all-gather of 4 ranks as the program writes it.
    fn line(total_bytes: u64, median_us: f64, more: &str) -> String {
        format!(
            r#"{{"collective":"all-gather","dtype":"u8","ranks":4,"total_bytes":{total_bytes},
            "in_place":false,"captured":false,"checked":true,"median_us":{median_us}{more}}}"#
        )
        .replace('\n', "")
    }

    const NCCL: &str = r#","baselines_version":"2.32.3 (/lib/libnccl.so.2)","limit_us":6.0,"baselines":[
        {"path":"default","baseline_us":13.0},{"path":"symmetric","baseline_us":9.0},
        {"path":"copy engines","missing":"refused"}]"#;

    /// Reads a folder with these files, each a name and its lines.
    fn visit(files: &[(&str, String)]) -> Outcome<Visit> {
        static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let folder =
            std::env::temp_dir().join(format!("peerlane-visit-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&folder)?;
        let doctor = r#"{"cuda":[{"topic":"driver","found":"CUDA 13.0"},{"topic":"GPU",
            "found":"0: NVIDIA H200, 139.72 GiB, 3 copy engines, sm_90, 0000:1b:00.0, GPU-1"}]}"#;
        for (name, text) in [("doctor.json", doctor), ("date", "a day\n"), ("version", "1.0\n")] {
            std::fs::write(folder.join(name), text)?;
        }
        for (name, text) in files {
            std::fs::write(folder.join(name), text)?;
        }
        let visit = Visit::read(&folder);
        std::fs::remove_dir_all(&folder)?;
        visit
    }

    #[test]
    fn the_script_runs_versions_by_turns() {
        let script = script(&options());
        let expected = "run \"$1\" 1.now.default.4-all-gather-2 all-gather --backend cuda --ranks 4 \
                        --dtype u8 --min-bytes 4K --max-bytes 1G --graph --limit --vs nccl --nccl x.so";
        let lines: Vec<&str> = script.lines().collect();
        let at = lines.iter().position(|line| *line == expected).expect("the script has the line");
        assert!(
            lines[at + 1]
                .starts_with("[ $# -lt 3 ] || run \"$3\" 1.earlier.default.4-all-gather-2")
        );
        assert!(
            lines
                .iter()
                .any(|line| line.contains("--dtype f32") && line.contains("reduce-scatter"))
        );
        assert!(lines.iter().any(|line| line.contains("--blocks 1:1:1:3")));
        assert!(
            lines
                .iter()
                .any(|line| line.contains(".one-output.4-") && line.contains("--outputs 1"))
        );

        let hangs = |line: &&str| {
            ["--ranks 2 ", "--overlap", "--vs"].iter().all(|word| line.contains(word))
        };
        assert!(!lines.iter().any(hangs), "{script}");
    }

    #[test]
    fn a_script_of_one_collective_has_no_other() {
        let script = script(&Options {
            collectives: vec!["broadcast".into()],
            without_compute: true,
            ..options()
        });
        let runs = script.lines().filter(|line| line.starts_with("run \"$1\""));
        assert_eq!(runs.clone().count(), 2 * 2 * 4);
        assert!(runs.clone().all(|line| line.contains(" broadcast ")), "{script}");
    }

    #[test]
    fn a_folder_without_measurements_says_how_to_make_them() {
        let error = visit(&[]).unwrap_err().to_string();
        assert!(error.contains("holds no *.jsonl; make it with"), "{error}");

        let error = visit(&[("0.now.default.x.jsonl", "{}\n".into())]).unwrap_err().to_string();
        assert!(error.contains("0.now.default.x.jsonl, line 1: missing field"), "{error}");

        let unchecked = line(1 << 20, 9.0, "").replace("true", "false");
        let error = visit(&[("0.now.default.x.jsonl", unchecked)]).unwrap_err().to_string();
        assert!(error.ends_with("line 1: the bytes were not checked"), "{error}");
    }

    #[test]
    fn rounds_become_medians_beside_the_earlier_version() {
        let nccl = NCCL.replace('\n', "");
        let now = |us| line(1 << 20, us, &nccl);
        let visit = visit(&[
            ("0.now.default.a.jsonl", now(8.0)),
            ("1.now.default.a.jsonl", now(6.0)),
            ("2.now.default.a.jsonl", now(7.0)),
            ("0.earlier.default.a.jsonl", line(1 << 20, 14.0, "")),
        ])
        .unwrap();

        let [row] = &visit.rows[..] else { panic!("{:?}", visit.rows) };
        assert_eq!(
            (row.median_us, row.earlier_us, row.by_best()),
            (Some(7.0), Some(14.0), Some(9.0 / 7.0))
        );
        assert_eq!((visit.nccl.as_deref(), row.goals(None).are_missed()), (Some("2.32.3"), false));
        let slower = Row { median_us: Some(15.0), ..row.clone() };
        let missed = "**missed**: ≥ 1 × NCCL's best (found 0.600), ≤ 1.02 × the earlier version (found 1.071)";
        assert_eq!(slower.goals(None).cell(), missed);
    }

    /// Returns the all-gather of 4 ranks, in the form and with the variant.
    fn row((captured, in_place): (bool, bool), variant: &str, total: u64, median_us: f64) -> Row {
        let point = Point {
            collective: "all-gather".into(),
            ranks: 4,
            captured,
            in_place,
            variant: variant.into(),
            total_bytes: total,
            ..Point::default()
        };
        Row { point, median_us: Some(median_us), host_us: Some(6.5), ..Row::default() }
    }

    const OUT_OF_PLACE: (bool, bool) = (false, false);
    const IN_PLACE: (bool, bool) = (false, true);

    #[test]
    fn each_form_has_its_goals() {
        let paths = |times: [f64; 3]| {
            let names = ["default", "symmetric", "copy engines"].map(str::to_owned);
            names.into_iter().zip(times).collect()
        };
        let large = |median_us| Row {
            nccl: paths([2450.0, 2411.0, 2221.0]),
            limit_us: Some(2055.0),
            ..row(OUT_OF_PLACE, "", 1 << 30, median_us)
        };
        let small = |median_us| Row {
            nccl: paths([33.0, 29.0, 32.0]),
            ..row(OUT_OF_PLACE, "", 1 << 20, median_us)
        };

        let reached =
            "≥ 1 × NCCL's best, ≥ 0.97 of the limit, ≥ 1.06 × NCCL's best, ≤ 8 µs of the host";
        assert_eq!(large(2080.0).goals(None).cell(), reached);
        let missed =
            "**missed**: ≥ 0.97 of the limit (found 0.934), ≥ 1.06 × NCCL's best (found 1.010)";
        assert_eq!(large(2200.0).goals(None).cell(), missed);
        let reached = "≥ 1 × NCCL's best, ≥ 1.6 × NCCL's copy engines, ≤ 18 µs, ≤ 8 µs of the host";
        assert_eq!(small(18.0).goals(None).cell(), reached);
        let missed =
            "**missed**: ≥ 1.6 × NCCL's copy engines (found 1.524), ≤ 18 µs (found 21.000)";
        assert_eq!(small(21.0).goals(None).cell(), missed);
        assert_eq!(row(OUT_OF_PLACE, "", 8, 2.0).goals(None).cell(), "≤ 8 µs of the host");
        let one_output = row(OUT_OF_PLACE, ONE_OUTPUT, 1 << 20, 28.0);
        assert_eq!(one_output.goals(None).cell(), "**missed**: ≤ 27 µs (found 28.000)");
    }

    #[test]
    fn a_start_in_place_is_compared_with_one_of_one_output() {
        let visit = |one_output: f64| Visit {
            rows: vec![
                row(OUT_OF_PLACE, "", 1 << 24, 40.0),
                row(OUT_OF_PLACE, ONE_OUTPUT, 1 << 24, one_output),
                row(IN_PLACE, "", 1 << 24, 50.0),
            ],
            ..Visit::default()
        };
        let missed = |visit: &Visit| visit.goals().filter(|(_, goals)| goals.are_missed()).count();
        assert_eq!((missed(&visit(50.0)), missed(&visit(48.0))), (0, 1));
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
            let overlaps = vec![overlap("peerlane", 1.04, 153.0), overlap("NCCL", 1.02, nccl_us)];
            let visit = Visit { overlaps, ..Visit::default() };
            visit.goals().map(|(_, goals)| goals.cell()).collect::<Vec<_>>()
        };

        let [reached] = &goals(160.0)[..] else { panic!("there is one of Peerlane") };
        assert!(!reached.contains("missed"), "{reached}");
        assert_eq!(goals(150.0), ["**missed**: no path is better on both (found NCCL)"]);
    }

    #[test]
    fn the_files_are_those_of_the_record() {
        let record = Record::load().unwrap();
        let folder = workspace::members().unwrap().workspace_root.join("docs/perf");
        let file = |kind| std::fs::read_to_string(folder.join(format!("{NAME}.{kind}"))).unwrap();
        assert!(record.page() == file("md"), "run `cargo xtask bench cuda --page`");
        assert!(record.json().unwrap() == file("json"), "run `cargo xtask bench cuda --page`");
    }

    #[test]
    fn the_section_has_a_table_for_each_collective() {
        let nccl = NCCL.replace('\n', "");
        let overlap = r#","overlap":[{"path":"peerlane","compute_ratio":1.04,"gather_ratio":1.2,"gather_alone_us":150.0,"gather_us":180.0,"overlapped":true}]"#;
        let visit = visit(&[
            ("0.now.default.a.jsonl", line(1 << 20, 7.5, &nccl)),
            ("0.now.uneven.a.jsonl", line((1 << 20) - 4, 10.0, "")),
            ("0.now.beside_compute.b.jsonl", line(64 << 20, 150.0, overlap)),
        ])
        .unwrap();

        let section = visit.section();
        assert!(
            section.starts_with(
                "\n## a day: 1 × NVIDIA H200, 139.72 GiB, 3 copy engines, sm_90, NCCL 2.32.3\n"
            ),
            "{section}"
        );
        let even = "All-gather, 4 ranks:\n\n| total | eager, µs | × best | of the limit |\n\
                    | --: | --: | --: | --: |\n| 1 MiB | 7.5 | 1.20 | 0.80 |\n";
        assert!(section.contains(even), "{section}");
        assert!(
            section.contains("All-gather, 4 ranks, uneven:\n\n| total | eager, µs | × even |\n"),
            "{section}"
        );
        assert!(section.contains("| 1048572 B | 10.0 | 0.75 |\n"), "{section}");
        assert!(
            section.contains("| 4 | 64 MiB | out of place | peerlane, beside_compute | 1.040 |"),
            "{section}"
        );
        assert_eq!(visit.goals().filter(|(_, goals)| goals.are_missed()).count(), 1);
    }
}
