//! Runs the example of tensor and data parallelism on four processes.

#[path = "../../examples/parallelism.rs"]
mod example;

use std::process::Command;
use std::time::Duration;

use peerlane_hal::Deadline;
use peerlane_test_support::ReservedPort;
use peerlane_tests::processes::Child;

#[test]
#[ignore = "started by the other test of this program"]
fn rank() {
    example::main().unwrap();
}

#[test]
fn tensor_and_data_groups_gather_at_the_same_time() {
    let port = ReservedPort::new();
    let start = |rank: usize| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--ignored", "--exact", "rank", "--test-threads=1"]);
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", "4");
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.number().to_string());
        // Without a GPU, ranks use host memory.
        command.env("CUDA_VISIBLE_DEVICES", "").env("HIP_VISIBLE_DEVICES", "");
        Child::spawn(&format!("rank {rank}"), command).unwrap()
    };
    let ranks: Vec<_> = (0..4).map(start).collect();
    let deadline = Deadline::after(Duration::from_secs(60));
    ranks.into_iter().for_each(|mut rank| rank.finish(deadline).unwrap());
}
