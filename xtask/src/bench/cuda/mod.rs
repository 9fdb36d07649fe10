//! `cargo xtask bench cuda`: all-gathers between GPUs, against NCCL and bare copies.
//!
//! The machine with the GPUs may have no cargo. So measuring and recording are apart: a shell script
//! runs the program and leaves JSON in a folder; a folder becomes a record. Without `--from`, both
//! happen here.

mod goals;
mod page;
mod sample;

use std::path::{Path, PathBuf};
use std::process::Command;

use page::Record;
use sample::Sample;

use crate::workspace;
use peerlane_rxe_vm::process::{self, Outcome, cargo};

/// What to measure, or what has been measured.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Numbers of ranks, one a GPU.
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
    /// Leave out the runs beside compute.
    #[arg(long)]
    without_compute: bool,
    /// Print the script that measures, for a machine without cargo, and do nothing else.
    #[arg(long)]
    script: bool,
    /// Record what the script has left in this folder.
    #[arg(long, value_name = "FOLDER", conflicts_with = "script")]
    from: Option<PathBuf>,
}

/// Beside compute, NCCL 2.28.9 hangs between so many GPUs.
const HANGS_BESIDE: usize = 2;
/// The name of the record.
const NAME: &str = "cuda-allgather";

/// Measures, then writes docs/perf/cuda-allgather; a missed goal is an error.
pub(super) fn run(options: &Options) -> Outcome {
    if options.script {
        print!("{}", script(options));
        return Ok(());
    }
    let metadata = workspace::members()?;
    let folder = match &options.from {
        Some(folder) => folder.clone(),
        None => measure(options, metadata.target_directory.as_std_path())?,
    };
    let record = read(&folder)?;
    record.save(&metadata.workspace_root.as_std_path().join("docs/perf"), NAME)?;
    print!("{}", record.page()?);
    println!("\nwritten: docs/perf/{NAME}.json, docs/perf/{NAME}.md");
    match record.missed() {
        0 => Ok(()),
        missed => Err(format!("{missed} goals are missed").into()),
    }
}

/// Builds the program and runs the script here.
fn measure(options: &Options, target: &Path) -> Outcome<PathBuf> {
    process::run(&mut cargo(["build", "--release", "--package", "peerlane-cli"]))?;
    let folder = target.join("bench-cuda");
    if folder.exists() {
        std::fs::remove_dir_all(&folder)?;
    }
    std::fs::create_dir_all(&folder)?;
    let path = folder.join("measure.sh");
    std::fs::write(&path, script(options))?;
    process::run(Command::new("sh").arg(&path).arg(target.join("release/peerlane")).arg(&folder))?;
    Ok(folder)
}

/// The script: its first argument is the program, its second a folder that exists.
fn script(options: &Options) -> String {
    let Options { ranks, min_bytes, max_bytes, with, .. } = options;
    let mut lines = vec![
        "#!/bin/sh".to_owned(),
        "# Measures for `cargo xtask bench cuda --from FOLDER`: sh SCRIPT path/to/peerlane FOLDER"
            .to_owned(),
        "set -eu".to_owned(),
        "\"$1\" doctor --json > \"$2/doctor.json\"".to_owned(),
        "date -u '+%Y-%m-%d %H:%M UTC' > \"$2/date\"".to_owned(),
    ];
    for ranks in ranks {
        let mut run = |name: &str, sizes: &str, what: &str| {
            let words = format!("--backend cuda --ranks {ranks} {sizes} {what} {with}");
            let words = words.split_whitespace().collect::<Vec<_>>().join(" ");
            lines.push(format!(
                "\"$1\" allgather {words} --json \"$2/{ranks}-{name}.jsonl\" > \"$2/{ranks}-{name}.txt\""
            ));
        };
        let sizes = format!("--min-bytes {min_bytes} --max-bytes {max_bytes} --limit --vs nccl");
        run("out-of-place", &sizes, "");
        run("in-place", &sizes, "--in-place");
        // With one output a start asks for `ready` first, as it does in place.
        run("with-ready", &sizes, "--outputs 1");
        run("captured", &sizes, "--graph");
        run("captured-in-place", &sizes, "--graph --in-place");
        if !options.without_compute {
            let vs = if *ranks > HANGS_BESIDE { "--vs nccl" } else { "" };
            let sizes = format!("--min-bytes 64M --max-bytes 1G --factor 16 {vs}");
            run("beside-out-of-place", &sizes, "--beside gemm");
            run("beside-in-place", &sizes, "--beside gemm --in-place");
            run("beside-own-copy-by-link", &sizes, "--beside gemm --own-copy link");
        }
    }
    lines.join("\n") + "\n"
}

/// Everything that the script has left in a folder.
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
        // `4-in-place`: the number of ranks is in the samples too.
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
    let doctor: serde_json::Value = serde_json::from_str(&read(&folder.join("doctor.json"))?)?;
    let date = read(&folder.join("date"))?.trim().to_owned();
    Ok(Record::new(date, &doctor, samples))
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let wanted = "\"$1\" allgather --backend cuda --ranks 4 --min-bytes 4K --max-bytes 1G \
                      --limit --vs nccl --graph --nccl x.so --json \"$2/4-captured.jsonl\" > \
                      \"$2/4-captured.txt\"";
        assert!(script.lines().any(|line| line == wanted), "{script}");
        let hangs =
            |line: &str| ["--ranks 2", "--beside", "--vs"].iter().all(|word| line.contains(word));
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
}
