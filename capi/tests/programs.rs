//! Compiles the C programs with all warnings, and runs each as four processes.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use peerlane_c as _;
use peerlane_test_support::{ReservedPort, not_covered};

const RANKS: usize = 4;

/// Compiles a program against the shared library of this build.
fn compile(compiler: &str, source: &str) -> PathBuf {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let test = std::env::current_exe().unwrap();
    let libraries = test.parent().unwrap();
    // Tests compile at the same time, also the same program.
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let name = format!("{source}-{compiler}-{}", NEXT.fetch_add(1, Ordering::Relaxed));
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let compiled = Command::new(compiler)
        .args([
            if source.ends_with(".c") { "-std=c11" } else { "-std=c++17" },
            "-O1",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-pthread",
            "-I",
        ])
        .arg(package.join("include"))
        .arg(package.join("examples").join(source))
        .arg("-o")
        .arg(&program)
        .arg("-L")
        .arg(libraries)
        // The old tag precedes `LD_LIBRARY_PATH`, in which Cargo has the library of an earlier `cargo build`.
        .args(["-lpeerlane_c", &format!("-Wl,--disable-new-dtags,-rpath,{}", libraries.display())])
        .output()
        .unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    program
}

/// Runs a program as `ranks` processes, which all must succeed.
fn run(program: &Path, ranks: usize) {
    run_with(program, &[], ranks);
}

/// Runs a program with arguments as `ranks` processes, which all must succeed.
fn run_with(program: &Path, arguments: &[&str], ranks: usize) {
    let port = ReservedPort::new();
    let children = spawn(program, arguments, ranks, &port, Stdio::inherit);
    let ended = children.into_iter().map(|mut child| child.wait().unwrap().success());
    let ended: Vec<bool> = ended.collect();
    assert_eq!(ended, vec![true; ranks], "{} {arguments:?}", program.display());
}

/// Runs a program as `ranks` processes, and returns the lines that all have printed, sorted.
fn printed(program: &Path, ranks: usize) -> Vec<String> {
    let port = ReservedPort::new();
    let mut lines = Vec::new();
    for child in spawn(program, &[], ranks, &port, Stdio::piped) {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success());
        lines.extend(String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned));
    }
    lines.sort();
    lines
}

/// Starts a program as `ranks` processes, as a launcher does, which find each other at the port.
fn spawn(
    program: &Path,
    arguments: &[&str],
    ranks: usize,
    port: &ReservedPort,
    output: fn() -> Stdio,
) -> Vec<Child> {
    let spawn = |rank: usize| {
        Command::new(program)
            .args(arguments)
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", ranks.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.number().to_string())
            .stdout(output())
            .spawn()
            .unwrap()
    };
    (0..ranks).map(spawn).collect()
}

fn compile_and_run(source: &str, ranks: usize) {
    let compilers = if source.ends_with(".c") { ["cc", "clang"] } else { ["c++", "clang++"] };
    for (number, compiler) in compilers.into_iter().enumerate() {
        // Not every machine has the second one.
        if number == 0 || Command::new(compiler).arg("--version").output().is_ok() {
            run(&compile(compiler, source), ranks);
        }
    }
}

/// The page of the book that shows programs in C.
const PAGE: &str = include_str!("../../docs/book/uses/c.md");

/// Returns the programs and parts of programs in C on [`PAGE`].
fn code_of_page() -> impl Iterator<Item = &'static str> {
    PAGE.split("```c\n").skip(1).filter_map(|rest| rest.split("```").next())
}

#[test]
fn the_program_of_the_book_prints_what_its_page_shows() {
    let code = code_of_page().find(|code| code.contains("int main(")).unwrap();
    let source = Path::new(env!("CARGO_TARGET_TMPDIR")).join("first_gather.c");
    std::fs::write(&source, code).unwrap();
    let program = compile("cc", source.to_str().unwrap());

    for ranks in [1, 4] {
        let is_shown =
            |line: &&str| line.starts_with("rank ") && line.contains(&format!(" of {ranks}: "));
        let mut shown: Vec<&str> = PAGE.lines().filter(is_shown).collect();
        shown.sort_unstable();
        assert_eq!(printed(&program, ranks), shown);
    }
}

#[test]
fn parts_of_programs_in_the_book_compile() {
    let source = Path::new(env!("CARGO_TARGET_TMPDIR")).join("parts.c");
    let mut text = String::from("#include \"peerlane.h\"\n");
    for (number, part) in code_of_page().filter(|code| !code.contains("int main(")).enumerate() {
        text += &format!("void part_{number}(peerlane_group *group) {{\n{part}}}\n");
    }
    std::fs::write(&source, text + "int main(void) { return 0; }\n").unwrap();
    compile("cc", source.to_str().unwrap());
}

