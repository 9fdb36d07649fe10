//! Gives work from one rank to another through a ring of slots, with as much in flight as there are slots.
//!
//! The producer sends signal 0 when it has filled a slot, and the consumer sends signal 1 when it has read one.
//! `cargo run -p peerlane-collectives --example work_queue`; both ranks are threads of this process.

use std::time::Duration;

use peerlane_collectives::bootstrap::{Bootstrap, in_process};
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{Channel, Group};
use peerlane_hal::Rank;
use peerlane_host as host;

const SLOTS: usize = 8;
const SLOT_LEN: usize = 16;
const ITEMS: usize = 1000;
const SOON: Duration = Duration::from_secs(5);
const FILLED: usize = 0;
const FREE: usize = 1;

fn produce(channel: &mut Channel<i32>, consumer: Rank) -> Result<i64, Error> {
    let mut sum = 0;
    for item in 0..ITEMS {
        let begin = item % SLOTS * SLOT_LEN;
        if item >= SLOTS {
            // The consumer has taken what was in this slot, so the own copy has long been sent, too.
            channel.wait(consumer, FREE, SOON)?;
        }
        let work = [item as i32; SLOT_LEN];
        sum += work.iter().map(|value| i64::from(*value)).sum::<i64>();
        channel.write(begin, &work)?;
        channel.put_signal(consumer, begin..begin + SLOT_LEN, begin, FILLED)?;
    }
    Ok(sum)
}

fn consume(channel: &mut Channel<i32>, producer: Rank) -> Result<i64, Error> {
    let (mut sum, mut work) = (0, [0; SLOT_LEN]);
    for item in 0..ITEMS {
        channel.wait(producer, FILLED, SOON)?;
        channel.read(item % SLOTS * SLOT_LEN, &mut work)?;
        channel.signal(producer, FREE)?;
        sum += work.iter().map(|value| i64::from(*value)).sum::<i64>();
    }
    Ok(sum)
}

fn main() {
    let sums = in_process::run(2, |bootstrap| {
        let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
        let mut group = Group::open(bootstrap, fabric)?;
        let window = group.window::<i32>(SLOTS * SLOT_LEN)?;
        let mut channel = group.channel(&window, 2)?;
        let sum = match group.rank() {
            Rank(0) => produce(&mut channel, Rank(1))?,
            _ => consume(&mut channel, Rank(0))?,
        };
        group.barrier()?;
        drop((channel, window));
        group.close()?;
        Ok(sum)
    });
    let sums = sums.expect("both ranks succeed");
    assert_eq!(sums[0], sums[1]);
    println!("{ITEMS} items went through {SLOTS} slots");
}
