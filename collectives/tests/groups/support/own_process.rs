//! Runs tests in processes of their own, because they count or limit what all threads of a process share.

use std::env;
use std::process::Command;

/// Runs one ignored test of this program in a process of its own.
pub(crate) fn run_in_own_process(test: &str) {
    let mut command = Command::new(env::current_exe().unwrap());
    let ended = command.args([test, "--exact", "--ignored", "--nocapture"]).output().unwrap();
    let printed = String::from_utf8_lossy(&ended.stdout);
    let errors = String::from_utf8_lossy(&ended.stderr);

    // A process that finds no test of this name succeeds too.
    assert!(
        ended.status.success() && printed.contains("test result: ok. 1 passed"),
        "{test}: {}\n{printed}{errors}",
        ended.status
    );
}
