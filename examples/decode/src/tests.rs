//! Runs the program on four simulated GPUs: as it is, with delays, and with a call that fails.

use peerlane_simulated_driver::{in_own_process, install};

#[test]
fn decodes_and_gives_everything_back() {
    in_own_process(|| {
        let driver = install();
        super::run_ranks(4).unwrap();
        assert_eq!(driver.counter("live_allocations", None), 0);
        assert_eq!(driver.counter("live_graphs", None), 0);
    });
}

#[test]
fn decodes_whatever_the_copies_take() {
    in_own_process(|| {
        let driver = install();
        driver.set("JITTER_US", "100");
        for seed in ["1", "2", "3"] {
            driver.set("SEED", seed);
            super::run_ranks(4).unwrap();
        }
    });
}

#[test]
fn a_replay_that_fails_ends_all_ranks() {
    in_own_process(|| {
        let driver = install();
        // The error 719 is CUDA_ERROR_LAUNCH_FAILED; it is that of one replay in the middle.
        driver.fail("cuGraphLaunch", 50, 719);
        let errors = super::run_ranks(4).unwrap_err().to_string();
        let failed = errors.lines().filter(|line| line.contains("CUDA_ERROR_LAUNCH_FAILED"));
        assert_eq!(failed.count(), 1, "{errors}");
        let ended = errors.lines().filter(|line| line.contains("is lost"));
        assert_eq!(ended.count(), 3, "{errors}");
    });
}
