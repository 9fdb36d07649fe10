//! Runs the conformance suite on the RDMA backend if there is a device: with default options, over
//! two queue pairs with signals by write, and over queue pairs on two NICs that are so small that
//! they are always full.

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
    let by_write = rdma("rdma-signal-by-write", |options| {
        options.signal = Some(SignalBy::Write);
        (options.queue_pairs, options.stripe_bytes) = (2, 4096);
    });
    let tiny = rdma("rdma-tiny", |options| {
        options.stripe_bytes = 4096;
        options.requests_max = 8;
        options.posted_bytes_max = 5000;
        options.piece_bytes_max = 4097;
        options.receives = 8;
        options.inline_bytes = 0;
        options.queue_ops = 64;
        options.spin = Some(Duration::ZERO);
    });
    Suite::new().with(rdma("rdma", |_| {})).with(by_write).with(tiny.nics(2)).run()
}
