//! Builds test programs and runs several at a time. A program that needs all processors runs when
//! the others have ended.
//!
//! The output of a program is kept in a file below `target/tests` and printed when the program has
//! ended. A later run begins with the programs that took longest.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use cargo_metadata::{Artifact, Message, PackageId, TargetKind};

use super::times::{self, Timed, Watch};
use crate::workspace;
use peerlane_rxe_vm::Totals;
use peerlane_rxe_vm::process::{self, Outcome};

/// Time after which a program is killed: longer than the limit of one program of the virtual
/// machine, so that the machine reports it.
const LIMIT: Duration = Duration::from_secs(40 * 60);
/// The lines of a failed test that the list of failures repeats, because a log may be cut.
const PRINTED_LINES: usize = 15;
/// Time between two looks at a running program.
const LOOK: Duration = Duration::from_millis(20);
/// The number of slow tests that are listed.
const SLOWEST: usize = 20;
/// The folder of the outputs. The unit tests of this file run beside a real run, whose outputs they
/// leave alone.
const FOLDER: &str = match cfg!(test) {
    true => concat!(env!("CARGO_MANIFEST_DIR"), "/../target/tests-of-xtask"),
    false => concat!(env!("CARGO_MANIFEST_DIR"), "/../target/tests"),
};
/// Begins a line by which a test says what it did not cover; `: ` and the reason follow.
const NOT_COVERED: &str = "not covered: ";
/// The test programs in which nothing may run, and why. In any other program of tests, something
/// must run.
const MAY_RUN_NOTHING: [(&str, &str); 10] = [
    ("peerlane-ibverbs-sys layout", "needs the header of libibverbs"),
    ("peerlane-hip-sys releases", "compares with libraries that `cargo xtask test rocm` fetches"),
    ("peerlane-hsa-sys releases", "compares with libraries that `cargo xtask test rocm` fetches"),
    ("peerlane-rocm releases", "compares with libraries that `cargo xtask test rocm` fetches"),
    ("peerlane-tests namespaces", "needs permission to create namespaces"),
    ("peerlane-tests rdma", "needs RDMA devices"),
    ("peerlane-tests rdma_mixed", "needs network namespaces with RDMA devices"),
    ("peerlane-tests rdma_processes", "needs network namespaces with RDMA devices"),
    ("peerlane-ucx contract", "needs libucp"),
    ("peerlane-ucx hosts", "needs network namespaces"),
];
/// The programs that run one test at a time: what they measure does not count the time in which
/// threads wait for a processor, and those of another test would hide that of the measured one.
const ONE_AT_A_TIME: [&str; 3] =
    ["peerlane-bootstrap bootstrap", "peerlane-collectives groups", "peerlane-tests streams"];
/// The file with the seconds that each program took last.
const SECONDS: &str = "seconds.txt";

/// A test program, or another command whose output has the form of one.
pub(super) struct Program {
    /// The package and the target, or what else names the command.
    name: String,
    command: Command,
    /// The package, unless the command is no test program of it.
    package: Option<PackageId>,
    /// The command that runs it again, up to the name of a test.
    repeat: String,
    /// Whether no other program runs beside it.
    pub(super) alone: bool,
}

impl Program {
    /// Makes a program of a command that runs tests by itself.
    pub(super) fn of_command(name: &str, command: Command) -> Self {
        let repeat = process::line(&command);
        Self { name: name.to_owned(), command, package: None, repeat, alone: false }
    }
}

/// Builds what a `cargo test` command would run, and returns what cargo has built.
pub(super) fn artifacts(build: &mut Command) -> Outcome<Vec<Artifact>> {
    build.args(["--no-run", "--message-format=json-render-diagnostics"]);
    let output = build.stderr(Stdio::inherit()).output()?;
    if !output.status.success() {
        return Err(format!("{} failed: {}", process::line(build), output.status).into());
    }
    let mut artifacts = Vec::new();
    for message in Message::parse_stream(output.stdout.as_slice()) {
        if let Message::CompilerArtifact(artifact) = message? {
            artifacts.push(artifact);
        }
    }
    Ok(artifacts)
}

