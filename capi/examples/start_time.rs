//! Prints the median time of a start of an all-gather of 8 bytes on one rank, in nanoseconds, to compare with start_time.c.

use std::time::Instant;

use peerlane::{Backend, Error, OpenOptions};

const ROUNDS: usize = 101;
const STARTS: u32 = 5000;

fn main() -> Result<(), Error> {
    let mut group = OpenOptions::default().backend(Backend::Host).from_env()?;
    let mut gather = group.all_gather::<u8>(8).prepare()?;
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        let begin = Instant::now();
        for _ in 0..STARTS {
            gather.run()?;
        }
        times.push(begin.elapsed().as_secs_f64() * 1e9 / f64::from(STARTS));
    }
    times.sort_by(f64::total_cmp);
    println!("{:.1}", times[ROUNDS / 2]);
    drop(gather);
    group.close()
}
