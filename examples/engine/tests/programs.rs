//! Runs each program.

use std::process::Command;

fn run(program: &str, arguments: &[&str]) -> String {
    let done = Command::new(program).args(arguments).output().unwrap();
    let (out, err) = (done.stdout, done.stderr);
    let (out, err) = (String::from_utf8(out).unwrap(), String::from_utf8(err).unwrap());
    assert!(done.status.success(), "{program} {arguments:?}: {}\n{out}{err}", done.status);
    out
}

#[test]
fn layers_are_gathered_ahead() {
    let out = run(env!("CARGO_BIN_EXE_fsdp"), &[]);
    assert_eq!(out, "3 ranks trained 4 layers for 5 steps\n");
}

#[test]
fn blocks_are_served_and_requests_cancelled() {
    let out = run(env!("CARGO_BIN_EXE_kv_service"), &[]);
    assert!(out.contains(" requests of 3 clients were served, "), "{out}");
}

#[test]
fn ranks_go_on_after_a_loss() {
    let out = run(env!("CARGO_BIN_EXE_recover"), &[]);
    assert_eq!(out, "3 of 4 ranks have made all 20 steps\n");
}

#[test]
fn a_spawner_starts_its_ranks() {
    for ranks in ["1", "2", "5"] {
        let out = run(env!("CARGO_BIN_EXE_spawner"), &[ranks]);
        assert_eq!(out, format!("{ranks} ranks have gathered 1000 elements from each other\n"));
    }
}
