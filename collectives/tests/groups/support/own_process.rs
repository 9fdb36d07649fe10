//! Runs tests in processes of their own, because they count or limit what all threads of a process share.

use std::env;
use std::process::Command;

/// Names the test for which this process was started.
const OWN_TEST: &str = "PEERLANE_TEST_OWN_PROCESS";

/// Runs the body of `test`, which calls this, in a process of its own.
pub(crate) fn run_in_own_process(test: &str, body: impl FnOnce()) {
    if env::var(OWN_TEST).is_ok_and(|own| own == test) {
        return body();
    }

    let mut command = Command::new(env::current_exe().unwrap());
    let command = command.args([test, "--exact", "--nocapture"]).env(OWN_TEST, test);
    let ended = command.output().unwrap();
    let printed = String::from_utf8_lossy(&ended.stdout);
    let errors = String::from_utf8_lossy(&ended.stderr);

    // A process that finds no test of this name succeeds too.
    assert!(
        ended.status.success() && printed.contains("test result: ok. 1 passed"),
        "{test}: {}\n{printed}{errors}",
        ended.status
    );
}
