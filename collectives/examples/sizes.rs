//! Gathers blocks whose length changes with every start, as the tokens of an inference engine do, and compares the time with
//! that of an operation that was prepared for one length.
//!
//! `cargo run --release -p peerlane-collectives --example sizes -- [RANKS]`; every rank is a thread of this process.

use std::time::{Duration, Instant};

use peerlane_collectives::bootstrap::{Bootstrap, in_process};
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{Group, Operation, Part};
use peerlane_host as host;

const LEN_MAX: usize = 1 << 16;
const STEPS: u64 = 500;
/// The length at which the times are compared: 4 KiB.
const LEN: usize = 1024;
const ROUNDS: usize = 31;
const STARTS: u32 = 500;

fn main() {
    let ranks = std::env::args().nth(1).map_or(4, |ranks| ranks.parse().expect("a number"));
    let times = in_process::run(ranks, |bootstrap| {
        let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
        let mut group = Group::open(bootstrap, fabric)?;
        let mut gather = group.all_gather::<f32>(LEN_MAX).resizable().prepare()?;
        // All ranks draw the same lengths; an engine gets them from its scheduler.
        let random = &mut fastrand::Rng::with_seed(1);
        for step in 0..STEPS {
            let tokens = random.usize(1..=LEN_MAX);
            gather.resize(tokens)?.input_mut()?.fill(step as f32);
            gather.run()?;
            assert_eq!(gather.output()?.len(), ranks * tokens);
            assert!(gather.output()?.iter().all(|value| *value == step as f32));
        }
        let mut fixed = group.all_gather::<f32>(LEN).outputs(1).prepare()?;
        let mut times = [const { Vec::new() }; 3];
        for _ in 0..ROUNDS {
            times[0].push(time(&mut group, &mut fixed, |_, _| Ok(()))?);
            gather.resize(LEN)?;
            times[1].push(time(&mut group, &mut gather, |_, _| Ok(()))?);
            times[2].push(time(&mut group, &mut gather, |gather, start| {
                gather.resize(Part::len(LEN).output(16 * (start % 2))).map(drop)
            })?);
        }
        group.close()?;
        Ok(times.map(median))
    });
    let [fixed, same, changed] = times.expect("all ranks succeed")[0];
    println!("{ranks} ranks gathered {STEPS} lengths up to {LEN_MAX} elements");
    println!("a start of {LEN} elements, medians of {ROUNDS} rounds of {STARTS} starts on rank 0:");
    println!("prepared for this length     {fixed:?}");
    println!("resizable, always the same   {same:?} ({:.3})", ratio(same, fixed));
    println!("resized before every start   {changed:?} ({:.3})", ratio(changed, fixed));
}

/// Returns the time of a start, including what comes before it.
fn time(
    group: &mut Group,
    operation: &mut Operation<f32>,
    before: impl Fn(&mut Operation<f32>, usize) -> Result<(), Error>,
) -> Result<Duration, Error> {
    group.barrier()?;
    let begun = Instant::now();
    for start in 0..STARTS as usize {
        before(operation, start)?;
        operation.run()?;
    }
    Ok(begun.elapsed() / STARTS)
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

fn ratio(of: Duration, to: Duration) -> f64 {
    of.as_secs_f64() / to.as_secs_f64()
}