/// Builds the programs that a `cargo test` command would run. They get its variables, and its
/// arguments after `--`.
pub(super) fn build(command: &Command) -> Outcome<Vec<Program>> {
    let arguments: Vec<_> = command.get_args().map(ToOwned::to_owned).collect();
    let mut parts = arguments.splitn(2, |argument| argument == "--");
    let (of_cargo, of_programs) =
        (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());

    let mut build = Command::new(command.get_program());
    let artifacts = artifacts(build.args(of_cargo))?;
    let metadata = workspace::members()?;

    let mut programs = Vec::new();
    for artifact in artifacts {
        let Some(file) = artifact.executable.filter(|_| artifact.profile.test) else { continue };
        let package = metadata.packages.iter().find(|package| package.id == artifact.package_id);
        let package = package.ok_or("an artifact is of no package")?;
        let folder = package.manifest_path.parent().ok_or("a package has a folder")?;
        let target = &artifact.target;
        let selection = match &target.kind[..] {
            [TargetKind::Test] => format!("--test {}", target.name),
            [TargetKind::Bin] => "--bins".to_owned(),
            [TargetKind::Example] => format!("--example {}", target.name),
            _ => "--lib".to_owned(),
        };

        let mut run = Command::new(file);
        run.args(of_programs).current_dir(folder).env("CARGO_MANIFEST_DIR", folder);
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => run.env(name, value),
                None => run.env_remove(name),
            };
        }

        programs.push(Program {
            name: format!("{} {}", package.name, selection.trim_start_matches("--test ")),
            command: run,
            package: Some(package.id.clone()),
            repeat: format!("cargo test -p {} {selection} -- --exact", package.name),
            alone: false,
        });
    }
    Ok(programs)
}

/// Keeps the programs of `packages`, and returns the names of the others.
pub(super) fn keep(programs: &mut Vec<Program>, packages: &BTreeSet<PackageId>) -> Vec<String> {
    let is_kept = |program: &Program| match &program.package {
        Some(package) => packages.contains(package),
        None => true,
    };
    let left_out = programs.iter().filter(|program| !is_kept(program));
    let left_out = left_out.map(|program| program.name.clone()).collect();
    programs.retain(is_kept);
    left_out
}

/// The result of a program that has ended.
struct Ended {
    name: String,
    took: Duration,
    totals: Totals,
    timed: Vec<Timed>,
    /// The failed tests: for each, its name, the command that repeats it, and its output.
    failures: Vec<String>,
    not_covered: Vec<String>,
}

/// The results of several programs.
#[derive(Default)]
pub(super) struct Results {
    pub(super) totals: Totals,
    /// A line for everything that failed.
    pub(super) failures: Vec<String>,
    /// What the tests did not cover, each with its reason.
    pub(super) not_covered: Vec<String>,
    /// The tests that took longest, the slowest first.
    pub(super) slowest: Vec<Timed>,
}

/// Runs programs, `at_once` of them at a time and then those that run alone, and prints the output
/// of each when it has ended.
pub(super) fn run(mut programs: Vec<Program>, at_once: usize) -> Outcome<Results> {
    fs::create_dir_all(FOLDER)?;
    let mut seconds = read_seconds();

    // The queue is taken from its end, so that the longest programs begin first.
    programs.sort_by_key(|program| {
        let is_long = program.package.is_none()
            || super::LONG.iter().any(|(name, _)| program.name.ends_with(name));
        seconds.get(&program.name).copied().unwrap_or(if is_long { u64::MAX } else { 0 })
    });

    let (alone, others): (Vec<_>, Vec<_>) = programs.into_iter().partition(|program| program.alone);
    let mut results = run_all(others, at_once.max(1));
    results.extend(run_all(alone, 1));

    seconds.extend(results.iter().map(|ended| (ended.name.clone(), ended.took.as_secs())));
    let lines = seconds.iter().map(|(name, seconds)| format!("{seconds} {name}\n"));
    fs::write(Path::new(FOLDER).join(SECONDS), lines.collect::<String>())?;

    let mut all = Results::default();
    for result in results {
        all.totals.passed += result.totals.passed;
        all.totals.failed += result.totals.failed;
        all.totals.ignored += result.totals.ignored;
        all.failures.extend(result.failures);
        all.not_covered.extend(result.not_covered);
        let Ended { name, timed, .. } = result;
        all.slowest.extend(timed.into_iter().map(|(took, test)| (took, format!("{name} {test}"))));
    }

    all.slowest.sort_unstable_by(|a, b| b.cmp(a));
    all.slowest.truncate(SLOWEST);
    Ok(all)
}

