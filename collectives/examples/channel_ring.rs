//! Passes a number around a ring of ranks with one-sided messages; each rank adds its own.
//!
//! `cargo run -p peerlane-collectives --example channel_ring`; every rank is a thread of this process.

use std::time::Duration;

use peerlane_collectives::bootstrap::{Bootstrap, in_process};
use peerlane_collectives::group::Group;
use peerlane_hal::Rank;
use peerlane_host as host;

fn main() {
    let sums = in_process::run(4, |bootstrap| {
        let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
        let mut group = Group::open(bootstrap, fabric)?;
        let (me, ranks) = (group.rank().0, group.ranks() as u32);
        let (next, last) = (Rank((me + 1) % ranks), Rank((me + ranks - 1) % ranks));
        let window = group.window::<i64>(2)?;
        let mut channel = group.channel(&window, 1)?;
        let mut sum = [0];
        if me > 0 {
            channel.wait(last, 0, Duration::from_secs(5))?;
            channel.read(1, &mut sum)?;
        }
        channel.write(0, &[sum[0] + i64::from(me)])?;
        channel.put_signal(next, 0..1, 1, 0)?;
        if me == 0 {
            channel.wait(last, 0, Duration::from_secs(5))?;
            channel.read(1, &mut sum)?;
        }
        group.barrier()?;
        drop((channel, window));
        group.close()?;
        Ok(sum[0])
    });
    assert_eq!(sums.expect("all ranks succeed"), [6, 0, 1, 3]);
    println!("4 ranks have added their numbers");
}
