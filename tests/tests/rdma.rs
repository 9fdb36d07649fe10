//! Runs the conformance suite on the RDMA backend if there is a device: with default options, and with signals by write over
//! two queue pairs on each of two NICs that are so small that they are always full.

use std::process::ExitCode;
use std::time::Duration;

use peerlane_rdma::{Options, SignalBy};
use peerlane_tests::{RdmaHarness, Suite};

fn main() -> ExitCode {
    let rdma = |name, change: fn(&mut Options)| {
        let mut options = Options::default();
        change(&mut options);
        RdmaHarness::new(name, options)
    };
    let tiny_by_write = rdma("rdma-tiny-by-write", |options| {
        options.signal = Some(SignalBy::Write);
        options.queue_pairs = 2;
        options.stripe_bytes = 4096;
        options.requests_max = 8;
        options.posted_bytes_max = 5000;
        options.piece_bytes_max = 4097;
        options.receives = 8;
        options.inline_bytes = 0;
        options.queue_ops = 64;
        options.spin = Some(Duration::ZERO);
    });
    Suite::new().with(rdma("rdma", |_| {})).with(tiny_by_write.nics(2)).run()
}
