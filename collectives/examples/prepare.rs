//! Measures how long the preparation of an all-gather takes: with memory of the heap, with buffers of the caller whose
//! remote keys are exchanged, and for many operations at once.
//!
//! `cargo run --release -p peerlane-collectives --example prepare -- [RANKS]`; every rank is a thread of this process.

use std::time::{Duration, Instant};

use peerlane_collectives::bootstrap::{Bootstrap, in_process};
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{Group, Operation};
use peerlane_host as host;

const LEN: usize = 1024;
const ROUNDS: usize = 31;
const BATCH: usize = 64;

fn main() {
    let ranks = std::env::args().nth(1).map_or(4, |ranks| ranks.parse().expect("a number"));
    let times = in_process::run(ranks, |bootstrap| {
        let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
        let mut group = Group::open(bootstrap, fabric)?;
        let (mut heap, mut own, mut batch) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            heap.push(timed(&mut group, |group| group.all_gather::<f32>(LEN).prepare())?);
            own.push(timed(&mut group, with_own_buffers)?);
            batch.push(timed(&mut group, |group| {
                let all = (0..BATCH).map(|_| group.all_gather::<f32>(LEN).describe()).collect();
                group.prepare_all(all)
            })?);
        }
        group.close()?;
        Ok([heap, own, batch].map(median))
    });
    let [heap, own, batch] = times.expect("all ranks succeed")[0];
    println!("{ranks} ranks, {ROUNDS} rounds, medians of rank 0");
    println!("heap                 {heap:?}");
    println!("buffers of the caller {own:?} ({:.1} times)", ratio(own, heap));
    println!("{BATCH} at once, each    {:?}", batch / BATCH as u32);
}

fn with_own_buffers(group: &mut Group) -> Result<Operation<f32>, Error> {
    let (input, output) = (group.allocate(LEN)?, group.allocate(LEN * group.ranks())?);
    group.all_gather::<f32>(LEN).input(input).output(output).prepare()
}

/// Returns the time of a preparation that all ranks begin together; the operation is dropped afterwards.
fn timed<O>(
    group: &mut Group,
    prepare: impl FnOnce(&mut Group) -> Result<O, Error>,
) -> Result<Duration, Error> {
    group.barrier()?;
    let begun = Instant::now();
    let prepared = prepare(group)?;
    let time = begun.elapsed();
    drop(prepared);
    Ok(time)
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

fn ratio(one: Duration, other: Duration) -> f64 {
    one.as_secs_f64() / other.as_secs_f64()
}