#[test]
fn blocks_depart_and_arrive_one_after_the_other() {
    compile_and_run("blocks.c", RANKS);
}

#[test]
fn blocks_are_gathered_and_summed() {
    compile_and_run("all_gather.c", RANKS);
}

#[test]
fn sums_have_lengths_and_contributors_of_their_own() {
    for ranks in [1, 2, 5] {
        compile_and_run("reductions.c", ranks);
    }
}

#[test]
fn puts_and_signals_go_around_a_ring() {
    compile_and_run("ring.c", RANKS);
}

#[test]
fn starts_have_sizes_of_their_own() {
    compile_and_run("sizes.c", RANKS);
}

#[test]
fn calls_need_no_preparation() {
    for ranks in [1, 2, RANKS] {
        compile_and_run("calls.c", ranks);
    }
}

#[test]
fn operations_that_are_prepared_together_have_lengths_for_each_pair() {
    for ranks in [1, 2, 3] {
        compile_and_run("pairs.c", ranks);
    }
}

#[test]
fn tokens_are_dispatched_to_experts() {
    for ranks in [1, 2, RANKS] {
        compile_and_run("experts.c", ranks);
    }
}

#[test]
fn an_event_loop_waits_for_starts_and_the_end_of_a_group() {
    compile_and_run("events.c", 3);
}

#[test]
fn operations_run_beside_compute_as_their_group_unless_they_say_otherwise() {
    compile_and_run("beside_compute.c", 2);
}

#[test]
fn a_lost_rank_is_named() {
    compile_and_run("lost_rank.c", RANKS);
}

#[test]
fn arguments_that_one_rank_refuses_are_errors_on_all() {
    compile_and_run("refusals.c", RANKS);
}

#[test]
fn the_interface_of_cpp_owns_its_handles() {
    compile_and_run("wrapper.cpp", RANKS);
}

#[test]
fn handles_of_another_copy_of_the_library_are_refused() {
    let program = compile("cc", "twice.c");
    let library = std::env::current_exe().unwrap().with_file_name("libpeerlane_c.so");
    let copy = program.with_file_name("libpeerlane_copy.so");
    std::fs::copy(library, &copy).unwrap();
    assert!(Command::new(program).arg(copy).status().unwrap().success());
}

#[test]
fn a_release_that_failed_is_tried_again() {
    compile_and_run("release.c", RANKS);
}

#[test]
fn arenas_in_files_are_windows() {
    for ranks in [2, 3] {
        compile_and_run("arena.c", ranks);
    }
}

#[test]
fn windows_end_with_their_group() {
    compile_and_run("window_ends.c", 1);
}

#[test]
fn destroying_an_object_waits_for_the_threads_that_use_it() {
    compile_and_run("destroy.c", 1);
}

#[test]
fn memcheck_reports_nothing() {
    if Command::new("valgrind").arg("--version").output().is_err() {
        not_covered("memcheck_reports_nothing", "valgrind is not installed");
        return;
    }
    let suppressions = Path::new(env!("CARGO_MANIFEST_DIR")).join("valgrind.supp");
    let suppressions = format!("--suppressions={}", suppressions.display());
    for source in ["all_gather.c", "ring.c"] {
        let program = compile("cc", source);
        let program = program.to_str().unwrap();
        let options = ["--quiet", "--error-exitcode=9", "--leak-check=full"];
        let arguments = [&options[..], &[&suppressions, program]].concat();
        run_with(Path::new("valgrind"), &arguments, 2);
    }
}

#[test]
fn threads_use_a_channel_while_others_wait_on_it() {
    compile_and_run("threads.c", 2);
}

#[test]
fn misuses_are_errors() {
    compile_and_run("misuses.c", 1);
}

#[test]
fn calls_while_a_thread_ends_return_their_status() {
    compile_and_run("thread_ends.c", 1);
}

#[test]
fn destructors_of_cpp_call_the_library() {
    compile_and_run("destructors.cpp", 1);
}

#[test]
fn a_deadline_that_has_passed_ends_a_wait_at_once() {
    compile_and_run("deadlines.cpp", 2);
}

#[test]
fn a_group_is_opened_again_with_the_same_environment() {
    let program = compile("cc", "reopen.c");
    for arguments in [&[][..], &["barrier"]] {
        run_with(&program, arguments, 2);
    }
}