/// Runs programs in reverse order, at most `at_once` at a time.
fn run_all(programs: Vec<Program>, at_once: usize) -> Vec<Ended> {
    let queue = Mutex::new(programs);
    let results = Mutex::new(Vec::new());

    thread::scope(|scope| {
        for _ in 0..at_once {
            scope.spawn(|| {
                loop {
                    let next = queue.lock().unwrap_or_else(PoisonError::into_inner).pop();
                    let Some(program) = next else { return };
                    let (output, ended) = run_one(program);

                    // Held while it prints, so that outputs do not mix.
                    let mut results = results.lock().unwrap_or_else(PoisonError::into_inner);
                    println!("\n     Ran {} in {:.1} s", ended.name, ended.took.as_secs_f64());
                    print!("{output}");
                    results.push(ended);
                }
            });
        }
    });
    results.into_inner().unwrap_or_else(PoisonError::into_inner)
}

fn read_seconds() -> BTreeMap<String, u64> {
    let text = fs::read_to_string(Path::new(FOLDER).join(SECONDS)).unwrap_or_default();
    let lines = text.lines().filter_map(|line| line.split_once(' '));
    lines.filter_map(|(seconds, name)| Some((name.to_owned(), seconds.parse().ok()?))).collect()
}

/// Runs a program to its end, and returns its output.
fn run_one(mut program: Program) -> (String, Ended) {
    let start = Instant::now();
    let file: String =
        program.name.chars().map(|it| if it.is_alphanumeric() { it } else { '_' }).collect();
    let log: PathBuf = [FOLDER, &format!("{file}.log")].iter().collect();

    let runs_all = program.package.is_none() || program.command.get_args().len() == 0;
    if program.package.is_some() && times::are_reported(&program.command) {
        program.command.args(times::ARGUMENTS).env(times::ACCEPTS.0, times::ACCEPTS.1);
    }
    if runs_all && ONE_AT_A_TIME.contains(&program.name.as_str()) {
        program.command.arg("--test-threads=1");
    }

    let mut timed = Vec::new();
    let status = File::create(&log).and_then(|out| {
        let command = program.command.stdin(Stdio::null());
        let child = command.stdout(out.try_clone()?).stderr(out).spawn()?;
        let mut watch = Watch::new(File::open(&log)?);
        let status = wait(child, &mut watch);
        timed = watch.finish();
        status
    });
    let took = start.elapsed();

    let output = times::without(&String::from_utf8_lossy(&fs::read(&log).unwrap_or_default()));
    let mut totals = Totals::default();
    output.lines().for_each(|line| totals.add(line));
    let mut not_covered = not_covered(&output, &mut totals);
    if program.alone {
        // What else a virtual machine lacks, the machine that runs it may have.
        not_covered.retain(|line| super::is_of_machine(line));
        not_covered.iter_mut().for_each(|line| line.insert_str(0, "in the virtual machine: "));
    }

    let Program { name, repeat, package, .. } = program;
    let of_test = |test: &String| {
        let repeat = match &package {
            Some(_) => format!("{repeat} '{test}'"),
            None => repeat.clone(),
        };
        let printed = printed(&output, test).map(|line| format!("\n    {line}"));
        format!("{test}: {repeat}{}", printed.collect::<String>())
    };
    let mut failures: Vec<String> = totals.failures.iter().map(of_test).collect();

    let failed = match status {
        Ok(Some(status)) if status.success() => None,
        Ok(Some(status)) => Some(status.to_string()),
        Ok(None) => Some(format!("it did not end within {} s", LIMIT.as_secs())),
        Err(error) => Some(error.to_string()),
    };
    if let Some(reason) = failed
        && failures.is_empty()
    {
        failures.push(format!("{name}: {reason}: {}", repeat.trim_end_matches(" -- --exact")));
    }

    // A library may have no tests. Arguments may select none.
    let has_tests = repeat.contains(" --test ") || totals.ignored > 0;
    let may_run_nothing = MAY_RUN_NOTHING.iter().any(|(listed, _)| *listed == name);
    if has_tests && runs_all && !may_run_nothing && totals.passed == 0 && failures.is_empty() {
        failures.push(format!(
            "{name}: none of its tests ran; if that can be right, list it with the reason in xtask/src/test/programs.rs"
        ));
    }
    (output, Ended { name, took, totals, timed, failures, not_covered })
}

/// Returns what the output of a program says was not covered. A test that says so of itself, by its
/// name without the modules, is counted as ignored although it has passed: a test of the standard
/// harness cannot be ignored at run time.
fn not_covered(output: &str, totals: &mut Totals) -> Vec<String> {
    let mut all = Vec::new();
    let passed = output.lines().filter_map(|line| line.strip_suffix("ok").and_then(begun_test));
    let passed: BTreeSet<&str> = passed.collect();
    for line in output.lines() {
        let Some((begun, said)) = line.split_once(NOT_COVERED) else { continue };
        let test = said.split(": ").next().unwrap_or_default();
        // The standard harness may have begun the line of the test, and ends it behind this line.
        if passed.contains(test) || begun_test(begun) == Some(test) {
            totals.passed = totals.passed.saturating_sub(1);
            totals.ignored += 1;
        }
        all.push(said.to_owned());
    }
    all
}

/// Returns the test, without its modules, of a line such as `test module::name ... `.
fn begun_test(line: &str) -> Option<&str> {
    line.strip_prefix("test ")?.strip_suffix(" ... ")?.trim_end().rsplit("::").next()
}

/// Returns what a failed test printed, at most [`PRINTED_LINES`] of it.
fn printed<'a>(output: &'a str, test: &str) -> impl Iterator<Item = &'a str> {
    let headings = [format!("---- {test} ----"), format!("---- {test} stdout ----")];
    let lines =
        output.lines().skip_while(move |line| !headings.iter().any(|it| it == line)).skip(1);
    let lines = lines.take_while(|line| !line.starts_with("---- ") && *line != "failures:");
    lines.filter(|line| !line.is_empty()).take(PRINTED_LINES)
}

/// Waits for a program while its output is watched, and kills it after [`LIMIT`]; returns `None`
/// then.
fn wait(mut child: Child, watch: &mut Watch) -> std::io::Result<Option<ExitStatus>> {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if start.elapsed() >= LIMIT {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        thread::sleep(LOOK);
        watch.look();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(name: &str, line: &str) -> Program {
        let mut command = Command::new("sh");
        command.args(["-c", line]);
        Program { repeat: format!("sh {name}"), ..Program::of_command(name, command) }
    }

    #[test]
    fn what_failed_is_listed_with_what_it_printed() {
        let passes = shell(
            "xtask passes",
            "echo 'test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured'",
        );
        let line = "printf 'test kill::rank_3     ... FAILED\n\n---- kill::rank_3 ----\nit hangs\n\nfailures:\n'; \
                    echo 'test result: FAILED. 3 passed; 1 failed; 0 ignored'; exit 101";
        let (fails, dies) = (shell("xtask fails", line), shell("xtask dies", "kill -9 $$"));
        let Results { totals, mut failures, .. } = run(vec![passes, fails, dies], 2).unwrap();
        assert_eq!((totals.passed, totals.failed, totals.ignored), (15, 1, 1));
        failures.sort();
        let expected = [
            "kill::rank_3: sh xtask fails\n    it hangs",
            "xtask dies: signal: 9 (SIGKILL): sh xtask dies",
        ];
        assert_eq!(failures, expected);
    }

    #[test]
    fn a_test_that_did_not_run_is_not_counted_as_passed() {
        let line = "echo 'test gpu::finds_a_gpu ... ok'; echo 'test adds ... ok'; \
                    echo 'test asks ... not covered: asks: no network'; echo ok; \
                    echo 'not covered: finds_a_gpu: there is no GPU'; echo 'not covered: IPv6: not here'; \
                    echo 'test result: ok. 3 passed; 0 failed; 0 ignored'";
        let results = run(vec![shell("xtask partly", line)], 1).unwrap();
        assert_eq!((results.totals.passed, results.totals.ignored), (1, 2));
        let expected = ["asks: no network", "finds_a_gpu: there is no GPU", "IPv6: not here"];
        assert_eq!(results.not_covered, expected);
        assert!(results.failures.is_empty(), "{:?}", results.failures);
    }

    #[test]
    fn a_program_in_which_nothing_ran_has_failed() {
        let line = "echo 'test result: ok. 0 passed; 0 failed; 3 ignored'";
        let listed = "peerlane-tests rdma";
        let results = run(vec![shell("xtask nothing", line), shell(listed, line)], 1).unwrap();
        let [failure] = &results.failures[..] else { panic!("{:?}", results.failures) };
        assert!(failure.starts_with("xtask nothing: none of its tests ran"), "{failure}");
    }
}
